// nextn_layer: the persistent kernel for what it takes, the single kernels for the rest.
#include "layer.h"
#include "layer_parts.cuh"
#include "matmul.h"

namespace nextn {

LayerWorkspace layer_workspace(void* base, const NextnLayer& p) {
    LayerWorkspace w = {};
    auto* at = static_cast<uint8_t*>(base);
    const auto take = [&](size_t bytes) {
        uint8_t* here = at + w.bytes;
        w.bytes += round_up(bytes, 256);
        return here;
    };
    const auto rows = [&](int64_t n) { return reinterpret_cast<float*>(take(sizeof(float) * p.t * n)); };
    w.input_width = 0;
    for (int i = 0; i < p.inputs; ++i) w.input_width += p.input[i].n;
    w.input_width = static_cast<int64_t>(round_up(w.input_width, 4));
    w.mixer_width = has_attention(p) ? static_cast<int64_t>(p.attention.heads) * p.attention.head_dim
                                     : static_cast<int64_t>(p.delta_net.v_heads) * p.delta_net.head_dim;
    w.input = rows(w.input_width);
    // from here on in the order of use: the persistent kernel clears what it has not used yet
    w.mixer = rows(w.mixer_width);
    w.squares = rows(4 * p.delta_net.v_heads);
    w.residual = rows(p.d);
    w.ffn = rows(p.gate.n);
    const int64_t width[] = {p.d, w.mixer_width, p.d, p.gate.n};
    for (int k = 0; k < 4; ++k)
        w.operands[k] = reinterpret_cast<OperandBlock*>(
            take(p.t > kGroupTokens ? ceil_div(width[k], kSUPER) * sizeof(OperandBlock) : 0));
    w.operands[4] = reinterpret_cast<OperandBlock*>(take(0));
    const NextnGatedDeltaNet& g = p.delta_net;
    w.mixer_bytes = has_attention(p) ? nextn_attention_workspace(p.t, p.attention.heads, p.attention.head_dim)
                                     : nextn_gated_delta_net_workspace(p.t, g.k_heads, g.v_heads, g.head_dim);
    w.mixer_work = take(w.mixer_bytes);
    w.matmul_bytes = nextn_matmul_workspace(p.t, max(max(static_cast<int>(w.mixer_width), p.d), p.gate.n));
    w.matmul_work = take(w.matmul_bytes);
    return w;
}

namespace {

// A product of the layer's single-kernel form; the caller adds matrices.
NextnMatmul product(const NextnLayer& p, const LayerWorkspace& w, const float* x, int64_t k, const float* norm) {
    NextnMatmul m = {};
    m.x = x;
    m.ldx = k;
    m.t = p.t;
    m.k = static_cast<int32_t>(k);
    m.norm_weight = norm;
    m.norm_eps = p.eps;
    m.workspace = w.matmul_work;
    m.workspace_bytes = w.matmul_bytes;
    m.flags = p.flags & NEXTN_PDL;
    return m;
}

void add(NextnMatmul* m, const NextnLayerMatrix& s, float* y, int64_t ldy) {
    m->matrix[m->n_matrices++] = {s.weight, s.type, s.n, y, ldy};
}

cudaError_t run_inputs(const NextnLayer& p, const LayerWorkspace& w, cudaStream_t stream) {
    NextnMatmul m = product(p, w, p.x, p.d, p.mixer_norm);
    float* y = w.input;
    for (int i = 0; i < p.inputs; y += p.input[i++].n) add(&m, p.input[i], y, w.input_width);
    return nextn_matmul(&m, stream);
}

NextnGatedDeltaNet delta_net(const NextnLayer& p, const LayerWorkspace& w) {
    NextnGatedDeltaNet g = p.delta_net;
    g.qkv = w.input;
    g.z = g.qkv + p.input[0].n;
    g.alpha = g.z + p.input[1].n;
    g.beta = g.alpha + p.input[2].n;
    g.ld_qkv = g.ld_z = g.ld_gate = w.input_width;
    g.eps = p.eps;
    g.y = w.mixer;
    g.ld_y = w.mixer_width;
    g.t = p.t;
    g.workspace = w.mixer_work;
    g.workspace_bytes = w.mixer_bytes;
    g.flags = p.flags & NEXTN_PDL;
    return g;
}

cudaError_t run_mixer(const NextnLayer& p, const LayerWorkspace& w, cudaStream_t stream) {
    if (has_attention(p)) {
        NextnAttention a = p.attention;
        a.query_gate = w.input;
        a.key = a.query_gate + p.input[0].n;
        a.value = a.key + p.input[1].n;
        a.ld_query = a.ld_kv = w.input_width;
        a.eps = p.eps;
        a.y = w.mixer;
        a.ld_y = w.mixer_width;
        a.t = p.t;
        a.workspace = w.mixer_work;
        a.workspace_bytes = w.mixer_bytes;
        a.flags = p.flags & NEXTN_PDL;
        return nextn_attention(&a, stream);
    }
    const NextnGatedDeltaNet g = delta_net(p, w);
    return nextn_gated_delta_net(&g, stream);
}

cudaError_t run_output_and_ffn(const NextnLayer& p, const LayerWorkspace& w, cudaStream_t stream) {
    NextnMatmul out = product(p, w, w.mixer, w.mixer_width, nullptr);
    out.residual = p.x;
    out.ldr = p.d;
    add(&out, p.output, w.residual, p.d);
    cudaError_t e = nextn_matmul(&out, stream);
    if (e != cudaSuccess) return e;
    NextnMatmul up = product(p, w, w.residual, p.d, p.ffn_norm);
    up.swiglu = 1;
    add(&up, p.gate, w.ffn, p.gate.n);
    add(&up, p.up, nullptr, p.gate.n);
    e = nextn_matmul(&up, stream);
    if (e != cudaSuccess) return e;
    NextnMatmul down = product(p, w, w.ffn, p.gate.n, nullptr);
    down.residual = w.residual;
    down.ldr = p.d;
    add(&down, p.down, p.y, p.d);
    return nextn_matmul(&down, stream);
}

bool valid(const NextnLayer& p) {
    if (p.t < 1 || p.d < 4 || p.d % 4 || !p.x || !p.y || p.x == p.y || !p.sync) return false;
    if (has_attention(p) == (p.delta_net.head_dim != 0) || p.inputs != (has_attention(p) ? 3 : 4)) return false;
    if (p.output.n != p.d || p.down.n != p.d || p.gate.n != p.up.n || p.gate.type != p.up.type) return false;
    return p.workspace && p.workspace_bytes >= nextn_layer_workspace(&p);
}

}  // namespace
}  // namespace nextn

