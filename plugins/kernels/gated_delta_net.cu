// Prefill, and decode below compute capability 9.0: conv over all channels, then the delta rule.
#include <cooperative_groups.h>
#include "gated_delta_net.cuh"
#include "launch.cuh"

namespace nextn {
namespace {

constexpr int kCONV_WARPS = 8, kCONV_TOKENS = 64, kCHUNK = 16;

// grid (heads of q, k and v; token parts).  A warp takes one token at a time, a lane D/32 neighbouring channels.
// The first part alone touches the window pool: it reads the old window whole before it writes any slot.
template <int D>
__global__ void __launch_bounds__(32 * kCONV_WARPS) conv_heads_kernel(const __grid_constant__ NextnGatedDeltaNet p,
                                                                      float* mixed) {
    constexpr int kPER = D / 32;
    __shared__ float window[kMAX_KERNEL - 1][D];
    __shared__ float weight[D][kMAX_KERNEL];
    launch_dependents();
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, head = blockIdx.x, c0 = lane * kPER;
    const int64_t channels = static_cast<int64_t>(gridDim.x) * D, first = static_cast<int64_t>(head) * D;
    for (int i = threadIdx.x; i < D * p.conv_kernel; i += blockDim.x)
        weight[i / p.conv_kernel][i % p.conv_kernel] = p.conv_weight[first * p.conv_kernel + i];
    wait_for_predecessor();
    const int before = p.conv_kernel - 1, slot = __ldcg(p.slot);
    if (blockIdx.y == 0)
        for (int i = threadIdx.x; i < before * D; i += blockDim.x)
            window[i / D][i % D] = slot < 0 ? 0.0f
                : __ldcg(p.conv_pool + (static_cast<int64_t>(slot) * before + i / D) * channels + first + i % D);
    __syncthreads();
    const auto row_at = [&](int t, int c) {  // row before the conv, t >= -before
        return t < 0 ? window[t + before][c] : __ldcg(p.qkv + t * p.ld_qkv + first + c);
    };
    const int end = min(p.t, static_cast<int>(blockIdx.y + 1) * kCONV_TOKENS);
    for (int t = blockIdx.y * kCONV_TOKENS + warp; t < end; t += kCONV_WARPS) {
        float v[kPER];
#pragma unroll
        for (int e = 0; e < kPER; ++e)
            v[e] = conv_silu(p.conv_kernel, [&](int j) { return weight[c0 + e][j]; },
                             [&](int j) { return row_at(t - before + j, c0 + e); });
        if (head < 2 * p.k_heads) unit_norm(v, p.eps, head < p.k_heads);
#pragma unroll
        for (int e = 0; e < kPER; ++e) mixed[t * channels + first + c0 + e] = v[e];
    }
    if (blockIdx.y) return;
    const bool keep_all = p.t <= p.slots;
    for (int i = threadIdx.x; i < (keep_all ? p.t : 1) * before * D; i += blockDim.x) {
        const int s = i / (before * D), j = i / D % before, t = keep_all ? s : p.t - 1;
        p.conv_pool[(static_cast<int64_t>(s) * before + j) * channels + first + i % D] = row_at(t - before + 1 + j, i % D);
    }
}

// kCHUNK tokens of one head, for the block's COLS value columns.
template <int D, int COLS>
struct Chunk {
    float q[kCHUNK][D], k[kCHUNK][D], v[kCHUNK][COLS], o[kCHUNK][COLS], gate[kCHUNK][COLS];
    Gates gates[kCHUNK];
    float kq[kCHUNK];
    float squares[2][kCHUNK][COLS / 8];  // by chunk parity, so that a neighbour may read one while the next is filled
};

template <int D, int COLS>
__device__ void load_chunk(const NextnGatedDeltaNet& p, const float* mixed, Chunk<D, COLS>& s, int t0, int count, int h,
                           int column0) {
    constexpr int kPER = D / 32;
    const int warps = blockDim.x >> 5, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int64_t channels = (2 * p.k_heads + p.v_heads) * static_cast<int64_t>(D);
    for (int i = threadIdx.x; i < count; i += blockDim.x) s.gates[i] = gates_of(p, t0 + i, h);
    for (int i = warp; i < count; i += warps) {
        const float* row = mixed + (t0 + i) * channels;
        float q[kPER], k[kPER];
#pragma unroll
        for (int e = 0; e < kPER; ++e) {
            q[e] = __ldcg(row + (h % p.k_heads) * D + lane * kPER + e);
            k[e] = __ldcg(row + (p.k_heads + h % p.k_heads) * D + lane * kPER + e);
            s.q[i][lane * kPER + e] = q[e];
            s.k[i][lane * kPER + e] = k[e];
        }
        for (int e = lane; e < COLS; e += 32) {
            s.v[i][e] = __ldcg(row + (2 * p.k_heads + h) * D + column0 + e);
            s.gate[i][e] = silu(__ldcg(p.z + (t0 + i) * p.ld_z + h * D + column0 + e));
        }
        const float kq = warp_dot(k, q);
        if (lane == 0) s.kq[i] = kq;
    }
}

// grid (PARTS * HV): PARTS blocks of a cluster share a head, each with D / PARTS value columns.
template <int D, int PARTS>
__global__ void __launch_bounds__(D / PARTS * 4) delta_rule_kernel(const __grid_constant__ NextnGatedDeltaNet p,
                                                                   const float* mixed) {
    constexpr int COLS = D / PARTS;
    extern __shared__ __align__(16) uint8_t raw[];
    auto& s = *reinterpret_cast<Chunk<D, COLS>*>(raw);
    launch_dependents();
    wait_for_predecessor();
    const int h = blockIdx.x / PARTS, column0 = blockIdx.x % PARTS * COLS;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, column = 8 * warp + (lane & 7);
    const int slot = __ldcg(p.slot);
    const auto state_at = [&](int sl) {
        return p.state_pool + ((static_cast<int64_t>(sl) * p.v_heads + h) * D + 4 * (lane >> 3)) * D + column0 + column;
    };
    HeadState<D> state;
    state.load(state_at(slot < 0 ? 0 : slot), slot < 0);
    for (int t0 = 0, parity = 0; t0 < p.t; t0 += kCHUNK, parity ^= 1) {
        const int count = min(kCHUNK, p.t - t0);
        load_chunk(p, mixed, s, t0, count, h, column0);
        __syncthreads();
        for (int i = 0; i < count; ++i) {
            const float o = state.step(s.k[i], s.q[i], s.kq[i], s.v[i][column], s.gates[i], lane);
            const float squares = group_squares(o);
            if (lane < 8) s.o[i][column] = o;
            if (lane == 0) s.squares[parity][i][warp] = squares;
            const int t = t0 + i, to = p.t <= p.slots ? t : t == p.t - 1 ? 0 : -1;
            if (to >= 0) state.store(state_at(to));
        }
        const float* squares[PARTS];
        squares[0] = s.squares[parity][0];
        if constexpr (PARTS > 1) {
#if __CUDA_ARCH__ >= 900
            auto cluster = cooperative_groups::this_cluster();
            cluster.sync();
#pragma unroll
            for (int r = 0; r < PARTS; ++r) squares[r] = cluster.map_shared_rank(s.squares[parity][0], r);
#endif
        } else {
            __syncthreads();
        }
        for (int i = threadIdx.x; i < count * COLS; i += blockDim.x) {
            const int at = i / COLS, c = i % COLS;
            float total = 0.0f;
#pragma unroll
            for (int g = 0; g < D / 8; ++g) total = __fadd_rn(total, squares[g / (COLS / 8)][at * (COLS / 8) + g % (COLS / 8)]);
            p.y[(t0 + at) * p.ld_y + h * D + column0 + c] =
                gated_norm(s.o[at][c], total, D, p.eps, p.norm_weight[column0 + c], s.gate[at][c]);
        }
        __syncthreads();  // before the chunk is refilled
    }
    if constexpr (PARTS > 1) {
#if __CUDA_ARCH__ >= 900
        cooperative_groups::this_cluster().sync();  // nobody leaves while a neighbour reads its sums
#endif
    }
}

template <int D>
cudaError_t run(const NextnGatedDeltaNet& p, int capability, cudaStream_t stream) {
    auto* mixed = static_cast<float*>(p.workspace);
    Launch conv;
    conv.grid = dim3(2 * p.k_heads + p.v_heads, ceil_div(p.t, kCONV_TOKENS));
    conv.block = dim3(32 * kCONV_WARPS);
    conv.pdl = p.flags & NEXTN_PDL;
    const cudaError_t e = launch(conv, stream, conv_heads_kernel<D>, p, mixed);
    if (e != cudaSuccess) return e;
    constexpr int kPARTS = D / 32;
    Launch rule;
    rule.pdl = conv.pdl;
    if (capability >= 90 && kPARTS > 1) {
        rule.grid = dim3(kPARTS * p.v_heads);
        rule.block = dim3(D / kPARTS * 4);
        rule.cluster = kPARTS;
        rule.smem = sizeof(Chunk<D, D / kPARTS>);
        return launch(rule, stream, delta_rule_kernel<D, kPARTS>, p, static_cast<const float*>(mixed));
    }
    rule.grid = dim3(p.v_heads);
    rule.block = dim3(D * 4);
    rule.smem = sizeof(Chunk<D, D>);
    return launch(rule, stream, delta_rule_kernel<D, 1>, p, static_cast<const float*>(mixed));
}

bool valid(const NextnGatedDeltaNet& p) {
    if (p.head_dim != 32 && p.head_dim != 64 && p.head_dim != 128) return false;
    if (p.t < 1 || p.slots < 1 || p.k_heads < 1 || p.v_heads < 1 || p.v_heads % p.k_heads) return false;
    if (p.conv_kernel < 2 || p.conv_kernel > kMAX_KERNEL || !p.workspace) return false;
    const int64_t width = static_cast<int64_t>(p.v_heads) * p.head_dim;
    return p.workspace_bytes >= nextn_gated_delta_net_workspace(p.t, p.k_heads, p.v_heads, p.head_dim)
        && p.ld_qkv >= 2 * static_cast<int64_t>(p.k_heads) * p.head_dim + width && p.ld_z >= width && p.ld_y >= width
        && p.ld_gate >= p.v_heads;
}

}  // namespace
}  // namespace nextn

NEXTN_API size_t nextn_gated_delta_net_workspace(int32_t t, int32_t k_heads, int32_t v_heads, int32_t head_dim) {
    return sizeof(float) * t * (2 * static_cast<size_t>(k_heads) + v_heads) * head_dim;
}

NEXTN_API cudaError_t nextn_gated_delta_net(const NextnGatedDeltaNet* args, cudaStream_t stream) {
    using namespace nextn;
    if (!args || !valid(*args)) return cudaErrorInvalidValue;
    DeviceLimits limits;
    const cudaError_t e = device_limits(&limits);
    if (e != cudaSuccess) return e;
    const NextnGatedDeltaNet& p = *args;
    if (p.t <= NEXTN_MAX_DECODE_T && limits.capability >= 90 && p.v_heads / p.k_heads <= 8)
        return gated_delta_net_fused(p, stream);
    return p.head_dim == 32 ? run<32>(p, limits.capability, stream)
         : p.head_dim == 64 ? run<64>(p, limits.capability, stream) : run<128>(p, limits.capability, stream);
}
