// Arithmetic of one layer's conv and delta rule, shared by the fused decode kernel and the two prefill kernels so that
// both give the same bits.
#pragma once
#include "gated_delta_net.h"
#include "ptx.cuh"

namespace nextn {

constexpr int kMAX_KERNEL = 8;

__device__ __forceinline__ float silu(float x) { return __fdiv_rn(x, __fadd_rn(1.0f, expf(-x))); }

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int d = 16; d; d >>= 1) v = __fadd_rn(v, __shfl_xor_sync(~0u, v, d));
    return v;
}

// silu(sum_j weight[j] * row(j)) of one channel.
template <typename Weight, typename Row>
__device__ __forceinline__ float conv_silu(int kernel, Weight weight, Row row) {
    float v = 0.0f;
#pragma unroll
    for (int j = 0; j < kMAX_KERNEL; ++j)
        if (j < kernel) v = __fmaf_rn(weight(j), row(j), v);
    return silu(v);
}

// v / sqrt(sum v^2 + eps) over a warp's values, times 1/sqrt(D) for queries.
template <int PER>
__device__ __forceinline__ void unit_norm(float (&v)[PER], float eps, bool query) {
    float squares = 0.0f;
#pragma unroll
    for (int e = 0; e < PER; ++e) squares = __fmaf_rn(v[e], v[e], squares);
    float factor = __frsqrt_rn(__fadd_rn(warp_sum(squares), eps));
    if (query) factor = __fmul_rn(factor, rsqrtf(32.0f * PER));
#pragma unroll
    for (int e = 0; e < PER; ++e) v[e] = __fmul_rn(v[e], factor);
}

template <int PER>
__device__ __forceinline__ float warp_dot(const float (&a)[PER], const float (&b)[PER]) {
    float v = 0.0f;
#pragma unroll
    for (int e = 0; e < PER; ++e) v = __fmaf_rn(a[e], b[e], v);
    return warp_sum(v);
}

struct Gates { float decay, rate; };
__device__ __forceinline__ Gates gates_of(const NextnGatedDeltaNet& p, int t, int h) {
    const float x = __fadd_rn(__ldcg(p.alpha + t * p.ld_gate + h), p.dt_bias[h]);
    const float softplus = x > 20.0f ? x : log1pf(expf(x));
    return {expf(__fmul_rn(p.a[h], softplus)),
            __fdiv_rn(1.0f, __fadd_rn(1.0f, expf(-__ldcg(p.beta + t * p.ld_gate + h))))};
}

// The block's share of a head's state in registers: 8 value columns to a warp.  Lane: column lane%8, rows
// 16b + 4*(lane/8) .. +3 of every b, so that its rows of k and q are conflict-free float4 loads.
template <int D>
struct HeadState {
    static constexpr int kBLOCKS = D / 16;
    float s[kBLOCKS][4];

    // `at`: this lane's first element, row 4*(lane/8) of its column.
    __device__ __forceinline__ void load(const float* at, bool zero) {
#pragma unroll
        for (int b = 0; b < kBLOCKS; ++b)
#pragma unroll
            for (int e = 0; e < 4; ++e) s[b][e] = zero ? 0.0f : __ldcg(at + (16 * b + e) * D);
    }
    __device__ __forceinline__ void store(float* at) const {
#pragma unroll
        for (int b = 0; b < kBLOCKS; ++b)
#pragma unroll
            for (int e = 0; e < 4; ++e) __stcg(at + (16 * b + e) * D, s[b][e]);
    }
    // S' = g S + k u, u = rate (v - g S^T k); o = S'^T q = g S^T q + u (k.q), so both sums use the old state and run
    // side by side.
    __device__ __forceinline__ float step(const float* k, const float* q, float kq, float v, const Gates& gate, int lane) {
        float4 sk = {0, 0, 0, 0}, sq = {0, 0, 0, 0}, kb[kBLOCKS];
        const int part = lane >> 3;
#pragma unroll
        for (int b = 0; b < kBLOCKS; ++b) {
            kb[b] = *reinterpret_cast<const float4*>(k + 16 * b + 4 * part);
            const float4 qb = *reinterpret_cast<const float4*>(q + 16 * b + 4 * part);
            sk.x = __fmaf_rn(s[b][0], kb[b].x, sk.x); sq.x = __fmaf_rn(s[b][0], qb.x, sq.x);
            sk.y = __fmaf_rn(s[b][1], kb[b].y, sk.y); sq.y = __fmaf_rn(s[b][1], qb.y, sq.y);
            sk.z = __fmaf_rn(s[b][2], kb[b].z, sk.z); sq.z = __fmaf_rn(s[b][2], qb.z, sq.z);
            sk.w = __fmaf_rn(s[b][3], kb[b].w, sk.w); sq.w = __fmaf_rn(s[b][3], qb.w, sq.w);
        }
        float k_sum = __fadd_rn(__fadd_rn(sk.x, sk.y), __fadd_rn(sk.z, sk.w));
        float q_sum = __fadd_rn(__fadd_rn(sq.x, sq.y), __fadd_rn(sq.z, sq.w));
#pragma unroll
        for (int d = 8; d < 32; d <<= 1) {
            k_sum = __fadd_rn(k_sum, __shfl_xor_sync(~0u, k_sum, d));
            q_sum = __fadd_rn(q_sum, __shfl_xor_sync(~0u, q_sum, d));
        }
        const float u = __fmul_rn(gate.rate, __fmaf_rn(-gate.decay, k_sum, v));
#pragma unroll
        for (int b = 0; b < kBLOCKS; ++b) {
            s[b][0] = __fmaf_rn(kb[b].x, u, __fmul_rn(gate.decay, s[b][0]));
            s[b][1] = __fmaf_rn(kb[b].y, u, __fmul_rn(gate.decay, s[b][1]));
            s[b][2] = __fmaf_rn(kb[b].z, u, __fmul_rn(gate.decay, s[b][2]));
            s[b][3] = __fmaf_rn(kb[b].w, u, __fmul_rn(gate.decay, s[b][3]));
        }
        return __fmaf_rn(u, kq, __fmul_rn(gate.decay, q_sum));
    }
};

// Sum of squares over D outputs in one fixed order whatever the number of blocks: 8 neighbouring columns by butterfly
// (`squares` of each group of 8), then the groups in order.
__device__ __forceinline__ float group_squares(float o) {
    float v = __fmul_rn(o, o);
#pragma unroll
    for (int d = 1; d < 8; d <<= 1) v = __fadd_rn(v, __shfl_xor_sync(~0u, v, d));
    return v;
}

__device__ __forceinline__ float gated_norm(float o, float total, int dim, float eps, float weight, float gate) {
    const float factor = __frsqrt_rn(__fmaf_rn(total, 1.0f / dim, eps));
    return __fmul_rn(__fmul_rn(__fmul_rn(o, factor), weight), gate);
}

cudaError_t gated_delta_net_fused(const NextnGatedDeltaNet& p, cudaStream_t stream);    // t <= 8, capability >= 9.0

}  // namespace nextn