NEXTN_API size_t nextn_layer_workspace(const NextnLayer* layer) {
    return nextn::layer_workspace(nullptr, *layer).bytes;
}

NEXTN_API cudaError_t nextn_layer(const NextnLayer* layer, cudaStream_t stream) {
    using namespace nextn;
    if (!layer || !valid(*layer)) return cudaErrorInvalidValue;
    const LayerWorkspace w = layer_workspace(layer->workspace, *layer);
    DeviceLimits limits;
    cudaError_t e = device_limits(&limits);
    if (e != cudaSuccess) return e;
    int blocks = 0;
    if (layer->t <= NEXTN_MAX_DECODE_T) e = layer_blocks(limits, &blocks);
    if (e != cudaSuccess) return e;
    const LayerFusion fusion = layer_fusion(*layer, limits, blocks);
    const auto persistent = [&](LayerPart part) {
        return layer_decode(*layer, w, part, limits, blocks, delta_net(*layer, w), stream);
    };
    if (fusion == LayerFusion::kWHOLE) return persistent(LayerPart::kWHOLE);
    e = fusion == LayerFusion::kAROUND_MIXER ? persistent(LayerPart::kINPUT) : run_inputs(*layer, w, stream);
    if (e == cudaSuccess) e = run_mixer(*layer, w, stream);
    if (e != cudaSuccess) return e;
    if (fusion == LayerFusion::kNONE) return run_output_and_ffn(*layer, w, stream);
    return persistent(fusion == LayerFusion::kAROUND_MIXER ? LayerPart::kAFTER_INPUT : LayerPart::kAFTER_MIXER);
}
