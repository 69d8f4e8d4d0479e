// What the slots of the recurrent state hold.  Slot 0 has a state whole; a slot behind it has only what leads to the
// state after one token more, S' = decay S + k u^T.  After a pass of T <= slots tokens slot 0 has the state after the
// first of them and slot j the step of token j.  The state after token a is thus slot 0's, taken through the steps
// 1 .. a by the operations of the pass itself (`after_step`), which gives the same bits.
//
// Pool: the state [HV, D, D], then the steps of slots 1, 2, .., each [HV, D / 32, D + 64]: for every head and 32 of its
// value columns k, u of these columns, and `decay` with 31 numbers that are not used.  So k and decay are there once for
// each 32 columns: whoever moves 32 columns of a head on reads and writes their part of the state and of every step, and
// nothing else.  All kernels keep to that; blocks that have whole such parts need not wait for each other.
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

// The step of a slot behind the first, as it is for the columns from column0 (a multiple of 32) of head h.
template <int D>
struct StateStep {
    static constexpr int kUSED = D + kSTEP_COLUMNS + 1, kSIZE = D + 2 * kSTEP_COLUMNS, kLINES = kSIZE / 32;
    float* at;

    __device__ __forceinline__ StateStep(float* state_pool, int v_heads, int slot, int h, int column0)
        : at(state_pool + static_cast<int64_t>(v_heads) * D * D +
             ((static_cast<int64_t>(slot - 1) * v_heads + h) * (D / kSTEP_COLUMNS) + column0 / kSTEP_COLUMNS) * kSIZE) {}
    __device__ __forceinline__ float* k(int row) const { return at + row; }         // of the state
    __device__ __forceinline__ float* u(int column) const { return at + D + column; }  // from column0
    __device__ __forceinline__ float* decay() const { return at + D + kSTEP_COLUMNS; }
};

// One warp: the steps up to a slot to L2.
template <int D>
__device__ __forceinline__ void prefetch_steps(const NextnGatedDeltaNet& p, int slot, int h, int column0, int lane) {
    constexpr int kLINES = StateStep<D>::kLINES;
    for (int i = lane; i < slot * kLINES; i += 32)
        prefetch_l2(StateStep<D>(p.state_pool, p.v_heads, 1 + i / kLINES, h, column0).at + i % kLINES * 32);
}

}  // namespace nextn
