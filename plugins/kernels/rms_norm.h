// RMSNorm of float32 rows, each row by one block, so independent of how many there are.
#pragma once
#include "export.h"

// y = x / sqrt(mean(x^2) + eps) * weight.   x: [t, k] f32, stride ldx; weight: [k]; y: [t, k] f32, stride ldy, may be
// x.
NEXTN_API cudaError_t nextn_rms_norm(const float* x, int64_t ldx, int32_t t, int32_t k, const float* weight, float eps,
                                     float* y, int64_t ldy, int32_t flags, cudaStream_t stream);
