// Dot product of 16 weight rows, one superblock wide, with 2 to 8 tokens on int8 tensor cores: what dot_affine and dot_q6_k
// give, bit by bit, for kernels whose rows begin at 16-byte boundaries.
//
// A Q6_K superblock is, for up to four tokens, in registers before anything is computed: its place in the ring is free
// early.
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

// Words of one row of a Q6_K superblock as lane q needs them, read from its beginning on; those of half a superblock.
template <bool SHIFTED>
struct SixWords {
    uint32_t low[4], high[2];          // by 16 values: word i of the low nibbles, of the high bits
    uint32_t scales[SHIFTED ? 3 : 2];  // from byte 2 on if shifted
};
template <bool SHIFTED>
struct SixReader {
    uint32_t row, mine;          // addresses: where words are, and the lane's
    uint32_t low, high, select;  // the next words

    __device__ __forceinline__ SixReader(uint32_t r, int q)
        : row(r - (SHIFTED ? 2 : 0)), mine(row + 4 * q), select(q ? 0x3210 : 0x5432) {
        if (SHIFTED) {
            low = load_word(mine);
            high = load_word(mine + 128);
        }
    }
    __device__ __forceinline__ uint32_t next(uint32_t& here, uint32_t at) const {
        if (!SHIFTED) return load_word(at);
        const uint32_t following = load_word(at + 16), word = __byte_perm(here, following, select);
        here = following;
        return word;
    }
    template <int H>
    __device__ __forceinline__ SixWords<SHIFTED> half() {
        SixWords<SHIFTED> w;
#pragma unroll
        for (int i = 0; i < 4; ++i) w.low[i] = next(low, mine + 64 * H + 16 * i);
#pragma unroll
        for (int i = 0; i < 2; ++i) w.high[i] = next(high, mine + 128 + 32 * H + 16 * i);
#pragma unroll
        for (int i = 0; i < (SHIFTED ? 3 : 2); ++i) w.scales[i] = load_word(row + 192 + 8 * H + 4 * i);
        return w;
    }
    // The lane's four scales, after both halves.
    __device__ __forceinline__ uint32_t own(const SixWords<SHIFTED>& second) const {
        return SHIFTED ? __byte_perm(high, second.scales[2], select) : load_word(mine + 192);
    }
};

// y += ..  r0, r8: addresses of this superblock of rows g and g+8.  loaded(): called when it has been read; of up to four
// tokens before anything is computed, for more there are too few registers.
template <bool SHIFTED, int TYPE, int NT, int OPERAND, typename F>
__device__ __forceinline__ void dot_few(uint32_t r0, uint32_t r8, const TokenOperand<OPERAND, NT>& x, float (&y)[NT][2],
                                        int q, F loaded) {
    if constexpr (TYPE != kNEXTN_Q6_K) {
        dot_affine<TYPE>(r0, r8, x, y, q);
        loaded();
    } else {
        constexpr bool kEARLY = NT == 1;
        SixReader<SHIFTED> reader[2] = {{r0, q}, {r8, q}};
        const SixWords<SHIFTED> first[2] = {reader[0].template half<0>(), reader[1].template half<0>()};
        SixWords<SHIFTED> second[2];
        uint32_t own[2], d[2];
        const auto load_second = [&] {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                second[r] = reader[r].template half<1>();
                own[r] = reader[r].own(second[r]);
                d[r] = load_half_word((r ? r8 : r0) + 208);
            }
            loaded();
        };
        int acc[NT][4] = {};
        const auto half = [&](const SixWords<SHIFTED>(&w)[2], auto H) {
            each_of<2>([&](auto LH) {  // values 16*lh + 4*q .. of the quarters
                constexpr int h = decltype(H)::value, lh = decltype(LH)::value;
                uint32_t a[4][2];
#pragma unroll
                for (int r = 0; r < 2; ++r) unpack_quarters(a, r, w[r].low[lh], w[r].low[2 + lh], w[r].high[lh]);
                each_of<4>([&](auto J) {
                    constexpr int j = decltype(J)::value, s = 2 * j + lh, at = s + (SHIFTED ? 2 : 0);
                    const int sc0 = signed_byte_of<(at & 3)>(w[0].scales[at >> 2]),
                              sc8 = signed_byte_of<(at & 3)>(w[1].scales[at >> 2]);
#pragma unroll
                    for (int n = 0; n < NT; ++n) {
                        int dot[4];
                        mma_s8_k16(dot, a[j][0], a[j][1], x.frag[n][8 * h + s]);
                        multiply_add(acc[n], dot, sc0, sc8);
                    }
                });
            });
        };
        if (kEARLY) load_second();
        half(first, std::integral_constant<int, 0>{});
        if (!kEARLY) {
            __syncwarp();  // or the compiler would read ahead
            load_second();
        }
        half(second, std::integral_constant<int, 1>{});
        const float d0 = __half2float(__ushort_as_half(d[0])), d8 = __half2float(__ushort_as_half(d[1]));
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            int top[4], low[4];
            mma_s8_k16(top, own[0], own[1], x.six[n].x);
            mma_s8_k16(low, own[0], own[1], x.six[n].y);
            const float f0 = hi_lo(acc[n][0] - 2048 * top[0] - 16 * top[1], acc[n][1] - 32 * low[1]);
            const float f8 = hi_lo(acc[n][2] - 2048 * top[2] - 16 * top[3], acc[n][3] - 32 * low[3]);
            y[n][0] = __fmaf_rn(x.scale[n], __fmul_rn(d0, f0), y[n][0]);
            y[n][1] = __fmaf_rn(x.scale[n], __fmul_rn(d8, f8), y[n][1]);
        }
    }
}

}  // namespace nextn
