// Host side helpers shared by the launchers: device limits and launches with the PDL attribute.
#pragma once
#include "export.h"

namespace nextn {

struct DeviceLimits {
    int sm_count = 0, smem_per_block = 0, smem_per_sm = 0, capability = 0;  // capability: 90 for 9.0
};

// Is the code in the library that only compute capability 9.0 can run (files *_sm90a.cu)?
#ifdef NEXTN_SM90A
constexpr bool kHAS_SM90A = true;
#else
constexpr bool kHAS_SM90A = false;
#endif

// Limits of the current device, or an error.
inline cudaError_t device_limits(DeviceLimits* out) {
    int device = 0, major = 0, minor = 0;
    cudaError_t e = cudaGetDevice(&device);
    const auto get = [&](int* v, cudaDeviceAttr a) {
        if (e == cudaSuccess) e = cudaDeviceGetAttribute(v, a, device);
    };
    get(&out->sm_count, cudaDevAttrMultiProcessorCount);
    get(&out->smem_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin);
    get(&out->smem_per_sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    get(&major, cudaDevAttrComputeCapabilityMajor);
    get(&minor, cudaDevAttrComputeCapabilityMinor);
    out->capability = 10 * major + minor;
    return e;
}

// Dynamic shared memory that keeps a second block off a multiprocessor.  A grid of at most one block each, launched
// early by programmatic dependent launch, would otherwise pile up on the multiprocessors that happen to be free.
inline size_t one_block_per_sm(const DeviceLimits& d, size_t needed) {
    const size_t half = d.smem_per_sm / 2 + 1024, most = d.smem_per_block - 2048;
    return needed > half ? needed : half < most ? half : most;
}

struct Launch {
    dim3 grid, block;
    size_t smem = 0;
    bool pdl = false;
    unsigned cluster = 1;
};

template <typename... Params, typename... Args>
cudaError_t launch(const Launch& l, cudaStream_t stream, void (*kernel)(Params...), Args... args) {
    if (l.smem > 48 * 1024) {
        const cudaError_t e =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(l.smem));
        if (e != cudaSuccess) return e;
    }
    cudaLaunchAttribute attr[2];
    cudaLaunchConfig_t cfg = {};
    cfg.gridDim = l.grid;
    cfg.blockDim = l.block;
    cfg.dynamicSmemBytes = l.smem;
    cfg.stream = stream;
    cfg.attrs = attr;
    if (l.pdl) {
        attr[cfg.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attr[cfg.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (l.cluster > 1) {
        attr[cfg.numAttrs].id = cudaLaunchAttributeClusterDimension;
        attr[cfg.numAttrs].val.clusterDim = {l.cluster, 1, 1};
        ++cfg.numAttrs;
    }
    return cudaLaunchKernelEx(&cfg, kernel, static_cast<Params>(args)...);
}

constexpr int ceil_div(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }
constexpr size_t round_up(size_t a, size_t b) { return (a + b - 1) / b * b; }

}  // namespace nextn
