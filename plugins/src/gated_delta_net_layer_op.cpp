// GatedDeltaNetLayer: a whole decoder layer whose mixer is a Gated DeltaNet; its pool is updated in place.
#include "delta_net_geometry.h"
#include "layer_op.h"

namespace nextn {
namespace {

class GatedDeltaNetLayer final : public LayerOp {
public:
    explicit GatedDeltaNetLayer(Attributes const& a) : GatedDeltaNetLayer(a, DeltaNetGeometry(a)) {}

    TensorTypes types() const override {
        return {{DataType::kFLOAT, DataType::kINT8, DataType::kFLOAT, DataType::kINT32, DataType::kFLOAT},
                {DataType::kFLOAT, DataType::kFLOAT}};
    }

    int32_t alias(int32_t output) const override { return output == kOUT_STATE ? kIN_POOL : -1; }

protected:
    std::string mixerContradiction() const override { return mNet.contradiction(); }
    int64_t mixerParameters() const override { return mNet.parameters(); }
    int32_t stateInput() const override { return kIN_POOL; }

    std::string refuseMixer(std::vector<nvinfer1::Dims> const& in) const override {
        return mNet.refuseState(in[kIN_POOL], in[kIN_SLOT]);
    }

    void mixerSizes(NextnLayer* layer) const override { mNet.sizes(&layer->delta_net); }

    void mixerTensors(NextnLayer* layer, float const* parameters, PluginTensorDesc const* desc, void const* const* in,
                      void* const* out) const override {
        mNet.tensors(&layer->delta_net, parameters, static_cast<float*>(out[kOUT_STATE]), desc[kIN_POOL].dims.d[0],
                     in[kIN_SLOT]);
    }

private:
    static constexpr int32_t kIN_SLOT = kIN_MIXER, kIN_POOL = kIN_MIXER + 1;

    GatedDeltaNetLayer(Attributes const& a, DeltaNetGeometry const& net)
        : LayerOp(a, {net.channels(), net.valueDim(), net.vHeads, net.vHeads}, net.valueDim()), mNet(net) {}

    DeltaNetGeometry mNet;
};

}  // namespace

OpInfo const& gatedDeltaNetLayerInfo() {
    static OpInfo const info = {"GatedDeltaNetLayer", LayerOp::attributes(DeltaNetGeometry::attributes()),
                                makeOp<GatedDeltaNetLayer>};
    return info;
}

}  // namespace nextn
