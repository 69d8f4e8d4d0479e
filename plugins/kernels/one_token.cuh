// Dot product of 16 weight rows, one superblock wide, with one token on int8 tensor cores.
//
// Hi and lo of one token fill two of an mma's eight columns.  So the four pairs of columns take four sub-blocks instead:
// pair p of the operand is zero but where sub-block p is, and lane 4*g + q gets the sums of sub-block q of every four.  It
// multiplies them by scales of its own; the integers meet at the end.  They are those of dot_affine and dot_q6_k, so the
// float results have the same bits.
#pragma once
#include "kquant_blocks.cuh"
#include "ptx.cuh"
#include "token_operand.cuh"

namespace nextn {

// From the operand of a token that may stand in any group of tokens; columns of other tokens do not matter.
template <int TYPE>
struct OneToken {
    uint32_t frag[16];  // Q4_K, Q5_K: [group of four sub-blocks][mma][half]; Q6_K: [group][mma's halves]
    uint2 sums;         // as TokenOperand's, in every pair of columns
    float scale;

    // All lanes of a warp.
    __device__ __forceinline__ void take(const TokenOperand<TYPE, 1>& x, bool, int lane) {
        const int own = lane & 7, pair = lane >> 3;
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const uint32_t v = __shfl_sync(~0u, x.frag[0][i], own);
            frag[i] = pair == (i >> 1 & 3) ? v : 0;
        }
        sums = make_uint2(__shfl_sync(~0u, x.sums[0].x, own), __shfl_sync(~0u, x.sums[0].y, own));
        scale = __shfl_sync(~0u, x.scale[0], 0);
    }
};

// Group 2h + lh has the sub-blocks 8h + 2j + lh, j = 0..3: those whose weights share words.
template <>
struct OneToken<kNEXTN_Q6_K> {
    uint32_t frag[16];
    int start[4][4];    // what the group's sums begin with: -32 * sum of the sub-block's values, hi and lo, for both rows
    float scale;

    // shifted: superblocks begin 2 bytes into a word (see words_of).
    __device__ __forceinline__ void take(const TokenOperand<kNEXTN_Q6_K, 1>& x, bool shifted, int lane) {
        const int own = lane & 7, pair = lane >> 3, q = lane & 3;
#pragma unroll
        for (int i = 0; i < 16; ++i) {  // sub-block i
            uint32_t v = __shfl_sync(~0u, x.frag[0][i], own);
            const uint32_t before = __shfl_sync(~0u, v, (lane & ~3) | ((q + 3) & 3));
            if (shifted) v = __byte_perm(before, v, q ? 0x5432 : 0x3254);
            const int j = i >> 1 & 3;
            frag[4 * (2 * (i >> 3) + (i & 1)) + j] = pair == j ? v : 0;
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int from = 2 * h + (q >> 1);
            const uint32_t d2 = __shfl_sync(~0u, x.six[0].x, from), d1 = __shfl_sync(~0u, x.six[0].x, 4 + from),
                           d0 = __shfl_sync(~0u, x.six[0].y, 4 + from);
#pragma unroll
            for (int lh = 0; lh < 2; ++lh) {
                const auto digit = [&](uint32_t word) { return static_cast<int8_t>(word >> (8 * (2 * (q & 1) + lh))); };
                const int hi = -2048 * digit(d2) - 16 * digit(d1), lo = -32 * digit(d0);
                // through the shuffle unit, or the compiler would compute and copy them anew for every tile
#pragma unroll
                for (int i = 0; i < 4; ++i) start[2 * h + lh][i] = __shfl_sync(~0u, i & 1 ? lo : hi, lane);
            }
        }
        scale = __shfl_sync(~0u, x.scale[0], 0);
    }
};

// Sums over the four lanes of a row group; lanes q < 2 get row g's hi and lo, the others row g+8's.
struct HiLo {
    int hi, lo;
};
__device__ __forceinline__ HiLo sum_of_four(const int (&acc)[4], bool upper) {
    HiLo s = {upper ? acc[2] : acc[0], upper ? acc[3] : acc[1]};
    s.hi += __shfl_xor_sync(~0u, upper ? acc[0] : acc[2], 2);
    s.lo += __shfl_xor_sync(~0u, upper ? acc[1] : acc[3], 2);
    s.hi += __shfl_xor_sync(~0u, s.hi, 1);
    s.lo += __shfl_xor_sync(~0u, s.lo, 1);
    return s;
}

__device__ __forceinline__ float float_of(const HiLo& s) {
    return __fmaf_rn(256.0f, static_cast<float>(s.hi), static_cast<float>(s.lo));
}

