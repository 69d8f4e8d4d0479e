// GatedAttentionLayer: a whole decoder layer whose mixer is gated attention; its cache is updated in place.
#include "attention_geometry.h"
#include "layer_op.h"

namespace nextn {
namespace {

class GatedAttentionLayer final : public LayerOp {
public:
    explicit GatedAttentionLayer(Attributes const& a) : GatedAttentionLayer(a, AttentionGeometry(a)) {}

    TensorTypes types() const override {
        return {{DataType::kFLOAT, DataType::kINT8, DataType::kFLOAT, DataType::kINT32, DataType::kFLOAT,
                 mAttention.cacheDtype()},
                {DataType::kFLOAT, mAttention.cacheDtype()}};
    }

    int32_t alias(int32_t output) const override { return output == kOUT_STATE ? kIN_CACHE : -1; }

protected:
    std::string mixerContradiction() const override { return mAttention.contradiction(); }
    int64_t mixerParameters() const override { return 2 * mAttention.dim; }
    int32_t stateInput() const override { return kIN_CACHE; }

    std::string refuseMixer(std::vector<nvinfer1::Dims> const& in) const override {
        return mAttention.refuseState(in[kIN_X].d[0], in[kIN_POSITION], in[kIN_ROPE], in[kIN_CACHE]);
    }

    void mixerSizes(NextnLayer* layer) const override { mAttention.sizes(&layer->attention); }

    void mixerTensors(NextnLayer* layer, float const* parameters, PluginTensorDesc const* desc, void const* const* in,
                      void* const* out) const override {
        mAttention.tensors(&layer->attention, parameters, in[kIN_POSITION], in[kIN_ROPE], layer->t, out[kOUT_STATE],
                           desc[kIN_CACHE].dims.d[1]);
    }

private:
    static constexpr int32_t kIN_POSITION = kIN_MIXER, kIN_ROPE = kIN_MIXER + 1, kIN_CACHE = kIN_MIXER + 2;

    GatedAttentionLayer(Attributes const& a, AttentionGeometry const& attention)
        : LayerOp(a, {2 * attention.queryDim(), attention.kvDim(), attention.kvDim()}, attention.queryDim()),
          mAttention(attention) {}

    AttentionGeometry mAttention;
};

}  // namespace

OpInfo const& gatedAttentionLayerInfo() {
    static OpInfo const info = {"GatedAttentionLayer", LayerOp::attributes(AttentionGeometry::attributes()),
                                makeOp<GatedAttentionLayer>};
    return info;
}

}  // namespace nextn
