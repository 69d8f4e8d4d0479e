// The pass over chunks (see gated_delta_net_chunks.cuh): state, o and u of a head's columns, chunk after chunk.
//
// A warp has 16 value columns and all D key rows of the state, transposed, as accumulators in registers: S^T and U^T
// [16, ..] are left operands of the next product without leaving their lanes; W, Q, P and K come from shared memory.
#include "gated_delta_net_chunks.cuh"
#include "split_bf16.cuh"

namespace nextn {
namespace {

constexpr int kC = kCHUNK_T;

template <int D>
struct ScanShared {
    static constexpr int kWARPS = D >= 64 ? 4 : 2, kTHREADS = 32 * kWARPS, kCOLUMNS = 16 * kWARPS;
    // Split rows: high parts, low parts, padded against bank conflicts.  All but the keys twice: the next chunk's
    // arrive during this one's products.
    static constexpr int kPITCH = 2 * D + 8, kP_PITCH = kC + 8;
    uint16_t w[2][kC][kPITCH], queries[2][kC][kPITCH], keys[kC][kPITCH];
    uint16_t p[2][2][kC][kP_PITCH];
    float decays[2][2][kC];  // e, D[last, :]
};

// What one block works on.
struct Place {
    int h, key_head, column0;
};

template <int D>
struct Copies {
    using Shared = ScanShared<D>;
    const NextnGatedDeltaNet& p;
    const ChunkWorkspace& w;
    const Place& at;

    // kC rows of split parts, `stride` rows apart.
    __device__ __forceinline__ void rows(uint16_t (*to)[Shared::kPITCH], const uint16_t* from, int stride) const {
        constexpr int kPIECES = 2 * D / 8;
        for (int i = threadIdx.x; i < kC * kPIECES; i += Shared::kTHREADS)
            cp_async_16(&to[i / kPIECES][i % kPIECES * 8],
                        from + static_cast<int64_t>(i / kPIECES) * stride * 2 * D + i % kPIECES * 8);
    }
    // Queries or keys of a chunk.
    __device__ __forceinline__ const uint16_t* shared_rows(int chunk, bool keys) const {
        return w.queries_keys +
               (static_cast<int64_t>(chunk) * kC * 2 * p.k_heads + (keys ? p.k_heads : 0) + at.key_head) * 2 * D;
    }
    __device__ __forceinline__ void keys(Shared& s, int chunk) const {
        rows(s.keys, shared_rows(chunk, true), 2 * p.k_heads);
        cp_async_commit();
    }
    __device__ __forceinline__ void rest(Shared& s, int chunk, int chunks) const {
        if (chunk < chunks) {
            const int b = chunk & 1;
            const int64_t head = static_cast<int64_t>(chunk) * p.v_heads + at.h;
            rows(s.w[b], w.w + (static_cast<int64_t>(chunk) * kC * p.v_heads + at.h) * 2 * D, p.v_heads);
            rows(s.queries[b], shared_rows(chunk, false), 2 * p.k_heads);
            for (int i = threadIdx.x; i < 2 * kC * kC / 8; i += Shared::kTHREADS)
                cp_async_16(&s.p[b][0][i / (kC / 8)][i % (kC / 8) * 8], w.p + head * 2 * kC * kC + i * 8);
            if (threadIdx.x < 2 * kC / 4)
                cp_async_16(&s.decays[b][0][0] + 4 * threadIdx.x, w.decays + head * 2 * kC + 4 * threadIdx.x);
        }
        cp_async_commit();
    }
};

// B operands of 16 columns, k = 16, in both parts; acc[n] += A B of 8 TILES columns.  The three products of a pair of
// parts go round the tiles in turn, so that none waits for the one before it.
struct SplitB {
    uint32_t high[4], low[4];
};
template <int TILES>
__device__ __forceinline__ void multiply(float (*acc)[4], const uint32_t (&a)[4], const SplitB (&b)[TILES / 2],
                                         bool high) {
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
        const uint32_t(&part)[4] = high ? b[n / 2].high : b[n / 2].low;
        mma_bf16_k16(acc[n], a, part[2 * (n & 1)], part[2 * (n & 1) + 1]);
    }
}
template <int TILES>
__device__ __forceinline__ void multiply(float (*acc)[4], const SplitA& a, const SplitB (&b)[TILES / 2]) {
    multiply<TILES>(acc, a.high, b, true);
    multiply<TILES>(acc, a.high, b, false);
    multiply<TILES>(acc, a.low, b, true);
}

template <int D>
struct WarpState {
    static constexpr int kPITCH = ScanShared<D>::kPITCH, kP_PITCH = ScanShared<D>::kP_PITCH;
    float s[D / 8][4];  // S^T: value columns g and g + 8, key rows 8 j + 2 q, + 1
    float uo[8][4];         // U^T, then O^T: value columns g and g + 8, tokens 8 n + 2 q, + 1
    int lane, g, q;

