"""What `runtime.check` measures: text with and without drafting, and the draft head against the trunk."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from runtime.sampling import SamplingParams
from runtime.session import Session, make_sampler
from runtime.speculative import SpecStats

GREEDY = SamplingParams()
# A head of the model's own accepts far more; below it something is wrong even where no floor was asked for.
SUSPICIOUS_ACCEPTANCE = 0.1
HARDLY_ANY = (
    "hardly any draft was accepted; is this head the trunk's own? suspect eh_proj (the order of its halves) and the "
    "head's norms; --against MODEL.gguf tells"
)


@dataclass(frozen=True)
class HeadAgreement:
    """The head's guess after true rows against the trunk's, at n positions. n_known: those where the trunk's token is
    one that the head can name. kl_sum in nats, over such tokens; None: logits not shown."""

    n: int
    n_top1: int
    kl_sum: float | None
    n_known: int


@dataclass(frozen=True)
class PromptResult:
    """One prompt: plain and drafting run, and the head along the plain text."""

    plain: list[int]
    drafted: list[int]
    plain_stats: SpecStats
    spec_stats: SpecStats
    head: HeadAgreement

    @property
    def first_difference(self) -> int | None:
        """Index of the first token in which the texts differ; None when they are equal."""
        if self.plain == self.drafted:
            return None
        pairs = zip(self.plain, self.drafted, strict=False)
        shorter = min(len(self.plain), len(self.drafted))
        return next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)


def sampled_prompts(session: Session, count: int, length: int, seed: int) -> list[list[int]]:
    """Texts that the model makes itself, at temperature 1, each from a random visible token on."""
    rng = np.random.default_rng(seed)
    prompts: list[list[int]] = []
    while len(prompts) < count:
        first = int(rng.integers(session.manifest.geometry.vocab_size))
        if not session.tokenizer.piece(first):
            continue
        params = SamplingParams(temperature=1.0, seed=seed + len(prompts))
        more = session.generate([first], params, max_tokens=length - 1, stats=SpecStats(), plain=True, heed_ends=False)
        prompts.append([first, *more])
    return prompts


def compare(session: Session, prompt: Sequence[int], params: SamplingParams, n_tokens: int) -> PromptResult:
    """Generate n_tokens (less where the context ends) plainly, then with drafts; end tokens are text like any other.

    The plain run comes first and must show that it drafted nothing: no draft and a trunk pass for every token.
    """
    runs: list[tuple[list[int], SpecStats]] = []
    for plain in (True, False):
        stats = SpecStats()
        tokens = session.generate(prompt, params, max_tokens=n_tokens, stats=stats, plain=plain, heed_ends=False)
        runs.append((list(tokens), stats))
    (plain_text, plain_stats), (drafted_text, spec_stats) = runs
    assert plain_stats.draft_n == 0 and plain_stats.verify_steps == max(0, plain_stats.predicted_n - 1), plain_stats
    head = head_agreement(session, prompt, plain_text)
    return PromptResult(plain_text, drafted_text, plain_stats, spec_stats, head)


def head_agreement(session: Session, prompt: Sequence[int], text: Sequence[int]) -> HeadAgreement:
    """Feed prompt and text; after each true row from the prompt's last on compare the head's guess with the trunk's."""
    trunk, head = session.trunk, session.draft
    assert head is not None
    trunk.start(make_sampler(GREEDY))
    head.start(make_sampler(GREEDY))
    before = head.zero_hidden()  # of the position before the row at hand
    given = prompt[:-1]
    chunk = min(trunk.prefill_chunk, head.prefill_chunk)
    for first in range(0, len(given), chunk):
        tokens = given[first : first + chunk]
        hidden = head.join([before, trunk.prefill(tokens).hidden])
        head.prefill(tokens, hidden[: len(tokens)])
        before = hidden[len(tokens) :]

    n_top1 = n_known = 0
    kl_sum: float | None = 0.0
    rows = [prompt[-1], *text]
    for first in range(0, len(rows), trunk.max_rows):
        tokens = rows[first : first + trunk.max_rows]
        result = trunk.verify(tokens)
        trunk_logits = _logits(trunk)
        trunk.commit(len(tokens))
        hidden = head.join([before, result.hidden])
        for i, token in enumerate(tokens):
            guess = head.draft([token], hidden[i : i + 1], 1)
            n_top1 += int(guess[0]) == result.choices[i]
            head_logits = _logits(head)
            n_known += head_logits is None or head_logits[-1, result.choices[i]] > -np.inf
            if kl_sum is None or trunk_logits is None or head_logits is None:
                kl_sum = None
            else:
                kl_sum += _kl(trunk_logits[i], head_logits[-1])
        before = hidden[len(tokens) :]
    return HeadAgreement(len(rows), n_top1, kl_sum, n_known)


