#include "embedding.h"
#include "kquant_blocks.cuh"
#include "launch.cuh"
#include "ptx.cuh"

namespace nextn {
namespace {

constexpr int kTHREADS = 256;

// 16-bit load: blocks of Q6_K and Q8_0 are only 2-byte aligned, and so are their f16 members.
__device__ __forceinline__ float half_at(const void* p) { return __half2float(*static_cast<const __half*>(p)); }

__device__ float affine_value(const uint8_t* block, int i, bool fifth) {
    const auto* w = reinterpret_cast<const uint32_t*>(block);
    const ScaleMin u = unpack_scale_min(w[1], w[2], w[3]);
    const int s = i / 32, l = i % 32, shift = 8 * (s & 3);
    const uint8_t* qs = block + (fifth ? 48 : 16);
    int q = (qs[32 * (s / 2) + l] >> (4 * (s & 1))) & 15;
    if (fifth) q |= ((block[16 + l] >> s) & 1) << 4;
    const float d = __fmul_rn(half_at(block), static_cast<float>((u.sc[s >> 2] >> shift) & 63));
    const float m = __fmul_rn(half_at(block + 2), static_cast<float>((u.mn[s >> 2] >> shift) & 63));
    return __fsub_rn(__fmul_rn(d, static_cast<float>(q)), m);
}

__device__ float value_at(const uint8_t* row, int type, int k) {
    switch (type) {
        case kNEXTN_F32: return reinterpret_cast<const float*>(row)[k];
        case kNEXTN_F16: return half_at(row + 2 * k);
        case kNEXTN_BF16:
            return __uint_as_float(static_cast<uint32_t>(reinterpret_cast<const uint16_t*>(row)[k]) << 16);
        case kNEXTN_Q8_0: {
            const auto* b = reinterpret_cast<const block_q8_0*>(row) + k / 32;
            return __fmul_rn(half_at(&b->d), static_cast<float>(b->qs[k % 32]));
        }
        case kNEXTN_Q4_K: return affine_value(row + k / kSUPER * 144, k % kSUPER, false);
        case kNEXTN_Q5_K: return affine_value(row + k / kSUPER * 176, k % kSUPER, true);
        default: {  // Q6_K
            const auto* b = reinterpret_cast<const block_q6_k*>(row) + k / kSUPER;
            const int i = k % kSUPER, h = i / 128, j = i / 32 % 4, l = i % 32;
            const int low = (b->ql[64 * h + 32 * (j & 1) + l] >> (4 * (j >> 1))) & 15;
            const int high = (b->qh[32 * h + l] >> (2 * j)) & 3;
            const float d = __fmul_rn(half_at(&b->d), static_cast<float>(b->scales[i / 16]));
            return __fmul_rn(d, static_cast<float>((low | high << 4) - 32));
        }
    }
}

__global__ void __launch_bounds__(kTHREADS)
    embedding_kernel(const uint8_t* table, int type, int n, int k, const int32_t* tokens, float* y, int64_t ldy) {
    launch_dependents();
    wait_for_predecessor();
    const int i = blockIdx.x * kTHREADS + threadIdx.x, token = __ldcg(tokens + blockIdx.y);
    if (i >= k) return;
    const bool known = token >= 0 && token < n;
    y[blockIdx.y * ldy + i] =
        known ? value_at(table + token * row_bytes(type, k), type, i) : __uint_as_float(0x7fc00000u);
}

}  // namespace
}  // namespace nextn

NEXTN_API cudaError_t nextn_embedding(const void* table, int32_t type, int32_t n, int32_t k, const int32_t* tokens,
                                      int32_t t, float* y, int64_t ldy, int32_t flags, cudaStream_t stream) {
    using namespace nextn;
    if (!block_values(type) || k < 1 || k % block_values(type) || n < 1 || t < 0 || ldy < k)
        return cudaErrorInvalidValue;
    if (t == 0) return cudaSuccess;
    Launch l;
    l.grid = dim3(ceil_div(k, kTHREADS), t);
    l.block = dim3(kTHREADS);
    l.pdl = flags & NEXTN_PDL;
    return launch(l, stream, embedding_kernel, static_cast<const uint8_t*>(table), type, n, k, tokens, y, ldy);
}
