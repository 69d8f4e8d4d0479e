// Decode matmul: streams weights once through a shared-memory ring and meets up to 8 tokens on the way.
//
//   block = ks consumer warps + 1 producer warp, persistent; a tile is 16 rows.
//   ring stage = 16 rows x ks superblocks of one tile, one bulk copy per row (16-byte cp.async below 9.0)
//   consumer warp w owns superblock chunk*ks + w of every tile, its activations live in registers: one token against
//   one chunk is quantised here while the ring fills, else they come from quantize_rows (same bits either way)
//   an RMSNorm's 1/rms is a factor of the whole row, so it is applied to the finished sums
//   a pair of tiles walks all chunks, then the warps' partial sums meet in shared memory in warp order
// Every choice that fixes the order of a sum (ks, chunks) follows from k, type and device, never from t.
#include <type_traits>
#include "kquant_dot.cuh"
#include "launch.cuh"
#include "matmul_parts.cuh"

namespace nextn {
namespace {

constexpr int kROWS = 16, kPAIR = 2, kMAX_KS = 16, kMAX_STAGES = 8;

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
    int n_matrices, t, supers, chunks, ks, stages, row_stride, units;  // units: tiles, or gate/up pairs of tiles
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

// All lanes of one warp.
template <int TYPE>
__device__ __forceinline__ void produce(const DecodeParams& p, uint8_t* stage, uint64_t* full, const Tile& tile, int c,
                                        int lane) {
    const DecodeMatrix& m = p.matrix[tile.matrix];
#if __CUDA_ARCH__ >= 900
    if (lane < kROWS) {
        const Piece piece = piece_at<TYPE>(p, m, tile.row + lane, c);
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(smem_address(full)), "r"(piece.bytes)
                     : "memory");
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                         smem_address(stage + lane * p.row_stride)),
                     "l"(piece.from), "r"(piece.bytes), "r"(smem_address(full))
                     : "memory");
    }
#else
    for (int r = 0; r < kROWS; ++r) {
        const Piece piece = piece_at<TYPE>(p, m, tile.row + r, c);
        for (int b = 16 * lane; b < piece.bytes; b += 16 * 32)
            cp_async_16(stage + r * p.row_stride + b, piece.from + b);
    }
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(smem_address(full)) : "memory");
#endif
}
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kPRODUCER_ARRIVALS = 32;
#else
constexpr int kPRODUCER_ARRIVALS = kROWS;
#endif

template <int TYPE, int NT>
__device__ __forceinline__ void dot_tile(const DecodeParams& p, const uint8_t* stage, const Tile& tile, int c, int warp,
                                         int lane, const TokenOperand<TYPE, NT>& x, float (&y)[NT][2]) {
    const int g = lane >> 2, q = lane & 3;
    const uint8_t* r0 = stage + g * p.row_stride + warp * kSuperBytes<TYPE>;
    const uint8_t* r8 = r0 + 8 * p.row_stride;
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

__device__ __forceinline__ void store(const DecodeParams& p, const Tile& tile, int row, int token, float v) {
    const DecodeMatrix& m = p.matrix[tile.matrix];
    const int n = tile.row + row;
    if (token >= p.t || n >= m.n) return;
    if (p.residual) v = __fadd_rn(p.residual[token * p.ldr + n], v);
    m.y[token * m.ldy + n] = v;
}

// Sum the warps' partials of up to kPAIR tiles.  partial: [warp][tile][group][row half][lane]; factor: [token].
template <int NT>
__device__ __forceinline__ void reduce_pair(const DecodeParams& p, const float* partial, const float* factor, int first,
                                            int count) {
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
        store(p, tile_at(p, first + i), (lane >> 2) + 8 * half, token, sum);
    }
}

__device__ __forceinline__ void consumer_barrier(int warps) {
    asm volatile("bar.sync 1, %0;" ::"r"(32 * warps) : "memory");
}

