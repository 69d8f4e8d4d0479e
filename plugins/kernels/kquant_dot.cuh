// Dot product of 16 weight rows, one superblock wide, with up to 8 tokens on int8 tensor cores.
//
// Everything inside a superblock is integer arithmetic, hence exact and independent of how many tokens are present:
//   sum over sub-blocks of sc * (q . a), a = 256*hi + lo in two columns of one mma
// then one float step per superblock.  Lane l = 4*g + q works on rows g, g+8 and token q of each group of four.
#pragma once
#include "kquant_blocks.cuh"
#include "ptx.cuh"
#include "token_operand.cuh"

namespace nextn {

__device__ __forceinline__ void multiply_add(int (&acc)[4], const int (&dot)[4], int scale_g, int scale_g8) {
    acc[0] += scale_g * dot[0];
    acc[1] += scale_g * dot[1];
    acc[2] += scale_g8 * dot[2];
    acc[3] += scale_g8 * dot[3];
}

__device__ __forceinline__ float hi_lo(int hi, int lo) {
    return __fmaf_rn(256.0f, static_cast<float>(hi), static_cast<float>(lo));
}

__device__ __forceinline__ uint32_t load_word(const uint8_t* p) { return *reinterpret_cast<const uint32_t*>(p); }

// Q4_K and Q5_K.  r0, r8: this superblock of rows g and g+8, 16-byte aligned in shared memory.
template <int TYPE, int NT, int OPERAND>
__device__ __forceinline__ void dot_affine(const uint8_t* r0, const uint8_t* r8, const TokenOperand<OPERAND, NT>& x,
                                           float (&y)[NT][2], int q) {
    constexpr uint32_t kNIBBLES = 0x0f0f0f0fu;
    constexpr bool kFIFTH = TYPE == kNEXTN_Q5_K;
    const uint4 h0 = *reinterpret_cast<const uint4*>(r0), h8 = *reinterpret_cast<const uint4*>(r8);
    const ScaleMin s0 = unpack_scale_min(h0.y, h0.z, h0.w), s8 = unpack_scale_min(h8.y, h8.z, h8.w);
    uint32_t high[4];  // fifth bits: rows g, g+8 at bytes 4q.., then at 16+4q..
    if (kFIFTH) {
        high[0] = load_word(r0 + 16 + 4 * q);
        high[1] = load_word(r8 + 16 + 4 * q);
        high[2] = load_word(r0 + 32 + 4 * q);
        high[3] = load_word(r8 + 32 + 4 * q);
    }
    const uint8_t* q0 = r0 + (kFIFTH ? 48 : 16) + 4 * q;
    const uint8_t* q8 = r8 + (kFIFTH ? 48 : 16) + 4 * q;
    int acc[NT][4] = {}, acc16[NT][4] = {};  // acc16: 16 times what it stands for
    const auto chunk = [&](auto C) {
        constexpr int c = decltype(C)::value;
        const uint32_t w[4] = {load_word(q0 + 32 * c), load_word(q8 + 32 * c), load_word(q0 + 32 * c + 16),
                               load_word(q8 + 32 * c + 16)};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int s = 2 * c + half;
            const bool in_place = half && !kFIFTH;  // high nibbles need no shift: 16 q fits in a byte
            uint32_t a[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                a[i] = in_place ? w[i] & ~kNIBBLES : (half ? w[i] >> 4 : w[i]) & kNIBBLES;
                if (kFIFTH) a[i] |= (s < 4 ? high[i] << (4 - s) : high[i] >> (s - 4)) & 0x10101010u;
            }
            const int sc0 = __byte_perm(s0.sc[s >> 2], 0, 0x4440 + (s & 3));
            const int sc8 = __byte_perm(s8.sc[s >> 2], 0, 0x4440 + (s & 3));
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                int dot[4];
                mma_u8_k32(dot, a[0], a[1], a[2], a[3], x.frag[n][2 * s], x.frag[n][2 * s + 1]);
                multiply_add(in_place ? acc16[n] : acc[n], dot, sc0, sc8);
            }
        }
    };
    chunk(std::integral_constant<int, 0>{});
    chunk(std::integral_constant<int, 1>{});
    chunk(std::integral_constant<int, 2>{});
    chunk(std::integral_constant<int, 3>{});
    // mins: k slots 0-7 hold m, 8-31 hold 2m three times (see quantize_rows.cu)
    const uint32_t m0 = q & 1 ? s0.mn[1] : s0.mn[0], m8 = q & 1 ? s8.mn[1] : s8.mn[0];
    float2 d0 = __half22float2(*reinterpret_cast<const __half2*>(&h0.x));
    float2 d8 = __half22float2(*reinterpret_cast<const __half2*>(&h8.x));
    if (!kFIFTH) {  // acc becomes 16 times the sum, exactly as a float too
        d0.x *= 0.0625f;
        d8.x *= 0.0625f;
    }
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        if (!kFIFTH)
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[n][i] = 16 * acc[n][i] + acc16[n][i];
        int mins[4];
        mma_s8_k32(mins, m0 << (q >> 1), m8 << (q >> 1), m0 << 1, m8 << 1, x.sums[n].x, x.sums[n].y);
        const auto step = [&](float(&out), const float2 d, int hi, int lo, int min_hi, int min_lo) {
            const float m = __fmaf_rn(1024.0f, static_cast<float>(min_hi), static_cast<float>(min_lo));
            out = __fmaf_rn(x.scale[n], __fmaf_rn(-d.y, m, __fmul_rn(d.x, hi_lo(hi, lo))), out);
        };
        step(y[n][0], d0, acc[n][0], acc[n][1], mins[0], mins[1]);
        step(y[n][1], d8, acc[n][2], acc[n][3], mins[2], mins[3]);
    }
}

