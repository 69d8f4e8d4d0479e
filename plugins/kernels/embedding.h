// Rows of a GGUF matrix as float32.
#pragma once
#include "export.h"

// y[i] = row tokens[i] of table.   table: GGUF rows [n, row bytes of k]; tokens: [t] i32; y: [t, k] f32, stride ldy.
// The same operation order as the format's reference, so values are bit-equal to it. A token outside [0, n) gives a row
// of NaN. Refuses: unknown types, k not a multiple of the type's block, t < 0. No workspace.
NEXTN_API cudaError_t nextn_embedding(const void* table, int32_t type, int32_t n, int32_t k, const int32_t* tokens,
                                      int32_t t, float* y, int64_t ldy, int32_t flags, cudaStream_t stream);
