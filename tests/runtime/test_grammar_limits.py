"""Grammars that take long, or too much: refused by name, and nobody else waits for them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from runtime.grammar import GrammarCompiler
from runtime.grammar_state import GrammarError, GrammarState, NotYetError
from runtime.sampling import SamplingParams
from runtime.scheduler import Scheduler
from runtime.sequence_sampler import Adjustments, SequenceSampler
from runtime.server.service import ServiceOptions
from runtime.session import Session
from tests.exported import Exported
from tests.runtime.server import Running, serving
from tests.runtime.serving import Collected, grammar_compiler, open_trained, sampler_of, solo, submit

Export = Callable[[str], Exported]
# A processor time of seconds to minutes for the grammar, or for a mask.
HEAVY = [
    {"type": "integer", "multipleOf": 999_983},
    {"type": "string", "pattern": "^(a{1000}){1000}$"},
    {"type": "string", "pattern": "^((a?){100}a{100}){10}$"},
    {"anyOf": [{"type": "object", "properties": {f"p{i}": {"type": "string"}}} for i in range(500)]},
]


@pytest.fixture(scope="module")
def session(exported: Export) -> Session:
    return open_trained(exported("trained"), draft_n_max=4)


@pytest.fixture
def compiler(session: Session) -> Iterator[GrammarCompiler]:
    with grammar_compiler(session) as made:
        yield made


@pytest.fixture(scope="module")
def server(exported: Export) -> Iterator[Running]:
    with serving(exported("trained")) as running:
        yield running
        running.idle()


def format_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


@pytest.mark.parametrize("schema", HEAVY)
def test_a_heavy_schema_is_refused_by_name(server: Running, schema: dict[str, Any]) -> None:
    """Whether it is found out at once or while the reply is made; and the next request is served."""
    status, error = server.refusal(response_format=format_of(schema), max_tokens=40)
    assert (status, error["param"], error["code"]) == (400, "response_format", "invalid_value")
    assert server.chat(response_format={"type": "json_object"}, max_tokens=4)["choices"]


def test_a_stream_that_ends_in_a_heavy_schema_names_it(server: Running) -> None:
    events = server.events(response_format=format_of(HEAVY[2]), max_tokens=40)
    assert events[-1]["error"]["param"] == "response_format"


def test_slow_grammars_do_not_hold_up_other_requests(exported: Export, monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than there are threads are being compiled, and prompts are read all the same."""
    let_go = threading.Event()
    whole = GrammarCompiler.lark

    def slow(self: GrammarCompiler, source: str, field: str = "") -> Any:
        assert let_go.wait(60)
        return whole(self, source, field)

    with serving(exported("trained"), ServiceOptions(queue_limit=64)) as server:
        want = server.chat(max_tokens=5, temperature=0)["choices"]
        monkeypatch.setattr(GrammarCompiler, "lark", slow)
        got: list[Any] = []
        clients = [
            threading.Thread(
                target=lambda: got.append(server.chat(response_format={"type": "json_object"}, max_tokens=2))
            )
            for _ in range(48)
        ]
        for client in clients:
            client.start()
        assert server.chat(max_tokens=5, temperature=0)["choices"] == want
        assert not got
        let_go.set()
        for client in clients:
            client.join(60)
        assert len(got) == len(clients)


