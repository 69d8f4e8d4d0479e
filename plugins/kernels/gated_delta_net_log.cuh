// What the slots of the recurrent state hold.  Slot 0 has a state whole; a slot behind it has only what leads to the
// state after one token more, S' = decay S + k u^T.  After a pass of T <= slots tokens slot 0 has the state after the
// first of them and slot j the step of token j.  The state after token a is thus slot 0's, taken through the steps
// 1 .. a by the operations of the pass itself (`after_step`), which gives the same bits.  A whole state is HV D D
// numbers, a step some 5 D HV.
//
// Steps lie in their slot's own part of the pool, [HV, D, D].  Of a head's D x 32 tile of 32 value columns
//   rows 0 .. D/32 - 1  are k, 32 numbers a row,
//   row D/32            is u of these columns,
//   row D/32 + 1        begins with decay.
// So k and decay are there for each tile: whoever moves 32 columns of a head on reads and writes their tile in every slot
// and no other.  All kernels keep to that; blocks that have whole tiles need not wait for each other.
#pragma once
#include "gated_delta_net.h"
#include "ptx.cuh"

namespace nextn {

constexpr int kSTEP_COLUMNS = 32;

// The slot for the state after token t, or -1 for none.
__device__ __forceinline__ int slot_after(const NextnGatedDeltaNet& p, int t) {
    return p.t <= p.slots ? t : t == p.t - 1 ? 0 : -1;
}

// One number of the state after a token.
__device__ __forceinline__ float after_step(float state, float k, float u, float decay) {
    return __fmaf_rn(k, u, __fmul_rn(decay, state));
}

// The step of a slot, as the tile of the columns from column0 (a multiple of 32) has it.
template <int D>
struct StateStep {
    static constexpr int kKEY_ROWS = D / kSTEP_COLUMNS, kROWS = kKEY_ROWS + 2;
    float* tile;

    __device__ __forceinline__ StateStep(float* state_pool, int v_heads, int slot, int h, int column0)
        : tile(state_pool + (static_cast<int64_t>(slot) * v_heads + h) * D * D + column0) {}
    // of a row of the state; four from a multiple of 4 on lie together
    __device__ __forceinline__ float* k(int row) const {
        return tile + row / kSTEP_COLUMNS * D + row % kSTEP_COLUMNS;
    }
    __device__ __forceinline__ float* u(int column) const { return tile + kKEY_ROWS * D + column; }  // of the tile
    __device__ __forceinline__ float* decay() const { return tile + (kKEY_ROWS + 1) * D; }
};

// One warp: the steps up to a slot to L2.
template <int D>
__device__ __forceinline__ void prefetch_steps(const NextnGatedDeltaNet& p, int slot, int h, int column0, int lane) {
    constexpr int kROWS = StateStep<D>::kROWS;
    for (int i = lane; i < slot * kROWS; i += 32)
        prefetch_l2(StateStep<D>(p.state_pool, p.v_heads, 1 + i / kROWS, h, column0).tile + i % kROWS * D);
}

}  // namespace nextn
