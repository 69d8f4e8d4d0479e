// Prefill matmul: f16 tensor cores on weights that f16 holds exactly.
//
// Inside a superblock a weight is the integer sc*q (at most 1953 for Q4_K and Q5_K; sc*(q-32) of Q6_K reaches 4096 and
// rounds only beyond 2048), so the f16 tile loses nothing; d and dmin enter once per superblock in float32:
//   y += d * (A B) - dmin * (M S),  M = the 8 mins twice, S = sums of x over 32 as f16 high and low parts.
// Block: 128 rows x 128 tokens, 8 warps as 4 x 2, steps of 64 values, two buffers.
#include "launch.cuh"
#include "matmul_parts.cuh"
#include "ptx.cuh"

namespace nextn {
namespace {

constexpr int kROWS = 128, kTOKENS = 128, kSTEP = 64, kSTEPS = kSUPER / kSTEP, kTHREADS = 256;
constexpr int kPITCH = kSTEP + 8, kSUM_PITCH = 16 + 8, kOUT_PITCH = kROWS + 4;  // padded against bank conflicts

struct Buffers {
    __half a[2][kROWS][kPITCH];
    __half b[2][kTOKENS][kPITCH];
    __half mins[2][kROWS][kSUM_PITCH];
    __half sums[2][kTOKENS][kSUM_PITCH];
    float2 d[2][kROWS];  // d, dmin
};
union Shared {
    Buffers in;
    float out[kTOKENS][kOUT_PITCH];
};

struct PrefillParams {
    NextnMatrix matrix[NEXTN_MAX_MATRICES];
    int first_block[NEXTN_MAX_MATRICES + 1];
    const __half* x;
    const __half* sums;
    const float* row_scale;
    const float* residual;
    int64_t ldr;
    int count, t, supers;
    bool swiglu;
};

// Words at a 2-byte aligned address.
template <int N>
__device__ __forceinline__ void load_words_2(uint32_t (&out)[N], const uint8_t* p) {
    const uintptr_t skew = reinterpret_cast<uintptr_t>(p) & 2;
    const auto* w = reinterpret_cast<const uint32_t*>(p - skew);
    if (!skew) {
#pragma unroll
        for (int i = 0; i < N; ++i) out[i] = __ldg(w + i);
        return;
    }
    uint32_t low = __ldg(w);
#pragma unroll
    for (int i = 0; i < N; ++i) {
        // the last half word alone, so that nothing behind the block is read
        const uint32_t high = i + 1 < N ? __ldg(w + i + 1) : __ldg(reinterpret_cast<const uint16_t*>(w + N));
        out[i] = __byte_perm(low, high, 0x5432);
        low = high;
    }
}

// 32 weights of one row (half `part` of 64-value step `step`) still packed.
template <int TYPE>
struct Packed {
    uint32_t q[8], high[TYPE == kNEXTN_Q4_K ? 1 : 8];

    __device__ __forceinline__ void load(const uint8_t* block, int step, int part) {
        if constexpr (TYPE == kNEXTN_Q6_K) {
            load_words_2(q, block + 64 * (step >> 1) + 32 * part);
            load_words_2(high, block + 128 + 32 * (step >> 1));
        } else {
            const auto* v = reinterpret_cast<const uint4*>(block + (TYPE == kNEXTN_Q5_K ? 48 : 16) + 32 * step);
            *reinterpret_cast<uint4*>(q) = __ldg(v);
            *reinterpret_cast<uint4*>(q + 4) = __ldg(v + 1);
            if constexpr (TYPE == kNEXTN_Q5_K) {
                *reinterpret_cast<uint4*>(high) = __ldg(reinterpret_cast<const uint4*>(block + 16));
                *reinterpret_cast<uint4*>(high + 4) = __ldg(reinterpret_cast<const uint4*>(block + 32));
            }
        }
    }