// A word at a 2-byte aligned address.  ALIGNED: the caller knows that it is 4-byte aligned.
template <bool ALIGNED>
__device__ __forceinline__ uint32_t load_word_2(const uint8_t* p, uint32_t select) {
    if (ALIGNED) return load_word(p);
    const uint8_t* down = reinterpret_cast<const uint8_t*>(reinterpret_cast<uintptr_t>(p) & ~uintptr_t{3});
    return __byte_perm(load_word(down), load_word(down + 4), select);
}

// Q6_K.  r0, r8 are 2-byte aligned.  q is used unsigned; 32 * sum(sc * sum(a)) is taken off at the end.
template <bool ALIGNED, int NT, int OPERAND>
__device__ __forceinline__ void dot_q6_k(const uint8_t* r0, const uint8_t* r8, const TokenOperand<OPERAND, NT>& x,
                                         float (&y)[NT][2], int q) {
    const uint32_t p0 = reinterpret_cast<uintptr_t>(r0) & 2 ? 0x5432 : 0x3210;
    const uint32_t p8 = reinterpret_cast<uintptr_t>(r8) & 2 ? 0x5432 : 0x3210;
    uint32_t s0[4], s8[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        s0[i] = load_word_2<ALIGNED>(r0 + 192 + 4 * i, p0);
        s8[i] = load_word_2<ALIGNED>(r8 + 192 + 4 * i, p8);
    }
    int acc[NT][4] = {};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int lh = 0; lh < 2; ++lh) {  // values 16*lh + 4*q .. of each quarter of this half
            const int at = 16 * lh + 4 * q;
            uint32_t low[2][2], high[2];  // [quarter parity][row]
            low[0][0] = load_word_2<ALIGNED>(r0 + 64 * h + at, p0);
            low[0][1] = load_word_2<ALIGNED>(r8 + 64 * h + at, p8);
            low[1][0] = load_word_2<ALIGNED>(r0 + 64 * h + 32 + at, p0);
            low[1][1] = load_word_2<ALIGNED>(r8 + 64 * h + 32 + at, p8);
            high[0] = load_word_2<ALIGNED>(r0 + 128 + 32 * h + at, p0);
            high[1] = load_word_2<ALIGNED>(r8 + 128 + 32 * h + at, p8);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int s = 8 * h + 2 * j + lh;
                uint32_t a[2];
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const uint32_t two = j < 2 ? high[r] << (4 - 2 * j) : high[r] >> (2 * j - 4);
                    a[r] = ((j >= 2 ? low[j & 1][r] >> 4 : low[j & 1][r]) & 0x0f0f0f0fu) | (two & 0x30303030u);
                }
                int sc0, sc8;
                const uint32_t select = (s & 3) | (8 + (s & 3)) << 4 | (8 + (s & 3)) << 8 | (8 + (s & 3)) << 12;
                asm("prmt.b32 %0, %1, 0, %2;" : "=r"(sc0) : "r"(s0[s >> 2]), "r"(select));
                asm("prmt.b32 %0, %1, 0, %2;" : "=r"(sc8) : "r"(s8[s >> 2]), "r"(select));
#pragma unroll
                for (int n = 0; n < NT; ++n) {
                    int dot[4];
                    mma_s8_k16(dot, a[0], a[1], x.frag[n][2 * (s >> 1) + (s & 1)]);
                    multiply_add(acc[n], dot, sc0, sc8);
                }
            }
        }
    }
    const uint32_t own0 = q < 2 ? (q ? s0[1] : s0[0]) : (q == 2 ? s0[2] : s0[3]);
    const uint32_t own8 = q < 2 ? (q ? s8[1] : s8[0]) : (q == 2 ? s8[2] : s8[3]);
    const float d0 = __half2float(*reinterpret_cast<const __half*>(r0 + 208));
    const float d8 = __half2float(*reinterpret_cast<const __half*>(r8 + 208));
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        int top[4], low[4];
        mma_s8_k16(top, own0, own8, x.six[n].x);
        mma_s8_k16(low, own0, own8, x.six[n].y);
        const float f0 = hi_lo(acc[n][0] - 2048 * top[0] - 16 * top[1], acc[n][1] - 32 * low[1]);
        const float f8 = hi_lo(acc[n][2] - 2048 * top[2] - 16 * top[3], acc[n][3] - 32 * low[3]);
        y[n][0] = __fmaf_rn(x.scale[n], __fmul_rn(d0, f0), y[n][0]);
        y[n][1] = __fmaf_rn(x.scale[n], __fmul_rn(d8, f8), y[n][1]);
    }
}

}  // namespace nextn
