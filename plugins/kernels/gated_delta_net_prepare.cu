// Everything of a chunk that does not need the state (see gated_delta_net_chunks.cuh), all chunks side by side.
#include "gated_delta_net_chunks.cuh"
#include "split_bf16.cuh"

namespace nextn {
namespace {

template <int D>
struct PrepareShared {
    static constexpr int kPITCH = D + 4;  // float2 operands of 8 rows fall into different banks
    float rows[2][kCHUNK_T][kPITCH];        // queries, keys
    float dots[2][kCHUNK_T][kCHUNK_T + 1];  // q_t . k_i, k_t . k_i
    __align__(16) float l[kCHUNK_T][kCHUNK_T + 4];
    float log_decay[kCHUNK_T], rate[kCHUNK_T], since_start[kCHUNK_T];
};

// One channel of a chunk after conv and silu; tokens that are not there are 0.  Moves the channel's window on in the
// first chunk's block, which is the one that reads the old window.
struct Channel {
    float v[kCHUNK_T];

    __device__ __forceinline__ void load(const NextnGatedDeltaNet& p, int t0, int channel, int64_t channels, int slot) {
        const int before = p.conv_kernel - 1, count = min(kCHUNK_T, p.t - t0);
        float* pool = p.conv_pool + channel;
        const auto row_at = [&](int t) {  // before the conv; t < 0: of the old window
            if (t >= 0) return __ldcg(p.qkv + t * p.ld_qkv + channel);
            return slot < 0 ? 0.0f : __ldcg(pool + (static_cast<int64_t>(slot) * before + t + before) * channels);
        };
        float earlier[kMAX_KERNEL], weight[kMAX_KERNEL];  // rows t0 - 8 ..; weights moved to the end
#pragma unroll
        for (int j = 0; j < kMAX_KERNEL; ++j) {
            const int tap = j - (kMAX_KERNEL - p.conv_kernel);
            weight[j] = tap < 0 ? 0.0f : p.conv_weight[static_cast<int64_t>(channel) * p.conv_kernel + tap];
            earlier[j] = kMAX_KERNEL - j > before ? 0.0f : row_at(t0 - kMAX_KERNEL + j);
        }
#pragma unroll
        for (int t = 0; t < kCHUNK_T; ++t) v[t] = t < count ? row_at(t0 + t) : 0.0f;
        if (t0 == 0)  // there are more tokens than the window has rows
            for (int j = 0; j < before; ++j) pool[j * channels] = row_at(p.t - before + j);
#pragma unroll
        for (int t = kCHUNK_T - 1; t >= 0; --t) {  // backwards, as results replace rows
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < kMAX_KERNEL; ++j) {
                const int at = t + 1 + j - kMAX_KERNEL;
                if (j >= kMAX_KERNEL - p.conv_kernel)
                    sum = __fmaf_rn(weight[j], at < 0 ? earlier[at + kMAX_KERNEL] : v[at], sum);
            }
            v[t] = t < count ? silu(sum) : 0.0f;
        }
    }
};

// PER numbers of a row as split parts, D apart.
template <int D, int PER>
__device__ __forceinline__ void store_split(uint16_t* out, const float (&v)[PER]) {
    if constexpr (PER == 1) {
        const SplitPair s = split_pair(v[0], 0.0f);
        out[0] = static_cast<uint16_t>(s.high);
        out[D] = static_cast<uint16_t>(s.low);
    } else {
#pragma unroll
        for (int e = 0; e < PER; e += 2) {
            const SplitPair s = split_pair(v[e], v[e + 1]);
            *reinterpret_cast<uint32_t*>(out + e) = s.high;
            *reinterpret_cast<uint32_t*>(out + D + e) = s.low;
        }
    }
}

// Unit norm of the rows in shared memory, one warp per row, and their split copies for scan.
template <int D>
__device__ void norm_rows(const NextnGatedDeltaNet& p, PrepareShared<D>& s, const ChunkWorkspace& w, int t0, int head) {
    constexpr int kPER = D / 32;
    const int lane = threadIdx.x & 31;
    for (int i = threadIdx.x >> 5; i < 2 * kCHUNK_T; i += blockDim.x >> 5) {
        const bool query = i < kCHUNK_T;
        float* row = s.rows[!query][i % kCHUNK_T] + kPER * lane;
        float v[kPER];
#pragma unroll
        for (int e = 0; e < kPER; ++e) v[e] = row[e];
        unit_norm(v, p.eps, query);
        uint16_t* out = w.queries_keys +
                        ((t0 + i % kCHUNK_T) * static_cast<int64_t>(2 * p.k_heads) + (query ? 0 : p.k_heads) + head) *
                            2 * D + kPER * lane;
#pragma unroll
        for (int e = 0; e < kPER; ++e) row[e] = v[e];
        store_split<D>(out, v);
    }
}

// dots[0] = q k^T and dots[1] = k k^T, lower triangles; a warp takes 16 x 16 at a time.
template <int D>
__device__ void multiply_rows(PrepareShared<D>& s) {
    const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
    for (int part = threadIdx.x >> 5; part < 8; part += blockDim.x >> 5) {
        const int which = part >> 2, row0 = 16 * (part >> 1 & 1), column0 = 16 * (part & 1);
        if (column0 > row0) continue;
        float acc[2][4] = {};
        const auto pair = [&](int matrix, int row, int k) {
            return *reinterpret_cast<const float2*>(&s.rows[matrix][row][k + 2 * q]);
        };
#pragma unroll 2
        for (int k = 0; k < D; k += 16) {
            SplitA a;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 v = pair(which, row0 + g + 8 * (i & 1), k + 8 * (i >> 1));
                a.set(i, v.x, v.y);
            }
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const float2 v0 = pair(1, column0 + 8 * n + g, k), v1 = pair(1, column0 + 8 * n + g, k + 8);
                const SplitPair b0 = split_pair(v0.x, v0.y), b1 = split_pair(v1.x, v1.y);
                mma_bf16_k16(acc[n], a.high, b0.high, b1.high);
                mma_bf16_k16(acc[n], a.high, b0.low, b1.low);
                mma_bf16_k16(acc[n], a.low, b0.high, b1.high);
            }
        }
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                s.dots[which][row0 + g + 8 * (e >> 1)][column0 + 8 * n + 2 * q + (e & 1)] = acc[n][e];
    }
}