// One token: every warp quantises its superblock; factor (1/rms, 1 without a norm) is for the epilogue and becomes
// valid at the first reduce_pair's barrier.
template <int TYPE>
__device__ __forceinline__ void quantize_own(const DecodeParams& p, TokenOperand<TYPE, 1>& x, int warp, int lane,
                                             float* squares, float* factor) {
    float own[1];
    x.quantize(p.x, p.ldx, p.t, p.norm, warp, lane, own);
    if (lane == 0) squares[warp] = own[0];
    consumer_barrier(p.ks);
    if (threadIdx.x >= kGroupTokens) return;
    float total = 0.0f;
    for (int w = 0; w < p.ks; ++w) total = __fadd_rn(total, squares[w]);
    factor[threadIdx.x] = p.norm ? rms_factor(total, p.supers * kSUPER, p.eps) : 1.0f;
}

template <int TYPE, int NT>
__global__ void __launch_bounds__(32 * (kMAX_KS + 1), 1) kquant_decode_kernel(const __grid_constant__ DecodeParams p) {
    extern __shared__ __align__(128) uint8_t smem[];
    __shared__ __align__(8) uint64_t full[kMAX_STAGES], empty[kMAX_STAGES];
    __shared__ float squares[kMAX_KS], factor[NEXTN_MAX_DECODE_T];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int stage_bytes = kROWS * p.row_stride;
    launch_dependents();
    if (threadIdx.x == 0) {
        for (int s = 0; s < p.stages; ++s) {
            mbarrier_init(full + s, kPRODUCER_ARRIVALS);
            mbarrier_init(empty + s, p.ks);
        }
#if __CUDA_ARCH__ >= 900
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
    }
    __syncthreads();
    // whole units to each block, so that gate and up of a row stay together
    const int per_unit = p.swiglu ? 2 : 1;
    const int begin = static_cast<int>(static_cast<int64_t>(p.units) * blockIdx.x / gridDim.x) * per_unit;
    const int end = static_cast<int>(static_cast<int64_t>(p.units) * (blockIdx.x + 1) / gridDim.x) * per_unit;
    RingPosition at;
    if (warp == p.ks) {  // the producer: weights do not depend on the launch before
        for (int v = begin; v < end; v += kPAIR)
            for (int c = 0; c < p.chunks; ++c)
                for (int i = 0; i < kPAIR && v + i < end; ++i, at.next(p.stages)) {
                    mbarrier_wait(empty + at.stage, at.phase ^ 1);
                    produce<TYPE>(p, smem + at.stage * stage_bytes, full + at.stage, tile_at(p, v + i), c, lane);
                }
        return;
    }
    wait_for_predecessor();
    TokenOperand<TYPE, NT> x;
    bool own = false;
    if constexpr (NT == 1) {
        own = p.own;
        if (own) quantize_own(p, x, warp, lane, squares, factor);
    }
    if (!own) {
        if (p.chunks == 1) x.load(p.quantized, warp, lane);
        if (threadIdx.x < kGroupTokens * NT) factor[threadIdx.x] = __ldcg(p.quantized.factor + threadIdx.x);
    }
    float* partial = reinterpret_cast<float*>(smem + p.stages * stage_bytes);
    for (int v = begin, buffer = 0; v < end; v += kPAIR, buffer ^= 1) {
        float y[kPAIR][NT][2] = {};
        for (int c = 0; c < p.chunks; ++c) {
            const bool mine = c * p.ks + warp < p.supers;
            if (p.chunks > 1 && mine) x.load(p.quantized, c * p.ks + warp, lane);
#pragma unroll
            for (int i = 0; i < kPAIR; ++i) {
                if (v + i < end) {
                    mbarrier_wait(full + at.stage, at.phase);
                    if (mine)
                        dot_tile<TYPE, NT>(p, smem + at.stage * stage_bytes, tile_at(p, v + i), c, warp, lane, x, y[i]);
                    __syncwarp();
                    if (lane == 0) mbarrier_arrive(empty + at.stage);
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
                for (int h = 0; h < 2; ++h) mine[((warp * kPAIR + i) * NT + n) * 64 + 32 * h + lane] = y[i][n][h];
        // One barrier per pair is enough: `partial` has two buffers, and a warp reaches the next barrier only
        // after it has read this one's sums.
        consumer_barrier(p.ks);
        reduce_pair<NT>(p, mine, factor, v, min(kPAIR, end - v));
    }
}

size_t partial_bytes(int ks, int groups) { return sizeof(float) * 2 * ks * kPAIR * 64 * groups; }

// ks, chunks and the ring for a row of `supers` superblocks.  At least 2 stages, 3 where they fit.
struct Plan {
    int ks, chunks, row_stride, stages, per_sm;
    size_t smem;
};
Plan plan_for(int type, int supers, int groups, const DeviceLimits& d) {
    Plan plan = {};
    const int bytes = type == kNEXTN_Q4_K ? 144 : type == kNEXTN_Q5_K ? 176 : 210;
    for (int chunks = ceil_div(supers, kMAX_KS);; ++chunks) {
        plan.chunks = chunks;
        plan.ks = ceil_div(supers, chunks);
        plan.chunks = ceil_div(supers, plan.ks);
        // rows 16 bytes apart modulo 128, so that the 8 rows of a load hit different banks
        const size_t row = round_up(static_cast<size_t>(plan.ks) * bytes + (type == kNEXTN_Q6_K ? 15 + 4 : 0), 16);
        plan.row_stride = static_cast<int>(round_up(row - 16, 128) + 16);
        const size_t stage = static_cast<size_t>(kROWS) * plan.row_stride;
        plan.per_sm = max(1, kMAX_KS / plan.ks);
        const size_t room = static_cast<size_t>(d.smem_per_sm) / plan.per_sm - 2048;
        const size_t all = min(room, static_cast<size_t>(d.smem_per_block) - 1024);
        if (partial_bytes(plan.ks, 2) + 3 * stage > all && plan.ks > 4) continue;
        plan.stages =
            static_cast<int>(min((all - partial_bytes(plan.ks, groups)) / stage, static_cast<size_t>(kMAX_STAGES)));
        plan.smem = plan.stages * stage + partial_bytes(plan.ks, groups);
        return plan;
    }
}

template <int TYPE>
cudaError_t launch_type(const Launch& l, int groups, const DecodeParams& p, cudaStream_t stream) {
    return groups == 1 ? launch(l, stream, kquant_decode_kernel<TYPE, 1>, p)
                       : launch(l, stream, kquant_decode_kernel<TYPE, 2>, p);
}

}  // namespace

bool decode_quantizes_itself(const NextnMatmul& m, int type, const DeviceLimits& limits) {
    // with more tokens every block would read and quantise as many rows, and with few tiles nothing hides that it does:
    // either costs more than a launch
    int64_t rows = 0;
    for (int i = 0; i < m.n_matrices; ++i) rows += m.matrix[i].type == type ? m.matrix[i].n : 0;
    return m.t == 1 && rows >= kROWS * limits.sm_count && plan_for(type, m.k / kSUPER, 1, limits).chunks == 1;
}

cudaError_t kquant_decode(const NextnMatmul& m, int first, int count, const QuantizedRows& quantized,
                          const DeviceLimits& limits, cudaStream_t stream) {
    const int type = m.matrix[first].type, groups = ceil_div(m.t, kGroupTokens);
    const Plan plan = plan_for(type, m.k / kSUPER, groups, limits);
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
    p.row_stride = plan.row_stride;
    p.swiglu = m.swiglu;
    Launch l;
    l.grid = dim3(min(p.units, limits.sm_count * plan.per_sm));
    l.block = dim3(32 * (plan.ks + 1));
    l.smem = plan.smem;
    l.pdl = m.flags & NEXTN_PDL;
    switch (type) {
        case kNEXTN_Q4_K: return launch_type<kNEXTN_Q4_K>(l, groups, p, stream);
        case kNEXTN_Q5_K: return launch_type<kNEXTN_Q5_K>(l, groups, p, stream);
        case kNEXTN_Q6_K: return launch_type<kNEXTN_Q6_K>(l, groups, p, stream);
        default: return cudaErrorInvalidValue;
    }
}

}  // namespace nextn
