// Token choice from logits: greedy, or the largest of logit + temperature * Gumbel noise among the tokens that top-k,
// top-p and min-p leave.
#pragma once
#include "export.h"

// Lives in device memory, so that a captured graph serves every request.
typedef struct NextnSampling {
    double temperature;  // 0: the largest logit; ties go to the lowest id
    double least_below;  // keep tokens with logit - largest >= this: log(min_p), or -infinity
    double top_p;        // keep the fewest most probable tokens whose share reaches this; 1 or more: off
    uint64_t seed;
    int32_t top_k;  // keep so many of the most probable; 0: off
} NextnSampling;

enum { kNEXTN_NO_TOKEN = -1 };

// tokens[i] of row i (logits [rows, n] f32, stride ld), whose token will stand at place *position + offset + i.
// ids: the tokens that the n logits stand for, ascending, or null: logit v is token v's. Every token without a logit is
// treated as one of logit -infinity: those with one keep their own noise, and the answer is a token, not an index.
// The noise of token v is a pure function of (seed, place, v): word v%4 of Philox4x32-10 with counter (v/4, place low,
// place high, 0) and key seed; u = (word + 0.5) / 2^32; g = -log(-log(u)) in float64 with a fixed sequence of
// operations, each rounded to nearest, so it repeats the host's definition bit by bit.
// The filters act on the logits before the temperature: top-k, then top-p as a part of what that left, then min-p. The
// most probable is the one of the largest logit, of the lowest id among equals. Shares are the whole numbers that the
// host defines (select_noise.cuh), so what is kept is the host's choice exactly, in whatever order they are added.
// A row with a NaN or an infinity, -infinity too, gets kNEXTN_NO_TOKEN. A row's result depends on no other row.
// workspace: nextn_select_workspace(rows) bytes, 256-byte aligned, no contents kept.
// Refuses: rows or n < 1, ld < n, n > 2^22.
NEXTN_API size_t nextn_select_workspace(int32_t rows);
NEXTN_API cudaError_t nextn_select(const float* logits, int64_t ld, int32_t rows, int32_t n, const int32_t* ids,
                                   const NextnSampling* sampling, const int32_t* position, int32_t offset,
                                   int32_t* tokens, void* workspace, size_t workspace_bytes, int32_t flags,
                                   cudaStream_t stream);
