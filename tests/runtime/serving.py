"""Requests to a scheduler, and what came of them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from runtime.engine import Sampler
from runtime.grammar import GrammarCompiler
from runtime.sampling import ParamsSampler, SamplingParams
from runtime.scheduler import Job, Scheduler
from runtime.sequence_sampler import Adjustments, make_sampler
from runtime.session import Session, SpecOptions, open_session
from runtime.speculative import SpecStats

if TYPE_CHECKING:
    from tests.exported import Exported

WAIT_S = 60.0  # nothing here takes as long: a hang fails instead of hanging


class Collected:
    """A listener that keeps everything. ``on_step`` hears of each step; where it returns True the text ends."""

    def __init__(self, on_step: Callable[[Collected], bool] = lambda _: False) -> None:
        self.got: list[int] = []
        self.num_steps = self.num_drafted = 0
        self.reason = ""
        self.error: Exception | None = None
        self._on_step = on_step
        self._done = threading.Event()

    def tokens(self, tokens: list[int], num_drafted: int) -> int | None:
        self.got += tokens
        self.num_drafted += num_drafted
        self.num_steps += 1
        return len(tokens) if self._on_step(self) else None

    def ended(self, reason: str, error: Exception | None) -> None:
        assert not self._done.is_set(), "told twice"
        self.reason, self.error = reason, error
        self._done.set()

    def wait(self) -> Collected:
        assert self._done.wait(WAIT_S), "never ended"
        return self


def open_trained(
    model: Exported, draft_n_max: int = 3, spec_type: str = "draft-mtp", context_size: int | None = None
) -> Session:
    spec = SpecOptions(spec_type, draft_n_max)
    return open_session(model.folder, context_size=context_size, spec=spec, threads=1, sequences=0)


def grammar_compiler(session: Session) -> contextlib.closing[GrammarCompiler]:
    """As the server has one."""
    ends = sorted(session.tokenizer.end_token_ids)
    return contextlib.closing(GrammarCompiler(session.folder, session.manifest.geometry.vocab_size, ends))


def sampler_of(
    session: Session,
    prompt: Sequence[int],
    params: SamplingParams | None = None,
    adjustments: Adjustments | None = None,
) -> Sampler:
    geometry = session.manifest.geometry
    ends = session.tokenizer.end_token_ids
    return make_sampler(params or SamplingParams(), adjustments or Adjustments(), prompt, geometry.vocab_size, ends)


def solo(session: Session, prompt: Sequence[int], params: SamplingParams, n: int, plain: bool = True) -> list[int]:
    """The text of one sequence alone."""
    return list(session.generate(prompt, params, max_tokens=n, stats=SpecStats(), plain=plain))


def submit(
    scheduler: Scheduler,
    prompt: Sequence[int],
    n: int,
    *,
    sampler: Sampler | None = None,
    listener: Collected | None = None,
    **options: object,
) -> tuple[Job, Collected]:
    listener = listener or Collected()
    sampler = sampler or ParamsSampler(SamplingParams())
    job = Job(list(prompt), sampler, n, listener, **options)  # type: ignore[arg-type]
    scheduler.submit(job)
    return job, listener
