// Heads of queries and keys: loaded, normed and rotated by a warp; keys and values as rows of the cache.
//
// A row whose values the cache cannot hold is stored as values 0 and a key of NaN: see attention_tile.cuh.
#pragma once
#include "attention.h"
#include "attention_cache.cuh"

namespace nextn {

// p, once computed: what comes of it under a condition is not computed again for each load.
template <typename T>
__device__ __forceinline__ T* kept(T* p) {
    asm volatile("" : "+l"(p));
    return p;
}
__device__ __forceinline__ uint32_t kept(uint32_t address) {
    asm volatile("" : "+r"(address));
    return address;
}

template <int D>
__device__ __forceinline__ void load_head(float (&v)[D / 32], const float* x, int lane) {
#pragma unroll
    for (int j = 0; j < D / 32; ++j) v[j] = __ldcg(x + lane + 32 * j);
}

// y = rope(rms_norm(x)) of one head by one warp; `row` is a [D] scratch in shared memory that holds y afterwards.
// turn(n): cosine and sine of pair lane + 32 n.
template <int D, typename Turn>
__device__ __forceinline__ void norm_rope_head(const float (&v)[D / 32], const float* norm, float eps, Turn turn,
                                               int pairs, float* row, int lane) {
    float squares = 0.0f;
#pragma unroll
    for (int j = 0; j < D / 32; ++j) squares = __fmaf_rn(v[j], v[j], squares);
#pragma unroll
    for (int d = 16; d; d >>= 1) squares = __fadd_rn(squares, __shfl_xor_sync(~0u, squares, d));
    const float factor = __frsqrt_rn(__fmaf_rn(squares, 1.0f / D, eps));
#pragma unroll
    for (int j = 0; j < D / 32; ++j) row[lane + 32 * j] = __fmul_rn(__fmul_rn(v[j], factor), norm[lane + 32 * j]);
    __syncwarp();
#pragma unroll
    for (int n = 0; n < (D + 63) / 64; ++n) {
        const int i = lane + 32 * n;
        if (i >= pairs) break;
        const float2 cs = turn(n);
        const float a = row[i], b = row[i + pairs];
        row[i] = __fmaf_rn(a, cs.x, -__fmul_rn(b, cs.y));
        row[i + pairs] = __fmaf_rn(b, cs.x, __fmul_rn(a, cs.y));
    }
    __syncwarp();
}
template <int D>
__device__ __forceinline__ void norm_rope_head(const float (&v)[D / 32], const float* norm, float eps, const float* cos,
                                               const float* sin, int pairs, float* row, int lane) {
    const auto turn = [&](int n) { return make_float2(__ldcg(cos + lane + 32 * n), __ldcg(sin + lane + 32 * n)); };
    norm_rope_head<D>(v, norm, eps, turn, pairs, row, lane);
}

// A key and value that the cache can hold in place of these, v[j] of each number lane + 32 j; one warp. See above.
template <int D, typename Rows>
__device__ __forceinline__ void hold(float (&key)[D / 32], float (&value)[D / 32]) {
    bool held = true;
#pragma unroll
    for (int j = 0; j < D / 32; ++j) held &= fabsf(value[j]) <= Rows::kLARGEST;
    if (!__all_sync(~0u, held))
#pragma unroll
        for (int j = 0; j < D / 32; ++j) key[j] = NAN, value[j] = 0.0f;
}

// Normalise, rotate and store the key, and store the value, of token t; one warp, scratch [D].
template <int D, typename Rows = HalfRows<D>>
__device__ __forceinline__ void append_row(const NextnAttention& p, int t, int position, int kv, float* scratch,
                                           int lane) {
    const int pairs = p.rope_dim / 2;
    const int64_t from = t * p.ld_kv + kv * D, at = (static_cast<int64_t>(position) * p.kv_heads + kv) * Rows::kBYTES;
    float key[D / 32], value[D / 32];
    load_head<D>(key, p.key + from, lane);
    load_head<D>(value, p.value + from, lane);
    norm_rope_head<D>(key, p.k_norm, p.eps, p.cos + t * pairs, p.sin + t * pairs, pairs, scratch, lane);
#pragma unroll
    for (int j = 0; j < D / 32; ++j) key[j] = scratch[lane + 32 * j];
    hold<D, Rows>(key, value);
    Rows::store(static_cast<uint8_t*>(p.key_cache) + at, key, lane);
    Rows::store(static_cast<uint8_t*>(p.value_cache) + at, value, lane);
    __syncwarp();
}

// N heads of one warp, on their way to being normed and rotated.
template <int D, int N>
struct Heads {
    float v[N][D / 32];
    float norm[D / 32];  // weights of values lane + 32 j
    float2 turn[N];      // cosine and sine of pair `lane`

