// What the consumer warps of the persistent layer kernel do with one product: operands, dot products, sums.
#pragma once
#include "layer_delta.cuh"

namespace nextn {

// partial: [buffer][warp][tile][group][row half][lane]
constexpr int kTILE_FLOATS = 64;
template <int NT>
constexpr int kWARP_FLOATS = kPAIR * NT * kTILE_FLOATS;

// One per kernel: `scratch` holds TokenSlots (one token) or a DeltaShared.
template <int NT>
struct LayerShared {
    float partial[2][kWARPS * kWARP_FLOATS<NT>];
    float squares[kWARPS], factor[NEXTN_MAX_DECODE_T];
    DeltaWindow window;
    uint64_t full[kMAX_STAGES], empty[kMAX_STAGES], go;
};

template <bool ONE, int NT>
struct Consumer {
    using Operand = TokenOperand<kANY_KQUANT, NT>;

    const LayerParams& p;
    LayerShared<NT>& s;
    TokenSlot* slots;
    const uint8_t* ring;
    int warp, lane;
    RingPosition at;
    int buffer, turn;  // of partial; the warp that begins the next reduction
    Operand x;

    // The operand of this warp: one superblock of each chunk. Rows of several tokens are written before a grid barrier.
    // factor: valid after the next consumers_sync.
    __device__ __forceinline__ void prepare(const Phase& f, const RowSource& from, GridBarrier& grid, bool first) {
        if constexpr (ONE) {
            float4 next[2];
            if (warp < f.supers) request_values(from, 0, warp, lane, next);
            if (first && lane == 0) {
                asm volatile("" ::"f"(next[1].w) : "memory");  // not before they are here
                mbarrier_arrive(&s.go);
            }
#pragma unroll 1
            for (int sb = warp; sb < f.supers; sb += kWARPS) {
                float4 v[2] = {next[0], next[1]};
                if (sb + kWARPS < f.supers) request_values(from, 0, sb + kWARPS, lane, next);
                const float sum = quantize_slot(p, from, sb, slots[sb], lane, v);
                if (lane == 0 && from.norm) s.squares[sb] = sum;
            }
            consumers_sync();
        } else {
            quantize_shared<NT>(p, from, f.supers, warp, lane);
            grid.sync();
            if (first && lane == 0) mbarrier_arrive(&s.go);
        }
        if (f.chunks == 1 && warp < f.supers) load_chunk(warp);
        if (warp >= NT * kGroupTokens) return;
        const int token = min(warp, p.t - 1);  // columns of tokens that are not there repeat the last one's
        float total = 0.0f;
        if (from.norm) {
            if (lane < f.supers) total = ONE ? s.squares[lane] : __ldcg(p.row_squares + token * kWARPS + lane);
#pragma unroll
            for (int d = 1; d < 32; d <<= 1) total = __fadd_rn(total, __shfl_xor_sync(~0u, total, d));
        }
        if (lane == 0) s.factor[warp] = from.norm ? rms_factor(total, f.supers * kSUPER, p.eps) : 1.0f;
    }

    __device__ __forceinline__ void prefetch_norm() {
        const int line = blockIdx.x * 32 + lane;
        if (warp == 0 && line * 32 < p.phase[kGATE_UP].supers * kSUPER)
            prefetch_l2(p.source[kGATE_UP].norm + line * 32);
    }

    __device__ __forceinline__ void load_chunk(int sb) {
        if constexpr (ONE)
            load_slot(slots[sb], x, lane);
        else
            x.load(p.shared, sb, lane);
    }

    // Sums over the warps of a pair of tiles (or of gate and up), an output a thread. Warps take turns, so that none falls
    // behind.
    __device__ __forceinline__ void reduce(const Phase& f, const Segment& g, const float* partial, int u, int count) {
        constexpr int kTILE = kTILE_FLOATS * NT;
        const int outputs = g.second ? kTILE : count * kTILE;
        const int e = ((warp - turn) & (kWARPS - 1)) * 32 + lane;
        turn += outputs / 32;
        if (e >= outputs) return;
        const int half = (e >> 5) & 1, token = (e >> 6) % NT * kGroupTokens + (e & 3);
        const int n = (u + (e / kTILE) * static_cast<int>(gridDim.x)) * kTILE_ROWS + ((e & 31) >> 2) + 8 * half;
        const int64_t at = token * f.ldy + n;
        const bool stored = token < p.t && n < g.n;
        const float residual = f.residual && stored ? __ldcg(f.residual + at) : 0.0f;
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < kWARPS; ++w) sum = __fadd_rn(sum, partial[w * kWARP_FLOATS<NT> + e]);
        sum = __fmul_rn(sum, s.factor[token]);
        if (g.second) {
            float up = 0.0f;
#pragma unroll
            for (int w = 0; w < kWARPS; ++w) up = __fadd_rn(up, partial[w * kWARP_FLOATS<NT> + kTILE + e]);
            up = __fmul_rn(up, s.factor[token]);
            sum = __fmul_rn(__fdiv_rn(sum, __fadd_rn(1.0f, expf(-sum))), up);
        }
        if (stored) g.y[at] = f.residual ? __fadd_rn(residual, sum) : sum;
    }

    // Tiles one after the other in one loop: a body for every pair, or every product, would not fit in the instruction
    // cache, and each is run but a few times.
    template <int TYPE>
    __device__ __forceinline__ void multiply(const Phase& f, const Segment& g) {
        const int grid = gridDim.x, step = g.second ? grid : kPAIR * grid;
        const int stride = stage_row(TYPE, min(kWARPS, f.supers));
        const uint8_t* own = ring + (lane >> 2) * stride + warp * super_bytes(TYPE);
#pragma unroll 1
        for (int u = first_tile(g); u < g.tiles; u += step, buffer ^= 1) {
            const int count = g.second || u + grid < g.tiles ? 2 : 1;
#pragma unroll 1
            for (int i = 0; i < count; ++i) {
                float y[NT][2] = {};
#pragma unroll 1
                for (int c = 0; c < f.chunks; ++c) {
                    const bool mine = c * kWARPS + warp < f.supers;
                    if (f.chunks > 1 && mine) load_chunk(c * kWARPS + warp);
                    mbarrier_wait(s.full + at.stage, at.phase);
                    if (mine) dot_super<TYPE, NT>(own + at.stage * p.stage_bytes, 8 * stride, warp & 1, x, y, lane & 3);
                    __syncwarp();
                    if (lane == 0) mbarrier_arrive(s.empty + at.stage);
                    at.next(p.stages);
                }
                float* mine = s.partial[buffer] + warp * kWARP_FLOATS<NT> + i * NT * kTILE_FLOATS + lane;
#pragma unroll
                for (int n = 0; n < NT; ++n)
#pragma unroll
                    for (int h = 0; h < 2; ++h) mine[n * kTILE_FLOATS + 32 * h] = y[n][h];
            }
            // One barrier per pair is enough: `partial` has two buffers, and a warp reaches the next barrier only after
            // it has read this one's sums.
            consumers_sync();
            reduce(f, g, s.partial[buffer], u, count);
        }
    }
    __device__ __forceinline__ void multiply(const Phase& f) {
#pragma unroll 1
        for (int i = 0; i < f.segments; ++i) {
            const Segment& g = f.segment[i];
            if (g.type == kNEXTN_Q4_K)
                multiply<kNEXTN_Q4_K>(f, g);
            else if (g.type == kNEXTN_Q5_K)
                multiply<kNEXTN_Q5_K>(f, g);
            else
                multiply<kNEXTN_Q6_K>(f, g);
        }
    }
};

}  // namespace nextn
