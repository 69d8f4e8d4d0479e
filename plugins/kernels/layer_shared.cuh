// Shared memory of the persistent layer kernel, and sums over what its warps leave there.
#pragma once
#include "layer_delta.cuh"

namespace nextn {

// TOKENS: the most that a kernel takes, 1, 4 or 8. With up to four, two blocks share tiles (layer_cluster.cuh); with
// more all blocks share what they quantise (layer_eight.cuh).
template <int TOKENS>
constexpr bool kSPLIT = TOKENS <= kGroupTokens;
template <int TOKENS>
constexpr int kSTAGE_ROWS = (kSPLIT<TOKENS> ? kCLUSTER : 1) * kTILE_ROWS;
// A stage's rows come in so many parts. The less is under way at once, the sooner blocks have what they give each
// other, of which there is more with more tokens; but every part costs its wait.
template <int TOKENS>
constexpr int kSTAGE_COPIES = kSPLIT<TOKENS> ? 1 : 2;
// In groups of four.
template <int TOKENS>
constexpr int kGROUPS = ceil_div(TOKENS, kGroupTokens);

// Sums of one warp of a pair of tiles: of one token [row][tile], of up to four [lane][half of the rows][tile], the lane
// as the tensor cores have it, 4 * row + token; of more see place_of_sum. partial: [buffer][superblock's place].
template <int TOKENS>
constexpr int kWARP_FLOATS = kPAIR * TOKENS * kTILE_ROWS;
template <int TOKENS>
constexpr int kBUFFERS = kSPLIT<TOKENS> ? 4 : 2;
// What a warp sends of a pair of tiles: its sums, and those of x^2 of its superblock.
template <int TOKENS>
constexpr int kSENT_BYTES = 4 * (kWARP_FLOATS<TOKENS> + TOKENS);

// One per kernel. own_clear and all_clear are used once a launch.
template <int TOKENS>
struct LayerShared {
    alignas(16) float partial[kBUFFERS<TOKENS>][kWARPS * kWARP_FLOATS<TOKENS>];
    float squares[kBUFFERS<TOKENS>][TOKENS][kWARPS];      // sums of x^2 of the rows, by superblock
    float factor[kPHASES][NEXTN_MAX_DECODE_T];            // where rows are not split
    float own_squares[2][kWARPS / kCLUSTER][TOKENS];      // of this block's superblocks, of two products in turns
    DeltaWindow window;
    uint64_t full[kSTAGE_COPIES<TOKENS>][kMAX_STAGES], empty[kMAX_STAGES];  // of the weight ring
    uint64_t given[kBUFFERS<TOKENS>];            // of partial
    uint64_t taken[kCLUSTER][kBUFFERS<TOKENS>];  // of each block of the cluster; where rows are not split of the first
    uint64_t read[kPHASES];         // the block has read a product's rows (of its first chunk)
    uint64_t own_clear, all_clear;  // see clear_and_fetch
    int reading;                    // warps that read rows now
    uint32_t quantised_begun;       // see GridBarrier; where rows are not split
};

__device__ __forceinline__ float swiglu(float gate, float up) {
    return __fmul_rn(__fdiv_rn(gate, __fadd_rn(1.0f, expf(-gate))), up);
}

// Of N values, or pairs of values, STRIDE floats apart: of pairs of neighbours, of pairs of those, and so on.
template <int STRIDE, int N>
__device__ __forceinline__ float sum_of(const float* from) {
    if constexpr (N == 1)
        return *from;
    else
        return __fadd_rn(sum_of<STRIDE, N / 2>(from), sum_of<STRIDE, N / 2>(from + N / 2 * STRIDE));
}
__device__ __forceinline__ float2 plus(const float2& a, const float2& b) {
    return make_float2(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y));
}
template <int STRIDE, int N>
__device__ __forceinline__ float2 sums_of(const float* from) {
    if constexpr (N == 1)
        return *reinterpret_cast<const float2*>(from);
    else
        return plus(sums_of<STRIDE, N / 2>(from), sums_of<STRIDE, N / 2>(from + N / 2 * STRIDE));
}

}  // namespace nextn
