// How rows pass from block to block inside the persistent layer kernel, without barriers in between.
//
// What one block writes for others lies in memory that the launch has filled with a value that no result can have, a
// NaN other than the one that arithmetic gives. Who needs a row reads it until none of it has that value. Every word
// speaks for itself, so stores and loads need no order among them.
//   own tiles of the first product   cleared by the block itself, before it stores them
//   everything else                  cleared by all blocks together, while they work on the first product
// If one launch has a layer's first product and another one the rest, the first clears all of it.
#pragma once
#include "layer_decode.cuh"

namespace nextn {

constexpr uint32_t kABSENT = 0xffffffffu;

__device__ __forceinline__ float load_now(const float* p) {
    float v;
    asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ float4 load_now4(const float* p) {
    float4 v;
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}
__device__ __forceinline__ bool absent(float v) { return __float_as_uint(v) == kABSENT; }
__device__ __forceinline__ bool absent(const float4& v) {
    return absent(v.x) || absent(v.y) || absent(v.z) || absent(v.w);
}

// v: what was read at p before; reads again until it is there.
__device__ __forceinline__ void await(const float* p, float& v) {
    while (absent(v)) v = load_now(p);
}

// Some lanes of each block fill what others will wait for.
__device__ __forceinline__ void clear_own_tiles(const LayerParams& p, int lane, int lanes) {
    const Phase& f = p.phase[p.first];
    for (int i = 0; i < f.segments; ++i) {
        const Segment& g = f.segment[i];
        for (int u = first_tile(g, blockIdx.x); u < g.tiles; u += gridDim.x)
            for (int e = lane; e < kTILE_ROWS * p.t; e += lanes) {
                const int n = u * kTILE_ROWS + e % kTILE_ROWS;
                if (n < g.n) g.y[e / kTILE_ROWS * f.ldy + n] = __uint_as_float(kABSENT);
            }
    }
}
__device__ __forceinline__ void clear(const ClearRange& r, uint32_t word, int lane, int lanes) {
    for (int i = blockIdx.x * lanes + lane; i < r.pieces; i += gridDim.x * lanes)
        r.from[i] = make_uint4(word, word, word, word);
}

}  // namespace nextn