def _logits(engine: object) -> np.ndarray | None:
    """A copy of the last pass's logits [R, V], of an engine that shows them."""
    logits = getattr(engine, "logits", None)
    return None if logits is None else np.array(logits)


def _kl(p_logits: np.ndarray, q_logits: np.ndarray) -> float:
    """KL(p || q) in nats of two rows of logits [V], of the tokens that q gives a chance."""
    known = q_logits > -np.inf
    p_logits, q_logits = p_logits[known], q_logits[known]
    log_p, log_q = _log_softmax(p_logits), _log_softmax(q_logits)
    return float(np.sum(np.exp(log_p) * (log_p - log_q)))


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - float(logits.max())
    return shifted - np.log(np.sum(np.exp(shifted)))


def total(parts: Iterable[SpecStats]) -> SpecStats:
    """The counters of several runs added up."""
    result = SpecStats(finish_reason="")
    for part in parts:
        for name in ("prompt_n", "prompt_ms", "predicted_n", "predicted_ms", "draft_n", "draft_n_accepted"):
            setattr(result, name, getattr(result, name) + getattr(part, name))
        result.verify_steps += part.verify_steps
        result.offered = _added(result.offered, part.offered)
        result.accepted = _added(result.accepted, part.accepted)
    return result


def _added(a: list[int], b: list[int]) -> list[int]:
    padded = max(len(a), len(b))
    return [x + y for x, y in zip(a + [0] * (padded - len(a)), b + [0] * (padded - len(b)), strict=True)]


@dataclass(frozen=True)
class Report:
    """The outcome of a check. spec_agree: share of prompts with equal texts."""

    results: list[PromptResult]
    plain: SpecStats
    drafting: SpecStats

    @classmethod
    def of(cls, results: list[PromptResult]) -> Report:
        return cls(results, total(r.plain_stats for r in results), total(r.spec_stats for r in results))

    @property
    def spec_agree(self) -> float:
        return sum(r.first_difference is None for r in self.results) / len(self.results)

    @property
    def draft_top1(self) -> float:
        return sum(r.head.n_top1 for r in self.results) / sum(r.head.n for r in self.results)

    @property
    def draft_known(self) -> float:
        """Share of the trunk's tokens that the draft head can name: 1 for a head with all rows."""
        return sum(r.head.n_known for r in self.results) / sum(r.head.n for r in self.results)

    @property
    def kl(self) -> float | None:
        """Mean KL(trunk || draft) a position in nats."""
        sums = [r.head.kl_sum for r in self.results if r.head.kl_sum is not None]
        return sum(sums) / sum(r.head.n for r in self.results) if len(sums) == len(self.results) else None

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of the rounds with a draft at that place in which it was accepted."""
        return [a / n for a, n in zip(self.drafting.accepted, self.drafting.offered, strict=True)]

    def failures(self, min_acceptance: float) -> list[str]:
        """What does not pass, a line each."""
        lines = []
        for i, r in enumerate(self.results):
            at = r.first_difference
            if at is not None:
                pair = [str(text[at]) if at < len(text) else "the end" for text in (r.plain, r.drafted)]
                lines.append(f"prompt {i}: the text differs from token {at} on: plain {pair[0]}, drafting {pair[1]}")
        if self.drafting.acceptance_rate < min_acceptance:
            lines.append(
                f"acceptance rate {self.drafting.acceptance_rate:.3f} is below {min_acceptance:g}: the draft head is"
                " broken, or not this trunk's"
            )
        return lines

    def as_dict(self) -> dict[str, Any]:
        return {
            "spec_agree": self.spec_agree,
            "draft_top1": self.draft_top1,
            "draft_known": self.draft_known,
            "kl": self.kl,
            "acceptance_rate": self.drafting.acceptance_rate,
            "acceptance_by_position": self.acceptance_by_position,
            "tokens_per_step": self.drafting.tokens_per_step,
            "first_differences": [r.first_difference for r in self.results],
            "plain_timings": self.plain.timings(),
            "timings": self.drafting.timings(),
        }
