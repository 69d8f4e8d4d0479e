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

// partial: [buffer][warp][tile][group][row half][lane]
constexpr int kTILE_FLOATS = 64;
template <int NT>
constexpr int kWARP_FLOATS = kPAIR * NT * kTILE_FLOATS;

// One per kernel: `scratch` holds TokenSlots (one token) or a DeltaShared.
template <int NT>
struct LayerShared {
    float partial[2][kWARPS * kWARP_FLOATS<NT>];
    float squares[kWARPS], factor[NEXTN_MAX_DECODE_T];
    DeltaWindow window;
    uint64_t full[kMAX_STAGES], empty[kMAX_STAGES], go;
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
    int buffer, turn;  // of partial; the warp that begins the next reduction
    Operand x;

    // The operand of this warp: one superblock of each chunk. Rows of several tokens are written before a grid barrier.
    // factor: valid after the next consumers_sync.
    __device__ __forceinline__ void prepare(const Phase& f, const RowSource& from, GridBarrier& grid, bool first) {
        if constexpr (ONE) {
            float4 next[2];
            if (warp < f.supers) request_values(from, 0, warp, lane, next);
            if (first && lane == 0) {
                asm volatile("" ::"f"(next[1].w) : "memory");  // not before they are here
                mbarrier_arrive(&s.go);
            }
#pragma unroll 1
            for (int sb = warp; sb < f.supers; sb += kWARPS) {
                float4 v[2] = {next[0], next[1]};
                if (sb + kWARPS < f.supers) request_values(from, 0, sb + kWARPS, lane, next);
                const float sum = quantize_slot(p, from, sb, slots[sb], lane, v);
                if (lane == 0 && from.norm) s.squares[sb] = sum;
            }
            consumers_sync();
        } else {
            quantize_shared<NT>(p, from, f.supers, warp, lane);
            grid.sync();
            if (first && lane == 0) mbarrier_arrive(&s.go);
        }
        if (f.chunks == 1 && warp < f.supers) load_chunk(warp);
        if (warp >= NT * kGroupTokens) return;
        const int token = min(warp, p.t - 1);  // columns of tokens that are not there repeat the last one's
        float total = 0.0f;
        if (from.norm) {
            if (lane < f.supers) total = ONE ? s.squares[lane] : __ldcg(p.row_squares + token * kWARPS + lane);
#pragma unroll
            for (int d = 1; d < 32; d <<= 1) total = __fadd_rn(total, __shfl_xor_sync(~0u, total, d));
        }
        if (lane == 0) s.factor[warp] = from.norm ? rms_factor(total, f.supers * kSUPER, p.eps) : 1.0f;
    }

    __device__ __forceinline__ void prefetch_norm() {
        const int line = blockIdx.x * 32 + lane;
        if (warp == 0 && line * 32 < p.phase[kGATE_UP].supers * kSUPER)
            prefetch_l2(p.source[kGATE_UP].norm + line * 32);
    }

    __device__ __forceinline__ void load_chunk(int sb) {
        if constexpr (ONE)
            load_slot(slots[sb], x, lane);
        else
            x.load(p.shared, sb, lane);
    }

