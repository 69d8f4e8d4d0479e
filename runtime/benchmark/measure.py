"""Timed generations: every setting in turn, several times over, so that what else the machine does hits all alike."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from runtime.benchmark.expected import Expected
from runtime.controller import AdaptiveDraft, Controller, FixedDraft, Round
from runtime.sampling import SamplingParams
from runtime.session import Session
from runtime.speculative import SpecStats

PLAIN, FED, ADAPTIVE = "plain", "0, head fed", "adaptive"
_GREEDY = SamplingParams()


@dataclass(frozen=True)
class Setting:
    """How to draft. draft_n: of every round; None: the controller chooses. has_head False: without the draft head."""

    name: str
    draft_n: int | None
    has_head: bool = True


@dataclass
class SettingRuns:
    """What a setting did. tokens_per_second: by repeat; rounds: of all of them; both without the warm-up. texts: of the
    last repeat, by prompt."""

    setting: Setting
    tokens_per_second: list[float] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def settings_of(session: Session, draft_ns: Sequence[int]) -> list[Setting]:
    """Plain; and with a head: kept level but never asked, each of ``draft_ns``, and adaptive."""
    settings = [Setting(PLAIN, 0, has_head=False)]
    if session.draft is not None:
        settings += [Setting(FED, 0), *(Setting(str(n), n) for n in draft_ns if n)]
        if isinstance(session.controller, AdaptiveDraft):
            settings.append(Setting(ADAPTIVE, None))
    return settings


def measure(
    session: Session,
    settings: Sequence[Setting],
    prompts: Sequence[Sequence[int]],
    n_tokens: int,
    repeats: int,
    expected: Expected | None = None,
    done: Callable[[], None] = lambda: None,
) -> list[SettingRuns]:
    """Generate ``n_tokens`` after every prompt, ``repeats`` times after a first one that does not count.

    A text that is not the one of the first plain run (settings[0] is plain), or not as expected, is noted in
    ``failures``. The adaptive controller begins every repeat as a new session does. done: called after every text."""
    results = [SettingRuns(setting) for setting in settings]
    plain: list[list[int]] = []
    for repeat in range(repeats + 1):
        for result in results:
            _run(session, result, prompts, n_tokens, repeat > 0, expected, done)
            plain = plain or result.texts
            _compare(result, plain)
    return results


def _run(
    session: Session,
    result: SettingRuns,
    prompts: Sequence[Sequence[int]],
    n_tokens: int,
    counts: bool,
    expected: Expected | None,
    done: Callable[[], None],
) -> None:
    """One repeat of one setting."""
    setting = result.setting
    chosen = session.controller if setting.draft_n is None else FixedDraft(setting.draft_n)
    recorder = Recorder(copy.deepcopy(chosen))
    total_ms, total_tokens, rounds = 0.0, 0, []
    result.texts = []
    for prompt in prompts:
        stats = SpecStats()
        recorder.rounds = []
        text = list(
            session.generate(
                prompt, _GREEDY, max_tokens=n_tokens, stats=stats, plain=not setting.has_head, controller=recorder
            )
        )
        done()
        result.texts.append(text)
        rounds += recorder.rounds
        total_ms += stats.predicted_ms
        total_tokens += len(text) - 1  # the first one comes from the prompt pass
        failure = expected.failure(text, recorder.rounds) if expected else ""
        if failure and failure not in result.failures:
            result.failures.append(failure)
    if counts:
        result.rounds += rounds
        if total_ms and total_tokens > 0:
            result.tokens_per_second.append(1000.0 * total_tokens / total_ms)


def _compare(result: SettingRuns, plain: Sequence[list[int]]) -> None:
    for index, (text, wanted) in enumerate(zip(result.texts, plain, strict=True)):
        if text != wanted:
            place = next((i for i, pair in enumerate(zip(text, wanted, strict=False)) if pair[0] != pair[1]), len(text))
            failure = f"the text after prompt {index} is not the plain one from token {place} on"
            if failure not in result.failures:
                result.failures.append(failure)


class Recorder:
    """A controller that keeps what another one is told."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self.rounds: list[Round] = []

    def begin(self) -> None:
        self._controller.begin()

    def draft_n(self, limit: int) -> int:
        return self._controller.draft_n(limit)

    def observe(self, done: Round) -> None:
        self.rounds.append(done)
        self._controller.observe(done)

    def wants_guesses(self, n: int) -> bool:
        return self._controller.wants_guesses(n)

    def judge(self, right: Sequence[bool], n_rows: int, took_ms: float) -> None:
        self._controller.judge(right, n_rows, took_ms)


def measure_prefill(session: Session, prompt: Sequence[int], repeats: int, plain: bool) -> list[float]:
    """Tokens a second of reading ``prompt``, ``repeats`` times after a first one. plain: without the draft head."""
    speeds = []
    for _ in range(repeats + 1):
        stats = SpecStats()
        list(session.generate(prompt, _GREEDY, max_tokens=0, stats=stats, plain=plain))
        speeds.append(1000.0 * stats.prompt_n / stats.prompt_ms)
    return speeds[1:]
