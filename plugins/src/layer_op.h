// What the ops that are a whole decoder layer have in common: a pack of matrices, norms, and one call of nextn_layer.
#pragma once
#include "layer.h"
#include "op.h"

namespace nextn {

class LayerOp : public Op {
public:
    // inputRows: of the mixer's input matrices. mixerWidth: values of its result, columns of the output matrix.
    LayerOp(Attributes const& attributes, std::vector<int64_t> inputRows, int64_t mixerWidth);

    static std::vector<AttributeSpec> attributes(std::vector<AttributeSpec> const& mixer);

    std::string contradiction() const final;
    std::string refuse(std::vector<nvinfer1::Dims> const& in) const final;
    DimsExprs outputShape(int32_t output, DimsExprs const* in, IExprBuilder& builder) const final;
    size_t workspace(std::vector<nvinfer1::Dims> const& in, int32_t tokens) const final;
    cudaError_t enqueue(PluginTensorDesc const* desc, void const* const* in, void* const* out, void* workspace,
                        cudaStream_t stream) const final;
    size_t keptBytes() const final { return NEXTN_LAYER_SYNC_BYTES; }
    void useKept(void* memory) final { mSync = static_cast<uint32_t*>(memory); }

protected:
    static constexpr int32_t kIN_X = 0, kIN_WEIGHTS = 1, kIN_PARAMETERS = 2, kIN_MIXER = 3;
    static constexpr int32_t kOUT_Y = 0, kOUT_STATE = 1;

    virtual std::string mixerContradiction() const = 0;
    // Float parameters of the mixer, behind the two norms of the layer.
    virtual int64_t mixerParameters() const = 0;
    virtual std::string refuseMixer(std::vector<nvinfer1::Dims> const& in) const = 0;
    virtual int32_t stateInput() const = 0;
    virtual void mixerSizes(NextnLayer* layer) const = 0;
    virtual void mixerTensors(NextnLayer* layer, float const* parameters, PluginTensorDesc const* desc,
                              void const* const* in, void* const* out) const = 0;

private:
    struct Matrix {
        int32_t type;
        int64_t rows, columns;
    };
    std::vector<Matrix> matrices(int64_t hidden) const;
    // All but what lies in tensors; matrices from `pack` on, if it is not null.
    NextnLayer describe(int64_t hidden, int32_t tokens, uint8_t const* pack) const;

    std::vector<int32_t> mTypes;
    std::vector<int64_t> mInputRows;
    int64_t mMixerWidth;
    int32_t mFfnSize;
    float mEpsilon;
    uint32_t* mSync = nullptr;
};

}  // namespace nextn
