// K-quant rows as A operands of f16 tensor cores, expanded in registers: a lane of an m16n8k16 or m64nNk16 fragment
// works on rows g = lane / 4 and g + 8 and expands its own values, once for however many tokens there are.
//
// Steps of 64 values.  Values and tokens are both taken in this order of k within a step, so that a lane's share is
// contiguous in the file's blocks: k16 step i, lane q = lane % 4, positions 2q, 2q+1, 2q+8, 2q+9 are the values
// 32 (i/2) + 8 q + 4 (i%2) + {0, 2, 1, 3} (permuted_k below).
//
// A superblock is exact in f16 up to one factor per row, `unit`:  w / unit = s (q - z) + c  with integers s and z per
// 32 values.  Q6_K: unit = d, z = 32, c = 0 (s (q - z) rounds beyond 2048).  Q4_K and Q5_K: unit = d, s = scale, z the
// integer nearest to (dmin m) / (d s), and c = s z - dmin m / d is what is left, within +-s/2: it multiplies the sums
// of the activations over 32 as an f16 high and low part.  Where d is tiny against dmin, unit = dmin and s rounds.
#pragma once
#include "kquant_blocks.cuh"
#include "ptx.cuh"

namespace nextn {

constexpr int kSTEP_VALUES = 64, kSTEPS_PER_SUPER = kSUPER / kSTEP_VALUES;

__device__ __forceinline__ uint32_t bits_of(__half2 h) { return *reinterpret_cast<const uint32_t*>(&h); }
__device__ __forceinline__ __half2 half2_of(uint32_t v) { return *reinterpret_cast<const __half2*>(&v); }
// (v - offset) * scale on two f16
__device__ __forceinline__ uint32_t shifted_product(uint32_t v, uint32_t offset, uint32_t scale) {
    return bits_of(__hmul2(__hsub2(half2_of(v), half2_of(offset)), half2_of(scale)));
}
__device__ __forceinline__ uint32_t low_half_twice(uint32_t v) { return __byte_perm(v, v, 0x1010); }
__device__ __forceinline__ uint32_t high_half_twice(uint32_t v) { return __byte_perm(v, v, 0x3232); }

constexpr uint32_t kMAGIC = 0x64006400u;  // f16 1024 twice: 1024 + b has b in its lowest bits

// Packed values of one step of one row (kSTEPS: of so many that share their bytes), and their expansion into the row's
// share of 4 fragments: registers r and r + 2 of each, r = 0 for row g, 1 for row g + 8.
template <int TYPE>
struct StepOfRow;

template <>
struct StepOfRow<kNEXTN_Q4_K> {
    static constexpr int kSTEPS = 1;
    uint2 q;
    __device__ __forceinline__ void load(const uint8_t* block, int step, int lane_part) {
        q = __ldg(reinterpret_cast<const uint2*>(block + 16 + 32 * step) + lane_part);
    }
    // scale, offset: (s, s/16) and (1024 + z, 1024 + 16 z) of the step's two sub-blocks
    __device__ __forceinline__ void expand(uint32_t (&frag)[4][4], int r, int, uint32_t scale, uint32_t offset,
                                           const uint32_t*) const {
        const uint32_t s0 = low_half_twice(scale), s1 = high_half_twice(scale);
        const uint32_t o0 = low_half_twice(offset), o1 = high_half_twice(offset);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint32_t w = i ? q.y : q.x, odd = w >> 8;
            frag[i][r] = shifted_product((w & 0x000f000fu) | kMAGIC, o0, s0);
            frag[i][r + 2] = shifted_product((odd & 0x000f000fu) | kMAGIC, o0, s0);
            frag[i + 2][r] = shifted_product((w & 0x00f000f0u) | kMAGIC, o1, s1);
            frag[i + 2][r + 2] = shifted_product((odd & 0x00f000f0u) | kMAGIC, o1, s1);
        }
    }
};

