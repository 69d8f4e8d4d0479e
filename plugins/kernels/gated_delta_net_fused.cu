// Decode in one launch: a cluster owns one key head and all value heads that read it.
//
// The conv windows of the key head's channels are read by every block of the cluster and overwritten in place, so the
// writes wait for the cluster barrier that the output norm needs anyway.
#include <cooperative_groups.h>
#include "gated_delta_net.cuh"
#include "launch.cuh"

namespace nextn {
namespace {

constexpr int kT = NEXTN_MAX_DECODE_T, kMAX_ROWS = kT + kMAX_KERNEL - 1;

template <int D, int COLS>
struct FusedShared {
    static constexpr int kCHANNELS = 2 * D + COLS;  // q, k, and the block's columns of v
    float rows[kMAX_ROWS][kCHANNELS];               // window, then the new rows
    float weight[kCHANNELS][kMAX_KERNEL + 1];       // odd pitch against bank conflicts
    float q[kT][D], k[kT][D], v[kT][COLS], o[kT][COLS], gate[kT][COLS];
    Gates gates[kT];
    float kq[kT], squares[kT][COLS / 8];
};

// Channel of the layer behind local channel i.
template <int D>
__device__ __forceinline__ int channel_of(const NextnGatedDeltaNet& p, int i, int k_head, int h, int column0) {
    return i < D ? k_head * D + i : i < 2 * D ? (p.k_heads + k_head) * D + i - D
                                              : (2 * p.k_heads + h) * D + column0 + i - 2 * D;
}

template <int D, int COLS>
__device__ void conv_token(const NextnGatedDeltaNet& p, FusedShared<D, COLS>& s, int t, int lane) {
    constexpr int kPER = D / 32;
    float value[2][kPER];
    const auto conv = [&](int c) {
        return conv_silu(p.conv_kernel, [&](int j) { return s.weight[c][j]; }, [&](int j) { return s.rows[t + j][c]; });
    };
#pragma unroll
    for (int part = 0; part < 2; ++part) {
#pragma unroll
        for (int e = 0; e < kPER; ++e) value[part][e] = conv(part * D + lane * kPER + e);
        unit_norm(value[part], p.eps, part == 0);
    }
#pragma unroll
    for (int e = 0; e < kPER; ++e) {
        s.q[t][lane * kPER + e] = value[0][e];
        s.k[t][lane * kPER + e] = value[1][e];
    }
    for (int e = lane; e < COLS; e += 32) s.v[t][e] = conv(2 * D + e);
    const float kq = warp_dot(value[1], value[0]);
    if (lane == 0) s.kq[t] = kq;
}

// grid (HK * ratio * PARTS) in clusters of ratio * PARTS; rank = value head of the key head, then part.
template <int D, int PARTS>
__global__ void __launch_bounds__(D / PARTS * 4) fused_kernel(const __grid_constant__ NextnGatedDeltaNet p) {
#if __CUDA_ARCH__ >= 900
    constexpr int COLS = D / PARTS;
    using Shared = FusedShared<D, COLS>;
    extern __shared__ __align__(16) uint8_t raw[];
    Shared& s = *reinterpret_cast<Shared*>(raw);
    auto cluster = cooperative_groups::this_cluster();
    const int size = p.v_heads / p.k_heads * PARTS, rank = blockIdx.x % size, k_head = blockIdx.x / size;
    const int h = k_head + rank / PARTS * p.k_heads, column0 = rank % PARTS * COLS;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, column = 8 * warp + (lane & 7);
    const int before = p.conv_kernel - 1, threads = blockDim.x;
    const int64_t channels = (2 * p.k_heads + p.v_heads) * static_cast<int64_t>(D);
    launch_dependents();
    for (int i = threadIdx.x; i < Shared::kCHANNELS; i += threads) {
        const float* w = p.conv_weight + static_cast<int64_t>(channel_of<D>(p, i, k_head, h, column0)) * p.conv_kernel;
        for (int j = 0; j <= before; ++j) s.weight[i][j] = w[j];
    }
    wait_for_predecessor();
    const int slot = __ldcg(p.slot);
    const auto state_at = [&](int sl) {
        return p.state_pool + ((static_cast<int64_t>(sl) * p.v_heads + h) * D + 4 * (lane >> 3)) * D + column0 + column;
    };
    for (int i = threadIdx.x; i < Shared::kCHANNELS; i += threads) {
        const float* row = p.qkv + channel_of<D>(p, i, k_head, h, column0);
#pragma unroll
        for (int t = 0; t < kT; ++t)
            if (t < p.t) s.rows[before + t][i] = __ldcg(row + t * p.ld_qkv);
    }
    for (int i = threadIdx.x; i < p.t * COLS; i += threads)
        s.gate[i / COLS][i % COLS] = silu(__ldcg(p.z + (i / COLS) * p.ld_z + h * D + column0 + i % COLS));
    if (warp == COLS / 8 - 1 && lane < p.t) s.gates[lane] = gates_of(p, lane, h);
    HeadState<D> state;
    state.load(state_at(slot < 0 ? 0 : slot), slot < 0);
    for (int i = threadIdx.x; i < Shared::kCHANNELS; i += threads) {
        const float* row = p.conv_pool + static_cast<int64_t>(max(slot, 0)) * before * channels
                         + channel_of<D>(p, i, k_head, h, column0);
        for (int j = 0; j < before; ++j) s.rows[j][i] = slot < 0 ? 0.0f : __ldcg(row + j * channels);
    }
    __syncthreads();
    for (int t = warp; t < p.t; t += COLS / 8) conv_token(p, s, t, lane);
    __syncthreads();
    for (int t = 0; t < p.t; ++t) {
        const float o = state.step(s.k[t], s.q[t], s.kq[t], s.v[t][column], s.gates[t], lane);
        const float squares = group_squares(o);
        if (lane < 8) s.o[t][column] = o;
        if (lane == 0) s.squares[t][warp] = squares;
        const int to = p.t <= p.slots ? t : t == p.t - 1 ? 0 : -1;
        if (to >= 0) state.store(state_at(to));
    }
    cluster.sync();
    for (int i = threadIdx.x; i < p.t * COLS; i += threads) {
        const int t = i / COLS, c = i % COLS;
        float total = 0.0f;
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            const float* squares = cluster.map_shared_rank(s.squares[t], rank / PARTS * PARTS + part);
#pragma unroll
            for (int g = 0; g < COLS / 8; ++g) total = __fadd_rn(total, squares[g]);
        }
        p.y[t * p.ld_y + h * D + column0 + c] =
            gated_norm(s.o[t][c], total, D, p.eps, p.norm_weight[column0 + c], s.gate[t][c]);
    }
    auto token = cluster.barrier_arrive();  // nobody leaves while a neighbour reads its sums
    // new windows: every block its columns of v, the cluster's blocks q and k between them
    const bool keep_all = p.t <= p.slots;
    const int writes = (keep_all ? p.t : 1) * before;
    for (int i = threadIdx.x; i < Shared::kCHANNELS; i += threads) {
        if (i < 2 * D && i * size / (2 * D) != rank) continue;
        float* to = p.conv_pool + channel_of<D>(p, i, k_head, h, column0);
        for (int w = 0; w < writes; ++w) {
            const int t = keep_all ? w / before : p.t - 1, j = w % before;
            to[w * channels] = s.rows[t + 1 + j][i];
        }
    }
    cluster.barrier_wait(std::move(token));
#endif
}

template <int D, int PARTS>
cudaError_t run(const NextnGatedDeltaNet& p, cudaStream_t stream) {
    Launch l;
    l.cluster = p.v_heads / p.k_heads * PARTS;
    l.grid = dim3(p.k_heads * l.cluster);
    l.block = dim3(D / PARTS * 4);
    l.smem = sizeof(FusedShared<D, D / PARTS>);
    l.pdl = p.flags & NEXTN_PDL;
    return launch(l, stream, fused_kernel<D, PARTS>, p);
}

}  // namespace

cudaError_t gated_delta_net_fused(const NextnGatedDeltaNet& p, cudaStream_t stream) {
    const int ratio = p.v_heads / p.k_heads;  // clusters of up to 8 blocks run everywhere
    switch (p.head_dim) {
        case 32: return run<32, 1>(p, stream);
        case 64: return ratio <= 4 ? run<64, 2>(p, stream) : run<64, 1>(p, stream);
        default:
            return ratio <= 2 ? run<128, 4>(p, stream) : ratio <= 4 ? run<128, 2>(p, stream) : run<128, 1>(p, stream);
    }
}

}  // namespace nextn