    // Four values as bytes.
    __device__ __forceinline__ uint32_t bytes(int i, int step, int part) const {
        if constexpr (TYPE == kNEXTN_Q6_K) {
            const int j = 2 * (step & 1) + part;  // quarter of the half block
            const uint32_t low = (j >= 2 ? q[i] >> 4 : q[i]) & 0x0f0f0f0fu;
            return low | (((high[i] >> (2 * j)) & 0x03030303u) << 4);
        }
        uint32_t v = (part ? q[i] >> 4 : q[i]) & 0x0f0f0f0fu;
        if constexpr (TYPE == kNEXTN_Q5_K) v |= ((high[i] >> (2 * step + part)) & 0x01010101u) << 4;
        return v;
    }

    // (byte - offset) * scale as f16, exact through the bit pattern 0x6400 | byte = 1024 + byte.
    __device__ __forceinline__ void store(__half* out, int step, int part, __half scale0, __half scale1) const {
        const __half2 offset = __float2half2_rn(TYPE == kNEXTN_Q6_K ? 1056.0f : 1024.0f);
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
            const __half2 scale = __half2half2(i < 4 ? scale0 : scale1);
            __half2 h[4];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const uint32_t v = bytes(i + j, step, part);
                const uint32_t lo = __byte_perm(v, 0x64646464u, 0x4140), hi = __byte_perm(v, 0x64646464u, 0x4342);
                h[2 * j] = __hmul2(__hsub2(*reinterpret_cast<const __half2*>(&lo), offset), scale);
                h[2 * j + 1] = __hmul2(__hsub2(*reinterpret_cast<const __half2*>(&hi), offset), scale);
            }
            *reinterpret_cast<uint4*>(out + 4 * i) = *reinterpret_cast<const uint4*>(h);
        }
    }
};

// What a row's superblock holds besides values: scales of the sub-blocks this thread expands, mins, d and dmin.
template <int TYPE>
struct RowHeader {
    uint32_t sc[4];  // Q6_K 16 bytes, else 8 in sc[0..1]
    __device__ __forceinline__ void load(Buffers& s, int buffer, int row, int part, const uint8_t* block) {
        if constexpr (TYPE == kNEXTN_Q6_K) {
            load_words_2(sc, block + 192);
            if (part == 0)
                s.d[buffer][row] = make_float2(__half2float(*reinterpret_cast<const __half*>(block + 208)), 0.0f);
        } else {
            const uint4 h = __ldg(reinterpret_cast<const uint4*>(block));
            const ScaleMin u = unpack_scale_min(h.y, h.z, h.w);
            sc[0] = u.sc[0];
            sc[1] = u.sc[1];
            if (part) return;
            s.d[buffer][row] = __half22float2(*reinterpret_cast<const __half2*>(&h.x));
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const __half m = __int2half_rn((u.mn[i >> 2] >> (8 * (i & 3))) & 63);
                s.mins[buffer][row][i] = m;
                s.mins[buffer][row][i + 8] = m;
            }
        }
    }
    __device__ __forceinline__ __half scale(int i) const {
        const uint32_t w = (i >> 2) == 0 ? sc[0] : (i >> 2) == 1 ? sc[1] : (i >> 2) == 2 ? sc[2] : sc[3];
        const uint32_t byte = (w >> (8 * (i & 3))) & 255;
        return __int2half_rn(TYPE == kNEXTN_Q6_K ? static_cast<int8_t>(byte) : static_cast<int>(byte));
    }
};

// Matrix and row behind a block's local row; with SwiGLU the upper half of a block's rows comes from `up`.
struct Source {
    const NextnMatrix* m;
    int row;
};
__device__ __forceinline__ Source source_of(const PrefillParams& p, int local) {
    if (p.swiglu) {
        const bool up = local >= kROWS / 2;
        return {&p.matrix[up], static_cast<int>(blockIdx.y) * (kROWS / 2) + local - (up ? kROWS / 2 : 0)};
    }
    int i = 0;
    while (i + 1 < p.count && static_cast<int>(blockIdx.y) >= p.first_block[i + 1]) ++i;
    return {&p.matrix[i], (static_cast<int>(blockIdx.y) - p.first_block[i]) * kROWS + local};
}

