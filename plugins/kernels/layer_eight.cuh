// What the persistent layer kernel does otherwise for more than four tokens: all blocks quantise a product's rows
// together when they are there (layer_flow.cuh), and load them as operands when these are (layer_operands.cuh). A block
// has whole rows of its tiles, and its consumer warps add up their sums.
#pragma once
#include "layer_operands.cuh"
#include "layer_rows.cuh"
#include "layer_shared.cuh"

namespace nextn {

// A warp has a superblock of a token; its first one is this.
__device__ __forceinline__ int first_unit(int warp) {
    return warp * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x);
}

// norm: of the first superblock.
__device__ __forceinline__ void quantize_together(const LayerParams& p, int k, int supers, int warp, int lane,
                                                  float4 (&norm)[2]) {
    const RowSource& s = p.source[k];
    const int first = first_unit(warp);
#pragma unroll 1
    for (int i = first; i < supers * p.t; i += kWARPS * gridDim.x) {
        const int superblock = i % supers, token = i / supers;
        float4 v[2];
        if (s.norm && i != first) load_norm(s, superblock, lane, norm);
        const float sum = take_values(p, k, token, superblock, lane, norm, nullptr, v);
        OperandBlock& to = p.phase[k].operands[superblock];
        if (s.norm && lane == 0) to.squares[token] = sum;
        put_superblock(v, to, token);
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

// Of token `warp`, when its squares are there; valid after the next consumers_sync.
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

// Of a pair of tiles from u on, an output a thread. Warps take turns, so that none falls behind; place: this one's.
// partial: [superblock's place][tile][token][row], this warp's sums not in it yet.
template <int TOKENS, int NT>
__device__ __forceinline__ void store_results(const LayerParams& p, const LayerShared<TOKENS>& s, float* partial,
                                              const Phase& f, const Segment& g, int u, int count, int own, int place,
                                              int lane, const float (&y)[kPAIR][NT][2]) {
    constexpr int kWARP = kWARP_FLOATS<TOKENS>, kTILE = kWARP / kPAIR;
    float* mine = partial + own * kWARP + (lane & 3) * kTILE_ROWS + (lane >> 2);
#pragma unroll
    for (int i = 0; i < kPAIR * NT; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) mine[i * kGroupTokens * kTILE_ROWS + 8 * h] = y[i / NT][i % NT][h];
    const bool two = !g.second && count == 2;
    const bool works = place * 32 < (two ? 2 : 1) * kTILE_ROWS * p.t;
    int64_t at = 0;
    int from = 0, token = 0;
    bool stored = false;
    float residual = 0.0f;
    if (works) {
        const int e = place * 32 + lane, row = e & (kTILE_ROWS - 1), i = two ? (e >> 4) & 1 : 0;
        const int n = (u + i * static_cast<int>(gridDim.x)) * kTILE_ROWS + row;
        token = e >> (two ? 5 : 4);
        from = i * kTILE + token * kTILE_ROWS + row;
        at = token * f.ldy + n;
        stored = token < p.t && n < g.n;
        if (f.residual && stored) {
            residual = load_now(f.residual + at);
            if (f.number == kDOWN) await(f.residual + at, residual);
        }
    }
    // One barrier per pair is enough: `partial` has two buffers, and a warp reaches the next barrier only after it has
    // read this one's sums.
    consumers_sync();
    if (!works || !stored) return;
    partial += from;
    float sum = __fmul_rn(sum_of<kWARP, kWARPS>(partial), s.factor[f.number][token]);
    if (g.second) sum = swiglu(sum, __fmul_rn(sum_of<kWARP, kWARPS>(partial + kTILE), s.factor[f.number][token]));
    g.y[at] = f.residual ? __fadd_rn(residual, sum) : sum;
}

}  // namespace nextn
