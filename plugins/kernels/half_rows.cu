// Activations for prefill: f16 rows scaled to +-1024 per token, with an optional RMSNorm, and their sums over 32.
#include "launch.cuh"
#include "matmul_parts.cuh"
#include "ptx.cuh"

namespace nextn {
namespace {

constexpr float kHALF_RANGE = 1024.0f;  // leaves room for sums of 32 below the f16 maximum

// Block-wide maximum of `bits` (float bit patterns without sign) and sum of `v`.
__device__ void block_reduce(uint32_t& bits, float& v) {
    __shared__ uint32_t warp_bits[32];
    __shared__ float warp_sum[32];
    bits = __reduce_max_sync(~0u, bits);
    for (int d = 16; d; d >>= 1) v += __shfl_xor_sync(~0u, v, d);
    if ((threadIdx.x & 31) == 0) {
        warp_bits[threadIdx.x >> 5] = bits;
        warp_sum[threadIdx.x >> 5] = v;
    }
    __syncthreads();
    bits = 0;
    v = 0.0f;
    for (int w = 0; w < static_cast<int>(blockDim.x >> 5); ++w) {
        bits = max(bits, warp_bits[w]);
        v += warp_sum[w];
    }
}

// One block per token.  A warp takes 32 values at a time, one to a lane.
__global__ void __launch_bounds__(512)
    half_rows_kernel(const float* __restrict__ x, int64_t ldx, int k, const float* __restrict__ norm, float eps,
                     __half* rows, __half* sums, float* row_scale) {
    launch_dependents();
    wait_for_predecessor();
    const float* row = x + blockIdx.x * ldx;
    uint32_t bits = 0;
    float squares = 0.0f;
    for (int i = threadIdx.x; i < k; i += blockDim.x) {
        const float v = __ldcg(row + i);
        squares = __fmaf_rn(v, v, squares);
        bits = max(bits, __float_as_uint(norm ? v * norm[i] : v) & 0x7fffffffu);
    }
    block_reduce(bits, squares);
    const float amax = __uint_as_float(bits);
    const float inverse = amax > 1e-30f ? kHALF_RANGE / amax : 0.0f;
    const float factor = norm ? __frsqrt_rn(__fmaf_rn(squares, 1.0f / k, eps)) : 1.0f;
    if (threadIdx.x == 0)
        row_scale[blockIdx.x] = bits >= 0x7f800000u ? __uint_as_float(0x7fc00000u) : amax / kHALF_RANGE * factor;
    const int64_t base = static_cast<int64_t>(blockIdx.x) * k;
    for (int i = threadIdx.x; i < k; i += blockDim.x) {  // k and blockDim.x are multiples of 32
        const float v = __ldcg(row + i);
        const __half h = __float2half_rn((norm ? v * norm[i] : v) * inverse);
        rows[base + i] = h;
        float sum = __half2float(h);
        for (int d = 16; d; d >>= 1) sum += __shfl_xor_sync(~0u, sum, d);
        if ((i & 31) == 0) {
            const __half high = __float2half_rn(sum);
            __half* out = sums + (base + i) / kSUPER * 16 + (i & 255) / 32;
            out[0] = high;
            out[8] = __float2half_rn(sum - __half2float(high));
        }
    }
}

}  // namespace

cudaError_t half_rows(const NextnMatmul& m, const MatmulWorkspace& w, cudaStream_t stream) {
    Launch l;
    l.grid = dim3(m.t);
    l.block = dim3(m.k >= 4096 ? 512 : 256);
    l.pdl = m.flags & NEXTN_PDL;
    return launch(l, stream, half_rows_kernel, m.x, m.ldx, m.k, m.norm_weight, m.norm_eps, w.half_rows, w.half_sums,
                  w.row_scale);
}

}  // namespace nextn
