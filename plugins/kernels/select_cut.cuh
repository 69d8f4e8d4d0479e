// Where top-k and top-p cut a row.  In the order of falling logits, lower ids first among equals, each filter keeps a
// first part of the row, so together they are one place in that order.
//
// Tokens are counted, and their shares added, in bins of depth = peak - logit: 64 to each octave of depth, so that the
// bins are fine near the peak whatever the scale of the logits.  A running sum over the bins says for most of them that
// all their tokens stay or none; those of the one or few bins left are listed and looked at one by one
// (select_resolve.cuh).
#pragma once
#include "select_row.cuh"

namespace nextn {

// The bin of a token that is not above the peak; rises with depth.  (-0 - 0 is -0: fabsf.)
__device__ __forceinline__ int bin_of(float peak, float x) {
    const int octaves = static_cast<int>(__float_as_uint(fabsf(__fsub_rn(peak, x))) >> 17) - ((127 - 9) * 64 - 1);
    return min(max(octaves, 0), kBINS - 1);
}

struct Peak {
    Best best;
    float floor;  // tokens below it neither stay nor count
};

// From the blocks' largest logits.  Of 64 blocks at least k hold a token as large as the k-th largest of theirs.
__device__ __forceinline__ Peak find_peak(const Best* of_blocks, const Settings& s) {
    __shared__ float largest[kSELECT_BLOCKS], floor;
    const Best mine = partial_best(of_blocks);
    if (threadIdx.x < kSELECT_BLOCKS) largest[threadIdx.x] = static_cast<float>(mine.key);
    if (threadIdx.x == 0) floor = -INFINITY;
    const Best peak = block_best(mine);
    if (s.top_k > 0 && s.top_k <= kSELECT_BLOCKS && threadIdx.x < kSELECT_BLOCKS) {
        int above = 0;
        for (int i = 0; i < kSELECT_BLOCKS; ++i)
            above += largest[i] > largest[threadIdx.x] || (largest[i] == largest[threadIdx.x] && i < threadIdx.x);
        if (above == s.top_k - 1) floor = largest[threadIdx.x];
    }
    __syncthreads();
    const float negligible = __fsub_rn(static_cast<float>(peak.key), kNEGLIGIBLE);
    return {peak, s.top_p < 1.0 ? fmaxf(floor, negligible) : floor};
}

// Add this block's tokens to the row's bins.
__device__ __forceinline__ void count_tokens(const float* logits, int n, const Part& part, const Settings& s,
                                             const Peak& peak, SelectRow* row) {
    __shared__ uint32_t counts[kBINS], low[kBINS], high[kBINS];  // shares as two words
    for (int i = threadIdx.x; i < kBINS; i += kSELECT_THREADS) counts[i] = low[i] = high[i] = 0;
    __syncthreads();
    const auto top = static_cast<float>(peak.best.key);
    for_each_four(logits, n, part, [&](int, const float (&x)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (!(x[i] > -INFINITY && x[i] >= peak.floor)) continue;
            const int bin = bin_of(top, x[i]);
            if (s.top_k) atomicAdd(&counts[bin], 1u);
            if (s.top_p >= 1.0) continue;
            const unsigned long long share = share_of(peak.best.key, x[i]);
            const auto add = static_cast<uint32_t>(share);
            const uint32_t before = atomicAdd(&low[bin], add);
            const uint32_t carried = static_cast<uint32_t>(share >> 32) + (before + add < before);
            if (carried) atomicAdd(&high[bin], carried);
        }
    });
    __syncthreads();
    for (int i = threadIdx.x; i < kBINS; i += kSELECT_THREADS) {
        if (counts[i]) atomicAdd(&row->counts[i], counts[i]);
        const unsigned long long sum = static_cast<unsigned long long>(high[i]) << 32 | low[i];
        if (sum) atomicAdd(&row->shares[i], sum);
    }
}

struct Sum {
    uint32_t count;
    unsigned long long share;
    __device__ Sum operator+(const Sum& o) const { return {count + o.count, share + o.share}; }
};

