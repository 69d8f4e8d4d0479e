// Activations of one superblock as tensor-core operands in registers: quantised on the spot or loaded.
//
// Both ways give x = scale * (256*hi + lo) with |256*hi + lo| <= 28160 and one scale per token and 256 values.
// Operand column 2*t holds hi of token t, column 2*t + 1 lo; lane 4*g + q holds column g.
#pragma once
#include "kquant_blocks.cuh"
#include "ptx.cuh"

namespace nextn {

// 256 * 110: hi and lo fit in int8, and sums over 32 values in what min_digit takes.
constexpr float kQUANT_RANGE = 28160.0f;

// Scale and its inverse for a superblock whose largest |x| has these bits.  Below 1e-30 all counts as zero (the inverse
// would overflow); NaN and anything from 2^126 up, where the quick division ends, give a NaN scale, so that they reach the
// output.
struct QuantScale {
    float scale, inverse;
};
__device__ __forceinline__ QuantScale quant_scale(uint32_t max_bits) {
    const float amax = __uint_as_float(max_bits);
    return {max_bits >= 0x7e800000u ? __uint_as_float(0x7fc00000u) : __fmul_rn(amax, 1.0f / kQUANT_RANGE),
            amax > 1e-30f ? __fdividef(kQUANT_RANGE, amax) : 0.0f};
}

// Four values as hi bytes and lo bytes, and their sum.
struct QuantWord {
    uint32_t hi, lo;
    int sum;
};
__device__ __forceinline__ QuantWord quantize4(const float4& v, float inverse) {
    // there floats are 1 apart: the low bits are the rounded value + 128
    constexpr float kMAGIC = 12582912.0f + 128.0f;
    constexpr uint32_t kBIAS = 0x4b400000u + 128;
    const auto biased = [&](float x) { return __float_as_uint(__fmaf_rn(x, inverse, kMAGIC)); };
    const uint32_t a[4] = {biased(v.x), biased(v.y), biased(v.z), biased(v.w)};
    const uint32_t first = __byte_perm(a[0], a[1], 0x5410), second = __byte_perm(a[2], a[3], 0x5410);
    return {__byte_perm(first, second, 0x7531), __byte_perm(first, second, 0x6420) ^ 0x80808080u,
            static_cast<int>(a[0] + a[1] + a[2] + a[3] - 4 * kBIAS)};
}

// Sums over 32 values against the mins of Q4_K/Q5_K: sum = 1024*H + L, L in [-512, 511], |H| <= 880, digit = first +
// 9 * rest with both in int8.  The operand's k slots 0 to 15 hold `first` and `rest` of sub-blocks 0..7 (against m),
// the others `rest` twice (against 4m), so one m16n8k32 sums all mins exactly.
struct MinDigit {
    int first, rest;
};
__device__ __forceinline__ MinDigit min_digit(int sum, bool low) {
    const int l = ((sum + 512) & 1023) - 512, v = low ? l : (sum - l) >> 10, rest = (v * 57 + 256) >> 9;
    return {v - 9 * rest, rest};
}

// What sums over all mins come to, rounded once.  Of NT groups of tokens: in integers registers would spill for two.
template <int NT>
__device__ __forceinline__ float min_sum(int high, int low) {
    return NT == 1 ? static_cast<float>(1024 * high + low)
                   : __fmaf_rn(1024.0f, static_cast<float>(high), static_cast<float>(low));
}

// Sums over 16 values against the scales of Q6_K: 128*rest + low, rest = 128*d2 + d1, low and d1 within +-64, d2 less.
// The first operand has d2 in column hi and d1 in lo, the second 0 and low.
struct OffsetDigits {
    int rest, low;
};
__device__ __forceinline__ OffsetDigits offset_digits(int sum) {
    const int low = ((sum + 64) & 127) - 64;
    return {(sum - low) >> 7, low};
}
struct OffsetColumn {
    int first, second;
};
__device__ __forceinline__ OffsetColumn offset_column(int sum, bool low) {
    const OffsetDigits d = offset_digits(sum);
    const int d1 = ((d.rest + 64) & 127) - 64;
    return {low ? d1 : (d.rest - d1) >> 7, low ? d.low : 0};
}

__device__ __forceinline__ uint32_t pack_bytes(int a, int b, int c, int d) {
    return (a & 255) | (b & 255) << 8 | (c & 255) << 16 | static_cast<uint32_t>(d) << 24;
}

// x^2 summed over a superblock.  Values are split 8 at a time among 32 places, place 4*s + q holding values 4q.. and
// 16+4q.. of 32-value step s; the sum runs over each place in order, then pairs of places at distance 4, 8, 1, 2, 16.
__device__ __forceinline__ float squares_of(const float4& a, const float4& b) {
    float v = __fmul_rn(a.x, a.x);
    v = __fmaf_rn(a.y, a.y, v);
    v = __fmaf_rn(a.z, a.z, v);
    v = __fmaf_rn(a.w, a.w, v);
    v = __fmaf_rn(b.x, b.x, v);
    v = __fmaf_rn(b.y, b.y, v);
    v = __fmaf_rn(b.z, b.z, v);
    return __fmaf_rn(b.w, b.w, v);
}
// Sum over all places, one a lane, in every lane.
__device__ __forceinline__ float sum_of_places(float v) {
#pragma unroll
    for (const int d : {4, 8, 1, 2, 16}) v = __fadd_rn(v, __shfl_xor_sync(~0u, v, d));
    return v;
}
__device__ __forceinline__ float4 times(const float4& a, const float4& b) {
    return make_float4(__fmul_rn(a.x, b.x), __fmul_rn(a.y, b.y), __fmul_rn(a.z, b.z), __fmul_rn(a.w, b.w));
}
__device__ __forceinline__ float4 times(const float4& a, float f) { return times(a, make_float4(f, f, f, f)); }
__device__ __forceinline__ uint32_t max_bits(uint32_t bits, const float4& v) {
    bits = max(max(bits, __float_as_uint(v.x) & 0x7fffffffu), __float_as_uint(v.y) & 0x7fffffffu);
    return max(max(bits, __float_as_uint(v.z) & 0x7fffffffu), __float_as_uint(v.w) & 0x7fffffffu);
}
__device__ __forceinline__ float rms_factor(float squares, int k, float eps) {
    return __frsqrt_rn(__fmaf_rn(squares, 1.0f / k, eps));
}

// TYPE kANY_KQUANT: an operand against matrices of any type.
constexpr int kANY_KQUANT = -1;

template <int TYPE, int NT>
struct TokenOperand {
    static constexpr bool kSIX = TYPE == kNEXTN_Q6_K || TYPE == kANY_KQUANT, kAFFINE = TYPE != kNEXTN_Q6_K;

