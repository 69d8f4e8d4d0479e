// Prefill attention where the device has more than mma.sync.
#pragma once
#include "attention.h"

namespace nextn {

// Compute capability 9.0, in libraries built for it; f16 cache, head_dim 128 or 256, even ld_query and ld_y.  The
// call's rows are in the cache already.
cudaError_t attention_prefill_wgmma(const NextnAttention& p, cudaStream_t stream);

}  // namespace nextn
