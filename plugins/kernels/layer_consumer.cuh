// What the consumer warps of the persistent layer kernel do with one product: operands, dot products, sums.
#pragma once
#include "layer_eight.cuh"
#include "layer_tokens.cuh"

namespace nextn {

template <int TOKENS>
struct Consumer {
    static constexpr int NT = kGROUPS<TOKENS>;
    static constexpr bool kONE = TOKENS == 1;
    static constexpr bool kSPLIT = nextn::kSPLIT<TOKENS>;
    static constexpr int kHALF = kWARPS / kCLUSTER;  // superblocks that a block has of a chunk
    using Operand = TokenOperand<kANY_KQUANT, NT>;   // of several tokens
    using Slot = std::conditional_t<kONE, TokenSlot, TokensSlot>;

    const LayerParams& p;
    LayerShared<TOKENS>& s;
    Slot* slots;
    uint32_t ring, barriers;  // addresses of the ring and of its `full`
    uint32_t way;             // to the block whose sums this warp has
    int warp, lane, rank;
    int tile;   // of a stage; two warps have a superblock, each of its tile
    int place;  // among the superblocks that a block has of a chunk
    int own;    // superblock of each chunk that is this warp's
    RingPosition at;
    int pairs;  // of tiles so far
    Operand x;
    float4 norm[2];  // one token: of the values that this warp quantises first

    // The two warps of a superblock.
    __device__ __forceinline__ void meet_other_tile() {
        asm volatile("bar.sync %0, 64;" ::"r"(6 + place) : "memory");
    }

    __device__ __forceinline__ float (&squares(int k))[TOKENS] { return s.own_squares[k & 1][place]; }

    // Before anything of product k. Places of a chunk that are nobody's superblock have sums of zero, by whoever has a
    // warp to spare.
    __device__ __forceinline__ void begin(int k) {
        const Phase& f = p.phase[k];
        if (kSPLIT) own = rank ? f.width + place : place < f.width ? place : kHALF + place;
        if constexpr (kONE) {
            norm[0] = norm[1] = float4{};  // frees their registers until here
            if (p.source[k].norm && own < f.supers && tile == 0) load_norm(p.source[k], own, lane, norm);
        }
    }

    // One token: where this warp's superblock of a chunk is. A warp may still read those of the product before.
    __device__ __forceinline__ TokenSlot& slot_of(int k, int chunk) { return slots[((k & 1) + chunk) * kHALF + place]; }
    // The superblocks of the first two chunks, one for each of the two warps. Later ones have their turn when their
    // tiles have.
    __device__ __forceinline__ void quantize_own(int k) {
        if (tile == 0)
            quantize_first(k);
        else if (kWARPS + own < p.phase[k].supers)
            quantize_chunk(k, 1);
        meet_other_tile();
        trace(p, 5 * k + 4);
    }
    __device__ __forceinline__ void quantize_chunk(int k, int chunk) {
        const RowSource& from = p.source[k];
        const int superblock = chunk * kWARPS + own;
        quantize_later(values_at(from, 0, superblock, lane), last_value(from, 0, superblock), &slot_of(k, chunk), lane);
    }
    __device__ __forceinline__ void quantize_first(int k) {
        if (own >= p.phase[k].supers) {
            if (lane == 0) {
                mbarrier_arrive(s.read + k);
                squares(k)[0] = 0.0f;
            }
            return;
        }
        float4 v[2];
        const float sum = take_values(p, k, 0, own, lane, norm, s.read + k, v);
        if (lane == 0) squares(k)[0] = sum;
        quantize_slot(slot_of(k, 0), lane, v);
        trace(p, 5 * k + 3);
    }

    __device__ __forceinline__ void prefetch_norm() {
        const int line = blockIdx.x * 32 + lane;
        if (threadIdx.x < 32 && line * 32 < p.phase[kGATE_UP].supers * kSUPER)
            prefetch_l2(p.source[kGATE_UP].norm + line * 32);
    }

