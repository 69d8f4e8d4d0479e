"""A state machine over sequences on any backend: begun, stepped, rolled back, saved, taken up, left or broken in any
order; text and state must be those of a model that never drafts, never resumes and does nothing else meanwhile."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from runtime.controller import Round
from runtime.engine import DraftEngine, SharedDraft, SharedTrunk, TrunkEngine
from runtime.prefix_cache import PrefixCache
from runtime.sampling import ParamsSampler, SamplingParams
from runtime.speculative import Generation, SpecStats

MOST_TEXT = 12
LENGTHS = st.integers(0, 6) | st.integers(-1, MOST_TEXT)
SAMPLINGS = (SamplingParams(), SamplingParams(0.8, seed=3), SamplingParams(1.5, top_k=5, seed=4))

State = dict[str, np.ndarray]
Pair = tuple[TrunkEngine, DraftEngine | None]


@dataclass(frozen=True)
class Backend:
    """Engines to drive. pairs: of one sequence each. plain: the reference's; it may be of ``pairs`` where that is
    all a backend has. vocab: prompts are made of ids below it. ends: ids that may end a text."""

    pairs: Sequence[Pair]
    plain: Pair
    vocab: int
    ends: Sequence[int]
    shared: bool
    cache: dict[object, Reference] = field(default_factory=dict)

    @property
    def context_size(self) -> int:
        return self.plain[0].context_size


@dataclass(frozen=True)
class Reference:
    """What never drafting gives: the text, how it ends, and the state after the prompt and each of its tokens."""

    text: list[int]
    reason: str
    states: list[State]
    head: State | None


class Chosen:
    """A controller whose next number is whatever the test wants. asks: whether the head is to guess before it."""

    def __init__(self) -> None:
        self.next, self.asks = 0, False
        self.rounds: list[Round] = []

    def begin(self) -> None: ...

    def draft_n(self, limit: int) -> int:
        return max(0, min(self.next, limit))

    def observe(self, done: Round) -> None:
        self.rounds.append(done)

    def wants_guesses(self, n: int) -> bool:
        return self.asks and n > 0

    def judge(self, right: Sequence[bool], n_rows: int, took_ms: float) -> None:
        event("guessed")


class Break(Exception):
    """Raised by a sampler in the middle of a pass."""


class BreakableSampler(ParamsSampler):
    """Chooses as `ParamsSampler` does, until it is told to raise."""

    broken = False

    def __call__(self, logits: np.ndarray, positions: np.ndarray) -> np.ndarray:
        if self.broken:
            raise Break
        return super().__call__(logits, positions)


@dataclass
class Running:
    """A sequence on a pair of engines."""

    prompt: list[int]
    want: Reference
    generation: Generation
    controller: Chosen
    sampler: BreakableSampler
    got: list[int] = field(default_factory=list)


def reference(
    backend: Backend, prompt: Sequence[int], params: SamplingParams, max_tokens: int, ends: Sequence[int]
) -> Reference:
    """Plain decoding, one token a pass. Ends what runs on the reference's engines."""
    key = (tuple(prompt), params, max_tokens, tuple(ends))
    if key not in backend.cache:
        trunk, draft = backend.plain
        generation = _generation(
            trunk,
            draft,
            prompt,
            ParamsSampler(params),
            Chosen(),
            max_tokens,
            ends,
            SpecStats(),
            message_ends=backend.ends,
        )
        text, reason, states = [], None, []
        while reason is None:
            block = generation.step()
            text, reason = text + block.tokens, block.finish_reason
            if trunk.position >= len(prompt):
                states.append(trunk.state())  # type: ignore[attr-defined]
        head = None
        if isinstance(draft, SharedDraft):
            generation._head.feed(keep=1)  # no longer loop: the head takes what waits for the next draft
            head = draft.save_rows(0).data
        backend.cache[key] = Reference(text, reason, states, head)
    return backend.cache[key]


def _generation(  # type: ignore[no-untyped-def]
    trunk, draft, prompt, sampler, controller, max_tokens, ends, stats, **more
) -> Generation:
    return Generation(
        trunk,
        draft,
        prompt,
        sampler=sampler,
        controller=controller,
        max_tokens=max_tokens,
        end_token_ids=ends,
        context_size=trunk.context_size,
        stats=stats,
        **more,
    )


