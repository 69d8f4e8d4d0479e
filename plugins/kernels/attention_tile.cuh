// One block's attention: 16*MT query rows (row r = token r / ratio, head r % ratio of one kv head) against keys in
// tiles of 64, f16 tensor cores, online softmax in float32.
//
// A row's result depends on its own keys only: tiles start at fixed positions, masked keys get weight exactly 0 and
// values beyond the last row are read as 0, so rows and tokens around it change nothing. As 0 * NaN is NaN, a row whose
// values the cache cannot hold is stored as values 0 and a key of NaN, which makes it and those after it NaN, no others.
#pragma once
#include "attention_heads.cuh"

namespace nextn {

constexpr int kWARPS = 8, kATT_THREADS = 32 * kWARPS;
constexpr float kLOG2E = 1.4426950408889634f;

// Rows: of the cache, HalfRows or ByteRows.
template <int D, int MT, typename Rows = HalfRows<D>>
struct AttentionShared {
    static constexpr int kROWS = 16 * MT;
    __half q[kROWS][D + 8];
    alignas(16) typename Rows::Tile k[Rows::kSTAGES], v[Rows::kSTAGES];
    union {
        float scores[kROWS][kKEYS + 4];
        float scratch[kWARPS][D];  // while queries and keys are prepared
    };
    __half weights[kROWS][kKEYS + 8];
    float max[kROWS], sum[kROWS], rescale[kROWS];
    int last[kROWS];  // last key position of the row, -1 for a row that is not there
};

template <int D, int MT, typename Rows = HalfRows<D>>
struct AttentionBlock {
    using Shared = AttentionShared<D, MT, Rows>;
    static constexpr int kROWS = Shared::kROWS, kSTAGES = Rows::kSTAGES, kTILES = Rows::kTILES;

    Shared& s;
    const NextnAttention& p;
    int kv, warp, lane;
    float out[MT][kTILES][4];

    __device__ __forceinline__ AttentionBlock(Shared& shared, const NextnAttention& params, int kv_head)
        : s(shared), p(params), kv(kv_head), warp(__shfl_sync(~0u, threadIdx.x >> 5, 0)), lane(threadIdx.x & 31) {}

