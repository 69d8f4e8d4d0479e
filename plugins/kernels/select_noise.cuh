// Noise and shares of token choice, each defined to the last bit by the host (runtime/noise.py, runtime/shares.py).
#pragma once
#include <stdint.h>

namespace nextn {

constexpr double kGUMBEL_MIN = -3.2;  // rounded outwards: the least value of g is -3.1298

// log as the host defines it: m * 2^e with m in [sqrt(1/2), sqrt(2)), log m = 2 atanh(s) as a polynomial in s^2.
// Normal positive numbers only.
__device__ __forceinline__ double fixed_log(double x) {
    const long long bits = __double_as_longlong(x);
    int e = static_cast<int>(bits >> 52) - 1022;
    double m = __longlong_as_double((bits & 0x000fffffffffffffll) | 0x3fe0000000000000ll);
    if (m < 0.7071067811865476) {
        m = __dadd_rn(m, m);
        --e;
    }
    double s = __ddiv_rn(__dadd_rn(m, -1.0), __dadd_rn(m, 1.0));
    const double z = __dmul_rn(s, s);
    double p = 1.0 / 23.0;
#pragma unroll
    for (int i = 10; i >= 1; --i) p = __dadd_rn(__dmul_rn(p, z), 1.0 / (2 * i + 1));
    s = __dadd_rn(s, s);
    return __dadd_rn(__dmul_rn(static_cast<double>(e), 0.6931471805599453),
                     __dadd_rn(s, __dmul_rn(s, __dmul_rn(z, p))));
}

__device__ __forceinline__ double gumbel(uint32_t word) {
    const double u = __dmul_rn(__dadd_rn(static_cast<double>(word), 0.5), 0x1p-32);
    return -fixed_log(-fixed_log(u));
}

__device__ __forceinline__ uint4 philox(uint4 c, uint2 key) {
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const uint32_t h0 = __umulhi(0xD2511F53u, c.x), l0 = 0xD2511F53u * c.x;
        const uint32_t h1 = __umulhi(0xCD9E8D57u, c.z), l1 = 0xCD9E8D57u * c.z;
        c = make_uint4(h1 ^ c.y ^ key.x, l1, h0 ^ c.w ^ key.y, l0);
        key.x += 0x9E3779B9u;
        key.y += 0xBB67AE85u;
    }
    return c;
}

// The integer part of 2^40 e^-(peak - logit); a finite logit.
__device__ __forceinline__ unsigned long long share_of(double peak, float logit) {
    const double depth = __dadd_rn(peak, -static_cast<double>(logit));
    if (depth >= 28.0) return 0;
    const auto q = static_cast<unsigned long long>(__double2ll_rn(__dmul_rn(depth, 1.4426950408889634 * 0x1p32)));
    const auto f = static_cast<uint32_t>(q);
    uint32_t h = 46333u;
    h = 632021u - __umulhi(h, f);
    h = 5702267u - __umulhi(h, f);
    h = 41298234u - __umulhi(h, f);
    h = 238385494u - __umulhi(h, f);
    h = 1031764650u - __umulhi(h, f);
    h = 2977044458u - __umulhi(h, f);
    return ((1ull << 40) - (static_cast<unsigned long long>(h) * f >> 24)) >> (q >> 32);
}

}  // namespace nextn
