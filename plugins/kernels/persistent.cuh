// Entry and launch of persistent kernels: one block a multiprocessor, 16 consumer warps, a producer warp ahead of them.
#pragma once
#include "launch.cuh"
#include "layer_consumer.cuh"

namespace nextn {

// A block gets 640 x 96 registers, given out to groups of four warps: the producer has a group of its own and passes most
// of its share on (24 + 4 x 112 <= 5 x 96).
constexpr int kPRODUCERS = 128;
__device__ __forceinline__ void give_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
#endif
}
__device__ __forceinline__ void take_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("setmaxnreg.inc.sync.aligned.u32 112;");
#endif
}

// Stages under way at most, about what the memory needs to be busy: with more, everything else that the block reads or
// writes queues up behind them.
constexpr int kIN_FLIGHT = 2;

template <int NT>
__device__ __forceinline__ void produce(const LayerParams& p, LayerShared<NT>& s, uint8_t* ring, int lane) {
    RingPosition at, landed;  // landed: kIN_FLIGHT stages behind
    const int grid = gridDim.x;
    int issued = 0;
    for (int k = p.first; k <= p.last; ++k) {
        const Phase& f = p.phase[k];
        const int wide = min(kWARPS, f.supers);
        for (int i = 0; i < f.segments; ++i) {
            const Segment& g = f.segment[i];
            const int size = super_bytes(g.type), stride = stage_row(g.type, wide);
            for (int u = first_tile(g); u < g.tiles; u += grid) {
                const int64_t row = min(u * kTILE_ROWS + lane, g.n - 1) * static_cast<int64_t>(f.supers * size);
                for (int part = 0; part < (g.second ? 2 : 1); ++part)
                    for (int c = 0; c < f.chunks; ++c) {
                        if (issued++ >= kIN_FLIGHT) {
                            mbarrier_wait(s.full + landed.stage, landed.phase);
                            landed.next(p.stages);
                        }
                        mbarrier_wait(s.empty + at.stage, at.phase ^ 1);
                        if (lane < kTILE_ROWS)
                            produce_row((part ? g.second : g.weight) + row + c * kWARPS * size,
                                        ring + at.stage * p.stage_bytes + lane * stride,
                                        min(kWARPS, f.supers - c * kWARPS) * size, s.full + at.stage);
                        at.next(p.stages);
                    }
            }
        }
    }
}

// All threads. False for producer warps, when all their work is done.
template <int NT>
__device__ __forceinline__ bool enter(const LayerParams& p, LayerShared<NT>& s, uint8_t* ring) {
#if __CUDA_ARCH__ >= 900
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    launch_dependents();
    if (threadIdx.x == 0) {
        for (int i = 0; i < p.stages; ++i) {
            mbarrier_init(s.full + i, kTILE_ROWS);
            mbarrier_init(s.empty + i, kWARPS);
        }
        mbarrier_init(&s.go, kWARPS);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (warp >= kWARPS) {
        give_registers();
        if (warp == kWARPS) {
            mbarrier_wait(&s.go, 0);  // what the consumers need first would queue up behind the weights
            produce(p, s, ring, lane);
        }
        return false;
    }
    take_registers();
    return true;
#else
    return false;
#endif
}

inline bool runs_persistent(const DeviceLimits& d) { return d.capability >= 90 && d.smem_per_block >= 220 * 1024; }

inline Phase phase_of(int k, const NextnLayerMatrix* matrices, int count, float* y, int64_t ldy, int blocks) {
    Phase f = {};
    f.supers = k / kSUPER;
    f.chunks = ceil_div(f.supers, kWARPS);
    f.segments = count;
    f.ldy = ldy;
    int before = 0;
    for (int i = 0; i < count; ++i) {
        const NextnLayerMatrix& m = matrices[i];
        f.segment[i] = {static_cast<const uint8_t*>(m.weight), nullptr, y, m.type, m.n, ceil_div(m.n, kTILE_ROWS),
                        before % blocks};
        before += f.segment[i].tiles;
        y += m.n;
    }
    return f;
}

// scratch: bytes that a block needs behind the ring.
template <int NT>
cudaError_t launch_persistent(void (*kernel)(LayerParams), LayerParams& p, size_t scratch, const DeviceLimits& limits,
                              bool pdl, cudaStream_t stream) {
    int stage = 0;
    for (int k = p.first; k <= p.last; ++k)
        for (int i = 0; i < p.phase[k].segments; ++i)
            stage = max(stage, kTILE_ROWS * stage_row(p.phase[k].segment[i].type, min(kWARPS, p.phase[k].supers)));
    const size_t room = limits.smem_per_block - sizeof(LayerShared<NT>) - 1024 - round_up(scratch, 128);
    p.stage_bytes = static_cast<int>(round_up(stage, 128));
    p.stages = static_cast<int>(min(room / p.stage_bytes, static_cast<size_t>(kMAX_STAGES)));
    if (p.stages < 2) return cudaErrorInvalidValue;
    Launch l;
    l.grid = dim3(limits.sm_count);
    l.block = dim3(kTHREADS + kPRODUCERS);
    l.smem = max(static_cast<size_t>(p.stages) * p.stage_bytes + round_up(scratch, 128), one_block_per_sm(limits, 0));
    l.pdl = pdl;
    return launch(l, stream, kernel, p);
}

}  // namespace nextn
