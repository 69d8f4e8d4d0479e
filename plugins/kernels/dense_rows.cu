// y = W x for float rows (F32, F16, BF16) and Q8_0 in plain float32 arithmetic, up to 8 tokens a launch.
//
// One block takes kROWS rows; its warps interleave over k in pieces of 128 values, so that even a matrix of a few
// rows keeps several warps busy.  Sums: each lane along k, then lanes by butterfly, then warps in order.
#include <cuda_bf16.h>
#include "launch.cuh"
#include "matmul_parts.cuh"
#include "ptx.cuh"

namespace nextn {
namespace {

constexpr int kROWS = 4, kWARPS = 8;

// Four consecutive weights of a row, k % 4 == 0.
template <int TYPE>
__device__ __forceinline__ float4 load4(const uint8_t* row, int k) {
    if constexpr (TYPE == kNEXTN_F32) {
        return __ldg(reinterpret_cast<const float4*>(row) + k / 4);
    } else if constexpr (TYPE == kNEXTN_F16) {
        const uint2 v = __ldg(reinterpret_cast<const uint2*>(row) + k / 4);
        const float2 a = __half22float2(*reinterpret_cast<const __half2*>(&v.x));
        const float2 b = __half22float2(*reinterpret_cast<const __half2*>(&v.y));
        return make_float4(a.x, a.y, b.x, b.y);
    } else if constexpr (TYPE == kNEXTN_BF16) {
        const uint2 v = __ldg(reinterpret_cast<const uint2*>(row) + k / 4);
        return make_float4(__uint_as_float(v.x << 16), __uint_as_float(v.x & 0xffff0000u), __uint_as_float(v.y << 16),
                           __uint_as_float(v.y & 0xffff0000u));
    } else {
        const uint8_t* block = row + k / 32 * sizeof(block_q8_0);
        const float d = __half2float(__ldg(reinterpret_cast<const __half*>(block)));
        const auto* q = reinterpret_cast<const uint16_t*>(block + 2 + k % 32);
        const uint32_t lo = __ldg(q), hi = __ldg(q + 1);
        return make_float4(d * static_cast<int8_t>(lo), d * static_cast<int8_t>(lo >> 8), d * static_cast<int8_t>(hi),
                           d * static_cast<int8_t>(hi >> 8));
    }
}

struct DenseParams {
    NextnMatrix matrix[NEXTN_MAX_MATRICES];
    int first_block[NEXTN_MAX_MATRICES + 1];
    const float* x;
    const float* residual;
    int64_t ldx, ldr;
    int count, t, k;
    bool swiglu;
};

// The sum of TT tokens over kROWS rows of one matrix; valid in the block's first kROWS * TT threads afterwards.
template <int TYPE, int TT>
__device__ float block_dot(const DenseParams& p, const NextnMatrix& m, int row0, int t0, float* partial) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    float acc[kROWS][TT] = {};
    const int64_t bytes = row_bytes(TYPE, p.k);
    const auto* w = static_cast<const uint8_t*>(m.weight);
    for (int k = 128 * warp + 4 * lane; k < p.k; k += 128 * kWARPS) {
        float4 x[TT];
#pragma unroll
        for (int t = 0; t < TT; ++t)  // rows past t are computed on a valid one and dropped
            x[t] = __ldcg(reinterpret_cast<const float4*>(p.x + min(t0 + t, p.t - 1) * p.ldx + k));
#pragma unroll
        for (int r = 0; r < kROWS; ++r) {
            const float4 v = load4<TYPE>(w + min(row0 + r, m.n - 1) * bytes, k);
#pragma unroll
            for (int t = 0; t < TT; ++t) {
                acc[r][t] = __fmaf_rn(v.x, x[t].x, acc[r][t]);
                acc[r][t] = __fmaf_rn(v.y, x[t].y, acc[r][t]);
                acc[r][t] = __fmaf_rn(v.z, x[t].z, acc[r][t]);
                acc[r][t] = __fmaf_rn(v.w, x[t].w, acc[r][t]);
            }
        }
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < kROWS; ++r)
#pragma unroll
        for (int t = 0; t < TT; ++t) {
            float v = acc[r][t];
#pragma unroll
            for (int d = 16; d; d >>= 1) v = __fadd_rn(v, __shfl_xor_sync(~0u, v, d));
            if (lane == 0) partial[(r * TT + t) * kWARPS + warp] = v;
        }
    __syncthreads();
    float sum = 0.0f;
    if (threadIdx.x < kROWS * TT)
        for (int i = 0; i < kWARPS; ++i) sum = __fadd_rn(sum, partial[threadIdx.x * kWARPS + i]);
    return sum;
}

template <int TYPE, int TT>
__global__ void __launch_bounds__(32 * kWARPS) dense_rows_kernel(const __grid_constant__ DenseParams p) {
    __shared__ float partial[kROWS * TT * kWARPS];
    launch_dependents();
    wait_for_predecessor();
    int i = 0;
    while (i + 1 < p.count && static_cast<int>(blockIdx.x) >= p.first_block[i + 1]) ++i;
    const NextnMatrix& m = p.matrix[i];
    const int row0 = (blockIdx.x - p.first_block[i]) * kROWS, t0 = blockIdx.y * NEXTN_MAX_DECODE_T;
    float v = block_dot<TYPE, TT>(p, m, row0, t0, partial);
    if (p.swiglu) {
        const float up = block_dot<TYPE, TT>(p, p.matrix[1], row0, t0, partial);
        v = __fmul_rn(__fdiv_rn(v, __fadd_rn(1.0f, expf(-v))), up);
    }
    const int row = row0 + threadIdx.x / TT, t = t0 + threadIdx.x % TT;
    if (threadIdx.x >= kROWS * TT || row >= m.n || t >= p.t) return;
    if (p.residual) v = __fadd_rn(p.residual[t * p.ldr + row], v);
    m.y[t * m.ldy + row] = v;
}

template <int TYPE>
cudaError_t launch_type(const Launch& l, const DenseParams& p, cudaStream_t stream) {
    if (p.t == 1) return launch(l, stream, dense_rows_kernel<TYPE, 1>, p);
    if (p.t <= 4) return launch(l, stream, dense_rows_kernel<TYPE, 4>, p);
    return launch(l, stream, dense_rows_kernel<TYPE, 8>, p);
}

}  // namespace

