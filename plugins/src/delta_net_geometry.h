// The Gated DeltaNet of a layer as its attributes describe it: sizes, and where tensors begin in parameters and pool.
#pragma once
#include "gated_delta_net.h"
#include "op.h"

namespace nextn {

struct DeltaNetGeometry {
    int32_t kHeads, vHeads, dim, kernel;

    explicit DeltaNetGeometry(Attributes const& a)
        : kHeads(a.integer("k_heads")), vHeads(a.integer("v_heads")), dim(a.integer("head_dim")),
          kernel(a.integer("conv_kernel")) {}

    static std::vector<AttributeSpec> attributes() {
        return {{"k_heads", AttributeKind::kINT},
                {"v_heads", AttributeKind::kINT},
                {"head_dim", AttributeKind::kINT},
                {"conv_kernel", AttributeKind::kINT},
                {"epsilon", AttributeKind::kFLOAT}};
    }

    int64_t valueDim() const { return static_cast<int64_t>(vHeads) * dim; }
    int64_t channels() const { return static_cast<int64_t>(2 * kHeads + vHeads) * dim; }
    int64_t parameters() const { return channels() * kernel + 2 * vHeads + dim; }
    int64_t stateSize() const { return valueDim() * dim; }
    int64_t stepSize() const { return vHeads * (dim / 32) * static_cast<int64_t>(dim + 64); }
    int64_t windowSize() const { return (kernel - 1) * channels(); }
    // A whole state in the first slot, steps in the others, a window in each.
    int64_t slots(int64_t poolSize) const { return (poolSize - stateSize() + stepSize()) / (stepSize() + windowSize()); }
    int64_t poolSize(int64_t slots) const { return stateSize() + (slots - 1) * stepSize() + slots * windowSize(); }

    std::string contradiction() const {
        if (dim != 32 && dim != 64 && dim != 128) return "head_dim " + std::to_string(dim) + "; takes 32, 64, 128";
        if (kHeads < 1 || vHeads < 1 || vHeads % kHeads) return "v_heads is not a multiple of k_heads";
        if (kernel < 2 || kernel > 8) return "conv_kernel " + std::to_string(kernel) + "; takes 2 to 8";
        return "";
    }

    std::string refuseState(nvinfer1::Dims const& pool, nvinfer1::Dims const& slot) const {
        std::string error = shapeMismatch("pool", pool, {-1});
        if (error.empty()) error = shapeMismatch("slot", slot, {1});
        int64_t const size = error.empty() ? pool.d[0] : -1;
        if (size >= 0 && (size < poolSize(1) || size != poolSize(slots(size))))
            error = "pool of " + std::to_string(size) + " values is not a whole number of slots: the first takes "
                + std::to_string(poolSize(1)) + ", others " + std::to_string(stepSize() + windowSize());
        return error;
    }

    void sizes(NextnGatedDeltaNet* p) const {
        p->k_heads = kHeads;
        p->v_heads = vHeads;
        p->head_dim = dim;
        p->conv_kernel = kernel;
    }

    // parameters: conv weight, a, dt, norm. pool: state and steps, then windows.
    void tensors(NextnGatedDeltaNet* p, float const* parameters, float* pool, int64_t poolSize,
                 void const* slot) const {
        p->conv_weight = parameters;
        p->a = p->conv_weight + channels() * kernel;
        p->dt_bias = p->a + vHeads;
        p->norm_weight = p->dt_bias + vHeads;
        p->slots = static_cast<int32_t>(slots(poolSize));
        p->state_pool = pool;
        p->conv_pool = pool + poolSize - p->slots * windowSize();
        p->slot = static_cast<int32_t const*>(slot);
    }
};

}  // namespace nextn
