// A decoder layer in one persistent launch, up to 8 tokens (see layer_decode.cuh).
#include "layer_helpers.cuh"

namespace nextn {
namespace {

// A block gets 640 x 96 registers, given out to groups of four warps: the helpers pass part of their share on (in all
// at most 5 x 96).
constexpr int kHELPERS = 128;
template <int TOKENS>
constexpr int kHELPER_REGISTERS = kSPLIT<TOKENS> ? 64 : 32;
template <int TOKENS>
constexpr int kCONSUMER_REGISTERS = kSPLIT<TOKENS> ? 104 : 112;

constexpr int kMAX_SUPERS = kWARPS, kMAX_DOWN_CHUNKS = 4;

template <int TOKENS>
constexpr size_t kSHARED_BYTES = round_up(sizeof(LayerShared<TOKENS>), 128);

// What the consumer warps do.
template <int TOKENS>
__device__ __forceinline__ void multiply_all(const LayerParams& p, LayerShared<TOKENS>& s, uint8_t* ring,
                                             uint8_t* scratch, int warp, int lane, int rank) {
    using Consumer = nextn::Consumer<TOKENS>;
    trace(p, 0);
    Consumer c = {p, s, reinterpret_cast<typename Consumer::Slot*>(scratch), smem_address(ring), smem_address(s.full)};
    c.warp = warp;
    c.lane = lane;
    c.rank = rank;
    c.ring = keep(c.ring);
    c.barriers = keep(c.barriers);
    // of every four warps, which share a scheduler, two own even superblocks: those of Q6_K take less time
    c.own = warp ^ (warp >> 2 & 1);
    if constexpr (kSPLIT<TOKENS>) {
        c.tile = warp / Consumer::kHALF;
        c.place = c.own % Consumer::kHALF;
        c.way = keep(way_to_block(&s, c.tile));
    }
    c.begin(p.first);
    if constexpr (Consumer::kONE) {
        wait_for_predecessor();
        trace(p, 1);
    } else if constexpr (!kSPLIT<TOKENS>) {
        c.quantize_first_together();
    }
#pragma unroll 1
    for (int k = p.first;; ++k) {
        if (k == p.first && p.last >= kGATE_UP) c.prefetch_norm();
        c.multiply(k);
        trace(p, 5 * k + 5);
        if (k == p.last) break;
        c.begin(k + 1);
        if (k == p.first) mbarrier_wait(&s.all_clear, 0);
        if (k == p.first) trace(p, 6);
        if (k == kINPUT && p.delta_net) {
            DeltaBlock<TOKENS>(p, s.window, *reinterpret_cast<DeltaShared<TOKENS>*>(scratch)).run(warp, lane);
            trace(p, 22);
        }
    }
    if constexpr (kSPLIT<TOKENS>) c.await_adders();
}

template <int TOKENS>
__global__ void __launch_bounds__(kTHREADS + kHELPERS, 1) layer_kernel(const __grid_constant__ LayerParams p) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) uint8_t memory[];
    auto& s = *reinterpret_cast<LayerShared<TOKENS>*>(memory);
    uint8_t* ring = memory + kSHARED_BYTES<TOKENS>;
    // of more than four tokens nobody's sums wait while the delta net is at work
    uint8_t* scratch = kSPLIT<TOKENS> ? ring + p.stages * p.stage_bytes : reinterpret_cast<uint8_t*>(s.partial);
    static_assert(kSPLIT<TOKENS> || sizeof(DeltaShared<TOKENS>) <= sizeof(s.partial));
    // by way of a shuffle, so that the compiler knows that a warp's lanes agree on it
    const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
    launch_dependents();
    if (threadIdx.x == 0) {
        for (int i = 0; i < p.stages; ++i) {
            for (auto& part : s.full) mbarrier_init(part + i, 1);
            mbarrier_init(s.empty + i, kWARPS);
        }
        for (uint64_t& each : s.read) mbarrier_init(&each, TOKENS == 1 ? kWARPS / kCLUSTER : kWARPS);
        mbarrier_init(&s.own_clear, kCLEANERS);
        mbarrier_init(&s.all_clear, 1);
        s.reading = 0;
        for (int i = 0; i < kBUFFERS<TOKENS>; ++i) {
            mbarrier_init(s.given + i, kSPLIT<TOKENS> ? 1 : kWARPS);
            for (auto& each : s.taken) mbarrier_init(each + i, !kSPLIT<TOKENS> ? kADDING : TOKENS == 1 ? 1 : kADDERS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (kSPLIT<TOKENS>) sync_cluster();
    const int rank = kSPLIT<TOKENS> ? blockIdx.x % kCLUSTER : 0;
    if (warp >= kWARPS) {
        fewer_registers<kHELPER_REGISTERS<TOKENS>>();
        if (warp == kWARPS) {
            bring_weights(p, s, smem_address(ring), rank);
        } else {
            wait_for_predecessor();
            clear_and_fetch(p, s, warp - kWARPS - 1, lane);
            if constexpr (kSPLIT<TOKENS>)
                if (warp > kWARPS + 1) Adder<TOKENS>{p, s, warp - kWARPS - 2, rank, lane}.run();
            if constexpr (!kSPLIT<TOKENS>)
                if (warp == kWARPS + kCLEANERS && p.first < p.last) {
                    mbarrier_wait(&s.all_clear, 0);
                    quantize_as_they_come(p, lane);
                }
        }
    } else {
        more_registers<kCONSUMER_REGISTERS<TOKENS>>();
        multiply_all<TOKENS>(p, s, ring, scratch, warp, lane, rank);
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
        f.segment[i] = {
            static_cast<const uint8_t*>(m.weight), nullptr, y, m.type, m.n, ceil_div(m.n, kTILE_ROWS), before % blocks};
        before += static_cast<int>(round_up(f.segment[i].tiles, kCLUSTER));
        y += m.n;
    }
    return f;
}

template <int TOKENS>
cudaError_t run(LayerParams& p, int blocks, const DeviceLimits& limits, bool pdl, cudaStream_t stream) {
    int stage = 0;
    for (int k = p.first; k <= p.last; ++k) {
        Phase& f = p.phase[k];
        f.width = ceil_div(min(kWARPS, f.supers), kSPLIT<TOKENS> ? kCLUSTER : 1);
        for (int i = 0; i < f.segments; ++i)
            stage = max(stage, kSTAGE_ROWS<TOKENS> * stage_row(f.segment[i].type, f.width));
    }
    // of one token those of two products, or of all chunks of the last one
    const int slots = (TOKENS == 1 ? max(p.phase[kDOWN].chunks + 1, 2) : 1) * kWARPS / kCLUSTER;
    const size_t operands = kSPLIT<TOKENS> ? slots * sizeof(typename Consumer<TOKENS>::Slot) : 0;
    const size_t scratch = kSPLIT<TOKENS> ? max(operands, p.delta_net ? sizeof(DeltaShared<TOKENS>) : 0) : 0;
    const size_t besides = kSHARED_BYTES<TOKENS> + round_up(scratch, 128), room = limits.smem_per_block - besides;
    p.stage_bytes = static_cast<int>(round_up(stage, 128));
    p.stages = static_cast<int>(min(room / p.stage_bytes, static_cast<size_t>(kMAX_STAGES)));
    if (p.stages < 2) return cudaErrorInvalidValue;
    Launch l;
    l.grid = dim3(blocks);
    l.block = dim3(kTHREADS + kHELPERS);
    l.smem = max(static_cast<size_t>(p.stages) * p.stage_bytes + besides, one_block_per_sm(limits, 0));
    l.pdl = pdl;
    if (kSPLIT<TOKENS>) l.cluster = kCLUSTER;
    return launch(l, stream, layer_kernel<TOKENS>, p);
}

ClearRange range(void* from, const void* end) {
    const auto bytes = static_cast<const uint8_t*>(end) - static_cast<uint8_t*>(from);
    return {static_cast<uint4*>(from), ceil_div(bytes, sizeof(uint4))};
}

bool takes(const NextnLayerMatrix& m, int k, int most) {
    return k % kSUPER == 0 && ring_takes(m.type, k / kSUPER) && k / kSUPER <= most;
}

}  // namespace

cudaError_t layer_blocks(const DeviceLimits& limits, int* blocks) {
    *blocks = 0;
    if (limits.capability < 90 || limits.smem_per_block < 220 * 1024) return cudaSuccess;
    const auto kernel = layer_kernel<1>;
    cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, limits.smem_per_block);
    if (e != cudaSuccess) return e;
    cudaLaunchAttribute cluster;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {kCLUSTER, 1, 1};
    cudaLaunchConfig_t cfg = {};
    cfg.gridDim = dim3(limits.sm_count / kCLUSTER * kCLUSTER);
    cfg.blockDim = dim3(kTHREADS + kHELPERS);
    cfg.dynamicSmemBytes = limits.smem_per_block;
    cfg.attrs = &cluster;
    cfg.numAttrs = 1;
    int clusters = 0;
    e = cudaOccupancyMaxActiveClusters(&clusters, kernel, &cfg);
    *blocks = kCLUSTER * clusters;
    return e;
}

LayerFusion layer_fusion(const NextnLayer& p, const DeviceLimits& limits, int blocks) {
    const int mixer =
        has_attention(p) ? p.attention.heads * p.attention.head_dim : p.delta_net.v_heads * p.delta_net.head_dim;
    if (p.t > NEXTN_MAX_DECODE_T || limits.capability < 90 || blocks == 0 || (p.flags & NEXTN_LAYER_SEPARATE) ||
        p.d < kMAX_SUPERS / 2 * kSUPER || !takes(p.output, mixer, kMAX_SUPERS) ||
        !takes(p.gate, p.d, kMAX_SUPERS) || !takes(p.down, p.gate.n, kMAX_SUPERS * kMAX_DOWN_CHUNKS))
        return LayerFusion::kNONE;
    const NextnGatedDeltaNet& g = p.delta_net;
    for (int i = 0; i < p.inputs; ++i)
        if (!takes(p.input[i], p.d, kMAX_SUPERS)) return LayerFusion::kAFTER_MIXER;
    const bool net = !has_attention(p) && g.head_dim == kGDN_DIM && g.conv_kernel == kGDN_KERNEL &&
                     g.v_heads * kGDN_PARTS <= blocks;
    return net ? LayerFusion::kWHOLE : LayerFusion::kAROUND_MIXER;
}

cudaError_t layer_decode(const NextnLayer& p, const LayerWorkspace& w, LayerPart part, const DeviceLimits& limits,
                         int blocks, const NextnGatedDeltaNet& delta, cudaStream_t stream) {
    LayerParams q = {};
    q.first = part == LayerPart::kINPUT || part == LayerPart::kWHOLE ? kINPUT : kOUTPUT;
    q.last = part == LayerPart::kINPUT ? kINPUT : kDOWN;
    q.cleared = part == LayerPart::kAFTER_INPUT;
    q.delta_net = part == LayerPart::kWHOLE;
    const int mixer = static_cast<int>(w.mixer_width);
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
    for (int k = 0; k < kPHASES; ++k) {
        q.phase[k].number = k;
        q.phase[k].operands = w.operands[k];
    }
    // what this launch, or one after it, writes and reads, but for the first product's rows and results
    q.pieces = range(w.operands[q.first + 1], w.operands[kPHASES]);
    q.floats = range(q.first == kINPUT ? w.mixer : w.ffn, w.ffn + p.t * static_cast<int64_t>(p.gate.n));
    q.delta = delta;
    q.squares = w.squares;
    q.sync = p.sync;
    q.eps = p.eps;
    q.t = p.t;
    q.heads = delta.v_heads;
    const bool pdl = p.flags & NEXTN_PDL;
    if (p.t == 1) return run<1>(q, blocks, limits, pdl, stream);
    return p.t <= kGroupTokens ? run<kGroupTokens>(q, blocks, limits, pdl, stream)
                               : run<NEXTN_MAX_DECODE_T>(q, blocks, limits, pdl, stream);
}

}  // namespace nextn
