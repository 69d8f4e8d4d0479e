#include "read.h"
#include "launch.cuh"

namespace nextn {
namespace {

constexpr int kTHREADS = 512, kBLOCKS_PER_SM = 4, kLOADS = 8;

__global__ void __launch_bounds__(kTHREADS) read_kernel(const uint4* data, size_t count, uint32_t* sink) {
    const size_t threads = static_cast<size_t>(gridDim.x) * blockDim.x;
    size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    uint32_t sum = 0;
    for (; i + (kLOADS - 1) * threads < count; i += kLOADS * threads) {
        uint4 v[kLOADS];  // all in flight at once
#pragma unroll
        for (int j = 0; j < kLOADS; ++j) v[j] = __ldcs(data + i + j * threads);
#pragma unroll
        for (int j = 0; j < kLOADS; ++j) sum ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
    }
    for (; i < count; i += threads) {
        const uint4 v = __ldcs(data + i);
        sum ^= v.x ^ v.y ^ v.z ^ v.w;
    }
    sum = __reduce_xor_sync(~0u, sum);
    if ((threadIdx.x & 31) == 0) atomicXor(sink, sum);
}

}  // namespace
}  // namespace nextn

NEXTN_API cudaError_t nextn_read(const void* data, size_t nbytes, uint32_t* sink, cudaStream_t stream) {
    if (!data || !sink || nbytes % sizeof(uint4)) return cudaErrorInvalidValue;
    nextn::DeviceLimits limits;
    const cudaError_t e = nextn::device_limits(&limits);
    if (e != cudaSuccess) return e;
    nextn::Launch l;
    l.grid = dim3(limits.sm_count * nextn::kBLOCKS_PER_SM);
    l.block = dim3(nextn::kTHREADS);
    return nextn::launch(l, stream, nextn::read_kernel, static_cast<const uint4*>(data), nbytes / sizeof(uint4), sink);
}
