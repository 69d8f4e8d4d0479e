// A decoder layer in one persistent launch, up to 8 tokens (see layer_decode.cuh).
#include "layer_delta.cuh"

namespace nextn {
namespace {

// A block gets 640 x 96 registers, given out to groups of four warps: the producer has a group of its own and passes most
// of its share on (24 + 4 x 112 <= 5 x 96).
constexpr int kPRODUCERS = 128;
__device__ __forceinline__ void give_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
#endif
}
__device__ __forceinline__ void take_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("setmaxnreg.inc.sync.aligned.u32 112;");
#endif
}

constexpr int kMAX_SUPERS = kWARPS, kMAX_DOWN_CHUNKS = 4;

// partial: [buffer][warp][tile][group][row half][lane]; 2 floats more a warp, so that the four threads of an output read
// different banks
constexpr int kTILE_FLOATS = 64;
template <int NT>
constexpr int kWARP_FLOATS = kPAIR * NT * kTILE_FLOATS + 2;

// One per kernel: `scratch` holds TokenSlots (one token) or a DeltaShared.
template <int NT>
struct LayerShared {
    float partial[2][kWARPS * kWARP_FLOATS<NT>];
    float squares[1][kWARPS], factor[NEXTN_MAX_DECODE_T];
    DeltaWindow window;
    uint64_t full[kMAX_STAGES], empty[kMAX_STAGES];
};

template <bool ONE, int NT>
struct Consumer {
    using Operand = TokenOperand<kANY_KQUANT, NT>;

    const LayerParams& p;
    LayerShared<NT>& s;
    TokenSlot* slots;
    const uint8_t* ring;
    int warp, lane;
    RingPosition at;
    Operand x;

    // The operand of this warp: one superblock of each chunk. Rows of several tokens are written before a grid barrier.
    // factor: valid after the next consumers_sync.
    __device__ __forceinline__ void prepare(const Phase& f, const RowSource& from, GridBarrier& grid) {
        if constexpr (ONE) {
            for (int sb = warp; sb < f.supers; sb += kWARPS) {
                const float sum = quantize_slot(p, from, sb, slots[sb], lane);
                if (lane == 0 && from.norm) s.squares[0][sb] = sum;
            }
            __syncwarp();
            consumers_sync();
        } else {
            quantize_shared<NT>(p, from, f.supers, warp, lane);
            grid.sync();
        }
        if (f.chunks == 1 && warp < f.supers) load_chunk(warp);
        if (warp >= NT * kGroupTokens) return;
        const int token = min(warp, p.t - 1);  // columns of tokens that are not there repeat the last one's
        float total = 0.0f;
        if (from.norm) {
            if (lane < f.supers) total = ONE ? s.squares[0][lane] : __ldcg(p.row_squares + token * kWARPS + lane);
#pragma unroll
            for (int d = 1; d < 32; d <<= 1) total = __fadd_rn(total, __shfl_xor_sync(~0u, total, d));
        }
        if (lane == 0) s.factor[warp] = from.norm ? rms_factor(total, f.supers * kSUPER, p.eps) : 1.0f;
    }

    __device__ __forceinline__ void load_chunk(int sb) {
        if constexpr (ONE)
            load_slot(slots[sb], x, lane);
        else
            x.load(p.shared, sb, lane);
    }

    __device__ __forceinline__ void store(const Phase& f, const TileOf& tile, int row, int token, float v) {
        const PhaseMatrix& m = f.matrix[tile.matrix];
        const int n = tile.row + row;
        if (token >= p.t || n >= m.n) return;
        if (f.residual) v = __fadd_rn(__ldcg(f.residual + token * f.ldr + n), v);
        m.y[token * m.ldy + n] = v;
    }

