// What a plugin needs to know about one op. An implementation per file; `op_plugin` puts any of them behind TensorRT.
// The contract is plugins/ops.py.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include <cuda_runtime_api.h>

#include "attributes.h"
#include "export.h"
#include "trt_api.h"

namespace nextn {

using nvinfer1::DataType;
using nvinfer1::DimsExprs;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::IExprBuilder;
using nvinfer1::PluginTensorDesc;

// All our kernels may overlap with their predecessor: between them lie only kernels launched without that attribute.
constexpr int32_t kLAUNCH_FLAGS = NEXTN_PDL;

struct TensorTypes {
    std::vector<DataType> inputs, outputs;
};

class Op {
public:
    virtual ~Op() = default;
    // Why no op has these attributes, or "".
    virtual std::string contradiction() const { return ""; }
    virtual TensorTypes types() const = 0;
    // Why these inputs are refused, or "". Dimensions of -1 are not known yet.
    virtual std::string refuse(std::vector<nvinfer1::Dims> const& inputs) const = 0;
    virtual DimsExprs outputShape(int32_t output, DimsExprs const* inputs, IExprBuilder& builder) const = 0;
    // Input whose memory an output is, or -1.
    virtual int32_t alias(int32_t /*output*/) const { return -1; }
    // Bytes for a call with these inputs; `tokens` overrides T.
    virtual size_t workspace(std::vector<nvinfer1::Dims> const& /*inputs*/, int32_t /*tokens*/) const { return 0; }
    // Device memory of an execution context's own, zero at first and kept between calls; `useKept` comes before them.
    virtual size_t keptBytes() const { return 0; }
    virtual void useKept(void* /*memory*/) {}
    virtual cudaError_t enqueue(PluginTensorDesc const* inputs, void const* const* in, void* const* out,
                                void* workspace, cudaStream_t stream) const = 0;
};

struct OpInfo {
    char const* name;
    std::vector<AttributeSpec> attributes;
    // Null, with `error` set, when the attributes contradict each other.
    std::unique_ptr<Op> (*make)(Attributes const& attributes, std::string* error);
};

template <typename T>
std::unique_ptr<Op> makeOp(Attributes const& attributes, std::string* error) {
    auto op = std::make_unique<T>(attributes);
    *error = op->contradiction();
    return error->empty() ? std::move(op) : nullptr;
}

OpInfo const& kquantMatmulInfo();
OpInfo const& kquantEmbeddingInfo();
OpInfo const& rmsNormInfo();
OpInfo const& rmsNormRowsInfo();
OpInfo const& rmsNormPairInfo();
OpInfo const& ropeTablesInfo();
OpInfo const& gatedDeltaNetInfo();
OpInfo const& gatedAttentionInfo();
OpInfo const& gatedDeltaNetLayerInfo();
OpInfo const& gatedAttentionLayerInfo();
std::vector<OpInfo const*> const& allOps();

// Values and bytes of a block of a GGML type; {0, 0} for one without kernels.
struct BlockSize {
    int64_t values, bytes;
};
BlockSize blockSize(int32_t ggmlType);

// Dimensions must be `wanted`, where -1 on either side fits anything. "" or a message naming the input.
std::string shapeMismatch(char const* input, nvinfer1::Dims const& got, std::vector<int64_t> const& wanted);
size_t tensorBytes(PluginTensorDesc const& tensor);
// Kernels update state in place, in the output. Where a caller bound two addresses, as general tools do, the old state is
// copied over first; a runtime that cares for speed binds one.
cudaError_t bringState(void const* input, void* output, size_t bytes, cudaStream_t stream);
DimsExprs exprs(std::vector<nvinfer1::IDimensionExpr const*> const& dims);

}  // namespace nextn