    uint32_t frag[NT][16];    // [2*s], [2*s + 1]: values 4q.. and 16+4q.. of 32-value step s
    uint2 sums[NT], six[NT];  // against the mins of Q4_K and Q5_K; against the scales of Q6_K
    float scale[NT];          // of token lane%4

    __device__ __forceinline__ void load(const QuantizedRows& x, int superblock, int lane) {
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            const int64_t slot = static_cast<int64_t>(superblock) * NT + n;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const uint4 v = __ldcg(reinterpret_cast<const uint4*>(x.frag + slot * 2048) + 32 * i + lane);
                frag[n][4 * i] = v.x;
                frag[n][4 * i + 1] = v.y;
                frag[n][4 * i + 2] = v.z;
                frag[n][4 * i + 3] = v.w;
            }
            if (kAFFINE) sums[n] = __ldcg(reinterpret_cast<const uint2*>(x.sum32 + slot * 256) + lane);
            if (kSIX) six[n] = __ldcg(reinterpret_cast<const uint2*>(x.sum16 + slot * 256) + lane);
            scale[n] = __ldcg(x.scale + slot * kGroupTokens + (lane & 3));
        }
    }

    // The values of a superblock of a group's tokens that a lane quantises: 16 apart, v[0] at place(lane) of row(..).
    static __device__ __forceinline__ int place(int lane) { return (lane & 4 ? 128 : 0) + 4 * (lane & 3); }
    static __device__ __forceinline__ int row(int n, int t, int lane) {
        return min(kGroupTokens * n + (lane >> 3), t - 1);  // tokens past t repeat the last one
    }
    // Over the lanes of a token: the sum of x^2, the bits of the largest |value|.
    static __device__ __forceinline__ float squares_of_lanes(const float4 (&v)[8]) {
        // distances 4 and 8 are this lane's own four places, 1 and 2 its neighbours q, 16 its partner
        float sum = __fadd_rn(__fadd_rn(squares_of(v[0], v[1]), squares_of(v[2], v[3])),
                              __fadd_rn(squares_of(v[4], v[5]), squares_of(v[6], v[7])));
#pragma unroll
        for (int d = 1; d < 8; d <<= 1) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, d));
        return sum;
    }
    static __device__ __forceinline__ uint32_t max_bits_of_lanes(const float4 (&v)[8]) {
        uint32_t bits = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) bits = max_bits(bits, v[i]);
