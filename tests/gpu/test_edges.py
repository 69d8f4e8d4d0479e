"""Where a text begins and ends, models that are odd in one way, and numbers that are none, on the engines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from engines.engine_manifest import load_engine_manifest, step_size
from engines.errors import NumericError, UsageError
from runtime.cuda import PinnedBuffer
from runtime.engine import NO_CHOICE, Sampler
from runtime.sampling import SamplingParams, choose
from runtime.session import make_sampler
from runtime.tensorrt_draft import TensorrtDraft
from runtime.tensorrt_trunk import GREEDY, TensorrtTrunk
from tests.gpu.checks import assert_same_bits, run, token_ids
from tests.gpu.conftest import Opened
from tests.gpu.prepare import MAX_ROWS, ONNXRUNTIME, PREFILL_CHUNK, WIDE, read_reference, texts
from tests.known_text import ENDLESS, RING

pytestmark = [pytest.mark.gpu, pytest.mark.trt]

Open = Callable[[str], Opened]
PARAMS = SamplingParams()
# Of a row's logits, relative to the largest logit there is: f16 keys and values, and the activations' rounding. In the
# middle of all rows, as a head whose output is nearly zero is normed to rms 1, its rounding with it.
ROW_MAX_REL = 1e-3


def ring(n: int) -> list[int]:
    return (list(RING) * (n // len(RING) + 1))[:n]


@pytest.mark.parametrize("n", [1, 2, MAX_ROWS, PREFILL_CHUNK - 1, PREFILL_CHUNK, PREFILL_CHUNK + 1])
@pytest.mark.parametrize("n_drafts", [0, MAX_ROWS - 1])
def test_prompts_of_every_length(opened: Open, n: int, n_drafts: int) -> None:
    """A prompt longer than a prefill pass is read in several."""
    prompt = ring(n)
    tokens, _ = run(opened("bigram_ring"), prompt, n_drafts, 20, PARAMS)
    assert tokens == ENDLESS.greedy(prompt[-1], 20)


@pytest.mark.parametrize("room", [1, 2, 3, 4, 5])
def test_end_of_the_context(opened: Open, room: int) -> None:
    """Drafts never reach past the rows of the cache; what fits is said."""
    engines = opened("bigram_ring")
    prompt = ring(engines.trunk.context_size - room)
    tokens, stats = run(engines, prompt, 4, -1, PARAMS)
    assert (tokens, stats.finish_reason) == (ENDLESS.greedy(prompt[-1], room), "length")


def test_a_prompt_beyond_the_context(opened: Open) -> None:
    engines = opened("bigram_ring")
    with pytest.raises(UsageError, match=f"the context holds {engines.trunk.context_size}"):
        run(engines, ring(engines.trunk.context_size + 1), 4, -1, PARAMS)


@pytest.mark.parametrize("n_drafts", [0, 1, 4])
def test_a_text_that_ends_at_once(opened: Open, n_drafts: int) -> None:
    engines = opened("stops_at_once")
    tokens, stats = run(engines, [RING[-1]], n_drafts, 100, PARAMS, engines.manifest.tokenizer.end_token_ids)
    assert (tokens, stats.finish_reason) == ([], "stop")


def test_a_tied_head_is_the_embedding(opened: Open) -> None:
    """The same bits as with a copy of the matrix, and the engine takes it once."""
    tied, copied = opened("tied"), opened("tied_copied")
    ids = token_ids(tied.vocab_size, 24, seed=2)
    results = []
    for engines in (tied, copied):
        engines.prefill(ids[:8])
        results.append(engines.append(ids[8:], MAX_ROWS))
    assert_same_bits(results[0][0], results[1][0], "logits")
    assert_same_bits(results[0][1], results[1][1], "hidden")
    sizes = [
        sum(place.nbytes for place in load_engine_manifest(each.folder).weights.values()) for each in (tied, copied)
    ]
    head = tied.vocab_size * tied.manifest.geometry.hidden_size
    assert sizes[1] - sizes[0] >= head, "a whole matrix less"


def against_onnxruntime(opened: Open, prepared: Path, name: str) -> np.ndarray:
    """Largest difference of every row's logits from ONNX Runtime's, [T], relative to the largest logit of all rows."""
    engines, (want, _) = opened(name), read_reference(prepared, name, ONNXRUNTIME)
    engines.prefill(np.array([], np.int64))
    got, _ = engines.append(np.array(texts(prepared, name)[0]), MAX_ROWS)
    assert np.isfinite(got).all()
    off = np.abs(got - want[0]).max(axis=1) / np.abs(want).max()
    print(f"{name}: rows off by {np.median(off):.2g} in the middle, {off.max():.2g} at most")
    return off


def test_norm_weights_are_used_as_they_are(opened: Open, prepared: Path) -> None:
    """All are one: whoever adds one to them, or takes one away, doubles or zeroes everything."""
    assert np.median(against_onnxruntime(opened, prepared, "norms_all_one")) <= ROW_MAX_REL


def test_long_memory(opened: Open, prepared: Path) -> None:
    """With next to no decay the state sums up hundreds of tokens; its rounding must not."""
    off = against_onnxruntime(opened, prepared, "gdn_no_decay")
    first, last = np.median(off[:100]), np.median(off[-100:])
    print(f"first 100 rows {first:.2g}, last 100 {last:.2g}")
    assert last <= ROW_MAX_REL and last <= 3 * first


def test_fast_decay(opened: Open, prepared: Path) -> None:
    """Decays of exp(-1200): the state is gone after every token, and nothing becomes NaN."""
    assert np.median(against_onnxruntime(opened, prepared, "gdn_fast_decay")) <= ROW_MAX_REL
    assert all(np.isfinite(values).all() for values in opened("gdn_fast_decay").trunk.state().values())


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(0.8, seed=1), SamplingParams(0.8, top_k=5, seed=1)]
)
@pytest.mark.parametrize("name", ["trained", WIDE])
def test_a_state_that_is_no_number(opened: Open, name: str, params: SamplingParams) -> None:
    """Not a token comes of it; the next sequence is well again."""
    engines = opened(name)
    trunk, stream = engines.trunk, engines.trunk._shared.stream
    ids = token_ids(engines.vocab_size, 20, seed=3)
    want = engines.prefill(ids, GREEDY)
    trunk.start(make_sampler(params))
    trunk.prefill(ids)
    name = next(name for name in trunk.memory.states if name.endswith(".pool"))
    buffer = trunk.memory.states[name]
    poison = PinnedBuffer(buffer.nbytes)
    poison.array[:] = 0xFF  # NaN, as any float
    stream.to_device(buffer.address, poison, buffer.nbytes)
    with pytest.raises(NumericError, match=f"position {len(ids) + 1}"):
        trunk.verify([1])
    assert_same_bits(engines.prefill(ids, GREEDY), want, "hidden afterwards")


@pytest.mark.parametrize("name", ["trained", WIDE])
def test_a_step_that_is_no_number(opened: Open, name: str) -> None:
    """Of tokens that were taken back it does nothing; of one that was kept, not a token comes."""
    engines = opened(name)
    trunk, geometry, ids = engines.trunk, engines.manifest.geometry, token_ids(engines.vocab_size, 20, seed=3)
    heads, dim, stream = geometry.gdn_v_heads, geometry.gdn_head_dim, trunk._shared.stream
    pool = next(trunk.memory.states[each] for each in trunk.memory.states if each.endswith(".pool"))
    poison = PinnedBuffer(4 * (trunk.memory.num_slots - 1) * step_size(heads, dim))
    poison.array[:] = 0xFF

    def after(kept: int, poisoned: bool) -> np.ndarray:
        trunk.start(GREEDY)
        trunk.prefill(ids.tolist())
        trunk.verify([1, 2, 3])
        trunk.commit(kept)
        if poisoned:
            stream.to_device(pool.address + 4 * heads * dim**2, poison, poison.nbytes)
        trunk.verify([4])
        return trunk.logits

    assert_same_bits(after(1, poisoned=True), after(1, poisoned=False), "logits without the steps")
    for kept in (2, 3):
        with pytest.raises(NumericError, match=f"position {len(ids) + kept + 1}"):
            after(kept, poisoned=True)


SETTINGS = [
    SamplingParams(),
    SamplingParams(0.8, seed=1),
    SamplingParams(0.8, top_k=5, seed=2),
    SamplingParams(0.8, top_p=0.9, seed=3),
    SamplingParams(0.8, min_p=0.1, seed=4),
    SamplingParams(1.2, 40, 0.9, 0.02, 5),
]


def by_host(logits: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """A sampler that the device knows nothing of."""
    return choose(logits, positions, SETTINGS[-1])


def spoil(engine: TensorrtTrunk | TensorrtDraft, logits: int, width: int, value: float, at: dict[int, int]) -> None:
    """Of each pass, before its choices: the last logit of a row. at: by rows of a trunk's pass its spoilt row; by steps
    of a draft 0. For engines of a sequence of their own, as passes are recorded with it."""
    choose, stream, poison = engine._choose, engine._shared.stream, PinnedBuffer(4)
    poison.array.view(np.float32)[0] = value

    def spoilt(rows: int, *step: int, **offset: int) -> None:
        row = at.get(step[0] if isinstance(engine, TensorrtDraft) else rows)
        if row is not None:
            stream.to_device(logits + 4 * (row * width + width - 1), poison, poison.nbytes)
        choose(rows, *step, **offset)

    engine._choose = spoilt  # type: ignore[method-assign]


@pytest.mark.parametrize("value", [-np.inf, np.inf, np.nan])
@pytest.mark.parametrize("sampler", [*map(make_sampler, SETTINGS), by_host], ids=[*map(str, SETTINGS), "by host"])
@pytest.mark.parametrize("name", ["trained", WIDE])
def test_one_logit_that_is_no_number(opened: Open, name: str, sampler: Sampler, value: float) -> None:
    """After the prompt, in a plain row, behind drafts: with the position that plain decoding names, never a token."""
    engines, ids = opened(name), token_ids(opened(name).vocab_size, 20, seed=3).tolist()
    logits, width = engines.trunk._logits.address, engines.vocab_size
    for at, place in (({1: 0}, 20), ({3: 1}, 22)):
        trunk = engines.trunk.another()
        spoil(trunk, logits, width, value, at)
        trunk.start(sampler)
        if place > 20:
            first = trunk.prefill(ids).choices[0]
            second = trunk.verify([first]).choices[0]
            trunk.start(sampler)
            trunk.prefill(ids)
            assert trunk.verify([first, second, 1]).choices[:2] == [second, NO_CHOICE]
            with pytest.raises(NumericError, match=f"position {place}: {int(np.isnan(value))} NaN"):
                trunk.commit(2)
            trunk.commit(1)
            at[1] = 0
            trunk.memory.recorder = type(trunk.memory.recorder)(trunk._shared.stream)
        with pytest.raises(NumericError, match=f"position {place}: {int(np.isnan(value))} NaN"):
            if place > 20:
                trunk.verify([second])
            else:
                trunk.prefill(ids)


@pytest.mark.parametrize("value", [-np.inf, np.inf, np.nan])
@pytest.mark.parametrize("params", SETTINGS, ids=str)
def test_one_logit_of_the_head_that_is_no_number(opened: Open, params: SamplingParams, value: float) -> None:
    """After the head's own guess it ends the drafts, after true rows it is an error. The steps that follow are fed
    NO_CHOICE, whose embedding is a row of NaN: so they choose nothing either."""
    engines, ids = opened("trained"), token_ids(opened("trained").vocab_size, 20, seed=3).tolist()
    trunk = engines.trunk.another()
    hidden = trunk.prefill(ids).hidden
    for step in (1, 0):
        head = engines.draft.another(trunk)
        rows = head.join([head.zero_hidden(), hidden])[: len(ids)]
        spoil(head, head._buffers.logits.address, head._tokens.count, value, {step: 0})
        head.start(make_sampler(params))
        if step:
            drafts = head.draft(ids, rows, 3).tolist()
            assert drafts[0] >= 0 and drafts[1:] == [NO_CHOICE] * 2
        else:
            with pytest.raises(NumericError, match=f"position {len(ids)} are not finite"):
                head.draft(ids, rows, 2)
            head.start(make_sampler(params))
            first = len(ids) - head._buffers.num_guesses + 1
            with pytest.raises(NumericError, match=f"position {first} are not finite"):
                head.guess(ids, rows)
