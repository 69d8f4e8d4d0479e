// What the pieces of nextn_layer share.
#pragma once
#include "launch.cuh"
#include "layer.h"

namespace nextn {

// Where one call keeps its intermediate rows inside the workspace; floats [t, width].
struct LayerWorkspace {
    float *input, *mixer, *residual, *ffn;  // after W_in, the mixer, the first residual add, SwiGLU
    int64_t input_width, mixer_width;
    void *mixer_work, *matmul_work;
    size_t mixer_bytes, matmul_bytes, bytes;
};
LayerWorkspace layer_workspace(void* base, const NextnLayer& layer);

inline bool has_attention(const NextnLayer& p) { return p.attention.head_dim != 0; }

}  // namespace nextn
