// Arithmetic of one layer's conv and delta rule, shared by the fused decode kernel and the two prefill kernels so that
// both give the same bits.
#pragma once
#include "gated_delta_net_steps.cuh"

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

struct Gates {
    float decay, rate;
};
__device__ __forceinline__ Gates gates_of(float a, float dt_bias, float alpha, float beta) {
    const float x = __fadd_rn(alpha, dt_bias);
    const float softplus = x > 20.0f ? x : log1pf(expf(x));
    return {expf(__fmul_rn(a, softplus)), __fdiv_rn(1.0f, __fadd_rn(1.0f, expf(-beta)))};
}
__device__ __forceinline__ Gates gates_of(const NextnGatedDeltaNet& p, float alpha, float beta, int h) {
    return gates_of(p.a[h], p.dt_bias[h], alpha, beta);
}

// A block's share of a head's state, COLS value columns, in registers: a lane has 32 rows of one column, so that every
// access to the pool is a full line.  warp = row part + (D/32) * column group.
template <int D, int COLS>
struct HeadState {
    static constexpr int kROW_PARTS = D / 32, kTHREADS = 32 * kROW_PARTS * (COLS / 32);
    using Partials = float2[2][kROW_PARTS][COLS];  // sums over a row part, by parity of the token

    float s[32];
    float u;  // of the last step
    int row0, column, parity = 0;

    __device__ __forceinline__ HeadState()
        : row0(32 * ((threadIdx.x >> 5) % kROW_PARTS)),
          column(32 * ((threadIdx.x >> 5) / kROW_PARTS) + (threadIdx.x & 31)) {}

