// Rows of a product, and one token's as operands.
#pragma once
#include "layer_flow.cuh"
#include "one_token.cuh"

namespace nextn {

// One token's superblock in shared memory, quantised.
struct __align__(16) TokenSlot {
    uint2 frag[2][4][4][2];  // [hi, lo][step / 2][q][step % 2]
    uint2 sums[2][4];        // as TokenOperand's, [hi, lo][q]
    int32_t sum16[16];
    float scale, padding[3];
};

// Of a head's outputs: the sums of squares over its parts, and 1 / rms.
__device__ __forceinline__ const float* head_squares(const LayerParams& p, const RowSource& s, int token, int head) {
    return s.squares + kGDN_PARTS * (token * p.heads + head);
}
__device__ __forceinline__ float head_factor(const LayerParams& p, const float4& squares) {
    const float total = __fadd_rn(__fadd_rn(__fadd_rn(squares.x, squares.y), squares.z), squares.w);
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
__device__ __forceinline__ void load_norm(const RowSource& s, int superblock, int lane, float4 (&norm)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h)
        norm[h] = __ldg(reinterpret_cast<const float4*>(s.norm + value_of_lane(superblock, lane) + 16 * h));
}
// v times the norm's weights and the head's factor. Returns, in every lane, the sum of x^2 where the row is normed.
__device__ __forceinline__ float scale_values(const LayerParams& p, const RowSource& s, float4 (&v)[2],
                                              const float4 (&norm)[2], const float4& squares) {
    float sum = 0.0f;
    if (s.norm) {
        sum = sum_of_places(squares_of(v[0], v[1]));
        v[0] = times(v[0], norm[0]);
        v[1] = times(v[1], norm[1]);
    }
    if (s.squares) {
        const float factor = head_factor(p, squares);
        v[0] = times(v[0], factor);
        v[1] = times(v[1], factor);
    }
    return sum;
}

// What is at an address of each lane when it is there for all of them. Others need the memory too, hence the pauses.
__device__ __forceinline__ float4 await_all4(const float* at) {
    float4 v;
    while (__any_sync(~0u, absent(v = load_now4(at)))) __nanosleep(100);
    return v;
}
__device__ __forceinline__ void await_all(const float* at) {
    while (__any_sync(~0u, absent(load_now(at)))) __nanosleep(100);
}

// Once per warp, when a value that was loaded is there.
__device__ __forceinline__ void arrive_when_there(uint64_t* barrier, float value, int lane) {
    asm volatile("" ::"f"(value) : "memory");
    if (lane == 0) mbarrier_arrive(barrier);
}

// A lane's values at x of one token's superblock, known to be there most likely. All lanes look again together: the
// compiler would take them to be at different places ever after, and nothing to be the same in all of them.
__device__ __forceinline__ void await_values(const float* x, float4 (&v)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) v[h] = load_now4(x + 16 * h);
#pragma unroll
    for (int h = 0; h < 2; ++h)
        while (__any_sync(~0u, absent(v[h]))) v[h] = load_now4(x + 16 * h);
}

// When that is there, most likely the superblock is.
__device__ __forceinline__ const float* last_value(const RowSource& s, int token, int superblock) {
    return s.x + token * s.ldx + superblock * kSUPER + kSUPER - 1;
}
// Values of a lane, when they are there; they are for the first product. Times the norm's weights and the head's
// factor. Returns the sum of x^2. read: who waits for them, or null.
__device__ __forceinline__ float take_values(const LayerParams& p, int k, int token, int superblock, int lane,
                                             const float4 (&norm)[2], uint64_t* read, float4 (&v)[2]) {
    const RowSource& from = p.source[k];
    float4 squares = {};
    if (from.squares)  // written after the values
        squares = await_all4(head_squares(p, from, token, 2 * superblock + (lane >> 4)));
    else if (k != p.first)
        await_all(last_value(from, token, superblock));
    if (k == p.first)  // could hold anything
        request_values(from, token, superblock, lane, v);
    else
        await_values(values_at(from, token, superblock, lane), v);
    if (read) {
        arrive_when_there(read, v[1].w, lane);
        trace_value(p, 5 * k + 2, v[1].w);
    }
    return scale_values(p, from, v, norm, squares);
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

// A later chunk's superblock. Not inline: it would be part of the code of every type's tiles.
__device__ __noinline__ void quantize_later(const float* x, const float* last, TokenSlot* slot, int lane) {
    float4 v[2];
    await_all(last);
    await_values(x, v);
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

}  // namespace nextn