__device__ __forceinline__ void copy_tokens(const PrefillParams& p, Buffers& s, int step, int t0) {
    for (int i = threadIdx.x; i < kTOKENS * kSTEP / 8; i += kTHREADS) {
        const int t = i / (kSTEP / 8), at = i % (kSTEP / 8) * 8;
        const int64_t row = min(t0 + t, p.t - 1);
        cp_async_16(&s.b[step & 1][t][at], p.x + row * p.supers * kSUPER + step * kSTEP + at);
    }
    if (step % kSTEPS == 0) {
        const int t = threadIdx.x / 2, at = threadIdx.x % 2 * 8, super = step / kSTEPS;
        const int64_t row = min(t0 + t, p.t - 1);
        cp_async_16(&s.sums[super & 1][t][at], p.sums + (row * p.supers + super) * 16 + at);
    }
    cp_async_commit();
}

// Accumulators of one warp: 32 rows x 64 tokens.
struct WarpTile {
    float acc[2][8][4];
    __device__ __forceinline__ void zero() {
#pragma unroll
        for (int i = 0; i < 64; ++i) acc[i / 32][i / 4 % 8][i % 4] = 0.0f;
    }
    template <int PITCH>
    __device__ __forceinline__ void multiply(const __half (*a)[PITCH], const __half (*b)[PITCH], int k, int lane) {
        uint32_t fa[2][4], fb[4][4];
#pragma unroll
        for (int i = 0; i < 2; ++i) ldmatrix_x4(fa[i], &a[16 * i + (lane & 15)][k + 8 * (lane >> 4)]);
#pragma unroll
        for (int j = 0; j < 4; ++j)
            ldmatrix_x4(fb[j], &b[16 * j + (lane & 7) + 8 * (lane >> 4)][k + 8 * ((lane >> 3) & 1)]);
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int j = 0; j < 8; ++j)
                mma_f16_k16(acc[i][j], fa[i], fb[j / 2][2 * (j & 1)], fb[j / 2][2 * (j & 1) + 1]);
    }
    // y += sign * f(row) * acc
    template <typename F>
    __device__ __forceinline__ void scale_into(WarpTile& y, F factor) const {
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int j = 0; j < 8; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) y.acc[i][j][e] = __fmaf_rn(factor(i, e >> 1), acc[i][j][e], y.acc[i][j][e]);
    }
};

__device__ void write_tile(const PrefillParams& p, const float (*out)[kOUT_PITCH], int t0) {
    const int rows = p.swiglu ? kROWS / 2 : kROWS;
    for (int i = threadIdx.x; i < rows * kTOKENS; i += kTHREADS) {
        const int local = i % rows, t = i / rows;
        const Source s = source_of(p, local);
        if (t0 + t >= p.t || s.row >= s.m->n) continue;
        float v = out[t][local];
        if (p.swiglu) v = v / (1.0f + expf(-v)) * out[t][local + kROWS / 2];
        if (p.residual) v += p.residual[(t0 + t) * p.ldr + s.row];
        s.m->y[(t0 + t) * s.m->ldy + s.row] = v;
    }
}