template <>
struct StepOfRow<kNEXTN_Q5_K> {
    static constexpr int kSTEPS = 1;
    uint2 q;
    __device__ __forceinline__ void load(const uint8_t* block, int step, int lane_part) {
        q = __ldg(reinterpret_cast<const uint2*>(block + 48 + 32 * step) + lane_part);
    }
    // scale, offset: s and 1024 + z of the step's two sub-blocks; high: the lane's fifth bits of the superblock
    __device__ __forceinline__ void expand(uint32_t (&frag)[4][4], int r, int step, uint32_t scale, uint32_t offset,
                                           const uint32_t* high) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int part = i >> 1;
            const uint32_t s = part ? high_half_twice(scale) : low_half_twice(scale);
            const uint32_t o = part ? high_half_twice(offset) : low_half_twice(offset);
            const uint32_t w = (i & 1 ? q.y : q.x) >> (4 * part), h = high[i & 1] >> (2 * step + part);
            const auto two = [&](int shift) {
                return ((w >> shift) & 0x000f000fu) | (((h >> shift) & 0x00010001u) << 4) | kMAGIC;
            };
            frag[i][r] = shifted_product(two(0), o, s);
            frag[i][r + 2] = shifted_product(two(8), o, s);
        }
    }
};

// The 8 bytes at an address that is a multiple of 2.
__device__ __forceinline__ uint2 load_8_bytes(const uint8_t* p) {
    const uint32_t skew = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(p)) & 2;
    const auto* w = reinterpret_cast<const uint32_t*>(p - skew);
    const uint32_t pick = skew ? 0x5432 : 0x3210, a = __ldg(w), b = __ldg(w + 1), c = skew ? __ldg(w + 2) : 0;
    return make_uint2(__byte_perm(a, b, pick), __byte_perm(b, c, pick));
}

template <>
struct StepOfRow<kNEXTN_Q6_K> {
    static constexpr int kSTEPS = 2;
    uint2 low[2], high;
    // step: the even one
    __device__ __forceinline__ void load(const uint8_t* block, int step, int lane_part) {
        low[0] = load_8_bytes(block + 32 * step + 8 * lane_part);
        low[1] = load_8_bytes(block + 32 * step + 32 + 8 * lane_part);
        high = load_8_bytes(block + 128 + 16 * step + 8 * lane_part);
    }
    // scale: the lane's two scales of the step, int8, in the low half
    __device__ __forceinline__ void expand(uint32_t (&frag)[4][4], int r, int step, uint32_t scale, uint32_t,
                                           const uint32_t*) const {
        const uint32_t offset = bits_of(__float2half2_rn(1056.0f));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int part = i >> 1;
            const uint32_t s = bits_of(__half2half2(__int2half_rn(static_cast<int8_t>(scale >> (8 * part)))));
            const uint32_t w = (i & 1 ? low[part].y : low[part].x) >> (4 * (step & 1));
            const uint32_t h = (i & 1 ? high.y : high.x) >> (4 * (step & 1) + 2 * part);
            const auto two = [&](int shift) {
                return ((w >> shift) & 0x000f000fu) | (((h >> shift) & 0x00030003u) << 4) | kMAGIC;
            };
            frag[i][r] = shifted_product(two(0), offset, s);
            frag[i][r + 2] = shifted_product(two(8), offset, s);
        }
    }
};

// What a row's superblock holds besides its values, still packed.
template <int TYPE>
struct HeaderOfRow {
    uint4 header;
    uint2 high;  // Q5_K
    __device__ __forceinline__ void load(const uint8_t* block, int lane_part) {
        header = __ldg(reinterpret_cast<const uint4*>(block));
        if constexpr (TYPE == kNEXTN_Q5_K) high = __ldg(reinterpret_cast<const uint2*>(block + 16) + lane_part);
    }
};

template <>
struct HeaderOfRow<kNEXTN_Q6_K> {
    uint32_t words[5], pick;  // of the scales, from a multiple of 4 bytes on; how __byte_perm cuts out theirs
    unsigned short d;
    __device__ __forceinline__ void load(const uint8_t* block, int) {
        const uint32_t skew = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(block)) & 2;
        const auto* w = reinterpret_cast<const uint32_t*>(block + 192 - skew);
        pick = skew ? 0x5432 : 0x3210;
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = __ldg(w + i);
        words[4] = skew ? __ldg(w + 4) : 0;
        d = __ldg(reinterpret_cast<const unsigned short*>(block + 208));
    }
};