    // f(column, key row, s) over this lane's part of the state.
    template <typename F>
    __device__ __forceinline__ void for_each(F f) {
#pragma unroll
        for (int j = 0; j < D / 8; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) f(g + 8 * (e >> 1), 8 * j + 2 * q + (e & 1), s[j][e]);
    }
    // U0 of a chunk at the warp's first column; token rows `stride` apart.
    __device__ __forceinline__ void load_u(float (&to)[4][4], const float* from, int64_t stride) const {
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                to[n][e] = __ldcg(from + (8 * n + 2 * q + (e & 1)) * stride + g + 8 * (e >> 1));
    }
    // u = W S0, o = Q S0
    __device__ __forceinline__ void multiply_state(const uint16_t (*w)[kPITCH], const uint16_t (*queries)[kPITCH]) {
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) uo[n][e] = 0.0f;
        const int row = (lane & 7) + 8 * (lane >> 4), k0 = 8 * ((lane >> 3) & 1);
#pragma unroll
        for (int k = 0; k < D; k += 16) {
            SplitB b[4];
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                const uint16_t* at = &(n < 2 ? w : queries)[row + 16 * (n & 1)][k + k0];
                ldmatrix_x4(b[n].high, at);
                ldmatrix_x4(b[n].low, at + D);
            }
            SplitA a;
            a.set(s[k / 8], s[k / 8 + 1]);
            multiply<8>(uo, a, b);
        }
    }
    // o += P U
    __device__ __forceinline__ void multiply_p(const uint16_t (*p)[kC][kP_PITCH]) {
        const int row = (lane & 7) + 8 * (lane >> 4), k0 = 8 * ((lane >> 3) & 1);
#pragma unroll
        for (int k = 0; k < kC; k += 16) {
            SplitB b[2];
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                ldmatrix_x4(b[n].high, &p[0][row + 16 * n][k + k0]);
                ldmatrix_x4(b[n].low, &p[1][row + 16 * n][k + k0]);
            }
            SplitA a;
            a.set(uo[k / 8], uo[k / 8 + 1]);
            multiply<4>(uo + 4, a, b);
        }
    }
    // s = decay s + U^T K
    __device__ __forceinline__ void update(const uint16_t (*keys)[kPITCH], float decay) {
        constexpr int kTILES = D / 8 < 8 ? D / 8 : 8;
#pragma unroll
        for (int j = 0; j < D / 8; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) s[j][e] *= decay;
        SplitA a[kC / 16];
#pragma unroll
        for (int k = 0; k < kC / 16; ++k) a[k].set(uo[2 * k], uo[2 * k + 1]);
#pragma unroll
        for (int j = 0; j < D / 8; j += kTILES)
#pragma unroll
            for (int k = 0; k < kC / 16; ++k) {
                SplitB b[kTILES / 2];
#pragma unroll
                for (int n = 0; n < kTILES / 2; ++n) {
                    const uint16_t* at = &keys[16 * k + (lane & 15)][8 * j + 16 * n + 8 * (lane >> 4)];
                    ldmatrix_x4_trans(b[n].high, at);
                    ldmatrix_x4_trans(b[n].low, at + D);
                }
                multiply<kTILES>(s + j, a[k], b);
            }
    }
};

