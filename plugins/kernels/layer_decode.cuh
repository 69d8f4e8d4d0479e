// Parameters of the persistent layer kernel and the pieces of its consumer warps.
//
//   block = 16 consumer warps + 1 producer warp, one block a multiprocessor, phases separated by grid barriers; the
//   producer knows all weights beforehand and runs ahead through them, so memory stays busy during barriers
//   a consumer warp owns one superblock of each chunk of 16 of every tile
// Every choice that fixes the order of a sum follows from the layer, never from t.
#pragma once
#include "layer_parts.cuh"
#include "matmul_parts.cuh"
#include "quantize_superblock.cuh"
#include "weight_ring.cuh"

namespace nextn {

constexpr int kGDN_DIM = 128, kGDN_COLUMNS = 32, kGDN_KERNEL = 4, kGDN_PARTS = kGDN_DIM / kGDN_COLUMNS;
constexpr int kTHREADS = 32 * kWARPS;  // consumers

enum LayerPhase { kINPUT, kOUTPUT, kGATE_UP, kDOWN, kPHASES };

// Rows that a product takes: x, times norm weight by column, times a factor by head (Gated DeltaNet's output norm).
struct RowSource {
    const float* x;
    int64_t ldx;
    const float* norm;
    const float* squares;  // [t][heads][kGDN_PARTS], sums of o^2 over 32 columns
};

struct LayerParams {
    Phase phase[kPHASES];
    RowSource source[kPHASES];
    QuantizedRows shared;  // several tokens: rows of the product at hand, quantised by all blocks together
    float* row_squares;    // their sums of x^2 by superblock, [t][kWARPS]
    NextnGatedDeltaNet delta;   // rows and y set
    float* squares;
    uint32_t* sync;
    float eps;
    int32_t t, first, last, stages, stage_bytes, heads;  // first, last: of the phases to run
    bool delta_net;                                      // run it after kINPUT
};

// One token's superblock in shared memory, quantised.
struct __align__(16) TokenSlot {
    uint2 frag[2][4][4][2];     // [hi, lo][step / 2][q][step % 2]
    uint2 sums[2][4], six[2][4];  // as TokenOperand's, [hi, lo][q]
    int32_t sum16[16];
    float scale, padding[3];
};

// Loads return in order: one that waits for memory holds up everything behind it, a barrier's word too. So what will be
// needed later is brought to L2 first.
__device__ __forceinline__ void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// -DNEXTN_LAYER_TRACE: each block leaves its clock at every point behind the barrier word (tests.bench.layers reads it).
__device__ __forceinline__ void trace([[maybe_unused]] const LayerParams& p, [[maybe_unused]] int point) {
#ifdef NEXTN_LAYER_TRACE
    if (threadIdx.x == 0) reinterpret_cast<long long*>(p.sync + 64)[24 * blockIdx.x + point] = clock64();
#endif
}

__device__ __forceinline__ void consumers_sync() { asm volatile("bar.sync 1, %0;" ::"n"(kTHREADS) : "memory"); }

// All consumers of all blocks. What was written before is visible after to loads that bypass L1 (ld.cg).
struct GridBarrier {
    uint32_t* word;
    uint32_t bit;
    __device__ explicit GridBarrier(uint32_t* sync) : word(sync) {
        asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(bit) : "l"(word) : "memory");
        bit &= 0x80000000u;
    }
    // The last of gridDim.x arrivals turns the top bit, whatever it was: nothing to reset between launches.
    __device__ __forceinline__ void arrive() {
        consumers_sync();
        if (threadIdx.x == 0) {
            const uint32_t add = blockIdx.x ? 1 : 0x80000000u - (gridDim.x - 1);
            asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(word), "r"(add) : "memory");
        }
    }
    __device__ __forceinline__ void wait() {
        if (threadIdx.x == 0) {
            uint32_t now;
            do {
                asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(word) : "memory");
            } while ((now & 0x80000000u) == bit);
        }
        bit ^= 0x80000000u;
        consumers_sync();
    }
    __device__ __forceinline__ void sync() {
        arrive();
        wait();
    }
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
    const float4 v = __ldcg(reinterpret_cast<const float4*>(s.squares) + token * p.heads + head);
    const float total = __fadd_rn(__fadd_rn(__fadd_rn(v.x, v.y), v.z), v.w);
    return rms_factor(total, kGDN_DIM, p.eps);
}

