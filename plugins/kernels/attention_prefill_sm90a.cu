// Prefill attention of compute capability 9.0 over an f16 cache: wgmma, softmax in registers.
//
// A block has 128 query rows (row r = token r / ratio, head r % ratio of one kv head), 64 to a warpgroup, and walks
// over all keys in tiles of 64; a third warpgroup brings keys and values two tiles ahead.  While one warpgroup takes
// the softmax of its scores, the other one's products run.
#include "attention_prefill.cuh"
#include "attention_tile.cuh"
#include "launch.cuh"
#include "wgmma.cuh"

namespace nextn {
namespace {

constexpr int kGROUPS = 2, kGROUP_ROWS = 64, kROWS = kGROUPS * kGROUP_ROWS, kTHREADS = 128 * (kGROUPS + 1);
constexpr int kSTAGES = 2, kROW_BYTES = 128;  // of a swizzled tile: 64 f16

template <int D>
struct PrefillShared {
    static constexpr int kBLOCKS = D / 64;  // tiles of 64 columns side by side
    using Tile = uint8_t[kBLOCKS][kKEYS * kROW_BYTES];
    __align__(1024) uint8_t q[kBLOCKS][kROWS * kROW_BYTES];
    __align__(1024) Tile k[kSTAGES], v[kSTAGES];
    float scratch[4 * kGROUPS][D];
    uint64_t full[2][kSTAGES], empty[2][kSTAGES];  // of keys, of values
};

// Where element `e` of row `row` lies in swizzled blocks of `rows` rows.
__device__ __forceinline__ int place(int row, int e, int rows) {
    return (e / 64 * rows + row) * kROW_BYTES + ((e % 64 / 8) ^ (row & 7)) * 16 + e % 8 * 2;
}

// Ring position of tile i.
__device__ __forceinline__ int slot_of(int tile) { return tile % kSTAGES; }
__device__ __forceinline__ uint32_t parity_of(int tile) { return tile / kSTAGES & 1; }

// Keys, then values, of every tile up to `end`; rows from there on are zeros.  A tile is reported full when the next
// copies have been queued behind it.
template <int D>
__device__ void produce(const NextnAttention& p, PrefillShared<D>& s, int kv, int end) {
    const int tiles = (end + kKEYS - 1) / kKEYS;
    const auto report = [&](int copies) {  // number `copies` has arrived
        fence_async_proxy();
        mbarrier_arrive(&s.full[copies & 1][slot_of(copies >> 1)]);
    };
    for (int copies = 0; copies < 2 * tiles; ++copies) {
        const int tile = copies >> 1, which = copies & 1, slot = slot_of(tile), key0 = tile * kKEYS;
        mbarrier_wait(&s.empty[which][slot], parity_of(tile) ^ 1);
        uint8_t* to = which ? s.v[slot][0] : s.k[slot][0];
        const auto* from = static_cast<const __half*>(which ? p.value_cache : p.key_cache);
#pragma unroll 8
        for (int i = threadIdx.x & 127; i < kKEYS * D / 8; i += 128) {
            const int row = i / (D / 8), e = i % (D / 8) * 8;
            const bool there = key0 + row < end;
            const int64_t at = there ? key0 + row : 0;
            cp_async_16(to + place(row, e, kKEYS), from + (at * p.kv_heads + kv) * D + e, there);
        }
        cp_async_commit();
        if (copies) {
            cp_async_wait<1>();
            report(copies - 1);
        }
    }
    cp_async_wait<0>();
    report(2 * tiles - 1);
}

__device__ __forceinline__ float power_of_2(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
__device__ __forceinline__ float quad_max(float v) {
    v = fmaxf(v, __shfl_xor_sync(~0u, v, 1));
    return fmaxf(v, __shfl_xor_sync(~0u, v, 2));
}

// One warp's 16 query rows; a lane has rows g and g + 8 (index 0 and 1 below).
template <int D>
struct QueryRows {
    float out[D / 2], scores[kKEYS / 2], top[2] = {-INFINITY, -INFINITY}, sum[2] = {};
    uint32_t weights[kKEYS / 16][4];
    int last[2];  // position of the last key; large for a row that is not there

    // Weights of a tile from its scores; running maximum and sum; what was summed up so far scaled to the new maximum.
    __device__ __forceinline__ void softmax(int key0, bool masked, bool first, float scale, int q) {
        float rescale[2], base[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float most = top[r];
#pragma unroll
            for (int j = 0; j < kKEYS / 8; ++j)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float& v = scores[4 * j + 2 * r + e];
                    if (masked && key0 + 8 * j + 2 * q + e > last[r]) v = -INFINITY;
                    most = fmaxf(most, v);
                }
            most = quad_max(most);
            rescale[r] = power_of_2((top[r] - most) * scale);
            base[r] = most * scale;
            top[r] = most;
            sum[r] *= rescale[r];
        }
        if (!first && __any_sync(~0u, rescale[0] != 1.0f || rescale[1] != 1.0f)) {
#pragma unroll
            for (int i = 0; i < D / 2; ++i) out[i] *= rescale[i >> 1 & 1];
        }
#pragma unroll
        for (int j = 0; j < kKEYS / 8; ++j)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float a = power_of_2(__fmaf_rn(scores[4 * j + 2 * r], scale, -base[r]));
                const float b = power_of_2(__fmaf_rn(scores[4 * j + 2 * r + 1], scale, -base[r]));
                const __half2 h = __floats2half2_rn(a, b);
                sum[r] += __low2float(h) + __high2float(h);
                weights[j / 2][2 * (j & 1) + r] = *reinterpret_cast<const uint32_t*>(&h);
            }
    }
};

__device__ __forceinline__ void group_barrier() {
    asm volatile("bar.sync %0, 128;" ::"r"(1 + static_cast<int>(threadIdx.x >> 7)) : "memory");
}

// One row's query and rotation on their way to a warp.
template <int D>
struct QueryLoad {
    float v[D / 32];
    float2 turn[D / 64];
    bool there;
    __device__ __forceinline__ void start(const NextnAttention& p, int row, int position, int kv, int lane) {
        const int ratio = p.heads / p.kv_heads, pairs = p.rope_dim / 2, t = row / ratio, h = kv * ratio + row % ratio;
        there = t < p.t && position + t < p.capacity;
        if (!there) return;
        load_head<D>(v, p.query_gate + t * p.ld_query + static_cast<int64_t>(h) * 2 * D, lane);
#pragma unroll
        for (int n = 0; n < D / 64; ++n) {
            const int i = lane + 32 * n;
            if (i < pairs) turn[n] = make_float2(__ldcg(p.cos + t * pairs + i), __ldcg(p.sin + t * pairs + i));
        }
    }
};

// A warpgroup's queries into shared memory; absent rows are zeros.
template <int D>
__device__ __forceinline__ void load_queries(const NextnAttention& p, PrefillShared<D>& s, int first_row, int position,
                                             int kv) {
    constexpr int kTOGETHER = 4;  // rows of a warp whose loads are under way at once
    const int pairs = p.rope_dim / 2, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    float* scratch = s.scratch[warp];
    for (int r0 = 16 * warp; r0 < 16 * warp + 16; r0 += kTOGETHER) {
        QueryLoad<D> loads[kTOGETHER];
#pragma unroll
        for (int i = 0; i < kTOGETHER; ++i) loads[i].start(p, first_row + r0 + i, position, kv, lane);
#pragma unroll
        for (int i = 0; i < kTOGETHER; ++i) {
            const auto turn = [&](int n) { return loads[i].turn[n]; };
            if (loads[i].there) norm_rope_head<D>(loads[i].v, p.q_norm, p.eps, turn, pairs, scratch, lane);
            for (int e = 2 * lane; e < D; e += 64)
                *reinterpret_cast<__half2*>(s.q[0] + place(r0 + i, e, kROWS)) =
                    loads[i].there ? __floats2half2_rn(scratch[e], scratch[e + 1]) : __half2();
            __syncwarp();
        }
    }
    fence_async_proxy();
    group_barrier();
}

template <int D>
__device__ __forceinline__ void attend(PrefillShared<D>& s, QueryRows<D>& rows, int tiles, int unmasked_keys) {
    const int group = threadIdx.x >> 7, lane = threadIdx.x & 31;
    const float scale = kLOG2E * rsqrtf(static_cast<float>(D));
    const uint64_t queries = swizzled_tile(s.q[0] + group * kGROUP_ROWS * kROW_BYTES);
    const auto release = [&](int which, int tile) {
        if (lane == 0) mbarrier_arrive(&s.empty[which][slot_of(tile)]);
    };
    for (int tile = 0; tile < tiles; ++tile) {
        const int slot = slot_of(tile), key0 = tile * kKEYS;
        mbarrier_wait(&s.full[0][slot], parity_of(tile));
        const uint64_t keys = swizzled_tile(s.k[slot][0]);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < D / 16; ++k)
            wgmma_f16_shared(rows.scores, queries + (k / 4 * kROWS * kROW_BYTES + k % 4 * 32) / 16,
                             keys + (k / 4 * kKEYS * kROW_BYTES + k % 4 * 32) / 16, k > 0);
        wgmma_commit();
        wgmma_wait<0>();  // of the values of the tile before as well
        release(0, tile);
        if (tile) release(1, tile - 1);
        accumulators_fence(rows.scores);
        accumulators_fence(rows.out);
        rows.softmax(key0, key0 + kKEYS > unmasked_keys, tile == 0, scale, lane & 3);
        accumulators_fence(rows.out);
        mbarrier_wait(&s.full[1][slot], parity_of(tile));
        const uint64_t values = column_tile(s.v[slot][0], kKEYS * kROW_BYTES);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kKEYS / 16; ++k)
            wgmma_f16<D, 1>(rows.out, rows.weights[k], values + k * 16 * kROW_BYTES / 16, tile > 0 || k > 0);
        wgmma_commit();
    }
    wgmma_wait<0>();
    accumulators_fence(rows.out);
}

