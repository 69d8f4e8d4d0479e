// GatedAttention: norms, rope, cache update and gated attention of one layer; the cache is updated in place.
#include "attention_geometry.h"

namespace nextn {
namespace {

constexpr int32_t kIN_ROWS = 0, kIN_POSITION = 1, kIN_ROPE = 2, kIN_NORMS = 3, kIN_CACHE = 4;
constexpr int32_t kOUT_Y = 0, kOUT_CACHE = 1;

class GatedAttention final : public Op {
public:
    explicit GatedAttention(Attributes const& a) : mAttention(a), mEpsilon(a.number("epsilon")) {}

    std::string contradiction() const override { return mAttention.contradiction(); }

    TensorTypes types() const override {
        return {{DataType::kFLOAT, DataType::kINT32, DataType::kFLOAT, DataType::kFLOAT, mAttention.cacheDtype()},
                {DataType::kFLOAT, mAttention.cacheDtype()}};
    }

    std::string refuse(std::vector<nvinfer1::Dims> const& in) const override {
        std::string error = shapeMismatch("rows", in[kIN_ROWS], {-1, rowWidth()});
        if (error.empty()) error = shapeMismatch("norms", in[kIN_NORMS], {2, mAttention.dim});
        if (!error.empty()) return error;
        return mAttention.refuseState(in[kIN_ROWS].d[0], in[kIN_POSITION], in[kIN_ROPE], in[kIN_CACHE]);
    }

    DimsExprs outputShape(int32_t output, DimsExprs const* in, IExprBuilder& builder) const override {
        if (output == kOUT_CACHE) return in[kIN_CACHE];
        return exprs({in[kIN_ROWS].d[0], builder.constant(mAttention.queryDim())});
    }

    int32_t alias(int32_t output) const override { return output == kOUT_CACHE ? kIN_CACHE : -1; }

    size_t workspace(std::vector<nvinfer1::Dims> const&, int32_t tokens) const override {
        return nextn_attention_workspace(tokens, mAttention.heads, mAttention.dim);
    }

    cudaError_t enqueue(PluginTensorDesc const* desc, void const* const* in, void* const* out, void* workspace,
                        cudaStream_t stream) const override {
        NextnAttention p = {};
        p.t = static_cast<int32_t>(desc[kIN_ROWS].dims.d[0]);
        mAttention.sizes(&p);
        mAttention.tensors(&p, static_cast<float const*>(in[kIN_NORMS]), in[kIN_POSITION], in[kIN_ROPE], p.t,
                           out[kOUT_CACHE], desc[kIN_CACHE].dims.d[1]);
        p.eps = mEpsilon;
        p.query_gate = static_cast<float const*>(in[kIN_ROWS]);
        p.key = p.query_gate + 2 * mAttention.queryDim();
        p.value = p.key + mAttention.kvDim();
        p.ld_query = p.ld_kv = rowWidth();
        p.y = static_cast<float*>(out[kOUT_Y]);
        p.ld_y = mAttention.queryDim();
        p.workspace = workspace;
        p.workspace_bytes = nextn_attention_workspace(p.t, mAttention.heads, mAttention.dim);
        p.flags = kLAUNCH_FLAGS;
        cudaError_t const status = bringState(in[kIN_CACHE], out[kOUT_CACHE], tensorBytes(desc[kIN_CACHE]), stream);
        return status == cudaSuccess ? nextn_attention(&p, stream) : status;
    }

private:
    int64_t rowWidth() const { return 2 * (mAttention.queryDim() + mAttention.kvDim()); }

    AttentionGeometry mAttention;
    float mEpsilon;
};

}  // namespace

OpInfo const& gatedAttentionInfo() {
    static OpInfo const info = {"GatedAttention", AttentionGeometry::attributes(), makeOp<GatedAttention>};
    return info;
}

}  // namespace nextn
