// Linkage of the C ABI, the ggml type ids that it takes, and flags common to all launchers.
//
// Rules that hold for every launcher unless its header says otherwise:
//   - pointers are device pointers, 16-byte aligned, rows outermost and contiguous; sizes are in elements
//   - work is queued on `stream`; nothing is allocated, nothing synchronises, so all calls can be captured
//   - a refused shape or type returns cudaErrorInvalidValue before anything is queued
//   - the order in which one token's numbers are summed does not depend on how many tokens T are in the call
//     (T <= NEXTN_MAX_DECODE_T)
#pragma once
#include <cuda_runtime_api.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
#define NEXTN_API extern "C" __attribute__((visibility("default")))
#else
#define NEXTN_API __attribute__((visibility("default")))
#endif

#define NEXTN_MAX_DECODE_T 8

// ggml type ids, as stored in GGUF files
enum NextnType {
    kNEXTN_F32 = 0,
    kNEXTN_F16 = 1,
    kNEXTN_Q8_0 = 8,
    kNEXTN_Q4_K = 12,
    kNEXTN_Q5_K = 13,
    kNEXTN_Q6_K = 14,
    kNEXTN_BF16 = 30,
};

// Launch with programmatic dependent launch (compute capability 9.0 and up; ignored below).
// Only correct when everything earlier on the stream that touches these buffers comes from this library
// or was launched without that attribute.
#define NEXTN_PDL 1
