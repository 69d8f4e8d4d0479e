// y = W x for one or more weight matrices in GGUF block layout that share their input.
#pragma once
#include "export.h"

#define NEXTN_MAX_MATRICES 4

typedef struct NextnMatrix {
    const void* weight;  // GGUF rows [n, row bytes of k], 16-byte aligned and readable up to the next multiple of 16
    int32_t type;        // NextnType
    int32_t n;           // rows, any number > 0
    float* y;            // [t, n] f32, row stride ldy
    int64_t ldy;
} NextnMatrix;

typedef struct NextnMatmul {
    const float* x;  // [t, k] f32, row stride ldx (a multiple of 4)
    int64_t ldx;
    int32_t t, k;              // k: a multiple of 256 for K-quants, of 32 for Q8_0, of 4 for float rows
    const float* norm_weight;  // optional [k]: x is first replaced by RMSNorm(x) * norm_weight
    float norm_eps;
    const float* residual;  // optional [t, n] f32, stride ldr, added to the (only) matrix's y; may be y itself
    int64_t ldr;
    int32_t swiglu;      // 1: matrix 0 is gate, 1 is up, same type and n; y of matrix 0 = silu(gate) * up
    int32_t n_matrices;  // 1..NEXTN_MAX_MATRICES (exactly 2 with swiglu, 1 with residual)
    NextnMatrix matrix[NEXTN_MAX_MATRICES];
    void* workspace;  // nextn_matmul_workspace(t, k) bytes, 256-byte aligned, no contents kept
    size_t workspace_bytes;
    int32_t flags;  // NEXTN_PDL
} NextnMatmul;

NEXTN_API size_t nextn_matmul_workspace(int32_t t, int32_t k);

// t <= 8: int8 tensor cores on hi/lo activations, every weight read once, sums independent of t.
// t > 8:  f16 tensor cores on exact integer weights (K-quants; wgmma on compute capability 9.0); float rows and Q8_0 in
//         chunks of 8 tokens.
// Refuses: t < 1, unknown types, k not a multiple as above, a workspace too small.
NEXTN_API cudaError_t nextn_matmul(const NextnMatmul* args, cudaStream_t stream);
