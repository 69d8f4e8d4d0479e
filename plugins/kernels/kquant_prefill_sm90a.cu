// Prefill matmul of compute capability 9.0: wgmma, weights expanded in registers (kquant_fragments.cuh).
//
// Persistent blocks of 128 rows x BN tokens: two warpgroups of 64 rows each and a producer that brings tokens, 64
// values a stage, by bulk copies into a ring.  Each warp reads and expands its own 16 rows a stage ahead of the tensor
// cores.  Sums are in the row's `unit`; where it changes, once a superblock, they are multiplied by old / new.
#include "kquant_fragments.cuh"
#include "kquant_prefill_tile.cuh"
#include "launch.cuh"
#include "wgmma.cuh"

namespace nextn {
namespace {

constexpr int kGROUPS = 2, kWARPS = 4 * kGROUPS, kTHREADS = 128 * (kGROUPS + 1);  // and the producer's
constexpr int kROW_BYTES = 2 * kSTEP_VALUES, kSUM_BYTES = 32;  // of one token: a step, a superblock's sums

template <int BN>
struct Ring {
    static constexpr int kSTAGES = BN == 256 ? 6 : 8;  // at most 8, as sums have two buffers
    __align__(1024) uint8_t x[kSTAGES][BN * kROW_BYTES];
    uint8_t sums[2][BN * kSUM_BYTES];
    float row_scale[kGROUPS][BN];
    uint64_t full[kSTAGES], empty[kSTAGES];
};

// Position in the ring: slot, and the parity of the round that fills it.
template <int STAGES>
struct Position {
    int slot = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ void advance() {
        if (++slot == STAGES) slot = 0, parity ^= 1;
    }
};

template <int BN>
__device__ __forceinline__ int tiles_of(const PrefillTiles& p) {
    return (p.first[p.count] + kWARPS - 1) / kWARPS * ((p.t + BN - 1) / BN);
}

template <int BN>
__device__ void produce(const PrefillTiles& p, Ring<BN>& ring, bool with_sums) {
    Position<Ring<BN>::kSTAGES> at;
    int supers = 0;
    const int token_tiles = (p.t + BN - 1) / BN;
    for (int tile = blockIdx.x; tile < tiles_of<BN>(p); tile += gridDim.x) {
        const int64_t t0 = static_cast<int64_t>(tile % token_tiles) * BN;
        const uint32_t tokens = min(BN, p.t_padded - static_cast<int>(t0));
        for (int step = 0; step < p.supers * kSTEPS_PER_SUPER; ++step) {
            const bool sums = with_sums && step % kSTEPS_PER_SUPER == 0;
            mbarrier_wait(&ring.empty[at.slot], at.parity ^ 1);
            mbarrier_expect(&ring.full[at.slot], tokens * (kROW_BYTES + (sums ? kSUM_BYTES : 0)));
            bulk_copy(ring.x[at.slot], p.x + (static_cast<int64_t>(step) * p.t_padded + t0) * kROW_BYTES,
                      tokens * kROW_BYTES, &ring.full[at.slot]);
            if (sums)
                bulk_copy(ring.sums[supers++ & 1],
                          p.sums + (static_cast<int64_t>(step / kSTEPS_PER_SUPER) * p.t_padded + t0) * kSUM_BYTES,
                          tokens * kSUM_BYTES, &ring.full[at.slot]);
            at.advance();
        }
    }
}

// One warp's rows of a tile, from packed weights to finished sums.
template <int TYPE, int BN>
struct WarpRows {
    static constexpr bool kRESTS = TYPE != kNEXTN_Q6_K;  // a constant per 32 values is left over
    static constexpr int kBYTES = kSuperBytes<TYPE>, kSHARED = StepOfRow<TYPE>::kSTEPS;

    float acc[BN / 2], unit[2];
    uint32_t frag[2][4][4];
    const uint8_t* weights[2];
    StepOfRow<TYPE> packed[kSTEPS_PER_SUPER / kSHARED][2];  // a whole superblock ahead
    HeaderOfRow<TYPE> header[2];
    SuperOfRow<TYPE> super[2];

