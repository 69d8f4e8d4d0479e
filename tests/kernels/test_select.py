"""Token choice on the device equals the host's, to the token, whatever the logits and settings."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from runtime import noise
from runtime.sampling import SamplingParams, choose
from tests.kernels import library as lib
from tests.oracle.token_choice import chosen

pytestmark = pytest.mark.gpu

F32 = NDArray[np.float32]
VOCAB = 248320
NO_TOKEN = -1
MAX_LISTED = 2048  # tokens that the kernel looks at one by one before it goes through the whole row again


def settings_of(params: SamplingParams) -> NDArray[np.uint8]:
    least = float(noise.log(np.array([params.min_p]))[0]) if params.min_p else -math.inf
    top_k = min(params.top_k, 2**31 - 1)
    return np.frombuffer(bytes(lib.Sampling(params.temperature, least, params.top_p, params.seed, top_k)), np.uint8)


@dataclass
class Selection:
    """Rows of logits [R, N] on the device, ``pad`` numbers of NaN behind each, and what a call needs beside them."""

    logits: F32
    pad: int = 0
    offset: int = 0
    ids: NDArray[np.int32] | None = None
    made: list[lib.DeviceArray] = field(init=False)
    device_ids: lib.DeviceArray | None = field(init=False)

    def __post_init__(self) -> None:
        rows, n = self.logits.shape
        padded = np.full((rows, n + self.pad), np.nan, np.float32)
        padded[:, :n] = self.logits
        self.made = [
            lib.put(padded),
            lib.put(settings_of(SamplingParams())),
            lib.put(np.zeros(1, np.int32)),
            lib.DeviceArray(rows, np.int32),
            lib.DeviceArray(lib.kernels().nextn_select_workspace(rows), np.uint8),
        ]
        self.device_ids = None if self.ids is None else lib.put(self.ids)

    def write(self, position: int, params: SamplingParams) -> None:
        for array, values in zip(self.made[1:3], (settings_of(params), np.array([position], np.int32)), strict=True):
            kind = lib.runtime().cudaMemcpyKind.cudaMemcpyHostToDevice
            lib.check(lib.runtime().cudaMemcpy(array.ptr, values.ctypes.data, values.nbytes, kind))

    def launch(self, stream: int = 0, flags: int = 1) -> int:
        rows, n = self.logits.shape
        logits, settings, position, tokens, work = self.made
        status: int = lib.kernels().nextn_select(
            *(
                logits.ptr,
                n + self.pad,
                rows,
                n,
                self.device_ids and self.device_ids.ptr,
                settings.ptr,
                position.ptr,
                self.offset,
            ),
            *(tokens.ptr, work.ptr, work.bytes, flags, stream or None),
        )
        return status

    def tokens(self) -> list[int]:
        lib.synchronize()
        tokens: list[int] = self.made[3].host().tolist()
        self.made[3].poison()
        return tokens


def select(logits: F32, position: int, params: SamplingParams, offset: int = 0, pad: int = 0) -> list[int]:
    selection = Selection(logits, pad, offset)
    selection.write(position, params)
    assert selection.launch() == 0
    return selection.tokens()


def assert_host_agrees(logits: F32, position: int, params: SamplingParams, pad: int = 0) -> None:
    want = choose(logits, position + np.arange(len(logits)), params).tolist()
    assert select(logits, position, params, pad=pad) == want, params


def rows_of(rng: np.random.Generator, kind: str, rows: int, n: int) -> F32:
    x = rng.standard_normal((rows, n))
    shaped = {
        "flat": x * 0.02 + 3,
        "usual": x * 3,
        "wide": x * 60,
        "ties": np.round(x * 4) / 2,
        "equal": np.zeros_like(x) - 7.25,
        "low": np.where(rng.random(x.shape) < 0.9, -1e37, x),
        "zeros": np.where(x > 0, 0.0, -0.0),
        "large": x * 1e37,
    }[kind].astype(np.float32)
    if kind == "low":
        shaped[:, rng.integers(n)] = 1.0
    return shaped


KINDS = ("flat", "usual", "wide", "ties", "equal", "low", "zeros", "large")
FILTERS = (
    *({"top_k": k} for k in (1, 2, 20, 64, 65, 1000, 10**12)),
    *({"top_p": p} for p in (0.0, 1e-300, 0.1, 0.95, 1 - 2.0**-53)),
    {"top_k": 20, "top_p": 0.95},
    {"top_k": 64, "top_p": 0.5, "min_p": 0.05},
    {"top_k": 300, "top_p": 0.999},
    {"top_p": 0.9, "min_p": 1.0},
)


@pytest.mark.parametrize("n", [1, 3, 257, 5000, VOCAB])
@pytest.mark.parametrize("temperature", [0.0, 0.05, 0.8, 1.0, 30.0])
@pytest.mark.parametrize("spread", [0.0, 3.0])
def test_equals_the_host(rng: np.random.Generator, n: int, temperature: float, spread: float) -> None:
    rows, position = 6, int(rng.integers(0, 2**31 - 10))
    logits = (rng.standard_normal((rows, n)) * spread).astype(np.float32)
    logits[0, rng.integers(0, n, max(1, n // 3))] = np.finfo(np.float32).min
    logits[0, n // 2] = 1.0
    params = SamplingParams(temperature, seed=int(rng.integers(0, 2**64, dtype=np.uint64)))
    want = choose(logits, position + 2 + np.arange(rows), params)
    assert select(logits, position, params, offset=2, pad=5) == want.tolist()


@pytest.mark.parametrize("min_p", [0.01, 0.3, 1.0])
def test_min_p_equals_the_host(rng: np.random.Generator, min_p: float) -> None:
    logits = (rng.standard_normal((8, 5000)) * 2).astype(np.float32)
    assert_host_agrees(logits, 40, SamplingParams(1.5, min_p=min_p, seed=int(rng.integers(0, 2**63))))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given", FILTERS, ids=lambda given: ",".join(f"{name}={v:g}" for name, v in given.items()))
def test_filters_equal_the_definition(rng: np.random.Generator, kind: str, given: dict[str, Any]) -> None:
    """Small rows, of ragged lengths, against everything sorted and added up."""
    for n in (1, 2, 5, 63, 1000):
        logits = rows_of(rng, kind, 4, n)
        for temperature in (1e-3, 1.0, 1e6):
            params = SamplingParams(temperature, **given, seed=int(rng.integers(0, 2**63)))
            want = [chosen(row, 7 + i, params) for i, row in enumerate(logits)]
            assert select(logits, 7, params, pad=int(rng.integers(0, 5))) == want, (n, params)


@pytest.mark.parametrize("kind", ["flat", "usual", "low"])
@pytest.mark.parametrize("given", FILTERS, ids=lambda given: ",".join(f"{name}={v:g}" for name, v in given.items()))
def test_filters_equal_the_host_on_a_large_vocabulary(
    rng: np.random.Generator, kind: str, given: dict[str, Any]
) -> None:
    for n in (VOCAB, VOCAB - 1):
        params = SamplingParams(0.8, **given, seed=int(rng.integers(0, 2**63)))
        assert_host_agrees(rows_of(rng, kind, 2, n), 123, params)


@pytest.mark.parametrize("n", [MAX_LISTED - 1, MAX_LISTED, MAX_LISTED + 1, 20_000])
@pytest.mark.parametrize("kind", ["equal", "ties"])
def test_more_equal_logits_than_are_listed(rng: np.random.Generator, n: int, kind: str) -> None:
    logits = rows_of(rng, kind, 3, n)
    for given in ({"top_k": n // 2}, {"top_p": 0.3}, {"top_k": 2 * n // 3, "top_p": 0.4}, {"top_k": 1}):
        assert_host_agrees(logits, 5, SamplingParams(0.7, **given, seed=int(rng.integers(0, 2**63))))


def test_any_settings(rng: np.random.Generator) -> None:
    """The last token that stays decides as often as not: few tokens, and settings drawn at random."""
    for _ in range(300):
        n, rows = int(rng.choice([2, 7, 40, 300])), int(rng.integers(1, 9))
        logits = rows_of(rng, str(rng.choice(KINDS[:-1])), rows, n)
        params = SamplingParams(
            float(rng.choice([1e-6, 0.7, 1.0, 3.0])),
            int(rng.choice([0, rng.integers(1, n + 1)])),
            float(rng.choice([1.0, rng.random()])),
            float(rng.choice([0.0, rng.random()])),
            int(rng.integers(0, 2**63)),
        )
        assert_host_agrees(logits, int(rng.integers(0, 2**30)), params)


@pytest.mark.parametrize("kind", ["usual", "ties", "equal", "low"])
@pytest.mark.parametrize("given", [{"temperature": 0.0}, {}, {"min_p": 0.05}, *FILTERS], ids=str)
def test_logits_of_some_tokens(rng: np.random.Generator, kind: str, given: dict[str, Any]) -> None:
    """As the host chooses from a row of all tokens in which the others are masked: by true ids, ties and noise too."""
    for n, vocab in ((1, 3), (7, 8), (500, 4096), (5003, 40_000), (65_536, VOCAB)):
        ids = np.sort(rng.choice(vocab, n, replace=False)).astype(np.int32)
        logits = rows_of(rng, kind, 3, n)
        whole = np.full((3, vocab), -np.inf, np.float32)
        whole[:, ids] = logits
        params = SamplingParams(**{"temperature": 0.9, "seed": int(rng.integers(0, 2**63)), **given})
        selection = Selection(logits, pad=n % 3, ids=ids)
        selection.write(31, params)
        assert selection.launch() == 0
        assert selection.tokens() == choose(whole, 31 + np.arange(3), params).tolist(), (n, params)


def test_a_row_does_not_depend_on_the_others(rng: np.random.Generator) -> None:
    logits = rows_of(rng, "usual", 8, 30_001)
    for given in ({}, {"top_k": 40}, {"top_k": 40, "top_p": 0.9}, {"top_p": 0.97}):
        params = SamplingParams(1.3, **given, seed=9)
        together = select(logits, 50, params, pad=3)
        assert together == [select(row[None], 50 + i, params)[0] for i, row in enumerate(logits)]


def test_a_recorded_call_reads_its_settings(rng: np.random.Generator) -> None:
    """One CUDA graph, replayed with other settings and positions; the workspace keeps nothing between them."""
    logits = rows_of(rng, "usual", 5, 40_000)
    selection, rt = Selection(logits), lib.runtime()
    stream = lib.check(rt.cudaStreamCreate())
    lib.check(rt.cudaStreamBeginCapture(stream, rt.cudaStreamCaptureMode.cudaStreamCaptureModeGlobal))
    assert selection.launch(int(stream)) == 0
    graph = lib.check(rt.cudaGraphInstantiate(lib.check(rt.cudaStreamEndCapture(stream)), 0))
    for position, given in enumerate(({}, *FILTERS, {"temperature": 0.0}, {"min_p": 0.1}, *FILTERS)):
        params = SamplingParams(**{"temperature": 0.9, "seed": position, **given})
        selection.write(position, params)
        lib.check(rt.cudaGraphLaunch(graph, stream))
        assert selection.tokens() == choose(logits, position + np.arange(5), params).tolist(), params


SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {},
    {"top_k": 3},
    {"top_p": 0.5},
    {"min_p": 0.1},
    {"top_k": 900, "top_p": 0.9},
)


@pytest.mark.parametrize("given", SETTINGS, ids=str)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("some", [False, True])
def test_no_token_from_a_row_with_one_that_is_no_number(
    rng: np.random.Generator, given: dict[str, Any], value: float, some: bool
) -> None:
    """Wherever in the row it stands; rows beside it are chosen from as ever, and what lies behind a row is not read."""
    params = SamplingParams(**{"temperature": 1.0, "seed": 1, **given})
    for n in (1, 2, 3, 4, 1003, 65_537, 262_147):  # beyond 2^18 a thread reads a second part
        places = sorted({0, 1 % n, n // 2, n - 1, min(n - 1, 1 << 18)})
        clean = rng.standard_normal((2 * len(places) + 1, n)).astype(np.float32)
        spoilt, bad = clean.copy(), range(1, len(clean), 2)
        spoilt[list(bad), places] = value
        ids = np.arange(0, 3 * n, 3, dtype=np.int32) if some else None
        selection, whole = (Selection(each, pad=n % 3, ids=ids) for each in (spoilt, clean))
        for each in (selection, whole):
            each.write(0, params)
            assert each.launch() == 0
        want = whole.tokens()
        assert NO_TOKEN not in want
        assert selection.tokens() == [NO_TOKEN if i in bad else token for i, token in enumerate(want)], n


@pytest.mark.parametrize("given", SETTINGS, ids=str)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_no_token_from_a_row_of_nothing_else(given: dict[str, Any], value: float) -> None:
    params = SamplingParams(**{"temperature": 1.0, **given})
    for n in (1, 5, 1000):
        assert select(np.full((2, n), value, np.float32), 0, params) == [NO_TOKEN] * 2


@pytest.mark.parametrize(
    "change", [{"rows": 0}, {"n": 0}, {"n": (1 << 22) + 1, "ld": 1 << 23}, {"ld": 7}, {"bytes": 8}]
)
def test_refuses_what_it_cannot_do(change: dict[str, int]) -> None:
    given = {"rows": 1, "n": 8, "ld": 8, "bytes": 1 << 30, **change}
    args = (256, given["ld"], given["rows"], given["n"], None, 256, 256, 0, 256, 256, given["bytes"], 0, None)
    assert lib.kernels().nextn_select(*args) == lib.INVALID_VALUE
