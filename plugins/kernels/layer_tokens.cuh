// Rows of a product as operands, several tokens: the two warps that need a superblock quantise half of them each.
#pragma once
#include "layer_rows.cuh"

namespace nextn {

using TokensOperand = TokenOperand<kANY_KQUANT, 1>;

// A superblock of a group of tokens as TokenOperand has it.
struct __align__(16) TokensSlot {
    uint4 frag[4][32];  // words 4 i .. 4 i + 3 of a lane
    uint2 sums[32], six[32];
    float scale[4];
};

// In shared memory: who waits for a product's first rows, or null; how many warps read rows.
struct ReadingSigns {
    uint64_t* read;
    int* reading;
};

// Values of a superblock of two tokens of a group, 16 a lane: v[0] at 64 * part + 4 * q, the others 16 further each.
// Lane: 16 * (second token) + 4 * part + q.
struct HalfOfTokens {
    float4 v[4];
    float sum;  // of x^2 over the superblock, where rows are normed

    // To a slot, quantised.
    __device__ __forceinline__ void put(TokensSlot& slot, int token, int lane) const {
        const int q = lane & 3, part = lane >> 2 & 3;
        uint32_t bits = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) bits = max_bits(bits, v[i]);
#pragma unroll
        for (int d = 1; d < 16; d <<= 1) bits = max(bits, __shfl_xor_sync(~0u, bits, d));
        const QuantScale scale = quant_scale(bits);
        if ((lane & 15) == 0) slot.scale[token] = scale.scale;
        const QuantWord w[4] = {quantize4(v[0], scale.inverse), quantize4(v[1], scale.inverse),
                                quantize4(v[2], scale.inverse), quantize4(v[3], scale.inverse)};
        slot.frag[part][8 * token + q] = make_uint4(w[0].hi, w[1].hi, w[2].hi, w[3].hi);
        slot.frag[part][8 * token + 4 + q] = make_uint4(w[0].lo, w[1].lo, w[2].lo, w[3].lo);
        int total[4], two[2], other[2];  // over 16 values, and 32
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            total[i] = w[i].sum;
            total[i] += __shfl_xor_sync(~0u, total[i], 1);
            total[i] += __shfl_xor_sync(~0u, total[i], 2);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            two[i] = total[2 * i] + total[2 * i + 1];
            other[i] = __shfl_xor_sync(~0u, two[i], 4);
        }
        // lanes q have the digits of sums, or of six, in column hi or lo
        const bool low = q & 1, affine = q & 2;
        const int column = 4 * (2 * token + low);
        if (affine) {
            const int to = (part >> 1) + (part & 1 ? 2 : 0);
            const int need[4] = {part & 1 ? other[0] : two[0], part & 1 ? other[1] : two[1],
                                 part & 1 ? two[0] : other[0], part & 1 ? two[1] : other[1]};
            slot.sums[column + to] = TokensOperand::pack_affine(need, to, low);
        } else {
            slot.six[column + part] = TokensOperand::pack_six(total, low);
        }
    }
};

__device__ __forceinline__ void load_slot(const TokensSlot& slot, TokensOperand& x, int lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint4 v = slot.frag[i][lane];
        x.frag[0][4 * i] = v.x;
        x.frag[0][4 * i + 1] = v.y;
        x.frag[0][4 * i + 2] = v.z;
        x.frag[0][4 * i + 3] = v.w;
    }
    x.sums[0] = slot.sums[lane];
    x.six[0] = slot.six[lane];
    x.scale[0] = slot.scale[lane & 3];
}

// Tokens `half` and `half + 2`, or of what there is of them: nobody looks at results of one that is not.
__device__ __forceinline__ int token_of(const LayerParams& p, int half, int lane) {
    const int t = half + 2 * (lane >> 4);
    return t < p.t ? t : half;
}
__device__ __forceinline__ int value_of_tokens(int superblock, int lane) {
    return superblock * kSUPER + 64 * (lane >> 2 & 3) + 4 * (lane & 3);
}
__device__ __forceinline__ void request_tokens(const LayerParams& p, int k, int half, int superblock, int lane,
                                               HalfOfTokens& x) {
    const RowSource& s = p.source[k];
    const float* from = s.x + token_of(p, half, lane) * s.ldx + value_of_tokens(superblock, lane);
#pragma unroll
    for (int i = 0; i < 4; ++i) x.v[i] = load_now4(from + 16 * i);
}
__device__ __forceinline__ bool any_absent(const HalfOfTokens& x) {
    return __any_sync(~0u, absent(x.v[0]) || absent(x.v[1]) || absent(x.v[2]) || absent(x.v[3]));
}

// A superblock of two tokens when they are there; they are for the first product. Times the norm's weights and the
// head's factor. requested: x was, and may be there.
__device__ __forceinline__ void take_tokens(const LayerParams& p, int k, int half, int superblock, int lane,
                                            const ReadingSigns& signs, bool requested, HalfOfTokens& x) {
    const RowSource& s = p.source[k];
    const bool there = k == p.first;
    const int token = token_of(p, half, lane);
    float4 norm[4] = {}, squares = {};
    if (s.norm)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            norm[i] = __ldg(reinterpret_cast<const float4*>(s.norm + value_of_tokens(superblock, lane) + 16 * i));
    if (there) {
        wait_for_predecessor();
        trace(p, 1);
    }
    if (!requested || any_absent(x)) do {
            if (s.squares)  // written after the values
                squares = await_all4(head_squares(p, s, token, 2 * superblock + (lane >> 3 & 1)));
            else if (!there)
                await_all(last_value(s, token, superblock));
            if (lane == 0) atomicAdd(signs.reading, 1);
            request_tokens(p, k, half, superblock, lane, x);
            asm volatile("" ::"f"(x.v[3].w) : "memory");  // when it is there
            if (lane == 0) atomicAdd(signs.reading, -1);
        } while (!there && any_absent(x));
    if (signs.read) {
        if (lane == 0) mbarrier_arrive(signs.read);
        trace(p, 5 * k + 2);
    }
    float4(&v)[4] = x.v;
    x.sum = 0.0f;
    if (s.norm) {  // in the order of sum_of_places
        x.sum = __fadd_rn(squares_of(v[0], v[1]), squares_of(v[2], v[3]));
#pragma unroll
        for (const int d : {4, 1, 2, 8}) x.sum = __fadd_rn(x.sum, __shfl_xor_sync(~0u, x.sum, d));
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = times(v[i], norm[i]);
    }
    if (s.squares) {
        const float factor = head_factor(p, squares);
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = times(v[i], factor);
    }
}

}  // namespace nextn
