"""Several sequences over one pair of engines: a thread that gives each a step in turn.

A step is a chunk of a prompt or one round, so nobody waits longer than the others' single steps. Requests that find no
free slot queue, up to a limit. A request that fails, is cancelled, or runs out of time frees its slot before the next
step; the others never notice.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engines.errors import DeviceLostError, EngineError, NextnError, ResourceError, UsageError
from runtime.controller import Controller, FixedDraft
from runtime.engine import DraftEngine, Sampler, SharedDraft, SharedTrunk, TrunkEngine
from runtime.sequence_sampler import SequenceSampler
from runtime.session import Session
from runtime.spec_stats import SpecStats
from runtime.speculative import Generation, PrefixStore, token_budget

QUEUE_DEFAULT = 32

# How often sequences that wait for their grammar are looked at while no other has anything to do.
_LOOK_S = 0.002
_log = logging.getLogger("runtime.scheduler")


class QueueFullError(ResourceError):
    """More requests wait than the queue takes."""


class ClosingError(ResourceError):
    """The scheduler takes no more requests."""


class TimedOutError(ResourceError):
    """A request was not done within its time."""


class Listener(Protocol):
    """Hears about a request, in the scheduler's thread: it must be quick. What it raises ends the request."""

    def tokens(self, tokens: list[int], num_drafted: int) -> int | None:
        """Tokens that were emitted, none for a step that only read the prompt; the first ``num_drafted`` are accepted
        drafts. A number: the text is to end after so many of them."""

    def ended(self, reason: str, error: Exception | None) -> None:
        """The last call. reason: "stop", "length", "cancelled" or "error", then with the error."""


@dataclass(eq=False)
class Job:
    """A request. drafting False: no drafts (the head is kept level all the same, so that the state can be used by
    others). save_at: lengths of the prompt whose state is kept. timeout_s: from submission to the last token."""

    prompt: list[int]
    sampler: Sampler
    max_tokens: int
    listener: Listener
    drafting: bool = True
    save_at: Sequence[int] = ()
    timeout_s: float | None = None
    stats: SpecStats = field(default_factory=SpecStats)
    deadline: float | None = None
    cancelled: bool = False


@dataclass
class _Slot:
    """Engines of one sequence, and what they are at."""

    trunk: TrunkEngine
    draft: DraftEngine | None
    controller: Controller
    job: Job | None = None
    generation: Generation | None = None