    __device__ __forceinline__ void load_norm(const float* weights, int lane) {
#pragma unroll
        for (int j = 0; j < D / 32; ++j) norm[j] = __ldg(weights + lane + 32 * j);
    }

    // Head i: row x of token t; zeros if it is not there.
    __device__ __forceinline__ void load(int i, const NextnAttention& p, const float* x, int t, bool there, int lane) {
        const int pairs = p.rope_dim / 2;
        x = kept(x + lane);
        const float* const cos = kept(p.cos + t * pairs + lane);
        const float* const sin = kept(p.sin + t * pairs + lane);
#pragma unroll
        for (int j = 0; j < D / 32; ++j) v[i][j] = there ? __ldcg(x + 32 * j) : 0.0f;
        turn[i] = there && lane < pairs ? make_float2(__ldcg(cos), __ldcg(sin)) : make_float2(0.0f, 0.0f);
    }

    // v = rope(rms_norm(v)), as norm_rope_head; token(i): of head i; scratch [D] of this warp.
    template <typename Token>
    __device__ __forceinline__ void norm_rope(const NextnAttention& p, Token token, float* scratch, int lane) {
        float squares[N] = {};
#pragma unroll
        for (int i = 0; i < N; ++i)
#pragma unroll
            for (int j = 0; j < D / 32; ++j) squares[i] = __fmaf_rn(v[i][j], v[i][j], squares[i]);
#pragma unroll
        for (int d = 16; d; d >>= 1)
#pragma unroll
            for (int i = 0; i < N; ++i) squares[i] = __fadd_rn(squares[i], __shfl_xor_sync(~0u, squares[i], d));
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const float factor = __frsqrt_rn(__fmaf_rn(squares[i], 1.0f / D, p.eps));
#pragma unroll
            for (int j = 0; j < D / 32; ++j) v[i][j] = __fmul_rn(__fmul_rn(v[i][j], factor), norm[j]);
        }
        if (D >= 64 && __builtin_expect(p.rope_dim == 64, 1)) {  // both of a pair are the same lane's
#pragma unroll
            for (int i = 0; i < N; ++i) {
                const float a = v[i][0], b = v[i][D >= 64];
                v[i][0] = __fmaf_rn(a, turn[i].x, -__fmul_rn(b, turn[i].y));
                v[i][D >= 64] = __fmaf_rn(b, turn[i].x, __fmul_rn(a, turn[i].y));
            }
            return;
        }
#pragma unroll
        for (int i = 0; i < N; ++i) rotate(i, p, token(i), scratch, lane);
    }

private:
    __device__ __forceinline__ void rotate(int i, const NextnAttention& p, int t, float* scratch, int lane) {
        const int pairs = p.rope_dim / 2;
#pragma unroll
        for (int j = 0; j < D / 32; ++j) scratch[lane + 32 * j] = v[i][j];
        __syncwarp();
#pragma unroll 1
        for (int at = lane; at < pairs; at += 32) {
            const float c = __ldcg(p.cos + t * pairs + at), s = __ldcg(p.sin + t * pairs + at);
            const float a = scratch[at], b = scratch[at + pairs];
            scratch[at] = __fmaf_rn(a, c, -__fmul_rn(b, s));
            scratch[at + pairs] = __fmaf_rn(b, c, __fmul_rn(a, s));
        }
        __syncwarp();
#pragma unroll
        for (int j = 0; j < D / 32; ++j) v[i][j] = scratch[lane + 32 * j];
        __syncwarp();
    }
};

}  // namespace nextn
