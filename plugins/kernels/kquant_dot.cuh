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

// acc += scale of sub-block S of rows g and g+8 * (a . x), for every token.
template <int S, int NT, int OPERAND>
__device__ __forceinline__ void add_sub_block(int (&acc)[NT][4], const uint32_t (&a)[4], int scale_g, int scale_g8,
                                              const TokenOperand<OPERAND, NT>& x) {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        int dot[4];
        mma_u8_k32(dot, a[0], a[1], a[2], a[3], x.frag[n][2 * S], x.frag[n][2 * S + 1]);
        multiply_add(acc[n], dot, scale_g, scale_g8);
    }
}

constexpr uint32_t kNIBBLES = 0x0f0f0f0fu;
// More than four tokens leave few registers: the compiler must not read all of a superblock ahead.
template <int NT>
__device__ __forceinline__ void read_no_further() {
    if (NT > 1) __syncwarp();
}

// Q4_K: 16 times the sums over a superblock.  piece: of the nibbles, see dot_affine.  High nibbles are used where they
// are, as 16 times what they stand for; so are scales of the others, or, of one group of tokens, sums of their own.
template <int NT, int OPERAND>
__device__ __forceinline__ void sums_of_nibbles(int (&acc)[NT][4], uint32_t piece, const ScaleMin& s0,
                                                const ScaleMin& s8, const TokenOperand<OPERAND, NT>& x) {
    constexpr bool kSCALES = NT > 1;
    int low[NT][4] = {};
    each_of<4>([&](auto C) {
        constexpr int s = 2 * decltype(C)::value, word = s >> 2;
        const auto even = [](uint32_t sc) -> int {
            if (!kSCALES) return byte_of<(s & 3)>(sc);
            const uint32_t two = (sc & 0x00ff00ffu) << 4;
            return s & 2 ? two >> 16 : two & 0xffff;
        };
        uint32_t w[4], a[4];
        if (s == 4) read_no_further<NT>();
        ldmatrix_x4(w, piece + 16 * s);
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = w[i] & kNIBBLES;
        add_sub_block<s>(kSCALES ? acc : low, a, even(s0.sc[word]), even(s8.sc[word]), x);
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = w[i] & ~kNIBBLES;
        constexpr int byte = (s & 3) + 1;
        add_sub_block<s + 1>(acc, a, byte_of<byte>(s0.sc[word]), byte_of<byte>(s8.sc[word]), x);
    });
    if (!kSCALES)
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[0][i] += 16 * low[0][i];
}

// Q5_K: the sums over a superblock.  piece: of the fifth bits.
template <int NT, int OPERAND>
__device__ __forceinline__ void sums_of_five_bits(int (&acc)[NT][4], uint32_t piece, const ScaleMin& s0,
                                                  const ScaleMin& s8, const TokenOperand<OPERAND, NT>& x) {
    uint32_t high[4];
    ldmatrix_x4(high, piece);
    each_of<2>([&](auto C) {
        constexpr int c = decltype(C)::value;
        uint32_t first[4], later[4];  // of sub-blocks 2c and 2c+1, and four further
        if (c == 1) read_no_further<NT>();
        ldmatrix_x4(first, piece + 32 + 32 * c);
        ldmatrix_x4(later, piece + 32 + 32 * (c + 2));
        each_of<2>([&](auto HALF) {
            constexpr int half = decltype(HALF)::value, s = 2 * c + half;
            uint32_t a[2][4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const uint32_t both = keep_bits<(0x11111111u << s)>(high[i]);  // of sub-blocks s and s+4
                a[0][i] = merge_bits<kNIBBLES>(half ? first[i] >> 4 : first[i], both << (4 - s));
                a[1][i] = merge_bits<kNIBBLES>(half ? later[i] >> 4 : later[i], both >> s);
            }
            add_sub_block<s>(acc, a[0], byte_of<s>(s0.sc[0]), byte_of<s>(s8.sc[0]), x);
            add_sub_block<s + 4>(acc, a[1], byte_of<s>(s0.sc[1]), byte_of<s>(s8.sc[1]), x);
        });
    });
}

// Q4_K and Q5_K.  r0, r8: this superblock of rows g and g+8, 16-byte aligned in shared memory, pointers or addresses;
// piece: address of bytes 16*(lane/16) .. of row lane%16, as ldmatrix reads.
template <int TYPE, int NT, int OPERAND, typename P>
__device__ __forceinline__ void dot_affine(P r0, P r8, uint32_t piece, const TokenOperand<OPERAND, NT>& x,
                                           float (&y)[NT][2], int q) {
    constexpr bool kFIFTH = TYPE == kNEXTN_Q5_K;
    const uint4 h0 = load_4_words(r0), h8 = load_4_words(r8);
    const ScaleMin s0 = unpack_scale_min(h0.y, h0.z, h0.w), s8 = unpack_scale_min(h8.y, h8.z, h8.w);
    int acc[NT][4] = {};
    if constexpr (kFIFTH)
        sums_of_five_bits(acc, piece + 16, s0, s8, x);
    else
        sums_of_nibbles(acc, piece + 16, s0, s8, x);
    const uint32_t m0 = q & 1 ? s0.mn[1] : s0.mn[0], m8 = q & 1 ? s8.mn[1] : s8.mn[0];
    float2 d0 = __half22float2(*reinterpret_cast<const __half2*>(&h0.x));
    float2 d8 = __half22float2(*reinterpret_cast<const __half2*>(&h8.x));
    if (!kFIFTH) {  // exactly what 16 times less of the sums would give
        d0.x *= 0.0625f;
        d8.x *= 0.0625f;
    }
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        int mins[4];
        mma_u8_k32(mins, m0, m8, m0 << 2, m8 << 2, x.sums[n].x, x.sums[n].y);
        const auto step = [&](float(&out), const float2 d, int hi, int lo, float m) {
            out = __fmaf_rn(x.scale[n], __fmaf_rn(-d.y, m, __fmul_rn(d.x, hi_lo(hi, lo))), out);
        };
        step(y[n][0], d0, acc[n][0], acc[n][1], min_sum(mins[0], mins[1]));
        step(y[n][1], d8, acc[n][2], acc[n][3], min_sum(mins[2], mins[3]));
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
