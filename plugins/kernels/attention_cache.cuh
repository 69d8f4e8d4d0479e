// Rows of the KV cache, one kv head's each: how one is stored, and how a tile of them in shared memory is multiplied.
//
// HalfRows: D values in f16. ByteRows: D values in int8, then float32 scales, one per 64 values; a value is
// byte * scale. A row depends on its own values only, so it is the same whatever else is stored with it.
#pragma once
#include "ptx.cuh"

namespace nextn {

constexpr int kKEYS = 64;  // rows of a tile

// acc[m] += queries 16m.., columns k..k+15 of their layout, times a tensor-core step's keys; q: [16 * MT][PITCH].
template <int MT, int PITCH>
__device__ __forceinline__ void multiply_queries(float (&acc)[MT][4], const __half (*q)[PITCH], int k, int lane,
                                                 uint32_t b0, uint32_t b1) {
#pragma unroll
    for (int m = 0; m < MT; ++m) {
        uint32_t a[4];
        ldmatrix_x4(a, &q[16 * m + (lane & 15)][k + 8 * (lane >> 4)]);
        mma_f16_k16(acc[m], a, b0, b1);
    }
}

template <int D>
struct HalfRows {
    static constexpr int kVALUE_BYTES = 2 * D, kBYTES = kVALUE_BYTES;  // of a row's values; of a row in the cache
    static constexpr int kPITCH = kBYTES + 16;                         // of a row in a tile
    static constexpr int kSTAGES = 1;                                  // tiles of keys, and of values, in shared memory
    static constexpr float kLARGEST = 65504.0f;                        // value that it holds
    static constexpr int kVALUE_WARPS = D >= 128 ? 8 : D / 16;
    static constexpr int kTILES = D / kVALUE_WARPS / 8;  // 8-column tiles of a warp
    using Tile = uint8_t[kKEYS][kPITCH];

    // v[j]: value lane + 32 * j of the row.
    __device__ static __forceinline__ void store(void* row, const float (&v)[D / 32], int lane) {
#pragma unroll
        for (int j = 0; j < D / 32; ++j) static_cast<__half*>(row)[lane + 32 * j] = __float2half_rn(v[j]);
    }

    // Where element e of a query lies.
    __device__ static __forceinline__ int query_place(int e) { return e; }

    // acc[m] = queries 16m.. times the 8 keys from key on.
    template <int MT>
    __device__ static __forceinline__ void scores(float (&acc)[MT][4], const __half (*q)[D + 8], const Tile& keys,
                                                  int key, int lane) {
#pragma unroll
        for (int k = 0; k < D; k += 32) {
            uint32_t b[4];
            ldmatrix_x4(b, keys[key + (lane & 7)] + 2 * (k + 8 * (lane >> 3)));
            multiply_queries<MT>(acc, q, k, lane, b[0], b[1]);
            multiply_queries<MT>(acc, q, k + 16, lane, b[2], b[3]);
        }
    }

    // out += weights times this warp's columns of the values.
    template <int MT>
    __device__ static __forceinline__ void add_values(float (&out)[MT][kTILES][4], const __half (*weights)[kKEYS + 8],
                                                      const Tile& values, int warp, int lane) {
#pragma unroll
        for (int k = 0; k < kKEYS; k += 16) {
            uint32_t a[MT][4];
#pragma unroll
            for (int m = 0; m < MT; ++m) ldmatrix_x4(a[m], &weights[16 * m + (lane & 15)][k + 8 * (lane >> 4)]);
#pragma unroll
            for (int n = 0; n < kTILES; n += 2) {
                uint32_t b[4];
                ldmatrix_x4_trans(b, values[k + (lane & 15)] + 2 * (8 * (warp * kTILES + n) + 8 * (lane >> 4)));
#pragma unroll
                for (int m = 0; m < MT; ++m) {
                    mma_f16_k16(out[m][n], a[m], b[0], b[1]);
                    mma_f16_k16(out[m][n + 1], a[m], b[2], b[3]);
                }
            }
        }
    }

    // put(column, two values of neighbouring columns) for this thread's of row lane / 4 + 8 * half of the 16.
    template <typename Put>
    __device__ static __forceinline__ void runs(const float (&out)[kTILES][4], int half, int warp, int lane, Put put) {
#pragma unroll
        for (int n = 0; n < kTILES; ++n)
            put(8 * (warp * kTILES + n) + 2 * (lane & 3), make_float2(out[n][2 * half], out[n][2 * half + 1]));
    }
};

template <int D>
struct ByteRows {
    static constexpr int kGROUP = D < 64 ? D : 64, kGROUPS = D / kGROUP;  // values of a scale; scales of a row
    static constexpr int kVALUE_BYTES = D, kBYTES = D + 16, kPITCH = kBYTES, kSTAGES = 2;
    static constexpr int kVALUE_WARPS = D / 32, kTILES = 4;
    static constexpr float kLARGEST = 32496.0f;  // its scale times 2^8 is still finite in f16
    using Tile = uint8_t[kKEYS][kPITCH];
    static_assert(kGROUPS * sizeof(float) <= 16, "scales of a row");