    // The state after the token of a slot, zeros where that is negative.  column0: the block's first of head h.
    __device__ __forceinline__ void load(const NextnGatedDeltaNet& p, int slot, int h, int column0) {
        const int group0 = column0 + column / 32 * 32, lane = column % 32;
        if (row0 == 0) prefetch_steps<D>(p, slot, h, group0, lane);
        const float* head = p.state_pool + static_cast<int64_t>(h) * D * D + column0 + column;
#pragma unroll
        for (int i = 0; i < 32; ++i) s[i] = slot < 0 ? 0.0f : __ldcg(head + (row0 + i) * D);
#pragma unroll 1
        for (int j = 1; j <= slot; ++j) {
            const StateStep<D> step(p.state_pool, p.v_heads, j, h, group0);
            const float by = __ldcg(step.u(lane)), decay = __ldcg(step.decay());
#pragma unroll
            for (int i = 0; i < 32; i += 4) {
                const float4 k = __ldcg(reinterpret_cast<const float4*>(step.k(row0 + i)));
                s[i] = after_step(s[i], k.x, by, decay);
                s[i + 1] = after_step(s[i + 1], k.y, by, decay);
                s[i + 2] = after_step(s[i + 2], k.z, by, decay);
                s[i + 3] = after_step(s[i + 3], k.w, by, decay);
            }
        }
    }
    // After `step` of token t, of which k and decay are: what its slot is to hold.
    __device__ __forceinline__ void keep(const NextnGatedDeltaNet& p, int t, int h, int column0, const float* k,
                                         float decay) const {
        const int to = slot_after(p, t), lane = column % 32;
        if (to == 0) {
            float* head = p.state_pool + static_cast<int64_t>(h) * D * D + column0 + column;
#pragma unroll
            for (int i = 0; i < 32; ++i) head[(row0 + i) * D] = s[i];
        } else if (to > 0) {
            const StateStep<D> step(p.state_pool, p.v_heads, to, h, column0 + column - lane);
            *step.k(row0 + lane) = k[row0 + lane];
            if (row0 == 0) *step.u(lane) = u;
            if (row0 == 0 && lane == 0) *step.decay() = decay;
        }
    }
    // S' = g S + k u, u = rate (v - g S^T k); o = S'^T q = g S^T q + u (k.q), so both sums use the old state and run
    // side by side.  Holds one block barrier; returns o of this lane's column (the same in every row part).
    __device__ __forceinline__ float step(Partials& partials, const float* k, const float* q, float kq, const float* v,
                                          const Gates& gate) {
        float4 sk = {0, 0, 0, 0}, sq = {0, 0, 0, 0}, kb[8];
#pragma unroll
        for (int b = 0; b < 8; ++b) {
            kb[b] = *reinterpret_cast<const float4*>(k + row0 + 4 * b);
            const float4 qb = *reinterpret_cast<const float4*>(q + row0 + 4 * b);
            sk.x = __fmaf_rn(s[4 * b], kb[b].x, sk.x);
            sq.x = __fmaf_rn(s[4 * b], qb.x, sq.x);
            sk.y = __fmaf_rn(s[4 * b + 1], kb[b].y, sk.y);
            sq.y = __fmaf_rn(s[4 * b + 1], qb.y, sq.y);
            sk.z = __fmaf_rn(s[4 * b + 2], kb[b].z, sk.z);
            sq.z = __fmaf_rn(s[4 * b + 2], qb.z, sq.z);
            sk.w = __fmaf_rn(s[4 * b + 3], kb[b].w, sk.w);
            sq.w = __fmaf_rn(s[4 * b + 3], qb.w, sq.w);
        }
        partials[parity][row0 / 32][column] = make_float2(horizontal(sk), horizontal(sq));
#pragma unroll
        for (int i = 0; i < 32; ++i) s[i] = __fmul_rn(gate.decay, s[i]);
        __syncthreads();
        float k_sum = 0.0f, q_sum = 0.0f;
#pragma unroll
        for (int r = 0; r < kROW_PARTS; ++r) {
            const float2 f = partials[parity][r][column];
            k_sum = __fadd_rn(k_sum, f.x);
            q_sum = __fadd_rn(q_sum, f.y);
        }
        parity ^= 1;  // so the next step's sums need no second barrier
        u = __fmul_rn(gate.rate, __fmaf_rn(-gate.decay, k_sum, v[column]));
#pragma unroll
        for (int b = 0; b < 8; ++b) {
            s[4 * b] = __fmaf_rn(kb[b].x, u, s[4 * b]);
            s[4 * b + 1] = __fmaf_rn(kb[b].y, u, s[4 * b + 1]);
            s[4 * b + 2] = __fmaf_rn(kb[b].z, u, s[4 * b + 2]);
            s[4 * b + 3] = __fmaf_rn(kb[b].w, u, s[4 * b + 3]);
        }
        return __fmaf_rn(u, kq, __fmul_rn(gate.decay, q_sum));
    }

private:
    static __device__ __forceinline__ float horizontal(const float4& v) {
        return __fadd_rn(__fadd_rn(v.x, v.y), __fadd_rn(v.z, v.w));
    }
};

// kq[t] = k[t] . q[t], one warp per token.
template <int D, int TOKENS>
__device__ __forceinline__ void key_query_dots(float (&kq)[TOKENS], const float (&k)[TOKENS][D],
                                               const float (&q)[TOKENS][D], int count) {
    const int lane = threadIdx.x & 31;
    for (int t = threadIdx.x >> 5; t < count; t += blockDim.x >> 5) {
        float v = 0.0f;
#pragma unroll
        for (int e = 0; e < D / 32; ++e) v = __fmaf_rn(k[t][lane + 32 * e], q[t][lane + 32 * e], v);
        v = warp_sum(v);
        if (lane == 0) kq[t] = v;
    }
}

// The sum of squares over a head's D outputs is taken in one order however they are spread over blocks: 32 columns by
// butterfly (warp_sum), then the groups of 32 in order.
__device__ __forceinline__ float gated_norm(float o, float total, int dim, float eps, float weight, float gate) {
    const float factor = __frsqrt_rn(__fmaf_rn(total, 1.0f / dim, eps));
    return __fmul_rn(__fmul_rn(__fmul_rn(o, factor), weight), gate);
}

// t <= 8, compute capability 9.0 and up
cudaError_t gated_delta_net_fused(const NextnGatedDeltaNet& p, cudaStream_t stream);

}  // namespace nextn
