"""Counters of one generation.

Counting follows llama.cpp's server: a round drafts the wanted number, clipped by what the token budget and the context
leave (a round of n drafts emits up to n + 1 tokens); accepted are the leading drafts that the trunk agrees with, the
bonus token excluded, counted whole even where an end token or the budget cuts the block. A loop that never clips
drafts more in its last rounds: sum the rounds (`Controller.observe` sees each) until both emitted as many tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from runtime.controller import Round


@dataclass
class SpecStats:
    """Counters of one generation; the loop fills them as it goes. Names as llama.cpp's timings where it has them.

    prompt_n counts prompt tokens that were processed, cache_n those whose state was kept from an earlier sequence.
    predicted_n counts emitted tokens (an end token is not emitted), the first of which comes from the prompt pass;
    predicted_ms is the time of the rounds alone, without the consumer's. offered[i] and accepted[i] count the rounds
    in which draft i + 1 was made and accepted. finish_reason: "stop" (end token), "length" (budget or context),
    "cancelled" (asked to, or the iterator was closed early).
    """

    cache_n: int = 0
    prompt_n: int = 0
    prompt_ms: float = 0.0
    predicted_n: int = 0
    predicted_ms: float = 0.0
    draft_n: int = 0
    draft_n_accepted: int = 0
    verify_steps: int = 0
    offered: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    finish_reason: str = "cancelled"

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts / drafted, bonus token excluded; 0 when nothing was drafted."""
        return self.draft_n_accepted / self.draft_n if self.draft_n else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a verify pass yielded on average: its accepted drafts and the trunk's own."""
        return 1.0 + self.draft_n_accepted / self.verify_steps if self.verify_steps else 0.0

    @property
    def predicted_per_second(self) -> float:
        return 1000.0 * self.predicted_n / self.predicted_ms if self.predicted_ms else 0.0

    def timings(self) -> dict[str, float]:
        """The counters as one flat object, llama.cpp's names first."""
        return {
            "cache_n": self.cache_n,
            "prompt_n": self.prompt_n,
            "prompt_ms": round(self.prompt_ms, 3),
            "predicted_n": self.predicted_n,
            "predicted_ms": round(self.predicted_ms, 3),
            "predicted_per_second": round(self.predicted_per_second, 3),
            "draft_n": self.draft_n,
            "draft_n_accepted": self.draft_n_accepted,
            "verify_steps": self.verify_steps,
            "acceptance_rate": round(self.acceptance_rate, 6),
            "tokens_per_step": round(self.tokens_per_step, 6),
        }

    def count(self, done: Round) -> None:
        """Add one round."""
        self.verify_steps += 1
        self.draft_n += done.draft_n
        self.draft_n_accepted += done.n_accept
        self.predicted_ms += done.draft_ms + done.verify_ms
        for counts, reached in ((self.offered, done.draft_n), (self.accepted, done.n_accept)):
            counts.extend([0] * (done.draft_n - len(counts)))
            for i in range(reached):
                counts[i] += 1
