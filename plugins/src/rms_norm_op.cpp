// RmsNorm: norm of float32 rows.
#include "rms_norm.h"

#include "op.h"

namespace nextn {
namespace {

constexpr int32_t kIN_X = 0, kIN_WEIGHT = 1;

class RmsNorm final : public Op {
public:
    explicit RmsNorm(Attributes const& a) : mEpsilon(a.number("epsilon")) {}

    TensorTypes types() const override { return {{DataType::kFLOAT, DataType::kFLOAT}, {DataType::kFLOAT}}; }

    std::string refuse(std::vector<nvinfer1::Dims> const& in) const override {
        std::string const error = shapeMismatch("x", in[kIN_X], {-1, -1});
        return error.empty() ? shapeMismatch("weight", in[kIN_WEIGHT], {in[kIN_X].d[1]}) : error;
    }

    DimsExprs outputShape(int32_t, DimsExprs const* in, IExprBuilder&) const override { return in[kIN_X]; }

    cudaError_t enqueue(PluginTensorDesc const* desc, void const* const* in, void* const* out, void*,
                        cudaStream_t stream) const override {
        auto const& x = desc[kIN_X].dims;
        return nextn_rms_norm(static_cast<float const*>(in[kIN_X]), x.d[1], static_cast<int32_t>(x.d[0]),
                              static_cast<int32_t>(x.d[1]), static_cast<float const*>(in[kIN_WEIGHT]), mEpsilon,
                              static_cast<float*>(out[0]), x.d[1], kLAUNCH_FLAGS, stream);
    }

private:
    float mEpsilon;
};

std::unique_ptr<Op> make(Attributes const& attributes, std::string*) { return std::make_unique<RmsNorm>(attributes); }

}  // namespace

OpInfo const& rmsNormInfo() {
    static OpInfo const info = {"RmsNorm", {{"epsilon", AttributeKind::kFLOAT}}, make};
    return info;
}

}  // namespace nextn
