#include "attention.h"
#include <type_traits>
#include "attention_decode.cuh"
#include "attention_prefill.cuh"
#include "launch.cuh"

namespace nextn {
namespace {

__host__ __device__ size_t partial_values(int t, int heads, int d) {
    return static_cast<size_t>(kMAX_SPLITS) * t * heads * d;
}
Partials partials(const NextnAttention& p) {
    auto* out = static_cast<float*>(p.workspace);
    const int ratio = p.heads / p.kv_heads;
    return {out, reinterpret_cast<float2*>(out + partial_values(p.t, p.heads, p.head_dim)), ratio,
            65536u / static_cast<uint32_t>(ratio) + 1};
}

// Prefill: grid (t, kv heads), one warp each.
template <int D, typename Rows>
__global__ void __launch_bounds__(32) append_kernel(const __grid_constant__ NextnAttention p) {
    __shared__ float scratch[D];
    launch_dependents();
    wait_for_predecessor();
    const int t = blockIdx.x, position = __ldcg(p.position) + t;
    if (position < p.capacity) append_row<D, Rows>(p, t, position, blockIdx.y, scratch, threadIdx.x);
}

// Prefill: grid (blocks of 16*MT query rows, longest first; kv heads).
template <int D, int MT, typename Rows>
__global__ void __launch_bounds__(kATT_THREADS) prefill_kernel(const __grid_constant__ NextnAttention p) {
    constexpr int kROWS = 16 * MT;
    extern __shared__ __align__(16) uint8_t raw[];
    auto& s = *reinterpret_cast<AttentionShared<D, MT, Rows>*>(raw);
    launch_dependents();
    wait_for_predecessor();
    const int position = __ldcg(p.position), kv = blockIdx.y, ratio = p.heads / p.kv_heads;
    const int first = (gridDim.x - 1 - blockIdx.x) * kROWS, rows = p.t * ratio;
    const int last_token = (min(first + kROWS, rows) - 1) / ratio;
    AttentionBlock<D, MT, Rows> block(s, p, kv);
    const int end = min(position + last_token + 1, p.capacity);
    block.start(0, end, end);
    block.load_queries(first, position);
    __syncthreads();
    block.attend(0, end);
    block.for_each_output([&](int r) {
        const int row = first + r, t = row / ratio, h = kv * ratio + row % ratio;
        const float sum = s.last[r] < 0 ? __uint_as_float(0x7fc00000u) : s.sum[r];
        const float* gate = p.query_gate + t * p.ld_query + (2 * h + 1) * D;
        float* y = row < rows ? p.y + t * p.ld_y + h * D : nullptr;
        return [=](int c, float v) {
            if (y) y[c] = gated(__fdiv_rn(v, sum), __ldcg(gate + c));
        };
    });
}

__global__ void rope_rows_kernel(const int32_t* position, const double* inv_freq, int pairs, float factor,
                                 float* cos_out, float* sin_out) {
    launch_dependents();
    wait_for_predecessor();
    const int t = blockIdx.x;
    for (int i = threadIdx.x; i < pairs; i += blockDim.x) {
        double s, c;
        sincos((static_cast<double>(__ldcg(position)) + t) * inv_freq[i], &s, &c);
        cos_out[t * pairs + i] = static_cast<float>(factor * c);
        sin_out[t * pairs + i] = static_cast<float>(factor * s);
    }
}

template <int D, int MOST, typename Rows>
cudaError_t run_split(const NextnAttention& p, const Partials& part, cudaStream_t stream) {
    Launch l;
    const int row_blocks = ceil_div(p.t * (p.heads / p.kv_heads), 16);
    // splits last: blocks that have one come first
    l.grid = dim3(p.kv_heads, row_blocks, min(kMAX_SPLITS, ceil_div(p.capacity, kKEYS)));
    l.block = dim3(kATT_THREADS);
    l.smem = sizeof(AttentionShared<D, MOST, Rows>);
    l.pdl = p.flags & NEXTN_PDL;
    return launch(l, stream, split_kernel<D, MOST, Rows>, p, part);
}

template <int D, int MT, typename Rows>
cudaError_t run_prefill(const NextnAttention& p, cudaStream_t stream) {
    Launch l;
    l.grid = dim3(ceil_div(p.t * (p.heads / p.kv_heads), 16 * MT), p.kv_heads);
    l.block = dim3(kATT_THREADS);
    l.smem = sizeof(AttentionShared<D, MT, Rows>);
    l.pdl = p.flags & NEXTN_PDL;
    return launch(l, stream, prefill_kernel<D, MT, Rows>, p);
}

template <int D, typename Rows>
cudaError_t run(const NextnAttention& p, cudaStream_t stream) {
    DeviceLimits limits;
    cudaError_t e = device_limits(&limits);
    if (e != cudaSuccess) return e;
    Launch l;
    l.pdl = p.flags & NEXTN_PDL;
    if (p.t > NEXTN_MAX_DECODE_T) {
        l.grid = dim3(p.t, p.kv_heads);
        l.block = dim3(32);
        e = launch(l, stream, append_kernel<D, Rows>, p);
        if (e != cudaSuccess) return e;
        if constexpr (kHAS_SM90A && D >= 128 && std::is_same_v<Rows, HalfRows<D>>)
            if (limits.capability == 90 && p.ld_query % 2 == 0 && p.ld_y % 2 == 0)
                return attention_prefill_wgmma(p, stream);
        const bool wide = sizeof(AttentionShared<D, 4, Rows>) <= static_cast<size_t>(limits.smem_per_block);
        return wide ? run_prefill<D, 4, Rows>(p, stream) : run_prefill<D, 2, Rows>(p, stream);
    }
    const Partials part = partials(p);
    e = p.t * (p.heads / p.kv_heads) <= 16 ? run_split<D, 1, Rows>(p, part, stream)
                                           : run_split<D, 2, Rows>(p, part, stream);
    if (e != cudaSuccess) return e;
    l.grid = dim3(p.heads, p.t);
    l.block = dim3(D);
    return launch(l, stream, combine_kernel<D>, p, part);
}

template <int D>
cudaError_t run(const NextnAttention& p, cudaStream_t stream) {
    return p.cache_type == kNEXTN_CACHE_INT8 ? run<D, ByteRows<D>>(p, stream) : run<D, HalfRows<D>>(p, stream);
}

}  // namespace
}  // namespace nextn

