// Conv + Gated DeltaNet inside the persistent layer kernel: a block has 32 value columns of one head.
//
// What does not depend on this layer's input (state, windows, taps) is requested before that is there. The output
// norm's 1/rms is left to the reader of y: y here is o * norm weight * silu(z), with the sums of o^2 beside it.
#pragma once
#include "layer_window.cuh"

namespace nextn {

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

// The last four warps have the state, a lane 32 rows of one column, the others convolve. Instructions bound the step of a
// token: what it takes besides the rows themselves is four warps' this way, instead of all warps'.
template <int MAX_T>
struct DeltaBlock {
    static constexpr int kBEFORE = kGDN_KERNEL - 1, kROWS = 32, kSTATE_WARPS = kGDN_DIM / kROWS;
    static constexpr int kGATE_WARPS = kWARPS - kSTATE_WARPS - kGDN_CHANNELS / 32;
    static_assert(kGDN_COLUMNS == 32, "a lane has a column");

    const LayerParams& p;
    const NextnGatedDeltaNet& g;
    DeltaWindow& old;
    DeltaShared<MAX_T>& s;
    int h, column0, slot;
    int row0, column;      // of the state
    bool active;

    __device__ __forceinline__ DeltaBlock(const LayerParams& params, DeltaWindow& before,
                                          DeltaShared<MAX_T>& shared)
        : p(params), g(params.delta), old(before), s(shared) {
        const int unit = blockIdx.x, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
        slot = before.slot;
        active = unit < g.v_heads * kGDN_PARTS;
        h = unit / kGDN_PARTS;
        column0 = unit % kGDN_PARTS * kGDN_COLUMNS;
        row0 = kROWS * (warp - (kWARPS - kSTATE_WARPS));
        column = lane;
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

    __device__ __forceinline__ void request_state(float (&state)[kROWS]) const {
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
    // The state after a step; k: of this warp's rows.
    static __device__ __forceinline__ void advance(float (&state)[kROWS], const float* k, float u, float decay) {
#pragma unroll
        for (int i = 0; i < kROWS; i += 4) {
            const float4 of = *reinterpret_cast<const float4*>(k + i);
            state[i] = after_step(state[i], of.x, u, decay);
            state[i + 1] = after_step(state[i + 1], of.y, u, decay);
            state[i + 2] = after_step(state[i + 2], of.z, u, decay);
            state[i + 3] = after_step(state[i + 3], of.w, u, decay);
        }
    }

    // The first n of the steps that have been fetched. They lead from the state in slot 0 to the one that this pass
    // starts from; more than fit are only needed of slots that this pass does not write.
    __device__ __forceinline__ void take_steps(float (&state)[kROWS], int n) {
#pragma unroll 1
        for (int j = 0; j < n; ++j) {
            const float* step = s.steps[j];
            advance(state, step + row0, step[kGDN_DIM + column], step[kGDN_DIM + kGDN_COLUMNS]);
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

    // Of this warp's rows: the state times v, summed up over 8 rows each, then over pairs of these, then all.
    static __device__ __forceinline__ float product(const float (&state)[kROWS], const float* v) {
        float sum[4] = {};
#pragma unroll
        for (int i = 0; i < kROWS; i += 4) {
            const float4 of = *reinterpret_cast<const float4*>(v + i);
            float& to = sum[i / 8];
            to = __fmaf_rn(state[i], of.x, to);
            to = __fmaf_rn(state[i + 1], of.y, to);
            to = __fmaf_rn(state[i + 2], of.z, to);
            to = __fmaf_rn(state[i + 3], of.w, to);
        }
        return __fadd_rn(__fadd_rn(sum[0], sum[1]), __fadd_rn(sum[2], sum[3]));
    }

    // S' = g S + k u, u = rate (v - g S^T k); o = S'^T q = g S^T q + u (k.q): both sums use the old state.
    __device__ __forceinline__ void step(float (&state)[kROWS], int t) {
        s.partials[t & 1][row0 / kROWS][column] =
            make_float2(product(state, s.k[t] + row0), product(state, s.q[t] + row0));
        const Gates gate = s.gates[t];
        // two buffers: one barrier a token is enough
        asm volatile("bar.sync 2, %0;" ::"n"(32 * kSTATE_WARPS) : "memory");
        float k_sum = 0.0f, q_sum = 0.0f;
#pragma unroll
        for (int r = 0; r < kSTATE_WARPS; ++r) {
            const float2 f = s.partials[t & 1][r][column];
            k_sum = __fadd_rn(k_sum, f.x);
            q_sum = __fadd_rn(q_sum, f.y);
        }
        const float u = __fmul_rn(gate.rate, __fmaf_rn(-gate.decay, k_sum, s.v[t][column]));
        advance(state, s.k[t] + row0, u, gate.decay);
        const int to = slot_of(t);
        if (row0 == 0) {
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

    // By kGATE_WARPS warps that convolve nothing.
    __device__ __forceinline__ void read_gate(int first, int lane) {
        constexpr int kROUNDS = (MAX_T + kGATE_WARPS - 1) / kGATE_WARPS;
        const float* from = g.z + h * kGDN_DIM + column0 + lane;
        const float weight = __ldg(g.norm_weight + column0 + lane);
        float z[kROUNDS];
#pragma unroll
        for (int r = 0; r < kROUNDS; ++r) {
            const int t = first + r * kGATE_WARPS;
            z[r] = t < p.t ? load_now(from + t * g.ld_z) : 0.0f;
        }
#pragma unroll
        for (int r = 0; r < kROUNDS; ++r) {
            const int t = first + r * kGATE_WARPS;
            await(from + t * g.ld_z, z[r]);
            if (t < p.t) s.gate[t][lane] = __fmul_rn(weight, silu(z[r]));
        }
    }

    // Steps beyond those that fit in `s`, by all warps: `take` after each lot but the last.
    template <typename F>
    __device__ __forceinline__ void fetch_more_steps(const F& take) {
        for (int first = 1; first + s.kSTEPS <= slot; first += s.kSTEPS) {
            take(first);
            consumers_sync();
            fetch_steps(first + s.kSTEPS);
            cp_async_wait<0>();
            consumers_sync();
        }
    }

    // Two programs with the same barriers: registers of the state are those of its warps alone.
    __device__ __forceinline__ void run(int warp, int lane) {
        if (!active) return;  // the whole block
        consumers_sync();     // `s` may have been something else's
        if (slot > 0) fetch_steps(1);
        if (warp >= kWARPS - kSTATE_WARPS)
            run_state();
        else
            run_others(warp, lane);
        consumers_sync();  // `s` may become something else's
    }

    __device__ __forceinline__ void run_state() {
        float state[kROWS];
        request_state(state);
        if (row0 == 0 && column < p.t) {
            const auto gate = [&](const float* of) { return read(of + column * g.ld_gate + h); };
            if constexpr (MAX_T == 1) {
                s.gates[column] = gates_of(g, gate(g.alpha), gate(g.beta), h);
            } else {  // parameters come before what is awaited; one token took longer with that
                const float a = load_now(g.a + h), dt_bias = load_now(g.dt_bias + h);
                const float alpha = gate(g.alpha), beta = gate(g.beta);
                s.gates[column] = gates_of(a, dt_bias, alpha, beta);
            }
        }
        if (slot < 0)
#pragma unroll
            for (int j = 0; j < kROWS; ++j) state[j] = 0.0f;
        cp_async_wait<0>();
        consumers_sync();
        int first = 1;
        fetch_more_steps([&](int from) {
            take_steps(state, s.kSTEPS);
            first = from + s.kSTEPS;
        });
        take_steps(state, slot - first + 1);
        consumers_sync();
#pragma unroll 1
        for (int t = 0; t < p.t; ++t) step(state, t);
        consumers_sync();
    }

    __device__ __forceinline__ void run_others(int warp, int lane) {
        if (threadIdx.x < kGDN_CHANNELS)
            conv();
        else
            read_gate(warp - kGDN_CHANNELS / 32, lane);
        cp_async_wait<0>();
        consumers_sync();
        if (warp < p.t) normalise(warp, lane);
        fetch_more_steps([](int) {});
        consumers_sync();
        consumers_sync();
        if (warp < p.t) {
            const float o = s.o[warp][lane], sum = warp_sum(__fmul_rn(o, o));
            g.y[warp * g.ld_y + h * kGDN_DIM + column0 + lane] = __fmul_rn(o, s.gate[warp][lane]);
            if (lane == 0) p.squares[(warp * g.v_heads + h) * kGDN_PARTS + column0 / kGDN_COLUMNS] = sum;
        }
    }
};

}  // namespace nextn
