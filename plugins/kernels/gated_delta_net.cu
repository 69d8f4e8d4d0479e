// Prefill by chunks (gated_delta_net_chunks.cuh).  Where the state after each token is wanted, and for decode below
// compute capability 9.0, token after token: conv over all channels, delta rule, output norm.
#include "gated_delta_net.cuh"
#include "gated_delta_net_chunks.cuh"
#include "launch.cuh"

namespace nextn {
namespace {

constexpr int kCONV_WARPS = 8, kCONV_TOKENS = 64, kCHUNK = 16;

// grid (heads of q, k and v; token parts).  A warp takes one token at a time, a lane channels lane, lane + 32, ...
// The first part alone touches the window pool: it reads the old window whole before it writes any slot.
template <int D>
__global__ void __launch_bounds__(32 * kCONV_WARPS)
    conv_heads_kernel(const __grid_constant__ NextnGatedDeltaNet p, float* mixed) {
    constexpr int kPER = D / 32;
    __shared__ float window[kMAX_KERNEL - 1][D];
    launch_dependents();
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, head = blockIdx.x, before = p.conv_kernel - 1;
    const int64_t channels = static_cast<int64_t>(gridDim.x) * D, first = static_cast<int64_t>(head) * D;
    float weight[kPER][kMAX_KERNEL];
#pragma unroll
    for (int e = 0; e < kPER; ++e)
#pragma unroll
        for (int j = 0; j < kMAX_KERNEL; ++j)
            weight[e][j] = j <= before ? p.conv_weight[(first + lane + 32 * e) * p.conv_kernel + j] : 0.0f;
    wait_for_predecessor();
    const int slot = __ldcg(p.slot);
    if (blockIdx.y == 0)
        for (int i = threadIdx.x; i < before * D; i += blockDim.x)
            window[i / D][i % D] =
                slot < 0
                    ? 0.0f
                    : __ldcg(p.conv_pool + (static_cast<int64_t>(slot) * before + i / D) * channels + first + i % D);
    __syncthreads();
    const auto row_at = [&](int t, int c) {  // row before the conv, t >= -before
        return t < 0 ? window[t + before][c] : __ldcg(p.qkv + t * p.ld_qkv + first + c);
    };
    const int end = min(p.t, static_cast<int>(blockIdx.y + 1) * kCONV_TOKENS);
    for (int t = blockIdx.y * kCONV_TOKENS + warp; t < end; t += kCONV_WARPS) {
        float v[kPER], rows[kPER][kMAX_KERNEL];
#pragma unroll
        for (int j = 0; j < kMAX_KERNEL; ++j)
#pragma unroll
            for (int e = 0; e < kPER; ++e)
                if (j <= before) rows[e][j] = row_at(t - before + j, lane + 32 * e);
#pragma unroll
        for (int e = 0; e < kPER; ++e)
            v[e] = conv_silu(p.conv_kernel, [&](int j) { return weight[e][j]; }, [&](int j) { return rows[e][j]; });
        if (head < 2 * p.k_heads) unit_norm(v, p.eps, head < p.k_heads);
#pragma unroll
        for (int e = 0; e < kPER; ++e) mixed[t * channels + first + lane + 32 * e] = v[e];
    }
    if (blockIdx.y) return;
    const bool keep_all = p.t <= p.slots;
    for (int i = threadIdx.x; i < (keep_all ? p.t : 1) * before * D; i += blockDim.x) {
        const int s = i / (before * D), j = i / D % before, t = keep_all ? s : p.t - 1;
        p.conv_pool[(static_cast<int64_t>(s) * before + j) * channels + first + i % D] =
            row_at(t - before + 1 + j, i % D);
    }
}

// kCHUNK tokens of one head, for the block's kCOLS value columns; twice, the next chunk arrives during this one.
constexpr int kCOLS = 32;
template <int D>
struct Chunks {
    float q[2][kCHUNK][D], k[2][kCHUNK][D], v[2][kCHUNK][kCOLS];
    float kq[kCHUNK];
    Gates gates[2][kCHUNK];
    typename HeadState<D, kCOLS>::Partials partials;
};

template <int D>
__device__ void copy_chunk(const NextnGatedDeltaNet& p, const float* mixed, Chunks<D>& s, int buffer, int t0, int h,
                           int column0) {
    constexpr int kPIECES = (2 * D + kCOLS) / 4;
    const int64_t channels = (2 * p.k_heads + p.v_heads) * static_cast<int64_t>(D);
    for (int i = threadIdx.x; i < min(kCHUNK, p.t - t0) * kPIECES; i += blockDim.x) {
        const int at = i / kPIECES, c = i % kPIECES * 4;
        const float* row = mixed + (t0 + at) * channels;
        if (c < D)
            cp_async_16(&s.q[buffer][at][c], row + (h % p.k_heads) * D + c);
        else if (c < 2 * D)
            cp_async_16(&s.k[buffer][at][c - D], row + (p.k_heads + h % p.k_heads) * D + c - D);
        else
            cp_async_16(&s.v[buffer][at][c - 2 * D], row + (2 * p.k_heads + h) * D + column0 + c - 2 * D);
    }
    cp_async_commit();
}

// grid (HV * D/kCOLS): o, before the norm, goes to y.
template <int D>
__global__ void __launch_bounds__(D)
    delta_rule_kernel(const __grid_constant__ NextnGatedDeltaNet p, const float* mixed) {
    extern __shared__ __align__(16) uint8_t raw[];
    auto& s = *reinterpret_cast<Chunks<D>*>(raw);
    launch_dependents();
    wait_for_predecessor();
    const int h = blockIdx.x / (D / kCOLS), column0 = blockIdx.x % (D / kCOLS) * kCOLS;
    const auto gate_inputs = [&](int t) {
        if (static_cast<int>(threadIdx.x) >= kCHUNK || t >= p.t) return make_float2(0.0f, 0.0f);
        return make_float2(__ldcg(p.alpha + t * p.ld_gate + h), __ldcg(p.beta + t * p.ld_gate + h));
    };
    copy_chunk(p, mixed, s, 0, 0, h, column0);
    float2 inputs = gate_inputs(threadIdx.x);
    const int slot = __ldcg(p.slot);
    HeadState<D, kCOLS> state;
    state.load(p, slot, h, column0);
    for (int t0 = 0, b = 0; t0 < p.t; t0 += kCHUNK, b ^= 1) {
        const int count = min(kCHUNK, p.t - t0);
        if (threadIdx.x < kCHUNK) s.gates[b][threadIdx.x] = gates_of(p, inputs.x, inputs.y, h);
        cp_async_wait<0>();
        __syncthreads();
        if (t0 + kCHUNK < p.t) copy_chunk(p, mixed, s, b ^ 1, t0 + kCHUNK, h, column0);
        inputs = gate_inputs(t0 + kCHUNK + threadIdx.x);
        key_query_dots(s.kq, s.k[b], s.q[b], count);
        __syncthreads();
        for (int i = 0; i < count; ++i) {
            const float o = state.step(s.partials, s.k[b][i], s.q[b][i], s.kq[i], s.v[b][i], s.gates[b][i]);
            const int t = t0 + i;
            if (state.row0 == 0) p.y[t * p.ld_y + h * D + column0 + state.column] = o;
            state.keep(p, t, h, column0, s.k[b][i], s.gates[b][i].decay);
        }
    }
}

// grid (HV, ceil(t / kNORM_WARPS)), one warp per token: y = o / rms(o) * weight * silu(z), in place.
constexpr int kNORM_WARPS = 4;
template <int D>
__global__ void __launch_bounds__(32 * kNORM_WARPS) output_norm_kernel(const __grid_constant__ NextnGatedDeltaNet p) {
    launch_dependents();
    wait_for_predecessor();
    const int t = blockIdx.y * kNORM_WARPS + (threadIdx.x >> 5), h = blockIdx.x, lane = threadIdx.x & 31;
    if (t >= p.t) return;
    float* y = p.y + t * p.ld_y + h * D + lane;
    float o[D / 32], total = 0.0f;
#pragma unroll
    for (int e = 0; e < D / 32; ++e) o[e] = __ldcg(y + 32 * e);
#pragma unroll
    for (int e = 0; e < D / 32; ++e) total = __fadd_rn(total, warp_sum(__fmul_rn(o[e], o[e])));
#pragma unroll
    for (int e = 0; e < D / 32; ++e)
        y[32 * e] = gated_norm(o[e], total, D, p.eps, p.norm_weight[lane + 32 * e],
                               silu(__ldcg(p.z + t * p.ld_z + h * D + lane + 32 * e)));
}

bool by_chunks(int t, int slots) { return t > NEXTN_MAX_DECODE_T && t > slots; }

template <int D>
cudaError_t run_tokens(const NextnGatedDeltaNet& p, const DeviceLimits& limits, cudaStream_t stream) {
    auto* mixed = static_cast<float*>(p.workspace);
    Launch l;
    l.pdl = p.flags & NEXTN_PDL;
    l.grid = dim3(2 * p.k_heads + p.v_heads, ceil_div(p.t, kCONV_TOKENS));
    l.block = dim3(32 * kCONV_WARPS);
    cudaError_t e = launch(l, stream, conv_heads_kernel<D>, p, mixed);
    if (e != cudaSuccess) return e;
    l.grid = dim3(p.v_heads * (D / kCOLS));
    l.block = dim3(HeadState<D, kCOLS>::kTHREADS);
    l.smem = one_block_per_sm(limits, sizeof(Chunks<D>));
    return launch(l, stream, delta_rule_kernel<D>, p, static_cast<const float*>(mixed));
}

template <int D>
cudaError_t run(const NextnGatedDeltaNet& p, const DeviceLimits& limits, cudaStream_t stream) {
    cudaError_t e;
    if (by_chunks(p.t, p.slots)) {
        const ChunkWorkspace w = chunk_workspace(p.workspace, p.t, p.k_heads, p.v_heads, D);
        e = prepare_chunks(p, w, stream);
        if (e == cudaSuccess) e = scan_chunks(p, w, stream);
    } else {
        e = run_tokens<D>(p, limits, stream);
    }
    if (e != cudaSuccess) return e;
    Launch l;
    l.pdl = p.flags & NEXTN_PDL;
    l.grid = dim3(p.v_heads, ceil_div(p.t, kNORM_WARPS));
    l.block = dim3(32 * kNORM_WARPS);
    return launch(l, stream, output_norm_kernel<D>, p);
}

bool valid(const NextnGatedDeltaNet& p) {
    if (p.head_dim != 32 && p.head_dim != 64 && p.head_dim != 128) return false;
    if (p.t < 1 || p.slots < 1 || p.k_heads < 1 || p.v_heads < 1 || p.v_heads % p.k_heads) return false;
    if (p.conv_kernel < 2 || p.conv_kernel > kMAX_KERNEL || !p.workspace) return false;
    const int64_t width = static_cast<int64_t>(p.v_heads) * p.head_dim;
    return p.workspace_bytes >= nextn_gated_delta_net_workspace(p.t, p.k_heads, p.v_heads, p.head_dim) &&
           p.ld_qkv >= 2 * static_cast<int64_t>(p.k_heads) * p.head_dim + width && p.ld_z >= width && p.ld_y >= width &&
           p.ld_gate >= p.v_heads && p.ld_qkv % 4 == 0 && p.ld_z % 4 == 0 &&
           (reinterpret_cast<uintptr_t>(p.qkv) | reinterpret_cast<uintptr_t>(p.z)) % 16 == 0;
}

}  // namespace
}  // namespace nextn

NEXTN_API size_t nextn_gated_delta_net_workspace(int32_t t, int32_t k_heads, int32_t v_heads, int32_t head_dim) {
    const size_t rows = sizeof(float) * t * (2 * static_cast<size_t>(k_heads) + v_heads) * head_dim;
    if (t <= NEXTN_MAX_DECODE_T) return rows;
    const size_t chunks = nextn::chunk_workspace(nullptr, t, k_heads, v_heads, head_dim).bytes;
    return rows > chunks ? rows : chunks;
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
    return p.head_dim == 32   ? run<32>(p, limits, stream)
           : p.head_dim == 64 ? run<64>(p, limits, stream)
                              : run<128>(p, limits, stream);
}