NEXTN_API size_t nextn_cache_row_bytes(int32_t cache_type, int32_t head_dim) {
    switch (cache_type) {
        case kNEXTN_CACHE_F16: return 2 * static_cast<size_t>(head_dim);
        case kNEXTN_CACHE_INT8: return static_cast<size_t>(head_dim) + 16;
        default: return 0;
    }
}

NEXTN_API size_t nextn_attention_workspace(int32_t t, int32_t heads, int32_t head_dim) {
    t = t < NEXTN_MAX_DECODE_T ? t : NEXTN_MAX_DECODE_T;  // longer calls need none: size for the short ones
    return (nextn::partial_values(t, heads, head_dim) + 2 * nextn::partial_values(t, heads, 1)) * sizeof(float);
}

NEXTN_API cudaError_t nextn_attention(const NextnAttention* args, cudaStream_t stream) {
    if (!args) return cudaErrorInvalidValue;
    const NextnAttention& p = *args;
    const int d = p.head_dim;
    if (!nextn_cache_row_bytes(p.cache_type, d)) return cudaErrorInvalidValue;
    if (p.t < 1 || p.capacity < 1 || p.heads < 1 || p.kv_heads < 1 || p.heads % p.kv_heads || p.heads / p.kv_heads > 8)
        return cudaErrorInvalidValue;
    if (p.rope_dim < 2 || p.rope_dim % 2 || p.rope_dim > d || p.ld_query < 2 * p.heads * d ||
        p.ld_kv < p.kv_heads * d || p.ld_y < p.heads * d || !p.workspace ||
        p.workspace_bytes < nextn_attention_workspace(p.t, p.heads, d))
        return cudaErrorInvalidValue;
    switch (d) {
        case 32: return nextn::run<32>(p, stream);
        case 64: return nextn::run<64>(p, stream);
        case 128: return nextn::run<128>(p, stream);
        case 256: return nextn::run<256>(p, stream);
        default: return cudaErrorInvalidValue;
    }
}

NEXTN_API cudaError_t nextn_rope_rows(const int32_t* position, int32_t t, const double* inv_freq, int32_t pairs,
                                      float factor, float* cos, float* sin, int32_t flags, cudaStream_t stream) {
    if (t < 1 || pairs < 1) return cudaErrorInvalidValue;
    nextn::Launch l;
    l.grid = dim3(t);
    l.block = dim3(32);
    l.pdl = flags & NEXTN_PDL;
    return nextn::launch(l, stream, nextn::rope_rows_kernel, position, inv_freq, pairs, factor, cos, sin);
}
