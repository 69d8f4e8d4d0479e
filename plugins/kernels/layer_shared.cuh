// Shared memory of the persistent layer kernel, and sums over what its warps leave there.
#pragma once
#include "layer_delta.cuh"

namespace nextn {

// TOKENS: the most that a kernel takes, 1, 4 or 8. Rows of up to four flow from block to block (layer_flow.cuh), more
// meet at grid barriers.
template <int TOKENS>
constexpr bool kFLOWS = TOKENS <= kGroupTokens;

// A tile's sums of one warp: of one token [row], of four [half of the rows][token][row], of more [token][row].
// partial: [buffer][superblock's place][tile of the pair].
template <int TOKENS>
constexpr int kTILE_FLOATS = TOKENS * kTILE_ROWS;
template <int TOKENS>
constexpr int kWARP_FLOATS = kPAIR * kTILE_FLOATS<TOKENS>;
template <int TOKENS>
constexpr int kBUFFERS = kFLOWS<TOKENS> ? 4 : 2;

// One per kernel. own_clear and all_clear are used once a launch.
template <int TOKENS>
struct LayerShared {
    float partial[kBUFFERS<TOKENS>][kWARPS * kWARP_FLOATS<TOKENS>];
    float squares[kPHASES][TOKENS][kWARPS];  // of rows that flow, by superblock
    float factor[NEXTN_MAX_DECODE_T];        // of rows that do not
    DeltaWindow window;
    uint64_t full[kMAX_STAGES], empty[kMAX_STAGES];             // of the weight ring
    uint64_t given[kBUFFERS<TOKENS>], taken[kBUFFERS<TOKENS>];  // of partial, where rows flow
    uint64_t read[kPHASES];         // the block has read a product's rows (of its first chunk)
    uint64_t own_clear, all_clear;  // see clear_and_fetch
    int reading;                    // warps that read rows now
};

// Over the superblocks of a row, one a lane.
__device__ __forceinline__ float sum_of_squares(float v) {
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) v = __fadd_rn(v, __shfl_xor_sync(~0u, v, d));
    return v;
}

// An output from the warps' sums, STRIDE apart: of a product, or of gate and up.
template <int STRIDE>
__device__ __forceinline__ float result_of(const float* sums, const float* up_sums, bool gate_and_up, float factor,
                                           bool has_residual, float residual) {
    const auto total = [&](const float* from) {
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < kWARPS; ++w) sum = __fadd_rn(sum, from[w * STRIDE]);
        return __fmul_rn(sum, factor);
    };
    float sum = total(sums);
    if (gate_and_up) sum = __fmul_rn(__fdiv_rn(sum, __fadd_rn(1.0f, expf(-sum))), total(up_sums));
    return has_residual ? __fadd_rn(residual, sum) : sum;
}

}  // namespace nextn
