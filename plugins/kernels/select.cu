// Three launches: each block's best logit; each block's best key, noise drawn only where it can decide; the winner.
#include "launch.cuh"
#include "ptx.cuh"
#include "select.h"

namespace nextn {
namespace {

constexpr int kBLOCKS = 64, kTHREADS = 256;
constexpr double kGUMBEL_MIN = -3.2;  // rounded outwards: the least value of g is -3.1298

struct Best {
    double key;
    int id, bad;  // bad: a NaN or +infinity among the logits
};
__device__ __forceinline__ Best better(const Best& a, const Best& b) {
    const bool first = a.key > b.key || (a.key == b.key && static_cast<unsigned>(a.id) < static_cast<unsigned>(b.id));
    return {first ? a.key : b.key, first ? a.id : b.id, a.bad | b.bad};
}

__device__ Best block_best(Best v) {
    __shared__ Best warps[kTHREADS / 32];
    for (int d = 16; d; d >>= 1)
        v = better(v, {__shfl_xor_sync(~0u, v.key, d), __shfl_xor_sync(~0u, v.id, d), __shfl_xor_sync(~0u, v.bad, d)});
    __syncthreads();
    if ((threadIdx.x & 31) == 0) warps[threadIdx.x >> 5] = v;
    __syncthreads();
    v = warps[0];
    for (int w = 1; w < kTHREADS / 32; ++w) v = better(v, warps[w]);
    return v;
}

// Best of the row's kBLOCKS partial results, in every thread.
__device__ Best row_best(const Best* partial) {
    Best v = {-INFINITY, -1, 0};
    if (threadIdx.x < kBLOCKS) {
        const auto* p = reinterpret_cast<const double*>(partial + threadIdx.x);
        const double key = __ldcg(p), rest = __ldcg(p + 1);
        const auto bits = __double_as_longlong(rest);
        v = {key, static_cast<int>(bits), static_cast<int>(bits >> 32)};
    }
    return block_best(v);
}

// log as the host defines it: m * 2^e with m in [sqrt(1/2), sqrt(2)), log m = 2 atanh(s) as a polynomial in s^2.
// Normal positive numbers only.
__device__ double fixed_log(double x) {
    const long long bits = __double_as_longlong(x);
    int e = static_cast<int>(bits >> 52) - 1022;
    double m = __longlong_as_double((bits & 0x000fffffffffffffll) | 0x3fe0000000000000ll);
    if (m < 0.7071067811865476) {
        m = __dadd_rn(m, m);
        --e;
    }
    double s = __ddiv_rn(__dadd_rn(m, -1.0), __dadd_rn(m, 1.0));
    const double z = __dmul_rn(s, s);
    double p = 1.0 / 23.0;
#pragma unroll
    for (int i = 10; i >= 1; --i) p = __dadd_rn(__dmul_rn(p, z), 1.0 / (2 * i + 1));
    s = __dadd_rn(s, s);
    return __dadd_rn(__dmul_rn(static_cast<double>(e), 0.6931471805599453),
                     __dadd_rn(s, __dmul_rn(s, __dmul_rn(z, p))));
}

__device__ double gumbel(uint32_t word) {
    const double u = __dmul_rn(__dadd_rn(static_cast<double>(word), 0.5), 0x1p-32);
    return -fixed_log(-fixed_log(u));
}

__device__ uint4 philox(uint4 c, uint2 key) {
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const uint32_t h0 = __umulhi(0xD2511F53u, c.x), l0 = 0xD2511F53u * c.x;
        const uint32_t h1 = __umulhi(0xCD9E8D57u, c.z), l1 = 0xCD9E8D57u * c.z;
        c = make_uint4(h1 ^ c.y ^ key.x, l1, h0 ^ c.w ^ key.y, l0);
        key.x += 0x9E3779B9u;
        key.y += 0xBB67AE85u;
    }
    return c;
}

__global__ void __launch_bounds__(kTHREADS) largest_logit_kernel(const float* logits, int64_t ld, int n, Best* out) {
    launch_dependents();
    wait_for_predecessor();
    const float* row = logits + blockIdx.y * ld;
    float top = -INFINITY;
    int id = -1, bad = 0;
    for (int v = blockIdx.x * kTHREADS + threadIdx.x; v < n; v += kBLOCKS * kTHREADS) {
        const float x = __ldcg(row + v);
        bad |= !(x < INFINITY);
        if (x > top) {
            top = x;
            id = v;
        }
    }
    const Best best = block_best({top, id, bad});
    if (threadIdx.x == 0) out[blockIdx.y * kBLOCKS + blockIdx.x] = best;
}

// A token can win only if g >= (peak + t*GUMBEL_MIN - logit) / t = needed.  As -log(u) >= 1 - u, that takes
// 1 - u <= exp(-needed), which the word shows before any logarithm (with a margin for float32).
__global__ void __launch_bounds__(kTHREADS)
    largest_key_kernel(const float* logits, int64_t ld, int n, const NextnSampling* sampling, const int32_t* position,
                       int offset, const Best* largest, Best* out) {
    launch_dependents();
    wait_for_predecessor();
    const double t = __ldcg(&sampling->temperature), least = __ldcg(&sampling->least_below);
    const Best peak = row_best(largest + blockIdx.y * kBLOCKS);
    Best best = {-INFINITY, -1, peak.bad};
    if (t > 0.0 && !peak.bad) {
        const float* row = logits + blockIdx.y * ld;
        const auto place =
            static_cast<unsigned long long>(static_cast<long long>(__ldcg(position)) + offset + blockIdx.y);
        const auto seed = __ldcg(reinterpret_cast<const unsigned long long*>(&sampling->seed));
        const uint2 key = make_uint2(static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
        for (int b = blockIdx.x * kTHREADS + threadIdx.x; 4 * b < n; b += kBLOCKS * kTHREADS) {
            float x[4];
            bool any = false;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                x[i] = 4 * b + i < n ? __ldcg(row + 4 * b + i) : -INFINITY;
                any |= x[i] > -INFINITY && __dadd_rn(x[i], -peak.key) >= least;
            }
            if (!any) continue;
            const uint4 words =
                philox(make_uint4(b, static_cast<uint32_t>(place), static_cast<uint32_t>(place >> 32), 0), key);
            const uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const double below = __dadd_rn(x[i], -peak.key);
                if (!(x[i] > -INFINITY) || below < least) continue;
                const auto needed = static_cast<float>(kGUMBEL_MIN - below / t);
                if (needed > 0.0f &&
                    4294967296.0f - static_cast<float>(word[i]) > 4294967296.0f * expf(-needed) * 1.001f + 512.0f)
                    continue;
                best = better(best, {__dadd_rn(x[i], __dmul_rn(t, gumbel(word[i]))), 4 * b + i, 0});
            }
        }
        best = block_best(best);
    }
    if (threadIdx.x == 0) out[blockIdx.y * kBLOCKS + blockIdx.x] = best;
}

