// Windows of the convolution inside the persistent layer kernel: the block's channels, and its old windows, which a
// helper warp fetches.
#pragma once
#include "gated_delta_net.cuh"
#include "layer_flow.cuh"

namespace nextn {

constexpr int kGDN_CHANNELS = 2 * kGDN_DIM + kGDN_COLUMNS;  // that a block convolves: q, k, its columns of v
static_assert(kGDN_COLUMNS == kSTEP_COLUMNS, "a block has the tiles of its columns to itself");

struct __align__(16) DeltaWindow {
    float rows[kGDN_KERNEL - 1][kGDN_CHANNELS];
    int slot;
};

__device__ __forceinline__ int delta_channel(const NextnGatedDeltaNet& g, int head, int column0, int i) {
    const int k_head = head % g.k_heads;
    return i < kGDN_DIM       ? k_head * kGDN_DIM + i
           : i < 2 * kGDN_DIM ? (g.k_heads + k_head) * kGDN_DIM + i - kGDN_DIM
                              : (2 * g.k_heads + head) * kGDN_DIM + column0 + i - 2 * kGDN_DIM;
}

// One warp: old windows of the block's channels to shared memory, what else it will need to L2.
__device__ __forceinline__ void fetch_windows(const LayerParams& p, DeltaWindow& old, int lane) {
    constexpr int kPIECES = kGDN_CHANNELS / 4, kBEFORE = kGDN_KERNEL - 1;
    const NextnGatedDeltaNet& g = p.delta;
    const int h = blockIdx.x / kGDN_PARTS, column0 = blockIdx.x % kGDN_PARTS * kGDN_COLUMNS, slot = __ldcg(g.slot);
    old.slot = slot;
    if (h >= g.v_heads) return;
    const int64_t channels = (2 * g.k_heads + g.v_heads) * static_cast<int64_t>(kGDN_DIM);
    for (int i = lane; i < kBEFORE * kPIECES; i += 32) {
        const int row = i / kPIECES, c = i % kPIECES * 4;
        cp_async_16(&old.rows[row][c],
                    g.conv_pool + (static_cast<int64_t>(max(slot, 0)) * kBEFORE + row) * channels +
                        delta_channel(g, h, column0, c),
                    slot >= 0);
    }
    cp_async_commit();
    for (int i = lane; i < kGDN_CHANNELS; i += 32)
        prefetch_l2(g.conv_weight + static_cast<int64_t>(delta_channel(g, h, column0, i)) * kGDN_KERNEL);
    for (int i = lane; slot >= 0 && i < kGDN_DIM; i += 32)
        prefetch_l2(g.state_pool + (static_cast<int64_t>(h) * kGDN_DIM + i) * kGDN_DIM + column0);
    prefetch_steps<kGDN_DIM>(g, slot, h, column0, lane);
}

}  // namespace nextn
