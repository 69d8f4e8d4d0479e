// What the consumer warps of the persistent layer kernel do with one product: operands, dot products, sums.
#pragma once
#include "layer_delta.cuh"
#include "layer_rows.cuh"

namespace nextn {

// A tile's sums of one warp: [token][row], of one token 16 floats. partial: [buffer][superblock's place][tile of the
// pair].
template <bool ONE, int NT>
constexpr int kTILE_FLOATS = ONE ? kTILE_ROWS : NT * kGroupTokens * kTILE_ROWS;
template <bool ONE, int NT>
constexpr int kWARP_FLOATS = kPAIR * kTILE_FLOATS<ONE, NT>;
template <bool ONE>
constexpr int kBUFFERS = ONE ? 4 : 2;

// One per kernel. own_clear and all_clear are used once a launch.
template <bool ONE, int NT>
struct LayerShared {
    float partial[kBUFFERS<ONE>][kWARPS * kWARP_FLOATS<ONE, NT>];
    float squares[kPHASES][kWARPS];    // of one token's row, by superblock
    float factor[NEXTN_MAX_DECODE_T];  // of several tokens
    DeltaWindow window;
    uint64_t full[kMAX_STAGES], empty[kMAX_STAGES];       // of the weight ring
    uint64_t given[kBUFFERS<ONE>], taken[kBUFFERS<ONE>];  // of partial, one token
    uint64_t go;                                          // several tokens: the first rows have been read
    uint64_t own_clear, all_clear;                        // see clear_and_fetch
};

// The value in a register, from here on: the compiler would work it out anew for every tile, or what follows from it
// before everything else, and run out of registers.
__device__ __forceinline__ int keep(int v) {
    asm volatile("" : "+r"(v));
    return v;
}

// Over the superblocks of a row, one a lane.
__device__ __forceinline__ float sum_of_squares(float v) {
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) v = __fadd_rn(v, __shfl_xor_sync(~0u, v, d));
    return v;
}

// An output from the warps' sums, STRIDE apart: of a product, or of gate and up.
template <int STRIDE>
__device__ __forceinline__ float result_of(const float* sums, const float* up_sums, bool gate_and_up, float factor,
                                           bool has_residual, float residual) {
    const auto total = [&](const float* from) {
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < kWARPS; ++w) sum = __fadd_rn(sum, from[w * STRIDE]);
        return __fmul_rn(sum, factor);
    };
    float sum = total(sums);
    if (gate_and_up) sum = __fmul_rn(__fdiv_rn(sum, __fadd_rn(1.0f, expf(-sum))), total(up_sums));
    return has_residual ? __fadd_rn(residual, sum) : sum;
}

template <bool ONE, int NT>
struct Consumer {
    using Operand = TokenOperand<kANY_KQUANT, NT>;  // of several tokens

    const LayerParams& p;
    LayerShared<ONE, NT>& s;
    TokenSlot* slots;
    const uint8_t* ring;
    int warp, lane;
    int own;  // superblock of each chunk that is this warp's
    GridBarrier grid;
    RingPosition at;
    int pairs, turn;  // pairs of tiles so far; the warp that begins the next reduction
    Operand x;
    float4 norm[2];  // of the values that this warp quantises first

    // All blocks' consumers.
    __device__ __forceinline__ void meet() {
        consumers_sync();
        if (threadIdx.x == 0) {
            grid.arrive();
            grid.wait();
        }
        consumers_sync();
    }

