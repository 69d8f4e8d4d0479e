#include "rms_norm.h"
#include "launch.cuh"
#include "ptx.cuh"

namespace nextn {
namespace {

__global__ void __launch_bounds__(1024)
    rms_norm_kernel(const float* x, int64_t ldx, int k, const float* __restrict__ weight, float eps, float* y,
                    int64_t ldy) {
    launch_dependents();
    wait_for_predecessor();
    __shared__ float warp_sum[32];
    const float* row = x + blockIdx.x * ldx;
    float squares = 0.0f;
    for (int i = threadIdx.x; i < k; i += blockDim.x) {
        const float v = __ldcg(row + i);
        squares = __fmaf_rn(v, v, squares);
    }
    for (int d = 16; d; d >>= 1) squares = __fadd_rn(squares, __shfl_xor_sync(~0u, squares, d));
    if ((threadIdx.x & 31) == 0) warp_sum[threadIdx.x >> 5] = squares;
    __syncthreads();
    float total = 0.0f;
    for (int w = 0; w < static_cast<int>(blockDim.x >> 5); ++w) total = __fadd_rn(total, warp_sum[w]);
    const float factor = __frsqrt_rn(__fmaf_rn(total, 1.0f / k, eps));
    for (int i = threadIdx.x; i < k; i += blockDim.x)
        y[blockIdx.x * ldy + i] = __fmul_rn(__fmul_rn(__ldcg(row + i), weight[i]), factor);
}

}  // namespace
}  // namespace nextn

NEXTN_API cudaError_t nextn_rms_norm(const float* x, int64_t ldx, int32_t t, int32_t k, const float* weight, float eps,
                                     float* y, int64_t ldy, int32_t flags, cudaStream_t stream) {
    if (t < 1 || k < 1 || ldx < k || ldy < k || !weight) return cudaErrorInvalidValue;
    nextn::Launch l;
    l.grid = dim3(t);
    l.block = dim3(k >= 4096 ? 1024 : 256);
    l.pdl = flags & NEXTN_PDL;
    return nextn::launch(l, stream, nextn::rms_norm_kernel, x, ldx, k, weight, eps, y, ldy);
}
