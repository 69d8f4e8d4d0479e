// What the persistent layer kernel does otherwise for more than four tokens: every block quantises a share of a
// product's rows as they come (layer_flow.cuh), and loads all of them as operands when these are there
// (layer_operands.cuh). A block has whole rows of its tiles, and its consumer warps add up their sums.
//
// Who quantises, but for the first product, is a warp that has nothing else to do: others wait for a block's share even
// when it is behind with its own tiles.
#pragma once
#include "layer_operands.cuh"
#include "layer_rows.cuh"
#include "layer_shared.cuh"

namespace nextn {

// A warp has a superblock of a token; its first one is this.
__device__ __forceinline__ int first_unit(int warp) {
    return warp * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x);
}

__device__ __forceinline__ void quantize_unit(const LayerParams& p, int k, int superblock, int token, int lane,
                                              const float4 (&norm)[2]) {
    float4 v[2];
    const float sum = take_values(p, k, token, superblock, lane, norm, nullptr, v);
    OperandBlock& to = p.phase[k].operands[superblock];
    if (p.source[k].norm && lane == 0) to.squares[token] = sum;
    put_superblock(v, to, token);
}
// Of the first product, by the consumers. norm: of the first superblock.
__device__ __forceinline__ void quantize_together(const LayerParams& p, int k, int supers, int warp, int lane,
                                                  float4 (&norm)[2]) {
    const int first = first_unit(warp);
#pragma unroll 1
    for (int i = first; i < supers * p.t; i += kWARPS * gridDim.x) {
        const int superblock = i % supers, token = i / supers;
        if (p.source[k].norm && i != first) load_norm(p.source[k], superblock, lane, norm);
        quantize_unit(p, k, superblock, token, lane, norm);
    }
}
// Of the others, by one helper warp of each block, as rows come: those of the last product while that before it is
// still under way, first superblocks first.
__device__ __forceinline__ void quantize_as_they_come(const LayerParams& p, int lane) {
#pragma unroll 1
    for (int k = p.first + 1; k <= p.last; ++k) {
        const int units = p.phase[k].supers * p.t;
#pragma unroll 1
        for (int i = blockIdx.x; i < units; i += gridDim.x) {
            const int superblock = i / p.t, token = i % p.t;
            float4 norm[2] = {};
            if (p.source[k].norm) load_norm(p.source[k], superblock, lane, norm);
            quantize_unit(p, k, superblock, token, lane, norm);
        }
    }
}

// Of the first product, whose operands cannot be cleared before they are written: all blocks meet. quantises: a warp.
template <int TOKENS>
__device__ __forceinline__ void meet_quantised(const LayerParams& p, const LayerShared<TOKENS>& s, int units,
                                               bool quantises, int warp, int lane) {
    const int grid = gridDim.x;
    GridBarrier quantised(p.sync, s.quantised_begun);
    if (warp == 0 || quantises) {
        __syncwarp();
        // of each block at least one, so that it has read the word before all have arrived
        if (lane == 0) quantised.arrive(threadIdx.x + blockIdx.x == 0, min(max(units, grid), kWARPS * grid));
    }
    if (threadIdx.x == 0) quantised.wait();
    consumers_sync();
}

// Of token `warp`, when its squares are there; valid for who waits for the sums of the product's pairs.
template <int TOKENS>
__device__ __forceinline__ void find_factor(const LayerParams& p, LayerShared<TOKENS>& s, int k, int warp, int lane) {
    const int supers = p.phase[k].supers, token = min(warp, p.t - 1);  // absent tokens repeat the last one
    float total = 0.0f;
    if (p.source[k].norm) do {
            if (lane < supers) total = load_now(p.phase[k].operands[lane].squares + token);
        } while (__any_sync(~0u, unwritten(total)));
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) total = __fadd_rn(total, __shfl_xor_sync(~0u, total, d));  // as sum_of
    if (lane == 0) s.factor[k][warp] = p.source[k].norm ? rms_factor(total, supers * kSUPER, p.eps) : 1.0f;
}

// Who adds up a pair's sums: four warps, in turns, an output of both tiles a lane. The others go on to the next pair.
constexpr int kADDING = 4;

// Of both tiles' sums of a token and row among a warp's. Turned by the token, so that neither who stores nor who loads
// them meets others in a bank.
__device__ __forceinline__ int place_of_sum(int token, int row) {
    return kPAIR * (kTILE_ROWS * token + ((row + 4 * token) & (kTILE_ROWS - 1)));
}

// Of a pair of tiles from u on, the pairs-th of the launch. own: place of this warp's sums. A lane that has no output
// looks with the others for the residual, and finds something else of the workspace, which is longer.
template <int TOKENS, int NT>
__device__ __forceinline__ void store_results(const LayerParams& p, LayerShared<TOKENS>& s, const Phase& f,
                                              const Segment& g, int u, int count, int pairs, int own, int lane,
                                              const float (&y)[kPAIR][NT][2]) {
    constexpr int kWARP = kWARP_FLOATS<TOKENS>;
    const int buffer = pairs % kBUFFERS<TOKENS>, phase = pairs / kBUFFERS<TOKENS> & 1;
    float* partial = s.partial[buffer];
    mbarrier_wait(s.taken[0] + buffer, phase ^ 1);
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int to = own * kWARP + place_of_sum(kGroupTokens * n + (lane & 3), (lane >> 2) + 8 * h);
            *reinterpret_cast<float2*>(partial + to) = make_float2(y[0][n][h], y[1][n][h]);
        }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(s.given + buffer);
    const int place = (own - kADDING * pairs) & (kWARPS - 1);
    if (place >= kADDING) return;
    const int row = lane & (kTILE_ROWS - 1), token = 2 * place + (lane >> 4);
    const int n = u * kTILE_ROWS + row, further = static_cast<int>(gridDim.x) * kTILE_ROWS;
    const int64_t at = token * f.ldy + n;
    const bool first = token < p.t && n < g.n, second = !g.second && count == 2 && token < p.t && n + further < g.n;
    float residual[kPAIR] = {};
    if (f.residual) {
        if (first) residual[0] = load_now(f.residual + at);
        if (second) residual[1] = load_now(f.residual + at + further);
        if (f.number == kDOWN) {
            while (__any_sync(~0u, first && absent(residual[0]))) residual[0] = load_now(f.residual + at);
            while (__any_sync(~0u, second && absent(residual[1]))) residual[1] = load_now(f.residual + at + further);
        }
    }
    mbarrier_wait(s.given + buffer, phase);
    float2 sum = sums_of<kWARP, kWARPS>(partial + place_of_sum(token, row));
    __syncwarp();
    if (lane == 0) mbarrier_arrive(s.taken[0] + buffer);
    const float factor = s.factor[f.number][token];
    sum = make_float2(__fmul_rn(sum.x, factor), __fmul_rn(sum.y, factor));
    if (g.second) sum.x = swiglu(sum.x, sum.y);
    if (first) g.y[at] = f.residual ? __fadd_rn(residual[0], sum.x) : sum.x;
    if (second) g.y[at + further] = f.residual ? __fadd_rn(residual[1], sum.y) : sum.y;
}

}  // namespace nextn
