"""How far apart is still right, by what computes and what it rounds."""

from __future__ import annotations

from engines.accuracy.measures import Tolerance
from engines.accuracy.plan import Plan

# Float64 by the ops' meaning against ONNX Runtime's three int8 terms, which keep 24 bits: 5e-13 is usual. An int8 cache
# is rounded on this side only, as far as its rows are of the pass itself.
ORACLE = {
    "f16": Tolerance(nmse=1e-9, channel=1e-7, kl_mean=1e-8, top1=1.0),
    "int8": Tolerance(nmse=5e-4, channel=1e-2, kl_mean=3e-4, top1=1.0),
}
# Kernels: activations as 16 bits (two int8) for short passes and as float16 for long ones, sums in float32, new keys
# and values rounded.
TENSORRT = {
    "f16": Tolerance(nmse=2e-6, channel=2e-5, kl_mean=1e-5, top1=1.0),
    "int8": Tolerance(nmse=5e-4, channel=1e-2, kl_mean=3e-4, top1=1.0),
}
ORACLE_RUNNER = "oracle"


def tolerance_for(runner: str, plan: Plan) -> Tolerance:
    return (ORACLE if runner.startswith(ORACLE_RUNNER) else TENSORRT)[plan.kv_cache]
