// The warps of the persistent layer kernel that do not multiply: one brings weights, one clears what the blocks pass to
// each other and fetches old windows, two add up the consumers' partial sums of one token.
#pragma once
#include "layer_consumer.cuh"

namespace nextn {

constexpr int kADDERS = 2;
constexpr int kCLEAR_WORD = 32;  // of `sync`, a line of its own

// Pairs of tiles, or of gate and up, of a segment in the order in which all warps take them.
struct Pair {
    int u, count;
};
template <typename F>
__device__ __forceinline__ void for_each_pair(const LayerParams& p, const F& f) {
    const int grid = gridDim.x;
    for (int k = p.first; k <= p.last; ++k)
        for (int i = 0; i < p.phase[k].segments; ++i) {
            const Segment& g = p.phase[k].segment[i];
            for (int u = first_tile(g); u < g.tiles; u += g.second ? grid : kPAIR * grid)
                f(k, g, Pair{u, g.second || u + grid < g.tiles ? 2 : 1});
        }
}

// Stages under way at most, about what the memory needs to be busy: with more, everything else that the block reads or
// writes queues up behind them.
constexpr int kIN_FLIGHT = 2;

template <typename Shared>
__device__ __forceinline__ void bring_weights(const LayerParams& p, Shared& s, uint8_t* ring, int lane) {
    RingPosition at, landed;  // landed: kIN_FLIGHT stages behind
    int issued = 0;
    for_each_pair(p, [&](int k, const Segment& g, const Pair& pair) {
        const Phase& f = p.phase[k];
        const int size = super_bytes(g.type), stride = stage_row(g.type, min(kWARPS, f.supers));
        for (int c = 0; c < f.chunks; ++c)
            for (int j = 0; j < pair.count; ++j) {
                if (issued++ >= kIN_FLIGHT) {
                    mbarrier_wait(s.full + landed.stage, landed.phase);
                    landed.next(p.stages);
                }
                mbarrier_wait(s.empty + at.stage, at.phase ^ 1);
                const int tile = g.second ? pair.u : pair.u + j * gridDim.x;
                const int64_t row = min(tile * kTILE_ROWS + lane, g.n - 1) * static_cast<int64_t>(f.supers * size);
                if (lane < kTILE_ROWS)
                    produce_row((j && g.second ? g.second : g.weight) + row + c * kWARPS * size,
                                ring + at.stage * p.stage_bytes + lane * stride,
                                min(kWARPS, f.supers - c * kWARPS) * size, s.full + at.stage);
                at.next(p.stages);
            }
    });
}

// One token: results from the sums over the warps of a pair of tiles, or of gate and up. Adders take turns.
template <typename Shared>
__device__ __forceinline__ void add_up(const LayerParams& p, Shared& s, int adder, int lane) {
    constexpr int kWARP = kWARP_FLOATS<true, 1>;
    int pairs = 0, ready = -1;  // ready: phase of `factor`
    float factor = 1.0f;
    mbarrier_wait(&s.own_clear, 0);
    for_each_pair(p, [&](int k, const Segment& g, const Pair& pair) {
        const int buffer = pairs % kBUFFERS<true>, phase = pairs / kBUFFERS<true> & 1;
        if (pairs++ % kADDERS != adder) return;
        const Phase& f = p.phase[k];
        const int n = (pair.u + lane / kTILE_ROWS * static_cast<int>(gridDim.x)) * kTILE_ROWS + lane % kTILE_ROWS;
        const bool stored = n < g.n && (lane < kTILE_ROWS || (pair.count == 2 && !g.second));
        float residual = 0.0f;
        if (f.residual && stored) {
            residual = load_now(f.residual + n);
            if (k == kDOWN) await(f.residual + n, residual);
        }
        mbarrier_wait(s.given + buffer, phase);
        if (ready != k) {
            ready = k;
            // 1 / rms of the row: as a factor of the finished sums
            const int supers = f.supers;
            factor = p.source[k].norm
                         ? rms_factor(sum_of_squares(lane < supers ? s.squares[k][lane] : 0.0f), supers * kSUPER, p.eps)
                         : 1.0f;
        }
        const float* sums = s.partial[buffer] + lane;
        if (stored) g.y[n] = result_of<kWARP>(sums, sums + kTILE_ROWS, g.second, factor, f.residual, residual);
        __syncwarp();
        if (lane == 0) mbarrier_arrive(s.taken + buffer);
    });
}

// What must be done before the first product's results can be used. Old windows, which blocks share, have been read by
// all before any of them is overwritten: of several tokens the grid barrier sees to that. Of one token, memory that
// results will flow through is clear (see layer_flow.cuh).
template <bool ONE, typename Shared>
__device__ __forceinline__ void clear_and_fetch(const LayerParams& p, Shared& s, int lane) {
    if (ONE && p.first < p.last) clear_own_tiles(p, lane);
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&s.own_clear);
    if (p.first == p.last) return;
    if (p.delta_net) fetch_windows(p, s.window, lane);
    if (ONE) clear(p.floats, lane);
    cp_async_wait<0>();
    __syncwarp();
    if (lane) return;
    if (ONE) {
        GridBarrier all(p.sync + kCLEAR_WORD);
        all.arrive();
        all.wait();
    }
    mbarrier_arrive(&s.all_clear);
}

}  // namespace nextn
