// Two blocks of the persistent layer kernel, a cluster: each has half of every row of the tiles of both, and sums go to
// the block whose tile they are of.
#pragma once
#include "ptx.cuh"

namespace nextn {

constexpr int kCLUSTER = 2;  // blocks

// All threads of both blocks. Orders nothing but mbarriers that were initialised and fenced.
__device__ __forceinline__ void sync_cluster() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.relaxed; barrier.cluster.wait;" ::: "memory");
#endif
}

// What to add to an address in shared memory to have the same one in block `rank`.
__device__ __forceinline__ uint32_t way_to_block(const void* any, uint32_t rank) {
    const uint32_t here = smem_address(any);
    uint32_t there = here;
#if __CUDA_ARCH__ >= 900
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
#endif
    return there - here;
}

// Nobody waits for the store; the barrier, of the same block, counts its bytes.
__device__ __forceinline__ void send([[maybe_unused]] uint32_t to, [[maybe_unused]] float v,
                                     [[maybe_unused]] uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(to), "f"(v),
                 "r"(barrier)
                 : "memory");
#endif
}
__device__ __forceinline__ void send([[maybe_unused]] uint32_t to, [[maybe_unused]] float2 v,
                                     [[maybe_unused]] uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(to),
                 "f"(v.x), "f"(v.y), "r"(barrier)
                 : "memory");
#endif
}
__device__ __forceinline__ void send([[maybe_unused]] uint32_t to, [[maybe_unused]] float4 v,
                                     [[maybe_unused]] uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
                 "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier)
                 : "memory");
#endif
}
// At a barrier of either block.
__device__ __forceinline__ void arrive_in_cluster([[maybe_unused]] uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
#endif
}
__device__ __forceinline__ void arrive_expecting([[maybe_unused]] uint64_t* barrier, [[maybe_unused]] int bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(smem_address(barrier)), "r"(bytes)
                 : "memory");
#endif
}
}  // namespace nextn