    // y += this warp's superblock of a stage.  Frees the stage.
    template <int TYPE>
    __device__ __forceinline__ void take_stage(uint32_t rows, int stride, bool mine, const OneToken<TYPE>& one,
                                               float (&y)[NT][2], int lane) {
        const uint32_t full = barriers + 8 * at.stage, from = rows + at.stage * p.stage_bytes;
#pragma unroll
        for (int i = 0; i < kSTAGE_COPIES<TOKENS>; ++i) mbarrier_wait(full + 8 * kMAX_STAGES * i, at.phase);
        if constexpr (kONE) {
            if (mine) y[0][0] = dot_one(from, 8 * stride, own & 1, one, lane, [] {}, y[0][0]);
        } else {
            if (mine) dot_super<TYPE>(from, 8 * stride, own & 1, x, y, lane & 3);
        }
        __syncwarp();
        if (lane == 0) mbarrier_arrive(full + 8 * kSTAGE_COPIES<TOKENS> * kMAX_STAGES);  // `empty` follows `full`
        at.next(p.stages);
    }
    // The same of the tiles of a pair, one after the other in one loop: a body for every tile, or every product, would
    // not fit in the instruction cache, and each is run but a few times.
    template <int TYPE>
    __device__ __forceinline__ void take_pair(const Phase& f, bool mine, const OneToken<TYPE>& one, int count,
                                              float (&y)[kPAIR][NT][2], int lane) {
        constexpr int kSIZE = super_bytes(TYPE);
        const int stride = stage_row(TYPE, f.width), first = rank * f.width * kSIZE & ~15;
        const uint32_t rows = ring + (tile * kTILE_ROWS + (lane >> 2)) * stride + own * kSIZE - first;
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

    // The sums of a pair of tiles are from here on the adders' of the block that has the tiles.
    __device__ __forceinline__ void hand_over(int k, const float (&y)[kPAIR][NT][2], int lane) {
        const int buffer = pairs % kBUFFERS<TOKENS>;
        mbarrier_wait(s.taken[tile] + buffer, (pairs / kBUFFERS<TOKENS> & 1) ^ 1);
        const uint32_t barrier = way + smem_address(s.given + buffer);
        const uint32_t to = way + smem_address(s.partial[buffer] + own * kWARP_FLOATS<TOKENS>);
        if constexpr (!kONE)
            send(to + 16 * lane, make_float4(y[0][0][0], y[1][0][0], y[0][0][1], y[1][0][1]), barrier);
        else if (!(lane & 1))  // lanes q of 0 and 2 have a row each
            send(to + 8 * ((lane >> 2) + 4 * (lane & 3)), make_float2(y[0][0][0], y[1][0][0]), barrier);
        if (lane < TOKENS) send(way + smem_address(&s.squares[buffer][lane][own]), squares(k)[lane], barrier);
    }
    // After the last product: until the adders of both blocks have all there is. What they say of it comes to this
    // block's memory, which is someone else's when the block has ended.
    __device__ __forceinline__ void await_adders() {
        for (const int end = pairs + kBUFFERS<TOKENS>; pairs < end; ++pairs)
            mbarrier_wait(s.taken[tile] + pairs % kBUFFERS<TOKENS>, (pairs / kBUFFERS<TOKENS> & 1) ^ 1);
    }

    // One token, or more than four.
    template <int TYPE>
    __device__ __forceinline__ void multiply_segment(int k, const Segment& g) {
        const Phase& f = p.phase[k];
        const int lane = keep(this->lane);
        const int grid = gridDim.x, step = g.second ? grid : kPAIR * grid, chunks = f.chunks;
        const int begin = first_tile(g, blockIdx.x - rank);
        OneToken<TYPE> one;
        if constexpr (kONE) load_slot(slot_of(k, 0), one, own & 1, lane);
#pragma unroll 1
        for (int u = begin; u < g.tiles; u += step, ++pairs) {
            const int count = g.second || u + grid < g.tiles ? 2 : 1;
            float y[kPAIR][NT][2] = {};
#pragma unroll 1
            for (int c = 0; c < chunks; ++c) {
                const bool mine = c * kWARPS + own < f.supers;
                if (chunks > 1) {
                    if constexpr (kONE) {
                        if (c > 1 && mine && u == begin) {
                            if (tile == (c & 1)) quantize_chunk(k, c);
                            meet_other_tile();
                        }
                        load_slot(slot_of(k, c), one, own & 1, lane);
                    } else {
                        if (mine) take_superblock(f.operands[c * kWARPS + own], p.t, x);
                    }
                }
                take_pair<TYPE>(f, mine, one, count, y, lane);
            }
            if constexpr (kSPLIT) {
                hand_over(k, y, lane);
            } else {
                store_results<TOKENS, NT>(p, s, f, g, u, count, pairs, own, lane, y);
            }
        }
    }

    // Two to four tokens: operands in one place for all products; of several chunks for every pair of tiles.
    __device__ __forceinline__ void multiply_flowing(int k) {
        const Phase& f = p.phase[k];
        const int lane = keep(this->lane), grid = gridDim.x;
        int held = -1;         // chunk of x
        bool shifted = false;  // x is, as odd superblocks of Q6_K need it
        x = Operand{};         // frees its registers until here
        HalfOfTokens half;
#pragma unroll 1
        for (int i = 0; i < f.segments; ++i) {
            const Segment& g = f.segment[i];
            const int step = g.second ? grid : kPAIR * grid;
#pragma unroll 1
            for (int u = first_tile(g, blockIdx.x - rank); u < g.tiles; u += step, ++pairs) {
                const int count = g.second || u + grid < g.tiles ? 2 : 1;
                float y[kPAIR][NT][2] = {};
#pragma unroll 1
                for (int c = 0; c < f.chunks; ++c) {
                    const bool mine = c * kWARPS + own < f.supers;
                    if (c != held) {
                        take_operand(k, c * kWARPS + own, held < 0, c > 0, half);
                        held = c;
                        shifted = false;
                    }
                    if (c + 1 < f.chunks && mine)
                        request_tokens(p, k, tile, min((c + 1) * kWARPS + own, f.supers - 1), lane, half);
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
                hand_over(k, y, lane);
            }
        }
        if (held >= 0) return;
        if (k == p.first) wait_for_predecessor();
        if (lane == 0) mbarrier_arrive(s.read + k);  // no tiles, no rows
    }
    // requested: `half` was.
    __device__ __forceinline__ void take_operand(int k, int superblock, bool first, bool requested,
                                                 HalfOfTokens& half) {
        if (superblock >= p.phase[k].supers) {
            if (first && lane == 0) mbarrier_arrive(s.read + k);
            if (lane < TOKENS) squares(k)[lane] = 0.0f;
            __syncwarp();
            return;
        }
        take_tokens(p, k, tile, superblock, lane, {first ? s.read + k : nullptr, &s.reading}, requested, half);
        TokensSlot& slot = slots[place];
        const int token = tile + 2 * (lane >> 4);
        half.put(slot, token, lane);
        if (p.source[k].norm && (lane & 15) == 0) squares(k)[token] = half.sum;
        meet_other_tile();
        load_slot(slot, x, lane);
        meet_other_tile();  // then the slot may be something else's
        if (first) trace(p, 5 * k + 3);
    }

    // More than four tokens: the first product's rows.
    __device__ __forceinline__ void quantize_first_together() {
        const int k = p.first, supers = p.phase[k].supers, first = first_unit(warp);
        const bool quantises = first < supers * p.t;
        float4 norm[2] = {};
        if (p.source[k].norm && quantises) load_norm(p.source[k], first % supers, lane, norm);
        wait_for_predecessor();
        if (threadIdx.x == 0) s.quantised_begun = GridBarrier(p.sync).bit;  // of the predecessor
        trace(p, 1);
        quantize_together(p, k, supers, warp, lane, norm);
        trace(p, 5 * k + 3);
        if (!p.cleared) meet_quantised(p, s, supers * p.t, quantises, warp, lane);
    }
    // Each warp waits for its superblock of operands. Of several chunks these come later.
    __device__ __forceinline__ void prepare_together(int k) {
        const int supers = p.phase[k].supers;
        x = Operand{};  // frees its registers until here
        if (p.phase[k].chunks == 1 && own < supers) take_superblock(p.phase[k].operands[own], p.t, x);
        if (k == p.first) {
            if (lane == 0) mbarrier_arrive(s.read + k);  // more weights would have come before the operands
            mbarrier_wait(&s.own_clear, 0);
        }
        if (warp < TOKENS) find_factor(p, s, k, warp, lane);
        trace(p, 5 * k + 4);
    }

    __device__ __forceinline__ void multiply(int k) {
        if constexpr (kSPLIT && !kONE) {
            multiply_flowing(k);
        } else {
            if constexpr (kONE)
                quantize_own(k);
            else
                prepare_together(k);
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
