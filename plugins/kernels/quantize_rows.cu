// Activations to int8 hi/lo pairs in tensor-core operand order, with an optional RMSNorm on the way.
//
// One warp takes 256 values of one token.  The norm's 1/rms is a factor of the whole row, so values are quantised at
// once and the row's sum of squares is needed only by the matmul's epilogue.
#include "launch.cuh"
#include "matmul_parts.cuh"
#include "ptx.cuh"
#include "token_operand.cuh"

namespace nextn {
namespace {

constexpr int kMAX_WARPS = 32;

// Writers 0, 1: column hi; 2, 3: column lo; even ones the `rest` slots, odd ones the `first` and the remaining `rest`.
__device__ void pack_sum32(uint8_t* out, int token, int sub, int sum, int writer) {
    const MinDigit d = min_digit(sum, writer >= 2);
    uint8_t* column = out + (2 * token + (writer >> 1)) * 4 * 8;
    const int q = (sub >> 2) + (writer & 1 ? 0 : 2), byte = sub & 3;
    column[q * 8 + byte] = static_cast<uint8_t>(writer & 1 ? d.first : d.rest);
    column[q * 8 + 4 + byte] = static_cast<uint8_t>(d.rest);
}

__device__ void pack_sum16(uint8_t* out, int token, int sub, int sum) {
#pragma unroll
    for (int low = 0; low < 2; ++low) {
        const OffsetDigits d = offset_digits(sum, low);
        uint8_t* at = out + ((2 * token + low) * 4 + (sub >> 2)) * 8 + (sub & 3);
        at[0] = static_cast<uint8_t>(d.first);
        at[4] = static_cast<uint8_t>(d.second);
    }
}

// Quantise 256 values held 8 to a lane: v[0] at 32*(lane/4) + 4*(lane%4), v[1] 16 further.
// Returns the scale.
__device__ float quantize_superblock(const float4 (&v)[2], const QuantizedRows& out, int64_t slot, int token,
                                     int lane) {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i)
        bits = max(bits, max(max(__float_as_uint(v[i].x) & 0x7fffffffu, __float_as_uint(v[i].y) & 0x7fffffffu),
                             max(__float_as_uint(v[i].z) & 0x7fffffffu, __float_as_uint(v[i].w) & 0x7fffffffu)));
    const QuantScale scale = quant_scale(__reduce_max_sync(~0u, bits));
    const QuantWord w[2] = {quantize4(v[0], scale.inverse), quantize4(v[1], scale.inverse)};
    int sum[2] = {w[0].sum, w[1].sum};
    const int sub = lane >> 2, q = lane & 3;
    uint8_t* frag = out.frag + slot * 2048 + (sub >> 1) * 512 + (sub & 1) * 8;
    *reinterpret_cast<uint2*>(frag + ((2 * token) * 4 + q) * 16) = make_uint2(w[0].hi, w[1].hi);
    *reinterpret_cast<uint2*>(frag + ((2 * token + 1) * 4 + q) * 16) = make_uint2(w[0].lo, w[1].lo);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        sum[h] += __shfl_xor_sync(~0u, sum[h], 1);
        sum[h] += __shfl_xor_sync(~0u, sum[h], 2);
    }
    pack_sum32(out.sum32 + slot * 256, token, sub, sum[0] + sum[1], q);
    if (q < 2) pack_sum16(out.sum16 + slot * 256, token, 2 * sub + q, q ? sum[1] : sum[0]);
    return scale.scale;
}

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
            for (const int d : {4, 8, 1, 2, 16}) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, d));
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