    // Query rows first_row.. of this kv head; a row that is not there is zero and its `last` is -1.
    __device__ __forceinline__ void load_queries(int first_row, int position) {
        constexpr int kTOGETHER = 2;  // rows of a warp whose loads are under way at once
        const int ratio = p.heads / p.kv_heads, rows = p.t * ratio, pairs = p.rope_dim / 2;
        float* scratch = s.scratch[warp];
        for (int r0 = warp; r0 < kROWS; r0 += kTOGETHER * kWARPS) {
            float x[kTOGETHER][D / 32];
            const auto place = [&](int i, int* t) {
                const int row = first_row + r0 + i * kWARPS, h = kv * ratio + row % ratio;
                *t = row / ratio;
                return row < rows && position + *t < p.capacity
                           ? p.query_gate + *t * p.ld_query + static_cast<int64_t>(h) * 2 * D
                           : nullptr;
            };
#pragma unroll
            for (int i = 0; i < kTOGETHER; ++i) {
                int t;
                if (const float* from = place(i, &t)) load_head<D>(x[i], from, lane);
            }
#pragma unroll
            for (int i = 0; i < kTOGETHER; ++i) {
                int t;
                const int r = r0 + i * kWARPS;
                const bool there = place(i, &t) != nullptr;
                if (there)
                    norm_rope_head<D>(x[i], p.q_norm, p.eps, p.cos + t * pairs, p.sin + t * pairs, pairs, scratch,
                                      lane);
#pragma unroll
                for (int e = lane; e < D; e += 32)
                    s.q[r][Rows::query_place(e)] = __float2half_rn(there ? scratch[e] : 0.0f);
                __syncwarp();
                if (lane == 0) {
                    s.last[r] = there ? position + t : -1;
                    s.max[r] = -INFINITY;
                    s.sum[r] = 0.0f;
                }
            }
        }
        clear();
    }

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int n = 0; n < kTILES; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) out[m][n][e] = 0.0f;
    }

    // Start copying the rows key0 .. of a tile; rows at and beyond `end` become zeros, those from `fresh` to there are
    // left alone.
    __device__ __forceinline__ void copy_tile(typename Rows::Tile& to, const void* cache, int key0, int fresh,
                                              int end) {
        constexpr int kPIECES = Rows::kVALUE_BYTES / 16;  // 16-byte pieces of a row; int8 scales are one more
        constexpr int kSTEP = kATT_THREADS / kPIECES;     // rows that the block copies at once
        constexpr int kTIMES = kSTEP < kKEYS ? kKEYS / kSTEP : 1;
        const int stride = p.kv_heads * Rows::kBYTES, j0 = threadIdx.x / kPIECES, at = threadIdx.x % kPIECES * 16;
        const uint8_t* tile =
            static_cast<const uint8_t*>(cache) + static_cast<int64_t>(key0) * stride + kv * Rows::kBYTES;
        if (key0 < end && (kSTEP <= kKEYS || j0 < kKEYS)) {
            const uint8_t* from = kept(tile + j0 * stride + at);
            const uint32_t place = kept(smem_address(to[j0] + at));
#pragma unroll
            for (int i = 0; i < kTIMES; ++i, from += kSTEP * stride)
                if (copied(key0 + i * kSTEP + j0, fresh, end))
                    cp_async_16(place + i * kSTEP * Rows::kPITCH, from, key0 + i * kSTEP + j0 < end);
        }
        if (key0 < end && Rows::kBYTES > Rows::kVALUE_BYTES && threadIdx.x < kKEYS &&
            copied(key0 + threadIdx.x, fresh, end))
            cp_async_16(to[threadIdx.x] + Rows::kVALUE_BYTES, tile + threadIdx.x * stride + Rows::kVALUE_BYTES,
                        key0 + threadIdx.x < end);
        cp_async_commit();
    }

    __device__ __forceinline__ static bool copied(int key, int fresh, int end) { return key < fresh || key >= end; }

    // scores[r][j] = q[r] . k[j]; warp w takes keys 8w ..
    __device__ __forceinline__ void multiply_keys(int stage) {
        float acc[MT][4] = {};
        Rows::template scores<MT>(acc, s.q, s.k[stage], 8 * warp, lane);
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                s.scores[16 * m + 8 * (e >> 1) + (lane >> 2)][8 * warp + 2 * (lane & 3) + (e & 1)] = acc[m][e];
    }

    // Weights of this tile and the running maximum and sum; 8 or 16 neighbouring threads share a row. Either way a sum
    // is made of the same parts: keys p, p+8, p+16, p+24 and keys p+32 ..
    __device__ __forceinline__ void softmax_tile(int key0) {
        constexpr int kPARTS = MT == 1 ? 16 : 8, kMINE = kKEYS / kPARTS;
        const float scale = __fmul_rn(kLOG2E, rsqrtf(static_cast<float>(D)));
        for (int r = threadIdx.x / kPARTS; r < kROWS; r += kATT_THREADS / kPARTS) {
            const int part = threadIdx.x % kPARTS, first = (part & 7) + 8 * kMINE * (part >> 3);
            float v[kMINE], top = -INFINITY;
#pragma unroll
            for (int j = 0; j < kMINE; ++j) {
                const int key = first + 8 * j;
                v[j] = key0 + key <= s.last[r] ? __fmul_rn(s.scores[r][key], scale) : -INFINITY;
                top = fmaxf(top, v[j]);
            }
#pragma unroll
            for (int d = kPARTS / 2; d; d >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
            const float before = s.max[r], now = fmaxf(before, top);
            const float base = now == -INFINITY ? 0.0f : now;
            float sums[kMINE / 4] = {};
#pragma unroll
            for (int j = 0; j < kMINE; ++j) {
                const __half w = __float2half_rn(exp2f(__fsub_rn(v[j], base)));
                s.weights[r][first + 8 * j] = w;
                sums[j / 4] = __fadd_rn(sums[j / 4], __half2float(w));
            }
            float sum = kPARTS == 8 ? __fadd_rn(sums[0], sums[kMINE / 4 - 1]) : sums[0];
#pragma unroll
            for (int d = kPARTS / 2; d; d >>= 1) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, d));
            __syncwarp();
            if (part == 0) {
                const float rescale = exp2f(__fsub_rn(before, base));
                s.rescale[r] = rescale;
                s.max[r] = now;
                s.sum[r] = __fmaf_rn(s.sum[r], rescale, sum);
            }
        }
    }

    // out = rescale * out + weights . v
    __device__ __forceinline__ void multiply_values(int stage) {
        if (Rows::kVALUE_WARPS < kWARPS && warp >= Rows::kVALUE_WARPS) return;
#pragma unroll
        for (int m = 0; m < MT; ++m) {
            const float f0 = s.rescale[16 * m + (lane >> 2)], f8 = s.rescale[16 * m + 8 + (lane >> 2)];
#pragma unroll
            for (int n = 0; n < kTILES; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) out[m][n][e] = __fmul_rn(out[m][n][e], e < 2 ? f0 : f8);
        }
        Rows::template add_values<MT>(out, s.weights, s.v[stage], warp, lane);
    }

    // Start reading the first kSTAGES tiles of keys begin .. end-1, begin a multiple of kKEYS; rows from `fresh` on are
    // for the caller to store.
    __device__ __forceinline__ void start(int begin, int end, int fresh) {
#pragma unroll
        for (int i = 0; i < kSTAGES; ++i) {
            copy_tile(s.k[i], p.key_cache, begin + i * kKEYS, fresh, end);
            copy_tile(s.v[i], p.value_cache, begin + i * kKEYS, fresh, end);
        }
    }

    // Attend to the keys that `start` began with.
    __device__ __forceinline__ void attend(int begin, int end) {
        constexpr int kLATER = 2 * kSTAGES - 1;  // copies queued after the one waited for
        int stage = 0;
        for (int key0 = begin; key0 < end; key0 += kKEYS) {
            cp_async_wait<kLATER>();
            __syncthreads();
            multiply_keys(stage);
            __syncthreads();
            copy_tile(s.k[stage], p.key_cache, key0 + kSTAGES * kKEYS, end, end);
            softmax_tile(key0);
            cp_async_wait<kLATER>();
            __syncthreads();
            multiply_values(stage);
            __syncthreads();
            copy_tile(s.v[stage], p.value_cache, key0 + kSTAGES * kKEYS, end, end);
            stage = (stage + 1) % kSTAGES;
        }
    }

    // f(row)(column, run) for every run of neighbouring columns, float2 or float4, that this thread has of a row.
    template <typename F>
    __device__ __forceinline__ void for_each_run(F f) const {
        if (Rows::kVALUE_WARPS < kWARPS && warp >= Rows::kVALUE_WARPS) return;
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                Rows::runs(out[m], half, warp, lane, f(16 * m + 8 * half + (lane >> 2)));
    }

    // f(row)(column, value) for every accumulator of this thread; column in 0..D-1.
    template <typename F>
    __device__ __forceinline__ void for_each_output(F f) const {
        for_each_run([&](int r) {
            return [put = f(r)](int c, const auto& run) {
                const auto* v = reinterpret_cast<const float*>(&run);
#pragma unroll
                for (int i = 0; i < static_cast<int>(sizeof(run) / sizeof(float)); ++i) put(c + i, v[i]);
            };
        });
    }
};

}  // namespace nextn