__global__ void __launch_bounds__(kTHREADS)
    winner_kernel(const NextnSampling* sampling, const Best* largest, const Best* keys, int32_t* tokens) {
    launch_dependents();
    wait_for_predecessor();
    const Best best = row_best((__ldcg(&sampling->temperature) > 0.0 ? keys : largest) + blockIdx.x * kBLOCKS);
    if (threadIdx.x == 0) tokens[blockIdx.x] = best.bad ? kNEXTN_NO_TOKEN : best.id;
}

}  // namespace
}  // namespace nextn

NEXTN_API size_t nextn_select_workspace(int32_t rows) { return 2 * sizeof(nextn::Best) * rows * nextn::kBLOCKS; }

NEXTN_API cudaError_t nextn_select(const float* logits, int64_t ld, int32_t rows, int32_t n,
                                   const NextnSampling* sampling, const int32_t* position, int32_t offset,
                                   int32_t* tokens, void* workspace, size_t workspace_bytes, int32_t flags,
                                   cudaStream_t stream) {
    using namespace nextn;
    if (rows < 1 || n < 1 || n > 1 << 30 || ld < n || !workspace || workspace_bytes < nextn_select_workspace(rows))
        return cudaErrorInvalidValue;
    auto* largest = static_cast<Best*>(workspace);
    Best* keys = largest + rows * kBLOCKS;
    Launch l;
    l.grid = dim3(kBLOCKS, rows);
    l.block = dim3(kTHREADS);
    l.pdl = flags & NEXTN_PDL;
    cudaError_t e = launch(l, stream, largest_logit_kernel, logits, ld, n, largest);
    if (e == cudaSuccess)
        e = launch(l, stream, largest_key_kernel, logits, ld, n, sampling, position, offset, largest, keys);
    l.grid = dim3(rows);
    if (e == cudaSuccess) e = launch(l, stream, winner_kernel, sampling, largest, keys, tokens);
    return e;
}
