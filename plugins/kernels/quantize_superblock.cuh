// One superblock of one token, quantised by a warp into global memory in operand order (see QuantizedRows).
#pragma once
#include "token_operand.cuh"

namespace nextn {

// Writers 0, 1: column hi; 2, 3: column lo; even ones the `rest` slots, odd ones the `first` and the remaining `rest`.
__device__ __forceinline__ void pack_sum32(uint8_t* out, int token, int sub, int sum, int writer) {
    const MinDigit d = min_digit(sum, writer >= 2);
    uint8_t* column = out + (2 * token + (writer >> 1)) * 4 * 8;
    const int q = (sub >> 2) + (writer & 1 ? 0 : 2), byte = sub & 3;
    column[q * 8 + byte] = static_cast<uint8_t>(writer & 1 ? d.first : d.rest);
    column[q * 8 + 4 + byte] = static_cast<uint8_t>(d.rest);
}

__device__ __forceinline__ void pack_sum16(uint8_t* out, int token, int sub, int sum) {
#pragma unroll
    for (int low = 0; low < 2; ++low) {
        const OffsetColumn d = offset_column(sum, low);
        uint8_t* at = out + ((2 * token + low) * 4 + (sub >> 2)) * 8 + (sub & 3);
        at[0] = static_cast<uint8_t>(d.first);
        at[4] = static_cast<uint8_t>(d.second);
    }
}

// Quantise 256 values held 8 to a lane: v[0] at 32*(lane/4) + 4*(lane%4), v[1] 16 further.
// Returns the scale.
__device__ __forceinline__ float quantize_superblock(const float4 (&v)[2], const QuantizedRows& out, int64_t slot, int token,
                                     int lane) {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i)
        bits = max(bits, max(max(__float_as_uint(v[i].x) & 0x7fffffffu, __float_as_uint(v[i].y) & 0x7fffffffu),
                             max(__float_as_uint(v[i].z) & 0x7fffffffu, __float_as_uint(v[i].w) & 0x7fffffffu)));
    const QuantScale scale = quant_scale(__reduce_max_sync(~0u, bits));
    const QuantWord w[2] = {quantize4(v[0], scale.inverse), quantize4(v[1], scale.inverse)};
    int sum[2] = {w[0].sum, w[1].sum};
    const int sub = lane >> 2, q = lane & 3;
    uint8_t* frag = out.frag + slot * 2048 + (sub >> 1) * 512 + (sub & 1) * 8;
    *reinterpret_cast<uint2*>(frag + ((2 * token) * 4 + q) * 16) = make_uint2(w[0].hi, w[1].hi);
    *reinterpret_cast<uint2*>(frag + ((2 * token + 1) * 4 + q) * 16) = make_uint2(w[0].lo, w[1].lo);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        sum[h] += __shfl_xor_sync(~0u, sum[h], 1);
        sum[h] += __shfl_xor_sync(~0u, sum[h], 2);
    }
    pack_sum32(out.sum32 + slot * 256, token, sub, sum[0] + sum[1], q);
    if (q < 2) pack_sum16(out.sum16 + slot * 256, token, 2 * sub + q, q ? sum[1] : sum[0]);
    return scale.scale;
}

}  // namespace nextn