    __device__ __forceinline__ void load_step(int s, int step, int q) {
#pragma unroll
        for (int r = 0; r < 2; ++r) packed[step / kSHARED][r].load(weights[r] + s * kBYTES, step, q);
    }
    __device__ __forceinline__ void load_header(int s, int q) {
#pragma unroll
        for (int r = 0; r < 2; ++r) header[r].load(weights[r] + s * kBYTES, q);
    }
    __device__ __forceinline__ void decode_header(int q) {
#pragma unroll
        for (int r = 0; r < 2; ++r) super[r].decode(header[r], q);
    }
    // A step's fragments; its bytes make room for those of superblock `next`, if there is one.
    __device__ __forceinline__ void expand(int step, int lane, int next, int supers) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            uint32_t scale, offset = 0;
            if constexpr (kRESTS) {  // lane `step` of the four has this step's two sub-blocks
                scale = __shfl_sync(~0u, super[r].scales, (lane & 28) | step);
                offset = __shfl_sync(~0u, super[r].offsets, (lane & 28) | step);
            } else {
                scale = super[r].scales[step / 2] >> (16 * (step & 1));
            }
            packed[step / kSHARED][r].expand(frag[step & 1], r, step, scale, offset, super[r].high);
        }
        if (step % kSHARED == kSHARED - 1 && next < supers) load_step(next, step + 1 - kSHARED, lane & 3);
    }
    // The tile's first loads, long before `start` needs them.
    __device__ __forceinline__ void fetch(const LaneRows& rows, int64_t row_bytes, int lane) {
#pragma unroll
        for (int r = 0; r < 2; ++r) weights[r] = rows.weights(r, row_bytes);
        load_header(0, lane & 3);
#pragma unroll
        for (int step = 0; step < kSTEPS_PER_SUPER; step += kSHARED) load_step(0, step, lane & 3);
    }
    __device__ __forceinline__ void start(int lane, int supers) {
        decode_header(lane & 3);
        expand(0, lane, 1, supers);
    }
    // acc and unit go over to the superblock in `super`.
    __device__ __forceinline__ void change_unit(bool first) {
        float ratio[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float next = super[r].unit != 0.0f ? super[r].unit : first ? 1.0f : unit[r];
            ratio[r] = first ? 0.0f : unit[r] / next;
            unit[r] = next;
        }
        if (first) return;  // the first product overwrites
#pragma unroll
        for (int i = 0; i < BN / 2; ++i) acc[i] = __fmul_rn(acc[i], ratio[i >> 1 & 1]);
    }
};

// Sums of one tile; `at` moves on by the tile's stages.
template <int TYPE, int BN, int STAGES>
__device__ __forceinline__ void multiply(WarpRows<TYPE, BN>& w, Ring<BN>& ring, Position<STAGES>& at, int& supers_seen,
                                         int supers, int lane) {
    const uint64_t x_tile = swizzled_tile(ring.x[0]), sum_tile = plain_tile(ring.sums[0]);
    const auto release = [&](int slot) {
        if (lane == 0) mbarrier_arrive(&ring.empty[slot]);
    };
    int before = 0;
    for (int s = 0; s < supers; ++s) {
#pragma unroll
        for (int step = 0; step < kSTEPS_PER_SUPER; ++step) {
            if (step == 0) {
                if (s) {
                    wgmma_wait<0>();
                    release(before);
                }
                accumulators_fence(w.acc);
                w.change_unit(s == 0);
                accumulators_fence(w.acc);
            }
            mbarrier_wait(&ring.full[at.slot], at.parity);
            wgmma_fence();
            if constexpr (WarpRows<TYPE, BN>::kRESTS)
                if (step == 0) {
                    const uint32_t rests[4] = {w.super[0].rest_high, w.super[1].rest_high, w.super[0].rest_low,
                                               w.super[1].rest_low};
                    wgmma_f16<BN>(w.acc, rests, sum_tile + (supers_seen & 1) * (BN * kSUM_BYTES / 16), s > 0);
                }
#pragma unroll
            for (int i = 0; i < 4; ++i)
                wgmma_f16<BN>(w.acc, w.frag[step & 1][i], x_tile + at.slot * (BN * kROW_BYTES / 16) + 2 * i,
                              s > 0 || step > 0 || i > 0 || WarpRows<TYPE, BN>::kRESTS);
            wgmma_commit();
            wgmma_wait<1>();  // the fragments of the step before may be written over
            if (step) release(before);
            before = at.slot;
            at.advance();
            if (step == 0 && s + 1 < supers) w.load_header(s + 1, lane & 3);
            if (step + 1 < kSTEPS_PER_SUPER) {
                w.expand(step + 1, lane, s + 1, supers);
            } else if (s + 1 < supers) {
                w.decode_header(lane & 3);
                w.expand(0, lane, s + 2, supers);
            }
        }
        ++supers_seen;
    }
    wgmma_wait<0>();
    release(before);
    accumulators_fence(w.acc);
}

