// One decoder layer on the residual stream: mixer (Gated DeltaNet or gated attention) and feed-forward network.
#pragma once
#include "attention.h"
#include "gated_delta_net.h"

#define NEXTN_MAX_MIXER_INPUTS 4

typedef struct NextnLayerMatrix {
    const void* weight;  // GGUF rows, as NextnMatrix.weight
    int32_t type;        // NextnType
    int32_t n;           // rows
} NextnLayerMatrix;

//   a = mixer(W_in RMSNorm(x, mixer_norm)),  r = x + W_out a
//   y = r + W_down (silu(W_gate n) * (W_up n)),  n = RMSNorm(r, ffn_norm)
typedef struct NextnLayer {
    const float* x;  // [t, d] f32, contiguous
    float* y;        // [t, d], contiguous; not x
    int32_t t, d;
    float eps;                                        // of every norm of the layer
    const float* mixer_norm;                          // [d]
    const float* ffn_norm;                            // [d]
    NextnLayerMatrix input[NEXTN_MAX_MIXER_INPUTS];   // GDN: qkv, z, alpha, beta; attention: query and gate, key, value
    int32_t inputs;                                   // 4 or 3
    NextnLayerMatrix output, gate, up, down;          // gate and up: same type and rows
    // The mixer; the one with a head_dim other than 0. Of it the caller gives parameters, state and geometry; t, eps,
    // flags, workspace, rows and y are filled in here.
    NextnGatedDeltaNet delta_net;
    NextnAttention attention;
    uint32_t* sync;   // NEXTN_LAYER_SYNC_BYTES of this layer's own, zero before its first call and left to it after that
    void* workspace;  // nextn_layer_workspace bytes, 256-byte aligned, no contents kept
    size_t workspace_bytes;
    int32_t flags;  // NEXTN_PDL, NEXTN_LAYER_SEPARATE
} NextnLayer;

#define NEXTN_LAYER_SYNC_BYTES 256
#define NEXTN_LAYER_SEPARATE 2  // single kernels only, for comparison

// Reads t, d, matrices and geometry only: pointers may be null.
NEXTN_API size_t nextn_layer_workspace(const NextnLayer* layer);

// t <= 8: one persistent launch for what it can take (K-quant matrices, rows of whole superblocks, compute capability
// 9.0 and up), the other kernels of this library for the rest. Which of them run does not depend on t within 1..8.
NEXTN_API cudaError_t nextn_layer(const NextnLayer* layer, cudaStream_t stream);
