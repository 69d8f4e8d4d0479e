// The warps of the persistent layer kernel that do not multiply: one brings weights; three clear what the blocks pass
// to each other, of which one fetches old windows, and then two add up the consumers' partial sums, or of more than
// four tokens one quantises rows (layer_eight.cuh).
#pragma once
#include "layer_consumer.cuh"

namespace nextn {

constexpr int kADDERS = 2, kCLEANERS = 3;

// Pairs of tiles, or of gate and up, of a segment in the order in which all warps take them; of two blocks that share
// tiles, those of the first.
struct Pair {
    int u, count;
};
template <typename F>
__device__ __forceinline__ void for_each_pair(const LayerParams& p, int rank, const F& f) {
    const int grid = gridDim.x;
    for (int k = p.first; k <= p.last; ++k)
        for (int i = 0; i < p.phase[k].segments; ++i) {
            const Segment& g = p.phase[k].segment[i];
            for (int u = first_tile(g, blockIdx.x - rank); u < g.tiles; u += g.second ? grid : kPAIR * grid)
                f(k, g, Pair{u, g.second || u + grid < g.tiles ? 2 : 1});
        }
}

// Stages under way at most, or with more than four tokens halves of them, about what the memory needs to be busy: with
// more, everything else that the block reads or writes queues up behind them.
constexpr int kIN_FLIGHT = 2;
// Stages of a product that are brought before the block has read its rows, one less than there are at most: more would
// keep these from coming.
constexpr int kEARLY = 3;
// The same of the first product of more than four tokens, of which all blocks read more.
constexpr int kEARLY_OF_FIRST = 2;

// Several tokens' rows have the way to themselves.
__device__ __forceinline__ void wait_while_reading(volatile const int& warps) {
    while (__any_sync(~0u, warps > 0)) {
    }
}

template <int TOKENS>
struct Producer {
    static constexpr int kCOPIES = kSTAGE_COPIES<TOKENS>;

    const LayerParams& p;
    LayerShared<TOKENS>& s;
    uint32_t ring;
    RingPosition at, landed;  // landed: kIN_FLIGHT copies behind
    int issued = 0, product = 0, early = 0;

    // Of rows past the last one anything will do.
    __device__ __forceinline__ void bring(int k, const uint8_t* from, int pitch, int rows, int stride, int bytes) {
        if constexpr (kSPLIT<TOKENS>)
            bring_whole(k, from, pitch, rows, stride, bytes);
        else
            bring_by_halves(from, pitch, rows, stride, bytes);
        at.next(p.stages);
    }
    __device__ __forceinline__ void bring_whole(int k, const uint8_t* from, int pitch, int rows, int stride,
                                                int bytes) {
        if (k != product) {
            product = k;
            early = 0;
        }
        if (k != p.first && early++ == min(kEARLY, p.stages - 1)) mbarrier_wait(s.read + k, 0);
        if (issued++ >= kIN_FLIGHT) {
            mbarrier_wait(s.full[0] + landed.stage, landed.phase);
            landed.next(p.stages);
        }
        mbarrier_wait(s.empty + at.stage, at.phase ^ 1);
        wait_while_reading(s.reading);
        produce_rows(from, pitch, min(kSTAGE_ROWS<TOKENS>, rows), ring + at.stage * p.stage_bytes, stride, bytes,
                     s.full[0] + at.stage);
    }
    __device__ __forceinline__ void bring_by_halves(const uint8_t* from, int pitch, int rows, int stride, int bytes) {
        constexpr int kROWS = kSTAGE_ROWS<TOKENS> / kCOPIES;
        if (issued == kCOPIES * kEARLY_OF_FIRST) mbarrier_wait(s.read + p.first, 0);
        mbarrier_wait(s.empty + at.stage, at.phase ^ 1);
        uint32_t to = ring + at.stage * p.stage_bytes;
#pragma unroll 1
        for (int i = 0; i < kCOPIES; ++i) {
            if (issued >= kIN_FLIGHT) {
                const int half = issued % kCOPIES;
                mbarrier_wait(s.full[half] + landed.stage, landed.phase);
                if (half == kCOPIES - 1) landed.next(p.stages);
            }
            ++issued;
            produce_rows(from, pitch, max(min(kROWS, rows), 0), to, stride, bytes, s.full[i] + at.stage);
            to += kROWS * stride;
            from += kROWS * static_cast<int64_t>(pitch);
            rows -= kROWS;
        }
    }
    static_assert(kIN_FLIGHT % kCOPIES == 0, "see `half`");
};

template <int TOKENS>
__device__ __forceinline__ void bring_weights(const LayerParams& p, LayerShared<TOKENS>& s, uint32_t ring, int rank) {
    Producer<TOKENS> producer{p, s, ring};
    producer.product = p.first;
    for_each_pair(p, rank, [&](int k, const Segment& g, const Pair& pair) {
        const Phase& f = p.phase[k];
        const int size = super_bytes(g.type), stride = stage_row(g.type, f.width), pitch = f.supers * size;
        for (int c = 0; c < f.chunks; ++c) {
            const RowPart part = row_part(f, size, rank, c);
            for (int j = 0; j < pair.count; ++j) {
                const int row = (g.second ? pair.u : pair.u + j * static_cast<int>(gridDim.x)) * kTILE_ROWS;
                const uint8_t* from = (j && g.second ? g.second : g.weight) + row * static_cast<int64_t>(pitch) +
                                      c * kWARPS * size + part.from;
                producer.bring(k, from, pitch, g.n - row, stride, part.bytes);
            }
        }
    });
}

// Results from the sums over the warps of both blocks of a pair of tiles, or of gate and up. Adders take one token's
// pairs in turns, of which a lane sums half of the superblocks of a row; of more tokens each has half the rows.
template <int TOKENS>
struct Adder {
    static constexpr bool ONE = TOKENS == 1;
    static constexpr int kOUTPUTS = ONE ? 1 : kPAIR;  // of a lane
    static constexpr int kWARP = kWARP_FLOATS<TOKENS>;