// Sum over the threads before this one; `total` over all of them.
__device__ __forceinline__ Sum sum_before(Sum mine, Sum* total) {
    __shared__ Sum warps[kSELECT_WARPS];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    Sum through = mine;
    for (int d = 1; d < 32; d <<= 1) {
        const Sum below = {__shfl_up_sync(~0u, through.count, d), __shfl_up_sync(~0u, through.share, d)};
        if (lane >= d) through = through + below;
    }
    __syncthreads();
    if (lane == 31) warps[warp] = through;
    __syncthreads();
    Sum before = {through.count - mine.count, through.share - mine.share};
    *total = {0, 0};
    for (int w = 0; w < kSELECT_WARPS; ++w) {
        if (w < warp) before = before + warps[w];
        *total = *total + warps[w];
    }
    return before;
}

// Bins below `open` stay whole.  Bins open .. last are undecided; none if open > last.  Deeper ones go.
// k_bin is the bin that top-k cuts within, kBINS if it cuts between bins or not at all: what top-p is a part of then
// depends on tokens of that bin.
struct Cut {
    int open, last, k_bin;
    Sum before_open, before_k;
    unsigned long long total;  // all that top-p is a part of, if k_bin == kBINS
    __device__ bool undecided(int bin, bool top_p) const {
        return (bin >= open && bin <= last) || (top_p && bin == k_bin);
    }
};

// A token stays by top-p if this holds for none of the tokens before it, or if it is the first.
__device__ __forceinline__ bool reached(unsigned long long share, double needed) {
    return static_cast<double>(share) >= needed;
}

// A thread's bins.
struct Bins {
    static constexpr int kEACH = kBINS / kSELECT_THREADS;
    Sum sum[kEACH];
};

__device__ __forceinline__ Bins read_bins(const SelectRow* row) {
    Bins b;
#pragma unroll
    for (int i = 0; i < Bins::kEACH; ++i) {
        const int bin = threadIdx.x * Bins::kEACH + i;
        b.sum[i] = {__ldcg(&row->counts[bin]), __ldcg(&row->shares[bin])};
    }
    return b;
}

// From the row's bins, in every thread; `cut` is in shared memory.
__device__ __forceinline__ void find_cut(const Bins& read, const Settings& s, Cut* cut) {
    constexpr int kEACH = Bins::kEACH;
    const Sum(&bins)[kEACH] = read.sum;
    Sum mine = {0, 0}, total;
    for (int i = 0; i < kEACH; ++i) mine = mine + bins[i];
    const Sum first = sum_before(mine, &total);
    if (threadIdx.x == 0) *cut = {kBINS, -1, kBINS, {0, 0}, total, total.share};
    __syncthreads();
    Sum before = first;
    const auto k = static_cast<uint32_t>(s.top_k);
    for (int i = 0; i < kEACH; ++i) {
        if (k && before.count < k && before.count + bins[i].count >= k) {
            const int bin = threadIdx.x * kEACH + i;
            const bool between = before.count + bins[i].count == k;
            *cut = {between ? bin + 1 : bin, between ? -1 : bin, between ? kBINS : bin, before, before,
                    before.share + bins[i].share};
        }
        before = before + bins[i];
    }
    __syncthreads();
    if (s.top_p >= 1.0) return;
    // All that top-p is a part of lies within low .. high, the end of what stays therefore within open .. last.
    const unsigned long long high = cut->total, low = cut->k_bin < kBINS ? cut->before_k.share : high;
    const double needed_low = __dmul_rn(s.top_p, static_cast<double>(low));
    const double needed_high = __dmul_rn(s.top_p, static_cast<double>(high));
    before = first;
    for (int i = 0; i < kEACH; ++i) {
        const int bin = threadIdx.x * kEACH + i;
        const Sum through = before + bins[i];
        const auto ends = [&](double needed) {
            return reached(through.share, needed) && (bin == 0 || !reached(before.share, needed));
        };
        if (ends(needed_low)) cut->open = bin, cut->before_open = before;
        if (ends(needed_high)) cut->last = bin;
        before = through;
    }
    __syncthreads();
}

}  // namespace nextn
