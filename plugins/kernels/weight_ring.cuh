// The weight ring of the persistent layer kernel: one producer warp, 16 consumer warps, stages of one tile's rows.
//
// A stage is 16 rows x up to 16 superblocks, one bulk copy per row. A tile of any K-quant type takes one stage per chunk.
#pragma once
#include "kquant_dot.cuh"

namespace nextn {

constexpr int kTILE_ROWS = 16, kPAIR = 2, kWARPS = 16, kMAX_STAGES = 8;

struct PhaseMatrix {
    const uint8_t* weight;
    float* y;
    int64_t ldy;
    int32_t type, n, tiles;
};
// One product of the layer. units: tiles, or with swiglu pairs of tiles of gate and up.
struct Phase {
    PhaseMatrix matrix[4];
    const float* residual;
    int64_t ldr;
    int32_t matrices, units, supers, chunks;
    bool swiglu;
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

struct TileOf {
    int matrix, row;
};
// Tile of unit u; with swiglu `second` picks up instead of gate.
__device__ __forceinline__ TileOf tile_of(const Phase& f, int u, int second) {
    if (f.swiglu) return {second, u * kTILE_ROWS};
    int m = 0;
    while (m + 1 < f.matrices && u >= f.matrix[m].tiles) u -= f.matrix[m++].tiles;
    return {m, u * kTILE_ROWS};
}

__host__ __device__ constexpr int super_bytes(int type) {
    return type == kNEXTN_Q4_K ? 144 : type == kNEXTN_Q5_K ? 176 : 210;
}
// Bytes from row to row of a stage: 16 modulo 128, so that the 8 rows of a load hit different banks. Odd superblocks
// of Q6_K begin anywhere, hence the slack.
__host__ __device__ constexpr int stage_row(int type, int supers) {
    const int row = (supers * super_bytes(type) + (type == kNEXTN_Q6_K ? 19 : 0) + 15) / 16 * 16;
    return (row - 16 + 127) / 128 * 128 + 16;
}

// Global bytes of `row`, chunk `c`: start rounded down to 16, length up; skew is what was rounded off.
struct RowPiece {
    const uint8_t* from;
    int bytes, skew;
};
__device__ __forceinline__ RowPiece row_piece(const Phase& f, const PhaseMatrix& m, int row, int c) {
    const int size = super_bytes(m.type);
    const uint8_t* from = m.weight + (static_cast<int64_t>(min(row, m.n - 1)) * f.supers + c * kWARPS) * size;
    const int skew = m.type == kNEXTN_Q6_K ? static_cast<int>(reinterpret_cast<uintptr_t>(from) & 15) : 0;
    const int bytes = min(kWARPS, f.supers - c * kWARPS) * size;
    return {from - skew, (bytes + skew + 15) & ~15, skew};
}

// Lanes 0..15 of the producer warp.
__device__ __forceinline__ void produce_tile(const Phase& f, uint8_t* stage, uint64_t* full, const TileOf& tile, int c,
                                             int lane) {
#if __CUDA_ARCH__ >= 900
    const PhaseMatrix& m = f.matrix[tile.matrix];
    if (lane >= kTILE_ROWS) return;
    const RowPiece piece = row_piece(f, m, tile.row + lane, c);
    uint8_t* to = stage + lane * stage_row(m.type, min(kWARPS, f.supers));
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(smem_address(full)), "r"(piece.bytes)
                 : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     smem_address(to)),
                 "l"(piece.from), "r"(piece.bytes), "r"(smem_address(full))
                 : "memory");
#endif
}

// y += this warp's superblock of the tile times the tokens.
template <int NT>
__device__ __forceinline__ void dot_stage(const Phase& f, const uint8_t* stage, const TileOf& tile, int c, int warp,
                                          int lane, const TokenOperand<kANY_KQUANT, NT>& x, float (&y)[NT][2]) {
    const PhaseMatrix& m = f.matrix[tile.matrix];
    const int g = lane >> 2, q = lane & 3, stride = stage_row(m.type, min(kWARPS, f.supers));
    const uint8_t* r0 = stage + g * stride + warp * super_bytes(m.type);
    const uint8_t* r8 = r0 + 8 * stride;
    if (m.type == kNEXTN_Q4_K) {
        dot_affine<kNEXTN_Q4_K>(r0, r8, x, y, q);
    } else if (m.type == kNEXTN_Q5_K) {
        dot_affine<kNEXTN_Q5_K>(r0, r8, x, y, q);
    } else {
        r0 += row_piece(f, m, tile.row + g, c).skew;
        r8 += row_piece(f, m, tile.row + g + 8, c).skew;
        const uintptr_t both = reinterpret_cast<uintptr_t>(r0) | reinterpret_cast<uintptr_t>(r8);
        if (__all_sync(~0u, (both & 2) == 0))
            dot_q6_k<true>(r0, r8, x, y, q);
        else
            dot_q6_k<false>(r0, r8, x, y, q);
    }
}

}  // namespace nextn