    // Sums over the warps of a pair (two tiles, or gate and up of one unit): four threads an output, four warps' partials
    // each.
    __device__ __forceinline__ float sum_of(const float* partial) {
        float v = 0.0f;
#pragma unroll
        for (int i = 0; i < kWARPS / 4; ++i) v = __fadd_rn(v, partial[i * kWARP_FLOATS<NT>]);
        v = __fadd_rn(v, __shfl_xor_sync(~0u, v, 1));
        return __fadd_rn(v, __shfl_xor_sync(~0u, v, 2));
    }
    __device__ __forceinline__ void reduce(const Phase& f, const float* partial, int u, int count) {
        constexpr int kTILE = kTILE_FLOATS * NT;
        const int outputs = f.swiglu ? kTILE : count * kTILE, part = threadIdx.x & 3;
        for (int e = threadIdx.x >> 2; e < outputs; e += kTHREADS / 4) {
            const float* from = partial + part * (kWARPS / 4) * kWARP_FLOATS<NT> + e;
            const int half = (e >> 5) & 1, token = (e >> 6) % NT * kGroupTokens + (e & 3), i = e / kTILE;
            float sum = __fmul_rn(sum_of(from), s.factor[token]);
            if (f.swiglu) {
                const float up = __fmul_rn(sum_of(from + kTILE), s.factor[token]);
                sum = __fmul_rn(__fdiv_rn(sum, __fadd_rn(1.0f, expf(-sum))), up);
            }
            if (part == 0)
                store(f, tile_of(f, u + i * static_cast<int>(gridDim.x), 0), ((e & 31) >> 2) + 8 * half, token, sum);
        }
    }

    // Tiles one after the other in one loop: a body for every pair, or every product, would not fit in the instruction
    // cache, and each is run but a few times.
    __device__ __forceinline__ void multiply(const Phase& f) {
        const int grid = gridDim.x, step = f.swiglu ? grid : kPAIR * grid;
        int buffer = 0;
#pragma unroll 1
        for (int u = blockIdx.x; u < f.units; u += step, buffer ^= 1) {
            const int count = f.swiglu || u + grid < f.units ? 2 : 1;
#pragma unroll 1
            for (int i = 0; i < count; ++i) {
                const TileOf tile = f.swiglu ? tile_of(f, u, i) : tile_of(f, u + i * grid, 0);
                float y[NT][2] = {};
#pragma unroll 1
                for (int c = 0; c < f.chunks; ++c) {
                    const bool mine = c * kWARPS + warp < f.supers;
                    if (f.chunks > 1 && mine) load_chunk(c * kWARPS + warp);
                    mbarrier_wait(s.full + at.stage, at.phase);
                    if (mine) dot_stage<NT>(f, ring + at.stage * p.stage_bytes, tile, c, warp, lane, x, y);
                    __syncwarp();
                    if (lane == 0) mbarrier_arrive(s.empty + at.stage);
                    at.next(p.stages);
                }
                float* mine = s.partial[buffer] + warp * kWARP_FLOATS<NT> + i * NT * kTILE_FLOATS + lane;
#pragma unroll
                for (int n = 0; n < NT; ++n)
#pragma unroll
                    for (int h = 0; h < 2; ++h) mine[n * kTILE_FLOATS + 32 * h] = y[n][h];
            }
            // One barrier per pair is enough: `partial` has two buffers, and a warp reaches the next barrier only after
            // it has read this one's sums.
            consumers_sync();
            reduce(f, s.partial[buffer], u, count);
        }
    }
};

// Stages under way at most, about what the memory needs to be busy: with more, everything else that the block reads or
// writes queues up behind them.
#ifndef NEXTN_IN_FLIGHT
#define NEXTN_IN_FLIGHT 2
#endif
constexpr int kIN_FLIGHT = NEXTN_IN_FLIGHT;

template <int NT>
__device__ __forceinline__ void produce(const LayerParams& p, LayerShared<NT>& s, uint8_t* ring, int lane) {
    RingPosition at, landed;  // landed: kIN_FLIGHT stages behind
    const int grid = gridDim.x;
    int issued = 0;
    for (int k = p.first; k < kPHASES; ++k) {
        const Phase& f = p.phase[k];
        const int step = f.swiglu ? grid : kPAIR * grid;
        for (int u = blockIdx.x; u < f.units; u += step)
            for (int i = 0; i < kPAIR; ++i) {
                if (!f.swiglu && u + i * grid >= f.units) break;
                const TileOf tile = f.swiglu ? tile_of(f, u, i) : tile_of(f, u + i * grid, 0);
                for (int c = 0; c < f.chunks; ++c) {
                    if (issued++ >= kIN_FLIGHT) {
                        mbarrier_wait(s.full + landed.stage, landed.phase);
                        landed.next(p.stages);
                    }
                    mbarrier_wait(s.empty + at.stage, at.phase ^ 1);
                    produce_tile(f, ring + at.stage * p.stage_bytes, s.full + at.stage, tile, c, lane);
                    at.next(p.stages);
                }
            }
    }
}