    const LayerParams& p;
    LayerShared<TOKENS>& s;
    int adder, rank, lane;
    int ready;     // phase of `factor`
    float factor;  // 1 / rms of the lane's row

    __device__ __forceinline__ int row() const {
        return ONE ? lane % kTILE_ROWS : 4 * adder + (lane >> 3) + (lane & 1) * (kTILE_ROWS / 2);
    }
    __device__ __forceinline__ int token() const { return ONE ? 0 : lane >> 1 & 3; }

    // Of the lane's row of both tiles.
    __device__ __forceinline__ float2 totals(const float* sums) const {
        if constexpr (ONE) {
            constexpr int kHALF = kWARPS / 2;
            const float2 half = sums_of<kWARP, kHALF>(sums + 2 * row() + lane / kTILE_ROWS * kHALF * kWARP);
            return plus(half, make_float2(__shfl_xor_sync(~0u, half.x, kTILE_ROWS),
                                          __shfl_xor_sync(~0u, half.y, kTILE_ROWS)));
        } else {
            return sums_of<kWARP, kWARPS>(sums + kWARP / kADDERS * adder + 2 * lane);
        }
    }

    __device__ __forceinline__ void add(int k, const Segment& g, const Pair& pair, int buffer, int phase) {
        const Phase& f = p.phase[k];
        bool stored[kOUTPUTS];
        int64_t at[kOUTPUTS];
        float residual[kOUTPUTS] = {};
#pragma unroll
        for (int i = 0; i < kOUTPUTS; ++i) {
            const int of_pair = ONE ? lane / kTILE_ROWS : i;
            const int n = (pair.u + rank + static_cast<int>(gridDim.x) * of_pair) * kTILE_ROWS + row();
            stored[i] = n < g.n && token() < p.t && (of_pair == 0 || (pair.count == 2 && !g.second));
            at[i] = token() * f.ldy + n;
            if (f.residual && stored[i]) residual[i] = load_now(f.residual + at[i]);
        }
        if (f.residual && k == kDOWN)
#pragma unroll
            for (int i = 0; i < kOUTPUTS; ++i)
                if (stored[i]) await(f.residual + at[i], residual[i]);
        mbarrier_wait(s.given + buffer, phase);
        if (ready != k)
            factor = p.source[k].norm
                         ? rms_factor(sum_of<1, kWARPS>(s.squares[buffer][token()]), f.supers * kSUPER, p.eps)
                         : 1.0f;
        ready = k;
        float2 sum = totals(s.partial[buffer]);
        sum = make_float2(__fmul_rn(sum.x, factor), __fmul_rn(sum.y, factor));
        if (g.second) sum.x = swiglu(sum.x, sum.y);
#pragma unroll
        for (int i = 0; i < kOUTPUTS; ++i) {
            const float v = i || (ONE && lane >= kTILE_ROWS) ? sum.y : sum.x;
            if (stored[i]) g.y[at[i]] = f.residual ? __fadd_rn(residual[i], v) : v;
        }
    }

    __device__ __forceinline__ void run() {
        constexpr int kBUFFERS = nextn::kBUFFERS<TOKENS>;
        const uint32_t taken = smem_address(s.taken[rank]) + way_to_block(&s, lane % kCLUSTER);
        int pairs = 0;
        ready = -1;
        mbarrier_wait(&s.own_clear, 0);
        for_each_pair(p, rank, [&](int k, const Segment& g, const Pair& pair) {
            const int buffer = pairs % kBUFFERS, phase = pairs / kBUFFERS & 1;
            if (pairs++ % kADDERS != adder && ONE) return;
            if (lane == 0 && (ONE || adder == 0)) arrive_expecting(s.given + buffer, kWARPS * kSENT_BYTES<TOKENS>);
            // a block with few tiles may come here with nothing but the first product behind it
            if (k == kDOWN) mbarrier_wait(&s.all_clear, 0);
            add(k, g, pair, buffer, phase);
            __syncwarp();
            if (lane < kCLUSTER) arrive_in_cluster(taken + 8 * buffer);
        });
    }
};

// What must be done before the first product's results can be used. Old windows, which blocks share, have been read by
// all before any of them is overwritten, and memory is clear (see layer_flow.cuh), of a launch with the first product
// alone for the next one. One of kCLEANERS warps.
template <int TOKENS>
__device__ __forceinline__ void clear_and_fetch(const LayerParams& p, LayerShared<TOKENS>& s, int cleaner, int lane) {
    if (!p.cleared) {
        if (p.first < p.last) clear_own_tiles(p, 32 * cleaner + lane, 32 * kCLEANERS);
        clear(p.floats, kABSENT, 32 * cleaner + lane, 32 * kCLEANERS);
        if constexpr (!kSPLIT<TOKENS>) clear(p.pieces, kUNWRITTEN, 32 * cleaner + lane, 32 * kCLEANERS);
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&s.own_clear);
    if (p.first == p.last || cleaner) return;
    if (p.delta_net) {
        mbarrier_wait(s.read + p.first, 0);  // rows would come behind what memory must bring
        fetch_windows(p, s.window, lane);
        cp_async_wait<0>();
        __syncwarp();
    }
    if (lane) return;
    mbarrier_wait(&s.own_clear, 0);
    if (!p.cleared) {
        GridBarrier all(p.sync + kOTHER_WORD);
        all.arrive();
        all.wait();
    }
    mbarrier_arrive(&s.all_clear);
}

}  // namespace nextn