    // Before the rows can be there.
    __device__ __forceinline__ void request_norm(int k) {
        const int unit = ONE ? own : warp * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x);
        const int supers = p.phase[k].supers;
        norm[0] = norm[1] = float4{};  // frees their registers until here
        if (p.source[k].norm && unit < supers * p.t) load_norm(p.source[k], unit % supers, lane, norm);
    }

    // The operand of this warp: one superblock of each chunk, of one token in its slots.
    __device__ __forceinline__ void prepare(int k) {
        if constexpr (ONE) {
            quantize_own(k);
        } else {
            const Phase& f = p.phase[k];
            quantize_shared<NT>(p, p.source[k], f.supers, warp, lane, norm);
            trace(p, 5 * k + 3);
            meet();
            if (k == p.first && lane == 0) mbarrier_arrive(&s.go);
            x = Operand{};  // frees its registers until here
            if (f.chunks == 1) x.load(p.shared, min(own, f.supers - 1), lane);
            if (warp < NT * kGroupTokens) find_factor(k);
        }
    }
    // Of token `warp`; valid after the next consumers_sync.
    __device__ __forceinline__ void find_factor(int k) {
        const int supers = p.phase[k].supers,
                  token = min(warp, p.t - 1);  // columns of absent tokens repeat the last one's
        float total = 0.0f;
        if (p.source[k].norm) {
            if (lane < supers) total = __ldcg(p.row_squares + token * kWARPS + lane);
            total = sum_of_squares(total);
        }
        if (lane == 0) s.factor[warp] = p.source[k].norm ? rms_factor(total, supers * kSUPER, p.eps) : 1.0f;
    }

    // The superblock of the first chunk. Later chunks of a product have their turn when their tiles have.
    __device__ __forceinline__ void quantize_own(int k) {
        const RowSource& from = p.source[k];
        if (own >= p.phase[k].supers) return;
        float4 v[2];
        if (k == p.first)
            request_values(from, 0, own, lane, v);
        else
            await_superblock(values_at(from, 0, own, lane), last_value(from, own), v);
        trace_values(k, v[1].w);
        const float sum = scale_values(p, from, 0, own, lane, v, norm);
        if (lane == 0 && from.norm) s.squares[k][own] = sum;
        quantize_slot(slots[own], lane, v);
        trace(p, 5 * k + 3);
    }
    __device__ __forceinline__ static const float* last_value(const RowSource& s, int superblock) {
        return s.x + superblock * kSUPER + kSUPER - 1;
    }

    __device__ __forceinline__ void trace_values([[maybe_unused]] int k, [[maybe_unused]] float last) {
#ifdef NEXTN_LAYER_TRACE
        asm volatile("" ::"f"(last) : "memory");
        trace(p, 5 * k + 2);
#endif
    }
    __device__ __forceinline__ void prefetch_norm() {
        const int line = blockIdx.x * 32 + lane;
        if (warp == 0 && line * 32 < p.phase[kGATE_UP].supers * kSUPER)
            prefetch_l2(p.source[kGATE_UP].norm + line * 32);
    }

    // y += this warp's superblock of a stage.  Frees the stage.
    template <int TYPE>
    __device__ __forceinline__ void take_stage(const uint8_t* rows, int stride, bool mine, const OneToken<TYPE>& one,
                                               float (&y)[NT][2], int lane) {
        mbarrier_wait(s.full + at.stage, at.phase);
        const uint8_t* from = rows + at.stage * p.stage_bytes;
        if constexpr (ONE) {
            if (mine) y[0][0] = dot_one(from, 8 * stride, own & 1, one, lane, [] {}, y[0][0]);
        } else {
            if (mine) dot_super<TYPE>(from, 8 * stride, own & 1, x, y, lane & 3);
        }
        __syncwarp();
        if (lane == 0) mbarrier_arrive(s.empty + at.stage);
        at.next(p.stages);
    }

    // One token: the sums of a pair of tiles are the adders' from here on.
    __device__ __forceinline__ void hand_over(const float (&y)[kPAIR][NT][2], int lane) {
        const int buffer = pairs % kBUFFERS<ONE>;
        mbarrier_wait(s.taken + buffer, (pairs / kBUFFERS<ONE> & 1) ^ 1);
        if (!(lane & 1)) {  // lanes q of 0 and 2 have a row each
            float* mine = s.partial[buffer] + own * kWARP_FLOATS<ONE, NT> + (lane >> 2) + 4 * (lane & 3);
            mine[0] = y[0][0][0];
            mine[kTILE_ROWS] = y[1][0][0];
        }
        __syncwarp();
        if (lane == 0) mbarrier_arrive(s.given + buffer);
    }

    // Several tokens: stores the sums over the warps of a pair of tiles (or of gate and up), an output a thread. Warps
    // take turns, so that none falls behind.
    __device__ __forceinline__ void finish(const Phase& f, const Segment& g, int u, int count,
                                           const float (&y)[kPAIR][NT][2], int lane) {
        constexpr int kTILE = kTILE_FLOATS<ONE, NT>, kWARP = kWARP_FLOATS<ONE, NT>;
        float* partial = s.partial[pairs & 1];
        float* mine = partial + own * kWARP + (lane & 3) * kTILE_ROWS + (lane >> 2);
#pragma unroll
        for (int i = 0; i < kPAIR * NT; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) mine[i * kGroupTokens * kTILE_ROWS + 8 * h] = y[i / NT][i % NT][h];
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
        partial += from;
        g.y[at] = result_of<kWARP>(partial, partial + kTILE, g.second, s.factor[token], f.residual, residual);
    }

    // Tiles one after the other in one loop: a body for every pair, or every product, would not fit in the instruction
    // cache, and each is run but a few times.
    template <int TYPE>
    __device__ __forceinline__ void multiply(int k, const Segment& g) {
        const Phase& f = p.phase[k];
        const int lane = keep(this->lane);
        const int grid = gridDim.x, step = g.second ? grid : kPAIR * grid, chunks = f.chunks;
        const int stride = stage_row(TYPE, min(kWARPS, f.supers));
        const uint8_t* rows = ring + (lane >> 2) * stride + own * super_bytes(TYPE);
        OneToken<TYPE> one;
        if constexpr (ONE) load_slot(slots[min(own, f.supers - 1)], one, own & 1, lane);
#pragma unroll 1
        for (int u = first_tile(g); u < g.tiles; u += step, ++pairs) {
            const int count = g.second || u + grid < g.tiles ? 2 : 1;
            float y[kPAIR][NT][2] = {};
#pragma unroll 1
            for (int c = 0; c < chunks; ++c) {
                const bool mine = c * kWARPS + own < f.supers;
                if (chunks > 1) {
                    const int sb = mine ? c * kWARPS + own : 0;
                    if constexpr (ONE) {
                        if (c && mine && u == first_tile(g))
                            quantize_later(values_at(p.source[k], 0, sb, lane), last_value(p.source[k], sb), slots + sb,
                                           lane);
                        load_slot(slots[sb], one, own & 1, lane);
                    } else
                        x.load(p.shared, sb, lane);
                }
#pragma unroll 1
                for (int i = 0; i < kPAIR; ++i) {
                    if (i < count) take_stage<TYPE>(rows, stride, mine, one, y[0], lane);
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
            if constexpr (ONE)
                hand_over(y, lane);
            else
                finish(f, g, u, count, y, lane);
        }
    }
    __device__ __forceinline__ void multiply(int k) {
        const Phase& f = p.phase[k];
#pragma unroll 1
        for (int i = 0; i < f.segments; ++i) {
            const Segment& g = f.segment[i];
            if (g.type == kNEXTN_Q4_K)
                multiply<kNEXTN_Q4_K>(k, g);
            else if (g.type == kNEXTN_Q5_K)
                multiply<kNEXTN_Q5_K>(k, g);
            else
                multiply<kNEXTN_Q6_K>(k, g);
        }
    }
};

}  // namespace nextn
