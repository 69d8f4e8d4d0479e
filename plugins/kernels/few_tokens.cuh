// Dot product of 16 weight rows, one superblock wide, with 2 to 8 tokens on int8 tensor cores: what dot_affine and dot_q6_k
// give, bit by bit, for kernels whose rows begin at 16-byte boundaries.
//
// The superblock is in registers before anything is computed, so that its place in the ring is free early.
#pragma once
#include "kquant_dot.cuh"

namespace nextn {

// Q6_K superblocks of 210 bytes: every other one begins 2 bytes into a word.  Words are read where words are, so word i of
// lane q >= 1 has values 4q-2 .. 4q+1 of 16, and lane 0 puts 0, 1, 14, 15 together.  This does the same to an operand, or
// undoes it.
template <int OPERAND, int NT>
__device__ __forceinline__ void shift_operand(TokenOperand<OPERAND, NT>& x, int lane, bool back = false) {
    const int q = lane & 3, from = (lane & ~3) | ((q + (back ? 1 : 3)) & 3);
    const uint32_t select = !back ? (q ? 0x5432 : 0x3254) : q == 0 ? 0x1054 : q == 3 ? 0x3276 : 0x1076;
    const auto shift = [&](uint32_t& v) { v = __byte_perm(__shfl_sync(~0u, v, from), v, select); };
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
        for (int i = 0; i < 16; ++i) shift(x.frag[n][i]);
        shift(x.six[n].x);
        shift(x.six[n].y);
    }
}

// Words of one row of a Q6_K superblock as lane q needs them.
struct SixWords {
    uint32_t low[8], high[4];  // by 16 values: word i of the low nibbles, of the high bits
    uint32_t own, scales[5];   // the lane's four scales; all of them, from byte 2 on if shifted
};
template <bool SHIFTED, typename P>
__device__ __forceinline__ SixWords load_six(P r, int q) {
    SixWords w;
    const P from = r - (SHIFTED ? 2 : 0);
    uint32_t here = load_word(from + 4 * q);
    const auto next = [&](int i) {
        if (!SHIFTED) return load_word(from + 4 * q + 16 * i);
        const uint32_t following = load_word(from + 4 * q + 16 * (i + 1));
        const uint32_t word = __byte_perm(here, following, q ? 0x3210 : 0x5432);
        here = following;
        return word;
    };
#pragma unroll
    for (int i = 0; i < 8; ++i) w.low[i] = next(i);
#pragma unroll
    for (int i = 0; i < 4; ++i) w.high[i] = next(8 + i);
#pragma unroll
    for (int i = 0; i < (SHIFTED ? 5 : 4); ++i) w.scales[i] = load_word(from + 192 + 4 * i);
    w.own = SHIFTED ? __byte_perm(here, w.scales[4], q ? 0x3210 : 0x5432) : load_word(from + 192 + 4 * q);
    return w;
}

// loaded(): called when the superblock has been read.
template <bool SHIFTED, int TYPE, int NT, int OPERAND, typename P, typename F>
__device__ __forceinline__ void dot_few(P r0, P r8, const TokenOperand<OPERAND, NT>& x, float (&y)[NT][2], int q,
                                        F loaded) {
    if constexpr (TYPE != kNEXTN_Q6_K) {
        dot_affine<TYPE>(r0, r8, x, y, q);
        loaded();
    } else {
        constexpr int kSKIP = SHIFTED ? 2 : 0;
        const SixWords w[2] = {load_six<SHIFTED>(r0, q), load_six<SHIFTED>(r8, q)};
        const float d0 = __half2float(__ushort_as_half(load_half_word(r0 + 208)));
        const float d8 = __half2float(__ushort_as_half(load_half_word(r8 + 208)));
        loaded();
        int acc[NT][4] = {};
        each_of<4>([&](auto STEP) {  // values 16*lh + 4*q .. of the quarters of half h
            constexpr int h = decltype(STEP)::value >> 1, lh = decltype(STEP)::value & 1;
            uint32_t a[4][2];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const uint32_t low0 = w[r].low[4 * h + lh], low1 = w[r].low[4 * h + 2 + lh];
                const uint32_t high = w[r].high[2 * h + lh];
                unpack_quarters(a, r, low0, low1, high);
            }
            each_of<4>([&](auto J) {
                constexpr int j = decltype(J)::value, s = 8 * h + 2 * j + lh, at = s + kSKIP;
                const int sc0 = signed_byte_of<(at & 3)>(w[0].scales[at >> 2]),
                          sc8 = signed_byte_of<(at & 3)>(w[1].scales[at >> 2]);
#pragma unroll
                for (int n = 0; n < NT; ++n) {
                    int dot[4];
                    mma_s8_k16(dot, a[j][0], a[j][1], x.frag[n][s]);
                    multiply_add(acc[n], dot, sc0, sc8);
                }
            });
        });
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            int top[4], low[4];
            mma_s8_k16(top, w[0].own, w[1].own, x.six[n].x);
            mma_s8_k16(low, w[0].own, w[1].own, x.six[n].y);
            const float f0 = hi_lo(acc[n][0] - 2048 * top[0] - 16 * top[1], acc[n][1] - 32 * low[1]);
            const float f8 = hi_lo(acc[n][2] - 2048 * top[2] - 16 * top[3], acc[n][3] - 32 * low[3]);
            y[n][0] = __fmaf_rn(x.scale[n], __fmul_rn(d0, f0), y[n][0]);
            y[n][1] = __fmaf_rn(x.scale[n], __fmul_rn(d8, f8), y[n][1]);
        }
    }
}

}  // namespace nextn
