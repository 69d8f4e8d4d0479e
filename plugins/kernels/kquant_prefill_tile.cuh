// Tiles of the prefill matmul of compute capability 9.0: which rows a lane has, and how finished sums get out.
#pragma once
#include "matmul_parts.cuh"

namespace nextn {

struct PrefillTiles {
    NextnMatrix matrix[NEXTN_MAX_MATRICES];
    int first[NEXTN_MAX_MATRICES + 1];  // of each matrix, in units of 16 rows (a warp's share)
    const uint8_t* x;                   // [step][token][64 f16], swizzled
    const uint8_t* sums;                // [superblock][8 tokens][2][8][8 f16]
    const float* row_scale;
    const float* residual;
    int64_t ldr;
    int count, t, t_padded, supers;
    bool swiglu;
};

// The two rows of a lane: with SwiGLU the same row of gate and up, else rows g and g + 8 of a matrix's 16.
struct LaneRows {
    const NextnMatrix* matrix[2];
    int row[2];
    bool there;

    __device__ __forceinline__ LaneRows(const PrefillTiles& p, int block16, int g) : there(block16 < p.first[p.count]) {
        int i = 0;
        while (i + 1 < p.count && block16 >= p.first[i + 1]) ++i;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            matrix[r] = &p.matrix[p.swiglu ? r : i];
            row[r] = p.swiglu ? 8 * block16 + g : 16 * (block16 - p.first[i]) + 8 * r + g;
        }
    }
    __device__ __forceinline__ const uint8_t* weights(int r, int64_t bytes) const {
        return static_cast<const uint8_t*>(matrix[r]->weight) + min(row[r], matrix[r]->n - 1) * bytes;
    }
};

// Scales of a tile's tokens into shared memory, by one warpgroup for itself; read after its next barrier.
template <int BN>
__device__ __forceinline__ void load_row_scales(const PrefillTiles& p, float* scales, int t0) {
    for (int i = threadIdx.x & 127; i < BN; i += 128) scales[i] = t0 + i < p.t ? __ldcg(p.row_scale + t0 + i) : 0.0f;
}
__device__ __forceinline__ void group_barrier() {
    asm volatile("bar.sync %0, 128;" ::"r"(1 + static_cast<int>(threadIdx.x >> 7)) : "memory");
}

// Two tokens' values of 8 columns at a time, residuals read for four such groups before any is written: nobody but this
// lane touches its elements, which the compiler cannot know.
template <int BN>
__device__ __forceinline__ void store(const PrefillTiles& p, const float (&acc)[BN / 2], const float (&unit)[2],
                                      const LaneRows& rows, const float* scales, int t0, int q) {
    if (!rows.there) return;
    constexpr int kAHEAD = 4;
    const NextnMatrix& m = *rows.matrix[0];
    const bool two = !p.swiglu, there[2] = {rows.row[0] < m.n, two && rows.row[1] < m.n};
#pragma unroll
    for (int j0 = 0; j0 < BN / 8; j0 += kAHEAD) {
        if (t0 + 8 * j0 >= p.t) break;
        float add[kAHEAD][4] = {};
        if (p.residual)
#pragma unroll
            for (int i = 0; i < 4 * kAHEAD; ++i) {
                const int t = t0 + 8 * (j0 + i / 4) + 2 * q + (i & 1), r = i >> 1 & 1;
                if (t < p.t && there[r]) add[i / 4][i % 4] = p.residual[t * p.ldr + rows.row[r]];
            }
#pragma unroll
        for (int i = 0; i < 4 * kAHEAD; i += 4) {
            const int at = 8 * (j0 + i / 4) + 2 * q;
            const float2 scale = *reinterpret_cast<const float2*>(scales + at);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float factor = e ? scale.y : scale.x;
                const float* a = acc + 4 * j0 + i + e;
                const float first = a[0] * (unit[0] * factor), second = a[2] * (unit[1] * factor);
                float* y = m.y + (t0 + at + e) * m.ldy + rows.row[0];
                if (t0 + at + e >= p.t) continue;
                if (there[0]) y[0] = (two ? first : first / (1.0f + expf(-first)) * second) + add[i / 4][e];
                if (there[1]) y[8] = second + add[i / 4][e + 2];
            }
        }
    }
}

}  // namespace nextn
