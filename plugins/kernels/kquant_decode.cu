// Decode matmul: streams weights once through a shared-memory ring and meets up to 8 tokens on the way.
//
//   block = ks consumer warps + 1 producer warp, persistent; a tile is 16 rows, blocks take them in turns.
//   ring stage = 16 rows x ks superblocks of one tile, a bulk copy for 1 to 4 rows (16-byte cp.async below 9.0)
//   a consumer warp owns one superblock of each chunk of ks of every tile, its activations come from quantize_rows and live
//   in registers; rows of one chunk have kernels of their own (kquant_decode_one.cu, kquant_decode_few.cu, same bits)
//   an RMSNorm's 1/rms is a factor of the whole row, so it is applied to the finished sums
//   a pair of tiles walks all chunks, then the warps' partial sums meet in shared memory in warp order
// Every choice that fixes the order of a sum (ks, chunks) follows from k, type and device, never from t.
#include <type_traits>
#include "kquant_decode.cuh"
#include "kquant_dot.cuh"

namespace nextn {
namespace {

constexpr int kPAIR = 2;

template <int TYPE, int NT>
__device__ __forceinline__ void dot_tile(const DecodeParams& p, const uint8_t* stage, const Tile& tile, int c, int warp,
                                         int lane, const TokenOperand<TYPE, NT>& x, float (&y)[NT][2]) {
    const int g = lane >> 2, q = lane & 3;
    const uint8_t* r0 = stage + offset_of_row<TYPE>(p, g) + warp * kSuperBytes<TYPE>;
    const uint8_t* r8 = r0 + offset_of_second<TYPE>(p);
    if constexpr (TYPE == kNEXTN_Q6_K) {
        const DecodeMatrix& m = p.matrix[tile.matrix];
        r0 += piece_at<TYPE>(p, m, tile.row + g, c).skew;
        r8 += piece_at<TYPE>(p, m, tile.row + g + 8, c).skew;
        const uintptr_t both = reinterpret_cast<uintptr_t>(r0) | reinterpret_cast<uintptr_t>(r8);
        if (__all_sync(~0u, (both & 2) == 0))
            dot_q6_k<true>(r0, r8, x, y, q);
        else
            dot_q6_k<false>(r0, r8, x, y, q);
    } else {
        dot_affine<TYPE>(r0, r8, x, y, q);
    }
}

// Sum the warps' partials of up to kPAIR tiles.  partial: [warp][tile][group][row half][lane]; factor: [token].
template <int NT>
__device__ __forceinline__ void reduce_pair(const DecodeParams& p, const UnitRange& units, const float* partial,
                                            const float* factor, int first, int count) {
    constexpr int kTILE = 64 * NT;
    const int outputs = p.swiglu ? kTILE : count * kTILE;
    for (int e = threadIdx.x; e < outputs; e += 32 * p.ks) {
        float sum = 0.0f, up = 0.0f;
        for (int w = 0; w < p.ks; ++w) sum = __fadd_rn(sum, partial[w * kPAIR * kTILE + e]);
        const int lane = e & 31, half = (e >> 5) & 1, token = (e >> 6) % NT * kGroupTokens + (lane & 3), i = e / kTILE;
        sum = __fmul_rn(sum, factor[token]);
        if (p.swiglu) {
            for (int w = 0; w < p.ks; ++w) up = __fadd_rn(up, partial[w * kPAIR * kTILE + kTILE + e]);
            up = __fmul_rn(up, factor[token]);
            sum = __fmul_rn(__fdiv_rn(sum, __fadd_rn(1.0f, expf(-sum))), up);
        }
        store(p, tile_at(p, units.tile(p, first + i)), row_of_lane(p, lane >> 2, half), token, sum);
    }
}

template <int TYPE, int NT>
__global__ void __launch_bounds__(32 * (kMAX_KS + 1), 1) kquant_decode_kernel(const __grid_constant__ DecodeParams p) {
    extern __shared__ __align__(128) uint8_t smem[];
    __shared__ __align__(8) Barriers ring;
    __shared__ float factor[NEXTN_MAX_DECODE_T];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int stage_size = stage_bytes(p);
    launch_dependents();
    if (threadIdx.x == 0) ring.init(p);
    __syncthreads();
    const UnitRange units(p);
    const int tiles = units.tiles(p);
    StageCursor at;
    if (warp == p.ks) {  // the producer: weights do not depend on the launch before
        for (int v = 0; v < tiles; v += kPAIR)
            for (int c = 0; c < p.chunks; ++c)
                for (int i = 0; i < kPAIR && v + i < tiles; ++i, at.next(p.stages)) {
                    mbarrier_wait(ring.empty + at.stage, at.phase ^ 1);
                    const Tile tile = tile_at(p, units.tile(p, v + i));
                    produce<TYPE>(p, smem + at.stage * stage_size, ring.full + at.stage, tile, c, lane);
                }
        return;
    }
    wait_for_predecessor();
    const int own = own_superblock(warp, p.ks);
    TokenOperand<TYPE, NT> x;
    if (p.chunks == 1) x.load(p.quantized, own, lane);
    if (threadIdx.x < kGroupTokens * NT) factor[threadIdx.x] = __ldcg(p.quantized.factor + threadIdx.x);
    float* partial = reinterpret_cast<float*>(smem + p.stages * stage_size);
    for (int v = 0, buffer = 0; v < tiles; v += kPAIR, buffer ^= 1) {
        float y[kPAIR][NT][2] = {};
        for (int c = 0; c < p.chunks; ++c) {
            const bool mine = c * p.ks + own < p.supers;
            if (p.chunks > 1 && mine) x.load(p.quantized, c * p.ks + own, lane);
#pragma unroll
            for (int i = 0; i < kPAIR; ++i) {
                if (v + i < tiles) {
                    mbarrier_wait(ring.full + at.stage, at.phase);
                    const Tile tile = tile_at(p, units.tile(p, v + i));
                    if (mine) dot_tile<TYPE, NT>(p, smem + at.stage * stage_size, tile, c, own, lane, x, y[i]);
                    __syncwarp();
                    if (lane == 0) mbarrier_arrive(ring.empty + at.stage);
                    at.next(p.stages);
                }
            }
        }
        float* mine = partial + buffer * p.ks * kPAIR * 64 * NT;
#pragma unroll
        for (int i = 0; i < kPAIR; ++i)
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int h = 0; h < 2; ++h) mine[((own * kPAIR + i) * NT + n) * 64 + 32 * h + lane] = y[i][n][h];
        // One barrier per pair is enough: `partial` has two buffers, and a warp reaches the next barrier only
        // after it has read this one's sums.
        consumer_barrier(p.ks);
        reduce_pair<NT>(p, units, mine, factor, v, min(kPAIR, tiles - v));
    }
}

size_t partial_bytes(int ks, int groups) { return sizeof(float) * 2 * ks * kPAIR * 64 * groups; }

// ks, chunks and the ring for a row of `supers` superblocks.  At least 2 stages, 3 where they fit.
struct Plan {
    int ks, chunks, together, row_stride, stages, per_sm;
    size_t smem;
    bool one, few;  // a kernel of its own for one token, for several
};
Plan plan_for(const NextnMatmul& m, int type, const DeviceLimits& d) {
    const int supers = m.k / kSUPER;
    Plan plan = {};
    const int bytes = type == kNEXTN_Q4_K ? 144 : type == kNEXTN_Q5_K ? 176 : 210;
    for (int chunks = ceil_div(supers, kMAX_KS);; ++chunks) {
        plan.chunks = chunks;
        plan.ks = ceil_div(supers, chunks);
        plan.chunks = ceil_div(supers, plan.ks);
        // Copies of several rows are quicker.  From copy to copy an odd number of times 16 bytes, so that the 8 rows
        // of a load hit different banks: those at even places of a tile, where rows follow each other by whole 128
        // bytes (Q4_K, Q5_K), or the first 8, where it is 32 more (Q6_K; both of rows of 4096 values).
        const bool q6 = type == kNEXTN_Q6_K, alike = !q6 || supers % 8 == 0;
        plan.together = plan.chunks > 1 || !alike ? 1 : q6 ? 4 : 2;
        const size_t row = static_cast<size_t>(plan.ks) * bytes;
        const size_t pieces = ceil_div(plan.together * row + (q6 && plan.together == 1 ? 15 + 4 : 0), 16);
        plan.row_stride = static_cast<int>(16 * (pieces | 1));
        const size_t stage = static_cast<size_t>(kROWS / plan.together) * plan.row_stride;
        plan.per_sm = max(1, kMAX_KS / plan.ks);
        const size_t room = static_cast<size_t>(d.smem_per_sm) / plan.per_sm - 2048;
        const size_t all = min(room, static_cast<size_t>(d.smem_per_block) - 1024);
        if (partial_bytes(plan.ks, 2) + 3 * stage > all && plan.ks > 4) continue;
        const bool own_kernel = plan.chunks == 1 && alike;
        plan.one = own_kernel && m.t == 1;
        plan.few = own_kernel && m.t > 1 && few_tokens_bytes(plan.ks) + 3 * stage <= all;
        const size_t partial = plan.one   ? one_token_bytes(plan.ks)
                               : plan.few ? few_tokens_bytes(plan.ks)
                                          : partial_bytes(plan.ks, ceil_div(m.t, kGroupTokens));
        const size_t most = plan.few ? kFEW_GROUP / ceil_div(m.t, kGroupTokens) : kMAX_RING;
        plan.stages = static_cast<int>(min((all - partial) / stage, most));
        plan.smem = plan.stages * stage + partial;
        return plan;
    }
}

template <int TYPE>
cudaError_t launch_type(const Launch& l, const DecodeParams& p, cudaStream_t stream) {
    return p.t <= kGroupTokens ? launch(l, stream, kquant_decode_kernel<TYPE, 1>, p)
                               : launch(l, stream, kquant_decode_kernel<TYPE, 2>, p);
}

}  // namespace

