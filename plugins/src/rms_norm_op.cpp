// RmsNorm: norm of float32 rows. RmsNormRows: and some of them once more. RmsNormPair: norms of two inputs side by side.
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

class RmsNormRows final : public Op {
public:
    explicit RmsNormRows(Attributes const& a) : mEpsilon(a.number("epsilon")) {}

    TensorTypes types() const override {
        return {{DataType::kFLOAT, DataType::kFLOAT, DataType::kINT32}, {DataType::kFLOAT, DataType::kFLOAT}};
    }

    std::string refuse(std::vector<nvinfer1::Dims> const& in) const override {
        std::string error = shapeMismatch("x", in[kIN_X], {-1, -1});
        if (error.empty()) error = shapeMismatch("weight", in[kIN_WEIGHT], {in[kIN_X].d[1]});
        return error.empty() ? shapeMismatch("rows", in[kIN_ROWS], {-1}) : error;
    }

    DimsExprs outputShape(int32_t output, DimsExprs const* in, IExprBuilder&) const override {
        return output ? exprs({in[kIN_ROWS].d[0], in[kIN_X].d[1]}) : in[kIN_X];
    }

    cudaError_t enqueue(PluginTensorDesc const* desc, void const* const* in, void* const* out, void*,
                        cudaStream_t stream) const override {
        auto const& x = desc[kIN_X].dims;
        return nextn_rms_norm_rows(static_cast<float const*>(in[kIN_X]), x.d[1], static_cast<int32_t>(x.d[0]),
                                   static_cast<int32_t>(x.d[1]), static_cast<float const*>(in[kIN_WEIGHT]), mEpsilon,
                                   static_cast<float*>(out[0]), static_cast<int32_t const*>(in[kIN_ROWS]),
                                   static_cast<int32_t>(desc[kIN_ROWS].dims.d[0]), static_cast<float*>(out[1]),
                                   kLAUNCH_FLAGS, stream);
    }

private:
    static constexpr int32_t kIN_ROWS = 2;
    float mEpsilon;
};

class RmsNormPair final : public Op {
public:
    explicit RmsNormPair(Attributes const& a) : mEpsilon(a.number("epsilon")) {}

    TensorTypes types() const override {
        return {{DataType::kFLOAT, DataType::kFLOAT, DataType::kFLOAT, DataType::kFLOAT}, {DataType::kFLOAT}};
    }

    std::string refuse(std::vector<nvinfer1::Dims> const& in) const override {
        std::string error = shapeMismatch("a", in[kIN_A], {-1, -1});
        if (error.empty()) error = shapeMismatch("a_weight", in[kIN_A_WEIGHT], {in[kIN_A].d[1]});
        if (error.empty()) error = shapeMismatch("b", in[kIN_B], {in[kIN_A].d[0], -1});
        return error.empty() ? shapeMismatch("b_weight", in[kIN_B_WEIGHT], {in[kIN_B].d[1]}) : error;
    }

    DimsExprs outputShape(int32_t, DimsExprs const* in, IExprBuilder& builder) const override {
        return exprs({in[kIN_A].d[0],
                      builder.operation(nvinfer1::DimensionOperation::kSUM, *in[kIN_A].d[1], *in[kIN_B].d[1])});
    }

    cudaError_t enqueue(PluginTensorDesc const* desc, void const* const* in, void* const* out, void*,
                        cudaStream_t stream) const override {
        auto const& a = desc[kIN_A].dims;
        auto const& b = desc[kIN_B].dims;
        return nextn_rms_norm_pair(static_cast<float const*>(in[kIN_A]), static_cast<int32_t>(a.d[1]),
                                   static_cast<float const*>(in[kIN_A_WEIGHT]), static_cast<float const*>(in[kIN_B]),
                                   static_cast<int32_t>(b.d[1]), static_cast<float const*>(in[kIN_B_WEIGHT]),
                                   static_cast<int32_t>(a.d[0]), mEpsilon, static_cast<float*>(out[0]), kLAUNCH_FLAGS,
                                   stream);
    }

private:
    static constexpr int32_t kIN_A = 0, kIN_A_WEIGHT = 1, kIN_B = 2, kIN_B_WEIGHT = 3;
    float mEpsilon;
};

}  // namespace

OpInfo const& rmsNormInfo() {
    static OpInfo const info = {"RmsNorm", {{"epsilon", AttributeKind::kFLOAT}}, makeOp<RmsNorm>};
    return info;
}

OpInfo const& rmsNormRowsInfo() {
    static OpInfo const info = {"RmsNormRows", {{"epsilon", AttributeKind::kFLOAT}}, makeOp<RmsNormRows>};
    return info;
}

OpInfo const& rmsNormPairInfo() {
    static OpInfo const info = {"RmsNormPair", {{"epsilon", AttributeKind::kFLOAT}}, makeOp<RmsNormPair>};
    return info;
}

}  // namespace nextn