// Gates of the chunk, L into shared memory, P and the decays to the workspace.  D[t, i] sums the logs from i + 1 on,
// so that a strong decay before i costs nothing of what comes after it.
template <int D>
__device__ void decays_of_head(const NextnGatedDeltaNet& p, PrepareShared<D>& s, const ChunkWorkspace& w, int chunk,
                               int h) {
    const int t0 = chunk * kCHUNK_T, lane = threadIdx.x & 31;
    if (threadIdx.x < kCHUNK_T) {
        const int t = t0 + lane;
        float log_decay = 0.0f, rate = 0.0f;
        if (t < p.t) {
            const float x = __fadd_rn(__ldcg(p.alpha + t * p.ld_gate + h), p.dt_bias[h]);
            log_decay = __fmul_rn(p.a[h], x > 20.0f ? x : log1pf(expf(x)));
            rate = __fdiv_rn(1.0f, __fadd_rn(1.0f, expf(-__ldcg(p.beta + t * p.ld_gate + h))));
        }
        s.log_decay[lane] = log_decay;
        s.rate[lane] = rate;
    }
    __syncthreads();
    const int64_t at = static_cast<int64_t>(chunk) * p.v_heads + h;
    uint16_t* out = w.p + at * 2 * kCHUNK_T * kCHUNK_T;
    for (int t = threadIdx.x >> 5; t < kCHUNK_T; t += blockDim.x >> 5) {
        float sum = 0.0f;
        for (int j = 1; j <= t; ++j) sum += j > lane ? s.log_decay[j] : 0.0f;
        const float decay = lane <= t ? expf(sum) : 0.0f;
        s.l[t][lane] = lane < t ? s.rate[t] * decay * s.dots[1][t][lane] : 0.0f;
        const float v[1] = {lane <= t ? decay * s.dots[0][t][lane] : 0.0f};
        store_split<kCHUNK_T * kCHUNK_T>(out + t * kCHUNK_T + lane, v);
    }
    if (threadIdx.x < 2 * kCHUNK_T) {  // the first warp from the start, the second to the end
        float sum = 0.0f;
        for (int j = 0; j < kCHUNK_T; ++j)
            sum += (j > lane) == (threadIdx.x >= kCHUNK_T) ? s.log_decay[j] : 0.0f;
        const float decay = expf(sum);
        w.decays[at * 2 * kCHUNK_T + threadIdx.x] = decay;
        if (threadIdx.x < kCHUNK_T) s.since_start[lane] = decay;
    }
    __syncthreads();
}

