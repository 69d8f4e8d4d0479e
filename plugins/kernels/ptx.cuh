// Thin wrappers of the PTX instructions that have no CUDA C++ spelling.
#pragma once
#include <cuda_fp16.h>
#include <stdint.h>

namespace nextn {

// Two 8-bit integer tensor-core shapes.  Lane l = 4*g + q holds A rows g and g+8, bytes k = 4q.. (and 16+4q..),
// B column g, and C columns 2q, 2q+1 of rows g (c0, c1) and g+8 (c2, c3).  C starts at zero.  A from 0 to 255:
__device__ __forceinline__ void mma_u8_k32(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                           uint32_t b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
        : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(0));
}

// A as well from -128 to 127.
__device__ __forceinline__ void mma_s8_k16(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t b0) {
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%7,%7,%7};"
        : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
        : "r"(a0), "r"(a1), "r"(b0), "r"(0));
}

// d = the same with unsigned A, plus c.
__device__ __forceinline__ void mma_u8_s8_k32_add(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                                  const int (&c)[4]) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}

// f16 x f16 + f32, 16x8x16, accumulating in place.
__device__ __forceinline__ void mma_f16_k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint32_t smem_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ uint32_t smem_address(uint32_t address) { return address; }

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(smem_address(p)));
}

__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], const void* p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(smem_address(p)));
}

// 16-byte asynchronous copy; `valid` false writes zeros instead of reading.
template <typename To>
__device__ __forceinline__ void cp_async_16(To dst, const void* src, bool valid = true) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem_address(dst)), "l"(src), "r"(valid ? 16 : 0)
                 : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// True in one lane of a whole warp, and known to be true in no other.
__device__ __forceinline__ bool elect_lane() {
    uint32_t r = 0;
#if __CUDA_ARCH__ >= 900
    asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(r));
#endif
    return r;
}

// Programmatic dependent launch; no-ops before compute capability 9.0.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Registers of a group of four warps, all of which must call it; nothing where the target has no such instruction.
template <int REGISTERS>
__device__ __forceinline__ void fewer_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
#endif
}
template <int REGISTERS>
__device__ __forceinline__ void more_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
#endif
}

// Shared-memory barriers of the weight ring.
__device__ __forceinline__ void mbarrier_init(uint64_t* bar, uint32_t count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(smem_address(bar)), "r"(count) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint32_t bar) {
    asm volatile("{ .reg .b64 t; mbarrier.arrive.shared.b64 t, [%0]; }" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint64_t* bar) { mbarrier_arrive(smem_address(bar)); }
__device__ __forceinline__ void mbarrier_wait(uint32_t bar, uint32_t parity) {
    uint32_t done = 0;
    while (!done) {
#if __CUDA_ARCH__ >= 900
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done)
                     : "r"(bar), "r"(parity)
                     : "memory");
#else
        asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done)
                     : "r"(bar), "r"(parity)
                     : "memory");
#endif
    }
}
__device__ __forceinline__ void mbarrier_wait(uint64_t* bar, uint32_t parity) {
    mbarrier_wait(smem_address(bar), parity);
}

// A copy from global to shared memory (address `to`) of which `full` learns; both and `bytes` by 16.  policy: of L2.
__device__ __forceinline__ void copy_bulk(uint32_t to, const void* from, int bytes, uint64_t* full, uint64_t policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
            "r"(to),
        "l"(from), "r"(bytes), "r"(smem_address(full)), "l"(policy)
        : "memory");
}
// For what is read once: it leaves L2 first, and rows, states and caches stay.
__device__ __forceinline__ uint64_t used_once() {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// For what is read soon: L2 would write it to memory in pieces, between reads, which costs far more than its bytes.
__device__ __forceinline__ void store_in_l2(float* p, float v) {
    asm volatile(
        "{ .reg .b64 t; createpolicy.fractional.L2::evict_last.b64 t, 1.0; st.global.L2::cache_hint.f32 [%0], %1, t; }" ::
            "l"(p),
        "f"(v)
        : "memory");
}

// Byte `i` of `w`, zero- or sign-extended. In one instruction: what the compiler makes of __byte_perm may be two.
template <int I>
__device__ __forceinline__ int byte_of(uint32_t w) {
    int r;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(r) : "r"(w), "n"(0x4440 + I));
    return r;
}
template <int I>
__device__ __forceinline__ int signed_byte_of(uint32_t w) {
    int r;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(r) : "r"(w), "n"(I | (8 + I) << 4 | (8 + I) << 8 | (8 + I) << 12));
    return r;
}

// Bits of `a` where the mask has ones, else those of `b`, in one instruction: written out, the compiler finds two.
template <uint32_t MASK>
__device__ __forceinline__ uint32_t merge_bits(uint32_t a, uint32_t b) {
    uint32_t r;
    asm("lop3.b32 %0, %1, %2, %3, 0xe4;" : "=r"(r) : "r"(a), "r"(b), "r"(MASK));
    return r;
}

// a & MASK for several shifts: the compiler would shift first, and then need one of these for each.
template <uint32_t MASK>
__device__ __forceinline__ uint32_t keep_bits(uint32_t a) {
    uint32_t r;
    asm("and.b32 %0, %1, %2;" : "=r"(r) : "r"(a), "n"(MASK));
    return r;
}

// A word of shared memory.
__device__ __forceinline__ uint32_t load_shared(uint32_t address) {
    uint32_t r;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(r) : "r"(address));
    return r;
}

// Loads return in order: one that waits for memory holds up everything behind it, a barrier's word too. So what will be
// needed later is brought to L2 first.
__device__ __forceinline__ void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

}  // namespace nextn
