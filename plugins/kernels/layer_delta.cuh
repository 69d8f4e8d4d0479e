// Conv + Gated DeltaNet inside the persistent layer kernel: a block has 32 value columns of one head.
//
// What does not depend on this layer's input (state, windows, taps) is requested before that is there. The output
// norm's 1/rms is left to the reader of y: y here is o * norm weight * silu(z), with the sums of o^2 beside it.
#pragma once
#include "gated_delta_net.cuh"
#include "layer_flow.cuh"

namespace nextn {

constexpr int kGDN_CHANNELS = 2 * kGDN_DIM + kGDN_COLUMNS;  // that a block convolves: q, k, its columns of v
static_assert(kGDN_COLUMNS == kSTEP_COLUMNS, "a block has the tiles of its columns to itself");

struct __align__(16) DeltaWindow {
    float rows[kGDN_KERNEL - 1][kGDN_CHANNELS];
    int slot;
};
template <int MAX_T>
struct DeltaShared {
    static constexpr int kSTEPS = NEXTN_MAX_DECODE_T - 1;  // of the pass before that are fetched at once
    float q[MAX_T][kGDN_DIM], k[MAX_T][kGDN_DIM];
    float v[MAX_T][kGDN_COLUMNS], gate[MAX_T][kGDN_COLUMNS];
    union {
        __align__(16) float steps[kSTEPS][round_up(StateStep<kGDN_DIM>::kUSED, 4)];  // until this pass's first step
        struct {
            float2 partials[2][4][kGDN_COLUMNS];  // by parity of the token and quarter of the rows
            float o[MAX_T][kGDN_COLUMNS];
        };
    };
    static_assert(MAX_T <= kSTEPS + 1, "see take_steps");
    Gates gates[MAX_T];
    float kq[MAX_T];
};

__device__ __forceinline__ int delta_channel(const NextnGatedDeltaNet& g, int head, int column0, int i) {
    const int k_head = head % g.k_heads;
    return i < kGDN_DIM       ? k_head * kGDN_DIM + i
           : i < 2 * kGDN_DIM ? (g.k_heads + k_head) * kGDN_DIM + i - kGDN_DIM
                              : (2 * g.k_heads + head) * kGDN_DIM + column0 + i - 2 * kGDN_DIM;
}

// One warp: old windows of the block's channels to shared memory, what else it will need to L2.
__device__ __forceinline__ void fetch_windows(const LayerParams& p, DeltaWindow& old, int lane) {
    constexpr int kPIECES = kGDN_CHANNELS / 4, kBEFORE = kGDN_KERNEL - 1;
    const NextnGatedDeltaNet& g = p.delta;
    const int h = blockIdx.x / kGDN_PARTS, column0 = blockIdx.x % kGDN_PARTS * kGDN_COLUMNS, slot = __ldcg(g.slot);
    old.slot = slot;
    if (h >= g.v_heads) return;
    const int64_t channels = (2 * g.k_heads + g.v_heads) * static_cast<int64_t>(kGDN_DIM);
    for (int i = lane; i < kBEFORE * kPIECES; i += 32) {
        const int row = i / kPIECES, c = i % kPIECES * 4;
        cp_async_16(&old.rows[row][c],
                    g.conv_pool + (static_cast<int64_t>(max(slot, 0)) * kBEFORE + row) * channels +
                        delta_channel(g, h, column0, c),
                    slot >= 0);
    }
    cp_async_commit();
    for (int i = lane; i < kGDN_CHANNELS; i += 32)
        prefetch_l2(g.conv_weight + static_cast<int64_t>(delta_channel(g, h, column0, i)) * kGDN_KERNEL);
    for (int i = lane; slot >= 0 && i < kGDN_DIM; i += 32)
        prefetch_l2(g.state_pool + (static_cast<int64_t>(h) * kGDN_DIM + i) * kGDN_DIM + column0);
    prefetch_steps<kGDN_DIM>(g, slot, h, column0, lane);
}

// A warp has 32 rows of 8 columns of the state, a lane 8 rows of one: accesses are whole sectors, and a sum over the
// rows is two shuffles and one exchange among the four warps of the same columns.
template <int MAX_T>
struct DeltaBlock {
    static constexpr int kBEFORE = kGDN_KERNEL - 1, kROWS = 8;

    const LayerParams& p;
    const NextnGatedDeltaNet& g;
    DeltaWindow& old;
    DeltaShared<MAX_T>& s;
    int h, column0, slot;
    int quarter, group, row0, column;  // of the state
    bool active;
    float state[kROWS];

