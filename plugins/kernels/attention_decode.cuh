// Attention of up to 8 tokens: blocks of one launch attend to splits of the keys, those of a second one join them.
//
// At a short context a call is a row of waits: for the position, for rows, for a tile. What comes next is asked for
// before what is there is worked on. The code, too, is waited for, as weights have driven it out of the cache since the
// layer before: there is little of it on the way of a block that has one tile.
#pragma once
#include <type_traits>
#include "attention_join.cuh"
#include "attention_tile.cuh"

namespace nextn {

// From here on a call reads so much that a block takes 32 query rows instead of 16, where there are as many: half as
// many blocks then read a key. Before, blocks of 16 rows use more of the multiprocessors.
constexpr int kWIDE_FROM = 2048;

constexpr int kREGISTER_BLOCKS = 3;  // that share a multiprocessor's registers: two, and one of the launch after this

// One block of the split launch. Of every 16 query rows a warp takes rows `warp` and `warp` + 8; it also takes the key
// and value of token `warp`.
template <int D, int MT, typename Rows>
struct SplitBlock : AttentionBlock<D, MT, Rows> {
    using Base = AttentionBlock<D, MT, Rows>;
    using Base::kv, Base::lane, Base::p, Base::s, Base::warp;
    static_assert(kWARPS >= NEXTN_MAX_DECODE_T, "a warp for each token's key");

    const Partials& part;
    int first_row;
    Heads<D, 2> query;

    __device__ __forceinline__ SplitBlock(typename Base::Shared& shared, const NextnAttention& params,
                                          const Partials& partials, int kv_head, int row)
        : Base(shared, params, kv_head), part(partials), first_row(row) {}

    struct Row {
        int t, h;
    };
    __device__ __forceinline__ Row row_of(int r) const {
        const int row = first_row + r, t = row * part.inverse >> 16;
        return {t, kv * part.ratio + row - t * part.ratio};
    }

