// Everything of a chunk that does not need the state (see gated_delta_net_chunks.cuh), all chunks side by side.
#include "gated_delta_net_chunks.cuh"
#include "split_bf16.cuh"

namespace nextn {
namespace {

constexpr int kPAIR = 2;  // value heads at a time: one to each half of a block

template <int D>
struct PrepareShared {
    static constexpr int kPITCH = D + 4;  // float2 operands of 8 rows fall into different banks
    float rows[2][kCHUNK_T][kPITCH];        // queries, keys
    float dots[2][kCHUNK_T][kCHUNK_T + 1];  // q_t . k_i, k_t . k_i
    __align__(16) float l[kPAIR][kCHUNK_T][kCHUNK_T + 4];  // transposed
    float log_decay[kPAIR][kCHUNK_T], rate[kPAIR][kCHUNK_T], since_start[kPAIR][kCHUNK_T];
};

__device__ __forceinline__ float quick_silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

// One channel of a chunk: rows as they are read, then, in their place, what conv and silu make of them; tokens that are
// not there are 0.  TAPS: the conv's kernel, or an upper limit of it.
template <int TAPS>
struct Channel {
    float v[kCHUNK_T], earlier[TAPS - 1], weight[TAPS];  // weights moved to the end

    // The first chunk's block, which is the one that reads the old window, moves it on.
    __device__ __forceinline__ void load(const NextnGatedDeltaNet& p, int t0, int channel, int64_t channels, int slot) {
        const int before = p.conv_kernel - 1, count = min(kCHUNK_T, p.t - t0);
        const float* rows = p.qkv + t0 * p.ld_qkv + channel;
        float* pool = p.conv_pool + channel;
        const float* window = pool + static_cast<int64_t>(max(slot, 0)) * before * channels;
#pragma unroll
        for (int j = 0; j < TAPS; ++j) {
            const int tap = j - (TAPS - p.conv_kernel);
            weight[j] = tap < 0 ? 0.0f : p.conv_weight[channel * p.conv_kernel + tap];
        }
#pragma unroll
        for (int j = 0; j < TAPS - 1; ++j) {
            const int back = TAPS - 1 - j;  // rows before the chunk
            earlier[j] = 0.0f;
            if (back > before) continue;
            if (t0)
                earlier[j] = __ldcg(rows - back * p.ld_qkv);
            else if (slot >= 0)
                earlier[j] = __ldcg(window + (before - back) * channels);
        }
        if (count == kCHUNK_T) {
#pragma unroll
            for (int t = 0; t < kCHUNK_T; ++t) v[t] = __ldcg(rows + t * p.ld_qkv);
        } else {
#pragma unroll
            for (int t = 0; t < kCHUNK_T; ++t) v[t] = t < count ? __ldcg(rows + t * p.ld_qkv) : 0.0f;
        }
        if (t0 == 0)  // there are more tokens than the window has rows
            for (int j = 0; j < before; ++j) pool[j * channels] = __ldcg(rows + (p.t - before + j) * p.ld_qkv);
    }
    __device__ __forceinline__ void convolve(int kernel, int count) {
#pragma unroll
        for (int t = kCHUNK_T - 1; t >= 0; --t) {  // backwards, as results replace rows
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < TAPS; ++j) {
                const int at = t - (TAPS - 1) + j;
                if (TAPS == 4 || j >= TAPS - kernel)
                    sum = __fmaf_rn(weight[j], at < 0 ? earlier[at + TAPS - 1] : v[at], sum);
            }
            v[t] = t < count ? quick_silu(sum) : 0.0f;
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

// Gates of two heads' chunk, L into shared memory, P and the decays to the workspace; a warp has some consecutive rows
// t, a lane one column i.  D[t, i] sums the logs from i + 1 on, so that a strong decay before i costs nothing of what
// comes after it.
template <int D>
__device__ void decays_of_heads(const NextnGatedDeltaNet& p, PrepareShared<D>& s, const ChunkWorkspace& w, int chunk,
                                int first_head) {
    const int t0 = chunk * kCHUNK_T, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    for (int i = warp; i < kPAIR; i += blockDim.x >> 5) {
        const int t = t0 + lane, h = first_head + i * p.k_heads;
        float log_decay = 0.0f, rate = 0.0f;
        if (t < p.t && h < p.v_heads) {
            const float x = __fadd_rn(__ldcg(p.alpha + t * p.ld_gate + h), p.dt_bias[h]);
            log_decay = __fmul_rn(p.a[h], x > 20.0f ? x : log1pf(expf(x)));
            rate = __fdiv_rn(1.0f, __fadd_rn(1.0f, expf(-__ldcg(p.beta + t * p.ld_gate + h))));
        }
        s.log_decay[i][lane] = log_decay;
        s.rate[i][lane] = rate;
    }
    __syncthreads();
    constexpr int kROWS = kPAIR * kCHUNK_T / (2 * D / 32);  // of a warp
    const int i = warp * kROWS / kCHUNK_T, first = warp * kROWS % kCHUNK_T, h = first_head + i * p.k_heads;
    if (h < p.v_heads) {
        const int64_t at = static_cast<int64_t>(chunk) * p.v_heads + h;
        uint16_t* out = w.p + at * 2 * kCHUNK_T * kCHUNK_T + lane;
        float sum = 0.0f, start = 0.0f;  // logs of i + 1 .. t, and of 0 .. t
        for (int t = 0; t < first + kROWS; ++t) {
            const float a = s.log_decay[i][t];
            sum += t > lane ? a : 0.0f;
            start += a;
            if (t < first) continue;
            const float decay = lane <= t ? expf(sum) : 0.0f;
            s.l[i][lane][t] = lane < t ? s.rate[i][t] * decay * s.dots[1][t][lane] : 0.0f;
            const float v[1] = {lane <= t ? decay * s.dots[0][t][lane] : 0.0f};  // above, dots may be anything
            store_split<kCHUNK_T * kCHUNK_T>(out + t * kCHUNK_T, v);
            if (lane == 0) s.since_start[i][t] = w.decays[at * 2 * kCHUNK_T + t] = expf(start);
            if (t == kCHUNK_T - 1) w.decays[(at * 2 + 1) * kCHUNK_T + lane] = decay;
        }
    }
    __syncthreads();
}

// (I + L) y = x; l: the transpose of L.  Every y_i is taken out of the rows below as soon as it is known.
__device__ __forceinline__ void solve(float (&x)[kCHUNK_T], const float (*l)[kCHUNK_T + 4]) {
#pragma unroll
    for (int i = 0; i < kCHUNK_T - 1; ++i)
#pragma unroll
        for (int t = (i + 1) / 4 * 4; t < kCHUNK_T; t += 4) {
            float v[4];  // read in order: all of L at once would not fit into registers
            asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                         : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
                         : "r"(smem_address(&l[i][t]))
                         : "memory");
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (t + e > i) x[t + e] = __fmaf_rn(-v[e], x[i], x[t + e]);
        }
}

// grid (chunks, key heads), 2 D threads.  A thread has a channel of the queries or keys, then a column of a value head,
// and of its W.
template <int D, int TAPS>
__global__ void __launch_bounds__(2 * D, 256 / D)
    prepare_kernel(const __grid_constant__ NextnGatedDeltaNet p, const __grid_constant__ ChunkWorkspace w) {
    extern __shared__ __align__(16) uint8_t raw[];
    auto& s = *reinterpret_cast<PrepareShared<D>*>(raw);
    launch_dependents();
    wait_for_predecessor();
    const int chunk = blockIdx.x, t0 = chunk * kCHUNK_T, key_head = blockIdx.y, column = threadIdx.x % D;
    const int half = threadIdx.x / D, count = min(kCHUNK_T, p.t - t0);
    const int64_t channels = (2 * p.k_heads + p.v_heads) * static_cast<int64_t>(D);
    const int slot = __ldcg(p.slot);
    Channel<TAPS> x;
    x.load(p, t0, (half * p.k_heads + key_head) * D + column, channels, slot);
    x.convolve(p.conv_kernel, count);
#pragma unroll
    for (int t = 0; t < kCHUNK_T; ++t) s.rows[half][t][column] = x.v[t];
    for (int first = key_head; first < p.v_heads; first += kPAIR * p.k_heads) {
        const int h = first + half * p.k_heads;
        if (h < p.v_heads) x.load(p, t0, (2 * p.k_heads + h) * D + column, channels, slot);
        __syncthreads();
        if (first == key_head) {  // while the values are on their way
            norm_rows<D>(p, s, w, t0, key_head);
            __syncthreads();
            multiply_rows<D>(s);
            __syncthreads();
        }
        decays_of_heads<D>(p, s, w, chunk, first);
        if (h >= p.v_heads) continue;  // the last of an odd number; nobody waits for this half any more
        x.convolve(p.conv_kernel, count);
#pragma unroll
        for (int t = 0; t < kCHUNK_T; ++t) x.v[t] *= s.rate[half][t];
        solve(x.v, s.l[half]);
        const int64_t row0 = static_cast<int64_t>(t0) * p.v_heads + h;
#pragma unroll
        for (int t = 0; t < kCHUNK_T; ++t) w.u[(row0 + t * p.v_heads) * D + column] = x.v[t];
#pragma unroll
        for (int t = 0; t < kCHUNK_T; ++t) x.v[t] = s.rate[half][t] * s.since_start[half][t] * s.rows[1][t][column];
        solve(x.v, s.l[half]);
#pragma unroll
        for (int t = 0; t < kCHUNK_T; ++t) {
            const float v[1] = {x.v[t]};
            store_split<D>(w.w + (row0 + t * p.v_heads) * 2 * D + column, v);
        }
    }
}

template <int D>
cudaError_t run(const NextnGatedDeltaNet& p, const ChunkWorkspace& w, cudaStream_t stream) {
    Launch l;
    l.grid = dim3(ceil_div(p.t, kCHUNK_T), p.k_heads);
    l.block = dim3(2 * D);
    l.smem = sizeof(PrepareShared<D>);
    l.pdl = p.flags & NEXTN_PDL;
    return launch(l, stream, p.conv_kernel == 4 ? prepare_kernel<D, 4> : prepare_kernel<D, kMAX_KERNEL>, p, w);
}

}  // namespace

cudaError_t prepare_chunks(const NextnGatedDeltaNet& p, const ChunkWorkspace& w, cudaStream_t stream) {
    return p.head_dim == 32 ? run<32>(p, w, stream) : p.head_dim == 64 ? run<64>(p, w, stream) : run<128>(p, w, stream);
}

}  // namespace nextn