    __device__ __forceinline__ DeltaBlock(const LayerParams& params, DeltaWindow& before,
                                          DeltaShared<MAX_T>& shared)
        : p(params), g(params.delta), old(before), s(shared) {
        const int unit = blockIdx.x, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
        slot = before.slot;
        active = unit < g.v_heads * kGDN_PARTS;
        h = unit / kGDN_PARTS;
        column0 = unit % kGDN_PARTS * kGDN_COLUMNS;
        quarter = warp & 3;
        group = warp >> 2;
        row0 = 32 * quarter + kROWS * (lane >> 3);
        column = 8 * group + (lane & 7);
    }
    __device__ __forceinline__ int64_t channels() const {
        return (2 * g.k_heads + g.v_heads) * static_cast<int64_t>(kGDN_DIM);
    }
    __device__ __forceinline__ float* state_in_pool() const {
        return g.state_pool + (static_cast<int64_t>(h) * kGDN_DIM + row0) * kGDN_DIM + column0 + column;
    }
    __device__ __forceinline__ StateStep<kGDN_DIM> step_of(int of) const {
        return {g.state_pool, g.v_heads, of, h, column0};
    }
    __device__ __forceinline__ int slot_of(int t) const { return MAX_T == 1 ? 0 : slot_after(g, t); }

    __device__ __forceinline__ void request_state() {
        const float* from = state_in_pool();
#pragma unroll
        for (int i = 0; i < kROWS; ++i) state[i] = __ldcg(from + i * kGDN_DIM);
    }

    // Steps that lead to the state in the slot, from `first` on, to shared memory.
    __device__ __forceinline__ void fetch_steps(int first) {
        constexpr int kPIECES = sizeof(s.steps[0]) / 16;
        for (int i = keep(threadIdx.x); i < min(slot - first + 1, s.kSTEPS) * kPIECES; i += kTHREADS) {
            const int j = i / kPIECES, c = i % kPIECES * 4;
            cp_async_16(&s.steps[j][c], step_of(first + j).at + c);
        }
        cp_async_commit();
    }
    // From the state in slot 0 to the one that this pass starts from; the first steps have been fetched. More are only
    // needed of slots that this pass does not write.
    __device__ __forceinline__ void take_steps() {
#pragma unroll 1
        for (int first = 1;;) {
#pragma unroll 1
            for (int j = 0; j < min(slot - first + 1, s.kSTEPS); ++j) {
                const float* step = s.steps[j];
                const float u = step[kGDN_DIM + column], decay = step[kGDN_DIM + kGDN_COLUMNS];
                float k[kROWS];
#pragma unroll
                for (int i = 0; i < kROWS; i += 4)
                    *reinterpret_cast<float4*>(k + i) = *reinterpret_cast<const float4*>(step + row0 + i);
#pragma unroll
                for (int i = 0; i < kROWS; ++i) state[i] = after_step(state[i], k[i], u, decay);
            }
            first += s.kSTEPS;
            if (first > slot) return;
            consumers_sync();
            fetch_steps(first);
            cp_async_wait<0>();
            consumers_sync();
        }
    }

    // Conv of this thread's channel for all tokens, and the windows after each of them.
    __device__ __forceinline__ void conv() {
        const int i = threadIdx.x, channel = delta_channel(g, h, column0, i);
        const float4 w = __ldg(reinterpret_cast<const float4*>(g.conv_weight) + channel);
        const float taps[kGDN_KERNEL] = {w.x, w.y, w.z, w.w};
        float row[kBEFORE + MAX_T];
#pragma unroll
        for (int t = 0; t < MAX_T; ++t) row[kBEFORE + t] = t < p.t ? load_now(g.qkv + t * g.ld_qkv + channel) : 0.0f;
#pragma unroll
        for (int t = 0; t < MAX_T; ++t) await(g.qkv + t * g.ld_qkv + channel, row[kBEFORE + t]);
#pragma unroll
        for (int j = 0; j < kBEFORE; ++j) row[j] = old.rows[j][i];
        // q and k belong to all value heads of a key head: the first one keeps their windows
        const bool keeps = i >= 2 * kGDN_DIM || (h < g.k_heads && column0 == 0);
        float* to = i < kGDN_DIM ? &s.q[0][i] : i < 2 * kGDN_DIM ? &s.k[0][i - kGDN_DIM] : &s.v[0][i - 2 * kGDN_DIM];
        const int stride = i < 2 * kGDN_DIM ? kGDN_DIM : kGDN_COLUMNS;
#pragma unroll
        for (int t = 0; t < MAX_T; ++t) {
            if (t >= p.t) break;
            float v = 0.0f;
#pragma unroll
            for (int j = 0; j < kGDN_KERNEL; ++j) v = __fmaf_rn(taps[j], row[t + j], v);
            to[t * stride] = silu(v);
            const int at = slot_of(t);
            if (keeps && at >= 0)
#pragma unroll
                for (int j = 0; j < kBEFORE; ++j)
                    __stcg(g.conv_pool + (static_cast<int64_t>(at) * kBEFORE + j) * channels() + channel,
                           row[t + 1 + j]);
        }
    }

