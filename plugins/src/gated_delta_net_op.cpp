// GatedDeltaNet: conv, gates, delta rule and gated norm of one layer; its state lives in one pool, updated in place.
#include "gated_delta_net.h"
#include "op.h"

namespace nextn {
namespace {

constexpr int32_t kIN_ROWS = 0, kIN_POOL = 1, kIN_SLOT = 2, kIN_PARAMETERS = 3, kOUT_Y = 0, kOUT_POOL = 1;

class GatedDeltaNet final : public Op {
public:
    explicit GatedDeltaNet(Attributes const& a)
        : mKHeads(a.integer("k_heads")), mVHeads(a.integer("v_heads")), mDim(a.integer("head_dim")),
          mKernel(a.integer("conv_kernel")), mEpsilon(a.number("epsilon")) {}

    std::string contradiction() const {
        if (mDim != 32 && mDim != 64 && mDim != 128) return "head_dim " + std::to_string(mDim) + "; takes 32, 64, 128";
        if (mKHeads < 1 || mVHeads < 1 || mVHeads % mKHeads) return "v_heads is not a multiple of k_heads";
        if (mKernel < 2 || mKernel > 8) return "conv_kernel " + std::to_string(mKernel) + "; takes 2 to 8";
        return "";
    }

    TensorTypes types() const override {
        return {{DataType::kFLOAT, DataType::kFLOAT, DataType::kINT32, DataType::kFLOAT},
                {DataType::kFLOAT, DataType::kFLOAT}};
    }

    std::string refuse(std::vector<nvinfer1::Dims> const& in) const override {
        std::string error = shapeMismatch("rows", in[kIN_ROWS], {-1, rowWidth()});
        if (error.empty()) error = shapeMismatch("pool", in[kIN_POOL], {-1});
        if (error.empty()) error = shapeMismatch("slot", in[kIN_SLOT], {1});
        int64_t const parameters = channels() * mKernel + 2 * mVHeads + mDim;
        if (error.empty()) error = shapeMismatch("parameters", in[kIN_PARAMETERS], {parameters});
        int64_t const pool = error.empty() ? in[kIN_POOL].d[0] : -1;
        if (pool >= 0 && (pool == 0 || pool % slotSize()))
            error = "pool of " + std::to_string(pool) + " values is not a whole number of slots of "
                + std::to_string(slotSize());
        return error;
    }

    DimsExprs outputShape(int32_t output, DimsExprs const* in, IExprBuilder& builder) const override {
        if (output == kOUT_POOL) return in[kIN_POOL];
        return exprs({in[kIN_ROWS].d[0], builder.constant(static_cast<int64_t>(mVHeads) * mDim)});
    }

    int32_t alias(int32_t output) const override { return output == kOUT_POOL ? kIN_POOL : -1; }

    size_t workspace(std::vector<nvinfer1::Dims> const&, int32_t tokens) const override {
        return nextn_gated_delta_net_workspace(tokens, mKHeads, mVHeads, mDim);
    }

    cudaError_t enqueue(PluginTensorDesc const* desc, void const* const* in, void* const* out, void* workspace,
                        cudaStream_t stream) const override {
        auto const* rows = static_cast<float const*>(in[kIN_ROWS]);
        auto const* parameters = static_cast<float const*>(in[kIN_PARAMETERS]);
        auto* pool = static_cast<float*>(out[kOUT_POOL]);
        NextnGatedDeltaNet p = {};
        p.t = static_cast<int32_t>(desc[kIN_ROWS].dims.d[0]);
        p.slots = static_cast<int32_t>(desc[kIN_POOL].dims.d[0] / slotSize());
        p.k_heads = mKHeads;
        p.v_heads = mVHeads;
        p.head_dim = mDim;
        p.conv_kernel = mKernel;
        p.eps = mEpsilon;
        p.ld_qkv = p.ld_z = p.ld_gate = rowWidth();
        p.qkv = rows;
        p.z = p.qkv + channels();
        p.alpha = p.z + mVHeads * mDim;
        p.beta = p.alpha + mVHeads;
        p.conv_weight = parameters;
        p.a = p.conv_weight + channels() * mKernel;
        p.dt_bias = p.a + mVHeads;
        p.norm_weight = p.dt_bias + mVHeads;
        p.state_pool = pool;
        p.conv_pool = pool + p.slots * stateSize();
        p.slot = static_cast<int32_t const*>(in[kIN_SLOT]);
        p.y = static_cast<float*>(out[kOUT_Y]);
        p.ld_y = mVHeads * mDim;
        p.workspace = workspace;
        p.workspace_bytes = nextn_gated_delta_net_workspace(p.t, mKHeads, mVHeads, mDim);
        p.flags = kLAUNCH_FLAGS;
        size_t const bytes = sizeof(float) * desc[kIN_POOL].dims.d[0];
        cudaError_t const status = bringState(in[kIN_POOL], out[kOUT_POOL], bytes, stream);
        return status == cudaSuccess ? nextn_gated_delta_net(&p, stream) : status;
    }

private:
    int64_t channels() const { return static_cast<int64_t>(2 * mKHeads + mVHeads) * mDim; }
    int64_t rowWidth() const { return channels() + static_cast<int64_t>(mVHeads) * mDim + 2 * mVHeads; }
    int64_t stateSize() const { return static_cast<int64_t>(mVHeads) * mDim * mDim; }
    int64_t slotSize() const { return stateSize() + (mKernel - 1) * channels(); }

    int32_t mKHeads, mVHeads, mDim, mKernel;
    float mEpsilon;
};

std::unique_ptr<Op> make(Attributes const& attributes, std::string* error) {
    auto op = std::make_unique<GatedDeltaNet>(attributes);
    *error = op->contradiction();
    return error->empty() ? std::move(op) : nullptr;
}

}  // namespace

OpInfo const& gatedDeltaNetInfo() {
    static OpInfo const info = {"GatedDeltaNet",
                                {{"k_heads", AttributeKind::kINT},
                                 {"v_heads", AttributeKind::kINT},
                                 {"head_dim", AttributeKind::kINT},
                                 {"conv_kernel", AttributeKind::kINT},
                                 {"epsilon", AttributeKind::kFLOAT}},
                                make};
    return info;
}

}  // namespace nextn