    // Query rows 16 g ..
    __device__ __forceinline__ void request_queries(int g) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const Row row = row_of(16 * g + warp + 8 * i);
            query.load(i, p, p.query_gate + row.t * p.ld_query + row.h * 2 * D, row.t, row.t < p.t, lane);
        }
    }

    // Queries to shared memory; `last` of one whose token is not there, or has another split length, is -1.
    __device__ __forceinline__ void store_queries(int g, int position, int length) {
        query.norm_rope(p, [&](int i) { return min(row_of(16 * g + warp + 8 * i).t, p.t - 1); }, s.scratch[warp], lane);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int r = 16 * g + warp + 8 * i, t = row_of(r).t, at = position + t;
#pragma unroll
            for (int j = 0; j < D / 32; ++j) s.q[r][Rows::query_place(lane + 32 * j)] = __float2half_rn(query.v[i][j]);
            if (lane == 0) {
                s.last[r] = t < p.t && at < p.capacity && split_length(at) == length ? at : -1;
                s.max[r] = -INFINITY;
                s.sum[r] = 0.0f;
            }
        }
    }

    // The key and value of token `warp`, row `row` of this split, to their tile and the cache.
    __device__ __forceinline__ void append(int row, int at) {
        Heads<D, 1> key;
        float value[D / 32];
        const int64_t from = warp * p.ld_kv + kv * D;
        key.load(0, p, p.key + from, warp, true, lane);
        load_head<D>(value, p.value + from, lane);
        key.load_norm(p.k_norm, lane);
        key.norm_rope(p, [&](int) { return warp; }, s.scratch[warp], lane);
        hold<D, Rows>(key.v[0], value);
        const int tile = row / kKEYS;  // later tiles than the first are read from the cache
        uint8_t* const other = reinterpret_cast<uint8_t*>(s.scratch[warp]);
        uint8_t* const k = tile < Rows::kSTAGES ? s.k[tile][row % kKEYS] : other;
        uint8_t* const v = tile < Rows::kSTAGES ? s.v[tile][row % kKEYS] : other + Rows::kBYTES;
        static_assert(2 * Rows::kBYTES <= sizeof(s.scratch[0]), "rows in the scratch");
        Rows::store(k, key.v[0], lane);
        Rows::store(v, value, lane);
        __syncwarp();
        if (lane < Rows::kBYTES / 16) {
            const int64_t to = (static_cast<int64_t>(at) * p.kv_heads + kv) * (Rows::kBYTES / 16) + lane;
            static_cast<uint4*>(p.key_cache)[to] = reinterpret_cast<const uint4*>(k)[lane];
            static_cast<uint4*>(p.value_cache)[to] = reinterpret_cast<const uint4*>(v)[lane];
        }
    }

    __device__ __forceinline__ void store_partials(int split, int begin) {
        const auto index = [&](int r) {
            const Row row = row_of(r);
            return static_cast<int64_t>((split * p.t + row.t) * p.heads + row.h);
        };
        this->for_each_run([&](int r) {
            float* to = s.last[r] >= begin ? part.out + index(r) * D : nullptr;
            return [to](int c, const auto& v) {
                if (to) *reinterpret_cast<std::decay_t<decltype(v)>*>(to + c) = v;
            };
        });
        const int r = threadIdx.x;
        if (r < 16 * MT && s.last[r] >= begin) part.maximum[index(r)] = make_float2(s.max[r], s.sum[r]);
    }

    // One split, of the rows whose split length is `length`; queries 0 .. 15 are under way.
    __device__ __forceinline__ void run(int split, int position, int final, int length) {
        const int begin = split * length, end = min(begin + length, final + 1), own = position + warp;
        if (begin >= end) return;
        this->start(begin, end, position);
#pragma unroll 1
        for (int g = 0;;) {
            store_queries(g, position, length);
            if (++g == MT) break;
            request_queries(g);
        }
        if (warp < p.t && own >= begin && own < end) append(own - begin, own);
        this->clear();
        this->attend(begin, end);  // starts with a barrier
        store_partials(split, begin);
    }
};

// grid (kv heads, blocks of 16 query rows, splits).  MOST: 2 if blocks may take 32 rows each.
template <int D, int MOST, typename Rows>
__global__ void __launch_bounds__(kATT_THREADS, kREGISTER_BLOCKS)
    split_kernel(const __grid_constant__ NextnAttention p, const __grid_constant__ Partials part) {
    extern __shared__ __align__(16) uint8_t raw[];
    const int kv = blockIdx.x, split = blockIdx.z;
    launch_dependents();
    SplitBlock<D, 1, Rows> block(*reinterpret_cast<AttentionShared<D, 1, Rows>*>(raw), p, part, kv, 16 * blockIdx.y);
    block.query.load_norm(p.q_norm, block.lane);  // a constant: no launch before this one writes it
    wait_for_predecessor();
    const int position = __ldcg(p.position);
    int length = 0, longest = 0, final = 0;
#pragma unroll 1
    for (;;) {
        block.request_queries(0);
        if (length == 0) {
            final = min(position + p.t, p.capacity) - 1;
            if (final < position) return;
            if (MOST == 2 && position >= kWIDE_FROM) break;
            length = split_length(position);
            longest = split_length(final);
        }
        block.run(split, position, final, length);
        if (length == longest) return;
        length = longest;
        __syncthreads();
    }
    if (32 * blockIdx.y >= p.t * part.ratio) return;
    SplitBlock<D, MOST, Rows> wide(*reinterpret_cast<AttentionShared<D, MOST, Rows>*>(raw), p, part, kv,
                                   32 * blockIdx.y);
    wide.query.load_norm(p.q_norm, block.lane);
#pragma unroll 1
    for (length = split_length(position);; length = split_length(final)) {
        wide.request_queries(0);
        wide.run(split, position, final, length);
        if (length == split_length(final)) return;
        __syncthreads();
    }
}

}  // namespace nextn