    // One warp a token: unit norms of q and k, and their product; what its slot keeps of them.
    __device__ __forceinline__ void normalise(int t, int lane) {
        float q[kGDN_DIM / 32], k[kGDN_DIM / 32], dot = 0.0f;
#pragma unroll
        for (int e = 0; e < kGDN_DIM / 32; ++e) {
            q[e] = s.q[t][lane + 32 * e];
            k[e] = s.k[t][lane + 32 * e];
        }
        unit_norm(q, p.eps, true);
        unit_norm(k, p.eps, false);
#pragma unroll
        for (int e = 0; e < kGDN_DIM / 32; ++e) {
            s.q[t][lane + 32 * e] = q[e];
            s.k[t][lane + 32 * e] = k[e];
            dot = __fmaf_rn(k[e], q[e], dot);
        }
        dot = warp_sum(dot);
        if (lane == 0) s.kq[t] = dot;
        const int to = slot_of(t);
        if (to <= 0) return;
        const StateStep<kGDN_DIM> kept = step_of(to);
#pragma unroll
        for (int e = 0; e < kGDN_DIM / 32; ++e) *kept.k(lane + 32 * e) = k[e];
        if (lane == 0) *kept.decay() = s.gates[t].decay;
    }

    // S' = g S + k u, u = rate (v - g S^T k); o = S'^T q = g S^T q + u (k.q): both sums use the old state.
    __device__ __forceinline__ void step(int t, int lane) {
        float k[kROWS], q[kROWS], sk = 0.0f, sq = 0.0f;
#pragma unroll
        for (int i = 0; i < kROWS; i += 4) {
            *reinterpret_cast<float4*>(k + i) = *reinterpret_cast<const float4*>(&s.k[t][row0 + i]);
            *reinterpret_cast<float4*>(q + i) = *reinterpret_cast<const float4*>(&s.q[t][row0 + i]);
        }
#pragma unroll
        for (int i = 0; i < kROWS; ++i) {
            sk = __fmaf_rn(state[i], k[i], sk);
            sq = __fmaf_rn(state[i], q[i], sq);
        }
#pragma unroll
        for (int d = 8; d < 32; d <<= 1) {
            sk = __fadd_rn(sk, __shfl_xor_sync(~0u, sk, d));
            sq = __fadd_rn(sq, __shfl_xor_sync(~0u, sq, d));
        }
        const Gates gate = s.gates[t];
        if (lane < 8) s.partials[t & 1][quarter][column] = make_float2(sk, sq);
        asm volatile("bar.sync %0, 128;" ::"r"(2 + group) : "memory");  // two buffers: one barrier a token is enough
        float k_sum = 0.0f, q_sum = 0.0f;
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const float2 f = s.partials[t & 1][r][column];
            k_sum = __fadd_rn(k_sum, f.x);
            q_sum = __fadd_rn(q_sum, f.y);
        }
        const float u = __fmul_rn(gate.rate, __fmaf_rn(-gate.decay, k_sum, s.v[t][column]));
#pragma unroll
        for (int i = 0; i < kROWS; ++i) state[i] = after_step(state[i], k[i], u, gate.decay);
        const int to = slot_of(t);
        if (quarter == 0 && lane < 8) {
            s.o[t][column] = __fmaf_rn(u, s.kq[t], __fmul_rn(gate.decay, q_sum));
            if (to > 0) *step_of(to).u(column) = u;
        }
        if (to) return;
        float* pool = state_in_pool();
#pragma unroll
        for (int i = 0; i < kROWS; ++i) pool[i * kGDN_DIM] = state[i];
    }

    __device__ __forceinline__ static float read(const float* at) {
        float v = load_now(at);
        await(at, v);
        return v;
    }

    __device__ __forceinline__ void run(int warp, int lane) {
        if (!active) return;  // the whole block
        request_state();
        consumers_sync();  // `s` may have been something else's
        if (slot > 0) fetch_steps(1);
        if (threadIdx.x < kGDN_CHANNELS) conv();
        if (warp == kWARPS - 1 && lane < p.t)
            s.gates[lane] = gates_of(g, read(g.alpha + lane * g.ld_gate + h), read(g.beta + lane * g.ld_gate + h), h);
        const int i = threadIdx.x - 320;  // warps that convolve nothing
        if (i >= 0 && i < 128)
            for (int j = i; j < p.t * kGDN_COLUMNS; j += 128) {
                const int t = j / kGDN_COLUMNS, c = j % kGDN_COLUMNS;
                const float z = read(g.z + t * g.ld_z + h * kGDN_DIM + column0 + c);
                s.gate[t][c] = __fmul_rn(__ldg(g.norm_weight + column0 + c), silu(z));
            }
        if (slot < 0)
#pragma unroll
            for (int j = 0; j < kROWS; ++j) state[j] = 0.0f;
        cp_async_wait<0>();
        consumers_sync();
        if (warp < p.t) normalise(warp, lane);
        if (slot > 0) take_steps();
        consumers_sync();
        for (int t = 0; t < p.t; ++t) step(t, lane);
        consumers_sync();
        if (warp < p.t) {
            const float o = s.o[warp][lane], sum = warp_sum(__fmul_rn(o, o));
            g.y[warp * g.ld_y + h * kGDN_DIM + column0 + lane] = __fmul_rn(o, s.gate[warp][lane]);
            if (lane == 0) p.squares[(warp * g.v_heads + h) * kGDN_PARTS + column0 / kGDN_COLUMNS] = sum;
        }
        consumers_sync();  // `s` may become something else's
    }
};

}  // namespace nextn