// Scales of the superblock in hand, for one row: those of sub-blocks 2q and 2q+1 in lane q, to be passed around.
template <int TYPE>
struct SuperOfRow {
    float unit;                    // 0: the superblock is all zeros
    uint32_t scales, offsets;      // of sub-blocks 2q and 2q+1
    uint32_t rest_high, rest_low;  // c of those sub-blocks, f16 high and low parts
    uint32_t high[2];              // Q5_K: the lane's fifth bits

    __device__ __forceinline__ void decode(const HeaderOfRow<TYPE>& h, int lane_part) {
        const float2 d = __half22float2(half2_of(h.header.x));  // d, dmin
        const ScaleMin u = unpack_scale_min(h.header.y, h.header.z, h.header.w);
        const int shift = 16 * (lane_part & 1);
        const uint32_t sc = (lane_part >> 1 ? u.sc[1] : u.sc[0]) >> shift;
        const uint32_t mn = (lane_part >> 1 ? u.mn[1] : u.mn[0]) >> shift;
        unit = fabsf(d.y) > 512.0f * fabsf(d.x) ? d.y : d.x;
        const float inverse = unit != 0.0f ? 1.0f / unit : 0.0f;
        const bool plain = unit == d.x;
        float s[2], z[2], c[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float scale = static_cast<float>((sc >> (8 * i)) & 63), m = static_cast<float>((mn >> (8 * i)) & 63);
            s[i] = plain ? (unit != 0.0f ? scale : 0.0f) : __half2float(__float2half_rn(scale * (d.x * inverse)));
            const float least = m * (d.y * inverse);
            z[i] = s[i] != 0.0f ? rintf(fminf(fmaxf(__fdividef(least, s[i]), 0.0f), 31.0f)) : 0.0f;
            c[i] = __fmaf_rn(s[i], z[i], -least);
        }
        const float odd = TYPE == kNEXTN_Q4_K ? 16.0f : 1.0f;  // Q4_K leaves the odd sub-block's nibbles where they are
        scales = bits_of(__floats2half2_rn(s[0], s[1] / odd));
        offsets = bits_of(__floats2half2_rn(1024.0f + z[0], 1024.0f + odd * z[1]));
        const __half2 most = __floats2half2_rn(c[0], c[1]);
        rest_high = bits_of(most);
        rest_low = bits_of(__floats2half2_rn(c[0] - __low2float(most), c[1] - __high2float(most)));
        if constexpr (TYPE == kNEXTN_Q5_K) {
            high[0] = h.high.x;
            high[1] = h.high.y;
        }
    }
};

// Q6_K: every lane has the scales of its own values, two for each step.
template <>
struct SuperOfRow<kNEXTN_Q6_K> {
    float unit;
    uint32_t scales[2];  // int8, of steps 0 and 1, and of 2 and 3
    static constexpr const uint32_t* high = nullptr;

    __device__ __forceinline__ void decode(const HeaderOfRow<kNEXTN_Q6_K>& h, int lane_part) {
        unit = __half2float(__ushort_as_half(h.d));
        const uint32_t mine = lane_part >> 1 ? 0x7531 : 0x6420;  // a sub-block has 16 values: those of two lanes
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint32_t even = __byte_perm(h.words[2 * i], h.words[2 * i + 1], h.pick);
            const uint32_t odd = __byte_perm(h.words[2 * i + 1], h.words[2 * i + 2], h.pick);
            scales[i] = unit != 0.0f ? __byte_perm(even, odd, mine) : 0;
        }
    }
};

// The step's value that stands at `position`.
__host__ __device__ constexpr int permuted_k(int position) {
    const int i = position / 16, half = position / 8 % 2, q = position % 8 / 2, second = position % 2;
    return 32 * (i / 2) + 8 * q + 4 * (i % 2) + half + 2 * second;
}

}  // namespace nextn