def assert_same(got: State, want: State, where: str) -> None:
    """To the bit, whatever the types."""
    assert got.keys() == want.keys(), where
    for name, array in want.items():
        assert got[name].shape == array.shape, f"{name} {where}"
        assert np.ascontiguousarray(got[name]).tobytes() == np.ascontiguousarray(array).tobytes(), f"{name} {where}"


class SequenceMachine(RuleBasedStateMachine):
    """``backend`` makes or gives the engines; they are used for one example after another."""

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self.backend = backend
        self.running: list[Running | None] = [None] * len(backend.pairs)
        self.known: list[list[int]] = []
        self.prefixes: PrefixCache | None = None

    @initialize(budget=st.sampled_from([1 << 30, 4_000_000, 2_000_000, 0]))
    def make_cache(self, budget: int) -> None:
        self.budget = budget
        self.prefixes = PrefixCache(budget) if self.backend.shared and budget else None

        self._begin(0, [5, 3, 5], SAMPLINGS[0], 9, (), ())
        self._finish(0, [2])

    @rule(data=st.data(), slot=st.integers(0, 2), params=st.sampled_from(SAMPLINGS), max_tokens=LENGTHS)
    def begin(self, data: st.DataObject, slot: int, params: SamplingParams, max_tokens: int) -> None:
        """In a slot that is free or not: what ran there is left as it is, as a cancelled request is."""
        context = self.backend.context_size
        prompt = data.draw(_prompts(self.known, self.backend.vocab, context), "prompt")
        ends = data.draw(st.sampled_from([(), tuple(self.backend.ends)]), "ends")
        saves = data.draw(st.lists(st.integers(1, len(prompt)), max_size=2), "save at") if self.prefixes else []
        if max_tokens < 0 and len(prompt) < context - MOST_TEXT:
            max_tokens = MOST_TEXT
        self._begin(slot % len(self.running), prompt, params, max_tokens, ends, saves)

    def _begin(
        self,
        slot: int,
        prompt: list[int],
        params: SamplingParams,
        max_tokens: int,
        ends: tuple[int, ...],
        saves: Sequence[int],
    ) -> None:
        want = reference(self.backend, prompt, params, max_tokens, ends)
        trunk, draft = self.backend.pairs[slot]
        sampler, controller, stats = BreakableSampler(params), Chosen(), SpecStats()
        generation = _generation(
            trunk,
            draft,
            prompt,
            sampler,
            controller,
            max_tokens,
            ends,
            stats,
            prefixes=self.prefixes,
            save_at=saves,
            message_ends=self.backend.ends,
        )
        self.running[slot] = Running(prompt, want, generation, controller, sampler)
        if stats.cache_n:
            event("taken up")

    @precondition(lambda self: any(self.running))
    @rule(data=st.data(), drafts=st.lists(st.integers(0, 9), min_size=1, max_size=6))
    def step(self, data: st.DataObject, drafts: list[int]) -> None:
        """A few steps of one sequence, each with its own number of drafts: also more than there is room for."""
        slot = self._some_slot(data)
        for n in drafts:
            self._step(slot, n)
            if self.running[slot] is None:
                return

    @precondition(lambda self: any(self.running))
    @rule(data=st.data(), drafts=st.lists(st.integers(0, 9), min_size=1, max_size=3))
    def finish(self, data: st.DataObject, drafts: list[int]) -> None:
        self._finish(self._some_slot(data), drafts)

    def _finish(self, slot: int, drafts: list[int]) -> None:
        numbers = itertools.cycle(drafts)
        while self.running[slot]:
            self._step(slot, next(numbers))

    @precondition(lambda self: any(self.running))
    @rule(drafts=st.integers(0, 9))
    def step_each(self, drafts: int) -> None:
        for slot, running in enumerate(self.running):
            if running:
                self._step(slot, drafts)

    @precondition(lambda self: any(self.running))
    @rule(data=st.data())
    def save(self, data: st.DataObject) -> None:
        """In the middle of a text: it goes on all the same."""
        slot = self._some_slot(data)
        self._save(slot)
        running = self.running[slot]
        assert running is not None
        self.known.append(running.prompt + running.got)

    @precondition(lambda self: any(self.running))
    @rule(data=st.data(), how=st.sampled_from(["cancelled", "saved and cancelled", "broken", "cache cleared"]))
    def leave(self, data: st.DataObject, how: str) -> None:
        """A sequence ends before its text does, or what was kept is forgotten; the engines serve the next one."""
        slot = self._some_slot(data)
        if how == "cache cleared":
            if self.prefixes:
                self.prefixes.clear()
            return
        if how == "saved and cancelled":
            self._save(slot)
        if how == "broken":
            self._break(slot, data.draw(st.integers(0, 4), "drafts"))
        self.running[slot] = None

    @invariant()
    def cache_counts_truly(self) -> None:
        if self.prefixes is None:
            return
        nodes, open_nodes = [], [self.prefixes._root]
        while open_nodes:
            open_nodes += (children := open_nodes.pop().children)
            nodes += children
        assert self.prefixes.nbytes == sum(node.nbytes for node in nodes) <= self.budget
        assert self.prefixes.num_saved == sum(node.recurrent is not None for node in nodes)

    def _some_slot(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from([i for i, each in enumerate(self.running) if each]), "slot")

    def _step(self, slot: int, drafts: int) -> None:
        running, trunk = self.running[slot], self.backend.pairs[slot][0]
        assert running is not None
        running.controller.next, running.controller.asks = drafts, drafts % 3 == 0
        block = running.generation.step()
        running.got += block.tokens
        want = running.want
        assert running.got == want.text[: len(running.got)], (running.got, want.text)
        if block.finish_reason:
            assert (running.got, block.finish_reason) == (want.text, want.reason)
        if trunk.position >= len(running.prompt):
            self._check_state(slot)
        if block.finish_reason:
            self._save(slot)
            self.known.append(running.prompt + running.got)
            self.running[slot] = None

    def _break(self, slot: int, drafts: int) -> None:
        """The sampler raises in the middle of a pass, where it is asked at all."""
        running, (trunk, _) = self.running[slot], self.backend.pairs[slot]
        assert running is not None
        running.sampler.broken, running.controller.next = True, drafts
        if getattr(trunk, "chooses_on_device", False):
            return
        try:
            running.generation.step()
        except Break:
            return
        raise AssertionError("a step that chose no token")

    def _check_state(self, slot: int) -> None:
        running, trunk = self.running[slot], self.backend.pairs[slot][0]
        assert running is not None
        after = trunk.position - len(running.prompt)
        state = trunk.state()  # type: ignore[attr-defined]
        assert_same(state, running.want.states[after], f"after {after} tokens of text")

    def _save(self, slot: int) -> None:
        """And compare what the head has taken, which no text shows. Where only prompts are kept, the head takes its
        rows in passes of any size, which round differently."""
        running, (trunk, draft) = self.running[slot], self.backend.pairs[slot]
        assert running is not None
        running.generation.save()
        head = running.want.head
        anywhere = isinstance(trunk, SharedTrunk) and trunk.resumes_anywhere
        if self.prefixes is None or head is None or not anywhere or trunk.position < len(running.prompt):
            return
        assert isinstance(draft, SharedDraft) and draft.position == trunk.position
        rows = draft.save_rows(0).data
        level = {name: array[:, :, : draft.position] for name, array in head.items()}
        assert_same(rows, level, "of the head")


@st.composite
def _prompts(draw: st.DrawFn, known: list[list[int]], vocab: int, context: int) -> list[int]:
    """New ones, short or about to fill the context, and those that begin like an earlier text."""
    tokens = st.integers(0, min(vocab, 7) - 1).map(lambda i: i * (vocab // 7) % vocab)
    tail = draw(st.lists(tokens, min_size=1, max_size=6))
    kind = draw(st.sampled_from(["known", "known", "known", "short", "long"]))
    if kind == "known" and known:
        earlier = draw(st.sampled_from(known))
        cut = draw(st.sampled_from([0, 0, 1]) | st.integers(0, len(earlier) - 1))  # mostly where its state was kept
        return [*earlier[: max(1, len(earlier) - cut)], *draw(st.sampled_from([[], tail]))][:context]
    if kind == "long":
        length = context - draw(st.integers(0, MOST_TEXT))
        return (tail * -(-length // len(tail)))[:length]
    return tail
