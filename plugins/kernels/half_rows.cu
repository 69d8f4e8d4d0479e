// Activations for prefill: f16 rows scaled to +-1024 per token, with an optional RMSNorm, and their sums over 32.
//
// Two layouts: rows as they are (mma.sync), or by steps of 64 values, every token's 128 bytes of a step in the order
// of permuted_k and swizzled, so that any tokens' share of a step is one piece that wgmma can read as it lies.
#include "kquant_fragments.cuh"
#include "launch.cuh"
#include "matmul_parts.cuh"

namespace nextn {
namespace {

constexpr float kHALF_RANGE = 1024.0f;  // leaves room for sums of 32 below the f16 maximum
constexpr int kTHREADS = 512, kKEPT = 3;  // pieces of 8 values that a thread keeps in registers: rows up to 12288

// Block-wide maximum of `bits` (float bit patterns without sign) and sum of `v`.
__device__ void block_reduce(uint32_t& bits, float& v) {
    __shared__ uint32_t warp_bits[32];
    __shared__ float warp_sum[32];
    bits = __reduce_max_sync(~0u, bits);
    for (int d = 16; d; d >>= 1) v += __shfl_xor_sync(~0u, v, d);
    if ((threadIdx.x & 31) == 0) {
        warp_bits[threadIdx.x >> 5] = bits;
        warp_sum[threadIdx.x >> 5] = v;
    }
    __syncthreads();
    bits = 0;
    v = 0.0f;
    for (int w = 0; w < static_cast<int>(blockDim.x >> 5); ++w) {
        bits = max(bits, warp_bits[w]);
        v += warp_sum[w];
    }
}

struct HalfRows {
    const float* x;
    const float* norm;  // optional
    int64_t ldx;
    __half *rows, *sums;
    float* row_scale;
    int k, t_padded;
    float eps;
};

// 8 values of a row, times the norm's weight; their squares, before that, are added up.
struct Piece {
    float v[8];
    __device__ __forceinline__ void load(const HalfRows& p, const float* row, int at, float& squares) {
        const auto* from = reinterpret_cast<const float4*>(row + at);
        *reinterpret_cast<float4*>(v) = __ldcg(from);
        *reinterpret_cast<float4*>(v + 4) = __ldcg(from + 1);
#pragma unroll
        for (int i = 0; i < 8; ++i) squares = __fmaf_rn(v[i], v[i], squares);
        if (!p.norm) return;
        const auto* weight = reinterpret_cast<const float4*>(p.norm + at);
        const float4 a = __ldg(weight), b = __ldg(weight + 1);
        v[0] *= a.x, v[1] *= a.y, v[2] *= a.z, v[3] *= a.w, v[4] *= b.x, v[5] *= b.y, v[6] *= b.z, v[7] *= b.w;
    }
    __device__ __forceinline__ uint32_t largest() const {
        uint32_t bits = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) bits = max(bits, __float_as_uint(v[i]) & 0x7fffffffu);
        return bits;
    }
};

// Plain rows: a lane's 8 values lie together; sums as f16 high and low parts, [k/256, 16].
__device__ __forceinline__ void write_plain(const HalfRows& p, int64_t t, int at, const __half2 (&h)[4], float sum) {
    *reinterpret_cast<uint4*>(p.rows + t * p.k + at) = *reinterpret_cast<const uint4*>(h);
    if (threadIdx.x & 3) return;
    __half* out = p.sums + (t * p.k + at) / kSUPER * 16 + (at & 255) / 32;
    const __half high = __float2half_rn(sum);
    out[0] = high;
    out[8] = __float2half_rn(sum - __half2float(high));
}

// Steps: four lanes q have 32 values; their pairs (0, 2), (1, 3), (4, 6), (5, 7) become four 16-byte pieces, of which
// lane q writes piece q.
__device__ __forceinline__ void write_step(const HalfRows& p, int64_t t, int at, const __half2 (&h)[4], float sum) {
    const int q = threadIdx.x & 3;
    uint32_t pair[4], out[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
        pair[i] = __byte_perm(bits_of(h[i & 2]), bits_of(h[(i & 2) + 1]), i & 1 ? 0x7632 : 0x5410);
#pragma unroll
    for (int turn = 0; turn < 4; ++turn) {  // lane q gives its piece q ^ turn to lane q ^ turn
        const int other = q ^ turn;
        const uint32_t give = other == 0 ? pair[0] : other == 1 ? pair[1] : other == 2 ? pair[2] : pair[3];
        const uint32_t got = __shfl_xor_sync(~0u, give, turn);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (i == other) out[i] = got;
    }
    const int64_t row = static_cast<int64_t>(at / kSTEP_VALUES) * p.t_padded + t;
    const int piece = 4 * (at % kSTEP_VALUES / 32) + q;
    auto* rows = reinterpret_cast<uint4*>(p.rows + row * kSTEP_VALUES);
    rows[piece ^ (t & 7)] = make_uint4(out[0], out[1], out[2], out[3]);
    if (q) return;
    __half* sums = p.sums + (static_cast<int64_t>(at / kSUPER) * p.t_padded + t / 8 * 8) * 16 + t % 8 * 8 +
                   at % kSUPER / 32;
    sums[0] = sums[64] = __float2half_rn(sum);
}

// One block per token; k is a multiple of 256, so that whole warps take a piece or none.
template <bool STEPS>
__global__ void __launch_bounds__(kTHREADS) half_rows_kernel(const __grid_constant__ HalfRows p) {
    launch_dependents();
    wait_for_predecessor();
    const int64_t t = blockIdx.x;
    const float* row = p.x + t * p.ldx;
    Piece kept[kKEPT], piece;
    uint32_t bits = 0;
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kKEPT; ++i) {
        const int at = 8 * (threadIdx.x + i * kTHREADS);
        if (at >= p.k) break;
        kept[i].load(p, row, at, squares);
        bits = max(bits, kept[i].largest());
    }
    for (int at = 8 * (threadIdx.x + kKEPT * kTHREADS); at < p.k; at += 8 * kTHREADS) {
        piece.load(p, row, at, squares);
        bits = max(bits, piece.largest());
    }
    block_reduce(bits, squares);
    const float amax = __uint_as_float(bits);
    const float inverse = amax > 1e-30f ? kHALF_RANGE / amax : 0.0f;
    const float factor = p.norm ? __frsqrt_rn(__fmaf_rn(squares, 1.0f / p.k, p.eps)) : 1.0f;
    if (threadIdx.x == 0)
        p.row_scale[t] = bits >= 0x7f800000u ? __uint_as_float(0x7fc00000u) : amax / kHALF_RANGE * factor;
    const auto write = [&](const Piece& from, int at) {
        __half2 h[4];
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            h[i] = __floats2half2_rn(from.v[2 * i] * inverse, from.v[2 * i + 1] * inverse);
            sum += __low2float(h[i]) + __high2float(h[i]);
        }
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        STEPS ? write_step(p, t, at, h, sum) : write_plain(p, t, at, h, sum);
    };
#pragma unroll
    for (int i = 0; i < kKEPT; ++i) {
        const int at = 8 * (threadIdx.x + i * kTHREADS);
        if (at >= p.k) return;
        write(kept[i], at);
    }
    for (int at = 8 * (threadIdx.x + kKEPT * kTHREADS); at < p.k; at += 8 * kTHREADS) {
        piece.load(p, row, at, squares);
        write(piece, at);
    }
}

}  // namespace

cudaError_t half_rows(const NextnMatmul& m, const MatmulWorkspace& w, bool steps, cudaStream_t stream) {
    const HalfRows p = {m.x, m.norm_weight, m.ldx, w.half_rows, w.half_sums, w.row_scale,
                        m.k, static_cast<int>(round_up(m.t, 8)), m.norm_eps};
    Launch l;
    l.grid = dim3(m.t);
    l.block = dim3(kTHREADS);
    l.pdl = m.flags & NEXTN_PDL;
    return launch(l, stream, steps ? half_rows_kernel<true> : half_rows_kernel<false>, p);
}

}  // namespace nextn
