// Splits of the keys, and the launch that joins their results.
#pragma once
#include "attention.h"
#include "attention_cache.cuh"

namespace nextn {

// Split length of a token at `position`: a multiple of kKEYS that gives at most kMAX_SPLITS splits.  It depends on
// the token's own position only; the tokens of one call have at most two different lengths.
constexpr int kMAX_SPLITS = 64;
__device__ __forceinline__ int split_length(int position) { return kKEYS * (position / (kKEYS * kMAX_SPLITS) + 1); }

struct Partials {
    float* out;        // [split][t][H][D], not divided by the sum
    float2* maximum;   // [split][t][H]: maximum (in log2 units) and sum
    int ratio;         // query heads of a kv head
    uint32_t inverse;  // row * inverse >> 16 = row / ratio
};

__device__ __forceinline__ float gated(float v, float gate) {
    return __fmul_rn(v, __fdiv_rn(1.0f, __fadd_rn(1.0f, expf(-gate))));
}

// All lanes of a warp: weights of splits lane + 32 i by their maximum and sum. Returns the sum of all.
__device__ __forceinline__ float weigh(float (&weight)[kMAX_SPLITS / 32], const float2 (&m)[kMAX_SPLITS / 32]) {
    float top = -INFINITY, sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kMAX_SPLITS / 32; ++i) top = fmaxf(top, m[i].x);
#pragma unroll
    for (int d = 16; d; d >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
#pragma unroll
    for (int i = 0; i < kMAX_SPLITS / 32; ++i) {
        weight[i] = exp2f(__fsub_rn(m[i].x, top));
        sum = __fmaf_rn(weight[i], m[i].y, sum);
    }
#pragma unroll
    for (int d = 16; d; d >>= 1) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, d));
    return sum;
}

// grid (heads, t), D threads: joins the splits of one token and head in order.
template <int D>
__global__ void __launch_bounds__(D)
    combine_kernel(const __grid_constant__ NextnAttention p, const __grid_constant__ Partials part) {
    constexpr int kTOGETHER = 16, kMINE = kMAX_SPLITS / 32;
    launch_dependents();
    const int h = blockIdx.x, t = blockIdx.y, c = threadIdx.x, lane = c & 31;
    float* y = p.y + t * p.ld_y + h * D + c;
    wait_for_predecessor();
    const int position = __ldcg(p.position) + t;
    const float gate = __ldcg(p.query_gate + t * p.ld_query + (2 * h + 1) * D + c);
    if (position >= p.capacity) {
        *y = __uint_as_float(0x7fc00000u);
        return;
    }
    const int splits = position / split_length(position) + 1;
    const int stride = p.t * p.heads, first = t * p.heads + h;
    float2 m[kMINE];
#pragma unroll
    for (int i = 0; i < kMINE; ++i) {
        const int sp = lane + 32 * i;
        m[i] = sp < splits ? __ldcg(part.maximum + sp * stride + first) : make_float2(-INFINITY, 0.0f);
    }
    const float* from = part.out + first * D + c;
    float v = 0.0f, weight[kMINE], sum = 0.0f;
#pragma unroll 1
    for (int sp = 0;;) {
        float x[kTOGETHER];
#pragma unroll
        for (int i = 0; i < kTOGETHER; ++i)
            if (sp + i < splits) x[i] = __ldcg(from + (sp + i) * stride * D);
        if (sp == 0) sum = weigh(weight, m);
        const float w = sp < 32 ? weight[0] : weight[1];
#pragma unroll
        for (int i = 0; i < kTOGETHER; ++i) {
            const float mine = __shfl_sync(~0u, w, (sp & 31) + i);
            if (sp + i < splits) v = __fmaf_rn(mine, x[i], v);
        }
        sp += kTOGETHER;
        if (sp >= splits) break;
    }
    *y = gated(__fdiv_rn(v, sum), gate);
}

}  // namespace nextn
