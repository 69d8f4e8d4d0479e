// The decode matmul for 2 to 8 tokens: as kquant_decode.cu, with rows of one chunk.  The sums of several tiles meet at once.
#include "few_tokens.cuh"
#include "kquant_decode.cuh"

namespace nextn {
namespace {

// Tiles whose sums meet at once; even, so that gate and up do; not less than the ring has stages.
template <int NT>
constexpr int kGROUP = kFEW_GROUP / NT;
constexpr int kTILE = 64;  // sums of a tile for a group of tokens: [row half][lane]

// A barrier of all consumer warps, for which only those wait that `wait`.
__device__ __forceinline__ void meet(int barrier, int warps, bool wait) {
    if (wait)
        asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(32 * warps) : "memory");
    else
        asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(32 * warps) : "memory");
}

// Sum the warps' partials of a group of tiles, for four tokens a lane, from piece `place` on.
// partial: [warp][tile][group of tokens][row half][lane]; factor: [token].
template <int NT>
__device__ __forceinline__ void reduce_group(const DecodeParams& p, const UnitRange& units, const float* partial,
                                             const float* factor, int first, int outputs, int place, int lane) {
    constexpr int kSTEP = kTILE * NT, kWARP = kGROUP<NT> * kSTEP;
    for (int e = 4 * (place * 32 + lane); e < outputs; e += 4 * 32 * p.ks) {
        const int i = p.swiglu ? 2 * (e / kSTEP) : e / kSTEP, inside = e % kSTEP;
        const int token = inside / kTILE * kGroupTokens;
        const auto sums_at = [&](int tile, float(&sum)[4]) {
#pragma unroll
            for (int w = 0; w < kMAX_KS; ++w)
                if (w < p.ks) {
                    const float4 v = *reinterpret_cast<const float4*>(partial + w * kWARP + tile * kSTEP + inside);
                    sum[0] = __fadd_rn(sum[0], v.x);
                    sum[1] = __fadd_rn(sum[1], v.y);
                    sum[2] = __fadd_rn(sum[2], v.z);
                    sum[3] = __fadd_rn(sum[3], v.w);
                }
#pragma unroll
            for (int j = 0; j < 4; ++j) sum[j] = __fmul_rn(sum[j], factor[token + j]);
        };
        float sum[4] = {}, up[4] = {};
        sums_at(i, sum);
        if (p.swiglu) {
            sums_at(i + 1, up);
#pragma unroll
            for (int j = 0; j < 4; ++j)
                sum[j] = __fmul_rn(__fdiv_rn(sum[j], __fadd_rn(1.0f, expf(-sum[j]))), up[j]);
        }
        const Tile tile = tile_at(p, units.tile(p, first + i));
        const int row = row_of_lane(p, e >> 2 & 7, e >> 5 & 1);
#pragma unroll
        for (int j = 0; j < 4; ++j) store(p, tile, row, token + j, sum[j]);
    }
}

// All tiles of the block, by one consumer warp.  own: its superblock; own_rows: address of where that begins in the first
// stage, of the lane's row.
template <bool SHIFTED, int TYPE, int NT>
__device__ __forceinline__ void consume(const DecodeParams& p, const UnitRange& units, uint32_t own_rows,
                                        Barriers& ring, float* partial, const float* factor,
                                        const TokenOperand<TYPE, NT>& x, int warp, int own, int lane) {
    constexpr int kWARP = kGROUP<NT> * kTILE * NT;
    const int tiles = units.tiles(p), stage_size = stage_bytes(p), second = offset_of_second<TYPE>(p), q = lane & 3;
    StageCursor at;
    for (int v = 0, buffer = 0, turn = 0; v < tiles; v += kGROUP<NT>, buffer ^= 1) {
        const int count = min(kGROUP<NT>, tiles - v);
        float* group = partial + buffer * p.ks * kWARP;
        float* mine = group + own * kWARP + lane;
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
            mbarrier_wait(ring.full + at.stage, at.phase);
            const uint32_t r0 = own_rows + at.stage * stage_size;
            float y[NT][2] = {};
            dot_few<SHIFTED, TYPE>(r0, r0 + second, x, y, q, [&] {
                __syncwarp();
                if (lane == 0) mbarrier_arrive(ring.empty + at.stage);
            });
            at.next(p.stages);
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                mine[n * kTILE] = y[n][0];
                mine[n * kTILE + 32] = y[n][1];
            }
            mine += NT * kTILE;
        }
        // Warps take turns to add up; who does not have to only says that it is done, and goes on. It gets no further
        // than the ring has stages, not more than a group has tiles, so that it neither writes to this buffer nor comes
        // to this barrier again before who adds up has what it needs.
        const int outputs = (p.swiglu ? count / 2 : count) * kTILE * NT;
        int place = warp - turn;
        if (place < 0) place += p.ks;
        turn += (outputs + 127) / 128;
        while (turn >= p.ks) turn -= p.ks;
        const bool adds = 4 * 32 * place < outputs;
        meet(1 + buffer, p.ks, adds);
        if (adds) reduce_group<NT>(p, units, group, factor, v, outputs, place, lane);
    }
}

