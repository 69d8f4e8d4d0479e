// Two launches: conv + head norms over all channels (its window pool is shared between heads, so it must be read and
// written by the block that owns the channels), then the delta rule with the state in registers.
#include <cooperative_groups.h>
#include "gated_delta_net.h"
#include "launch.cuh"
#include "ptx.cuh"

namespace nextn {
namespace {

constexpr int kCONV_WARPS = 8, kMAX_KERNEL = 8, kCHUNK = 16;

__device__ __forceinline__ float silu(float x) { return __fdiv_rn(x, __fadd_rn(1.0f, expf(-x))); }

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int d = 16; d; d >>= 1) v = __fadd_rn(v, __shfl_xor_sync(~0u, v, d));
    return v;
}

// One block per D channels (a head of q, k or v); a warp takes one token at a time, a lane D/32 neighbouring channels.
template <int D>
__global__ void __launch_bounds__(32 * kCONV_WARPS) conv_heads_kernel(const __grid_constant__ NextnGatedDeltaNet p,
                                                                      float* mixed) {
    constexpr int kPER = D / 32;
    __shared__ float window[kMAX_KERNEL - 1][D];
    launch_dependents();
    wait_for_predecessor();
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, head = blockIdx.x;
    const int64_t channels = static_cast<int64_t>(gridDim.x) * D, first = static_cast<int64_t>(head) * D;
    const int before = p.conv_kernel - 1, slot = __ldcg(p.slot);
    // the window must be read whole before any slot is written
    for (int i = threadIdx.x; i < before * D; i += blockDim.x)
        window[i / D][i % D] = slot < 0 ? 0.0f
            : __ldcg(p.conv_pool + (static_cast<int64_t>(slot) * before + i / D) * channels + first + i % D);
    __syncthreads();
    const auto row_at = [&](int t, int c) {  // pre-convolution row, t >= -before
        return t < 0 ? window[t + before][c] : __ldcg(p.qkv + t * p.ld_qkv + first + c);
    };
    float weight[kPER][kMAX_KERNEL];
#pragma unroll
    for (int e = 0; e < kPER; ++e)
#pragma unroll
        for (int j = 0; j < kMAX_KERNEL; ++j)
            weight[e][j] = j <= before ? p.conv_weight[(first + lane * kPER + e) * p.conv_kernel + j] : 0.0f;
    for (int t = warp; t < p.t; t += kCONV_WARPS) {
        float v[kPER];
#pragma unroll
        for (int e = 0; e < kPER; ++e) {
            v[e] = 0.0f;
#pragma unroll
            for (int j = 0; j < kMAX_KERNEL; ++j)
                if (j <= before) v[e] = __fmaf_rn(weight[e][j], row_at(t - before + j, lane * kPER + e), v[e]);
            v[e] = silu(v[e]);
        }
        if (head < 2 * p.k_heads) {
            float squares = 0.0f;
#pragma unroll
            for (int e = 0; e < kPER; ++e) squares = __fmaf_rn(v[e], v[e], squares);
            float factor = __frsqrt_rn(__fadd_rn(warp_sum(squares), p.eps));
            if (head < p.k_heads) factor = __fmul_rn(factor, rsqrtf(static_cast<float>(D)));
#pragma unroll
            for (int e = 0; e < kPER; ++e) v[e] = __fmul_rn(v[e], factor);
        }
#pragma unroll
        for (int e = 0; e < kPER; ++e) mixed[t * channels + first + lane * kPER + e] = v[e];
    }
    const bool keep_all = p.t <= p.slots;
    const int writes = keep_all ? p.t : 1;
    for (int i = threadIdx.x; i < writes * before * D; i += blockDim.x) {
        const int s = i / (before * D), j = i / D % before, t = keep_all ? s : p.t - 1;
        p.conv_pool[(static_cast<int64_t>(s) * before + j) * channels + first + i % D] = row_at(t - before + 1 + j, i % D);
    }
}

// kCHUNK tokens of one head in shared memory, for the block's COLS value columns.
template <int D, int COLS>
struct Chunk {
    float q[kCHUNK][D], k[kCHUNK][D], v[kCHUNK][COLS], o[kCHUNK][COLS];
    float decay[kCHUNK], rate[kCHUNK], kq[kCHUNK];
    float squares[kCHUNK][COLS / 8];  // of o, by warp
    float total[kCHUNK];              // of o over this block's columns
};

