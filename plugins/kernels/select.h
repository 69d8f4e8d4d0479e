// Token choice from logits: greedy, or the largest of logit + temperature * Gumbel noise.
#pragma once
#include "export.h"

// Lives in device memory, so that a captured graph serves every request.
typedef struct NextnSampling {
    double temperature;  // 0: the largest logit; ties go to the lowest id
    double least_below;  // keep tokens with logit - largest >= this: log(min_p), or -infinity
    uint64_t seed;
} NextnSampling;

enum { kNEXTN_NO_TOKEN = -1 };

// tokens[i] of row i (logits [rows, n] f32, stride ld), whose token will stand at place *position + offset + i.
// The noise of token v is a pure function of (seed, place, v): word v%4 of Philox4x32-10 with counter (v/4, place low,
// place high, 0) and key seed; u = (word + 0.5) / 2^32; g = -log(-log(u)) in float64 with a fixed sequence of
// operations, each rounded to nearest, so it repeats the host's definition bit by bit.
// A row with NaN, +infinity or nothing but -infinity gets kNEXTN_NO_TOKEN.
// workspace: nextn_select_workspace(rows) bytes, 256-byte aligned, no contents kept.
// Refuses: rows or n < 1, ld < n, n > 2^30.
NEXTN_API size_t nextn_select_workspace(int32_t rows);
NEXTN_API cudaError_t nextn_select(const float* logits, int64_t ld, int32_t rows, int32_t n,
                                   const NextnSampling* sampling, const int32_t* position, int32_t offset,
                                   int32_t* tokens, void* workspace, size_t workspace_bytes, int32_t flags,
                                   cudaStream_t stream);
