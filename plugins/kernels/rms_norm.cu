#include "rms_norm.h"
#include "launch.cuh"
#include "ptx.cuh"

namespace nextn {
namespace {

constexpr int kTHREADS = 1024, kKEPT = 4;  // of a wide row; values that a thread keeps in registers

// Rows of one kind: y[i] is the norm of row i of x, or of rows[i].
struct NormedRows {
    const float *x, *weight;
    const int32_t* rows;
    float* y;
    int64_t ldx, ldy;
    int k, count;
};

// blockIdx.y: the kind.
__global__ void __launch_bounds__(kTHREADS) rms_norm_kernel(NormedRows first, NormedRows second, int t, float eps) {
    launch_dependents();
    const bool other = blockIdx.y;  // field by field: a reference to either would need them in memory
    const NormedRows r = {other ? second.x : first.x,       other ? second.weight : first.weight,
                          other ? second.rows : first.rows, other ? second.y : first.y,
                          other ? second.ldx : first.ldx,   other ? second.ldy : first.ldy,
                          other ? second.k : first.k,       other ? second.count : first.count};
    float weight[kKEPT];  // on their way before the rows are there
#pragma unroll
    for (int i = 0; i < kKEPT; ++i) {
        const int at = threadIdx.x + i * blockDim.x;
        weight[i] = at < r.k ? __ldg(r.weight + at) : 0.0f;
    }
    wait_for_predecessor();
    if (static_cast<int>(blockIdx.x) >= r.count) return;
    __shared__ float warp_sum[kTHREADS / 32];
    const int index = r.rows ? __ldcg(r.rows + blockIdx.x) : static_cast<int>(blockIdx.x);
    const bool there = index >= 0 && index < t;
    const float* row = r.x + (there ? index : 0) * r.ldx;
    float kept[kKEPT];
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kKEPT; ++i) {
        const int at = threadIdx.x + i * blockDim.x;
        kept[i] = at < r.k ? __ldcg(row + at) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kKEPT; ++i) squares = __fmaf_rn(kept[i], kept[i], squares);
    for (int at = threadIdx.x + kKEPT * blockDim.x; at < r.k; at += blockDim.x) {
        const float v = __ldcg(row + at);
        squares = __fmaf_rn(v, v, squares);
    }
    for (int d = 16; d; d >>= 1) squares = __fadd_rn(squares, __shfl_xor_sync(~0u, squares, d));
    if ((threadIdx.x & 31) == 0) warp_sum[threadIdx.x >> 5] = squares;
    __syncthreads();
    float total = 0.0f;
    for (int w = 0; w < static_cast<int>(blockDim.x >> 5); ++w) total = __fadd_rn(total, warp_sum[w]);
    const float factor = there ? __frsqrt_rn(__fmaf_rn(total, 1.0f / r.k, eps)) : __int_as_float(0x7fc00000);
    float* y = r.y + blockIdx.x * r.ldy;
    const auto put = [&](int at, float v, float w) { y[at] = __fmul_rn(__fmul_rn(v, w), factor); };
#pragma unroll
    for (int i = 0; i < kKEPT; ++i) {
        const int at = threadIdx.x + i * blockDim.x;
        if (at < r.k) put(at, kept[i], weight[i]);
    }
    for (int at = threadIdx.x + kKEPT * blockDim.x; at < r.k; at += blockDim.x)
        put(at, __ldcg(row + at), __ldg(r.weight + at));
}

bool valid(const NormedRows& r) {
    return r.count >= 1 && r.k >= 1 && r.ldx >= r.k && r.ldy >= r.k && r.x && r.weight && r.y;
}

cudaError_t run(const NormedRows& first, const NormedRows* second, int t, float eps, int32_t flags,
                cudaStream_t stream) {
    if (!valid(first) || (second && !valid(*second))) return cudaErrorInvalidValue;
    Launch l;
    l.grid = dim3(second ? max(first.count, second->count) : first.count, second ? 2 : 1);
    l.block = dim3(first.k >= 4096 ? kTHREADS : 256);
    l.pdl = flags & NEXTN_PDL;
    return launch(l, stream, rms_norm_kernel, first, second ? *second : first, t, eps);
}

}  // namespace
}  // namespace nextn

using namespace nextn;

NEXTN_API cudaError_t nextn_rms_norm(const float* x, int64_t ldx, int32_t t, int32_t k, const float* weight, float eps,
                                     float* y, int64_t ldy, int32_t flags, cudaStream_t stream) {
    return run({x, weight, nullptr, y, ldx, ldy, k, t}, nullptr, t, eps, flags, stream);
}

NEXTN_API cudaError_t nextn_rms_norm_rows(const float* x, int64_t ldx, int32_t t, int32_t k, const float* weight,
                                          float eps, float* y, const int32_t* rows, int32_t count, float* picked,
                                          int32_t flags, cudaStream_t stream) {
    if (!rows) return cudaErrorInvalidValue;
    const NormedRows chosen = {x, weight, rows, picked, ldx, k, k, count};
    return run({x, weight, nullptr, y, ldx, k, k, t}, &chosen, t, eps, flags, stream);
}

NEXTN_API cudaError_t nextn_rms_norm_pair(const float* a, int32_t k_a, const float* a_weight, const float* b,
                                          int32_t k_b, const float* b_weight, int32_t t, float eps, float* y,
                                          int32_t flags, cudaStream_t stream) {
    const int64_t width = static_cast<int64_t>(k_a) + k_b;
    const NormedRows right = {b, b_weight, nullptr, y + k_a, k_b, width, k_b, t};
    return run({a, a_weight, nullptr, y, k_a, width, k_a, t}, &right, t, eps, flags, stream);
}