template <int D, int COLS>
__device__ void load_chunk(const NextnGatedDeltaNet& p, const float* mixed, Chunk<D, COLS>& s, int t0, int count, int h,
                           int column0) {
    const int warps = blockDim.x >> 5, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int64_t channels = (2 * p.k_heads + p.v_heads) * static_cast<int64_t>(D);
    for (int i = warp; i < count; i += warps) {
        const float* row = mixed + (t0 + i) * channels;
        float kq = 0.0f;
#pragma unroll
        for (int e = lane; e < D; e += 32) {
            const float q = __ldcg(row + (h % p.k_heads) * D + e);
            const float k = __ldcg(row + (p.k_heads + h % p.k_heads) * D + e);
            s.q[i][e] = q;
            s.k[i][e] = k;
            kq = __fmaf_rn(q, k, kq);
        }
        for (int e = lane; e < COLS; e += 32) s.v[i][e] = __ldcg(row + (2 * p.k_heads + h) * D + column0 + e);
        kq = warp_sum(kq);
        if (lane == 0) {
            s.kq[i] = kq;
            const float x = __ldcg(p.alpha + (t0 + i) * p.ld_gate + h) + p.dt_bias[h];
            const float softplus = x > 20.0f ? x : log1pf(expf(x));
            s.decay[i] = expf(__fmul_rn(p.a[h], softplus));
            s.rate[i] = __fdiv_rn(1.0f, __fadd_rn(1.0f, expf(-__ldcg(p.beta + (t0 + i) * p.ld_gate + h))));
        }
    }
}

// grid (PARTS * HV): PARTS blocks of a cluster share a head, each with D / PARTS value columns, 8 to a warp.
// Lane: column lane%8, rows 16b + 4*(lane/8) .. +3 of every b, so that its rows of k and q are float4 without conflicts.
template <int D, int PARTS>
__global__ void __launch_bounds__(D / PARTS * 4) delta_rule_kernel(const __grid_constant__ NextnGatedDeltaNet p,
                                                                   const float* mixed) {
    constexpr int COLS = D / PARTS, kBLOCKS = D / 16;
    __shared__ Chunk<D, COLS> s;
    launch_dependents();
    wait_for_predecessor();
    const int h = blockIdx.x / PARTS, column0 = blockIdx.x % PARTS * COLS;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, part = lane >> 3, column = 8 * warp + (lane & 7);
    const int slot = __ldcg(p.slot);
    const auto state_at = [&](int sl) {
        return p.state_pool + ((static_cast<int64_t>(sl) * p.v_heads + h) * D + 4 * part) * D + column0 + column;
    };
    float state[kBLOCKS][4];
#pragma unroll
    for (int b = 0; b < kBLOCKS; ++b)
#pragma unroll
        for (int e = 0; e < 4; ++e) state[b][e] = slot < 0 ? 0.0f : __ldcg(state_at(slot) + (16 * b + e) * D);
    for (int t0 = 0; t0 < p.t; t0 += kCHUNK) {
        const int count = min(kCHUNK, p.t - t0);
        load_chunk(p, mixed, s, t0, count, h, column0);
        __syncthreads();
        for (int i = 0; i < count; ++i) {
            float sk = 0.0f, sq = 0.0f;
            float4 k[kBLOCKS];
#pragma unroll
            for (int b = 0; b < kBLOCKS; ++b) {
                k[b] = *reinterpret_cast<const float4*>(&s.k[i][16 * b + 4 * part]);
                const float4 q = *reinterpret_cast<const float4*>(&s.q[i][16 * b + 4 * part]);
                sk = __fmaf_rn(state[b][0], k[b].x, sk); sq = __fmaf_rn(state[b][0], q.x, sq);
                sk = __fmaf_rn(state[b][1], k[b].y, sk); sq = __fmaf_rn(state[b][1], q.y, sq);
                sk = __fmaf_rn(state[b][2], k[b].z, sk); sq = __fmaf_rn(state[b][2], q.z, sq);
                sk = __fmaf_rn(state[b][3], k[b].w, sk); sq = __fmaf_rn(state[b][3], q.w, sq);
            }
#pragma unroll
            for (int d = 8; d < 32; d <<= 1) {
                sk = __fadd_rn(sk, __shfl_xor_sync(~0u, sk, d));
                sq = __fadd_rn(sq, __shfl_xor_sync(~0u, sq, d));
            }
            // S' = g S + k u, u = b (v - g S^T k); o = S'^T q = g S^T q + u (k.q), so both dots use the old state
            const float g = s.decay[i];
            const float u = __fmul_rn(s.rate[i], __fmaf_rn(-g, sk, s.v[i][column]));
            const float o = __fmaf_rn(u, s.kq[i], __fmul_rn(g, sq));
#pragma unroll
            for (int b = 0; b < kBLOCKS; ++b) {
                state[b][0] = __fmaf_rn(k[b].x, u, __fmul_rn(g, state[b][0]));
                state[b][1] = __fmaf_rn(k[b].y, u, __fmul_rn(g, state[b][1]));
                state[b][2] = __fmaf_rn(k[b].z, u, __fmul_rn(g, state[b][2]));
                state[b][3] = __fmaf_rn(k[b].w, u, __fmul_rn(g, state[b][3]));
            }
            float squares = __fmul_rn(o, o);
#pragma unroll
            for (int d = 1; d < 8; d <<= 1) squares = __fadd_rn(squares, __shfl_xor_sync(~0u, squares, d));
            if (part == 0) s.o[i][column] = o;
            if (lane == 0) s.squares[i][warp] = squares;
            const int t = t0 + i, to = p.t <= p.slots ? t : t == p.t - 1 ? 0 : -1;
            if (to >= 0) {
#pragma unroll
                for (int b = 0; b < kBLOCKS; ++b)
#pragma unroll
                    for (int e = 0; e < 4; ++e) state_at(to)[(16 * b + e) * D] = state[b][e];
            }
        }
        __syncthreads();
        if (static_cast<int>(threadIdx.x) < count) {
            float total = 0.0f;
#pragma unroll
            for (int w = 0; w < COLS / 8; ++w) total = __fadd_rn(total, s.squares[threadIdx.x][w]);
            s.total[threadIdx.x] = total;
        }
        const float* totals[PARTS];
        totals[0] = s.total;
        if constexpr (PARTS > 1) {
#if __CUDA_ARCH__ >= 900
            auto cluster = cooperative_groups::this_cluster();
            cluster.sync();
#pragma unroll
            for (int r = 0; r < PARTS; ++r) totals[r] = cluster.map_shared_rank(s.total, r);
#endif
        } else {
            __syncthreads();
        }
        for (int i = threadIdx.x; i < count * COLS; i += blockDim.x) {
            const int at = i / COLS, c = i % COLS, t = t0 + at;
            float total = 0.0f;
#pragma unroll
            for (int r = 0; r < PARTS; ++r) total = __fadd_rn(total, totals[r][at]);
            const float factor = __frsqrt_rn(__fmaf_rn(total, 1.0f / D, p.eps));
            const float z = __ldcg(p.z + t * p.ld_z + h * D + column0 + c);
            p.y[t * p.ld_y + h * D + column0 + c] =
                __fmul_rn(__fmul_rn(__fmul_rn(s.o[at][c], factor), p.norm_weight[column0 + c]), silu(z));
        }
        // nobody may leave or refill while a neighbour still reads its sums
        if constexpr (PARTS > 1) {
#if __CUDA_ARCH__ >= 900
            cooperative_groups::this_cluster().sync();
#endif
        } else {
            __syncthreads();
        }
    }
}

