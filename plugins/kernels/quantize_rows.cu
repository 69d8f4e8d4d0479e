// Activations to int8 hi/lo pairs in tensor-core operand order, with an optional RMSNorm on the way.
//
// One warp takes 256 values of one token.  The norm's 1/rms is a factor of the whole row, so values are quantised at
// once and the row's sum of squares is needed only by the matmul's epilogue.
#include "launch.cuh"
#include "matmul_parts.cuh"
#include "quantize_superblock.cuh"

namespace nextn {
namespace {

constexpr int kMAX_WARPS = 32;

// grid (t, parts), a part of `warps` superblocks when there is no norm; one part when there is.
__global__ void __launch_bounds__(32 * kMAX_WARPS)
    quantize_rows_kernel(const float* __restrict__ x, int64_t ldx, int k, int groups, const float* __restrict__ norm,
                         float eps, QuantizedRows out) {
    extern __shared__ float squares[];  // by superblock
    launch_dependents();
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    const int token = blockIdx.x, supers = k / kSUPER;
    const int begin = norm ? 0 : blockIdx.y * warps, end = norm ? supers : min(begin + warps, supers);
    wait_for_predecessor();
    for (int sb = begin + warp; sb < end; sb += warps) {
        const int64_t at = static_cast<int64_t>(sb) * kSUPER + 32 * (lane >> 2) + 4 * (lane & 3);
        float4 v[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) v[h] = __ldcg(reinterpret_cast<const float4*>(x + token * ldx + at + 16 * h));
        if (norm) {
            float sum = squares_of(v[0], v[1]);
            sum = sum_of_places(sum);
            if (lane == 0) squares[sb] = sum;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float4 w = *reinterpret_cast<const float4*>(norm + at + 16 * h);
                v[h] = make_float4(__fmul_rn(v[h].x, w.x), __fmul_rn(v[h].y, w.y), __fmul_rn(v[h].z, w.z),
                                   __fmul_rn(v[h].w, w.w));
            }
        }
        const int64_t slot = static_cast<int64_t>(sb) * groups + token / kGroupTokens;
        const float scale = quantize_superblock(v, out, slot, token % kGroupTokens, lane);
        if (lane == 0) out.scale[slot * kGroupTokens + token % kGroupTokens] = scale;
    }
    __syncthreads();
    if (threadIdx.x || blockIdx.y) return;
    float total = 0.0f;
    for (int sb = 0; norm && sb < supers; ++sb) total = __fadd_rn(total, squares[sb]);
    out.factor[token] = norm ? rms_factor(total, k, eps) : 1.0f;
}

}  // namespace

cudaError_t quantize_rows(const NextnMatmul& m, const MatmulWorkspace& w, cudaStream_t stream) {
    const int supers = m.k / kSUPER, groups = ceil_div(m.t, kGroupTokens);
    const int warps = m.norm_weight ? min(supers, kMAX_WARPS) : min(supers, 8);
    Launch l;
    l.grid = dim3(m.t, m.norm_weight ? 1 : ceil_div(supers, warps));
    l.block = dim3(32 * warps);
    l.smem = m.norm_weight ? sizeof(float) * supers : 0;
    l.pdl = m.flags & NEXTN_PDL;
    return launch(l, stream, quantize_rows_kernel, m.x, m.ldx, m.k, groups, m.norm_weight, m.norm_eps, w.quantized);
}

}  // namespace nextn
