// nextn_matmul: validates, prepares the activations once and runs each group of equal-typed matrices.
#include "matmul.h"
#include "launch.cuh"
#include "matmul_parts.cuh"
#include "rms_norm.h"

namespace nextn {

MatmulWorkspace matmul_workspace(void* base, int t, int k) {
    MatmulWorkspace w = {};
    auto* p = static_cast<uint8_t*>(base);
    const auto take = [&](size_t bytes) {
        uint8_t* at = p + w.bytes;
        w.bytes += round_up(bytes, 256);
        return at;
    };
    const size_t supers = ceil_div(k, kSUPER);
    if (t <= NEXTN_MAX_DECODE_T) {
        const size_t slots = supers * ceil_div(t, kGroupTokens);
        w.quantized = {take(slots * 2048), take(slots * 256), take(slots * 256),
                       reinterpret_cast<float*>(take(slots * kGroupTokens * sizeof(float))),
                       reinterpret_cast<float*>(take(NEXTN_MAX_DECODE_T * sizeof(float)))};
    } else {
        const size_t padded = round_up(t, 8);
        w.half_rows = reinterpret_cast<__half*>(take(sizeof(__half) * padded * k));
        w.half_sums = reinterpret_cast<__half*>(take(sizeof(__half) * padded * supers * 16));
        w.row_scale = reinterpret_cast<float*>(take(sizeof(float) * t));
    }
    w.normed = reinterpret_cast<float*>(take(sizeof(float) * t * k));
    return w;
}

namespace {

cudaError_t prefill(const NextnMatmul& m, int first, int count, const MatmulWorkspace& w, const DeviceLimits& limits,
                    bool wgmma, cudaStream_t stream) {
    if constexpr (kHAS_SM90A)
        if (wgmma) return kquant_prefill_wgmma(m, first, count, w, limits, stream);
    return kquant_prefill(m, first, count, w, stream);
}

bool valid(const NextnMatmul& m) {
    if (m.t < 1 || m.k < 1 || !m.x || m.n_matrices < 1 || m.n_matrices > NEXTN_MAX_MATRICES) return false;
    if (m.ldx < m.k || m.ldx % 4 || m.k % 4 || (m.residual && (m.n_matrices != 1 || m.ldr < m.matrix[0].n)))
        return false;
    if (m.swiglu && (m.n_matrices != 2 || m.matrix[0].type != m.matrix[1].type || m.matrix[0].n != m.matrix[1].n))
        return false;
    for (int i = 0; i < m.n_matrices; ++i) {
        const NextnMatrix& s = m.matrix[i];
        const int values = block_values(s.type);
        if (!s.weight || reinterpret_cast<uintptr_t>(s.weight) % 16 || s.n < 1 || !values || m.k % values) return false;
        if ((!s.y || s.ldy < s.n) && !(m.swiglu && i == 1)) return false;
    }
    return m.workspace && reinterpret_cast<uintptr_t>(m.workspace) % 256 == 0 &&
           m.workspace_bytes >= nextn_matmul_workspace(m.t, m.k);
}

}  // namespace
}  // namespace nextn

using namespace nextn;

NEXTN_API size_t nextn_matmul_workspace(int32_t t, int32_t k) { return matmul_workspace(nullptr, t, k).bytes; }

NEXTN_API cudaError_t nextn_matmul(const NextnMatmul* args, cudaStream_t stream) {
    if (!args || !valid(*args)) return cudaErrorInvalidValue;
    const NextnMatmul& m = *args;
    const MatmulWorkspace w = matmul_workspace(m.workspace, m.t, m.k);
    const bool decode = m.t <= NEXTN_MAX_DECODE_T;
    DeviceLimits limits;
    cudaError_t e = device_limits(&limits);
    if (e != cudaSuccess) return e;
    bool prepare = false, any_dense = false;
    for (int i = 0; i < m.n_matrices; ++i) {
        const int type = m.matrix[i].type;
        if (!is_kquant(type))
            any_dense = true;
        else
            prepare |= !decode || !decode_quantizes_itself(m, type, limits);
    }
    const bool wgmma = kHAS_SM90A && limits.capability == 90;
    if (prepare) e = decode ? quantize_rows(m, w, stream) : half_rows(m, w, wgmma, stream);
    const bool normed = any_dense && m.norm_weight;
    if (e == cudaSuccess && normed)
        e = nextn_rms_norm(m.x, m.ldx, m.t, m.k, m.norm_weight, m.norm_eps, w.normed, m.k, m.flags, stream);
    for (int first = 0, end; first < m.n_matrices && e == cudaSuccess; first = end) {
        const int type = m.matrix[first].type;
        for (end = first + 1; end < m.n_matrices && m.matrix[end].type == type; ++end) {}
        if (!is_kquant(type))
            e = dense_rows(m, first, end - first, normed ? w.normed : m.x, normed ? m.k : m.ldx, stream);
        else if (decode)
            e = kquant_decode(m, first, end - first, w.quantized, limits, stream);
        else
            e = prefill(m, first, end - first, w, limits, wgmma, stream);
    }
    return e;
}
