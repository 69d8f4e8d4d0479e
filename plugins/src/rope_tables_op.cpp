// RopeTables: cos and sin of consecutive positions, the first of them read from the device.
#include "attention.h"
#include "op.h"

namespace nextn {
namespace {

constexpr int32_t kIN_ROWS = 0, kIN_POSITION = 1, kIN_INV_FREQ = 2, kOUT_TABLES = 0;

class RopeTables final : public Op {
public:
    explicit RopeTables(Attributes const& a) : mFactor(a.number("factor")) {}

    TensorTypes types() const override {
        return {{DataType::kFLOAT, DataType::kINT32, DataType::kINT64}, {DataType::kFLOAT}};
    }

    std::string refuse(std::vector<nvinfer1::Dims> const& in) const override {
        std::string error = shapeMismatch("rows", in[kIN_ROWS], {-1, -1});
        if (error.empty()) error = shapeMismatch("position", in[kIN_POSITION], {1});
        return error.empty() ? shapeMismatch("inv_freq", in[kIN_INV_FREQ], {-1}) : error;
    }

    DimsExprs outputShape(int32_t, DimsExprs const* in, IExprBuilder& builder) const override {
        return exprs({builder.constant(2), in[kIN_ROWS].d[0], in[kIN_INV_FREQ].d[0]});
    }

    cudaError_t enqueue(PluginTensorDesc const* desc, void const* const* in, void* const* out, void*,
                        cudaStream_t stream) const override {
        auto const tokens = static_cast<int32_t>(desc[kIN_ROWS].dims.d[0]);
        auto const pairs = static_cast<int32_t>(desc[kIN_INV_FREQ].dims.d[0]);
        auto* cos = static_cast<float*>(out[kOUT_TABLES]);
        return nextn_rope_rows(static_cast<int32_t const*>(in[kIN_POSITION]), tokens,
                               static_cast<double const*>(in[kIN_INV_FREQ]), pairs, mFactor, cos,
                               cos + static_cast<int64_t>(tokens) * pairs, kLAUNCH_FLAGS, stream);
    }

private:
    float mFactor;
};

}  // namespace

OpInfo const& ropeTablesInfo() {
    static OpInfo const info = {"RopeTables", {{"factor", AttributeKind::kFLOAT}}, makeOp<RopeTables>};
    return info;
}

}  // namespace nextn
