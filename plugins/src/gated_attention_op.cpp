// GatedAttention: norms, rope, cache update and gated attention of one layer; the cache is updated in place.
#include "attention.h"
#include "op.h"

namespace nextn {
namespace {

constexpr int32_t kIN_ROWS = 0, kIN_POSITION = 1, kIN_ROPE = 2, kIN_NORMS = 3, kIN_CACHE = 4;
constexpr int32_t kOUT_Y = 0, kOUT_CACHE = 1;

class GatedAttention final : public Op {
public:
    explicit GatedAttention(Attributes const& a)
        : mHeads(a.integer("heads")), mKvHeads(a.integer("kv_heads")), mDim(a.integer("head_dim")),
          mRopeDim(a.integer("rope_dim")), mEpsilon(a.number("epsilon")) {}

    std::string contradiction() const {
        if (mDim != 32 && mDim != 64 && mDim != 128 && mDim != 256)
            return "head_dim " + std::to_string(mDim) + "; takes 32, 64, 128, 256";
        if (mKvHeads < 1 || mHeads < 1 || mHeads % mKvHeads || mHeads / mKvHeads > 8)
            return "heads / kv_heads is not a whole number up to 8";
        if (mRopeDim < 2 || mRopeDim % 2 || mRopeDim > mDim) return "rope_dim is odd or above head_dim";
        return "";
    }

    TensorTypes types() const override {
        return {{DataType::kFLOAT, DataType::kINT32, DataType::kFLOAT, DataType::kFLOAT, DataType::kHALF},
                {DataType::kFLOAT, DataType::kHALF}};
    }

    std::string refuse(std::vector<nvinfer1::Dims> const& in) const override {
        std::string error = shapeMismatch("rows", in[kIN_ROWS], {-1, rowWidth()});
        int64_t const t = in[kIN_ROWS].d[0];
        if (error.empty()) error = shapeMismatch("position", in[kIN_POSITION], {1});
        if (error.empty()) error = shapeMismatch("rope", in[kIN_ROPE], {2, t, mRopeDim / 2});
        if (error.empty()) error = shapeMismatch("norms", in[kIN_NORMS], {2, mDim});
        return error.empty() ? shapeMismatch("cache", in[kIN_CACHE], {2, -1, mKvHeads, mDim}) : error;
    }

    DimsExprs outputShape(int32_t output, DimsExprs const* in, IExprBuilder& builder) const override {
        if (output == kOUT_CACHE) return in[kIN_CACHE];
        return exprs({in[kIN_ROWS].d[0], builder.constant(static_cast<int64_t>(mHeads) * mDim)});
    }

    int32_t alias(int32_t output) const override { return output == kOUT_CACHE ? kIN_CACHE : -1; }

    size_t workspace(std::vector<nvinfer1::Dims> const&, int32_t tokens) const override {
        return nextn_attention_workspace(tokens, mHeads, mDim);
    }

    cudaError_t enqueue(PluginTensorDesc const* desc, void const* const* in, void* const* out, void* workspace,
                        cudaStream_t stream) const override {
        auto const* rows = static_cast<float const*>(in[kIN_ROWS]);
        auto const* norms = static_cast<float const*>(in[kIN_NORMS]);
        auto* cache = static_cast<uint16_t*>(out[kOUT_CACHE]);
        NextnAttention p = {};
        p.t = static_cast<int32_t>(desc[kIN_ROWS].dims.d[0]);
        p.capacity = static_cast<int32_t>(desc[kIN_CACHE].dims.d[1]);
        p.heads = mHeads;
        p.kv_heads = mKvHeads;
        p.head_dim = mDim;
        p.rope_dim = mRopeDim;
        p.eps = mEpsilon;
        p.query_gate = rows;
        p.key = rows + 2 * mHeads * mDim;
        p.value = p.key + mKvHeads * mDim;
        p.ld_query = p.ld_kv = rowWidth();
        p.q_norm = norms;
        p.k_norm = norms + mDim;
        p.cos = static_cast<float const*>(in[kIN_ROPE]);
        p.sin = p.cos + static_cast<int64_t>(p.t) * mRopeDim / 2;
        p.position = static_cast<int32_t const*>(in[kIN_POSITION]);
        p.key_cache = cache;
        p.value_cache = cache + static_cast<int64_t>(p.capacity) * mKvHeads * mDim;
        p.y = static_cast<float*>(out[kOUT_Y]);
        p.ld_y = mHeads * mDim;
        p.workspace = workspace;
        p.workspace_bytes = nextn_attention_workspace(p.t, mHeads, mDim);
        p.flags = kLAUNCH_FLAGS;
        size_t const bytes = sizeof(uint16_t) * 2 * p.capacity * mKvHeads * mDim;
        cudaError_t const status = bringState(in[kIN_CACHE], out[kOUT_CACHE], bytes, stream);
        return status == cudaSuccess ? nextn_attention(&p, stream) : status;
    }

private:
    int64_t rowWidth() const { return 2 * static_cast<int64_t>(mHeads + mKvHeads) * mDim; }

    int32_t mHeads, mKvHeads, mDim, mRopeDim;
    float mEpsilon;
};

std::unique_ptr<Op> make(Attributes const& attributes, std::string* error) {
    auto op = std::make_unique<GatedAttention>(attributes);
    *error = op->contradiction();
    return error->empty() ? std::move(op) : nullptr;
}

}  // namespace

OpInfo const& gatedAttentionInfo() {
    static OpInfo const info = {"GatedAttention",
                                {{"heads", AttributeKind::kINT},
                                 {"kv_heads", AttributeKind::kINT},
                                 {"head_dim", AttributeKind::kINT},
                                 {"rope_dim", AttributeKind::kINT},
                                 {"epsilon", AttributeKind::kFLOAT}},
                                make};
    return info;
}

}  // namespace nextn