// (I + L) y = x, row after row.
__device__ __forceinline__ void solve(float (&x)[kCHUNK_T], const float (*l)[kCHUNK_T + 4]) {
#pragma unroll
    for (int t = 1; t < kCHUNK_T; ++t)
#pragma unroll
        for (int i = 0; i < t; i += 4) {
            const float4 v = *reinterpret_cast<const float4*>(&l[t][i]);
            x[t] = __fmaf_rn(-v.x, x[i], x[t]);
            if (i + 1 < t) x[t] = __fmaf_rn(-v.y, x[i + 1], x[t]);
            if (i + 2 < t) x[t] = __fmaf_rn(-v.z, x[i + 2], x[t]);
            if (i + 3 < t) x[t] = __fmaf_rn(-v.w, x[i + 3], x[t]);
        }
}

// grid (chunks, key heads), 2 D threads: the first half takes the columns of U0, the second those of W.
template <int D>
__global__ void __launch_bounds__(2 * D, D == 128 ? 2 : 4)
    prepare_kernel(const __grid_constant__ NextnGatedDeltaNet p, const __grid_constant__ ChunkWorkspace w) {
    extern __shared__ __align__(16) uint8_t raw[];
    auto& s = *reinterpret_cast<PrepareShared<D>*>(raw);
    launch_dependents();
    wait_for_predecessor();
    const int chunk = blockIdx.x, t0 = chunk * kCHUNK_T, head = blockIdx.y, column = threadIdx.x % D;
    const bool second = threadIdx.x >= D;
    const int64_t channels = (2 * p.k_heads + p.v_heads) * static_cast<int64_t>(D);
    const int slot = __ldcg(p.slot);
    Channel x;
    x.load(p, t0, ((second ? p.k_heads : 0) + head) * D + column, channels, slot);
#pragma unroll
    for (int t = 0; t < kCHUNK_T; ++t) s.rows[second][t][column] = x.v[t];
    __syncthreads();
    norm_rows<D>(p, s, w, t0, head);
    __syncthreads();
    multiply_rows<D>(s);
    __syncthreads();
    for (int h = head; h < p.v_heads; h += p.k_heads) {
        decays_of_head<D>(p, s, w, chunk, h);
        if (!second) {
            x.load(p, t0, (2 * p.k_heads + h) * D + column, channels, slot);
#pragma unroll
            for (int t = 0; t < kCHUNK_T; ++t) x.v[t] *= s.rate[t];
        } else {
#pragma unroll
            for (int t = 0; t < kCHUNK_T; ++t) x.v[t] = s.rate[t] * s.since_start[t] * s.rows[1][t][column];
        }
        solve(x.v, s.l);
#pragma unroll
        for (int t = 0; t < kCHUNK_T; ++t) {
            const int64_t row = static_cast<int64_t>(t0 + t) * p.v_heads + h;
            const float v[1] = {x.v[t]};
            if (second)
                store_split<D>(w.w + row * 2 * D + column, v);
            else
                w.u[row * D + column] = v[0];
        }
        __syncthreads();  // before the next head's L
    }
}

template <int D>
cudaError_t run(const NextnGatedDeltaNet& p, const ChunkWorkspace& w, cudaStream_t stream) {
    Launch l;
    l.grid = dim3(ceil_div(p.t, kCHUNK_T), p.k_heads);
    l.block = dim3(2 * D);
    l.smem = sizeof(PrepareShared<D>);
    l.pdl = p.flags & NEXTN_PDL;
    return launch(l, stream, prepare_kernel<D>, p, w);
}

}  // namespace

cudaError_t prepare_chunks(const NextnGatedDeltaNet& p, const ChunkWorkspace& w, cudaStream_t stream) {
    return p.head_dim == 32 ? run<32>(p, w, stream) : p.head_dim == 64 ? run<64>(p, w, stream) : run<128>(p, w, stream);
}

}  // namespace nextn
