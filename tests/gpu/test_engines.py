"""The engines on a GPU: exact to the bit whatever the number of rows, close to ONNX Runtime, lossless with drafts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from engines.errors import EngineError, ResourceError
from runtime import cuda
from runtime.agreement import compare
from runtime.controller import FixedDraft
from runtime.engine_tensorrt import open_engines
from runtime.sampling import SamplingParams
from runtime.session import Session, SpecOptions, make_sampler, open_session
from runtime.speculative import SpecStats, generate
from runtime.tensorrt_trunk import GREEDY
from tests.gpu.conftest import Opened
from tests.gpu.prepare import MAX_ROWS, read_reference, texts
from tests.known_text import ENDLESS, RING, STOP_INSIDE
from tests.peer.speculation import NEW_TOKENS, recorded

pytestmark = [pytest.mark.gpu, pytest.mark.trt]

Open = Callable[[str], Opened]
RANDOM_MODELS = ("heads_256", "heads_9b", "q4_k_m")
# Quantised activations and f16 keys and values against float32 on the same weights.
KL_MEAN_MAX, TOP1_MIN = 1e-4, 0.995
# Share of drafts by which acceptance may differ from llama.cpp's on the same prompts.
ACCEPTANCE_MAX_ABS = 0.02
STATE_WORDS = {2: np.uint16, 4: np.uint32}


def token_ids(vocab_size: int, n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab_size, n)


def assert_same_bits(got: np.ndarray, want: np.ndarray, what: str) -> None:
    assert got.shape == want.shape and got.dtype == want.dtype, what
    word = STATE_WORDS[got.dtype.itemsize]
    differ = np.argwhere(got.view(word) != want.view(word))
    first = tuple(differ[0]) if len(differ) else ()
    assert not len(differ), f"{what}: {len(differ)} of {got.size} differ, first at {first}: {got[first]} {want[first]}"
    assert np.isfinite(want).all(), f"{what}: not finite"


def assert_same_state(got: dict[str, np.ndarray], want: dict[str, np.ndarray], where: str) -> None:
    assert got.keys() == want.keys()
    for name in want:
        assert_same_bits(np.ascontiguousarray(got[name]), np.ascontiguousarray(want[name]), f"{name} {where}")


@pytest.mark.parametrize("start", [0, 5, 1000])
@pytest.mark.parametrize("name", ["trained", *RANDOM_MODELS])
def test_rows_agree_bit_by_bit(opened: Open, name: str, start: int) -> None:
    """Logits, hidden and all state of passes of 2..8 tokens are those of one-token passes."""
    engines = opened(name)
    start = min(start, engines.trunk.context_size - 24)
    n = 24
    ids = token_ids(engines.vocab_size, start + n, seed=start)
    engines.prefill(ids[:start])
    single, states = [], []
    for token in ids[start:]:
        single.append(engines.append([token], 1))
        states.append(engines.trunk.state())
    for rows in range(2, MAX_ROWS + 1):
        engines.prefill(ids[:start])
        for first in range(0, n - rows + 1, rows):
            logits, hidden = engines.append(ids[start + first : start + first + rows], rows)
            where = f"of {rows} rows at position {start + first}"
            want = [np.concatenate(parts) for parts in zip(*single[first : first + rows], strict=True)]
            assert_same_bits(logits, want[0], f"logits {where}")
            assert_same_bits(hidden, want[1], f"hidden {where}")
            assert_same_state(engines.trunk.state(), states[first + rows - 1], where)


@pytest.mark.parametrize("name", ["trained", *RANDOM_MODELS])
def test_head_rows_agree_bit_by_bit(opened: Open, name: str) -> None:
    """The head's logits after catching up with 1..8 rows at once are those after one row at a time."""
    engines = opened(name)
    ids = token_ids(engines.vocab_size, 200, seed=4)
    engines.trunk.start(GREEDY)
    hidden = engines.draft.join([engines.draft.zero_hidden(), engines.trunk.prefill(ids).hidden])
    for start in (0, 100):
        single = []
        engines.draft.start(GREEDY)
        if start:
            engines.draft.prefill(ids[:start], hidden[:start])
        for i in range(start, start + MAX_ROWS):
            engines.draft.prefill(ids[i : i + 1], hidden[i : i + 1])
            single.append(engines.draft.logits)
        for rows in range(2, MAX_ROWS + 1):
            engines.draft.start(GREEDY)
            if start:
                engines.draft.prefill(ids[:start], hidden[:start])
            end = start + rows
            drafts = engines.draft.draft(ids[start:end], hidden[start:end], 1)
            assert_same_bits(engines.draft.logits, single[rows - 1], f"head logits after {rows} rows at {start}")
            assert drafts[0] == single[rows - 1].argmax()


