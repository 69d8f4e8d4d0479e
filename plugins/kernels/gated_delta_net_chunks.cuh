// Prefill of Gated DeltaNet by chunks of kCHUNK_T tokens.  Within a chunk, with S0 the state before it, log decays a_t,
// rates b_t, D[t, i] = exp(a_{i+1} + .. + a_t) and e_t = exp(a_1 + .. + a_t):
//   (I + L) U = b v - b e (k S0),  L[t, i] = b_t D[t, i] (k_t . k_i) for i < t       rows u_t are what the rule writes
//   o = e (q S0) + P U,            P[t, i] = D[t, i] (q_t . k_i) for i <= t
//   S = e_last S0 + sum_i D[last, i] k_i u_i^T
// Solving for both right-hand sides first, U = U0 - W S0, leaves only products with the state for the pass over chunks.
//   prepare (all chunks at once): conv, norms, gates, L, P, U0 = (I+L)^-1 b v and W = (I+L)^-1 b e k in float32
//   scan (chunk after chunk):     U, o and the next state on tensor cores in split bf16
// Source: Gated Delta Networks (Yang et al., 2024), section 3.3; Parallelizing Linear Transformers with the Delta Rule
// over Sequence Length (Yang et al., 2024).
#pragma once
#include "gated_delta_net.cuh"
#include "launch.cuh"

namespace nextn {

constexpr int kCHUNK_T = 32;

// Where prepare leaves its results for scan; tokens are padded to whole chunks, with rows that change nothing.
// A split row is D bf16 high parts, then D low parts.
struct ChunkWorkspace {
    uint16_t* queries_keys;  // [chunks * kCHUNK_T, 2 HK] split rows: queries, keys
    uint16_t* w;             // [chunks * kCHUNK_T, HV] split rows
    float* u;                // [chunks * kCHUNK_T, HV, D]: U0
    uint16_t* p;             // [chunks, HV, 2, kCHUNK_T, kCHUNK_T]: P, high and low parts
    float* decays;           // [chunks, HV, 2, kCHUNK_T]: e, D[last, :]
    size_t bytes;
};

inline ChunkWorkspace chunk_workspace(void* base, int t, int k_heads, int v_heads, int head_dim) {
    ChunkWorkspace w = {};
    const auto take = [&](size_t bytes) {
        uint8_t* at = static_cast<uint8_t*>(base) + w.bytes;
        w.bytes += round_up(bytes, 256);
        return at;
    };
    const size_t chunks = ceil_div(t, kCHUNK_T), row = 4 * kCHUNK_T * static_cast<size_t>(head_dim);
    w.queries_keys = reinterpret_cast<uint16_t*>(take(chunks * row * 2 * k_heads));
    w.w = reinterpret_cast<uint16_t*>(take(chunks * row * v_heads));
    w.u = reinterpret_cast<float*>(take(chunks * row * v_heads));
    w.p = reinterpret_cast<uint16_t*>(take(chunks * v_heads * 2 * kCHUNK_T * kCHUNK_T * sizeof(uint16_t)));
    w.decays = reinterpret_cast<float*>(take(chunks * v_heads * 2 * kCHUNK_T * sizeof(float)));
    return w;
}

// t > p.slots.  prepare also moves the conv window on; scan leaves the state in slot 0 and o, before the norm, in y.
cudaError_t prepare_chunks(const NextnGatedDeltaNet& p, const ChunkWorkspace& w, cudaStream_t stream);
cudaError_t scan_chunks(const NextnGatedDeltaNet& p, const ChunkWorkspace& w, cudaStream_t stream);

}  // namespace nextn
