// Causal convolution, Gated DeltaNet and gated output norm of one layer, with state kept in slots.
#pragma once
#include "export.h"

// Per token, value head h of HV, key head h mod HK, D = head size of keys and values:
//   m      = silu(sum_j conv_weight[c, j] * row[t - kernel + 1 + j, c])         channels q (HK*D), k (HK*D), v (HV*D)
//   q, k   = q / sqrt(sum q^2 + eps) / sqrt(D),  k / sqrt(sum k^2 + eps)
//   g      = exp(a[h] * softplus(alpha + dt_bias[h])),  b = sigmoid(beta)
//   S      = g S + k (b (v - (g S)^T k))^T,  o = S^T q
//   y      = o / sqrt(mean o^2 + eps) * norm_weight * silu(z)
typedef struct NextnGatedDeltaNet {
    const float* qkv;    // [t, C] f32, C = 2*HK*D + HV*D, row stride ld_qkv (a multiple of 4)
    const float* z;      // [t, HV*D], stride ld_z (a multiple of 4)
    const float* alpha;  // [t, HV], stride ld_gate
    const float* beta;   // [t, HV], stride ld_gate
    int64_t ld_qkv, ld_z, ld_gate;
    const float* conv_weight;  // [C, kernel]
    const float* a;            // [HV]
    const float* dt_bias;      // [HV]
    const float* norm_weight;  // [D]
    float eps;
    float* conv_pool;     // [slots, kernel - 1, C] f32, read at *slot and written in place: rows before the conv
    float* state_pool;    // f32, read up to *slot and written in place: a state [HV, D, D] (key index outermost) in
                          // slot 0, steps [HV, D / 32, D + 64] in the others (gated_delta_net_steps.cuh)
    const int32_t* slot;  // device; the slot to start from, or a negative number to start from zeros
    float* y;             // [t, HV*D] f32, stride ld_y
    int64_t ld_y;
    int32_t t, slots;  // t <= slots: slot i is for the state after token i; longer: slot 0 for the last one
    int32_t k_heads, v_heads, head_dim, conv_kernel;
    void* workspace;  // nextn_gated_delta_net_workspace bytes, 256-byte aligned, no contents kept
    size_t workspace_bytes;
    int32_t flags;  // NEXTN_PDL
} NextnGatedDeltaNet;

NEXTN_API size_t nextn_gated_delta_net_workspace(int32_t t, int32_t k_heads, int32_t v_heads, int32_t head_dim);

// Calls of up to NEXTN_MAX_DECODE_T tokens, and of up to `slots`, take tokens one after the other: results do not
// depend on how a text is cut into such calls.  Longer ones go by chunks of 32 tokens: the same numbers, with errors
// near 5e-6 (split bf16 products) instead of 2e-7, but not the same bits.
// Refuses: head_dim other than 32, 64, 128; v_heads not a multiple of k_heads; conv_kernel outside 2..8; t or slots <
// 1; strides or pointers off their alignment.
NEXTN_API cudaError_t nextn_gated_delta_net(const NextnGatedDeltaNet* args, cudaStream_t stream);

// Makes the state and window of slot `slot` those of slot 0, the state with the bits that the next pass from that slot
// would start from; the slots behind are of no more use then.  slot <= 0: nothing to do.
// window: numbers of a window, (kernel - 1) * C.
NEXTN_API cudaError_t nextn_gated_delta_net_settle(float* state_pool, float* conv_pool, int32_t slot, int32_t v_heads,
                                                   int32_t head_dim, int64_t window, cudaStream_t stream);