@pytest.mark.parametrize("n_drafts", [1, 3, 7])
@pytest.mark.parametrize("rows", [1, 2, MAX_ROWS, 40])
def test_a_round_is_its_parts(opened: Open, rows: int, n_drafts: int) -> None:
    """Drafting and verifying in one graph gives the drafts, choices and state of the two calls, bit by bit."""
    engines = opened("trained")
    ids = token_ids(engines.vocab_size, 100, seed=rows)
    results = []
    for whole in (False, True):
        trunk, draft = engines.trunk, engines.draft
        trunk.start(GREEDY)
        draft.start(GREEDY)
        hidden = draft.join([draft.zero_hidden(), trunk.prefill(ids[:99]).hidden])
        draft.prefill(ids[: 100 - rows], hidden[: 100 - rows])
        tail = ids[100 - rows :].tolist(), hidden[100 - rows :]
        if whole:
            both = draft.draft_and_verify(trunk, *tail, n_drafts)
            assert both is not None and 0 < both.draft_share < 1
            drafts, result = both.drafts, both.result
        else:
            drafts = draft.draft(*tail, n_drafts)
            result = trunk.verify([int(ids[99]), *drafts])
        logits = trunk.logits, draft.logits
        trunk.commit(n_drafts)
        results.append((drafts, result.choices, engines.host(result.hidden), *logits, trunk.state()))
    (drafts, choices, *arrays, state), (want_drafts, want_choices, *want_arrays, want_state) = results
    assert drafts.tolist() == want_drafts.tolist() and choices.tolist() == want_choices.tolist()
    for got, want in zip(arrays, want_arrays, strict=True):
        assert_same_bits(got, want, f"{rows} rows, {n_drafts} drafts")
    assert_same_state(state, want_state, f"{rows} rows, {n_drafts} drafts")


@pytest.mark.parametrize("rows", [2, 5, MAX_ROWS])
@pytest.mark.parametrize("start", [0, 300])
def test_rollback(opened: Open, rows: int, start: int) -> None:
    """However many provisional tokens are kept, state and what follows are as if the others had never been."""
    engines = opened("trained")
    ids = token_ids(engines.vocab_size, start + rows, seed=rows)
    followers = token_ids(engines.vocab_size, 3, seed=1)
    for keep in range(1, rows + 1):
        engines.prefill(ids[:start])
        engines.trunk.verify(ids[start:])
        engines.trunk.commit(keep)
        state, (logits, hidden) = engines.trunk.state(), engines.append(followers, 1)
        engines.prefill(ids[:start])
        engines.append(ids[start : start + keep], 1)
        where = f"with {keep} of {rows} rows kept at position {start}"
        assert_same_state(state, engines.trunk.state(), where)
        want_logits, want_hidden = engines.append(followers, 1)
        assert_same_bits(logits, want_logits, f"logits {where}")
        assert_same_bits(hidden, want_hidden, f"hidden {where}")


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("chunked", [False, True], ids=["decode", "prefill"])
def test_logits_are_onnx_runtimes(opened: Open, prepared: Path, chunked: bool) -> None:
    """Over the recorded texts; decode: in verify passes from the start; prefill: half of each text in one chunk."""
    engines, (want, best) = opened("trained"), read_reference(prepared)
    got = []
    for text in texts():
        begin = len(text) // 2 if chunked else 0
        engines.prefill(text[:begin])
        got.append(engines.append(text[begin:], MAX_ROWS)[0])
    logits = np.stack(got)
    want, best = want[:, -logits.shape[1] :], best[:, -logits.shape[1] :]
    p, q = log_softmax(want), log_softmax(logits)
    kl = (np.exp(p) * (p - q)).sum(axis=-1)
    top1 = (best == logits.argmax(axis=-1)).mean()
    print(f"{kl.size} positions: KL mean {kl.mean():.3g} max {kl.max():.3g}, top-1 {top1:.5f}")
    assert kl.size >= 2000 or chunked
    assert kl.mean() <= KL_MEAN_MAX
    assert top1 >= TOP1_MIN


def run(
    engines: Opened,
    prompt: list[int],
    n_drafts: int,
    max_tokens: int,
    params: SamplingParams,
    ends: tuple[int, ...] = (),
) -> tuple[list[int], SpecStats]:
    stats = SpecStats()
    draft = engines.draft if n_drafts else None
    tokens = generate(
        engines.trunk,
        draft,
        prompt,
        sampler=make_sampler(params),
        controller=FixedDraft(n_drafts),
        max_tokens=max_tokens,
        end_token_ids=ends,
        context_size=engines.trunk.context_size,
        stats=stats,
    )
    return list(tokens), stats