template <int TYPE>
__global__ void __launch_bounds__(kTHREADS, 1) kquant_prefill_kernel(const __grid_constant__ PrefillParams p) {
    extern __shared__ __align__(128) uint8_t raw[];
    Shared& s = *reinterpret_cast<Shared*>(raw);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, wr = warp & 3, wt = warp >> 2;
    const int row = threadIdx.x >> 1, part = threadIdx.x & 1, t0 = blockIdx.x * kTOKENS;
    const Source src = source_of(p, row);
    const uint8_t* weights = static_cast<const uint8_t*>(src.m->weight) +
                             static_cast<int64_t>(min(src.row, src.m->n - 1)) * p.supers * kSuperBytes<TYPE>;
    launch_dependents();
    wait_for_predecessor();
    WarpTile y, acc;
    y.zero();
    acc.zero();
    Packed<TYPE> packed;
    RowHeader<TYPE> header;
    const auto expand = [&](int step) {
        const int in_super = step % kSTEPS, sub = TYPE == kNEXTN_Q6_K ? 4 * in_super + 2 * part : 2 * in_super + part;
        const __half s0 = header.scale(sub), s1 = TYPE == kNEXTN_Q6_K ? header.scale(sub + 1) : s0;
        packed.store(&s.in.a[step & 1][row][32 * part], in_super, part, s0, s1);
    };
    const auto fetch = [&](int step) {
        const uint8_t* block = weights + step / kSTEPS * kSuperBytes<TYPE>;
        if (step % kSTEPS == 0) header.load(s.in, step / kSTEPS & 1, row, part, block);
        packed.load(block, step % kSTEPS, part);
    };
    copy_tokens(p, s.in, 0, t0);
    fetch(0);
    expand(0);
    cp_async_wait<0>();
    __syncthreads();
    const int steps = p.supers * kSTEPS;
    for (int step = 0; step < steps; ++step) {
        const int buffer = step & 1, half = step / kSTEPS & 1;
        if (step + 1 < steps) {
            copy_tokens(p, s.in, step + 1, t0);
            fetch(step + 1);
        }
#pragma unroll
        for (int k = 0; k < kSTEP; k += 16) acc.multiply(&s.in.a[buffer][32 * wr], &s.in.b[buffer][64 * wt], k, lane);
        if (step % kSTEPS == kSTEPS - 1) {
            const auto d_at = [&](int i, int h) { return s.in.d[half][32 * wr + 16 * i + 8 * h + (lane >> 2)]; };
            acc.scale_into(y, [&](int i, int h) { return d_at(i, h).x; });
            acc.zero();
            if constexpr (TYPE != kNEXTN_Q6_K) {
                acc.multiply(&s.in.mins[half][32 * wr], &s.in.sums[half][64 * wt], 0, lane);
                acc.scale_into(y, [&](int i, int h) { return -d_at(i, h).y; });
                acc.zero();
            }
        }
        if (step + 1 < steps) expand(step + 1);
        cp_async_wait<0>();
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int t = 64 * wt + 8 * j + 2 * (lane & 3) + (e & 1);
                const float scale = p.row_scale[min(t0 + t, p.t - 1)];
                s.out[t][32 * wr + 16 * i + 8 * (e >> 1) + (lane >> 2)] = y.acc[i][j][e] * scale;
            }
    __syncthreads();
    write_tile(p, s.out, t0);
}

}  // namespace

cudaError_t kquant_prefill(const NextnMatmul& m, int first, int count, const MatmulWorkspace& w, cudaStream_t stream) {
    PrefillParams p = {};
    for (int i = 0; i < count; ++i) {
        p.matrix[i] = m.matrix[first + i];
        const int blocks = m.swiglu ? (i ? 0 : ceil_div(p.matrix[i].n, kROWS / 2)) : ceil_div(p.matrix[i].n, kROWS);
        p.first_block[i + 1] = p.first_block[i] + blocks;
    }
    p.count = count;
    p.x = w.half_rows;
    p.sums = w.half_sums;
    p.row_scale = w.row_scale;
    p.residual = m.residual;
    p.ldr = m.ldr;
    p.t = m.t;
    p.supers = m.k / kSUPER;
    p.swiglu = m.swiglu;
    Launch l;
    l.grid = dim3(ceil_div(m.t, kTOKENS), p.first_block[count]);
    l.block = dim3(kTHREADS);
    l.smem = sizeof(Shared);
    l.pdl = m.flags & NEXTN_PDL;
    switch (m.matrix[first].type) {
        case kNEXTN_Q4_K: return launch(l, stream, kquant_prefill_kernel<kNEXTN_Q4_K>, p);
        case kNEXTN_Q5_K: return launch(l, stream, kquant_prefill_kernel<kNEXTN_Q5_K>, p);
        case kNEXTN_Q6_K: return launch(l, stream, kquant_prefill_kernel<kNEXTN_Q6_K>, p);
        default: return cudaErrorInvalidValue;
    }
}

}  // namespace nextn
