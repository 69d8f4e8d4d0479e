// Three launches.  1: each block's largest logit.  2: with top-k or top-p, count the tokens by depth below the peak;
// else each block's best key, noise drawn only where it can decide.  3: the winner; with top-k or top-p of the tokens
// that the filters leave, the last block of a row to be done deciding what their cut passes through.
#include "launch.cuh"
#include "ptx.cuh"
#include "select_resolve.cuh"

namespace nextn {
namespace {

__global__ void __launch_bounds__(kSELECT_THREADS, 4)
    largest_logit_kernel(const float* logits, int64_t ld, int n, const NextnSampling* sampling, SelectRow* rows) {
    launch_dependents();
    wait_for_predecessor();
    SelectRow* row = rows + blockIdx.y;
    const float* mine = logits + blockIdx.y * ld;
    const Part part = read_part(mine, n);
    const Settings s = read_settings(sampling, n);
    float top = -INFINITY;
    int id = -1, bad = 0;
    for_each_four(mine, n, part, [&](int b, const float (&x)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            bad |= i < n - 4 * b && !(fabsf(x[i]) < INFINITY);
            if (x[i] > top) {
                top = x[i];
                id = 4 * b + i;
            }
        }
    });
    if (s.filters()) {
        constexpr int kEACH = kBINS / kSELECT_BLOCKS;
        if (threadIdx.x < kEACH) {
            row->counts[blockIdx.x * kEACH + threadIdx.x] = 0;
            row->shares[blockIdx.x * kEACH + threadIdx.x] = 0;
        }
        if (blockIdx.x == 0 && threadIdx.x == 0) row->listed = row->arrived = 0;
    }
    const Best best = block_best({top, id, bad});
    if (threadIdx.x == 0) row->largest[blockIdx.x] = best;
}

__device__ long long place_of(const int32_t* position, int offset) {
    return static_cast<long long>(__ldcg(position)) + offset + blockIdx.y;
}

template <typename Tokens>
__global__ void __launch_bounds__(kSELECT_THREADS, Tokens::kALL ? 4 : 3)
    key_or_count_kernel(const float* logits, int64_t ld, int n, Tokens token, const NextnSampling* sampling,
                        const int32_t* position, int offset, SelectRow* rows) {
    launch_dependents();
    wait_for_predecessor();
    const Settings s = read_settings(sampling, n);
    if (!(s.temperature > 0.0)) return;
    SelectRow* row = rows + blockIdx.y;
    const float* mine = logits + blockIdx.y * ld;
    const Part part = read_part(mine, n);
    const Peak peak = find_peak(row->largest, s);
    if (peak.best.bad) return;
    if (s.filters()) {
        count_tokens(mine, n, part, s, peak, row);
        return;
    }
    const Draw<Tokens> draw(token, s, peak.best.key, place_of(position, offset));
    const Best best = block_best(best_key(mine, n, part, draw, [](float, int) { return true; }));
    if (threadIdx.x == 0) row->keys[blockIdx.x] = best;
}

// Whether this block is the last of its row to get here; then it sees all that the others wrote.
__device__ bool last_to_arrive(SelectRow* row) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(&row->arrived, 1u) == kSELECT_BLOCKS - 1;
    __syncthreads();
    __threadfence();
    return last;
}

template <typename Tokens>
__device__ void choose_filtered(const float* logits, int n, const Part& part, const Settings& s, const Bins& bins,
                                const Peak& peak, const Draw<Tokens>& draw, SelectRow* row, int32_t* chosen) {
    __shared__ Cut cut;
    __shared__ Token list[kLISTED];
    find_cut(bins, s, &cut);
    const auto top = static_cast<float>(peak.best.key);
    const Best best = block_best(best_key(logits, n, part, draw, [&](float x, int id) {
        if (!(x > -INFINITY && x >= peak.floor)) return false;
        const int bin = bin_of(top, x);
        if (cut.undecided(bin, s.top_p < 1.0)) {
            const uint32_t at = atomicAdd(&row->listed, 1u);
            if (at < kLISTED) row->list[at] = {x, id};
            return false;
        }
        return bin < cut.open;
    }));
    if (threadIdx.x == 0) row->keys[blockIdx.x] = best;
    if (!last_to_arrive(row)) return;
    Best winner = block_best(partial_best(row->keys));
    Undecided undecided = {logits, n, static_cast<int>(__ldcg(&row->listed)), s, peak, cut, list};
    if (undecided.listed) {
        undecided.load(row);
        winner = resolve(undecided, draw, winner);
    }
    if (threadIdx.x == 0) *chosen = draw.token(winner.id);
}

