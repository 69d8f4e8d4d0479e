// Activations to int8 hi/lo pairs in tensor-core operand order, with an optional RMSNorm on the way.
//
// One warp takes 256 values of one token.  The norm's 1/rms is a factor of the whole row, so it only enters the
// scales: values are quantised at once and the row's sum of squares is needed at the very end.
#include "launch.cuh"
#include "matmul_parts.cuh"
#include "ptx.cuh"

namespace nextn {
namespace {

constexpr int kMAX_WARPS = 32;
constexpr float kQUANT_RANGE = 16256.0f;  // 128 * 127: hi and lo both fit in int8

// asum = 1024*H + L, L in [-512, 511], |H| <= 508; each digit v is a + 6*c with a and c in int8.  The operand's k slots
// hold a (sub-blocks 0..7, against m) and three times c (against 2m), so one m16n8k32 sums all mins exactly.
__device__ void pack_sum32(uint8_t* out, int token, int sub, int asum, int writer) {
    const int low = ((asum + 512) & 1023) - 512;
    const int v = writer < 2 ? (asum - low) / 1024 : low;      // writers 0, 1: column hi; 2, 3: column lo
    const int c = (v * 37 + 128) >> 8;
    uint8_t* column = out + (2 * token + (writer >> 1)) * 4 * 8;
    const int q = sub >> 2, byte = sub & 3;
    if (writer & 1) {
        column[q * 8 + byte] = static_cast<uint8_t>(v - 6 * c);
        column[q * 8 + 4 + byte] = static_cast<uint8_t>(c);
    } else {
        column[(q + 2) * 8 + byte] = static_cast<uint8_t>(c);
        column[(q + 2) * 8 + 4 + byte] = static_cast<uint8_t>(c);
    }
}

// asum = 16384*d2 + 128*d1 + d0, digits in [-64, 64]: first operand has d2 in column hi and d1 in lo, the second 0 and d0.
__device__ void pack_sum16(uint8_t* out, int token, int sub, int asum) {
    const int d0 = ((asum + 64) & 127) - 64;
    const int rest = (asum - d0) / 128;
    const int d1 = ((rest + 64) & 127) - 64;
    const int d2 = (rest - d1) / 128;
    uint8_t* hi = out + ((2 * token) * 4 + (sub >> 2)) * 8 + (sub & 3);
    uint8_t* lo = hi + 4 * 8;
    hi[0] = static_cast<uint8_t>(d2);
    lo[0] = static_cast<uint8_t>(d1);
    hi[4] = 0;
    lo[4] = static_cast<uint8_t>(d0);
}

// Quantise 256 values held 8 to a lane: v[0..3] at 32*(lane/4) + 4*(lane%4), v[4..7] 16 further.
// Returns the scale (NaN when a value is not finite, so that it reaches the output).
__device__ float quantize_superblock(const float (&v)[8], const QuantizedRows& out, int64_t slot, int token, int lane) {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) bits = max(bits, __float_as_uint(v[i]) & 0x7fffffffu);
    bits = __reduce_max_sync(~0u, bits);
    const float amax = __uint_as_float(bits);  // below 1e-30 the row counts as zero: the inverse would overflow
    const float inverse = amax > 1e-30f ? __fdiv_rn(kQUANT_RANGE, amax) : 0.0f;
    uint32_t hi[2] = {0, 0}, lo[2] = {0, 0};
    int sum[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int a = __float2int_rn(fminf(fmaxf(__fmul_rn(v[i], inverse), -kQUANT_RANGE), kQUANT_RANGE));
        const int h = (a + 64) >> 7;
        hi[i >> 2] |= (h & 0xff) << (8 * (i & 3));
        lo[i >> 2] |= ((a - 128 * h) & 0xff) << (8 * (i & 3));
        sum[i >> 2] += a;
    }
    const int sub = lane >> 2, q = lane & 3;
    uint8_t* frag = out.frag + slot * 2048 + (sub >> 1) * 512 + (sub & 1) * 8;
    *reinterpret_cast<uint2*>(frag + ((2 * token) * 4 + q) * 16) = make_uint2(hi[0], hi[1]);
    *reinterpret_cast<uint2*>(frag + ((2 * token + 1) * 4 + q) * 16) = make_uint2(lo[0], lo[1]);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        sum[h] += __shfl_xor_sync(~0u, sum[h], 1);
        sum[h] += __shfl_xor_sync(~0u, sum[h], 2);
    }
    pack_sum32(out.sum32 + slot * 256, token, sub, sum[0] + sum[1], q);
    if (q < 2) pack_sum16(out.sum16 + slot * 256, token, 2 * sub + q, q ? sum[1] : sum[0]);
    return bits >= 0x7f800000u ? __uint_as_float(0x7fc00000u) : __fdiv_rn(amax, kQUANT_RANGE);
}