    // Sums over the warps of a pair of tiles (or of gate and up), an output a thread. Warps take turns, so that none falls
    // behind.
    __device__ __forceinline__ void reduce(const Phase& f, const Segment& g, const float* partial, int u, int count) {
        constexpr int kTILE = kTILE_FLOATS * NT;
        const int outputs = g.second ? kTILE : count * kTILE;
        const int e = ((warp - turn) & (kWARPS - 1)) * 32 + lane;
        turn += outputs / 32;
        if (e >= outputs) return;
        const int half = (e >> 5) & 1, token = (e >> 6) % NT * kGroupTokens + (e & 3);
        const int n = (u + (e / kTILE) * static_cast<int>(gridDim.x)) * kTILE_ROWS + ((e & 31) >> 2) + 8 * half;
        const int64_t at = token * f.ldy + n;
        const bool stored = token < p.t && n < g.n;
        const float residual = f.residual && stored ? __ldcg(f.residual + at) : 0.0f;
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < kWARPS; ++w) sum = __fadd_rn(sum, partial[w * kWARP_FLOATS<NT> + e]);
        sum = __fmul_rn(sum, s.factor[token]);
        if (g.second) {
            float up = 0.0f;
#pragma unroll
            for (int w = 0; w < kWARPS; ++w) up = __fadd_rn(up, partial[w * kWARP_FLOATS<NT> + kTILE + e]);
            up = __fmul_rn(up, s.factor[token]);
            sum = __fmul_rn(__fdiv_rn(sum, __fadd_rn(1.0f, expf(-sum))), up);
        }
        if (stored) g.y[at] = f.residual ? __fadd_rn(residual, sum) : sum;
    }

    // Tiles one after the other in one loop: a body for every pair, or every product, would not fit in the instruction
    // cache, and each is run but a few times.
    template <int TYPE>
    __device__ __forceinline__ void multiply(const Phase& f, const Segment& g) {
        const int grid = gridDim.x, step = g.second ? grid : kPAIR * grid;
        const int stride = stage_row(TYPE, min(kWARPS, f.supers));
        const uint8_t* own = ring + (lane >> 2) * stride + warp * super_bytes(TYPE);
#pragma unroll 1
        for (int u = first_tile(g); u < g.tiles; u += step, buffer ^= 1) {
            const int count = g.second || u + grid < g.tiles ? 2 : 1;
#pragma unroll 1
            for (int i = 0; i < count; ++i) {
                float y[NT][2] = {};
#pragma unroll 1
                for (int c = 0; c < f.chunks; ++c) {
                    const bool mine = c * kWARPS + warp < f.supers;
                    if (f.chunks > 1 && mine) load_chunk(c * kWARPS + warp);
                    mbarrier_wait(s.full + at.stage, at.phase);
                    if (mine) dot_super<TYPE, NT>(own + at.stage * p.stage_bytes, 8 * stride, warp & 1, x, y, lane & 3);
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
            reduce(f, g, s.partial[buffer], u, count);
        }
    }
    __device__ __forceinline__ void multiply(const Phase& f) {
#pragma unroll 1
        for (int i = 0; i < f.segments; ++i) {
            const Segment& g = f.segment[i];
            if (g.type == kNEXTN_Q4_K)
                multiply<kNEXTN_Q4_K>(f, g);
            else if (g.type == kNEXTN_Q5_K)
                multiply<kNEXTN_Q5_K>(f, g);
            else
                multiply<kNEXTN_Q6_K>(f, g);
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
    for (int k = p.first; k <= p.last; ++k) {
        const Phase& f = p.phase[k];
        const int wide = min(kWARPS, f.supers);
        for (int i = 0; i < f.segments; ++i) {
            const Segment& g = f.segment[i];
            const int size = super_bytes(g.type), stride = stage_row(g.type, wide);
            for (int u = first_tile(g); u < g.tiles; u += grid) {
                const int64_t row = min(u * kTILE_ROWS + lane, g.n - 1) * static_cast<int64_t>(f.supers * size);
                for (int part = 0; part < (g.second ? 2 : 1); ++part)
                    for (int c = 0; c < f.chunks; ++c) {
                        if (issued++ >= kIN_FLIGHT) {
                            mbarrier_wait(s.full + landed.stage, landed.phase);
                            landed.next(p.stages);
                        }
                        mbarrier_wait(s.empty + at.stage, at.phase ^ 1);
                        if (lane < kTILE_ROWS)
                            produce_row((part ? g.second : g.weight) + row + c * kWARPS * size,
                                        ring + at.stage * p.stage_bytes + lane * stride,
                                        min(kWARPS, f.supers - c * kWARPS) * size, s.full + at.stage);
                        at.next(p.stages);
                    }
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
        mbarrier_init(&s.go, kWARPS);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (warp >= kWARPS) {
        give_registers();
        if (warp == kWARPS) {
            mbarrier_wait(&s.go, 0);  // what the consumers need first would queue up behind the weights
            produce(p, s, ring, lane);
        }
        return;
    }
    take_registers();
    trace(p, 0);
    wait_for_predecessor();
    trace(p, 1);
    GridBarrier grid(p.sync);
    Consumer<ONE, NT> c = {p, s, reinterpret_cast<TokenSlot*>(scratch), ring, warp, lane, {}, 0, 0};
    DeltaBlock<ONE ? 1 : NT * kGroupTokens> delta(p, s.window, *reinterpret_cast<DeltaShared*>(scratch));
    if (p.delta_net) delta.request_slot();
#pragma unroll 1
    for (int k = p.first; k <= p.last; ++k) {
        c.prepare(p.phase[k], p.source[k], grid, k == p.first);
        if (k == kINPUT && p.delta_net) delta.request_window();
        if (k == p.first && p.last >= kGATE_UP) c.prefetch_norm();
        trace(p, 2 + 3 * k);
        c.multiply(p.phase[k]);
        trace(p, 3 + 3 * k);
        if (k == p.last) break;
        if (k == kINPUT) delta.keep_window();
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

Phase phase_of(int k, const NextnLayerMatrix* matrices, int count, float* y, int64_t ldy, int blocks) {
    Phase f = {};
    f.supers = k / kSUPER;
    f.chunks = ceil_div(f.supers, kWARPS);
    f.segments = count;
    f.ldy = ldy;
    int before = 0;
    for (int i = 0; i < count; ++i) {
        const NextnLayerMatrix& m = matrices[i];
        f.segment[i] = {static_cast<const uint8_t*>(m.weight), nullptr, y, m.type, m.n, ceil_div(m.n, kTILE_ROWS),
                        before % blocks};
        before += f.segment[i].tiles;
        y += m.n;
    }
    return f;
}

template <bool ONE, int NT>
cudaError_t run(LayerParams& p, const DeviceLimits& limits, bool pdl, cudaStream_t stream) {
    int stage = 0;
    for (int k = p.first; k <= p.last; ++k)
        for (int i = 0; i < p.phase[k].segments; ++i)
            stage = max(stage, kTILE_ROWS * stage_row(p.phase[k].segment[i].type, min(kWARPS, p.phase[k].supers)));
    const size_t slots = ONE ? sizeof(TokenSlot) * max(p.phase[kDOWN].supers, kWARPS) : 0;
    const size_t scratch = max(slots, p.delta_net ? sizeof(DeltaShared) : 0);
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
    return k % kSUPER == 0 && ring_takes(m.type, k / kSUPER) && k / kSUPER <= most;
}

}  // namespace

LayerFusion layer_fusion(const NextnLayer& p, const DeviceLimits& limits) {
    const int mixer = has_attention(p) ? p.attention.heads * p.attention.head_dim
                                       : p.delta_net.v_heads * p.delta_net.head_dim;
    if (p.t > NEXTN_MAX_DECODE_T || limits.capability < 90 || limits.smem_per_block < 220 * 1024 ||
        (p.flags & NEXTN_LAYER_SEPARATE) || p.d < kMAX_SUPERS / 2 * kSUPER || !takes(p.output, mixer, kMAX_SUPERS) ||
        !takes(p.gate, p.d, kMAX_SUPERS) ||
        !takes(p.down, p.gate.n, kMAX_SUPERS * kMAX_DOWN_CHUNKS))
        return LayerFusion::kNONE;
    const NextnGatedDeltaNet& g = p.delta_net;
    for (int i = 0; i < p.inputs; ++i)
        if (!takes(p.input[i], p.d, kMAX_SUPERS)) return LayerFusion::kAFTER_MIXER;
    const bool net = !has_attention(p) && g.head_dim == kGDN_DIM && g.conv_kernel == kGDN_KERNEL &&
                     g.v_heads * kGDN_PARTS <= limits.sm_count;
    return net ? LayerFusion::kWHOLE : LayerFusion::kAROUND_MIXER;
}

cudaError_t layer_decode(const NextnLayer& p, const LayerWorkspace& w, LayerPart part, const DeviceLimits& limits,
                         const NextnGatedDeltaNet& delta, cudaStream_t stream) {
    LayerParams q = {};
    q.first = part == LayerPart::kAFTER_MIXER ? kOUTPUT : kINPUT;
    q.last = part == LayerPart::kINPUT ? kINPUT : kDOWN;
    q.delta_net = part == LayerPart::kWHOLE;
    const int mixer = static_cast<int>(w.mixer_width), blocks = limits.sm_count;
    q.phase[kINPUT] = phase_of(p.d, p.input, p.inputs, w.input, w.input_width, blocks);
    q.phase[kOUTPUT] = phase_of(mixer, &p.output, 1, w.residual, p.d, blocks);
    q.phase[kGATE_UP] = phase_of(p.d, &p.gate, 1, w.ffn, p.gate.n, blocks);
    q.phase[kDOWN] = phase_of(p.gate.n, &p.down, 1, p.y, p.d, blocks);
    q.phase[kOUTPUT].residual = p.x;
    q.phase[kDOWN].residual = w.residual;
    q.phase[kGATE_UP].segment[0].second = static_cast<const uint8_t*>(p.up.weight);
    q.source[kINPUT] = {p.x, p.d, p.mixer_norm, nullptr};
    q.source[kOUTPUT] = {w.mixer, w.mixer_width, nullptr, q.delta_net ? w.squares : nullptr};
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
