// What the kernels of token choice share: the workspace of a row, reading logits, the best key of some tokens.
#pragma once
#include <cuda_runtime_api.h>

#include "select.h"
#include "select_noise.cuh"

namespace nextn {

constexpr int kSELECT_BLOCKS = 64, kSELECT_THREADS = 256;  // blocks of a row, threads of a block
constexpr int kSELECT_WARPS = kSELECT_THREADS / 32;
constexpr int kBINS = 1024, kLISTED = 2048;
constexpr float kNEGLIGIBLE = 30.0f;  // so far below the best logit a token's share is 0, and so rounded that it stays

struct alignas(16) Best {
    double key;
    int id, bad;  // bad: a NaN or an infinity among the logits
};

struct Token {
    float logit;
    int id;
};

// Of one row. What is in it means something only within one call.
struct SelectRow {
    Best largest[kSELECT_BLOCKS], keys[kSELECT_BLOCKS];  // of each block
    unsigned long long shares[kBINS];
    uint32_t counts[kBINS];
    uint32_t listed, arrived;  // tokens listed (those beyond kLISTED only counted), blocks done
    Token list[kLISTED];
};

struct Settings {
    double temperature, least_below, top_p;
    int top_k;  // 0: off
    uint2 seed;
    __device__ bool filters() const { return top_k > 0 || top_p < 1.0; }
};

__device__ __forceinline__ Settings read_settings(const NextnSampling* s, int n) {
    const auto seed = __ldcg(reinterpret_cast<const unsigned long long*>(&s->seed));
    const int k = __ldcg(&s->top_k);
    return {__ldcg(&s->temperature),
            __ldcg(&s->least_below),
            __ldcg(&s->top_p),
            k < n ? k : 0,
            make_uint2(static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32))};
}

__device__ __forceinline__ Best better(const Best& a, const Best& b) {
    const bool first = a.key > b.key || (a.key == b.key && static_cast<unsigned>(a.id) < static_cast<unsigned>(b.id));
    return {first ? a.key : b.key, first ? a.id : b.id, a.bad | b.bad};
}

// Best of the block's values, in every thread.
__device__ __forceinline__ Best block_best(Best v) {
    __shared__ Best warps[kSELECT_WARPS];
    for (int d = 16; d; d >>= 1)
        v = better(v, {__shfl_xor_sync(~0u, v.key, d), __shfl_xor_sync(~0u, v.id, d), __shfl_xor_sync(~0u, v.bad, d)});
    __syncthreads();
    if ((threadIdx.x & 31) == 0) warps[threadIdx.x >> 5] = v;
    __syncthreads();
    v = warps[0];
    for (int w = 1; w < kSELECT_WARPS; ++w) v = better(v, warps[w]);
    return v;
}

// One block's result as another launch or block left it; nothing for threads beyond the blocks.
__device__ __forceinline__ Best partial_best(const Best* of_blocks) {
    if (threadIdx.x >= kSELECT_BLOCKS) return {-INFINITY, -1, 0};
    const double2 v = __ldcg(reinterpret_cast<const double2*>(of_blocks + threadIdx.x));
    const auto rest = __double_as_longlong(v.y);
    return {v.x, static_cast<int>(rest), static_cast<int>(rest >> 32)};
}

// What a thread reads ahead of a row: tokens 4b .. 4b+3 for b = first, first + kSTEP, ..; -infinity beyond the last
// token.  With up to 262144 tokens these are all of the thread's, so they can be on their way while it waits for others.
struct Part {
    static constexpr int kAHEAD = 4, kSTEP = kSELECT_BLOCKS * kSELECT_THREADS;
    float4 x[kAHEAD];
    int first;
};

__device__ __forceinline__ Part read_part(const float* row, int n, int first) {
    Part p;
    p.first = first;
    const bool whole = reinterpret_cast<uintptr_t>(row) % 16 == 0;
#pragma unroll
    for (int i = 0; i < Part::kAHEAD; ++i) {
        const int at = 4 * (first + i * Part::kSTEP);
        p.x[i] = make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY);
        if (whole && at + 4 <= n) {
            p.x[i] = __ldcg(reinterpret_cast<const float4*>(row + at));
        } else if (at < n) {
            p.x[i].x = __ldcg(row + at);
            if (at + 1 < n) p.x[i].y = __ldcg(row + at + 1);
            if (at + 2 < n) p.x[i].z = __ldcg(row + at + 2);
            if (at + 3 < n) p.x[i].w = __ldcg(row + at + 3);
        }
    }
    return p;
}

