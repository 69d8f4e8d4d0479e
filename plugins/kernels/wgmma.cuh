// Hopper's asynchronous tensor-core instructions; only kernels compiled for sm_90a may use what is in here.
#pragma once
#include <cuda_fp16.h>
#include "ptx.cuh"

namespace nextn {

// A tile that wgmma reads from shared memory, K-major.  128-byte swizzle: rows of 64 f16 (128 bytes), groups of 8 rows
// 1024 bytes apart and so aligned; within a row the 16-byte piece c lies at c ^ (row % 8).
__device__ __forceinline__ uint64_t swizzled_tile(const void* shared) {
    return ((smem_address(shared) & 0x3ffffu) >> 4) | uint64_t{1} << 16 | uint64_t{1024 >> 4} << 32 | uint64_t{1} << 62;
}
// No swizzle: 8 rows x 16 bytes are 128 contiguous bytes; the next 8 values of k lie 128 bytes on, the next 8 rows 256.
__device__ __forceinline__ uint64_t plain_tile(const void* shared) {
    return ((smem_address(shared) & 0x3ffffu) >> 4) | uint64_t{128 >> 4} << 16 | uint64_t{256 >> 4} << 32;
}

// A tile that lies with its columns (n) contiguous, 128-byte swizzle: rows of k, each of 64 f16 of n, groups of 8 rows
// 1024 bytes apart; the next 64 columns lie `block_bytes` on.
__device__ __forceinline__ uint64_t column_tile(const void* shared, uint32_t block_bytes) {
    return ((smem_address(shared) & 0x3ffffu) >> 4) | uint64_t{block_bytes >> 4} << 16 | uint64_t{1024 >> 4} << 32 |
           uint64_t{1} << 62;
}

// Before the first wgmma after registers were written that it reads.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
__device__ __forceinline__ void mbarrier_expect(uint64_t* bar, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(smem_address(bar)), "r"(bytes) : "memory");
}
// 16-byte aligned, a multiple of 16 bytes; completes on `bar`.
__device__ __forceinline__ void bulk_copy(void* to, const void* from, uint32_t bytes, uint64_t* bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     smem_address(to)),
                 "l"(from), "r"(bytes), "r"(smem_address(bar))
                 : "memory");
}

#define NEXTN_ACC4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define NEXTN_ACC16(d, i) NEXTN_ACC4(d, i), NEXTN_ACC4(d, i + 4), NEXTN_ACC4(d, i + 8), NEXTN_ACC4(d, i + 12)

// Keeps the compiler from moving uses of the accumulators across a wait.
template <int N>
__device__ __forceinline__ void accumulators_fence(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// d (= or, with `keep`, +=) A B of one warpgroup: 64 rows x N columns, k = 16, f16 in, f32 sums.  Warp w has rows
// 16w..; A as for mma.m16n8k16, d[4j..] columns 8j..8j+7 as its accumulator; B a tile as above, or with COLUMNS 1 a
// column_tile.
template <int N, int COLUMNS = 0>
struct Wgmma;
template <int N, int COLUMNS = 0>
__device__ __forceinline__ void wgmma_f16(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, bool keep) {
    Wgmma<N, COLUMNS>::run(d, a, b, keep);
}

template <int COLUMNS>
struct Wgmma<64, COLUMNS> {
    __device__ static __forceinline__ void run(float (&d)[32], const uint32_t (&a)[4], uint64_t b, bool keep) {
        asm volatile(
            "{ .reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
            "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,"
            "%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
            "}, {%32,%33,%34,%35}, %36, p, 1, 1, %38; }"
            : NEXTN_ACC16(d, 0), NEXTN_ACC16(d, 16)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(keep)), "n"(COLUMNS));
    }
};

template <int COLUMNS>
struct Wgmma<128, COLUMNS> {
    __device__ static __forceinline__ void run(float (&d)[64], const uint32_t (&a)[4], uint64_t b, bool keep) {
        asm volatile(
            "{ .reg .pred p; setp.ne.b32 p, %69, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
            "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,"
            "%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,"
            "%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,"
            "%60,%61,%62,%63"
            "}, {%64,%65,%66,%67}, %68, p, 1, 1, %70; }"
            : NEXTN_ACC16(d, 0), NEXTN_ACC16(d, 16), NEXTN_ACC16(d, 32), NEXTN_ACC16(d, 48)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(keep)), "n"(COLUMNS));
    }
};

template <int COLUMNS>
struct Wgmma<256, COLUMNS> {
    __device__ static __forceinline__ void run(float (&d)[128], const uint32_t (&a)[4], uint64_t b, bool keep) {
        asm volatile(
            "{ .reg .pred p; setp.ne.b32 p, %133, 0; wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {"
            "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,"
            "%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,"
            "%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,"
            "%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,"
            "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,"
            "%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,"
            "%120,%121,%122,%123,%124,%125,%126,%127"
            "}, {%128,%129,%130,%131}, %132, p, 1, 1, %134; }"
            : NEXTN_ACC16(d, 0), NEXTN_ACC16(d, 16), NEXTN_ACC16(d, 32), NEXTN_ACC16(d, 48), NEXTN_ACC16(d, 64),
              NEXTN_ACC16(d, 80), NEXTN_ACC16(d, 96), NEXTN_ACC16(d, 112)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(keep)), "n"(COLUMNS));
    }
};

// The same with A, 64 rows, as a swizzled tile in shared memory; N = 64.
__device__ __forceinline__ void wgmma_f16_shared(float (&d)[32], uint64_t a, uint64_t b, bool keep) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,"
        "%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
        "}, %32, %33, p, 1, 1, 0, 0; }"
        : NEXTN_ACC16(d, 0), NEXTN_ACC16(d, 16)
        : "l"(a), "l"(b), "r"(static_cast<int>(keep)));
}
// What this thread wrote to shared memory becomes visible to wgmma and to bulk copies.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

#undef NEXTN_ACC4
#undef NEXTN_ACC16

}  // namespace nextn
