// What the pieces of nextn_layer share.
#pragma once
#include "kquant_blocks.cuh"
#include "launch.cuh"
#include "layer.h"

namespace nextn {

// Persistent kernel, more than four tokens: a superblock of a product's rows, quantised, as a TokenOperand of any type
// has it in groups of four (see layer_operands.cuh).
struct __align__(128) OperandBlock {
    static constexpr int kGROUPS = ceil_div(NEXTN_MAX_DECODE_T, kGroupTokens);
    uint4 frag[kGROUPS][4][32];  // words 4 i .. 4 i + 3 of a lane
    uint4 digits[kGROUPS][32];   // a lane's sums and six
    float scale[kGroupTokens][kGROUPS];
    float squares[kGROUPS * kGroupTokens];  // sums of x^2, where rows are normed
};

// Where one call keeps its intermediate rows inside the workspace; floats [t, width].
struct LayerWorkspace {
    float *input, *mixer, *residual, *ffn;  // after W_in, the mixer, the first residual add, SwiGLU
    float* squares;                         // persistent kernel: of the delta net's outputs
    OperandBlock* operands[5];              // the same, more than four tokens: of each product, and where they end
    int64_t input_width, mixer_width;
    void *mixer_work, *matmul_work;
    size_t mixer_bytes, matmul_bytes, bytes;
};
LayerWorkspace layer_workspace(void* base, const NextnLayer& layer);

// Blocks of the persistent kernel: as many as run at once, in clusters of which each block has a multiprocessor. 0
// where it does not run at all.
cudaError_t layer_blocks(const DeviceLimits& limits, int* blocks);
// What the persistent kernel takes of a layer. Does not depend on t within 1..8.
enum class LayerFusion { kNONE, kAFTER_MIXER, kAROUND_MIXER, kWHOLE };
LayerFusion layer_fusion(const NextnLayer& p, const DeviceLimits& limits, int blocks);
// kAFTER_INPUT: what comes after the mixer where kINPUT came before it, which clears memory for both.
enum class LayerPart { kINPUT, kAFTER_INPUT, kAFTER_MIXER, kWHOLE };
// `delta`: p.delta_net with rows and y set.
cudaError_t layer_decode(const NextnLayer& p, const LayerWorkspace& w, LayerPart part, const DeviceLimits& limits,
                         int blocks, const NextnGatedDeltaNet& delta, cudaStream_t stream);

inline bool has_attention(const NextnLayer& p) { return p.attention.head_dim != 0; }

}  // namespace nextn