// grid (t, parts), a part of `warps` superblocks when there is no norm; one part when there is.
__global__ void __launch_bounds__(32 * kMAX_WARPS) quantize_rows_kernel(
    const float* __restrict__ x, int64_t ldx, int k, int groups, const float* __restrict__ norm, float eps,
    QuantizedRows out) {
    launch_dependents();
    wait_for_predecessor();
    extern __shared__ float scales[];  // [superblocks of this block]
    __shared__ float warp_sum[kMAX_WARPS];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    const int token = blockIdx.x, supers = k / kSUPER;
    const int begin = norm ? 0 : blockIdx.y * warps;
    const int end = norm ? supers : min(begin + warps, supers);
    float squares = 0.0f;
    for (int sb = begin + warp; sb < end; sb += warps) {
        const int64_t at = static_cast<int64_t>(sb) * kSUPER + 32 * (lane >> 2) + 4 * (lane & 3);
        float v[8];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float4 f = __ldcg(reinterpret_cast<const float4*>(x + token * ldx + at + 16 * h));
            v[4 * h] = f.x; v[4 * h + 1] = f.y; v[4 * h + 2] = f.z; v[4 * h + 3] = f.w;
        }
        if (norm) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                squares = __fmaf_rn(v[i], v[i], squares);
                v[i] = __fmul_rn(v[i], norm[at + 16 * (i >> 2) + (i & 3)]);
            }
        }
        const int64_t slot = static_cast<int64_t>(sb) * groups + token / kGroupTokens;
        const float scale = quantize_superblock(v, out, slot, token % kGroupTokens, lane);
        if (lane == 0) scales[sb - begin] = scale;
    }
    float factor = 1.0f;
    if (norm) {
        for (int d = 16; d; d >>= 1) squares += __shfl_xor_sync(~0u, squares, d);
        if (lane == 0) warp_sum[warp] = squares;
        __syncthreads();
        float total = 0.0f;
        for (int w = 0; w < warps; ++w) total += warp_sum[w];
        factor = __frsqrt_rn(__fmaf_rn(total, 1.0f / k, eps));
    }
    __syncthreads();
    for (int i = threadIdx.x; i < end - begin; i += blockDim.x)
        out.scale[(static_cast<int64_t>(begin + i) * groups + token / kGroupTokens) * kGroupTokens
                  + token % kGroupTokens] = __fmul_rn(scales[i], factor);
}

// One block per token: y = x * norm / rms, or a plain copy of strided rows when norm is null.
__global__ void __launch_bounds__(1024) norm_rows_kernel(const float* __restrict__ x, int64_t ldx, int k,
                                                         const float* __restrict__ norm, float eps, float* y) {
    launch_dependents();
    wait_for_predecessor();
    __shared__ float warp_sum[32];
    const float* row = x + blockIdx.x * ldx;
    float squares = 0.0f;
    for (int i = threadIdx.x; i < k; i += blockDim.x) { const float v = __ldcg(row + i); squares = __fmaf_rn(v, v, squares); }
    for (int d = 16; d; d >>= 1) squares += __shfl_xor_sync(~0u, squares, d);
    if ((threadIdx.x & 31) == 0) warp_sum[threadIdx.x >> 5] = squares;
    __syncthreads();
    float total = 0.0f;
    for (int w = 0; w < static_cast<int>(blockDim.x >> 5); ++w) total += warp_sum[w];
    const float factor = __frsqrt_rn(__fmaf_rn(total, 1.0f / k, eps));
    float* out = y + static_cast<int64_t>(blockIdx.x) * k;
    for (int i = threadIdx.x; i < k; i += blockDim.x) {
        const float v = __ldcg(row + i);
        out[i] = norm ? __fmul_rn(__fmul_rn(v, norm[i]), factor) : v;
    }
}

}  // namespace

cudaError_t quantize_rows(const NextnMatmul& m, const MatmulWorkspace& w, cudaStream_t stream) {
    const int supers = m.k / kSUPER, groups = ceil_div(m.t, kGroupTokens);
    const int warps = m.norm_weight ? min(supers, kMAX_WARPS) : min(supers, 8);
    Launch l;
    l.grid = dim3(m.t, m.norm_weight ? 1 : ceil_div(supers, warps));
    l.block = dim3(32 * warps);
    l.smem = sizeof(float) * (m.norm_weight ? supers : warps);
    l.pdl = m.flags & NEXTN_PDL;
    return launch(l, stream, quantize_rows_kernel, m.x, m.ldx, m.k, groups, m.norm_weight, m.norm_eps, w.quantized);
}

cudaError_t norm_rows(const NextnMatmul& m, float* y, cudaStream_t stream) {
    Launch l;
    l.grid = dim3(m.t);
    l.block = dim3(m.k >= 4096 ? 1024 : 256);
    l.pdl = m.flags & NEXTN_PDL;
    return launch(l, stream, norm_rows_kernel, m.x, m.ldx, m.k, m.norm_weight, m.norm_eps, y);
}

}  // namespace nextn
