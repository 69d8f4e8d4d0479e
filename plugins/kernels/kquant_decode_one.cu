// The decode matmul for one token: as kquant_decode.cu, with rows of one chunk and the operand of one_token.cuh, which
// mostly is quantised here while the ring fills.
#include "kquant_decode.cuh"
#include "one_token.cuh"

namespace nextn {
namespace {

// Tiles whose sums meet at once; even, so that gate and up do.
constexpr int kGROUP = 8, kGROUP_ROWS = kGROUP * kROWS;

// Every warp quantises its superblock; factor (1/rms, 1 without a norm) becomes valid at the next barrier.
template <int TYPE>
__device__ __forceinline__ void quantize_own(const DecodeParams& p, TokenOperand<TYPE, 1>& x, int warp, int lane,
                                             float* squares, float* factor) {
    float own[1];
    x.quantize(p.x, p.ldx, 1, p.norm, warp, lane, own);
    if (lane == 0) squares[warp] = own[0];
    consumer_barrier(p.ks);
    if (threadIdx.x) return;
    float total = 0.0f;
    for (int w = 0; w < p.ks; ++w) total = __fadd_rn(total, squares[w]);
    *factor = p.norm ? rms_factor(total, p.supers * kSUPER, p.eps) : 1.0f;
}

// Sum the warps' partials of `count` tiles, an output a thread.  partial: [warp][kGROUP_ROWS].  Warps take turns, so
// that none falls behind; turn: the one that begins.
__device__ __forceinline__ void reduce_group(const DecodeParams& p, const UnitRange& units, const float* partial,
                                             float factor, int first, int count, int warp, int lane, int& turn) {
    const int outputs = (p.swiglu ? count / 2 : count) * kROWS;
    int place = warp - turn;
    if (place < 0) place += p.ks;
    turn += (outputs + 31) / 32;
    while (turn >= p.ks) turn -= p.ks;
    for (int e = place * 32 + lane; e < outputs; e += 32 * p.ks) {
        const int row = e % kROWS, at = p.swiglu ? 2 * (e - row) + row : e;
        const auto sum_at = [&](int i) {
            float sum = 0.0f;
#pragma unroll
            for (int w = 0; w < kMAX_KS; ++w)
                if (w < p.ks) sum = __fadd_rn(sum, partial[w * kGROUP_ROWS + i]);
            return __fmul_rn(sum, factor);
        };
        float sum = sum_at(at);
        if (p.swiglu) sum = __fmul_rn(__fdiv_rn(sum, __fadd_rn(1.0f, expf(-sum))), sum_at(at + kROWS));
        store(p, tile_at(p, units.tile(p, first + at / kROWS)), row, 0, sum);
    }
}

template <int TYPE>
__global__ void __launch_bounds__(32 * (kMAX_KS + 1), 1) kquant_one_kernel(const __grid_constant__ DecodeParams p) {
    extern __shared__ __align__(128) uint8_t smem[];
    __shared__ __align__(8) Barriers ring;
    __shared__ float squares[kMAX_KS], factor;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int stage_size = stage_bytes(p);
    launch_dependents();
    if (threadIdx.x == 0) ring.init(p);
    __syncthreads();
    const UnitRange units(p);
    const int tiles = units.tiles(p);
    StageCursor at;
    if (warp == p.ks) {  // the producer: weights do not depend on the launch before
        for (int v = 0; v < tiles; ++v, at.next(p.stages)) {
            mbarrier_wait(ring.empty + at.stage, at.phase ^ 1);
            produce<TYPE>(p, smem + at.stage * stage_size, ring.full + at.stage, tile_at(p, units.tile(p, v)), 0, lane);
        }
        return;
    }
    wait_for_predecessor();
    OneToken<TYPE> x;
    {
        TokenOperand<TYPE, 1> whole;
        if (p.own) {
            quantize_own(p, whole, warp, lane, squares, &factor);
        } else {
            whole.load(p.quantized, warp, lane);
            if (threadIdx.x == 0) factor = __ldcg(p.quantized.factor);
        }
        x.take(whole, warp & 1, lane);
    }
    const int q = lane & 3, row = row_of_lane(p, lane >> 2, q >> 1), second = offset_of_second<TYPE>(p);
    const uint8_t* own = smem + offset_of_row<TYPE>(p, lane >> 2) + warp * kSuperBytes<TYPE>;
    float* partial = reinterpret_cast<float*>(smem + p.stages * stage_size);
    for (int v = 0, buffer = 0, turn = 0; v < tiles; v += kGROUP, buffer ^= 1) {
        const int count = min(kGROUP, tiles - v);
        const float* group = partial + buffer * p.ks * kGROUP_ROWS;
        float* mine = partial + (buffer * p.ks + warp) * kGROUP_ROWS + row;
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
            mbarrier_wait(ring.full + at.stage, at.phase);
            const float y = dot_one(own + at.stage * stage_size, second, warp & 1, x, lane, [&] {
                __syncwarp();
                if (lane == 0) mbarrier_arrive(ring.empty + at.stage);
            });
            at.next(p.stages);
            if (!(q & 1)) *mine = y;
            mine += kROWS;
        }
        // One barrier per group is enough: `partial` has two buffers, and a warp reaches the next barrier only after it
        // has read this one's sums.
        consumer_barrier(p.ks);
        reduce_group(p, units, group, factor, v, count, warp, lane, turn);
    }
}

}  // namespace

size_t one_token_bytes(int ks) { return sizeof(float) * 2 * ks * kGROUP_ROWS; }

cudaError_t kquant_decode_one(int type, const Launch& l, const DecodeParams& p, cudaStream_t stream) {
    switch (type) {
        case kNEXTN_Q4_K: return launch(l, stream, kquant_one_kernel<kNEXTN_Q4_K>, p);
        case kNEXTN_Q5_K: return launch(l, stream, kquant_one_kernel<kNEXTN_Q5_K>, p);
        case kNEXTN_Q6_K: return launch(l, stream, kquant_one_kernel<kNEXTN_Q6_K>, p);
        default: return cudaErrorInvalidValue;
    }
}

}  // namespace nextn