// Q4_K and Q5_K.  r: this superblock of row g in shared memory, by a pointer or its address, stride8: bytes to row g+8.  Returns the lane's row's sum.
// loaded(): called when the superblock has been read.  y: of earlier superblocks.
template <int TYPE, typename P, typename F>
__device__ __forceinline__ float dot_one(P r, int stride8, bool, const OneToken<TYPE>& x, int lane,
                                         F loaded, float y = 0.0f) {
    constexpr uint32_t kNIBBLES = 0x0f0f0f0fu;
    constexpr bool kFIFTH = TYPE == kNEXTN_Q5_K;
    const int q = lane & 3;
    const bool upper = q & 2;
    const uint4 h0 = load_4_words(r), h8 = load_4_words(r + stride8);
    const ScaleMin s0 = unpack_scale_min(h0.y, h0.z, h0.w), s8 = unpack_scale_min(h8.y, h8.z, h8.w);
    const P p = r + 4 * q;
    uint32_t high[4];  // fifth bits: rows g, g+8 at bytes 4q.., then at 16+4q..
    if (kFIFTH)
#pragma unroll
        for (int i = 0; i < 4; ++i) high[i] = load_word(p + 16 + 16 * (i >> 1) + (i & 1 ? stride8 : 0));
    uint32_t w[4][4];
#pragma unroll
    for (int i = 0; i < 16; ++i)
        w[i >> 2][i & 3] = load_word(p + (kFIFTH ? 48 : 16) + 32 * (i >> 2) + (i & 1 ? stride8 : 0) + 16 * (i >> 1 & 1));
    loaded();
    int acc[4] = {};
#pragma unroll
    for (int group = 0; group < 2; ++group) {
        int sum[4] = {};
#pragma unroll
        for (int c = 2 * group; c < 2 * group + 2; ++c) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int s = 2 * c + half;
                uint32_t a[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    if (!kFIFTH) {
                        a[i] = w[c][i] & (half ? ~kNIBBLES : kNIBBLES);  // high nibbles stay where they are: 16 times as much
                    } else {
                        a[i] = (half ? w[c][i] >> 4 : w[c][i]) & kNIBBLES;
                        a[i] |= (s < 4 ? high[i] << (4 - s) : high[i] >> (s - 4)) & 0x10101010u;
                    }
                }
                mma_u8_s8_k32_add(sum, a, x.frag[2 * s], x.frag[2 * s + 1], sum);
            }
        }
        const int sc0 = __byte_perm(s0.sc[group], 0, 0x4440 + q), sc8 = __byte_perm(s8.sc[group], 0, 0x4440 + q);
        acc[0] += sc0 * sum[0];
        acc[1] += sc0 * sum[1];
        acc[2] += sc8 * sum[2];
        acc[3] += sc8 * sum[3];
    }
    if (!kFIFTH) {
        const int shift = q & 1 ? 4 : 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[i] >>= shift;
    }
    const uint32_t m0 = q & 1 ? s0.mn[1] : s0.mn[0], m8 = q & 1 ? s8.mn[1] : s8.mn[0];
    int mins[4];
    mma_u8_k32(mins, m0, m8, m0 << 2, m8 << 2, x.sums.x, x.sums.y);
    const float min = min_sum<1>(upper ? mins[2] : mins[0], upper ? mins[3] : mins[1]);
    const uint32_t header = upper ? h8.x : h0.x;
    const float2 d = __half22float2(*reinterpret_cast<const __half2*>(&header));
    const float sum = float_of(sum_of_four(acc, upper));
    return __fmaf_rn(x.scale, __fmaf_rn(-d.y, min, __fmul_rn(d.x, sum)), y);
}

// Q6_K.  r: 2-byte aligned, at 2 modulo 4 if `shifted`.  Words are read where words are: of a shifted superblock word i of
// lane q >= 1 has values 4q-2 .. 4q+1 of 16, lane 0 puts 0, 1, 14, 15 together, and so does its operand.
template <typename P, typename F>
__device__ __forceinline__ float dot_one(P r, int stride8, bool shifted, const OneToken<kNEXTN_Q6_K>& x,
                                         int lane, F loaded, float y = 0.0f) {
    const int q = lane & 3;
    const bool upper = q & 2;
    const uint32_t select = shifted && q == 0 ? 0x5432 : 0x3210;
    const P p = r - (shifted ? 2 : 0) + 4 * q;
    uint32_t w[2][12];  // [row half]: 128 bytes of low bits, 64 of high ones, 4 of each 16
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        uint32_t here = load_word(p + (row ? stride8 : 0));
#pragma unroll
        for (int i = 0; i < 12; ++i) {
            const uint32_t next = load_word(p + (row ? stride8 : 0) + 16 * (i + 1));
            w[row][i] = __byte_perm(here, next, select);
            here = next;
        }
    }
    uint32_t scales[2][2];  // [h][row half]: of lh = 0, 1
#pragma unroll
    for (int i = 0; i < 4; ++i)
        scales[i >> 1][i & 1] =
            load_half_word(r + (i & 1 ? stride8 : 0) + 192 + 8 * (i >> 1) + 2 * q);
    const __half d = __ushort_as_half(load_half_word(r + (upper ? stride8 : 0) + 208));
    loaded();
    int acc[4] = {};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int lh = 0; lh < 2; ++lh) {
            uint32_t a[4][2];
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                const uint32_t low0 = w[row][4 * h + lh], low1 = w[row][4 * h + 2 + lh], high = w[row][8 + 2 * h + lh];
                unpack_quarters(a, row, low0, low1, high);
            }
            const int group = 2 * h + lh;
            int sum[4];
            const uint32_t first[4] = {a[0][0], a[0][1], a[1][0], a[1][1]};
            const uint32_t second[4] = {a[2][0], a[2][1], a[3][0], a[3][1]};
            mma_u8_s8_k32_add(sum, first, x.frag[4 * group], x.frag[4 * group + 1], x.start[group]);
            mma_u8_s8_k32_add(sum, second, x.frag[4 * group + 2], x.frag[4 * group + 3], sum);
            const int sc0 = lh ? signed_byte_of<1>(scales[h][0]) : signed_byte_of<0>(scales[h][0]);
            const int sc8 = lh ? signed_byte_of<1>(scales[h][1]) : signed_byte_of<0>(scales[h][1]);
            acc[0] += sc0 * sum[0];
            acc[1] += sc0 * sum[1];
            acc[2] += sc8 * sum[2];
            acc[3] += sc8 * sum[3];
        }
    }
    return __fmaf_rn(x.scale, __fmul_rn(__half2float(d), float_of(sum_of_four(acc, upper))), y);
}

}  // namespace nextn