template <int TYPE, int BN>
__global__ void __launch_bounds__(kTHREADS, 1) kquant_prefill_wgmma_kernel(const __grid_constant__ PrefillTiles p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) uint8_t raw[];
    Ring<BN>& ring = *reinterpret_cast<Ring<BN>*>(raw);
    if (threadIdx.x == 0) {
        for (int i = 0; i < Ring<BN>::kSTAGES; ++i) {
            mbarrier_init(&ring.full[i], 1);
            mbarrier_init(&ring.empty[i], kWARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    launch_dependents();
    wait_for_predecessor();
    if (threadIdx.x >= 128 * kGROUPS) {
        fewer_registers<24>();
        if (threadIdx.x == 128 * kGROUPS) produce<BN>(p, ring, TYPE != kNEXTN_Q6_K);
    } else {
        more_registers<240>();
        const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, token_tiles = (p.t + BN - 1) / BN;
        Position<Ring<BN>::kSTAGES> at;
        int supers_seen = 0;
        const int64_t row_bytes = static_cast<int64_t>(p.supers) * kSuperBytes<TYPE>;
        float* scales = ring.row_scale[warp >> 2];
        WarpRows<TYPE, BN> w;
        LaneRows rows(p, blockIdx.x / token_tiles * kWARPS + warp, lane >> 2);
        w.fetch(rows, row_bytes, lane);
        for (int tile = blockIdx.x; tile < tiles_of<BN>(p); tile += gridDim.x) {
            const int t0 = tile % token_tiles * BN;
            w.start(lane, p.supers);
            group_barrier();  // the tile before has read its scales
            load_row_scales<BN>(p, scales, t0);
            multiply<TYPE, BN>(w, ring, at, supers_seen, p.supers, lane);
            group_barrier();
            const LaneRows next(p, (tile + gridDim.x) / token_tiles * kWARPS + warp, lane >> 2);
            w.fetch(next, row_bytes, lane);
            store<BN>(p, w.acc, w.unit, rows, scales, t0, lane & 3);
            rows = next;
        }
    }
#endif
}

template <int TYPE>
cudaError_t launch_tokens(const PrefillTiles& p, int tokens, Launch l, int sms, cudaStream_t stream) {
    l.grid = dim3(min(sms, ceil_div(p.first[p.count], kWARPS) * ceil_div(p.t, tokens)));
    switch (tokens) {
        case 64: l.smem = sizeof(Ring<64>); return launch(l, stream, kquant_prefill_wgmma_kernel<TYPE, 64>, p);
        case 128: l.smem = sizeof(Ring<128>); return launch(l, stream, kquant_prefill_wgmma_kernel<TYPE, 128>, p);
        default: l.smem = sizeof(Ring<256>); return launch(l, stream, kquant_prefill_wgmma_kernel<TYPE, 256>, p);
    }
}

// Tokens of a tile that take the least time: rounds of tiles over the multiprocessors, each with a fixed part.
int best_tokens(int row_tiles, int t, int sms) {
    int best = 0, least = 0;
    for (int tokens : {256, 128, 64}) {
        const int rounds = ceil_div(static_cast<int64_t>(row_tiles) * ceil_div(t, tokens), sms);
        const int time = rounds * (tokens + 32);
        if (!best || time < least) best = tokens, least = time;
    }
    return best;
}

}  // namespace

cudaError_t kquant_prefill_wgmma(const NextnMatmul& m, int first, int count, const MatmulWorkspace& w,
                                 const DeviceLimits& limits, cudaStream_t stream) {
    PrefillTiles p = {};
    for (int i = 0; i < count; ++i) {
        p.matrix[i] = m.matrix[first + i];
        p.first[i + 1] = p.first[i] + (m.swiglu ? (i ? 0 : ceil_div(p.matrix[i].n, 8)) : ceil_div(p.matrix[i].n, 16));
    }
    p.count = count;
    p.x = reinterpret_cast<const uint8_t*>(w.half_rows);
    p.sums = reinterpret_cast<const uint8_t*>(w.half_sums);
    p.row_scale = w.row_scale;
    p.residual = m.residual;
    p.ldr = m.ldr;
    p.t = m.t;
    p.t_padded = static_cast<int>(round_up(m.t, 8));
    p.supers = m.k / kSUPER;
    p.swiglu = m.swiglu;
    Launch l;
    l.block = dim3(kTHREADS);
    l.pdl = m.flags & NEXTN_PDL;
    const int tokens = best_tokens(ceil_div(p.first[count], kWARPS), m.t, limits.sm_count);
    switch (m.matrix[first].type) {
        case kNEXTN_Q4_K: return launch_tokens<kNEXTN_Q4_K>(p, tokens, l, limits.sm_count, stream);
        case kNEXTN_Q5_K: return launch_tokens<kNEXTN_Q5_K>(p, tokens, l, limits.sm_count, stream);
        case kNEXTN_Q6_K: return launch_tokens<kNEXTN_Q6_K>(p, tokens, l, limits.sm_count, stream);
        default: return cudaErrorInvalidValue;
    }
}

}  // namespace nextn