@pytest.mark.parametrize("n_drafts", range(MAX_ROWS))
def test_known_text(opened: Open, n_drafts: int) -> None:
    greedy = SamplingParams()
    tokens, _ = run(opened("bigram_ring"), list(RING[:5]), n_drafts, 200, greedy)
    assert tokens == ENDLESS.greedy(RING[4], 200)
    tokens, stats = run(opened("draft_perfect"), list(RING[:5]), n_drafts, 100, greedy)
    assert tokens == ENDLESS.greedy(RING[4], 100)
    assert stats.draft_n_accepted == stats.draft_n
    engines = opened("ring_stop_inside")
    tokens, stats = run(engines, [RING[-1]], n_drafts, 100, greedy, engines.manifest.tokenizer.end_token_ids)
    assert (tokens, stats.finish_reason) == (STOP_INSIDE.greedy(RING[-1], 11), "stop")


@pytest.mark.parametrize("n_drafts", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(0.8, seed=5),
        SamplingParams(1.2, min_p=0.05, seed=6),
        SamplingParams(0.8, top_k=40, top_p=0.95, seed=7),
    ],
    ids=["greedy", "0.8", "min-p", "host filters"],
)
def test_drafting_leaves_the_text_alone(opened: Open, params: SamplingParams, n_drafts: int) -> None:
    engines = opened("trained")
    for one in recorded()[:6]:
        plain, _ = run(engines, one.prompt, 0, 128, params)
        text, stats = run(engines, one.prompt, n_drafts, 128, params)
        assert text == plain
        assert stats.draft_n_accepted > 0


def test_state_after_drafting(opened: Open) -> None:
    """After many rejections the trunk's state is that of plain decoding, bit by bit."""
    engines, prompt = opened("trained"), recorded()[0].prompt
    run(engines, prompt, 0, 256, SamplingParams())
    want = engines.trunk.state()
    _, stats = run(engines, prompt, 4, 256, SamplingParams())
    assert stats.draft_n - stats.draft_n_accepted > 20
    assert_same_state(engines.trunk.state(), want, "after drafting")


def test_acceptance_is_llama_cpps(opened: Open) -> None:
    engines, accepted, drafted, unlike = opened("trained"), 0, 0, 0
    for one in recorded():
        text, stats = run(engines, one.prompt, 3, NEW_TOKENS, SamplingParams())
        accepted, drafted = accepted + stats.draft_n_accepted, drafted + stats.draft_n
        unlike += text != one.greedy
    peers = [count for one in recorded() for count in one.accepted[3]]
    print(f"acceptance {accepted / drafted:.4f}, llama.cpp {sum(peers) / (3 * len(peers)):.4f}; {unlike} texts differ")
    assert accepted / drafted == pytest.approx(sum(peers) / (3 * len(peers)), abs=ACCEPTANCE_MAX_ABS)
    # Engines of different rounding part only where the best two logits are closer than that.
    assert unlike <= len(recorded()) // 3


def test_check(prepared: Path) -> None:
    """What `runtime.check` measures, with an adaptive number of drafts as well."""
    session: Session = open_session(prepared / "trained", spec=SpecOptions("auto", 5))
    for params in (SamplingParams(), SamplingParams(0.8, seed=9)):
        for one in recorded()[:4]:
            result = compare(session, one.prompt, params, 96)
            assert result.first_difference is None
            assert result.head.kl_sum is not None and np.isfinite(result.head.kl_sum)


def test_sizes_outside_the_profile_are_refused(opened: Open) -> None:
    trunk = opened("trained").trunk
    with pytest.raises(
        EngineError, match="9 tokens with 1 rows of logits is outside profile decode, which takes 1 to 8 tokens"
    ):
        trunk._session.enqueue("decode", MAX_ROWS + 1, 1, {})
    trunk.start(make_sampler(SamplingParams()))
    trunk.verify([1])  # and it still works
    trunk.commit(1)


def test_too_little_memory_is_said_first(prepared: Path, opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    model = opened("trained")
    monkeypatch.setattr(cuda, "free_and_total_bytes", lambda: (1 << 24, 1 << 34))
    with pytest.raises(ResourceError, match=r"weights .* KV caches .* 16\.8 MB of 17\.18 GB are free"):
        open_engines(model.folder, model.manifest, context_size=64)


def test_damaged_engine(opened: Open, tmp_path: Path) -> None:
    """Of the right digest, so that TensorRT itself must refuse it."""
    from dataclasses import replace
    from hashlib import blake2b

    from engines.engine_manifest import load_engine_manifest

    model = opened("bigram_ring")
    for file in model.folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    manifest = load_engine_manifest(tmp_path)
    engine = manifest.engines["trunk"]
    data = bytearray((tmp_path / engine.file).read_bytes())
    data[:64] = bytes(64)
    (tmp_path / engine.file).write_bytes(data)
    damaged = replace(engine, digest=blake2b(data, digest_size=20).hexdigest())
    replace(manifest, engines={**manifest.engines, "trunk": damaged}).save(tmp_path)
    with pytest.raises(EngineError, match=r"trunk\.engine: cannot be loaded on .*compute capability"):
        open_engines(tmp_path, model.manifest, context_size=64)