// grid (HV * D / kCOLUMNS)
template <int D>
__global__ void __launch_bounds__(ScanShared<D>::kTHREADS)
    scan_kernel(const __grid_constant__ NextnGatedDeltaNet p, const __grid_constant__ ChunkWorkspace w) {
    using Shared = ScanShared<D>;
    extern __shared__ __align__(16) uint8_t raw[];
    auto& s = *reinterpret_cast<Shared*>(raw);
    launch_dependents();
    wait_for_predecessor();
    constexpr int kPARTS = D / Shared::kCOLUMNS;
    const int h = blockIdx.x / kPARTS, warp = threadIdx.x >> 5, chunks = (p.t + kC - 1) / kC;
    const Place at = {h, h % p.k_heads, static_cast<int>(blockIdx.x) % kPARTS * Shared::kCOLUMNS + 16 * warp};
    const Copies<D> copies = {p, w, at};
    WarpState<D> state;
    state.lane = threadIdx.x & 31;
    state.g = state.lane >> 2;
    state.q = state.lane & 3;
    const int64_t width = static_cast<int64_t>(p.v_heads) * D, head_columns = static_cast<int64_t>(h) * D + at.column0;
    copies.rest(s, 0, chunks);
    float u0[4][4];
    state.load_u(u0, w.u + head_columns, width);
    const int slot = __ldcg(p.slot);
    const int64_t head_state = static_cast<int64_t>(h) * D * D + at.column0;
    const float* from = p.state_pool + head_state;
    state.for_each([&](int column, int row, float& v) { v = slot < 0 ? 0.0f : __ldcg(from + row * D + column); });
#pragma unroll 1
    for (int j = 1; j <= slot; ++j) {  // the way to the state after the slot's token
        const int first = at.column0 % kSTEP_COLUMNS;
        const StateStep<D> step(p.state_pool, p.v_heads, j, h, at.column0 - first);
        const float u[2] = {__ldcg(step.u(first + state.g)), __ldcg(step.u(first + state.g + 8))};
        const float decay = __ldcg(step.decay());
        state.for_each([&](int column, int row, float& v) {
            v = after_step(v, __ldcg(step.k(row)), u[column != state.g], decay);
        });
    }
    for (int chunk = 0; chunk < chunks; ++chunk) {
        const int b = chunk & 1;
        copies.keys(s, chunk);
        copies.rest(s, chunk + 1, chunks);
        cp_async_wait<2>();
        __syncthreads();
        state.multiply_state(s.w[b], s.queries[b]);
        const float *since_start = s.decays[b][0], *to_end = s.decays[b][1];
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                state.uo[n][e] = u0[n][e] - state.uo[n][e];
                state.uo[n + 4][e] *= since_start[8 * n + 2 * state.q + (e & 1)];
            }
        if (chunk + 1 < chunks) state.load_u(u0, w.u + (chunk + 1) * kC * width + head_columns, width);
        state.multiply_p(s.p[b]);
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int i = 8 * n + 2 * state.q + (e & 1), t = chunk * kC + i;
                if (t < p.t) p.y[t * p.ld_y + head_columns + state.g + 8 * (e >> 1)] = state.uo[n + 4][e];
                state.uo[n][e] *= to_end[i];
            }
        cp_async_wait<1>();
        __syncthreads();
        state.update(s.keys, since_start[kC - 1]);
        __syncthreads();
    }
    state.for_each([&](int column, int row, float& v) { p.state_pool[head_state + row * D + column] = v; });
}

template <int D>
cudaError_t run(const NextnGatedDeltaNet& p, const ChunkWorkspace& w, cudaStream_t stream) {
    Launch l;
    l.grid = dim3(p.v_heads * (D / ScanShared<D>::kCOLUMNS));
    l.block = dim3(ScanShared<D>::kTHREADS);
    l.smem = sizeof(ScanShared<D>);
    l.pdl = p.flags & NEXTN_PDL;
    return launch(l, stream, scan_kernel<D>, p, w);
}

}  // namespace

cudaError_t scan_chunks(const NextnGatedDeltaNet& p, const ChunkWorkspace& w, cudaStream_t stream) {
    return p.head_dim == 32 ? run<32>(p, w, stream) : p.head_dim == 64 ? run<64>(p, w, stream) : run<128>(p, w, stream);
}

}  // namespace nextn
