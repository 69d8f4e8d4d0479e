"""Several sequences over one pair of engines: each gets the text it has alone, whatever happens to the others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from engines.errors import UsageError
from runtime.sampling import ParamsSampler, SamplingParams
from runtime.scheduler import ClosingError, QueueFullError, Scheduler, TimedOutError
from runtime.session import Session
from tests.exported import Exported
from tests.runtime.serving import WAIT_S, Collected, open_trained, sampler_of, solo, submit

PROMPTS = [[40 + 7 * i, 41, 300 + i, 9] * (1 + i % 3) for i in range(10)]
PARAMS = [SamplingParams(temperature=0.9 * (i % 2), seed=i) for i in range(10)]


@pytest.fixture(scope="module")
def session(exported: Callable[[str], Exported]) -> Session:
    return open_trained(exported("trained"))


@pytest.fixture
def scheduler(session: Session) -> Iterator[Scheduler]:
    made = Scheduler(session, num_sequences=4, queue_limit=8)
    yield made
    made.close()


def test_each_text_is_that_of_its_own_run(exported: Callable[[str], Exported], scheduler: Scheduler) -> None:
    """Ten at once over four slots, drafting and not, greedy and sampled, of different lengths."""
    alone = open_trained(exported("trained"))
    lengths = [12 + 3 * i for i in range(10)]
    want = [solo(alone, p, params, n) for p, params, n in zip(PROMPTS, PARAMS, lengths, strict=True)]
    jobs = [
        submit(scheduler, prompt, n, sampler=ParamsSampler(params), drafting=i % 3 != 0)
        for i, (prompt, params, n) in enumerate(zip(PROMPTS, PARAMS, lengths, strict=True))
    ]
    assert [listener.wait().got for _, listener in jobs] == want
    assert all((job.stats.draft_n > 0) == job.drafting for job, _ in jobs)
    assert all(job.stats.predicted_n == len(listener.got) for job, listener in jobs)


def test_nobody_waits_for_more_than_one_step_of_each_other(scheduler: Scheduler) -> None:
    order: list[int] = []
    gate = threading.Event()

    def noting(i: int) -> Callable[[Collected], bool]:
        def on_step(_: Collected) -> bool:
            gate.wait(WAIT_S)
            order.append(i)
            return False

        return on_step

    jobs = [submit(scheduler, PROMPTS[i], 30, listener=Collected(noting(i)), drafting=False) for i in range(4)]
    gate.set()
    for _, listener in jobs:
        listener.wait()
    together = order[order.index(3) : len(order) - order[::-1].index(0)]
    assert len(together) > 60
    for i in range(len(together) - 4):
        assert len(set(together[i : i + 4])) == 4


def test_a_long_prompt_lets_others_in_between_its_chunks(scheduler: Scheduler) -> None:
    long_prompt = [40 + i % 50 for i in range(1100)]
    _, short = submit(scheduler, PROMPTS[0], 40, drafting=False)
    _, long = submit(scheduler, long_prompt, 4)
    short.wait()
    assert long.wait().num_steps >= 5 + 1  # chunks of 256, then rounds
    assert long.reason == "length"


def test_cancelled_before_the_next_step(scheduler: Scheduler) -> None:
    steps_after: list[int] = []

    def on_step(listener: Collected) -> bool:
        if listener.num_steps == 3:
            scheduler.cancel(job)
            steps_after.append(listener.num_steps)
        return False

    listener = Collected(on_step)
    job, _ = submit(scheduler, PROMPTS[0], -1, listener=listener, drafting=False)
    _, other = submit(scheduler, PROMPTS[1], 20)
    assert (listener.wait().reason, listener.num_steps, steps_after) == ("cancelled", 3, [3])
    assert other.wait().reason == "length"
    assert scheduler.num_active == 0


def test_a_listener_ends_its_text(scheduler: Scheduler) -> None:
    _, listener = submit(scheduler, PROMPTS[0], -1, listener=Collected(lambda it: len(it.got) >= 5))
    assert (listener.wait().reason, 5 <= len(listener.got) <= 8) == ("stop", True)


def test_a_request_that_breaks_takes_nobody_along(session: Session, scheduler: Scheduler) -> None:
    """In its sampler, in the middle of a pass, and in its listener; the slots serve on."""

    def breaking(logits: np.ndarray, positions: np.ndarray) -> np.ndarray:
        if positions[0] > len(PROMPTS[0]) + 8:
            raise ZeroDivisionError("sampler")
        return logits.argmax(axis=1)

    def on_step(listener: Collected) -> bool:
        if listener.num_steps == 4:
            raise ZeroDivisionError("listener")
        return False

    want = submit(scheduler, PROMPTS[2], 20)[1].wait().got
    for _ in range(2):
        _, first = submit(scheduler, PROMPTS[0], -1, sampler=breaking)
        _, second = submit(scheduler, PROMPTS[1], -1, listener=Collected(on_step))
        others = [submit(scheduler, PROMPTS[2], 20)[1] for _ in range(3)]
        assert (first.wait().reason, str(first.error)) == ("error", "sampler")
        assert (second.wait().reason, str(second.error)) == ("error", "listener")
        assert [other.wait().got for other in others] == [want] * 3
    assert scheduler.failed is None


def test_more_than_the_queue_takes(session: Session) -> None:
    scheduler, gate = Scheduler(session, num_sequences=2, queue_limit=1), threading.Event()
    try:
        held = [
            submit(scheduler, PROMPTS[i], 2, listener=Collected(lambda _: not gate.wait(WAIT_S)))[1] for i in range(3)
        ]
        with pytest.raises(QueueFullError):
            submit(scheduler, PROMPTS[4], 2)
        gate.set()
        assert {listener.wait().reason for listener in held} == {"length"}
        assert submit(scheduler, PROMPTS[4], 2)[1].wait().reason == "length"
    finally:
        gate.set()
        scheduler.close()


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_out_of_time(session: Session) -> None:
    """While it runs, and while it waits."""
    clock = _Clock()
    scheduler = Scheduler(session, num_sequences=1, clock=clock)

    def on_step(listener: Collected) -> bool:
        clock.now += 1.0
        return False

    try:
        _, running = submit(scheduler, PROMPTS[0], -1, listener=Collected(on_step), timeout_s=10.0)
        _, waiting = submit(scheduler, PROMPTS[1], 5, timeout_s=3.0)
        _, later = submit(scheduler, PROMPTS[2], 5)
        for listener in (running, waiting):
            assert listener.wait().reason == "error"
            assert isinstance(listener.error, TimedOutError)
        assert (running.num_steps, waiting.num_steps) == (10, 0)
        assert later.wait().reason == "length"
    finally:
        scheduler.close()


def test_closing_lets_running_ones_finish_and_takes_no_more(session: Session) -> None:
    scheduler = Scheduler(session, num_sequences=1)
    _, running = submit(scheduler, PROMPTS[0], 30)
    _, waiting = submit(scheduler, PROMPTS[1], 30)
    scheduler.close(grace_s=WAIT_S)
    assert (running.wait().reason, waiting.wait().reason) == ("length", "length")
    with pytest.raises(ClosingError):
        submit(scheduler, PROMPTS[0], 1)


def test_closing_without_grace_cancels(session: Session) -> None:
    scheduler, started = Scheduler(session, num_sequences=1), threading.Event()
    _, running = submit(scheduler, PROMPTS[0], -1, listener=Collected(lambda _: started.set() is not None))
    _, waiting = submit(scheduler, PROMPTS[1], -1)
    started.wait(WAIT_S)
    scheduler.close()
    assert (running.wait().reason, waiting.wait().reason) == ("cancelled", "cancelled")


def test_what_cannot_be_served_is_refused_at_once(session: Session, scheduler: Scheduler) -> None:
    for prompt, n in (([], 5), ([1] * (session.context_size + 1), 5), ([1], -2)):
        with pytest.raises(UsageError):
            submit(scheduler, prompt, n)


def test_a_backend_of_one_sequence_says_so(exported: Callable[[str], Exported]) -> None:
    session = open_trained(exported("trained"))
    session.trunk = _OneSequence(session.trunk)  # type: ignore[assignment]
    with pytest.raises(UsageError, match="2 sequences at once: the onnxruntime backend holds one"):
        Scheduler(session, num_sequences=2)
    scheduler = Scheduler(session)
    try:
        assert scheduler.num_slots == 1
        sampler = sampler_of(session, PROMPTS[0])
        assert submit(scheduler, PROMPTS[0], 5, sampler=sampler)[1].wait().reason == "length"
    finally:
        scheduler.close()


class _OneSequence:
    """An engine that cannot make another."""

    _HIDDEN = ("another", "save_rows", "save_recurrent", "load")

    def __init__(self, engine: object) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> object:
        if name in self._HIDDEN:
            raise AttributeError(name)
        return getattr(self._engine, name)
