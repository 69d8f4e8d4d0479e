// Rows of a product as operands: one token by every block for itself, several by all blocks together.
#pragma once
#include "layer_flow.cuh"
#include "one_token.cuh"
#include "quantize_superblock.cuh"

namespace nextn {

// One token's superblock in shared memory, quantised.
struct __align__(16) TokenSlot {
    uint2 frag[2][4][4][2];  // [hi, lo][step / 2][q][step % 2]
    uint2 sums[2][4];        // as TokenOperand's, [hi, lo][q]
    int32_t sum16[16];
    float scale, padding[3];
};

__device__ __forceinline__ float4 times(const float4& a, const float4& b) {
    return make_float4(__fmul_rn(a.x, b.x), __fmul_rn(a.y, b.y), __fmul_rn(a.z, b.z), __fmul_rn(a.w, b.w));
}
__device__ __forceinline__ float4 times(const float4& a, float f) { return times(a, make_float4(f, f, f, f)); }
__device__ __forceinline__ uint32_t max_bits(uint32_t bits, const float4& v) {
    bits = max(max(bits, __float_as_uint(v.x) & 0x7fffffffu), __float_as_uint(v.y) & 0x7fffffffu);
    return max(max(bits, __float_as_uint(v.z) & 0x7fffffffu), __float_as_uint(v.w) & 0x7fffffffu);
}
// 1 / rms of a head's outputs.
__device__ __forceinline__ float head_factor(const LayerParams& p, const RowSource& s, int token, int head) {
    const float* at = s.squares + 4 * (token * p.heads + head);
    float4 v = load_now4(at);
    await(at, v);
    const float total = __fadd_rn(__fadd_rn(__fadd_rn(v.x, v.y), v.z), v.w);
    return rms_factor(total, kGDN_DIM, p.eps);
}

// Eight values a lane of one superblock: v[0] at 32*(lane/4) + 4*(lane%4), v[1] 16 further.
__device__ __forceinline__ int64_t value_of_lane(int superblock, int lane) {
    return superblock * kSUPER + 32 * (lane >> 2) + 4 * (lane & 3);
}
__device__ __forceinline__ const float* values_at(const RowSource& s, int token, int superblock, int lane) {
    return s.x + token * s.ldx + value_of_lane(superblock, lane);
}
__device__ __forceinline__ void request_values(const RowSource& s, int token, int superblock, int lane,
                                               float4 (&v)[2]) {
    const float* x = values_at(s, token, superblock, lane);
#pragma unroll
    for (int h = 0; h < 2; ++h) v[h] = load_now4(x + 16 * h);
}
// v: requested. Not of the rows of the first product: they are there, and could hold anything.
__device__ __forceinline__ void await_values(const RowSource& s, int token, int superblock, int lane, float4 (&v)[2]) {
    const float* x = values_at(s, token, superblock, lane);
#pragma unroll
    for (int h = 0; h < 2; ++h) await(x + 16 * h, v[h]);
}
__device__ __forceinline__ void load_norm(const RowSource& s, int superblock, int lane, float4 (&norm)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h)
        norm[h] = __ldg(reinterpret_cast<const float4*>(s.norm + value_of_lane(superblock, lane) + 16 * h));
}
// v times the norm's weights and the head's factor. Returns, in every lane, the sum of x^2 where the row is normed.
__device__ __forceinline__ float scale_values(const LayerParams& p, const RowSource& s, int token, int superblock,
                                              int lane, float4 (&v)[2], const float4 (&norm)[2]) {
    float sum = 0.0f;
    if (s.norm) {
        sum = squares_of(v[0], v[1]);
#pragma unroll
        for (int d = 1; d < 32; d <<= 1) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, d));
        v[0] = times(v[0], norm[0]);
        v[1] = times(v[1], norm[1]);
    }
    if (s.squares) {
        const float factor = head_factor(p, s, token, 2 * superblock + (lane >> 4));
        v[0] = times(v[0], factor);
        v[1] = times(v[1], factor);
    }
    return sum;
}

