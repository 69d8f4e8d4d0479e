#include "op_plugin.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <exception>
#include <new>

#include "export.h"

// Is told each line that would go to stderr.
using NextnListener = void (*)(char const*);

namespace nextn {

namespace {
std::atomic<NextnListener> gListener{nullptr};
}

void report(char const* op, std::string const& layer, std::string const& message) {
    std::string const line = std::string("nextn plugin ") + op + ": " + (layer.empty() ? "" : layer + ": ") + message;
    NextnListener const listener = gListener;
    if (listener)
        listener(line.c_str());
    else
        std::fprintf(stderr, "%s\n", line.c_str());
}

namespace {
std::string described(cudaError_t status) {
    return "CUDA error " + std::to_string(status) + " (" + cudaGetErrorString(status) + ")";
}
}  // namespace

OpPlugin* OpPlugin::create(OpInfo const& info, Attributes attributes, std::string layer,
                           std::optional<std::string> rule) {
    try {
        std::string error;
        std::unique_ptr<Op> op = info.make(attributes, &error);
        if (op) return new OpPlugin(info, std::move(attributes), std::move(layer), std::move(rule), std::move(op));
        report(info.name, layer, error);
    } catch (std::exception const& e) {
        report(info.name, layer, e.what());
    }
    return nullptr;
}

OpPlugin::OpPlugin(OpInfo const& info, Attributes attributes, std::string layer, std::optional<std::string> rule,
                   std::unique_ptr<Op> op)
    : mInfo(info), mAttributes(std::move(attributes)), mLayer(std::move(layer)), mRule(std::move(rule)),
      mOp(std::move(op)), mTypes(mOp->types()) {
    auto const text = [](char const* name, std::string const& value) {
        auto const length = static_cast<int32_t>(value.size() + 1);
        return nvinfer1::PluginField{name, value.c_str(), nvinfer1::PluginFieldType::kCHAR, length};
    };
    if (mRule)
        mFields = {text(kCARRIER_FIELD, *mRule)};
    else
        mFields = mAttributes.fields();
    mFields.push_back(text(kLAYER_FIELD, mLayer));
    mCollection = {static_cast<int32_t>(mFields.size()), mFields.data()};
}

nvinfer1::IPluginCapability* OpPlugin::getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept {
    switch (type) {
        case nvinfer1::PluginCapabilityType::kCORE: return static_cast<nvinfer1::IPluginV3OneCore*>(this);
        case nvinfer1::PluginCapabilityType::kBUILD: return static_cast<nvinfer1::IPluginV3OneBuildV2*>(this);
        case nvinfer1::PluginCapabilityType::kRUNTIME: return static_cast<nvinfer1::IPluginV3OneRuntime*>(this);
    }
    return nullptr;
}

nvinfer1::IPluginV3* OpPlugin::clone() noexcept { return create(mInfo, mAttributes, mLayer, mRule); }

void freeDevice(void* memory) noexcept { cudaFree(memory); }

// Here, because enqueue may be captured. The builder comes here too, on machines without a GPU, and dies of a plugin
// that is refused; so what is missing is only said when the plugin is to run.
void OpPlugin::takeKept() noexcept {
    size_t const bytes = mOp->keptBytes();
    if (!bytes) return;
    void* memory = nullptr;
    mKeptStatus = cudaMalloc(&memory, bytes);
    mKept.reset(memory);
    if (mKeptStatus == cudaSuccess) mKeptStatus = cudaMemset(memory, 0, bytes);
    // Passes run on streams that do not wait for the one of the memset.
    if (mKeptStatus == cudaSuccess) mKeptStatus = cudaStreamSynchronize(nullptr);
    mOp->useKept(memory);
}

nvinfer1::IPluginV3* OpPlugin::attachToContext(nvinfer1::IPluginResourceContext*) noexcept {
    OpPlugin* attached = create(mInfo, mAttributes, mLayer, mRule);
    if (attached) attached->takeKept();
    return attached;
}

bool OpPlugin::fits(std::vector<nvinfer1::Dims> const& inputs) const {
    std::string const error = mOp->refuse(inputs);
    if (!error.empty()) say(error);
    return error.empty();
}

int32_t OpPlugin::configurePlugin(DynamicPluginTensorDesc const* in, int32_t nIn, DynamicPluginTensorDesc const*,
                                  int32_t) noexcept {
    if (nIn < numInputs()) {
        say(std::to_string(nIn) + " inputs, wanted " + std::to_string(numInputs()));
        return 1;
    }
    std::vector<nvinfer1::Dims> dims;
    for (int32_t i = 0; i < numInputs(); ++i) dims.push_back(in[i].desc.dims);
    return fits(dims) ? 0 : 1;
}

int32_t OpPlugin::getNbOutputs() const noexcept { return mRule ? kCARRIER_OUTPUTS : numOutputs(); }

// Outputs past the op's own exist for the carrier's sake: one value that nobody reads or writes.
int32_t OpPlugin::getOutputDataTypes(DataType* out, int32_t nOut, DataType const*, int32_t) const noexcept {
    for (int32_t i = 0; i < nOut; ++i) out[i] = i < numOutputs() ? mTypes.outputs[i] : DataType::kFLOAT;
    return 0;
}

int32_t OpPlugin::getOutputShapes(DimsExprs const* in, int32_t nIn, DimsExprs const*, int32_t, DimsExprs* out,
                                  int32_t nOut, IExprBuilder& builder) noexcept {
    if (nIn < numInputs()) return 1;
    for (int32_t i = 0; i < nOut; ++i)
        out[i] = i < numOutputs() ? mOp->outputShape(i, in, builder) : exprs({builder.constant(1)});
    return 0;
}

bool OpPlugin::supportsFormatCombination(int32_t pos, DynamicPluginTensorDesc const* inOut, int32_t nIn,
                                         int32_t) noexcept {
    PluginTensorDesc const& tensor = inOut[pos].desc;
    if (tensor.format != nvinfer1::TensorFormat::kLINEAR) return false;
    if (pos < nIn) return pos >= numInputs() || tensor.type == mTypes.inputs[pos];
    int32_t const output = pos - nIn;
    return tensor.type == (output < numOutputs() ? mTypes.outputs[output] : DataType::kFLOAT);
}

size_t OpPlugin::getWorkspaceSize(DynamicPluginTensorDesc const* in, int32_t nIn, DynamicPluginTensorDesc const*,
                                  int32_t) const noexcept {
    if (nIn < numInputs()) return 0;
    std::vector<nvinfer1::Dims> dims;
    for (int32_t i = 0; i < numInputs(); ++i) dims.push_back(in[i].max);
    // T is the first input's first dimension in every op; short passes use another plan than long ones.
    auto const tokens = static_cast<int32_t>(dims[0].d[0]);
    size_t bytes = mOp->workspace(dims, tokens);
    for (int32_t t = std::min(tokens, NEXTN_MAX_DECODE_T); t > 0; --t) bytes = std::max(bytes, mOp->workspace(dims, t));
    return bytes;
}

int32_t OpPlugin::getAliasedInput(int32_t output) noexcept { return output < numOutputs() ? mOp->alias(output) : -1; }

int32_t OpPlugin::onShapeChange(PluginTensorDesc const* in, int32_t nIn, PluginTensorDesc const*, int32_t) noexcept {
    if (nIn < numInputs()) return 1;
    std::vector<nvinfer1::Dims> dims;
    for (int32_t i = 0; i < numInputs(); ++i) dims.push_back(in[i].dims);
    return fits(dims) ? 0 : 1;
}

int32_t OpPlugin::enqueue(PluginTensorDesc const* inDesc, PluginTensorDesc const*, void const* const* in,
                          void* const* out, void* workspace, cudaStream_t stream) noexcept {
    if (mKeptStatus != cudaSuccess) {
        say("has no device memory of its own: " + described(mKeptStatus));
        return mKeptStatus;
    }
    cudaError_t const status = mOp->enqueue(inDesc, in, out, workspace, stream);
    if (status != cudaSuccess) say("launch failed: " + described(status));
    return status;
}

nvinfer1::PluginFieldCollection const* OpPlugin::getFieldsToSerialize() noexcept { return &mCollection; }

}  // namespace nextn

NEXTN_API void nextn_listen(NextnListener listener) { nextn::gListener = listener; }