    // A group with a value that is not finite gets such a scale: all of it comes back as not finite.
    __device__ static __forceinline__ void store(void* row, const float (&v)[D / 32], int lane) {
        constexpr int kMINE = kGROUP / 32;
        float mine = 0.0f;  // scale number `lane`
#pragma unroll
        for (int g = 0; g < kGROUPS; ++g) {
            // Magnitudes are ordered as their bits are, infinity and NaN above all numbers.
            uint32_t top = 0;
#pragma unroll
            for (int j = 0; j < kMINE; ++j) top = max(top, __float_as_uint(fabsf(v[kMINE * g + j])));
            const float largest = __uint_as_float(__reduce_max_sync(~0u, top));
            const float steps = __fdiv_rn(127.0f, largest);  // of all zeros: infinite, and 0 * infinity rounds to 0
            if (lane == g) mine = __fdiv_rn(largest, 127.0f);
#pragma unroll
            for (int j = 0; j < kMINE; ++j) {
                const int byte = __float2int_rn(__fmul_rn(v[kMINE * g + j], steps));
                static_cast<int8_t*>(row)[kGROUP * g + 32 * j + lane] = static_cast<int8_t>(max(-127, min(127, byte)));
            }
        }
        if (lane < 4) reinterpret_cast<float*>(static_cast<int8_t*>(row) + D)[lane] = mine;
    }

    // A thread's operand of a tensor-core step covers dimensions 2q, 2q+1, 2q+8, 2q+9. It gets four neighbouring bytes
    // in one load; the queries' elements are laid down in that order.
    __device__ static __forceinline__ int query_place(int e) {
        const int i = e & 3;
        return (e & ~15) + ((e & 12) >> 1) + (i & 1) + 8 * (i >> 1);
    }

    template <int MT>
    __device__ static __forceinline__ void scores(float (&acc)[MT][4], const __half (*q)[D + 8], const Tile& keys,
                                                  int key, int lane) {
        const uint8_t* row = keys[key + (lane >> 2)] + 4 * (lane & 3);
        const uint8_t* scales = keys[key + 2 * (lane & 3)] + D;  // of this thread's two columns of the result
#pragma unroll
        for (int g = 0; g < kGROUPS; ++g) {
            float part[MT][4] = {};
#pragma unroll
            for (int k = kGROUP * g; k < kGROUP * (g + 1); k += 16) {
                const uint32_t bytes = word_at(row + k) ^ 0x80808080u;
                const __half2 low = biased_half2(__byte_perm(bytes, 0x64646464u, 0x4140));
                const __half2 high = biased_half2(__byte_perm(bytes, 0x64646464u, 0x4342));
                const __half2 bias = __float2half2_rn(1152.0f);
                multiply_queries<MT>(part, q, k, lane, bits_of(__hsub2(low, bias)), bits_of(__hsub2(high, bias)));
            }
            const float s0 = float_at(scales + 4 * g), s1 = float_at(scales + kPITCH + 4 * g);
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int e = 0; e < 4; ++e) acc[m][e] = __fmaf_rn(part[m][e], e & 1 ? s1 : s0, acc[m][e]);
        }
    }

    // A thread's operand is keys 2q, 2q+1, 2q+8, 2q+9 of one column. It loads four neighbouring columns of each key,
    // which become its column of four tiles: column 4g + n of the warp's 32 is column g of tile n.
    template <int MT>
    __device__ static __forceinline__ void add_values(float (&out)[MT][kTILES][4], const __half (*weights)[kKEYS + 8],
                                                      const Tile& values, int warp, int lane) {
        const int scale_at = D + 4 * (32 * warp / kGROUP);
#pragma unroll
        for (int k = 0; k < kKEYS; k += 16) {
            uint32_t a[MT][4], b[kTILES][2];
#pragma unroll
            for (int m = 0; m < MT; ++m) ldmatrix_x4(a[m], &weights[16 * m + (lane & 15)][k + 8 * (lane >> 4)]);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint8_t* row = values[k + 8 * half + 2 * (lane & 3)];
                const int at = 32 * warp + 4 * (lane >> 2);
                const uint32_t first = word_at(row + at) ^ 0x80808080u,
                               second = word_at(row + kPITCH + at) ^ 0x80808080u;
                const uint32_t low = __byte_perm(first, second, 0x5140), high = __byte_perm(first, second, 0x7362);
                // byte * 2^-8 is exact; 2^8 * scale stays a normal f16 number for values of 3e-5 to 3e4.
                const __half2 scale =
                    __floats2half2_rn(256.0f * float_at(row + scale_at), 256.0f * float_at(row + kPITCH + scale_at));
#pragma unroll
                for (int n = 0; n < kTILES; ++n) {
                    const uint32_t pair = __byte_perm(n < 2 ? low : high, 0x64646464u, n & 1 ? 0x4342 : 0x4140);
                    const __half2 v = __hfma2(biased_half2(pair), __float2half2_rn(0x1p-8f), __float2half2_rn(-4.5f));
                    b[n][half] = bits_of(__hmul2(v, scale));
                }
            }
#pragma unroll
            for (int n = 0; n < kTILES; ++n)
#pragma unroll
                for (int m = 0; m < MT; ++m) mma_f16_k16(out[m][n], a[m], b[n][0], b[n][1]);
        }
    }

    // As of HalfRows; four values.
    template <typename Put>
    __device__ static __forceinline__ void runs(const float (&out)[kTILES][4], int half, int warp, int lane, Put put) {
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e)
            put(32 * warp + 4 * (2 * (lane & 3) + (e & 1)), make_float4(out[0][e], out[1][e], out[2][e], out[3][e]));
    }

private:
    __device__ static __forceinline__ uint32_t word_at(const uint8_t* p) {
        return *reinterpret_cast<const uint32_t*>(p);
    }
    __device__ static __forceinline__ float float_at(const uint8_t* p) { return *reinterpret_cast<const float*>(p); }
    // Two bytes b under 0x64 each: the f16 numbers 1024 + b.
    __device__ static __forceinline__ __half2 biased_half2(uint32_t pair) {
        return *reinterpret_cast<const __half2*>(&pair);
    }
    __device__ static __forceinline__ uint32_t bits_of(__half2 v) { return *reinterpret_cast<const uint32_t*>(&v); }
};

}  // namespace nextn
