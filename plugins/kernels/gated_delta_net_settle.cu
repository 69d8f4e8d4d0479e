#include "gated_delta_net_steps.cuh"
#include "launch.cuh"

namespace nextn {
namespace {

constexpr int kTHREADS = 256;

// grid (HV * D / kSTEP_COLUMNS): a block has a tile of the state, all blocks share the window.
template <int D>
__global__ void __launch_bounds__(kTHREADS)
    settle_kernel(float* state_pool, float* conv_pool, int slot, int v_heads, int64_t window) {
    constexpr int kTILES = D / kSTEP_COLUMNS;
    const int h = blockIdx.x / kTILES, column0 = blockIdx.x % kTILES * kSTEP_COLUMNS;
    const int column = threadIdx.x % kSTEP_COLUMNS;
    for (int row = threadIdx.x / kSTEP_COLUMNS; row < D; row += kTHREADS / kSTEP_COLUMNS) {
        float* at = state_pool + (static_cast<int64_t>(h) * D + row) * D + column0 + column;
        float state = __ldcg(at);
        for (int j = 1; j <= slot; ++j) {
            const StateStep<D> step(state_pool, v_heads, j, h, column0);
            state = after_step(state, __ldcg(step.k(row)), __ldcg(step.u(column)), __ldcg(step.decay()));
        }
        *at = state;
    }
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * kTHREADS + threadIdx.x; i < window;
         i += static_cast<int64_t>(gridDim.x) * kTHREADS)
        conv_pool[i] = __ldcg(conv_pool + slot * window + i);
}

template <int D>
cudaError_t run(float* state_pool, float* conv_pool, int slot, int v_heads, int64_t window, cudaStream_t stream) {
    Launch l;
    l.grid = dim3(v_heads * (D / kSTEP_COLUMNS));
    l.block = dim3(kTHREADS);
    return launch(l, stream, settle_kernel<D>, state_pool, conv_pool, slot, v_heads, window);
}

}  // namespace
}  // namespace nextn

NEXTN_API cudaError_t nextn_gated_delta_net_settle(float* state_pool, float* conv_pool, int32_t slot, int32_t v_heads,
                                                   int32_t head_dim, int64_t window, cudaStream_t stream) {
    if (!state_pool || !conv_pool || v_heads < 1 || window < 1) return cudaErrorInvalidValue;
    if (head_dim != 32 && head_dim != 64 && head_dim != 128) return cudaErrorInvalidValue;
    if (slot <= 0) return cudaSuccess;
    const auto run = head_dim == 32 ? nextn::run<32> : head_dim == 64 ? nextn::run<64> : nextn::run<128>;
    return run(state_pool, conv_pool, slot, v_heads, window, stream);
}