// y = out / sum * sigmoid(gate) of one of the lane's rows.
template <int D>
__device__ __forceinline__ void store_row(const NextnAttention& p, const QueryRows<D>& rows, int r, int t, int h,
                                          bool valid, int q) {
    float sum = rows.sum[r];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (t >= p.t) return;
    const float inverse = valid ? 1.0f / sum : __uint_as_float(0x7fc00000u);
    const float* gates = p.query_gate + t * p.ld_query + (2 * h + 1) * static_cast<int64_t>(D) + 2 * q;
    float* y = p.y + t * p.ld_y + static_cast<int64_t>(h) * D + 2 * q;
    constexpr int kAHEAD = 8;
#pragma unroll
    for (int j0 = 0; j0 < D / 8; j0 += kAHEAD) {
        float2 gate[kAHEAD];
#pragma unroll
        for (int j = 0; j < kAHEAD; ++j) gate[j] = __ldcg(reinterpret_cast<const float2*>(gates + 8 * (j0 + j)));
#pragma unroll
        for (int j = 0; j < kAHEAD; ++j) {
            const float* v = rows.out + 4 * (j0 + j) + 2 * r;
            *reinterpret_cast<float2*>(y + 8 * (j0 + j)) = make_float2(v[0] * inverse / (1.0f + expf(-gate[j].x)),
                                                                       v[1] * inverse / (1.0f + expf(-gate[j].y)));
        }
    }
}

