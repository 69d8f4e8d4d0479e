// Parameters of the persistent layer kernel and the pieces of its consumer warps.
//
//   block = 16 consumer warps + 4 helpers, one block a multiprocessor. One helper knows all weights beforehand and runs
//   ahead through them, so memory stays busy while the consumers wait for each other:
//   up to four tokens  every block reads the rows it needs as they come (layer_flow.cuh), and two blocks share tiles
//                      (layer_cluster.cuh): of every chunk of 16 superblocks one has the first half, the other the
//                      rest, and a consumer warp has one of these superblocks of one of two tiles
//   more               a helper warp of each block quantises its share of all rows as they come, but of the first
//                      product's, which the consumers do, and blocks read operands as these come (layer_eight.cuh,
//                      layer_operands.cuh); a consumer warp has one superblock of each chunk of every tile, and four
//                      of them in turns add up what all of them have
// Every choice that fixes the order of a sum follows from the layer, never from t.
#pragma once
#include "layer_parts.cuh"
#include "weight_ring.cuh"

namespace nextn {

constexpr int kGDN_DIM = 128, kGDN_COLUMNS = 32, kGDN_KERNEL = 4, kGDN_PARTS = kGDN_DIM / kGDN_COLUMNS;
constexpr int kTHREADS = 32 * kWARPS;  // consumers

enum LayerPhase { kINPUT, kOUTPUT, kGATE_UP, kDOWN, kPHASES };

// Rows that a product takes: x, times norm weight by column, times a factor by head (Gated DeltaNet's output norm).
struct RowSource {
    const float* x;
    int64_t ldx;
    const float* norm;
    const float* squares;  // [t][heads][kGDN_PARTS], sums of o^2 over 32 columns
};

struct ClearRange {
    uint4* from;
    int32_t pieces;  // of 16 bytes
};

struct LayerParams {
    Phase phase[kPHASES];
    RowSource source[kPHASES];
    ClearRange floats, pieces;  // to be cleared, see layer_flow.cuh and layer_operands.cuh
    NextnGatedDeltaNet delta;   // rows and y set
    float* squares;
    uint32_t* sync;
    float eps;
    int32_t t, first, last, stages, stage_bytes, heads;  // first, last: of the phases to run
    bool cleared;                                        // by a launch before this one
    bool delta_net;                                      // run it after kINPUT
};

// The value in a register, from here on: the compiler would work it out anew for every tile, or what follows from it
// before everything else, and run out of registers.
__device__ __forceinline__ int keep(int v) {
    asm volatile("" : "+r"(v));
    return v;
}

// A lane's number anew, instead of a register that has it all the time.
__device__ __forceinline__ int lane_now() {
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

// -DNEXTN_LAYER_TRACE: each block leaves its clock at every point behind the barrier words (tests.bench.layers reads
// it).
__device__ __forceinline__ void trace([[maybe_unused]] const LayerParams& p, [[maybe_unused]] int point) {
#ifdef NEXTN_LAYER_TRACE
    if (threadIdx.x == 0) reinterpret_cast<long long*>(p.sync + 64)[24 * blockIdx.x + point] = clock64();
#endif
}
// When a value that was loaded is there.
__device__ __forceinline__ void trace_value([[maybe_unused]] const LayerParams& p, [[maybe_unused]] int point,
                                            [[maybe_unused]] float value) {
#ifdef NEXTN_LAYER_TRACE
    asm volatile("" ::"f"(value) : "memory");
    trace(p, point);
#endif
}

__device__ __forceinline__ void consumers_sync() { asm volatile("bar.sync 1, %0;" ::"n"(kTHREADS) : "memory"); }

constexpr int kOTHER_WORD = 32;  // of `sync`, a line of its own

// What was written before an arrival is visible, after, to loads that bypass L1 (ld.cg). begun: its bit when the launch
// began; a launch has one barrier at a word.
struct GridBarrier {
    uint32_t* word;
    uint32_t bit;
    __device__ GridBarrier(uint32_t* at, uint32_t begun) : word(at), bit(begun) {}
    __device__ explicit GridBarrier(uint32_t* at) : word(at) {
        asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(bit) : "l"(word) : "memory");
        bit &= 0x80000000u;
    }
    // The last of `count` arrivals turns the top bit, whatever it was: nothing to reset between launches. One of them,
    // the same every time, has `first`.
    __device__ __forceinline__ void arrive(bool first, int count) {
        const uint32_t add = first ? 0x80000000u - (count - 1) : 1;
        asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(word), "r"(add) : "memory");
    }
    // One thread of every block.
    __device__ __forceinline__ void arrive() { arrive(blockIdx.x == 0, gridDim.x); }
    __device__ __forceinline__ void wait() {
        uint32_t now;
        do {
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(word) : "memory");
        } while ((now & 0x80000000u) == bit);
    }
};

}  // namespace nextn