template <int D>
cudaError_t run(const NextnGatedDeltaNet& p, cudaStream_t stream) {
    DeviceLimits limits;
    cudaError_t e = device_limits(&limits);
    if (e != cudaSuccess) return e;
    auto* mixed = static_cast<float*>(p.workspace);
    Launch conv;
    conv.grid = dim3(2 * p.k_heads + p.v_heads);
    conv.block = dim3(32 * kCONV_WARPS);
    conv.pdl = p.flags & NEXTN_PDL;
    e = launch(conv, stream, conv_heads_kernel<D>, p, mixed);
    if (e != cudaSuccess) return e;
    constexpr int kPARTS = D / 32;
    Launch rule;
    rule.pdl = conv.pdl;
    if (limits.capability >= 90 && kPARTS > 1) {
        rule.grid = dim3(kPARTS * p.v_heads);
        rule.block = dim3(D / kPARTS * 4);
        rule.cluster = kPARTS;
        return launch(rule, stream, delta_rule_kernel<D, kPARTS>, p, static_cast<const float*>(mixed));
    }
    rule.grid = dim3(p.v_heads);
    rule.block = dim3(D * 4);
    return launch(rule, stream, delta_rule_kernel<D, 1>, p, static_cast<const float*>(mixed));
}

}  // namespace
}  // namespace nextn

NEXTN_API size_t nextn_gated_delta_net_workspace(int32_t t, int32_t k_heads, int32_t v_heads, int32_t head_dim) {
    return sizeof(float) * t * (2 * static_cast<size_t>(k_heads) + v_heads) * head_dim;
}

NEXTN_API cudaError_t nextn_gated_delta_net(const NextnGatedDeltaNet* args, cudaStream_t stream) {
    if (!args) return cudaErrorInvalidValue;
    const NextnGatedDeltaNet& p = *args;
    if (p.t < 1 || p.slots < 1 || p.k_heads < 1 || p.v_heads < 1 || p.v_heads % p.k_heads) return cudaErrorInvalidValue;
    if (p.conv_kernel < 2 || p.conv_kernel > nextn::kMAX_KERNEL || !p.workspace
        || p.workspace_bytes < nextn_gated_delta_net_workspace(p.t, p.k_heads, p.v_heads, p.head_dim))
        return cudaErrorInvalidValue;
    if (p.ld_qkv < (2 * p.k_heads + p.v_heads) * p.head_dim || p.ld_z < p.v_heads * p.head_dim
        || p.ld_y < p.v_heads * p.head_dim || p.ld_gate < p.v_heads)
        return cudaErrorInvalidValue;
    switch (p.head_dim) {
        case 32: return nextn::run<32>(p, stream);
        case 64: return nextn::run<64>(p, stream);
        case 128: return nextn::run<128>(p, stream);
        default: return cudaErrorInvalidValue;
    }
}
