// Any op behind TensorRT's V3 plugin interface, under its own name or carried by a LinearAttention node.
#pragma once
#include <optional>

#include "op.h"

namespace nextn {

constexpr char const* kVERSION = "1";
constexpr char const* kNAMESPACE = "";
// TensorRT-RTX 1.6 imports no op that it does not know, but hands this op's update_rule to its plugin as it is.
constexpr char const* kCARRIER = "LinearAttention";
constexpr char const* kCARRIER_FIELD = "update_rule";
constexpr int32_t kCARRIER_OUTPUTS = 2;
// Written into engines beside the attributes: the layer's name, which TensorRT does not tell of a launch that fails.
constexpr char const* kLAYER_FIELD = "layer_name";

void freeDevice(void* memory) noexcept;

// TensorRT's own log knows only that something failed. To whom `nextn_listen` named, or to stderr.
void report(char const* op, std::string const& layer, std::string const& message);

class OpPlugin final : public nvinfer1::IPluginV3,
                       public nvinfer1::IPluginV3OneCore,
                       public nvinfer1::IPluginV3OneBuildV2,
                       public nvinfer1::IPluginV3OneRuntime {
public:
    // `layer`: its name, for messages. `rule`: the text it came with when a LinearAttention node carries it. Null, after
    // a message, when refused.
    static OpPlugin* create(OpInfo const& info, Attributes attributes, std::string layer,
                            std::optional<std::string> rule);

    nvinfer1::IPluginCapability* getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept override;
    nvinfer1::IPluginV3* clone() noexcept override;

    char const* getPluginName() const noexcept override { return mRule ? kCARRIER : mInfo.name; }
    char const* getPluginVersion() const noexcept override { return kVERSION; }
    char const* getPluginNamespace() const noexcept override { return kNAMESPACE; }

    int32_t configurePlugin(DynamicPluginTensorDesc const* in, int32_t nIn, DynamicPluginTensorDesc const* out,
                            int32_t nOut) noexcept override;
    int32_t getOutputDataTypes(DataType* out, int32_t nOut, DataType const* in, int32_t nIn) const noexcept override;
    int32_t getOutputShapes(DimsExprs const* in, int32_t nIn, DimsExprs const* shapeIn, int32_t nShapeIn,
                            DimsExprs* out, int32_t nOut, IExprBuilder& builder) noexcept override;
    bool supportsFormatCombination(int32_t pos, DynamicPluginTensorDesc const* inOut, int32_t nIn,
                                   int32_t nOut) noexcept override;
    int32_t getNbOutputs() const noexcept override;
    size_t getWorkspaceSize(DynamicPluginTensorDesc const* in, int32_t nIn, DynamicPluginTensorDesc const* out,
                            int32_t nOut) const noexcept override;
    char const* getMetadataString() noexcept override { return mInfo.name; }
    int32_t getAliasedInput(int32_t output) noexcept override;

    int32_t onShapeChange(PluginTensorDesc const* in, int32_t nIn, PluginTensorDesc const* out,
                          int32_t nOut) noexcept override;
    int32_t enqueue(PluginTensorDesc const* inDesc, PluginTensorDesc const* outDesc, void const* const* in,
                    void* const* out, void* workspace, cudaStream_t stream) noexcept override;
    nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext*) noexcept override;
    nvinfer1::PluginFieldCollection const* getFieldsToSerialize() noexcept override;

private:
    OpPlugin(OpInfo const& info, Attributes attributes, std::string layer, std::optional<std::string> rule,
             std::unique_ptr<Op> op);
    void takeKept() noexcept;
    bool fits(std::vector<nvinfer1::Dims> const& inputs) const;
    void say(std::string const& message) const { report(mInfo.name, mLayer, message); }
    int32_t numInputs() const { return static_cast<int32_t>(mTypes.inputs.size()); }
    int32_t numOutputs() const { return static_cast<int32_t>(mTypes.outputs.size()); }

    OpInfo const& mInfo;
    Attributes mAttributes;
    std::string mLayer;
    std::optional<std::string> mRule;
    std::unique_ptr<Op> mOp;
    TensorTypes mTypes;
    std::unique_ptr<void, decltype(&freeDevice)> mKept{nullptr, freeDevice};
    cudaError_t mKeptStatus = cudaSuccess;
    std::vector<nvinfer1::PluginField> mFields;
    nvinfer1::PluginFieldCollection mCollection;
};

}  // namespace nextn
