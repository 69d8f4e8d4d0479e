// The weight ring of the persistent layer kernel: one producer warp, 16 consumer warps, a stage is a tile of 16 rows,
// up to 16 superblocks of each, or two tiles of half of them, one bulk copy per row.
#pragma once
#include "few_tokens.cuh"
#include "layer_cluster.cuh"
#include "layer_parts.cuh"

namespace nextn {

constexpr int kTILE_ROWS = 16, kPAIR = 2, kWARPS = 16, kMAX_STAGES = 8;

// A matrix of a product, or gate and up in turns (`second`). Tiles go round the blocks; the first one is block
// `shift`'s, an even number, so that the matrices of one product load all blocks evenly.
struct Segment {
    const uint8_t *weight, *second;
    float* y;
    int32_t type, n, tiles, shift;
};
// One product of the layer.
struct Phase {
    Segment segment[4];
    const float* residual;  // stride ldy as y's
    int64_t ldy;
    int32_t segments, supers, chunks;
    int32_t width;           // superblocks of a chunk that a block has at most
    int32_t number;          // LayerPhase
    OperandBlock* operands;  // more than four tokens: the rows, quantised by all blocks together
};

struct RingPosition {
    int stage = 0, phase = 0;
    __device__ __forceinline__ void next(int stages) {
        if (++stage == stages) {
            stage = 0;
            phase ^= 1;
        }
    }
};

__host__ __device__ constexpr int super_bytes(int type) {
    return type == kNEXTN_Q4_K ? 144 : type == kNEXTN_Q5_K ? 176 : 210;
}
// Bytes from row to row of a stage: 16 modulo 128, so that the 8 rows of a load hit different banks.
__host__ __device__ constexpr int stage_row(int type, int supers) {
    return (supers * super_bytes(type) - 16 + 127) / 128 * 128 + 16;
}
// Bulk copies move whole 16-byte pieces: rows of Q6_K must be whole eighths of superblocks.
__host__ __device__ constexpr bool ring_takes(int type, int supers) {
    return type == kNEXTN_Q6_K ? supers % 8 == 0 : is_kquant(type);
}

__device__ __forceinline__ int first_tile(const Segment& s, int block) {
    return block >= s.shift ? block - s.shift : block - s.shift + static_cast<int>(gridDim.x);
}

// What of a chunk of a row block `rank` of a cluster brings: the bytes from `from` on, whole 16-byte pieces. Half a row
// of Q6_K may begin within such a piece, which both bring then.
struct RowPart {
    int from, bytes;
};
__device__ __forceinline__ RowPart row_part(const Phase& f, int size, int rank, int chunk) {
    const int first = rank * f.width, count = min(f.width, f.supers - chunk * kWARPS - first);
    const int from = first * size & ~15;
    return {from, count > 0 ? ((first + count) * size + 15 & ~15) - from : 0};
}

// The producer warp: a part of `rows` rows, `pitch` apart. All of it is the same in every lane, or the copies would go
// through a loop over lanes.
__device__ __forceinline__ void produce_rows(const uint8_t* from, int pitch, int rows, uint32_t to, int stride,
                                             int bytes, uint64_t* full) {
#if __CUDA_ARCH__ >= 900
    if (!elect_lane()) return;
    arrive_expecting(full, rows * bytes);
    if (bytes == 0) return;
    const uint64_t policy = used_once();
#pragma unroll 4
    for (int r = 0; r < rows; ++r, to += stride, from += pitch) copy_bulk(to, from, bytes, full, policy);
#endif
}

// y += one superblock of rows g and g + 8 times the tokens.  r: address of that of row g. odd: of Q6_K, 210 bytes,
// every other superblock, aligned to 2 only; up to four tokens' operand is shifted then (see few_tokens.cuh).
template <int TYPE, int NT>
__device__ __forceinline__ void dot_super(uint32_t r, int stride8, bool odd,
                                          const TokenOperand<kANY_KQUANT, NT>& x, float (&y)[NT][2], int q) {
    if (TYPE == kNEXTN_Q6_K && odd && NT > 1)
        dot_q6_k<false>(r, r + stride8, x, y, q);
    else if (TYPE == kNEXTN_Q6_K && odd)
        dot_few<true, TYPE>(r, r + stride8, x, y, q, [] {});
    else
        dot_few<false, TYPE>(r, r + stride8, x, y, q, [] {});
}

}  // namespace nextn