// -DNEXTN_LAYER_TRACE: each block leaves its clock at every point behind the barrier word.
__device__ __forceinline__ void trace([[maybe_unused]] const LayerParams& p, [[maybe_unused]] int point) {
#ifdef NEXTN_LAYER_TRACE
    if (threadIdx.x == 0) reinterpret_cast<long long*>(p.sync + 64)[16 * blockIdx.x + point] = clock64();
#endif
}

template <bool ONE, int NT>
__global__ void __launch_bounds__(kTHREADS + kPRODUCERS, 1) layer_kernel(const __grid_constant__ LayerParams p) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) uint8_t ring[];
    uint8_t* scratch = ring + p.stages * p.stage_bytes;
    __shared__ LayerShared<NT> s;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    launch_dependents();
    if (threadIdx.x == 0) {
        for (int i = 0; i < p.stages; ++i) {
            mbarrier_init(s.full + i, kTILE_ROWS);
            mbarrier_init(s.empty + i, kWARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (warp >= kWARPS) {
        give_registers();
        if (warp == kWARPS) produce(p, s, ring, lane);
        return;
    }
    take_registers();
    trace(p, 0);
    wait_for_predecessor();
    trace(p, 1);
    GridBarrier grid(p.sync);
    Consumer<ONE, NT> c = {p, s, reinterpret_cast<TokenSlot*>(scratch), ring, warp, lane};
    DeltaBlock<ONE ? 1 : NT * kGroupTokens> delta(p, s.window, *reinterpret_cast<DeltaShared*>(scratch));
    const bool mixer = p.first == kINPUT;
    if (mixer) delta.request_window();
#pragma unroll 1
    for (int k = p.first; k < kPHASES; ++k) {
        c.prepare(p.phase[k], p.source[k], grid);
        if (k == kINPUT) delta.keep_window();
        trace(p, 2 + 3 * k);
        c.multiply(p.phase[k]);
        trace(p, 3 + 3 * k);
        if (k == kDOWN) break;
        grid.arrive();
        if (k == kINPUT) delta.request_state();
        grid.wait();
        trace(p, 4 + 3 * k);
        if (k == kINPUT) {
            delta.run(warp, lane);
            trace(p, 14);
            grid.sync();
            trace(p, 15);
        }
    }
#endif
}

Phase phase_of(int k, const NextnLayerMatrix* const* matrices, int count, float* y, int64_t ldy) {
    Phase f = {};
    f.supers = k / kSUPER;
    f.chunks = ceil_div(f.supers, kWARPS);
    f.matrices = count;
    for (int i = 0; i < count; ++i) {
        const NextnLayerMatrix& m = *matrices[i];
        f.matrix[i] = {static_cast<const uint8_t*>(m.weight), y, ldy, m.type, m.n, ceil_div(m.n, kTILE_ROWS)};
        f.units += f.matrix[i].tiles;
        y += m.n;
    }
    return f;
}

template <bool ONE, int NT>
cudaError_t run(LayerParams& p, const DeviceLimits& limits, bool pdl, cudaStream_t stream) {
    int stage = 0;
    for (int k = p.first; k < kPHASES; ++k)
        for (int i = 0; i < p.phase[k].matrices; ++i)
            stage = max(stage, kTILE_ROWS * stage_row(p.phase[k].matrix[i].type, min(kWARPS, p.phase[k].supers)));
    const size_t slots = ONE ? sizeof(TokenSlot) * max(p.phase[kDOWN].supers, kWARPS) : 0;
    const size_t scratch = max(slots, p.first == kINPUT ? sizeof(DeltaShared) : 0);
    const size_t room = limits.smem_per_block - sizeof(LayerShared<NT>) - 1024 - round_up(scratch, 128);
    p.stage_bytes = static_cast<int>(round_up(stage, 128));
    p.stages = static_cast<int>(min(room / p.stage_bytes, static_cast<size_t>(kMAX_STAGES)));
    if (p.stages < 2) return cudaErrorInvalidValue;
    Launch l;
    l.grid = dim3(limits.sm_count);
    l.block = dim3(kTHREADS + kPRODUCERS);
    l.smem = max(static_cast<size_t>(p.stages) * p.stage_bytes + round_up(scratch, 128), one_block_per_sm(limits, 0));
    l.pdl = pdl;
    return launch(l, stream, layer_kernel<ONE, NT>, p);
}

bool takes(const NextnLayerMatrix& m, int k, int most) {
    return is_kquant(m.type) && k % kSUPER == 0 && k / kSUPER <= most;
}

}  // namespace

LayerFusion layer_fusion(const NextnLayer& p, const DeviceLimits& limits) {
    const int mixer = has_attention(p) ? p.attention.heads * p.attention.head_dim
                                       : p.delta_net.v_heads * p.delta_net.head_dim;
    if (p.t > NEXTN_MAX_DECODE_T || limits.capability < 90 || limits.smem_per_block < 220 * 1024 ||
        (p.flags & NEXTN_LAYER_SEPARATE) || p.d < kMAX_SUPERS / 2 * kSUPER || !takes(p.output, mixer, kMAX_SUPERS) ||
        !takes(p.gate, p.d, kMAX_SUPERS) || !takes(p.down, p.gate.n, kMAX_SUPERS * kMAX_DOWN_CHUNKS))
        return LayerFusion::kNONE;
    const NextnGatedDeltaNet& g = p.delta_net;
    bool whole = !has_attention(p) && g.head_dim == kGDN_DIM && g.conv_kernel == kGDN_KERNEL &&
                 g.v_heads * kGDN_PARTS <= limits.sm_count;
    for (int i = 0; i < p.inputs; ++i) whole = whole && takes(p.input[i], p.d, kMAX_SUPERS);
    return whole ? LayerFusion::kWHOLE : LayerFusion::kAFTER_MIXER;
}

cudaError_t layer_decode(const NextnLayer& p, const LayerWorkspace& w, LayerFusion fusion, const DeviceLimits& limits,
                         const NextnGatedDeltaNet& delta, cudaStream_t stream) {
    LayerParams q = {};
    q.first = fusion == LayerFusion::kWHOLE ? kINPUT : kOUTPUT;
    const NextnLayerMatrix* in[NEXTN_MAX_MIXER_INPUTS] = {&p.input[0], &p.input[1], &p.input[2], &p.input[3]};
    const NextnLayerMatrix *out[] = {&p.output}, *gate_up[] = {&p.gate, &p.up}, *down[] = {&p.down};
    q.phase[kINPUT] = phase_of(p.d, in, p.inputs, w.input, w.input_width);
    q.phase[kOUTPUT] = phase_of(static_cast<int>(w.mixer_width), out, 1, w.residual, p.d);
    q.phase[kGATE_UP] = phase_of(p.d, gate_up, 2, w.ffn, p.gate.n);
    q.phase[kDOWN] = phase_of(p.gate.n, down, 1, p.y, p.d);
    q.phase[kOUTPUT].residual = p.x;
    q.phase[kDOWN].residual = w.residual;
    q.phase[kOUTPUT].ldr = q.phase[kDOWN].ldr = p.d;
    q.phase[kGATE_UP].swiglu = true;
    q.phase[kGATE_UP].units /= 2;
    q.source[kINPUT] = {p.x, p.d, p.mixer_norm, nullptr};
    q.source[kOUTPUT] = {w.mixer, w.mixer_width, nullptr, q.first == kINPUT ? w.squares : nullptr};
    q.source[kGATE_UP] = {w.residual, p.d, p.ffn_norm, nullptr};
    q.source[kDOWN] = {w.ffn, p.gate.n, nullptr, nullptr};
    q.shared = matmul_workspace(w.matmul_work, p.t, w.widest).quantized;
    q.delta = delta;
    q.squares = w.squares;
    q.row_squares = w.row_squares;
    q.sync = p.sync;
    q.eps = p.eps;
    q.t = p.t;
    q.heads = delta.v_heads;
    const bool pdl = p.flags & NEXTN_PDL;
    if (p.t == 1) return run<true, 1>(q, limits, pdl, stream);
    return p.t <= kGroupTokens ? run<false, 1>(q, limits, pdl, stream) : run<false, 2>(q, limits, pdl, stream);
}

}  // namespace nextn