bool decode_quantizes_itself(const NextnMatmul& m, int type, const DeviceLimits& limits) {
    // with more tokens every block would read and quantise as many rows, and with few tiles nothing hides that it does:
    // either costs more than a launch
    int64_t rows = 0;
    for (int i = 0; i < m.n_matrices; ++i) rows += m.matrix[i].type == type ? m.matrix[i].n : 0;
    return rows >= kROWS * limits.sm_count && plan_for(m, type, limits).one;
}

cudaError_t kquant_decode(const NextnMatmul& m, int first, int count, const QuantizedRows& quantized,
                          const DeviceLimits& limits, cudaStream_t stream) {
    const int type = m.matrix[first].type;
    const Plan plan = plan_for(m, type, limits);
    DecodeParams p = {};
    for (int i = 0; i < count; ++i) {
        const NextnMatrix& s = m.matrix[first + i];
        p.matrix[i] = {static_cast<const uint8_t*>(s.weight), s.y, s.ldy, s.n, ceil_div(s.n, kROWS)};
        p.units += m.swiglu && i ? 0 : p.matrix[i].tiles;
    }
    p.quantized = quantized;
    p.own = decode_quantizes_itself(m, type, limits);
    p.x = m.x;
    p.ldx = m.ldx;
    p.norm = m.norm_weight;
    p.eps = m.norm_eps;
    p.residual = m.residual;
    p.ldr = m.ldr;
    p.n_matrices = count;
    p.t = m.t;
    p.supers = m.k / kSUPER;
    p.chunks = plan.chunks;
    p.ks = plan.ks;
    p.stages = plan.stages;
    p.together = plan.together;
    p.row_stride = plan.row_stride;
    p.swiglu = m.swiglu;
    Launch l;
    l.grid = dim3(min(p.units, limits.sm_count * plan.per_sm));
    l.block = dim3(32 * (plan.ks + 1));
    l.smem = plan.smem;
    l.pdl = m.flags & NEXTN_PDL;
    if (plan.one) return kquant_decode_one(type, l, p, stream);
    if (plan.few) return kquant_decode_few(type, l, p, stream);
    switch (type) {
        case kNEXTN_Q4_K: return launch_type<kNEXTN_Q4_K>(l, p, stream);
        case kNEXTN_Q5_K: return launch_type<kNEXTN_Q5_K>(l, p, stream);
        case kNEXTN_Q6_K: return launch_type<kNEXTN_Q6_K>(l, p, stream);
        default: return cudaErrorInvalidValue;
    }
}

}  // namespace nextn
