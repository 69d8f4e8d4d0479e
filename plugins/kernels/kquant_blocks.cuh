// Byte layout of the GGUF block types (source: ggml-common.h) and of quantised activations.
#pragma once
#include <cuda_fp16.h>
#include "export.h"
#include "ptx.cuh"

namespace nextn {

// A superblock holds 256 weights of one row.
//   Q4_K 144 B: d f16 | dmin f16 | scales[12] | qs[128]
//   Q5_K 176 B: d f16 | dmin f16 | scales[12] | qh[32] | qs[128]
//        w = d*sc[s]*q - dmin*m[s];  s = sub-block of 32; qs byte 32c+l: low nibble sub-block 2c, high 2c+1;
//        Q5_K's fifth bit of sub-block s, value l, is bit s of qh[l]
//   Q6_K 210 B: ql[128] | qh[64] | scales[16] i8 | d f16
//        w = d*sc[i/16]*(q-32); half h of 128 values, quarter j of 32, l in it:
//        q = nibble(j/2) of ql[64h + 32(j%2) + l]  |  (2 bits at 2j of qh[32h + l]) << 4
constexpr int kSUPER = 256;

// Parts of blocks, by a pointer, or by an address of shared memory: a pointer to that may be worked out before every use.
__device__ __forceinline__ uint32_t load_word(const uint8_t* p) { return *reinterpret_cast<const uint32_t*>(p); }
__device__ __forceinline__ uint32_t load_word(uint32_t address) { return load_shared(address); }
__device__ __forceinline__ uint32_t load_half_word(const uint8_t* p) { return *reinterpret_cast<const uint16_t*>(p); }
__device__ __forceinline__ uint32_t load_half_word(uint32_t address) {
    uint16_t r;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(r) : "r"(address));
    return r;
}
__device__ __forceinline__ uint4 load_4_words(const uint8_t* p) { return *reinterpret_cast<const uint4*>(p); }
__device__ __forceinline__ uint4 load_4_words(uint32_t address) {
    uint4 r;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
                 : "r"(address));
    return r;
}

struct __align__(4) block_q4_k {
    __half d, dmin;
    uint8_t scales[12], qs[128];
};
struct __align__(4) block_q5_k {
    __half d, dmin;
    uint8_t scales[12], qh[32], qs[128];
};
struct block_q6_k {
    uint8_t ql[128], qh[64];
    int8_t scales[16];
    __half d;
};
struct block_q8_0 {
    __half d;
    int8_t qs[32];
};
static_assert(sizeof(block_q4_k) == 144 && sizeof(block_q5_k) == 176, "GGUF layout");
static_assert(sizeof(block_q6_k) == 210 && sizeof(block_q8_0) == 34, "GGUF layout");

template <int TYPE>
constexpr int kSuperBytes = TYPE == kNEXTN_Q4_K   ? 144
                            : TYPE == kNEXTN_Q5_K ? 176
                                                  : 210;

__host__ __device__ constexpr bool is_kquant(int type) {
    return type == kNEXTN_Q4_K || type == kNEXTN_Q5_K || type == kNEXTN_Q6_K;
}

// Values per block and bytes per block of a type; 0 for one that is not supported.
__host__ __device__ constexpr int block_values(int type) {
    return is_kquant(type)                                                   ? 256
           : type == kNEXTN_Q8_0                                             ? 32
           : type == kNEXTN_F32 || type == kNEXTN_F16 || type == kNEXTN_BF16 ? 1
                                                                             : 0;
}
__host__ __device__ constexpr int block_bytes(int type) {
    return type == kNEXTN_Q4_K   ? 144
           : type == kNEXTN_Q5_K ? 176
           : type == kNEXTN_Q6_K ? 210
           : type == kNEXTN_Q8_0 ? 34
           : type == kNEXTN_F32  ? 4
           : block_values(type)  ? 2
                                 : 0;
}
__host__ __device__ constexpr int64_t row_bytes(int type, int64_t k) {
    return k / block_values(type) * block_bytes(type);
}

// The 6-bit scales and mins of Q4_K/Q5_K, four to a word (sub-block s is byte s%4 of word s/4).
struct ScaleMin {
    uint32_t sc[2], mn[2];
};
__device__ __forceinline__ ScaleMin unpack_scale_min(uint32_t w0, uint32_t w1, uint32_t w2) {
    ScaleMin r;
    r.sc[0] = w0 & 0x3f3f3f3fu;
    r.mn[0] = w1 & 0x3f3f3f3fu;
    r.sc[1] = (w2 & 0x0f0f0f0fu) | ((w0 >> 2) & 0x30303030u);
    r.mn[1] = ((w2 >> 4) & 0x0f0f0f0fu) | ((w1 >> 2) & 0x30303030u);
    return r;
}

// Quantised activations, written by quantize_rows and read by the decode kernels, for groups of 4 tokens.
// x = scale * (256*hi + lo), hi and lo int8, one float scale per token and 256 values.  Per (superblock, group):
//   frag 2048 B: [32-value step kk/2: 4][lane: 32][kk%2: 2][8 B]  B operand of m16n8k32, column 2*(t%4) = hi, +1 = lo
//   sum32 256 B: [lane: 32][8 B]  sums over 32 values as B operand against the mins (see pack_sum32)
//   sum16 256 B: [lane: 32][8 B]  sums over 16 values as two m16n8k16 B operands (see pack_sum16)
// and scale[4]; then factor[8], one for each token, times which a product becomes that with the normed row.
constexpr int kGroupTokens = 4;
struct QuantizedRows {
    uint8_t* frag;
    uint8_t* sum32;
    uint8_t* sum16;
    float* scale;
    float* factor;
};

// Q6_K: values of the same place in the four quarters of half a superblock, of the row that `row` says, from their low
// bits and the high ones that they share.
__device__ __forceinline__ void unpack_quarters(uint32_t (&a)[4][2], int row, uint32_t low0, uint32_t low1, uint32_t high) {
    const uint32_t even = keep_bits<0x33333333u>(high), odd = keep_bits<0xccccccccu>(high);
    a[0][row] = merge_bits<0x0f0f0f0fu>(low0, even << 4);
    a[1][row] = merge_bits<0x0f0f0f0fu>(low1, odd << 2);
    a[2][row] = merge_bits<0x0f0f0f0fu>(low0 >> 4, even);
    a[3][row] = merge_bits<0x0f0f0f0fu>(low1 >> 4, odd >> 2);
}

}  // namespace nextn
