#include "op.h"

namespace nextn {

std::vector<OpInfo const*> const& allOps() {
    static std::vector<OpInfo const*> const ops = {&kquantMatmulInfo(), &kquantEmbeddingInfo(), &rmsNormInfo(),
                                                   &rmsNormRowsInfo(),   &rmsNormPairInfo(),
                                                   &ropeTablesInfo(),
                                                   &gatedDeltaNetInfo(), &gatedAttentionInfo(),
                                                   &gatedDeltaNetLayerInfo(), &gatedAttentionLayerInfo()};
    return ops;
}

BlockSize blockSize(int32_t ggmlType) {
    switch (ggmlType) {
        case 0: return {1, 4};       // F32
        case 1: return {1, 2};       // F16
        case 8: return {32, 34};     // Q8_0
        case 12: return {256, 144};  // Q4_K
        case 13: return {256, 176};  // Q5_K
        case 14: return {256, 210};  // Q6_K
        case 30: return {1, 2};      // BF16
        default: return {0, 0};
    }
}

std::string shapeMismatch(char const* input, nvinfer1::Dims const& got, std::vector<int64_t> const& wanted) {
    bool fits = got.nbDims == static_cast<int32_t>(wanted.size());
    for (size_t i = 0; fits && i < wanted.size(); ++i) fits = got.d[i] == wanted[i] || got.d[i] < 0 || wanted[i] < 0;
    if (fits) return "";
    std::string message = std::string("input ") + input + " has shape [";
    for (int32_t i = 0; i < got.nbDims; ++i) message += (i ? ", " : "") + std::to_string(got.d[i]);
    message += "], wanted [";
    for (size_t i = 0; i < wanted.size(); ++i)
        message += (i ? ", " : "") + (wanted[i] < 0 ? std::string("any") : std::to_string(wanted[i]));
    return message + "]";
}

size_t tensorBytes(PluginTensorDesc const& tensor) {
    size_t bytes = 0;
    switch (tensor.type) {
        case DataType::kFLOAT:
        case DataType::kINT32: bytes = 4; break;
        case DataType::kHALF: bytes = 2; break;
        case DataType::kINT8: bytes = 1; break;
        default: return 0;
    }
    for (int32_t i = 0; i < tensor.dims.nbDims; ++i) bytes *= tensor.dims.d[i];
    return bytes;
}

cudaError_t bringState(void const* input, void* output, size_t bytes, cudaStream_t stream) {
    if (input == output) return cudaSuccess;
    return cudaMemcpyAsync(output, input, bytes, cudaMemcpyDeviceToDevice, stream);
}

DimsExprs exprs(std::vector<nvinfer1::IDimensionExpr const*> const& dims) {
    DimsExprs out = {};
    out.nbDims = static_cast<int32_t>(dims.size());
    for (size_t i = 0; i < dims.size(); ++i) out.d[i] = dims[i];
    return out;
}

}  // namespace nextn
