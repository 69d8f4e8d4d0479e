// Gated grouped-query attention over an in-place KV cache.
#pragma once
#include "export.h"

// How keys and values are kept. kNEXTN_CACHE_INT8: per row and kv head D int8, then 16 bytes that hold a float32 scale
// per 64 values (the rest 0); a value is int8 * scale, scale = largest magnitude / 127, rounded to the nearest. A
// row and kv head with values that are not finite, or above 65504 (f16) or 32496 (int8), keeps a key of NaN and values
// of 0.
enum NextnCacheType { kNEXTN_CACHE_F16 = 0, kNEXTN_CACHE_INT8 = 1 };

// Per token t at position p = *position + t, query head h of H, kv head h / (H/KV), head size D:
//   q = rope(rms_norm(query, q_norm)),  k = rope(rms_norm(key, k_norm));  k and value become row p of the cache
//   o = softmax(q . k[0..p] / sqrt(D)) v[0..p];   y = o * sigmoid(gate)
// Rope is NeoX style on the first rope_dim values: pairs (i, i + rope_dim/2), the rest passes.
typedef struct NextnAttention {
    const float* query_gate;  // [t, H, 2, D] f32: per head D of query, then D of gate; row stride ld_query
    const float* key;         // [t, KV, D] f32, row stride ld_kv
    const float* value;       // [t, KV, D] f32, row stride ld_kv
    int64_t ld_query, ld_kv;
    const float* q_norm;  // [D]
    const float* k_norm;  // [D]
    float eps;
    const float* cos;  // [t, rope_dim/2] f32 of each row's position, any factor (YaRN) included
    const float* sin;
    const int32_t* position;  // device; position of row 0 = rows already in the cache
    void* key_cache;          // [capacity, KV, row] as cache_type; rows at and beyond *position + t are never read
    void* value_cache;
    float* y;  // [t, H*D] f32, stride ld_y
    int64_t ld_y;
    int32_t t, capacity;  // a row at or beyond capacity is not stored and its y is NaN
    int32_t heads, kv_heads, head_dim, rope_dim;
    int32_t cache_type;  // NextnCacheType
    void* workspace;     // nextn_attention_workspace bytes, 256-byte aligned, no contents kept
    size_t workspace_bytes;
    int32_t flags;  // NEXTN_PDL
} NextnAttention;

// Bytes of a cache row of one kv head; 0 for a type that there is not.
NEXTN_API size_t nextn_cache_row_bytes(int32_t cache_type, int32_t head_dim);

NEXTN_API size_t nextn_attention_workspace(int32_t t, int32_t heads, int32_t head_dim);

// t <= 8: at most 64 splits, whose bounds are a function of a token's own position, then one combine launch.
// t > 8: one launch appends, one attends (no splits).
// Refuses: head_dim other than 32, 64, 128, 256; heads / kv_heads not a whole number up to 8; odd or too large
// rope_dim; another cache_type.
NEXTN_API cudaError_t nextn_attention(const NextnAttention* args, cudaStream_t stream);

// cos and sin rows of t consecutive positions: factor * cos(p * inv_freq[i]), angles in float64.
// inv_freq: [pairs] f64; cos, sin: [t, pairs] f32.
NEXTN_API cudaError_t nextn_rope_rows(const int32_t* position, int32_t t, const double* inv_freq, int32_t pairs,
                                      float factor, float* cos, float* sin, int32_t flags, cudaStream_t stream);