// One token's values of a superblock to its slot, quantised.
__device__ __forceinline__ void quantize_slot(TokenSlot& slot, int lane, const float4 (&v)[2]) {
    const int sub = lane >> 2, q = lane & 3;
    const QuantScale scale = quant_scale(__reduce_max_sync(~0u, max_bits(max_bits(0, v[0]), v[1])));
    const QuantWord w[2] = {quantize4(v[0], scale.inverse), quantize4(v[1], scale.inverse)};
    slot.frag[0][sub >> 1][q][sub & 1] = make_uint2(w[0].hi, w[1].hi);
    slot.frag[1][sub >> 1][q][sub & 1] = make_uint2(w[0].lo, w[1].lo);
    int total[2] = {w[0].sum, w[1].sum};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        total[h] += __shfl_xor_sync(~0u, total[h], 1);
        total[h] += __shfl_xor_sync(~0u, total[h], 2);
    }
    if (q == 0) *reinterpret_cast<int2*>(&slot.sum16[2 * sub]) = make_int2(total[0], total[1]);
    if (lane == 0) slot.scale = scale.scale;
    __syncwarp();
    // a lane has one digit: column hi or low, q and byte of the operand
    const int low = lane >> 4, to = (lane >> 2) & 3, byte = lane & 3, at = 2 * (4 * (to & 1) + byte);
    const MinDigit digit = min_digit(slot.sum16[at] + slot.sum16[at + 1], low);
    auto* word = reinterpret_cast<int8_t*>(&slot.sums[low][to]) + byte;
    word[0] = static_cast<int8_t>(to < 2 ? digit.first : digit.rest);
    word[4] = static_cast<int8_t>(digit.rest);
}

// A lane's values at x of one token's superblock when they are there. `last`: the superblock's last value; when that is
// there, most likely all are.
__device__ __forceinline__ void await_superblock(const float* x, const float* last, float4 (&v)[2]) {
    while (__any_sync(~0u, absent(load_now(last)))) __nanosleep(100);  // others need the memory too
#pragma unroll
    for (int h = 0; h < 2; ++h) v[h] = load_now4(x + 16 * h);
#pragma unroll
    for (int h = 0; h < 2; ++h) await(x + 16 * h, v[h]);
}

// A later chunk's superblock. Not inline: it would be part of the code of every type's tiles.
__device__ __noinline__ void quantize_later(const float* x, const float* last, TokenSlot* slot, int lane) {
    float4 v[2];
    await_superblock(x, last, v);
    quantize_slot(*slot, lane, v);
}

// Operand of one token against matrices of a type. shifted: see OneToken.
template <int TYPE>
__device__ __forceinline__ void load_slot(const TokenSlot& slot, OneToken<TYPE>& x, bool shifted, int lane) {
    const int q = lane & 3, low = (lane >> 2) & 1, pair = lane >> 3;
    uint32_t here[4];  // 16-value steps 2 pair, 2 pair + 1, and 8 further
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const uint2(&steps)[4][2] = slot.frag[low][2 * h + (pair >> 1)];
        const uint2 v = steps[q][pair & 1];
        here[2 * h] = v.x;
        here[2 * h + 1] = v.y;
        if (TYPE == kNEXTN_Q6_K && shifted) {
            const uint2 before = steps[(q + 3) & 3][pair & 1];
            here[2 * h] = __byte_perm(before.x, v.x, q ? 0x5432 : 0x3254);
            here[2 * h + 1] = __byte_perm(before.y, v.y, q ? 0x5432 : 0x3254);
        }
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        constexpr bool kSIX = TYPE == kNEXTN_Q6_K;
        x.frag[i] = (kSIX ? i & 3 : i >> 1 & 3) == pair ? here[kSIX ? i >> 2 : 2 * (i >> 3) + (i & 1)] : 0;
    }
    if constexpr (TYPE == kNEXTN_Q6_K) {
#pragma unroll
        for (int group = 0; group < 4; ++group) {
            const OffsetDigits d = offset_digits(slot.sum16[8 * (group >> 1) + 2 * q + (group & 1)]);
            // through the shuffle unit, or the compiler would copy them anew for every tile
#pragma unroll
            for (int i = 0; i < 4; ++i) x.start[group][i] = __shfl_sync(~0u, i & 1 ? -32 * d.low : -16 * d.rest, lane);
        }
    } else {
        x.sums = slot.sums[low][q];
    }
    x.scale = slot.scale;
}

// Several tokens: all blocks together quantise the rows of a product, a warp a superblock of a token. norm: of the
// first.
template <int NT>
__device__ __forceinline__ void quantize_shared(const LayerParams& p, const RowSource& s, int supers, int warp,
                                                int lane, float4 (&norm)[2]) {
    const int first = warp * gridDim.x + blockIdx.x;
#pragma unroll 1
    for (int i = first; i < supers * p.t; i += kWARPS * gridDim.x) {
        const int superblock = i % supers, token = i / supers;
        float4 v[2];
        request_values(s, token, superblock, lane, v);
        if (s.norm && i != first) load_norm(s, superblock, lane, norm);
        const float sum = scale_values(p, s, token, superblock, lane, v, norm);
        const int64_t slot = static_cast<int64_t>(superblock) * NT + token / kGroupTokens;
        const float scale = quantize_superblock(v, p.shared, slot, token % kGroupTokens, lane);
        if (lane == 0) {
            p.shared.scale[slot * kGroupTokens + token % kGroupTokens] = scale;
            if (s.norm) p.row_squares[token * kWARPS + superblock] = sum;
        }
    }
}

}  // namespace nextn