// The thread's first part.  A block takes runs of 4 * kSELECT_THREADS tokens.
__device__ __forceinline__ Part read_part(const float* row, int n) {
    return read_part(row, n, blockIdx.x * kSELECT_THREADS + threadIdx.x);
}

// f(b, x) for the tokens 4b .. 4b+3 of `part` and of the thread's parts after it.
template <typename F>
__device__ __forceinline__ void for_each_four(const float* row, int n, Part part, F f) {
    for (;;) {
#pragma unroll
        for (int i = 0; i < Part::kAHEAD; ++i)
            if (4 * (part.first + i * Part::kSTEP) < n) {
                const float four[4] = {part.x[i].x, part.x[i].y, part.x[i].z, part.x[i].w};
                f(part.first + i * Part::kSTEP, four);
            }
        const int next = part.first + Part::kAHEAD * Part::kSTEP;
        if (4 * next >= n) return;
        part = read_part(row, n, next);
    }
}

// What the logits of a row stand for: token i is logit i's,
struct AllTokens {
    static constexpr bool kALL = true;
    __device__ __forceinline__ int operator()(int i) const { return i; }
};
// or ids[i], ascending.
struct SomeTokens {
    static constexpr bool kALL = false;
    const int32_t* ids;
    __device__ __forceinline__ int operator()(int i) const { return i < 0 ? i : __ldg(ids + i); }  // kNEXTN_NO_TOKEN
};

// Draws the noise of one row's tokens; `place` is where the chosen token will stand.
template <typename Tokens>
struct Draw {
    Tokens token;
    double temperature, peak, least_below;
    uint2 seed, place;

    __device__ Draw(Tokens tokens, const Settings& s, double top, long long where)
        : token(tokens),
          temperature(s.temperature),
          peak(top),
          least_below(s.least_below),
          seed(s.seed),
          place(make_uint2(static_cast<uint32_t>(where),
                           static_cast<uint32_t>(static_cast<unsigned long long>(where) >> 32))) {}

    __device__ __forceinline__ bool eligible(float x) const {
        return x > -INFINITY && __dadd_rn(x, -peak) >= least_below;
    }
    __device__ __forceinline__ uint4 words(int b) const { return philox(make_uint4(b, place.x, place.y, 0), seed); }
    __device__ __forceinline__ uint32_t word_of(int i) const {
        const int id = token(i), lane = id & 3;
        const uint4 drawn = words(id >> 2);
        return lane == 0 ? drawn.x : lane == 1 ? drawn.y : lane == 2 ? drawn.z : drawn.w;
    }
    __device__ __forceinline__ double key(float x, uint32_t word) const {
        return __dadd_rn(x, __dmul_rn(temperature, gumbel(word)));
    }
    // A token can win only if g >= (peak + t*GUMBEL_MIN - logit) / t = needed.  As -log(u) >= 1 - u, that takes
    // 1 - u <= exp(-needed), which the word shows before any logarithm (with a margin for float32).
    __device__ __forceinline__ bool hopeless(float x, uint32_t word) const {
        const auto needed = static_cast<float>(kGUMBEL_MIN - __dadd_rn(x, -peak) / temperature);
        return needed > 0.0f &&
               4294967296.0f - static_cast<float>(word) > 4294967296.0f * expf(-needed) * 1.001f + 512.0f;
    }
};

// The best key among this thread's tokens of which `keep(logit, i)` is true; its id is the logit's index.
template <typename Tokens, typename Keep>
__device__ __forceinline__ Best best_key(const float* row, int n, const Part& part, const Draw<Tokens>& draw,
                                         Keep keep) {
    Best best = {-INFINITY, -1, 0};
    for_each_four(row, n, part, [&](int b, const float (&x)[4]) {
        bool kept[4], any = false;
#pragma unroll
        for (int i = 0; i < 4; ++i) any |= kept[i] = keep(x[i], 4 * b + i) && draw.eligible(x[i]);
        if (!any) return;
        uint4 drawn = {};
        if (Tokens::kALL) drawn = draw.words(b);  // of other tokens, neighbours share no counter
        const uint32_t word[4] = {drawn.x, drawn.y, drawn.z, drawn.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (!kept[i]) continue;
            const uint32_t mine = Tokens::kALL ? word[i] : draw.word_of(4 * b + i);
            if (!draw.hopeless(x[i], mine)) best = better(best, {draw.key(x[i], mine), 4 * b + i, 0});
        }
    });
    return best;
}

}  // namespace nextn
