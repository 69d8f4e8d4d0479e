// Quantised rows of more than four tokens, as they pass from block to block without barriers.
//
// As in layer_flow.cuh nothing orders stores and loads, but not every word has a value to spare for "not there yet":
// low bytes can be anything. What speaks for itself is a piece of 16 bytes, stored and loaded as one. It is not there
// while all of its words are kUNWRITTEN, and what is there differs from that in
//   frag    every word of hi bytes, which are within +-110. Four words of low bytes can be the same, though they hardly
//           ever are: the digits of column hi say which
//   digits  the last word: digits within +-64 in column lo; in column hi, by which nobody multiplies, what has just
//           been said, in bits 0 to 3 of each byte
//   scale, squares  as they are never negative
// What a launch writes for its first product has not been cleared by it: all blocks meet before they read that.
#pragma once
#include "layer_flow.cuh"
#include "token_operand.cuh"

namespace nextn {

constexpr uint32_t kUNWRITTEN = 0x80808080u;

using EightOperand = TokenOperand<kANY_KQUANT, OperandBlock::kGROUPS>;

__device__ __forceinline__ void store_piece(uint4* p, const uint4& v) {
    asm volatile(
        "{ .reg .b64 a, b; .reg .b128 t; mov.b64 a, {%1, %2}; mov.b64 b, {%3, %4}; mov.b128 t, {a, b};"
        " st.relaxed.gpu.global.b128 [%0], t; }" ::"l"(p),
        "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
        : "memory");
}
__device__ __forceinline__ uint4 load_piece(const uint4* p) {
    uint4 v;
    asm volatile(
        "{ .reg .b64 a, b; .reg .b128 t; ld.relaxed.gpu.global.b128 t, [%4]; mov.b128 {a, b}, t;"
        " mov.b64 {%0, %1}, a; mov.b64 {%2, %3}, b; }"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(p)
        : "memory");
    return v;
}
__device__ __forceinline__ float2 load_now2(const float* p) {
    float2 v;
    asm volatile("ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ bool unwritten(float v) { return __float_as_uint(v) == kUNWRITTEN; }
// Zero of four words that all look it.
__device__ __forceinline__ uint32_t written(uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
    return (x ^ kUNWRITTEN) | (y ^ kUNWRITTEN) | (z ^ kUNWRITTEN) | (w ^ kUNWRITTEN);
}

// A warp's superblock of a token, 8 values a lane: v[0] at 32*(lane/4) + 4*(lane%4), v[1] 16 further. The scale comes
// last: who has that will find the rest, most likely.
__device__ __forceinline__ void put_superblock(const float4 (&v)[2], OperandBlock& to, int token) {
    const int lane = lane_now();
    const int sub = lane >> 2, q = lane & 3, n = token / kGroupTokens, column = 2 * (token % kGroupTokens);
    const QuantScale scale = quant_scale(__reduce_max_sync(~0u, max_bits(max_bits(0, v[0]), v[1])));
    const QuantWord w[2] = {quantize4(v[0], scale.inverse), quantize4(v[1], scale.inverse)};
    // of two steps of 32 values one lane has the hi bytes, the other one the low bytes
    const bool odd = sub & 1;
    const uint32_t other[2] = {__shfl_xor_sync(~0u, odd ? w[0].hi : w[0].lo, 4),
                               __shfl_xor_sync(~0u, odd ? w[1].hi : w[1].lo, 4)};
    const uint4 piece =
        odd ? make_uint4(other[0], other[1], w[0].lo, w[1].lo) : make_uint4(w[0].hi, w[1].hi, other[0], other[1]);
    store_piece(&to.frag[n][sub >> 1][4 * (column + odd) + q], piece);
    const uint32_t alike = __ballot_sync(~0u, odd && written(piece.x, piece.y, piece.z, piece.w) == 0);
    int sum[2] = {w[0].sum, w[1].sum};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        sum[h] += __shfl_xor_sync(~0u, sum[h], 1);
        sum[h] += __shfl_xor_sync(~0u, sum[h], 2);
    }
    // a lane has a digit of column hi or lo: of sums over 32 `first` or `rest`, of sums over 16 those of one of two
    const bool low = q & 2, second = q & 1;
    const MinDigit d = min_digit(sum[0] + sum[1], low);
    uint32_t digits = static_cast<uint32_t>((second ? d.rest : d.first) & 255) << 8 * (sub & 3);
    digits |= __shfl_xor_sync(~0u, digits, 4);
    digits |= __shfl_xor_sync(~0u, digits, 8);
    const OffsetColumn c = offset_column(second ? sum[1] : sum[0], low);
    uint32_t six = static_cast<uint32_t>((c.first & 255) | (c.second & 255) << 16) << (second ? 8 : 0);
    six |= __shfl_xor_sync(~0u, six, 1);
    const uint32_t next = __shfl_xor_sync(~0u, six, 4);
    // lane of the operand: see pack_affine, pack_six
    const int place = sub >> 1, from = 16 * (place & 1) + (q & 2);
    const uint32_t x = __shfl_sync(~0u, digits, from + (place >> 1)), y = __shfl_sync(~0u, digits, from + 1);
    const uint32_t last = low ? __byte_perm(six, next, 0x7632) : alike >> 4;
    if ((lane & 5) == 0)
        store_piece(&to.digits[n][4 * (column + low) + place],
                    make_uint4(x, y, __byte_perm(six, next, 0x5410), last));
    if (lane == 0) to.scale[token % kGroupTokens][n] = scale.scale;
}

// A superblock of `t` tokens when it is there; of absent tokens x keeps what it has. Looks for the scales first: looks
// for all of it would keep others from what they load.
__device__ __forceinline__ void take_superblock(const OperandBlock& from, int t, EightOperand& x) {
    constexpr int NT = OperandBlock::kGROUPS;
    const int lane = lane_now();
    const bool second = kGroupTokens + (lane & 3) < t, both = kGroupTokens + (lane >> 3) < t;
    float2 scale;
    do {
        scale = load_now2(from.scale[lane & 3]);
    } while (__any_sync(~0u, unwritten(scale.x) || (second && unwritten(scale.y))));
    x.scale[0] = scale.x;
    x.scale[1] = scale.y;
    while (true) {
        bool perhaps = false;  // something is missing
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            if (n && !both) continue;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const uint4 v = load_piece(&from.frag[n][i][lane]);
                x.frag[n][4 * i] = v.x;
                x.frag[n][4 * i + 1] = v.y;
                x.frag[n][4 * i + 2] = v.z;
                x.frag[n][4 * i + 3] = v.w;
            }
            const uint4 v = load_piece(&from.digits[n][lane]);
            x.sums[n] = make_uint2(v.x, v.y);
            x.six[n] = make_uint2(v.z, v.w);
        }
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            perhaps |= x.six[n].y == kUNWRITTEN;
#pragma unroll
            for (int i = 0; i < 16; i += 4) perhaps |= x.frag[n][i] == kUNWRITTEN;
        }
        if (!__any_sync(~0u, perhaps)) return;
        uint32_t least = 1;  // without predicates, of which there are few
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            const uint32_t alike = __shfl_xor_sync(~0u, x.six[n].y, 4) >> (lane & 3) & (lane & 4 ? 0x01010101 : 0);
            least = min(least, x.six[n].y ^ kUNWRITTEN);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                least = min(least, written(x.frag[n][4 * i], x.frag[n][4 * i + 1], x.frag[n][4 * i + 2],
                                           x.frag[n][4 * i + 3]) | (alike >> 8 * i & 1));
        }
        if (!__any_sync(~0u, least == 0)) return;
    }
}

}  // namespace nextn
