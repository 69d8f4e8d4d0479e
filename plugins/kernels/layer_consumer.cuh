// What the consumer warps of the persistent layer kernel do with one product: operands, dot products, sums.
#pragma once
#include "layer_delta.cuh"

namespace nextn {

// partial: [buffer][superblock's place][tile][token][row]
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
    int own;  // superblock of each chunk that is this warp's
    RingPosition at;
    int buffer, turn;  // of partial; the warp that begins the next reduction
    Operand x;
    float4 norm[2];  // of the values that this warp quantises first

    // Before the rows can be there.
    __device__ __forceinline__ void request_norm(const Phase& f, const RowSource& from) {
        const int unit = ONE ? own : warp * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x);
        norm[0] = norm[1] = float4{};  // frees their registers until here
        if (from.norm && unit < f.supers * p.t) load_norm(from, unit % f.supers, lane, norm);
    }

    // The operand of this warp: one superblock of each chunk. Rows of several tokens are written before a grid barrier.
    // factor: valid after the next consumers_sync.
    __device__ __forceinline__ void prepare(const Phase& f, const RowSource& from, GridBarrier& grid, bool first) {
        if constexpr (ONE) {
            float4 v[3][2] = {};
#pragma unroll
            for (int j = 0; j < 3; ++j)
                if (own + j * kWARPS < f.supers) request_values(from, 0, own + j * kWARPS, lane, v[j]);
            if (first && lane == 0) {
                asm volatile("" ::"f"(v[0][1].w) : "memory");  // not before they are here
                mbarrier_arrive(&s.go);
            }
            trace_values(f, v[0][1].w);
#pragma unroll 1
            for (int sb = own; sb < f.supers; sb += kWARPS) {
                const float sum = quantize_slot(p, from, sb, slots[sb], lane, v[0], norm);
                if (lane == 0 && from.norm) s.squares[sb] = sum;
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    v[0][h] = v[1][h];
                    v[1][h] = v[2][h];
                }
                if (sb + 3 * kWARPS < f.supers) request_values(from, 0, sb + 3 * kWARPS, lane, v[2]);
            }
            trace(p, 5 * static_cast<int>(&f - p.phase) + 3);
            if (from.norm && warp) asm volatile("bar.arrive 6, %0;" ::"n"(kTHREADS) : "memory");
        } else {
            quantize_shared<NT>(p, from, f.supers, warp, lane, norm);
            trace(p, 5 * static_cast<int>(&f - p.phase) + 3);
            grid.sync();
            if (first && lane == 0) mbarrier_arrive(&s.go);
        }
        x = Operand{};  // frees its registers until here
        if (f.chunks == 1) load_chunk(min(own, f.supers - 1));
        if (warp >= (ONE ? 1 : NT * kGroupTokens)) return;
        const int token = min(warp, p.t - 1);  // columns of tokens that are not there repeat the last one's
        float total = 0.0f;
        if (from.norm) {
            if (ONE) asm volatile("bar.sync 6, %0;" ::"n"(kTHREADS) : "memory");
            if (lane < f.supers) total = ONE ? s.squares[lane] : __ldcg(p.row_squares + token * kWARPS + lane);
#pragma unroll
            for (int d = 1; d < 32; d <<= 1) total = __fadd_rn(total, __shfl_xor_sync(~0u, total, d));
        }
        if (lane == 0) s.factor[warp] = from.norm ? rms_factor(total, f.supers * kSUPER, p.eps) : 1.0f;
    }

    __device__ __forceinline__ void trace_values([[maybe_unused]] const Phase& f, [[maybe_unused]] float last) {
#ifdef NEXTN_LAYER_TRACE
        asm volatile("" ::"f"(last) : "memory");
        trace(p, 5 * static_cast<int>(&f - p.phase) + 2);
#endif
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

    // Stores the sums over the warps of a pair of tiles (or of gate and up), an output a thread. Warps take turns, so that
    // none falls behind.
    __device__ __forceinline__ void finish(const Phase& f, const Segment& g, int u, int count) {
        constexpr int kTILE = kTILE_FLOATS * NT;
        const bool two = !g.second && count == 2;
        const int outputs = (two ? 2 : 1) * kTILE_ROWS * p.t, place = (warp - turn) & (kWARPS - 1);
        turn += (outputs + 31) / 32;
        const bool works = place * 32 < outputs;
        int64_t at = 0;
        int from = 0, token = 0;
        bool stored = false;
        float residual = 0.0f;
        if (works) {
            const int e = place * 32 + lane, row = e & (kTILE_ROWS - 1), i = two ? (e >> 4) & 1 : 0;
            const int n = (u + i * static_cast<int>(gridDim.x)) * kTILE_ROWS + row;
            token = e >> (two ? 5 : 4);
            from = i * kTILE + token * kTILE_ROWS + row;
            at = token * f.ldy + n;
            stored = e < outputs && n < g.n;
            if (f.residual && stored) residual = __ldcg(f.residual + at);
        }
        // One barrier per pair is enough: `partial` has two buffers, and a warp reaches the next barrier only after it
        // has read this one's sums.
        consumers_sync();
        if (!works || !stored) return;
        const float* partial = s.partial[buffer] + from;
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < kWARPS; ++w) sum = __fadd_rn(sum, partial[w * kWARP_FLOATS<NT>]);
        sum = __fmul_rn(sum, s.factor[token]);
        if (g.second) {
            float up = 0.0f;
#pragma unroll
            for (int w = 0; w < kWARPS; ++w) up = __fadd_rn(up, partial[w * kWARP_FLOATS<NT> + kTILE]);
            up = __fmul_rn(up, s.factor[token]);
            sum = __fmul_rn(__fdiv_rn(sum, __fadd_rn(1.0f, expf(-sum))), up);
        }
        g.y[at] = f.residual ? __fadd_rn(residual, sum) : sum;
    }

    // Tiles one after the other in one loop: a body for every pair, or every product, would not fit in the instruction
    // cache, and each is run but a few times.
    template <int TYPE>
    __device__ __forceinline__ void multiply(const Phase& f, const Segment& g) {
        const int grid = gridDim.x, step = g.second ? grid : kPAIR * grid, chunks = f.chunks;
        const int stride = stage_row(TYPE, min(kWARPS, f.supers));
        const uint8_t* rows = ring + (lane >> 2) * stride + own * super_bytes(TYPE);
#pragma unroll 1
        for (int u = first_tile(g); u < g.tiles; u += step, buffer ^= 1) {
            const int count = g.second || u + grid < g.tiles ? 2 : 1;
            float y[kPAIR][NT][2] = {};
#pragma unroll 1
            for (int c = 0; c < chunks; ++c) {
                const bool mine = c * kWARPS + own < f.supers;
                if (chunks > 1) load_chunk(mine ? c * kWARPS + own : 0);
#pragma unroll 1
                for (int i = 0; i < kPAIR; ++i) {
                    if (i < count) {
                        mbarrier_wait(s.full + at.stage, at.phase);
                        if (mine) dot_super<TYPE, NT>(rows + at.stage * p.stage_bytes, 8 * stride, own & 1, x, y[0], lane & 3);
                        __syncwarp();
                        if (lane == 0) mbarrier_arrive(s.empty + at.stage);
                        at.next(p.stages);
                    }
#pragma unroll
                    for (int n = 0; n < NT; ++n)
#pragma unroll
                        for (int h = 0; h < 2; ++h) {
                            const float other = y[1][n][h];
                            y[1][n][h] = y[0][n][h];
                            y[0][n][h] = other;
                        }
                }
            }
            float* mine = s.partial[buffer] + own * kWARP_FLOATS<NT> + (lane & 3) * kTILE_ROWS + (lane >> 2);
#pragma unroll
            for (int i = 0; i < kPAIR; ++i)
#pragma unroll
                for (int n = 0; n < NT; ++n)
#pragma unroll
                    for (int h = 0; h < 2; ++h) mine[(i * NT + n) * kTILE_FLOATS + 8 * h] = y[i][n][h];
            finish(f, g, u, count);
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
