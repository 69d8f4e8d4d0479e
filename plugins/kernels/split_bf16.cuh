// Products of float32 numbers on bf16 tensor cores: x = high + low keeps 16 bits of x, and high high + high low + low
// high of a product; relative errors are about 5e-6, and no range is lost.
#pragma once
#include <stdint.h>

namespace nextn {

// Two numbers, as f32 pairs of an mma operand: bf16 high parts and low parts.
struct SplitPair {
    uint32_t high, low;
};
__device__ __forceinline__ uint32_t bf16_pair(float even, float odd) {
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(odd), "f"(even));
    return r;
}
__device__ __forceinline__ SplitPair split_pair(float even, float odd) {
    const uint32_t high = bf16_pair(even, odd);
    return {high, bf16_pair(even - __uint_as_float(high << 16), odd - __uint_as_float(high & 0xffff0000u))};
}

// An A operand of m16n8k16 in both parts.
struct SplitA {
    uint32_t high[4], low[4];
    __device__ __forceinline__ void set(int i, float even, float odd) {
        const SplitPair s = split_pair(even, odd);
        high[i] = s.high;
        low[i] = s.low;
    }
    // From accumulators of two neighbouring column tiles: sums become an operand without leaving their lanes.
    __device__ __forceinline__ void set(const float (&left)[4], const float (&right)[4]) {
        set(0, left[0], left[1]);
        set(1, left[2], left[3]);
        set(2, right[0], right[1]);
        set(3, right[2], right[3]);
    }
};

// bf16 x bf16 + f32, 16x8x16, accumulating in place.
__device__ __forceinline__ void mma_bf16_k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace nextn
