// RMSNorm of float32 rows, each row by one block, so independent of how many there are.
#pragma once
#include "export.h"

// y = x / sqrt(mean(x^2) + eps) * weight.   x: [t, k] f32, stride ldx; weight: [k]; y: [t, k] f32, stride ldy, may be
// x.
NEXTN_API cudaError_t nextn_rms_norm(const float* x, int64_t ldx, int32_t t, int32_t k, const float* weight, float eps,
                                     float* y, int64_t ldy, int32_t flags, cudaStream_t stream);

// The same, and picked[i] = y[rows[i]] for i < count; a row of NaN for a row number outside 0 .. t-1.
// y [t, k] and picked [count, k] without gaps, other memory than x.
NEXTN_API cudaError_t nextn_rms_norm_rows(const float* x, int64_t ldx, int32_t t, int32_t k, const float* weight,
                                          float eps, float* y, const int32_t* rows, int32_t count, float* picked,
                                          int32_t flags, cudaStream_t stream);

// y [t, k_a + k_b] = norms of a [t, k_a] and b [t, k_b], side by side, all without gaps; y is other memory.
NEXTN_API cudaError_t nextn_rms_norm_pair(const float* a, int32_t k_a, const float* a_weight, const float* b,
                                          int32_t k_b, const float* b_weight, int32_t t, float eps, float* y,
                                          int32_t flags, cudaStream_t stream);
