"""Runs of prompts: on the model itself, plainly and with drafts, and on servers."""

from __future__ import annotations

from dataclasses import dataclass, field

from runtime.agreement import HARDLY_ANY, SUSPICIOUS_ACCEPTANCE
from runtime.chat_template import ChatTemplate
from runtime.evaluation.prompts import Prompt
from runtime.sampling import SamplingParams
from runtime.session import Session, check_prompt_ids
from runtime.speculative import SpecStats
from runtime.state_probe import probed, state_faults

PLAIN, DRAFTING = "plain", "drafting"


@dataclass(frozen=True)
class Run:
    """One text. source: PLAIN, DRAFTING or a server's address. prompt: its number. ms: of the tokens, the prompt's
    time not counted where that is known (``ms_kind`` "rounds"; else "request"). rounds: verify passes; counted, or
    made out from tokens and drafts. offered, accepted_at: by place of the draft; empty where a server does not tell.
    drafted None: neither does it tell how many."""

    source: str
    temperature: float
    prompt: int
    category: str
    prompt_tokens: int
    tokens: int
    ms: float
    ms_kind: str
    rounds: int
    drafted: int | None
    accepted: int | None
    offered: tuple[int, ...] = ()
    accepted_at: tuple[int, ...] = ()
    finish_reason: str = ""
    text: str = field(default="", repr=False)


def suspicious_head(runs: list[Run]) -> str:
    """What is to be said of the model's own head when hardly any of its drafts was right; "" otherwise."""
    drafting = [run for run in runs if run.source == DRAFTING]
    drafted, accepted = (sum(getattr(run, name) or 0 for run in drafting) for name in ("drafted", "accepted"))
    return HARDLY_ANY if drafted and accepted < SUSPICIOUS_ACCEPTANCE * drafted else ""


class LocalModel:
    """A loaded model. raw: texts are continued as they are, not put into the chat template."""

    def __init__(self, session: Session, raw: bool, predict: int, seed: int) -> None:
        self.session, self._predict, self._seed = session, predict, seed
        chat = session.manifest.tokenizer.has_chat_template and not raw
        self._template = ChatTemplate(session.folder, session.tokenizer) if chat else None
        self.sources = (PLAIN, DRAFTING) if session.draft is not None else (PLAIN,)
        self.failures: list[str] = []

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids, in the model's chat template if that is wanted. Raises TooManyTokens for far too many."""
        text = self._template.render(list(prompt.messages)) if self._template else prompt.text
        ids = self.session.tokenizer.encode(text, most=self.session.context_size)
        check_prompt_ids(ids, self.session.manifest)
        return ids

    def has_room(self, ids: list[int]) -> bool:
        return 0 < len(ids) < self.session.context_size

    def warm_up(self, ids: list[int]) -> None:
        """A text of each kind that does not count."""
        for source in self.sources:
            self._generate(source, ids, SamplingParams())

    def run(self, prompt: Prompt, number: int, ids: list[int], temperature: float) -> list[Run]:
        """Plainly, then with drafts. Texts that differ are noted in ``failures``."""
        params = SamplingParams(temperature=temperature, seed=self._seed).resolved()
        runs, texts = [], []
        for source in self.sources:
            tokens, stats = self._generate(source, ids, params)
            texts.append(tokens)
            runs.append(self._run(source, prompt, number, ids, temperature, tokens, stats))
        if any(text != texts[0] for text in texts):
            self.failures.append(f"{prompt.place}, temperature {temperature:g}: the text with drafts is another")
        return runs

    def suspects(self, ids: list[int]) -> list[str]:
        """Which state a verify pass with these drafts leaves otherwise than one-token passes do."""
        rows = min(self.session.trunk.max_rows, self.session.context_size - 1)
        faults = state_faults(self.session.trunk, probed(ids[: self.session.context_size - rows], rows), rows)
        return [f"state: {fault}" for fault in faults]

    def _generate(self, source: str, ids: list[int], params: SamplingParams) -> tuple[list[int], SpecStats]:
        stats = SpecStats()
        tokens = self.session.generate(ids, params, max_tokens=self._predict, stats=stats, plain=source == PLAIN)
        return list(tokens), stats

    def _run(
        self,
        source: str,
        prompt: Prompt,
        number: int,
        ids: list[int],
        temperature: float,
        tokens: list[int],
        stats: SpecStats,
    ) -> Run:
        return Run(
            source=source,
            temperature=temperature,
            prompt=number,
            category=prompt.category,
            prompt_tokens=len(ids),
            tokens=stats.predicted_n,
            ms=stats.predicted_ms,
            ms_kind="rounds",
            rounds=stats.verify_steps,
            drafted=stats.draft_n,
            accepted=stats.draft_n_accepted,
            offered=tuple(stats.offered),
            accepted_at=tuple(stats.accepted),
            finish_reason=stats.finish_reason,
            text=self.session.tokenizer.decode(tokens),
        )
