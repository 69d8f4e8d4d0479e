// The pieces that nextn_matmul is put together from; device pointers throughout.
#pragma once
#include "kquant_blocks.cuh"
#include "launch.cuh"
#include "matmul.h"

namespace nextn {

// Where one call keeps its intermediate data inside the workspace.
struct MatmulWorkspace {
    QuantizedRows quantized;  // decode, K-quants
    float* normed;            // decode, float rows and Q8_0: [t, k] f32 after the norm
    __half* half_rows;        // prefill: [t, k] f16, x / row_scale; or [k/64, t rounded up to 8, 64] (see half_rows)
    __half* half_sums;        // prefill: [t, k/256, 16] f16, sums over 32 values; or [k/256, t up to 8, 16]
    float* row_scale;         // prefill: [t]
    size_t bytes;
};
MatmulWorkspace matmul_workspace(void* base, int t, int k);

// Decode (t <= 8).  k % 256 == 0 for quantize_rows and for kquant_decode, which needs it unless it quantises itself.
cudaError_t quantize_rows(const NextnMatmul& m, const MatmulWorkspace& w, cudaStream_t stream);
bool decode_quantizes_itself(const NextnMatmul& m, int type, const DeviceLimits& limits);
cudaError_t kquant_decode(const NextnMatmul& m, int first, int count, const QuantizedRows& quantized,
                          const DeviceLimits& limits, cudaStream_t stream);
cudaError_t dense_rows(const NextnMatmul& m, int first, int count, const float* x, int64_t ldx, cudaStream_t stream);

// Prefill, K-quants: rows by steps (`steps` of half_rows) for kquant_prefill_wgmma, else as they are.
cudaError_t half_rows(const NextnMatmul& m, const MatmulWorkspace& w, bool steps, cudaStream_t stream);
cudaError_t kquant_prefill(const NextnMatmul& m, int first, int count, const MatmulWorkspace& w, cudaStream_t stream);
// Compute capability 9.0, in libraries that were built for it.
cudaError_t kquant_prefill_wgmma(const NextnMatmul& m, int first, int count, const MatmulWorkspace& w,
                                 const DeviceLimits& limits, cudaStream_t stream);

}  // namespace nextn