#pragma unroll
        for (int d = 1; d < 8; d <<= 1) bits = max(bits, __shfl_xor_sync(~0u, bits, d));
        return bits;
    }

    // Quantise this superblock of x [t, .] (stride ldx), times norm where given.  squares[n]: the sum of x^2 over the
    // superblock of token 4n + lane/8.
    __device__ __forceinline__ void quantize(const float* x, int64_t ldx, int t, const float* norm, int superblock,
                                             int lane, float (&squares)[NT]) {
        const int64_t at = static_cast<int64_t>(superblock) * kSUPER + place(lane);
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            const float* from = x + row(n, t, lane) * ldx + at;
            float4 v[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) v[i] = __ldcg(reinterpret_cast<const float4*>(from + 16 * i));
            squares[n] = squares_of_lanes(v);
#pragma unroll
            for (int i = 0; i < 8; ++i)
                if (norm) v[i] = times(v[i], __ldg(reinterpret_cast<const float4*>(norm + at + 16 * i)));
            quantize_values(n, v, max_bits_of_lanes(v), lane);
        }
    }

    // Group n from the values that this lane has (see quantize); bits: of the largest |value| of its token.
    __device__ __forceinline__ void quantize_values(int n, const float4 (&v)[8], uint32_t bits, int lane) {
        const int q = lane & 3;
        const bool low = lane & 4;
        const QuantScale own = quant_scale(bits);
        scale[n] = __shfl_sync(~0u, own.scale, 8 * q);
        int sub[8];  // sums over 16 of this lane's half, four values of each so far
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const QuantWord w = quantize4(v[i], own.inverse);
            const uint32_t other = __shfl_xor_sync(~0u, low ? w.hi : w.lo, 4);
            frag[n][i] = low ? other : w.hi;      // steps 0-3
            frag[n][8 + i] = low ? w.lo : other;  // steps 4-7
            sub[i] = w.sum;
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            sub[i] += __shfl_xor_sync(~0u, sub[i], 1);
            sub[i] += __shfl_xor_sync(~0u, sub[i], 2);
        }
        // this lane needs 4 sums: of the half that it or its partner (lane ^ 4) has
        int need[4];
        if constexpr (kSIX) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int mine = q & 1 ? sub[4 + i] : sub[i], theirs = __shfl_xor_sync(~0u, mine, 4);
                need[i] = static_cast<bool>(q & 2) == low ? mine : theirs;
            }
            six[n] = pack_six(need, low);
        }
        if constexpr (kAFFINE) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int mine = sub[2 * i] + sub[2 * i + 1], theirs = __shfl_xor_sync(~0u, mine, 4);
                need[i] = static_cast<bool>(q & 1) == low ? mine : theirs;
            }
            sums[n] = pack_affine(need, q, low);
        }
    }

    // Operand words from the sums that a lane needs: over 16 values 4q .. 4q+3, or over 32 values 4*(q%2) ...
    static __device__ __forceinline__ uint2 pack_six(const int (&need)[4], bool low) {
        OffsetColumn d[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) d[i] = offset_column(need[i], low);
        return make_uint2(pack_bytes(d[0].first, d[1].first, d[2].first, d[3].first),
                          pack_bytes(d[0].second, d[1].second, d[2].second, d[3].second));
    }
    static __device__ __forceinline__ uint2 pack_affine(const int (&need)[4], int q, bool low) {
        MinDigit d[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) d[i] = min_digit(need[i], low);
        const uint32_t rest = pack_bytes(d[0].rest, d[1].rest, d[2].rest, d[3].rest);
        return make_uint2(q < 2 ? pack_bytes(d[0].first, d[1].first, d[2].first, d[3].first) : rest, rest);
    }
};

}  // namespace nextn
