// What the kernels of the decode matmul share: parameters, the ring of weights, quantising one token.
#pragma once
#include "kquant_blocks.cuh"
#include "launch.cuh"
#include "matmul_parts.cuh"
#include "ptx.cuh"
#include "token_operand.cuh"

namespace nextn {

constexpr int kROWS = 16, kMAX_KS = 16, kMAX_RING = 8;  // rows of a tile, consumer warps, stages
constexpr int kFEW_GROUP = 8;  // tiles whose sums meet at once for 2 to 4 tokens; half of them for more

struct DecodeMatrix {
    const uint8_t* weight;
    float* y;
    int64_t ldy;
    int n, tiles;
};
struct DecodeParams {
    DecodeMatrix matrix[NEXTN_MAX_MATRICES];
    QuantizedRows quantized;
    bool own;  // quantise x here instead
    const float* x;
    const float* norm;
    int64_t ldx;
    float eps;
    const float* residual;
    int64_t ldr;
    int n_matrices, t, supers, chunks, ks, stages, units;  // units: tiles, or gate/up pairs of tiles
    // Rows of a stage that one copy brings, lying as in memory; bytes from the first of them to that of the next copy.
    int together, row_stride;
    bool swiglu;
};

struct StageCursor {
    int stage = 0, phase = 0;
    __device__ __forceinline__ void next(int stages) {
        if (++stage == stages) {
            stage = 0;
            phase ^= 1;
        }
    }
};

struct Tile {
    int matrix, row;
};
__device__ __forceinline__ Tile tile_at(const DecodeParams& p, int v) {
    if (p.swiglu) return {v & 1, (v >> 1) * kROWS};
    int m = 0;
    while (m + 1 < p.n_matrices && v >= p.matrix[m].tiles) v -= p.matrix[m++].tiles;
    return {m, v * kROWS};
}

// Global bytes of `row`, chunk `c`: start rounded down to 16, length rounded up; `skew` is what was rounded off.
struct Piece {
    const uint8_t* from;
    int bytes, skew;
};
template <int TYPE>
__device__ __forceinline__ Piece piece_at(const DecodeParams& p, const DecodeMatrix& m, int row, int c) {
    constexpr int kB = kSuperBytes<TYPE>;
    const uint8_t* from = m.weight + (static_cast<int64_t>(min(row, m.n - 1)) * p.supers + c * p.ks) * kB;
    const int skew = TYPE == kNEXTN_Q6_K ? static_cast<int>(reinterpret_cast<uintptr_t>(from) & 15) : 0;
    const int bytes = min(p.ks, p.supers - c * p.ks) * kB;
    return {from - skew, (bytes + skew + 15) & ~15, skew};
}

// Place in a stage of row `row_of_lane(p, g, 0)`, and from there to `row_of_lane(p, g, 1)`: the rows of lanes 4g ..
__device__ __forceinline__ int row_of_lane(const DecodeParams& p, int g, int second) {
    return p.together == 2 ? 2 * g + second : g + 8 * second;
}
template <int TYPE>
__device__ __forceinline__ int offset_of_row(const DecodeParams& p, int g) {
    const int row = p.ks * kSuperBytes<TYPE>;
    return p.together == 4 ? (g >> 2) * p.row_stride + (g & 3) * row : g * p.row_stride;
}
template <int TYPE>
__device__ __forceinline__ int offset_of_second(const DecodeParams& p) {
    return p.together == 1 ? 8 * p.row_stride : p.together == 2 ? p.ks * kSuperBytes<TYPE> : 2 * p.row_stride;
}

__device__ __forceinline__ int stage_bytes(const DecodeParams& p) { return kROWS / p.together * p.row_stride; }

// All lanes of one warp.  Rows past the matrix's last are another one's again, or, several to a copy, left as they are.
template <int TYPE>
__device__ __forceinline__ void produce(const DecodeParams& p, uint8_t* stage, uint64_t* full, const Tile& tile, int c,
                                        int lane) {
    const DecodeMatrix& m = p.matrix[tile.matrix];
#if __CUDA_ARCH__ >= 900
    if (lane < kROWS / p.together) {
        const int row = tile.row + lane * p.together;
        Piece piece = piece_at<TYPE>(p, m, row, c);
        if (p.together > 1) piece.bytes *= max(0, min(p.together, m.n - row));
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(smem_address(full)), "r"(piece.bytes)
                     : "memory");
        if (piece.bytes)
            copy_bulk(smem_address(stage + lane * p.row_stride), piece.from, piece.bytes, full, used_once());
    }
#else
    for (int r = 0; r < kROWS; ++r) {
        const Piece piece = piece_at<TYPE>(p, m, tile.row + r, c);
        uint8_t* to = stage + r / p.together * p.row_stride + r % p.together * piece.bytes;
        for (int b = 16 * lane; b < piece.bytes; b += 16 * 32) cp_async_16(to + b, piece.from + b);
    }
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(smem_address(full)) : "memory");
#endif
}

__device__ __forceinline__ void store(const DecodeParams& p, const Tile& tile, int row, int token, float v) {
    const DecodeMatrix& m = p.matrix[tile.matrix];
    const int n = tile.row + row;
    if (token >= p.t || n >= m.n) return;
    if (p.residual) v = __fadd_rn(p.residual[token * p.ldr + n], v);
    store_in_l2(m.y + token * m.ldy + n, v);
}

__device__ __forceinline__ void consumer_barrier(int warps) {
    asm volatile("bar.sync 1, %0;" ::"r"(32 * warps) : "memory");
}

// Which superblock of each chunk is a warp's. Odd ones of Q6_K take longer: every four warps, which share a scheduler, get
// two of each.
__device__ __forceinline__ int own_superblock(int warp, int ks) { return ks % 8 ? warp : warp ^ (warp >> 2 & 1); }

struct Barriers {
    uint64_t full[kMAX_RING], empty[kMAX_RING];
    __device__ __forceinline__ void init(const DecodeParams& p) {
        for (int s = 0; s < p.stages; ++s) {
#if __CUDA_ARCH__ >= 900
            mbarrier_init(full + s, kROWS / p.together);
#else
            mbarrier_init(full + s, 32);
#endif
            mbarrier_init(empty + s, p.ks);
        }
#if __CUDA_ARCH__ >= 900
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
    }
};

// Units of a block, in turns with the others, so that all of them read in one place.
struct UnitRange {
    int first, step, count;
    __device__ __forceinline__ explicit UnitRange(const DecodeParams& p) {
        first = blockIdx.x;
        step = gridDim.x;
        count = (p.units - first + step - 1) / step;
    }
    // Tiles of the block: a unit of gate and up has two.
    __device__ __forceinline__ int tiles(const DecodeParams& p) const { return p.swiglu ? 2 * count : count; }
    __device__ __forceinline__ int tile(const DecodeParams& p, int i) const {
        return p.swiglu ? 2 * (first + (i >> 1) * step) + (i & 1) : first + i * step;
    }
};

// One token, and 2 to 8, against rows of one chunk; those of Q6_K must begin alike modulo 16.  Partial sums need so many
// bytes of shared memory.
size_t one_token_bytes(int ks);
size_t few_tokens_bytes(int ks);
cudaError_t kquant_decode_one(int type, const Launch& l, const DecodeParams& p, cudaStream_t stream);
cudaError_t kquant_decode_few(int type, const Launch& l, const DecodeParams& p, cudaStream_t stream);

}  // namespace nextn
