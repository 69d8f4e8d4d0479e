"""How far apart is still right, by what computes and what it rounds."""

from __future__ import annotations

from engines.accuracy.measures import Tolerance
from engines.accuracy.plan import Plan
from plugins.ops import MAX_DECODE_T

ORACLE_RUNNER = "oracle"
# Float64 by the ops' meaning against ONNX Runtime's three int8 terms, which keep 24 bits: 1e-12 is usual.
ORACLE = Tolerance(nmse=1e-9, channel=1e-7, kl_mean=1e-8, top1=1.0)
# Kernels, sums in float32. Short passes: activations as 16 bits (two int8); long ones: as float16. Keys and values of
# the pass itself are rounded to float16 on this side only. Measured up to 4e-7 and 6e-6 on random models.
SHORT = Tolerance(nmse=2e-6, channel=2e-5, kl_mean=1e-5, top1=1.0)
LONG = Tolerance(nmse=3e-5, channel=1e-3, kl_mean=5e-5, top1=1.0)
# Keys and values of the pass itself as int8: on the oracle's side too.
INT8_CACHE = Tolerance(nmse=5e-4, channel=1e-2, kl_mean=3e-4, top1=1.0)


def tolerance_for(runner: str, plan: Plan, tokens: int) -> Tolerance:
    """runner: its name. tokens: of the pass."""
    if plan.kv_cache == "int8":
        return INT8_CACHE
    if runner.startswith(ORACLE_RUNNER):
        return ORACLE
    return SHORT if tokens <= MAX_DECODE_T else LONG