cudaError_t dense_rows(const NextnMatmul& m, int first, int count, const float* x, int64_t ldx, cudaStream_t stream) {
    DenseParams p = {};
    for (int i = 0; i < count; ++i) {
        p.matrix[i] = m.matrix[first + i];
        p.first_block[i + 1] = p.first_block[i] + (m.swiglu && i ? 0 : ceil_div(p.matrix[i].n, kROWS));
    }
    p.count = m.swiglu ? 1 : count;
    p.x = x;
    p.ldx = ldx;
    p.residual = m.residual;
    p.ldr = m.ldr;
    p.t = m.t;
    p.k = m.k;
    p.swiglu = m.swiglu;
    Launch l;
    l.grid = dim3(p.first_block[count], ceil_div(m.t, NEXTN_MAX_DECODE_T));
    l.block = dim3(32 * kWARPS);
    l.pdl = m.flags & NEXTN_PDL;
    switch (m.matrix[first].type) {
        case kNEXTN_F32: return launch_type<kNEXTN_F32>(l, p, stream);
        case kNEXTN_F16: return launch_type<kNEXTN_F16>(l, p, stream);
        case kNEXTN_BF16: return launch_type<kNEXTN_BF16>(l, p, stream);
        case kNEXTN_Q8_0: return launch_type<kNEXTN_Q8_0>(l, p, stream);
        default: return cudaErrorInvalidValue;
    }
}

}  // namespace nextn
