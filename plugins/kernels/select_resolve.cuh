// The winner of a row that is cut within a bin.  The best key of the bins that stay whole is known.  Of the undecided
// tokens the best key is looked for, too; if it is better, the tokens before it say whether it stays.  If not, it goes
// with all that follow it, and the next best is looked for.  That takes few turns, as where the best key stands has
// nothing to do with its logit's place; and no sorting.
#pragma once
#include "select_cut.cuh"

namespace nextn {

// Rises with the logit; equal for equal ones, -0 and 0 too.
__device__ __forceinline__ uint32_t rank_of(float x) {
    const uint32_t bits = __float_as_uint(__fadd_rn(x, 0.0f));
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Whether a stands before b in the order of the filters.
__device__ __forceinline__ bool stands_before(const Token& a, const Token& b) {
    return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

// The undecided tokens of a row: from its list if that holds them all, else from the logits.
struct Undecided {
    const float* logits;
    int n, listed;
    const Settings& settings;
    const Peak& peak;
    const Cut& cut;
    Token* list;  // [kLISTED], shared memory

    __device__ __forceinline__ int bin(const Token& t) const {
        return bin_of(static_cast<float>(peak.best.key), t.logit);
    }

    __device__ __forceinline__ void load(const SelectRow* row) const {
        if (listed <= kLISTED)
            for (int i = threadIdx.x; i < listed; i += kSELECT_THREADS) {
                const int2 v = __ldcg(reinterpret_cast<const int2*>(row->list + i));
                list[i] = {__int_as_float(v.x), v.y};
            }
        __syncthreads();
    }

    template <typename F>
    __device__ __forceinline__ void for_each(F f) const {
        if (listed <= kLISTED) {
            for (int i = threadIdx.x; i < listed; i += kSELECT_THREADS) f(list[i]);
            return;
        }
        for (int i = threadIdx.x; i < n; i += kSELECT_THREADS) {
            const Token t = {__ldcg(logits + i), i};
            if (t.logit > -INFINITY && t.logit >= peak.floor && cut.undecided(bin(t), settings.top_p < 1.0)) f(t);
        }
    }
};

// Shares of all tokens that top-k leaves, where it cuts within a bin: the k-th token's rank is found byte by byte.
__device__ __forceinline__ unsigned long long shares_within_k(const Undecided& u) {
    __shared__ uint32_t digits[kSELECT_THREADS], found[2];
    Sum total;
    uint32_t rank = 0, decided = 0, left = u.settings.top_k - u.cut.before_k.count;
    for (int shift = 24; shift >= 0; shift -= 8) {
        digits[threadIdx.x] = 0;
        __syncthreads();
        u.for_each([&](const Token& t) {
            const uint32_t r = rank_of(t.logit);
            if (u.bin(t) == u.cut.k_bin && (r & decided) == rank) atomicAdd(&digits[r >> shift & 255], 1u);
        });
        __syncthreads();
        const uint32_t digit = 255 - threadIdx.x, count = digits[digit];  // large ones first
        const uint32_t before = sum_before({count, 0}, &total).count;
        if (before < left && before + count >= left) found[0] = digit, found[1] = before;
        __syncthreads();
        rank |= found[0] << shift;
        decided |= 255u << shift;
        left -= found[1];
    }
    Sum mine = {0, 0};
    u.for_each([&](const Token& t) {
        if (u.bin(t) == u.cut.k_bin && rank_of(t.logit) > rank) mine.share += share_of(u.peak.best.key, t.logit);
    });
    sum_before(mine, &total);
    const uint32_t bits = rank >> 31 ? rank & 0x7fffffffu : ~rank;
    return u.cut.before_k.share + total.share + left * share_of(u.peak.best.key, __uint_as_float(bits));
}

// `sure`: the best key of the tokens that surely stay; result in every thread.
template <typename Tokens>
__device__ __forceinline__ Best resolve(const Undecided& u, const Draw<Tokens>& draw, Best sure) {
    __shared__ float logit_of_best;
    const Settings& s = u.settings;
    const bool top_p = s.top_p < 1.0;
    unsigned long long all = u.cut.total;
    if (top_p && u.cut.k_bin < kBINS) all = shares_within_k(u);
    const double needed = top_p ? __dmul_rn(s.top_p, static_cast<double>(all)) : INFINITY;
    Token end = {-INFINITY, 0};  // it and what follows goes
    for (;;) {
        Best mine = {-INFINITY, -1, 0};
        float logit = 0.0f;
        u.for_each([&](const Token& t) {
            if (!draw.eligible(t.logit) || !stands_before(t, end)) return;
            const uint32_t word = draw.word_of(t.id);
            if (draw.hopeless(t.logit, word)) return;
            const Best other = better(mine, {draw.key(t.logit, word), t.id, 0});
            if (other.id != mine.id) logit = t.logit;
            mine = other;
        });
        const Best best = block_best(mine), first = better(sure, best);
        if (best.id < 0 || first.id == sure.id) return sure;
        if (mine.id == best.id) logit_of_best = logit;
        __syncthreads();
        end = {logit_of_best, best.id};
        Sum before = {0, 0}, total;
        u.for_each([&](const Token& t) {
            if (stands_before(t, end)) before = before + Sum{1, top_p ? share_of(u.peak.best.key, t.logit) : 0};
        });
        sum_before(before, &total);
        total = total + u.cut.before_open;
        if ((!s.top_k || total.count < static_cast<uint32_t>(s.top_k)) &&
            (!top_p || !total.share || !reached(total.share, needed)))
            return best;
    }
}

}  // namespace nextn
