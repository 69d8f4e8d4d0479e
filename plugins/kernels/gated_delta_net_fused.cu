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
    float weight[kCHANNELS * kMAX_KERNEL];          // [channel][kernel]
    float q[kT][D], k[kT][D], v[kT][COLS], o[kT][COLS], z[kT][COLS];
    Gates gates[kT];
    float kq[kT], total[kT][COLS / 32];
    typename HeadState<D, COLS>::Partials partials;
};

// Channel of the layer behind local channel i.
template <int D>
__device__ __forceinline__ int channel_of(const NextnGatedDeltaNet& p, int i, int k_head, int h, int column0) {
    return i < D       ? k_head * D + i
           : i < 2 * D ? (p.k_heads + k_head) * D + i - D
                       : (2 * p.k_heads + h) * D + column0 + i - 2 * D;
}

// Rows kCHANNELS wide, four channels at a time: copy(row, channel, layer's channel).
template <int D, int COLS, typename F>
__device__ __forceinline__ void for_each_piece(const NextnGatedDeltaNet& p, int rows, int k_head, int h, int column0,
                                               F f) {
    constexpr int kPIECES = FusedShared<D, COLS>::kCHANNELS / 4;
    for (int i = threadIdx.x; i < rows * kPIECES; i += blockDim.x) {
        const int c = i % kPIECES * 4;
        f(i / kPIECES, c, channel_of<D>(p, c, k_head, h, column0));
    }
}

// One head vector of one token: part 0 q, 1 k, 2 this block's columns of v.
template <int D, int COLS>
__device__ __forceinline__ void conv_part(const NextnGatedDeltaNet& p, FusedShared<D, COLS>& s, int t, int part,
                                          int lane) {
    const auto conv = [&](int c) {
        return conv_silu(
            p.conv_kernel, [&](int j) { return s.weight[c * p.conv_kernel + j]; },
            [&](int j) { return s.rows[t + j][c]; });
    };
    if (part == 2) {
        for (int e = lane; e < COLS; e += 32) s.v[t][e] = conv(2 * D + e);
        return;
    }
    float v[D / 32];
#pragma unroll
    for (int e = 0; e < D / 32; ++e) v[e] = conv(part * D + lane + 32 * e);
    unit_norm(v, p.eps, part == 0);
#pragma unroll
    for (int e = 0; e < D / 32; ++e) (part ? s.k : s.q)[t][lane + 32 * e] = v[e];
}

