// KQuantMatmul: several GGUF matrices of one input, with fused norm, SwiGLU and residual.
#include "matmul.h"
#include "op.h"

namespace nextn {
namespace {

constexpr int32_t kIN_X = 0, kIN_WEIGHTS = 1;

class KQuantMatmul final : public Op {
public:
    explicit KQuantMatmul(Attributes const& a)
        : mTypes(a.integers("types")), mNorm(a.integer("has_norm") != 0), mResidual(a.integer("has_residual") != 0),
          mSwiglu(a.integer("swiglu") != 0), mEpsilon(a.number("epsilon")) {}

    std::string contradiction() const override {
        size_t const count = mTypes.size();
        if (count < 1 || count > NEXTN_MAX_MATRICES) return std::to_string(count) + " matrices; takes 1 to 4";
        for (int32_t type : mTypes)
            if (!blockSize(type).values) return "no kernel for GGML type " + std::to_string(type);
        if (mResidual && count != 1) return "a residual goes with one matrix";
        if (mSwiglu && (count != 2 || mTypes[0] != mTypes[1])) return "swiglu goes with two matrices of one type";
        return "";
    }

    TensorTypes types() const override {
        TensorTypes t = {{DataType::kFLOAT}, {DataType::kFLOAT}};
        t.inputs.insert(t.inputs.end(), mTypes.size(), DataType::kINT8);
        t.inputs.insert(t.inputs.end(), mNorm + mResidual, DataType::kFLOAT);
        return t;
    }

    std::string refuse(std::vector<nvinfer1::Dims> const& in) const override {
        std::string error = shapeMismatch("x", in[kIN_X], {-1, -1});
        if (!error.empty()) return error;
        int64_t const k = in[kIN_X].d[1], t = in[kIN_X].d[0];
        if (k % 4) return "x has rows of " + std::to_string(k) + " values; wanted a multiple of 4";
        for (size_t i = 0; i < mTypes.size() && error.empty(); ++i) {
            BlockSize const block = blockSize(mTypes[i]);
            if (k % block.values) return "x has rows of " + std::to_string(k) + " values; not whole blocks of weight";
            error = shapeMismatch("weight", in[kIN_WEIGHTS + i], {-1, k / block.values, block.bytes});
        }
        int64_t const n = in[kIN_WEIGHTS].d[0];
        if (error.empty() && mSwiglu && n != in[kIN_WEIGHTS + 1].d[0]) error = "swiglu of matrices of unequal rows";
        if (error.empty() && mNorm) error = shapeMismatch("norm", in[normIndex()], {k});
        if (error.empty() && mResidual) error = shapeMismatch("residual", in[normIndex() + mNorm], {t, n});
        return error;
    }

    DimsExprs outputShape(int32_t, DimsExprs const* in, IExprBuilder& builder) const override {
        nvinfer1::IDimensionExpr const* n = in[kIN_WEIGHTS].d[0];
        for (size_t i = 1; i < mTypes.size() && !mSwiglu; ++i)
            n = builder.operation(nvinfer1::DimensionOperation::kSUM, *n, *in[kIN_WEIGHTS + i].d[0]);
        return exprs({in[kIN_X].d[0], n});
    }

    size_t workspace(std::vector<nvinfer1::Dims> const& in, int32_t tokens) const override {
        return nextn_matmul_workspace(tokens, static_cast<int32_t>(in[kIN_X].d[1]));
    }

    cudaError_t enqueue(PluginTensorDesc const* desc, void const* const* in, void* const* out, void* workspace,
                        cudaStream_t stream) const override {
        NextnMatmul m = {};
        m.x = static_cast<float const*>(in[kIN_X]);
        m.t = static_cast<int32_t>(desc[kIN_X].dims.d[0]);
        m.k = static_cast<int32_t>(desc[kIN_X].dims.d[1]);
        m.ldx = m.k;
        m.swiglu = mSwiglu;
        m.n_matrices = static_cast<int32_t>(mTypes.size());
        int64_t width = 0;
        for (int32_t i = 0; i < m.n_matrices; ++i) {
            m.matrix[i].weight = in[kIN_WEIGHTS + i];
            m.matrix[i].type = mTypes[i];
            m.matrix[i].n = static_cast<int32_t>(desc[kIN_WEIGHTS + i].dims.d[0]);
            m.matrix[i].y = mSwiglu && i == 1 ? nullptr : static_cast<float*>(out[0]) + width;
            width += mSwiglu && i == 1 ? 0 : m.matrix[i].n;
        }
        for (int32_t i = 0; i < m.n_matrices; ++i) m.matrix[i].ldy = width;
        if (mNorm) {
            m.norm_weight = static_cast<float const*>(in[normIndex()]);
            m.norm_eps = mEpsilon;
        }
        if (mResidual) {
            m.residual = static_cast<float const*>(in[normIndex() + mNorm]);
            m.ldr = width;
        }
        m.workspace = workspace;
        m.workspace_bytes = nextn_matmul_workspace(m.t, m.k);
        m.flags = kLAUNCH_FLAGS;
        return nextn_matmul(&m, stream);
    }

private:
    size_t normIndex() const { return kIN_WEIGHTS + mTypes.size(); }

    std::vector<int32_t> mTypes;
    bool mNorm, mResidual, mSwiglu;
    float mEpsilon;
};

}  // namespace

OpInfo const& kquantMatmulInfo() {
    static OpInfo const info = {"KQuantMatmul",
                                {{"types", AttributeKind::kINTS},
                                 {"has_norm", AttributeKind::kINT},
                                 {"has_residual", AttributeKind::kINT},
                                 {"swiglu", AttributeKind::kINT},
                                 {"epsilon", AttributeKind::kFLOAT}},
                                makeOp<KQuantMatmul>};
    return info;
}

}  // namespace nextn