// Eight values a lane of one superblock: v[0] at 32*(lane/4) + 4*(lane%4), v[1] 16 further.
__device__ __forceinline__ int64_t value_of_lane(int superblock, int lane) {
    return superblock * kSUPER + 32 * (lane >> 2) + 4 * (lane & 3);
}
__device__ __forceinline__ void request_values(const RowSource& s, int token, int superblock, int lane, float4 (&v)[2]) {
    const float* x = s.x + token * s.ldx + value_of_lane(superblock, lane);
#pragma unroll
    for (int h = 0; h < 2; ++h) v[h] = __ldcg(reinterpret_cast<const float4*>(x + 16 * h));
}
__device__ __forceinline__ void load_norm(const RowSource& s, int superblock, int lane, float4 (&norm)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) norm[h] = __ldg(reinterpret_cast<const float4*>(s.norm + value_of_lane(superblock, lane) + 16 * h));
}
// v times the norm's weights and the head's factor. Returns, in every lane, the sum of x^2 where the row is normed.
__device__ __forceinline__ float scale_values(const LayerParams& p, const RowSource& s, int token, int superblock, int lane,
                                              float4 (&v)[2], const float4 (&norm)[2]) {
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

// One token, to shared memory. Returns load_values' sum.
__device__ __forceinline__ float quantize_slot(const LayerParams& p, const RowSource& s, int superblock, TokenSlot& slot,
                                               int lane, float4 (&v)[2], const float4 (&norm)[2]) {
    const int sub = lane >> 2, q = lane & 3;
    const float sum = scale_values(p, s, 0, superblock, lane, v, norm);
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
    // a lane has one digit of each kind: column hi or low, q and byte of the operand
    const int low = lane >> 4, to = (lane >> 2) & 3, byte = lane & 3, at = 2 * (4 * (to & 1) + byte);
    const OffsetDigits six = offset_digits(slot.sum16[4 * to + byte], low);
    const MinDigit digit = min_digit(slot.sum16[at] + slot.sum16[at + 1], low);
    auto* word = reinterpret_cast<int8_t*>(&slot.six[low][to]) + byte;
    word[0] = static_cast<int8_t>(six.first);
    word[4] = static_cast<int8_t>(six.second);
    word = reinterpret_cast<int8_t*>(&slot.sums[low][to]) + byte;
    word[0] = static_cast<int8_t>(to < 2 ? digit.first : digit.rest);
    word[4] = static_cast<int8_t>(digit.rest);
    return sum;
}

// Operand of one token; columns of tokens that are not there repeat it.
__device__ __forceinline__ void load_slot(const TokenSlot& slot, TokenOperand<kANY_KQUANT, 1>& x, int lane) {
    const int q = lane & 3, low = (lane >> 2) & 1;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint4 v = *reinterpret_cast<const uint4*>(slot.frag[low][i][q]);
        x.frag[0][4 * i] = v.x;
        x.frag[0][4 * i + 1] = v.y;
        x.frag[0][4 * i + 2] = v.z;
        x.frag[0][4 * i + 3] = v.w;
    }
    x.six[0] = slot.six[low][q];
    x.sums[0] = slot.sums[low][q];
    x.scale[0] = slot.scale;
}

// Several tokens: all blocks together quantise the rows of a product, a warp a superblock of a token.
template <int NT>
__device__ __forceinline__ void quantize_shared(const LayerParams& p, const RowSource& s, int supers, int warp, int lane,
                                                float4 (&norm)[2]) {
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