// grid (HK * ratio * PARTS) in clusters of ratio * PARTS; rank = value head of the key head, then part.
template <int D, int PARTS>
__global__ void __launch_bounds__(HeadState<D, D / PARTS>::kTHREADS)
    fused_kernel(const __grid_constant__ NextnGatedDeltaNet p) {
#if __CUDA_ARCH__ >= 900
    constexpr int COLS = D / PARTS;
    extern __shared__ __align__(16) uint8_t raw[];
    auto& s = *reinterpret_cast<FusedShared<D, COLS>*>(raw);
    auto cluster = cooperative_groups::this_cluster();
    const int size = p.v_heads / p.k_heads * PARTS, rank = blockIdx.x % size, k_head = blockIdx.x / size;
    const int h = k_head + rank / PARTS * p.k_heads, column0 = rank % PARTS * COLS;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    constexpr int kWARPS = HeadState<D, COLS>::kTHREADS / 32;
    const int before = p.conv_kernel - 1;
    const int64_t channels = (2 * p.k_heads + p.v_heads) * static_cast<int64_t>(D);
    const auto pieces = [&](int rows, auto f) { for_each_piece<D, COLS>(p, rows, k_head, h, column0, f); };
    launch_dependents();
    pieces(p.conv_kernel,
           [&](int j, int c, int channel) {  // channel c's taps lie together: piece j of each four channels
               cp_async_16(&s.weight[c * p.conv_kernel + 4 * j],
                           p.conv_weight + static_cast<int64_t>(channel) * p.conv_kernel + 4 * j);
           });
    wait_for_predecessor();
    const int slot = __ldcg(p.slot);
    pieces(p.t,
           [&](int t, int c, int channel) { cp_async_16(&s.rows[before + t][c], p.qkv + t * p.ld_qkv + channel); });
    for (int i = threadIdx.x; i < p.t * COLS / 4; i += blockDim.x) {
        const int t = i / (COLS / 4), c = i % (COLS / 4) * 4;
        cp_async_16(&s.z[t][c], p.z + t * p.ld_z + h * D + column0 + c);
    }
    float alpha = 0.0f, beta = 0.0f;
    const bool gating = warp == kWARPS - 1 && lane < p.t;
    if (gating) {
        alpha = __ldcg(p.alpha + lane * p.ld_gate + h);
        beta = __ldcg(p.beta + lane * p.ld_gate + h);
    }
    pieces(before, [&](int j, int c, int channel) {
        cp_async_16(&s.rows[j][c], p.conv_pool + (static_cast<int64_t>(max(slot, 0)) * before + j) * channels + channel,
                    slot >= 0);
    });
    cp_async_commit();
    HeadState<D, COLS> state;
    state.load(p, slot, h, column0);
    if (gating) s.gates[lane] = gates_of(p, alpha, beta, h);
    cp_async_wait<0>();
    __syncthreads();
    for (int i = warp; i < 3 * p.t; i += kWARPS) conv_part(p, s, i / 3, i % 3, lane);
    __syncthreads();
    key_query_dots(s.kq, s.k, s.q, p.t);
    __syncthreads();
    for (int t = 0; t < p.t; ++t) {
        const float o = state.step(s.partials, s.k[t], s.q[t], s.kq[t], s.v[t], s.gates[t]);
        if (state.row0 == 0) s.o[t][state.column] = o;
        state.keep(p, t, h, column0, s.k[t], s.gates[t].decay);
    }
    __syncthreads();
    for (int i = warp; i < p.t * (COLS / 32); i += kWARPS) {
        const int t = i / (COLS / 32), g = i % (COLS / 32);
        const float o = s.o[t][32 * g + lane], sum = warp_sum(__fmul_rn(o, o));
        if (lane == 0) s.total[t][g] = sum;
    }
    cluster.sync();
    const float* totals[PARTS];
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
        totals[part] = cluster.map_shared_rank(s.total[0], rank / PARTS * PARTS + part);
    for (int i = threadIdx.x; i < p.t * COLS; i += blockDim.x) {
        const int t = i / COLS, c = i % COLS;
        float total = 0.0f;
#pragma unroll
        for (int g = 0; g < D / 32; ++g)
            total = __fadd_rn(total, totals[g / (COLS / 32)][t * (COLS / 32) + g % (COLS / 32)]);
        p.y[t * p.ld_y + h * D + column0 + c] =
            gated_norm(s.o[t][c], total, D, p.eps, p.norm_weight[column0 + c], silu(s.z[t][c]));
    }
    auto token = cluster.barrier_arrive();  // nobody leaves while a neighbour reads its sums
    // new windows: every block its columns of v, the cluster's blocks q and k between them
    const bool keep_all = p.t <= p.slots;
    pieces((keep_all ? p.t : 1) * before, [&](int w, int c, int channel) {
        if (c < 2 * D && c * size / (2 * D) != rank) return;
        const int row = (keep_all ? w / before : p.t - 1) + 1 + w % before;
        __stcg(reinterpret_cast<float4*>(p.conv_pool + w * channels + channel),
               *reinterpret_cast<float4*>(&s.rows[row][c]));
    });
    cluster.barrier_wait(std::move(token));
#endif
}

template <int D, int PARTS>
cudaError_t run(const NextnGatedDeltaNet& p, cudaStream_t stream) {
    Launch l;
    l.cluster = p.v_heads / p.k_heads * PARTS;
    l.grid = dim3(p.k_heads * l.cluster);
    l.block = dim3(HeadState<D, D / PARTS>::kTHREADS);
    l.smem =
        sizeof(FusedShared<D, D / PARTS>);  // blocks of a cluster may share a multiprocessor: spreading costs a wave
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
