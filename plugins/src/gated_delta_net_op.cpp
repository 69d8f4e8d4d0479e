// GatedDeltaNet: conv, gates, delta rule and gated norm of one layer; its state lives in one pool, updated in place.
#include "delta_net_geometry.h"

namespace nextn {
namespace {

constexpr int32_t kIN_ROWS = 0, kIN_POOL = 1, kIN_SLOT = 2, kIN_PARAMETERS = 3, kOUT_Y = 0, kOUT_POOL = 1;

class GatedDeltaNet final : public Op {
public:
    explicit GatedDeltaNet(Attributes const& a) : mNet(a), mEpsilon(a.number("epsilon")) {}

    std::string contradiction() const override { return mNet.contradiction(); }

    TensorTypes types() const override {
        return {{DataType::kFLOAT, DataType::kFLOAT, DataType::kINT32, DataType::kFLOAT},
                {DataType::kFLOAT, DataType::kFLOAT}};
    }

    std::string refuse(std::vector<nvinfer1::Dims> const& in) const override {
        std::string error = shapeMismatch("rows", in[kIN_ROWS], {-1, rowWidth()});
        if (error.empty()) error = mNet.refuseState(in[kIN_POOL], in[kIN_SLOT]);
        return error.empty() ? shapeMismatch("parameters", in[kIN_PARAMETERS], {mNet.parameters()}) : error;
    }

    DimsExprs outputShape(int32_t output, DimsExprs const* in, IExprBuilder& builder) const override {
        if (output == kOUT_POOL) return in[kIN_POOL];
        return exprs({in[kIN_ROWS].d[0], builder.constant(mNet.valueDim())});
    }

    int32_t alias(int32_t output) const override { return output == kOUT_POOL ? kIN_POOL : -1; }

    size_t workspace(std::vector<nvinfer1::Dims> const&, int32_t tokens) const override {
        return nextn_gated_delta_net_workspace(tokens, mNet.kHeads, mNet.vHeads, mNet.dim);
    }

    cudaError_t enqueue(PluginTensorDesc const* desc, void const* const* in, void* const* out, void* workspace,
                        cudaStream_t stream) const override {
        int64_t const poolSize = desc[kIN_POOL].dims.d[0];
        NextnGatedDeltaNet p = {};
        mNet.sizes(&p);
        mNet.tensors(&p, static_cast<float const*>(in[kIN_PARAMETERS]), static_cast<float*>(out[kOUT_POOL]), poolSize,
                     in[kIN_SLOT]);
        p.t = static_cast<int32_t>(desc[kIN_ROWS].dims.d[0]);
        p.eps = mEpsilon;
        p.ld_qkv = p.ld_z = p.ld_gate = rowWidth();
        p.qkv = static_cast<float const*>(in[kIN_ROWS]);
        p.z = p.qkv + mNet.channels();
        p.alpha = p.z + mNet.valueDim();
        p.beta = p.alpha + mNet.vHeads;
        p.y = static_cast<float*>(out[kOUT_Y]);
        p.ld_y = mNet.valueDim();
        p.workspace = workspace;
        p.workspace_bytes = nextn_gated_delta_net_workspace(p.t, mNet.kHeads, mNet.vHeads, mNet.dim);
        p.flags = kLAUNCH_FLAGS;
        cudaError_t const status = bringState(in[kIN_POOL], out[kOUT_POOL], sizeof(float) * poolSize, stream);
        return status == cudaSuccess ? nextn_gated_delta_net(&p, stream) : status;
    }

private:
    int64_t rowWidth() const { return mNet.channels() + mNet.valueDim() + 2 * mNet.vHeads; }

    DeltaNetGeometry mNet;
    float mEpsilon;
};

}  // namespace

OpInfo const& gatedDeltaNetInfo() {
    static OpInfo const info = {"GatedDeltaNet", DeltaNetGeometry::attributes(), makeOp<GatedDeltaNet>};
    return info;
}

}  // namespace nextn
