// The warps of the persistent layer kernel that do not multiply: one brings weights; three clear what the blocks pass to
// each other where rows flow, of which one fetches old windows and two then add up the consumers' partial sums.
#pragma once
#include "layer_consumer.cuh"

namespace nextn {

constexpr int kADDERS = 2, kCLEANERS = 3;
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
// Stages of a product that are brought before the block has read its rows: more would keep these from coming.
constexpr int kEARLY = 2;

// Several tokens' rows have the way to themselves.
__device__ __forceinline__ void wait_while_reading(volatile const int& warps) {
    while (__any_sync(~0u, warps > 0)) {
    }
}

template <bool FLOWS, typename Shared>
__device__ __forceinline__ void bring_weights(const LayerParams& p, Shared& s, uint8_t* ring, int lane) {
    RingPosition at, landed;  // landed: kIN_FLIGHT stages behind
    int issued = 0, product = p.first, early = 0;
    for_each_pair(p, [&](int k, const Segment& g, const Pair& pair) {
        const Phase& f = p.phase[k];
        const int size = super_bytes(g.type), stride = stage_row(g.type, min(kWARPS, f.supers));
        for (int c = 0; c < f.chunks; ++c)
            for (int j = 0; j < pair.count; ++j) {
                if (k != product) {
                    product = k;
                    early = 0;
                }
                if (FLOWS && k != p.first && early++ == kEARLY) mbarrier_wait(s.read + k, 0);
                if (issued++ >= kIN_FLIGHT) {
                    mbarrier_wait(s.full + landed.stage, landed.phase);
                    landed.next(p.stages);
                }
                mbarrier_wait(s.empty + at.stage, at.phase ^ 1);
                if (FLOWS) wait_while_reading(s.reading);
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

// 1 / rms of the row that a lane has results of: of token lane / 8, or of the only one.
template <int TOKENS, typename Shared>
__device__ __forceinline__ float row_factor(const LayerParams& p, const Shared& s, int k, int lane) {
    const int supers = p.phase[k].supers;
    float total = 0.0f;
#pragma unroll 1
    for (int token = 0; token < TOKENS; ++token) {
        const float sum = sum_of_squares(lane < supers ? s.squares[k][token][lane] : 0.0f);
        if (TOKENS == 1 || token == lane >> 3) total = sum;
    }
    return rms_factor(total, supers * kSUPER, p.eps);
}

// Results from the sums over the warps of a pair of tiles, or of gate and up. A lane has a row. Adders take one token's
// pairs in turns; of several tokens each has half the rows of a tile.
template <int TOKENS, typename Shared>
__device__ __forceinline__ void add_up(const LayerParams& p, Shared& s, int adder, int lane) {
    constexpr bool ONE = TOKENS == 1;
    constexpr int kWARP = kWARP_FLOATS<TOKENS>, kTILE = kTILE_FLOATS<TOKENS>, kBUFFERS = nextn::kBUFFERS<TOKENS>;
    const int grid = gridDim.x, token = ONE ? 0 : lane >> 3;
    int pairs = 0, ready = -1;  // ready: phase of `factor`
    float factor = 1.0f;
    mbarrier_wait(&s.own_clear, 0);
    for_each_pair(p, [&](int k, const Segment& g, const Pair& pair) {
        const int buffer = pairs % kBUFFERS, phase = pairs / kBUFFERS & 1;
        if (ONE && pairs++ % kADDERS != adder) return;
        if (!ONE) ++pairs;
        const Phase& f = p.phase[k];
        const float* sums = s.partial[buffer] + lane + (ONE ? 0 : adder * 32);
        const int tiles = ONE || g.second ? 1 : pair.count;  // one after the other
        bool waited = false;
#pragma unroll 1
        for (int i = 0; i < tiles; ++i, sums += kTILE) {
            const int tile = pair.u + grid * (ONE ? lane / kTILE_ROWS : i);
            const int n = tile * kTILE_ROWS + (ONE ? lane % kTILE_ROWS : adder * 8 + (lane & 7));
            const int64_t at = token * f.ldy + n;
            const bool stored = n < g.n && (ONE ? lane < kTILE_ROWS || (pair.count == 2 && !g.second) : token < p.t);
            float residual = 0.0f;
            // a block with few tiles may come here with nothing but the first product behind it
            if (k == kDOWN) mbarrier_wait(&s.all_clear, 0);
            if (f.residual && stored) {
                residual = load_now(f.residual + at);
                if (k == kDOWN) await(f.residual + at, residual);
            }
            if (!waited) mbarrier_wait(s.given + buffer, phase);
            waited = true;
            if (ready != k) {
                ready = k;
                factor = p.source[k].norm ? row_factor<TOKENS>(p, s, k, lane) : 1.0f;
            }
            if (stored) g.y[at] = result_of<kWARP>(sums, sums + kTILE, g.second, factor, f.residual, residual);
        }
        __syncwarp();
        if (lane == 0) mbarrier_arrive(s.taken + buffer);
    });
}

// What must be done before the first product's results can be used. Old windows, which blocks share, have been read by
// all before any of them is overwritten: where rows do not flow the grid barrier sees to that. Where they do, the
// memory is clear (see layer_flow.cuh). One of kCLEANERS warps.
template <bool FLOWS, typename Shared>
__device__ __forceinline__ void clear_and_fetch(const LayerParams& p, Shared& s, int cleaner, int lane) {
    if (FLOWS && p.first < p.last) {
        clear_own_tiles(p, 32 * cleaner + lane, 32 * kCLEANERS);
        clear(p.floats, 32 * cleaner + lane, 32 * kCLEANERS);
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&s.own_clear);
    if (p.first == p.last || cleaner) return;
    if (p.delta_net) {
        if (FLOWS) mbarrier_wait(s.read + p.first, 0);  // rows would come behind what memory must bring
        fetch_windows(p, s.window, lane);
        cp_async_wait<0>();
        __syncwarp();
    }
    if (lane) return;
    if (FLOWS) {
        mbarrier_wait(&s.own_clear, 0);
        GridBarrier all(p.sync + kCLEAR_WORD);
        all.arrive();
        all.wait();
    }
    mbarrier_arrive(&s.all_clear);
}

}  // namespace nextn
