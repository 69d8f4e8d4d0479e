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

// f of the compile-time constants 0 .. N-1.
template <int N, typename F>
__device__ __forceinline__ void each_of(const F& f) {
    if constexpr (N > 0) {
        each_of<N - 1>(f);
        f(std::integral_constant<int, N - 1>{});
    }
}

// Q4_K and Q5_K.  r0, r8: this superblock of rows g and g+8, 16-byte aligned in shared memory, by pointers or addresses.
template <int TYPE, int NT, int OPERAND, typename P>
__device__ __forceinline__ void dot_affine(P r0, P r8, const TokenOperand<OPERAND, NT>& x,
                                           float (&y)[NT][2], int q) {
    constexpr uint32_t kNIBBLES = 0x0f0f0f0fu;
    constexpr bool kFIFTH = TYPE == kNEXTN_Q5_K;
    const uint4 h0 = load_4_words(r0), h8 = load_4_words(r8);
    const ScaleMin s0 = unpack_scale_min(h0.y, h0.z, h0.w), s8 = unpack_scale_min(h8.y, h8.z, h8.w);
    uint32_t high[4];  // fifth bits: rows g, g+8 at bytes 4q.., then at 16+4q..
    if (kFIFTH) {
        high[0] = load_word(r0 + 16 + 4 * q);
        high[1] = load_word(r8 + 16 + 4 * q);
        high[2] = load_word(r0 + 32 + 4 * q);
        high[3] = load_word(r8 + 32 + 4 * q);
    }
    const P q0 = r0 + (kFIFTH ? 48 : 16) + 4 * q;
    const P q8 = r8 + (kFIFTH ? 48 : 16) + 4 * q;
    int acc[NT][4] = {}, acc16[NT][4] = {};  // acc16: 16 times what it stands for
    const auto sub_block = [&](auto S) {
        constexpr int s = decltype(S)::value, c = s >> 1;
        constexpr bool half = s & 1, in_place = half && !kFIFTH;  // high nibbles need no shift: 16 q fits in a byte
        const uint32_t w[4] = {load_word(q0 + 32 * c), load_word(q8 + 32 * c), load_word(q0 + 32 * c + 16),
                               load_word(q8 + 32 * c + 16)};
        uint32_t a[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            a[i] = in_place ? w[i] & ~kNIBBLES : (half ? w[i] >> 4 : w[i]) & kNIBBLES;
            if (kFIFTH) a[i] |= (s < 4 ? high[i] << (4 - s) : high[i] >> (s - 4)) & 0x10101010u;
        }
        const int sc0 = byte_of<(s & 3)>(s0.sc[s >> 2]), sc8 = byte_of<(s & 3)>(s8.sc[s >> 2]);
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            int dot[4];
            mma_u8_k32(dot, a[0], a[1], a[2], a[3], x.frag[n][2 * s], x.frag[n][2 * s + 1]);
            multiply_add(in_place ? acc16[n] : acc[n], dot, sc0, sc8);
        }
    };
    each_of<8>(sub_block);
    // mins: see min_digit
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
        mma_u8_k32(mins, m0, m8, m0 << 2, m8 << 2, x.sums[n].x, x.sums[n].y);
        const auto step = [&](float(&out), const float2 d, int hi, int lo, float m) {
            out = __fmaf_rn(x.scale[n], __fmaf_rn(-d.y, m, __fmul_rn(d.x, hi_lo(hi, lo))), out);
        };
        step(y[n][0], d0, acc[n][0], acc[n][1], min_sum<NT>(mins[0], mins[1]));
        step(y[n][1], d8, acc[n][2], acc[n][3], min_sum<NT>(mins[2], mins[3]));
    }
}

// A word at a 2-byte aligned address of shared memory, which begins `select` into the word at `down`.
template <bool ALIGNED>
__device__ __forceinline__ uint32_t load_word_2(uint32_t down, uint32_t select) {
    const uint32_t first = load_shared(down);
    return ALIGNED ? first : __byte_perm(first, load_shared(down + 4), select);
}

// Q6_K.  r0, r8 are 2-byte aligned; ALIGNED: both are 4-byte aligned.  q is used unsigned; 32 * sum(sc * sum(a)) is taken
// off at the end.
template <bool ALIGNED, int NT, int OPERAND, typename P>
__device__ __forceinline__ void dot_q6_k(P r0, P r8, const TokenOperand<OPERAND, NT>& x, float (&y)[NT][2], int q) {
    const uint32_t at[2] = {smem_address(r0), smem_address(r8)}, down[2] = {at[0] & ~3u, at[1] & ~3u};
    const uint32_t select[2] = {at[0] & 2 ? 0x5432u : 0x3210u, at[1] & 2 ? 0x5432u : 0x3210u};
    uint32_t scales[2][4];
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int i = 0; i < 4; ++i) scales[r][i] = load_word_2<ALIGNED>(down[r] + 192 + 4 * i, select[r]);
    int acc[NT][4] = {};
    const auto quarters = [&](auto STEP) {  // values 16*lh + 4*q .. of the quarters of half h
        constexpr int h = decltype(STEP)::value >> 1, lh = decltype(STEP)::value & 1;
        uint32_t a[4][2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const uint32_t from = down[r] + 16 * lh + 4 * q;
            const uint32_t low0 = load_word_2<ALIGNED>(from + 64 * h, select[r]);
            const uint32_t low1 = load_word_2<ALIGNED>(from + 64 * h + 32, select[r]);
            const uint32_t high = load_word_2<ALIGNED>(from + 128 + 32 * h, select[r]);
            unpack_quarters(a, r, low0, low1, high);
        }
        each_of<4>([&](auto J) {
            constexpr int j = decltype(J)::value, s = 8 * h + 2 * j + lh;
            const int sc0 = signed_byte_of<(s & 3)>(scales[0][s >> 2]),
                      sc8 = signed_byte_of<(s & 3)>(scales[1][s >> 2]);
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                int dot[4];
                mma_s8_k16(dot, a[j][0], a[j][1], x.frag[n][s]);
                multiply_add(acc[n], dot, sc0, sc8);
            }
        });
    };
    each_of<4>(quarters);
    const uint32_t own0 = q < 2 ? (q ? scales[0][1] : scales[0][0]) : (q == 2 ? scales[0][2] : scales[0][3]);
    const uint32_t own8 = q < 2 ? (q ? scales[1][1] : scales[1][0]) : (q == 2 ? scales[1][2] : scales[1][3]);
    const float d0 = __half2float(__ushort_as_half(load_half_word(r0 + 208)));
    const float d8 = __half2float(__ushort_as_half(load_half_word(r8 + 208)));
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