template <int TYPE, int NT>
__global__ void __launch_bounds__(32 * (kMAX_KS + 1), 1) kquant_few_kernel(const __grid_constant__ DecodeParams p) {
    extern __shared__ __align__(128) uint8_t smem[];
    __shared__ __align__(8) Barriers ring;
    __shared__ float factor[NEXTN_MAX_DECODE_T];
    // by way of a shuffle, so that the compiler has uniform branches
    const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
    const int stage_size = stage_bytes(p);
    launch_dependents();
    if (threadIdx.x == 0) ring.init(p);
    __syncthreads();
    const UnitRange units(p);
    if (warp == p.ks) {  // the producer: weights do not depend on the launch before
        const int tiles = units.tiles(p);
        StageCursor at;
        for (int v = 0; v < tiles; ++v, at.next(p.stages)) {
            mbarrier_wait(ring.empty + at.stage, at.phase ^ 1);
            produce<TYPE>(p, smem + at.stage * stage_size, ring.full + at.stage, tile_at(p, units.tile(p, v)), 0, lane);
        }
        return;
    }
    wait_for_predecessor();
    const int own = own_superblock(warp, p.ks);
    TokenOperand<TYPE, NT> x;
    x.load(p.quantized, own, lane);
    if (threadIdx.x < kGroupTokens * NT) factor[threadIdx.x] = __ldcg(p.quantized.factor + threadIdx.x);
    float* partial = reinterpret_cast<float*>(smem + p.stages * stage_size);
    const uint32_t rows = smem_address(smem) + offset_of_row<TYPE>(p, lane >> 2) + own * kSuperBytes<TYPE>;
    if constexpr (TYPE == kNEXTN_Q6_K) {
        if (own & 1) {
            shift_operand(x, lane);
            consume<true>(p, units, rows, ring, partial, factor, x, warp, own, lane);
            return;
        }
    }
    consume<false>(p, units, rows, ring, partial, factor, x, warp, own, lane);
}

template <int TYPE>
cudaError_t launch_few(const Launch& l, const DecodeParams& p, cudaStream_t stream) {
    return p.t <= kGroupTokens ? launch(l, stream, kquant_few_kernel<TYPE, 1>, p)
                               : launch(l, stream, kquant_few_kernel<TYPE, 2>, p);
}

}  // namespace

size_t few_tokens_bytes(int ks) { return sizeof(float) * 2 * ks * kGROUP<1> * kTILE; }

cudaError_t kquant_decode_few(int type, const Launch& l, const DecodeParams& p, cudaStream_t stream) {
    switch (type) {
        case kNEXTN_Q4_K: return launch_few<kNEXTN_Q4_K>(l, p, stream);
        case kNEXTN_Q5_K: return launch_few<kNEXTN_Q5_K>(l, p, stream);
        case kNEXTN_Q6_K: return launch_few<kNEXTN_Q6_K>(l, p, stream);
        default: return cudaErrorInvalidValue;
    }
}

}  // namespace nextn
