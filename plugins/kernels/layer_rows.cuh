// Rows of a product as operands: up to four tokens by every block for itself, more by all blocks together.
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

// A lane's values at x of one token's superblock, known to be there most likely.
__device__ __forceinline__ void await_values(const float* x, float4 (&v)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) v[h] = load_now4(x + 16 * h);
#pragma unroll
    for (int h = 0; h < 2; ++h) await(x + 16 * h, v[h]);
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

// Two to four tokens: the values of a superblock that a lane quantises, as TokenOperand has them.
using TokensOperand = TokenOperand<kANY_KQUANT, 1>;
__device__ __forceinline__ void load_norm(const RowSource& s, int superblock, int lane, float4 (&norm)[8]) {
    const float* at = s.norm + superblock * kSUPER + TokensOperand::place(lane);
#pragma unroll
    for (int i = 0; i < 8; ++i) norm[i] = __ldg(reinterpret_cast<const float4*>(at + 16 * i));
}

// In shared memory: who waits for a product's first rows, or null; how many warps read rows.
struct ReadingSigns {
    uint64_t* read;
    int* reading;
};

// Quantises a superblock of all tokens, which may not be there yet unless it is the first product's. Returns the sum of
// x^2 of token lane / 8 where rows are normed.
__device__ __forceinline__ float take_tokens(const LayerParams& p, int k, int superblock, int lane,
                                             const ReadingSigns& signs, TokensOperand& x) {
    const RowSource& s = p.source[k];
    const bool there = k == p.first;
    const int token = TokensOperand::row(0, p.t, lane);
    const float* row = s.x + token * s.ldx + superblock * kSUPER;
    const float* from = row + TokensOperand::place(lane);
    float4 norm[8] = {}, v[8], squares = {};
    if (s.norm) load_norm(s, superblock, lane, norm);
    if (there) {
        wait_for_predecessor();
        trace(p, 1);
    }
    bool again;
    do {
        if (s.squares)  // written after the values
            squares = await_all4(head_squares(p, s, token, 2 * superblock + (lane >> 2 & 1)));
        else if (!there)
            await_all(row + kSUPER - 1);  // when that is there, most likely all are
        if (lane == 0) atomicAdd(signs.reading, 1);
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = load_now4(from + 16 * i);
        asm volatile("" ::"f"(v[7].w) : "memory");  // when it is there
        if (lane == 0) atomicAdd(signs.reading, -1);
        again = false;
#pragma unroll
        for (int i = 0; i < 8; ++i) again |= absent(v[i]);
    } while (!there && __any_sync(~0u, again));
    if (signs.read) {
        if (lane == 0) mbarrier_arrive(signs.read);
        trace(p, 5 * k + 2);
    }
    float sum = 0.0f;
    if (s.norm) {
        sum = TokensOperand::squares_of_lanes(v);
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = times(v[i], norm[i]);
    }
    if (s.squares) {
        const float factor = head_factor(p, squares);
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = times(v[i], factor);
    }
    x.quantize_values(0, v, TokensOperand::max_bits_of_lanes(v), lane);
    if (signs.read) trace(p, 5 * k + 3);
    return sum;
}

// More than four tokens: all blocks together quantise the rows of a product, a warp a superblock of a token. norm: of
// the first.
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
        float4 squares = {};
        if (s.squares) squares = load_now4(head_squares(p, s, token, 2 * superblock + (lane >> 4)));
        const float sum = scale_values(p, s, v, norm, squares);
        const int64_t slot = static_cast<int64_t>(superblock) * NT + token / kGroupTokens;
        const float scale = quantize_superblock(v, p.shared, slot, token % kGroupTokens, lane);
        if (lane == 0) {
            p.shared.scale[slot * kGroupTokens + token % kGroupTokens] = scale;
            if (s.norm) p.row_squares[token * kWARPS + superblock] = sum;
        }
    }
}

}  // namespace nextn