class Scheduler:
    """Owns a session's engines from now on. `submit` and `cancel` may be called by any thread."""

    def __init__(
        self,
        session: Session,
        *,
        num_sequences: int = 0,
        queue_limit: int = QUEUE_DEFAULT,
        prefixes: PrefixStore | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """num_sequences: resident at once; 0: as many as the session was opened for. prefixes: needs engines whose
        state can be saved. Raises UsageError, ResourceError."""
        self._session, self._prefixes, self._clock = session, prefixes, clock
        self._slots = _make_slots(session, num_sequences)
        self._queue_limit = queue_limit
        self._queue: deque[Job] = deque()
        self._lock = threading.Condition()
        self._closing = False
        self._failed: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)
        self._thread.start()

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    @property
    def num_active(self) -> int:
        return sum(slot.job is not None for slot in self._slots)

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def failed(self) -> Exception | None:
        """What ended the thread, if something did: nothing is served then."""
        return self._failed

    def submit(self, job: Job) -> None:
        """Queue a request. Raises UsageError for what cannot be served, QueueFullError, ClosingError, EngineError."""
        token_budget(len(job.prompt), job.max_tokens, self._session.context_size)
        with self._lock:
            if self._failed is not None:
                raise EngineError(f"the scheduler has failed ({self._failed}); start the server again")
            if self._closing:
                raise ClosingError("shutting down: no more requests are taken")
            if len(self._queue) >= self._queue_limit + len(self._slots) - self.num_active:
                raise QueueFullError(f"{len(self._queue)} requests are waiting already; try again later")
            job.deadline = None if job.timeout_s is None else self._clock() + job.timeout_s
            self._queue.append(job)
            self._lock.notify()

    def cancel(self, job: Job) -> None:
        """End a request before its next step; one that has ended is left alone."""
        with self._lock:
            job.cancelled = True
            self._lock.notify()

    def close(self, grace_s: float = 0.0) -> None:
        """Take no more requests, give the others ``grace_s`` seconds, cancel what is left, end the thread."""
        until = self._clock() + grace_s
        with self._lock:
            self._closing = True
            self._lock.notify()
        while self._thread.is_alive() and self._clock() < until:
            self._thread.join(0.05)
        with self._lock:
            for job in [*self._queue, *(slot.job for slot in self._slots if slot.job)]:
                job.cancelled = True
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._admit():
                stepped = [self._step(slot, slot.job) for slot in self._slots if slot.job is not None]
                if stepped and not any(stepped):
                    with self._lock:
                        self._lock.wait(_LOOK_S)
        except Exception as error:  # a bug here: nobody may wait for ever
            _log.exception("the scheduler failed")
            with self._lock:
                self._failed = error
            for job in [*self._queue, *(slot.job for slot in self._slots if slot.job)]:
                _end(job, "error", EngineError(f"the scheduler has failed ({error}); start the server again"))

    def _admit(self) -> bool:
        """Wait for work; drop what need not wait any longer, fill free slots. False: closed, and nothing is left."""
        with self._lock:
            while not self._queue and not self.num_active:
                if self._closing:
                    return False
                self._lock.wait()
            waiting, self._queue = self._queue, deque()
            dropped: list[Job] = []
            kept: deque[Job] = deque()
            for job in waiting:
                (dropped if self._over(job) else kept).append(job)
            free = [slot for slot in self._slots if slot.job is None]
            begun = [(slot, kept.popleft()) for slot in free[: len(kept)]]
            for slot, job in begun:
                slot.job = job
            self._queue = kept
        for job in dropped:
            _end(job, *self._why_over(job))
        for slot, job in begun:
            self._begin(slot, job)
        return True

    def _over(self, job: Job) -> bool:
        return job.cancelled or (job.deadline is not None and self._clock() >= job.deadline)

    def _why_over(self, job: Job) -> tuple[str, Exception | None]:
        if job.cancelled:
            return "cancelled", None
        return "error", TimedOutError(f"the request was not done within {job.timeout_s:g} seconds")

    def _begin(self, slot: _Slot, job: Job) -> None:
        sampler = job.sampler
        try:
            slot.generation = Generation(
                slot.trunk,
                slot.draft,
                job.prompt,
                sampler=sampler,
                draft_sampler=sampler.draft if isinstance(sampler, SequenceSampler) else sampler,
                controller=slot.controller if job.drafting else FixedDraft(0),
                max_tokens=job.max_tokens,
                end_token_ids=self._session.tokenizer.end_token_ids,
                context_size=self._session.context_size,
                stats=job.stats,
                prefixes=self._prefixes,
                save_at=job.save_at,
                message_ends=self._session.tokenizer.end_token_ids,
                # A begun round may be ended for another sequence's sake, which would then wait for this one's grammar.
                overlap=not (isinstance(sampler, SequenceSampler) and sampler.waits),
            )
        except DeviceLostError:  # nobody's alone
            raise
        except Exception as error:  # whatever it is, it is this request's alone
            self._finish(slot, job, "error", error)

    def _step(self, slot: _Slot, job: Job) -> bool:
        """False: nothing done, for the sampler is not ready. Others do not wait for it."""
        if self._over(job):
            self._finish(slot, job, *self._why_over(job))
            return True
        assert slot.generation is not None
        try:
            if isinstance(job.sampler, SequenceSampler) and not job.sampler.prepare(slot.generation.length):
                return False
            block = slot.generation.step()
            kept = job.listener.tokens(block.tokens, block.num_drafted)
            job.stats.predicted_n += len(block.tokens) if kept is None else kept
            reason = block.finish_reason if kept is None else "stop"
            if reason is None:
                return True
            slot.generation.save()
        except DeviceLostError:
            raise
        except Exception as error:  # whatever it is, it is this request's alone
            self._finish(slot, job, "error", error)
            return True
        self._finish(slot, job, reason, None)
        return True

    def _finish(self, slot: _Slot, job: Job, reason: str, error: Exception | None) -> None:
        """Free the slot; the next sequence in it starts from nothing."""
        slot.generation = None
        with self._lock:
            slot.job = None
        _end(job, reason, error)


def _end(job: Job, reason: str, error: Exception | None) -> None:
    job.stats.finish_reason = reason
    if isinstance(job.sampler, SequenceSampler):
        job.sampler.close()
    if error is not None and not isinstance(error, NextnError):
        _log.error("a request failed", exc_info=error)
    try:
        job.listener.ended(reason, error)
    except Exception:  # its client is gone
        _log.exception("a request could not be told of its end")


def _make_slots(session: Session, wanted: int) -> list[_Slot]:
    trunk, draft = session.trunk, session.draft
    shared = isinstance(trunk, SharedTrunk) and (draft is None or isinstance(draft, SharedDraft))
    num = wanted or (trunk.num_sequences if isinstance(trunk, SharedTrunk) and shared else 1)
    if num > 1 and not shared:
        raise UsageError(f"{num} sequences at once: the {session.backend} backend holds one")
    slots = [_Slot(trunk, draft, copy.deepcopy(session.controller))]
    while len(slots) < num:
        assert isinstance(trunk, SharedTrunk)
        more = trunk.another()
        head = draft.another(more) if isinstance(draft, SharedDraft) else None
        slots.append(_Slot(more, head, copy.deepcopy(session.controller)))
    return slots
