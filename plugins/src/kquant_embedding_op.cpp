// KQuantEmbedding: rows of a GGUF matrix.
#include "embedding.h"
#include "op.h"

namespace nextn {
namespace {

constexpr int32_t kIN_TOKENS = 0, kIN_TABLE = 1;

class KQuantEmbedding final : public Op {
public:
    explicit KQuantEmbedding(Attributes const& a) : mType(a.integer("type")), mBlock(blockSize(mType)) {}

    std::string contradiction() const override {
        return mBlock.values ? "" : "no kernel for GGML type " + std::to_string(mType);
    }

    TensorTypes types() const override { return {{DataType::kINT32, DataType::kINT8}, {DataType::kFLOAT}}; }

    std::string refuse(std::vector<nvinfer1::Dims> const& in) const override {
        std::string const error = shapeMismatch("tokens", in[kIN_TOKENS], {-1});
        return error.empty() ? shapeMismatch("table", in[kIN_TABLE], {-1, -1, mBlock.bytes}) : error;
    }

    DimsExprs outputShape(int32_t, DimsExprs const* in, IExprBuilder& builder) const override {
        auto const* values = builder.constant(mBlock.values);
        auto const* k = builder.operation(nvinfer1::DimensionOperation::kPROD, *in[kIN_TABLE].d[1], *values);
        return exprs({in[kIN_TOKENS].d[0], k});
    }

    cudaError_t enqueue(PluginTensorDesc const* desc, void const* const* in, void* const* out, void*,
                        cudaStream_t stream) const override {
        auto const& table = desc[kIN_TABLE].dims;
        int64_t const k = table.d[1] * mBlock.values;
        return nextn_embedding(in[kIN_TABLE], mType, static_cast<int32_t>(table.d[0]), static_cast<int32_t>(k),
                               static_cast<int32_t const*>(in[kIN_TOKENS]),
                               static_cast<int32_t>(desc[kIN_TOKENS].dims.d[0]), static_cast<float*>(out[0]), k,
                               kLAUNCH_FLAGS, stream);
    }

private:
    int32_t mType;
    BlockSize mBlock;
};

}  // namespace

OpInfo const& kquantEmbeddingInfo() {
    static OpInfo const info = {"KQuantEmbedding", {{"type", AttributeKind::kINT}}, makeOp<KQuantEmbedding>};
    return info;
}

}  // namespace nextn
