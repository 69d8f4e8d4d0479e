#include "layer_op.h"

namespace nextn {
namespace {

constexpr int64_t kPACK_BLOCK = 256;
constexpr size_t kOUTPUT_GATE_UP_DOWN = 4;

int64_t padded(int64_t bytes) { return (bytes + kPACK_BLOCK - 1) / kPACK_BLOCK * kPACK_BLOCK; }

int64_t bytesOf(int32_t type, int64_t rows, int64_t columns) {
    BlockSize const block = blockSize(type);
    return rows * (columns / block.values) * block.bytes;
}

}  // namespace

LayerOp::LayerOp(Attributes const& a, std::vector<int64_t> inputRows, int64_t mixerWidth)
    : mTypes(a.integers("types")), mInputRows(std::move(inputRows)), mMixerWidth(mixerWidth),
      mFfnSize(a.integer("ffn_size")), mEpsilon(a.number("epsilon")) {}

std::vector<AttributeSpec> LayerOp::attributes(std::vector<AttributeSpec> const& mixer) {
    std::vector<AttributeSpec> all = {{"types", AttributeKind::kINTS}, {"ffn_size", AttributeKind::kINT}};
    all.insert(all.end(), mixer.begin(), mixer.end());
    return all;
}

std::string LayerOp::contradiction() const {
    size_t const count = mInputRows.size() + kOUTPUT_GATE_UP_DOWN;
    if (mTypes.size() != count)
        return std::to_string(mTypes.size()) + " types, wanted " + std::to_string(count);
    for (int32_t type : mTypes)
        if (!blockSize(type).values) return "no kernel for GGML type " + std::to_string(type);
    if (mTypes[count - 3] != mTypes[count - 2]) return "gate and up are of different types";
    if (mFfnSize < 1) return "ffn_size " + std::to_string(mFfnSize);
    return mixerContradiction();
}

std::vector<LayerOp::Matrix> LayerOp::matrices(int64_t hidden) const {
    std::vector<Matrix> all;
    for (int64_t rows : mInputRows) all.push_back({0, rows, hidden});
    all.push_back({0, hidden, mMixerWidth});
    all.push_back({0, mFfnSize, hidden});
    all.push_back({0, mFfnSize, hidden});
    all.push_back({0, hidden, mFfnSize});
    for (size_t i = 0; i < all.size(); ++i) all[i].type = mTypes[i];
    return all;
}

std::string LayerOp::refuse(std::vector<nvinfer1::Dims> const& in) const {
    std::string error = shapeMismatch("x", in[kIN_X], {-1, -1});
    if (!error.empty()) return error;
    int64_t const hidden = in[kIN_X].d[1];
    int64_t bytes = 0;
    for (Matrix const& m : matrices(hidden)) {
        if (m.columns % 4 || m.columns % blockSize(m.type).values)
            return "rows of " + std::to_string(m.columns) + " values; not whole blocks, or not a multiple of 4";
        bytes += padded(bytesOf(m.type, m.rows, m.columns));
    }
    error = shapeMismatch("weights", in[kIN_WEIGHTS], {1, bytes / kPACK_BLOCK, kPACK_BLOCK});
    if (error.empty()) error = shapeMismatch("parameters", in[kIN_PARAMETERS], {2 * hidden + mixerParameters()});
    return error.empty() ? refuseMixer(in) : error;
}

DimsExprs LayerOp::outputShape(int32_t output, DimsExprs const* in, IExprBuilder&) const {
    return output == kOUT_STATE ? in[stateInput()] : in[kIN_X];
}

NextnLayer LayerOp::describe(int64_t hidden, int32_t tokens, uint8_t const* pack) const {
    NextnLayer layer = {};
    layer.t = tokens;
    layer.d = static_cast<int32_t>(hidden);
    layer.eps = mEpsilon;
    layer.inputs = static_cast<int32_t>(mInputRows.size());
    size_t i = 0;
    for (Matrix const& m : matrices(hidden)) {
        NextnLayerMatrix* const rest[] = {&layer.output, &layer.gate, &layer.up, &layer.down};
        NextnLayerMatrix* target = i < mInputRows.size() ? &layer.input[i] : rest[i - mInputRows.size()];
        *target = {pack, m.type, static_cast<int32_t>(m.rows)};
        if (pack) pack += padded(bytesOf(m.type, m.rows, m.columns));
        ++i;
    }
    mixerSizes(&layer);
    return layer;
}

size_t LayerOp::workspace(std::vector<nvinfer1::Dims> const& in, int32_t tokens) const {
    NextnLayer const layer = describe(in[kIN_X].d[1], tokens, nullptr);
    return nextn_layer_workspace(&layer);
}

cudaError_t LayerOp::enqueue(PluginTensorDesc const* desc, void const* const* in, void* const* out, void* workspace,
                             cudaStream_t stream) const {
    auto const& x = desc[kIN_X].dims;
    NextnLayer layer = describe(x.d[1], static_cast<int32_t>(x.d[0]), static_cast<uint8_t const*>(in[kIN_WEIGHTS]));
    layer.x = static_cast<float const*>(in[kIN_X]);
    layer.y = static_cast<float*>(out[kOUT_Y]);
    layer.mixer_norm = static_cast<float const*>(in[kIN_PARAMETERS]);
    layer.ffn_norm = layer.mixer_norm + layer.d;
    mixerTensors(&layer, layer.ffn_norm + layer.d, desc, in, out);
    layer.sync = mSync;
    layer.workspace = workspace;
    layer.workspace_bytes = nextn_layer_workspace(&layer);
    layer.flags = kLAUNCH_FLAGS;
    size_t const stateBytes = tensorBytes(desc[stateInput()]);
    cudaError_t const status = bringState(in[stateInput()], out[kOUT_STATE], stateBytes, stream);
    return status == cudaSuccess ? nextn_layer(&layer, stream) : status;
}

}  // namespace nextn