class _Slow:
    """A grammar that allows all, whose answers come when they are let through."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size, self.open = vocab_size, threading.Event()
        self.asked = threading.Event()

    def start(self) -> _Slow:
        return self

    def push(self, token: int) -> None:
        pass

    def pop(self, n: int) -> None:
        pass

    def close(self) -> None:
        pass

    def prepare(self) -> bool:
        self.asked.set()
        return self.open.is_set()

    def allowed(self, patience_s: float = 0.0) -> np.ndarray:
        if not self.open.is_set():
            raise NotYetError
        return np.ones(self.vocab_size, bool)


def test_others_do_not_wait_for_a_grammar(session: Session) -> None:
    """They come to their ends while it thinks; then its text is the one that it would have been."""
    prompt = session.tokenizer.encode("def f(x):")
    params = SamplingParams(temperature=0.8, seed=4)
    want = solo(session, prompt, params, 30)
    slow = _Slow(session.manifest.geometry.vocab_size)
    sampler = sampler_of(session, prompt, params, Adjustments(grammar=slow))  # type: ignore[arg-type]
    scheduler = Scheduler(session, num_sequences=2)
    try:
        _, waiting = submit(scheduler, prompt, 30, sampler=sampler)
        assert slow.asked.wait(60)
        for _ in range(3):
            _, other = submit(scheduler, prompt, 30, sampler=sampler_of(session, prompt, params))
            assert other.wait().got == want
        assert not waiting.reason and not waiting.got
        slow.open.set()
        assert waiting.wait().got == want
        cancelled, listener = submit(scheduler, prompt, 30, sampler=_closed_again(slow, session, prompt, params))
        slow.asked.wait(60)
        scheduler.cancel(cancelled)
        assert listener.wait().reason == "cancelled"
    finally:
        scheduler.close()


def _closed_again(slow: _Slow, session: Session, prompt: list[int], params: SamplingParams) -> Any:
    slow.open.clear()
    slow.asked.clear()
    return sampler_of(session, prompt, params, Adjustments(grammar=slow))  # type: ignore[arg-type]


@pytest.mark.parametrize("draft_n_max", [1, 4])
def test_impatience_changes_no_text(
    session: Session, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, draft_n_max: int
) -> None:
    """Where no row but the first waits for its mask, rounds end early, and the text is the same."""
    prompt = session.tokenizer.encode("The answer as JSON:")
    params = SamplingParams(temperature=0.9, seed=2)
    texts = []
    for patience in (60.0, 0.0):
        monkeypatch.setattr("runtime.sequence_sampler._PATIENCE_S", patience)
        scheduler = Scheduler(session, num_sequences=1)
        adjustments = Adjustments(grammar=compiler.json_object())
        _, listener = submit(scheduler, prompt, 40, sampler=sampler_of(session, prompt, params, adjustments))
        texts.append((listener.wait().got, listener.reason, listener.error))
        scheduler.close()
    assert texts[0] == texts[1] and texts[0][0]


def test_a_state_whose_process_ended_goes_on(compiler: GrammarCompiler, session: Session) -> None:
    """What it was at fails; the rest of the text is worked out anew."""
    state = compiler.json_object().start()
    text = session.tokenizer.encode('{"a": 1, "b": [2]}')
    want = masks(compiler, text)
    for i, token in enumerate(text):
        if i % 4 == 1:
            assert state._process is not None
            state._process.close()
            state._process = None
            state._there = None
        state.push(token)
        assert np.array_equal(state.allowed(), want[i])


def masks(compiler: GrammarCompiler, text: list[int]) -> list[np.ndarray]:
    state, out = compiler.json_object().start(), []
    for token in text:
        state.push(token)
        out.append(state.allowed())
    return out


def test_a_mask_that_takes_too_much(compiler: GrammarCompiler, session: Session) -> None:
    """The text before it can still be gone on with, another way."""
    (brace,) = session.tokenizer.encode("{")
    state = compiler.json_object().start()
    state.push(brace)
    os.kill(child_of(state), signal.SIGSTOP)
    with pytest.raises(NotYetError):
        state.allowed(0.01)
    os.kill(child_of(state), signal.SIGPROF)  # what the kernel does once its time is over
    os.kill(child_of(state), signal.SIGCONT)
    with pytest.raises(GrammarError, match="processor time"):
        state.allowed()
    (space,) = session.tokenizer.encode(" ")
    state.pop(1)
    state.push(space)
    state.allowed()
    state.pop(1)
    state.push(brace)
    with pytest.raises(GrammarError, match="processor time"):
        state.allowed()  # as it was said
    state.push(space)
    assert np.array_equal(state.allowed(), masks(compiler, [brace, space])[1])


def child_of(state: GrammarState) -> int:
    """The newest process of the compiler's."""
    compiler = state._connect.__self__  # type: ignore[attr-defined]
    parent = compiler._process.pid
    return max(int(pid) for pid in os.listdir("/proc") if pid.isdigit() and f"\nPPid:\t{parent}\n" in _status(pid))


def _status(pid: str) -> str:
    try:
        with open(f"/proc/{pid}/status") as file:
            return file.read()
    except OSError:
        return ""


def test_a_mask_of_nothing(compiler: GrammarCompiler) -> None:
    """A grammar may ask for bytes that no token has."""
    state = compiler.json_schema({"type": "null"}, "response_format").start()
    assert isinstance(state._root.outcome, bytes)
    state._root.outcome = bytes(len(state._root.outcome))
    with pytest.raises(GrammarError, match="no token") as refused:
        state.allowed()
    assert refused.value.field == "response_format"


def test_the_process_may_end(compiler: GrammarCompiler) -> None:
    """Another takes its place."""
    assert compiler.json_object()
    assert compiler._process is not None
    compiler._process.kill()
    compiler._process.wait()
    assert compiler.json_object()
    with pytest.raises(GrammarError, match="tools: not a grammar"):
        compiler.json_schema({"type": "x"}, "tools")


def test_processes_of_sequences_end_with_them(server: Running) -> None:
    server.chat(response_format={"type": "json_object"}, max_tokens=4)
    server.refusal(response_format={"type": "json_object"}, messages=[{"role": "user", "content": "word " * 9000}])
    server.idle()
    process = server.service.grammars._process
    assert process is not None
    gone = threading.Event()
    for _ in range(1000):
        left = [pid for pid in os.listdir("/proc") if pid.isdigit() and f"\nPPid:\t{process.pid}\n" in _status(pid)]
        if not left:
            return
        gone.wait(0.02)
    raise AssertionError(f"still there: {left}")


def test_a_listener_and_a_sampler_are_told_once(session: Session, compiler: GrammarCompiler) -> None:
    """A job that ends closes what its grammar takes; using the sampler again starts it again."""
    prompt = session.tokenizer.encode("The answer as JSON:")
    sampler = sampler_of(session, prompt, SamplingParams(), Adjustments(grammar=compiler.json_object()))
    assert isinstance(sampler, SequenceSampler)
    scheduler = Scheduler(session, num_sequences=1)
    _, listener = submit(scheduler, prompt, 5, sampler=sampler, listener=Collected())
    listener.wait()
    scheduler.close()
    assert sampler._grammar is not None and sampler._grammar._state._process is None
