// What the consumer warps of the persistent layer kernel do with one product: operands, dot products, sums.
#pragma once
#include "layer_rows.cuh"
#include "layer_shared.cuh"

namespace nextn {

template <int TOKENS>
struct Consumer {
    static constexpr int NT = ceil_div(TOKENS, kGroupTokens);
    static constexpr bool kONE = TOKENS == 1, kTAKES = kFLOWS<TOKENS> && !kONE;
    using Operand = TokenOperand<kANY_KQUANT, NT>;  // of several tokens

    const LayerParams& p;
    LayerShared<TOKENS>& s;
    TokenSlot* slots;
    uint32_t ring, barriers;  // addresses of the ring and of its `full`
    int warp, lane;
    int own;  // superblock of each chunk that is this warp's
    GridBarrier grid;
    RingPosition at;
    int pairs, turn;  // pairs of tiles so far; the warp that begins the next reduction
    Operand x;
    float4 norm[2];  // of the values that this warp quantises first; not where it takes them when they are due

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
        if constexpr (!kTAKES) {
            const int unit = kONE ? own : warp * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x);
            const int supers = p.phase[k].supers;
            norm[0] = norm[1] = float4{};  // frees their registers until here
            if (p.source[k].norm && unit < supers * p.t) load_norm(p.source[k], unit % supers, lane, norm);
        }
    }

    // The operand of this warp, but for what multiply takes when it is due.
    __device__ __forceinline__ void prepare(int k) {
        if constexpr (kONE) {
            quantize_own(k);
            trace(p, 5 * k + 4);
        } else if constexpr (!kTAKES) {
            quantize_shared<NT>(p, p.source[k], p.phase[k].supers, warp, lane, norm);
            trace(p, 5 * k + 3);
            meet();
            if (k == p.first && lane == 0) mbarrier_arrive(s.read + k);
            x = Operand{};  // frees its registers until here
            if (p.phase[k].chunks == 1) x.load(p.shared, min(own, p.phase[k].supers - 1), lane);
            if (warp < NT * kGroupTokens) find_factor(k);
            trace(p, 5 * k + 4);
        }
    }
    // Of token `warp`; valid after the next consumers_sync.
    __device__ __forceinline__ void find_factor(int k) {
        const int supers = p.phase[k].supers, token = min(warp, p.t - 1);  // absent tokens repeat the last one
        float total = 0.0f;
        if (p.source[k].norm) {
            if (lane < supers) total = __ldcg(p.row_squares + token * kWARPS + lane);
            total = sum_of_squares(total);
        }
        if (lane == 0) s.factor[warp] = p.source[k].norm ? rms_factor(total, supers * kSUPER, p.eps) : 1.0f;
    }

    // One token: the superblock of the first chunk, to its slot. Later chunks have their turn when their tiles have.
    __device__ __forceinline__ void quantize_own(int k) {
        const RowSource& from = p.source[k];
        if (own >= p.phase[k].supers) {
            if (lane == 0) mbarrier_arrive(s.read + k);
            return;
        }
        float4 v[2], squares = {};
        if (from.squares)  // written after the values
            squares = await_all4(head_squares(p, from, 0, 2 * own + (lane >> 4)));
        else if (k != p.first)
            await_all(last_value(from, own));
        if (k == p.first)  // could hold anything
            request_values(from, 0, own, lane, v);
        else
            await_values(values_at(from, 0, own, lane), v);
        arrive_when_there(s.read + k, v[1].w, lane);
        trace_value(p, 5 * k + 2, v[1].w);
        const float sum = scale_values(p, from, v, norm, squares);
        if (lane == 0 && from.norm) s.squares[k][0][own] = sum;
        quantize_slot(slots[own], lane, v);
        trace(p, 5 * k + 3);
    }
    // When that is there, most likely the superblock is.
    __device__ __forceinline__ static const float* last_value(const RowSource& s, int superblock) {
        return s.x + superblock * kSUPER + kSUPER - 1;
    }

    __device__ __forceinline__ void prefetch_norm() {
        const int line = blockIdx.x * 32 + lane;
        if (warp == 0 && line * 32 < p.phase[kGATE_UP].supers * kSUPER)
            prefetch_l2(p.source[kGATE_UP].norm + line * 32);
    }

    // y += this warp's superblock of a stage.  Frees the stage.
    template <int TYPE>
    __device__ __forceinline__ void take_stage(uint32_t rows, int stride, bool mine, const OneToken<TYPE>& one,
                                               float (&y)[NT][2], int lane) {
        const uint32_t full = barriers + 8 * at.stage, from = rows + at.stage * p.stage_bytes;
        mbarrier_wait(full, at.phase);
        if constexpr (kONE) {
            if (mine) y[0][0] = dot_one(from, 8 * stride, own & 1, one, lane, [] {}, y[0][0]);
        } else {
            if (mine) dot_super<TYPE>(from, 8 * stride, own & 1, x, y, lane & 3);
        }
        __syncwarp();
        if (lane == 0) mbarrier_arrive(full + 8 * kMAX_STAGES);  // `empty` follows `full`
        at.next(p.stages);
    }
    // The same of the tiles of a pair, one after the other in one loop: a body for every tile, or every product, would
    // not fit in the instruction cache, and each is run but a few times.
    template <int TYPE>
    __device__ __forceinline__ void take_pair(const Phase& f, bool mine, const OneToken<TYPE>& one, int count,
                                              float (&y)[kPAIR][NT][2], int lane) {
        const int stride = stage_row(TYPE, min(kWARPS, f.supers));
        const uint32_t rows = ring + (lane >> 2) * stride + own * super_bytes(TYPE);
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

    // Where rows flow: the sums of a pair of tiles are the adders' from here on.
    __device__ __forceinline__ void hand_over(const float (&y)[kPAIR][NT][2], int lane) {
        constexpr int kTILE = kTILE_FLOATS<TOKENS>;
        const int buffer = pairs % kBUFFERS<TOKENS>;
        mbarrier_wait(s.taken + buffer, (pairs / kBUFFERS<TOKENS> & 1) ^ 1);
        float* mine = s.partial[buffer] + own * kWARP_FLOATS<TOKENS> + (lane >> 2);
        if constexpr (!kONE) {
            mine += (lane & 3) * (kTILE_ROWS / 2);
#pragma unroll
            for (int i = 0; i < kPAIR; ++i)
#pragma unroll
                for (int h = 0; h < 2; ++h) mine[i * kTILE + h * kTILE / 2] = y[i][0][h];
        } else if (!(lane & 1)) {  // lanes q of 0 and 2 have a row each
            mine += 4 * (lane & 3);
            mine[0] = y[0][0][0];
            mine[kTILE] = y[1][0][0];
        }
        __syncwarp();
        if (lane == 0) mbarrier_arrive(s.given + buffer);
    }

    // Where they do not: an output a thread. Warps take turns, so that none falls behind.
    __device__ __forceinline__ void finish(const Phase& f, const Segment& g, int u, int count,
                                           const float (&y)[kPAIR][NT][2], int lane) {
        constexpr int kTILE = kTILE_FLOATS<TOKENS>, kWARP = kWARP_FLOATS<TOKENS>;
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

    // One token, or more than four.
    template <int TYPE>
    __device__ __forceinline__ void multiply_segment(int k, const Segment& g) {
        const Phase& f = p.phase[k];
        const int lane = keep(this->lane);
        const int grid = gridDim.x, step = g.second ? grid : kPAIR * grid, chunks = f.chunks;
        OneToken<TYPE> one;
        if constexpr (kONE) load_slot(slots[min(own, f.supers - 1)], one, own & 1, lane);
#pragma unroll 1
        for (int u = first_tile(g); u < g.tiles; u += step, ++pairs) {
            const int count = g.second || u + grid < g.tiles ? 2 : 1;
            float y[kPAIR][NT][2] = {};
#pragma unroll 1
            for (int c = 0; c < chunks; ++c) {
                const bool mine = c * kWARPS + own < f.supers;
                const int sb = mine ? c * kWARPS + own : 0;
                if constexpr (!kONE) {
                    if (chunks > 1) x.load(p.shared, sb, lane);
                } else if (chunks > 1) {
                    const RowSource& from = p.source[k];
                    if (c && mine && u == first_tile(g))
                        quantize_later(values_at(from, 0, sb, lane), last_value(from, sb), slots + sb, lane);
                    load_slot(slots[sb], one, own & 1, lane);
                }
                take_pair<TYPE>(f, mine, one, count, y, lane);
            }
            if constexpr (kONE)
                hand_over(y, lane);
            else
                finish(f, g, u, count, y, lane);
        }
    }

    // Two to four tokens: operands in one place for all products; of several chunks for every pair of tiles.
    __device__ __forceinline__ void multiply_flowing(int k) {
        const Phase& f = p.phase[k];
        const int lane = keep(this->lane), grid = gridDim.x;
        int held = -1;         // chunk of x
        bool shifted = false;  // x is, as odd superblocks of Q6_K need it
        x = Operand{};         // frees its registers until here
#pragma unroll 1
        for (int i = 0; i < f.segments; ++i) {
            const Segment& g = f.segment[i];
            const int step = g.second ? grid : kPAIR * grid;
#pragma unroll 1
            for (int u = first_tile(g); u < g.tiles; u += step, ++pairs) {
                const int count = g.second || u + grid < g.tiles ? 2 : 1;
                float y[kPAIR][NT][2] = {};
#pragma unroll 1
                for (int c = 0; c < f.chunks; ++c) {
                    const bool mine = c * kWARPS + own < f.supers;
                    if (c != held) {
                        take_operand(k, c * kWARPS + own, held < 0);
                        held = c;
                        shifted = false;
                    }
                    if (shifted != (g.type == kNEXTN_Q6_K && own & 1)) {
                        shift_operand(x, lane, shifted);
                        shifted = !shifted;
                    }
                    if (g.type == kNEXTN_Q4_K)
                        take_pair<kNEXTN_Q4_K>(f, mine, {}, count, y, lane);
                    else if (g.type == kNEXTN_Q5_K)
                        take_pair<kNEXTN_Q5_K>(f, mine, {}, count, y, lane);
                    else
                        take_pair<kNEXTN_Q6_K>(f, mine, {}, count, y, lane);
                }
                hand_over(y, lane);
            }
        }
        if (held >= 0) return;
        if (k == p.first) wait_for_predecessor();
        if (lane == 0) mbarrier_arrive(s.read + k);  // no tiles, no rows
    }
    __device__ __forceinline__ void take_operand(int k, int superblock, bool first) {
        if (superblock >= p.phase[k].supers) {
            if (first && lane == 0) mbarrier_arrive(s.read + k);
            return;
        }
        const float sum = take_tokens(p, k, superblock, lane, {first ? s.read + k : nullptr, &s.reading}, x);
        if (p.source[k].norm && (lane & 7) == 0) s.squares[k][lane >> 3][own] = sum;
    }

    __device__ __forceinline__ void multiply(int k) {
        if constexpr (kTAKES) {
            multiply_flowing(k);
        } else {
#pragma unroll 1
            for (int i = 0; i < p.phase[k].segments; ++i) {
                const Segment& g = p.phase[k].segment[i];
                if (g.type == kNEXTN_Q4_K)
                    multiply_segment<kNEXTN_Q4_K>(k, g);
                else if (g.type == kNEXTN_Q5_K)
                    multiply_segment<kNEXTN_Q5_K>(k, g);
                else
                    multiply_segment<kNEXTN_Q6_K>(k, g);
            }
        }
    }
};

}  // namespace nextn
