// Decode matmul of large matrices: the persistent kernel's loop over one product (see persistent.cuh).
#include "matmul_parts.cuh"
#include "persistent.cuh"

namespace nextn {
namespace {

// ONE: the block quantises its token itself, else the rows come from quantize_rows.
template <bool ONE, int NT>
__global__ void __launch_bounds__(kTHREADS + kPRODUCERS, 1) stream_kernel(const __grid_constant__ LayerParams p) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) uint8_t ring[];
    __shared__ LayerShared<NT> s;
    if (!enter(p, s, ring)) return;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    auto* slots = reinterpret_cast<TokenSlot*>(ring + p.stages * p.stage_bytes);
    Consumer<ONE, NT> c = {p, s, slots, ring, warp, lane, {}, 0, 0};
    if (lane == 0) mbarrier_arrive(&s.go);
    wait_for_predecessor();
    const Phase& f = p.phase[kINPUT];
    if constexpr (ONE) {
        const RowSource& from = p.source[kINPUT];
        c.quantize_own(f, from, false);
        if (warp < f.supers) c.load_chunk(warp);
        if (threadIdx.x < kGroupTokens) {  // summed as quantize_rows does for several tokens
            float total = 0.0f;
            for (int w = 0; from.norm && w < f.supers; ++w) total = __fadd_rn(total, s.squares[w]);
            s.factor[threadIdx.x] = from.norm ? rms_factor(total, f.supers * kSUPER, p.eps) : 1.0f;
        }
    } else {
        c.take_quantized(f);
    }
    c.multiply(f);
#endif
}

template <bool ONE, int NT>
cudaError_t run(LayerParams& p, const DeviceLimits& limits, bool pdl, cudaStream_t stream) {
    const size_t scratch = ONE ? sizeof(TokenSlot) * kWARPS : 0;
    return launch_persistent<NT>(stream_kernel<ONE, NT>, p, scratch, limits, pdl, stream);
}

}  // namespace

bool kquant_streams(const NextnMatmul& m, int first, int count, const DeviceLimits& limits) {
    const int supers = m.k / kSUPER;
    if (!runs_persistent(limits) || supers < kWARPS / 2 || (m.residual && m.ldr != m.matrix[first].ldy)) return false;
    int64_t rows = 0;
    for (int i = 0; i < count; ++i) {
        const NextnMatrix& s = m.matrix[first + i];
        if (!ring_takes(s.type, supers) || s.ldy != m.matrix[first].ldy) return false;
        rows += s.n;
    }
    return rows >= 8 * kTILE_ROWS * static_cast<int64_t>(limits.sm_count);  // fewer: its start costs more than it gains
}

cudaError_t kquant_stream(const NextnMatmul& m, int first, int count, const QuantizedRows& quantized, bool own,
                          const DeviceLimits& limits, cudaStream_t stream) {
    LayerParams p = {};
    p.first = p.last = kINPUT;
    Phase& f = p.phase[kINPUT];
    const int segments = m.swiglu ? 1 : count;
    NextnLayerMatrix matrices[NEXTN_MAX_MATRICES];
    for (int i = 0; i < segments; ++i) {
        const NextnMatrix& s = m.matrix[first + i];
        matrices[i] = {s.weight, s.type, s.n};
    }
    f = phase_of(m.k, matrices, segments, nullptr, m.matrix[first].ldy, limits.sm_count);
    for (int i = 0; i < segments; ++i) f.segment[i].y = m.matrix[first + i].y;
    if (m.swiglu) f.segment[0].second = static_cast<const uint8_t*>(m.matrix[first + 1].weight);
    f.residual = m.residual;
    p.source[kINPUT] = {m.x, m.ldx, m.norm_weight, nullptr};
    p.shared = quantized;
    p.eps = m.norm_eps;
    p.t = m.t;
    const bool pdl = m.flags & NEXTN_PDL;
    if (own) return run<true, 1>(p, limits, pdl, stream);
    return m.t <= kGroupTokens ? run<false, 1>(p, limits, pdl, stream) : run<false, 2>(p, limits, pdl, stream);
}

}  // namespace nextn