template <typename Tokens>
__global__ void __launch_bounds__(kSELECT_THREADS, Tokens::kALL ? 4 : 3)
    winner_kernel(const float* logits, int64_t ld, int n, Tokens token, const NextnSampling* sampling,
                  const int32_t* position, int offset, SelectRow* rows, int32_t* tokens) {
    launch_dependents();
    wait_for_predecessor();
    const Settings s = read_settings(sampling, n);
    const bool filtered = s.temperature > 0.0 && s.filters();
    if (!filtered && blockIdx.x) return;
    SelectRow* row = rows + blockIdx.y;
    const float* mine = logits + blockIdx.y * ld;
    Part part;
    Bins bins;
    if (filtered) part = read_part(mine, n), bins = read_bins(row);
    const Peak peak = find_peak(row->largest, s);
    if (peak.best.bad) {
        if (blockIdx.x == 0 && threadIdx.x == 0) tokens[blockIdx.y] = kNEXTN_NO_TOKEN;
        return;
    }
    if (filtered) {
        const Draw<Tokens> draw(token, s, peak.best.key, place_of(position, offset));
        choose_filtered(mine, n, part, s, bins, peak, draw, row, tokens + blockIdx.y);
        return;
    }
    const Best best = s.temperature > 0.0 ? block_best(partial_best(row->keys)) : peak.best;
    if (threadIdx.x == 0) tokens[blockIdx.y] = token(best.id);
}

// Launches 2 and 3.
template <typename Tokens>
cudaError_t choose(const Launch& l, cudaStream_t stream, const float* logits, int64_t ld, int n, Tokens token,
                   const NextnSampling* sampling, const int32_t* position, int offset, SelectRow* rows,
                   int32_t* tokens) {
    cudaError_t e = launch(l, stream, key_or_count_kernel<Tokens>, logits, ld, n, token, sampling, position, offset,
                           rows);
    if (e == cudaSuccess)
        e = launch(l, stream, winner_kernel<Tokens>, logits, ld, n, token, sampling, position, offset, rows, tokens);
    return e;
}

}  // namespace
}  // namespace nextn

NEXTN_API size_t nextn_select_workspace(int32_t rows) { return sizeof(nextn::SelectRow) * rows; }

NEXTN_API cudaError_t nextn_select(const float* logits, int64_t ld, int32_t rows, int32_t n, const int32_t* ids,
                                   const NextnSampling* sampling, const int32_t* position, int32_t offset,
                                   int32_t* tokens, void* workspace, size_t workspace_bytes, int32_t flags,
                                   cudaStream_t stream) {
    using namespace nextn;
    if (rows < 1 || n < 1 || n > 1 << 22 || ld < n || !workspace || workspace_bytes < nextn_select_workspace(rows))
        return cudaErrorInvalidValue;
    auto* work = static_cast<SelectRow*>(workspace);
    Launch l;
    l.grid = dim3(kSELECT_BLOCKS, rows);
    l.block = dim3(kSELECT_THREADS);
    l.pdl = flags & NEXTN_PDL;
    cudaError_t e = launch(l, stream, largest_logit_kernel, logits, ld, n, sampling, work);
    if (e != cudaSuccess) return e;
    return ids ? choose(l, stream, logits, ld, n, SomeTokens{ids}, sampling, position, offset, work, tokens)
               : choose(l, stream, logits, ld, n, AllTokens{}, sampling, position, offset, work, tokens);
}