// grid (blocks of kROWS query rows, longest first; kv heads)
template <int D>
__global__ void __launch_bounds__(kTHREADS, 1) attention_prefill_kernel(const __grid_constant__ NextnAttention p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) uint8_t raw[];
    auto& s = *reinterpret_cast<PrefillShared<D>*>(raw);
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2 * kSTAGES; ++i) {
            mbarrier_init(&s.full[0][0] + i, 128);
            mbarrier_init(&s.empty[0][0] + i, 4 * kGROUPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    launch_dependents();
    wait_for_predecessor();
    const int position = __ldcg(p.position), kv = blockIdx.y, ratio = p.heads / p.kv_heads;
    const int first_row = (gridDim.x - 1 - blockIdx.x) * kROWS, query_rows = p.t * ratio;
    const int end = min(position + (min(first_row + kROWS, query_rows) - 1) / ratio + 1, p.capacity);
    if (threadIdx.x >= 128 * kGROUPS) {
        fewer_registers<40>();
        produce<D>(p, s, kv, end);
    } else {
        more_registers<232>();
        const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, row = first_row + 16 * warp + (lane >> 2);
        load_queries<D>(p, s, first_row, position, kv);
        QueryRows<D> rows;
#pragma unroll
        for (int r = 0; r < 2; ++r)
            rows.last[r] = row + 8 * r < query_rows ? position + (row + 8 * r) / ratio : 1 << 30;
        attend<D>(s, rows, (end + kKEYS - 1) / kKEYS, position + (first_row + 16 * warp) / ratio + 1);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int t = (row + 8 * r) / ratio;
            store_row<D>(p, rows, r, t, kv * ratio + (row + 8 * r) % ratio, position + t < p.capacity, lane & 3);
        }
    }
#endif
}

template <int D>
cudaError_t run(const NextnAttention& p, cudaStream_t stream) {
    Launch l;
    l.grid = dim3(ceil_div(p.t * (p.heads / p.kv_heads), kROWS), p.kv_heads);
    l.block = dim3(kTHREADS);
    l.smem = sizeof(PrefillShared<D>);
    l.pdl = p.flags & NEXTN_PDL;
    return launch(l, stream, attention_prefill_kernel<D>, p);
}

}  // namespace

cudaError_t attention_prefill_wgmma(const NextnAttention& p, cudaStream_t stream) {
    return p.head_dim == 128 ? run<128>(p, stream) : run<256>(p, stream);
}

}  // namespace nextn
