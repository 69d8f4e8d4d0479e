"""A loaded model as the routes see it: prompts in, jobs to the scheduler."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anyio import CapacityLimiter

from runtime.chat_template import ChatTemplate
from runtime.engine import Sampler, SharedTrunk
from runtime.grammar import GrammarCompiler
from runtime.prefix_cache import PrefixCache
from runtime.sampling import SEED_MAX, SamplingParams
from runtime.scheduler import QUEUE_DEFAULT, Job, Scheduler
from runtime.sequence_sampler import Adjustments, SequenceSampler, make_sampler
from runtime.server.errors import ApiError, bad_field, too_long
from runtime.server.listener import ReplyListener
from runtime.server.metrics import Metrics
from runtime.server.prompt import ChatPrompts
from runtime.server.schema import Common
from runtime.server.tool_calls import BEGIN, END
from runtime.session import Session, token_id

# The state of a prompt is kept at its end and at most so many places before, this far apart or farther.
_SAVES_PER_PROMPT, _SAVE_EVERY = 8, 512
_GRAMMARS_AT_ONCE = 8  # that are being compiled
_log = logging.getLogger("runtime.server")


@dataclass(frozen=True)
class ServiceOptions:
    """defaults: of sampling fields that a request leaves out. alias: the model's name; "": that of its file."""

    defaults: SamplingParams = dataclasses.field(default_factory=lambda: SamplingParams(temperature=1.0, seed=-1))
    alias: str = ""
    num_sequences: int = 0
    queue_limit: int = QUEUE_DEFAULT
    timeout_s: float | None = None
    cache_bytes: int = 1 << 30
    log_prompts: bool = False


class Service:
    """Owns the session's engines and a scheduler over them until `close`."""

    def __init__(self, session: Session, options: ServiceOptions) -> None:
        self.session, self.options = session, options
        self.tokenizer = session.tokenizer
        self.model = options.alias or session.manifest.model_name
        self.fingerprint = f"fp_{session.manifest.content_key[:12]}"
        self.vocab_size = session.manifest.geometry.vocab_size
        has_template = session.manifest.tokenizer.has_chat_template
        self._prompts = (
            ChatPrompts(ChatTemplate(session.folder, session.tokenizer), session.tokenizer, session.context_size)
            if has_template
            else None
        )
        self.grammars = GrammarCompiler(session.folder, self.vocab_size, sorted(self.tokenizer.end_token_ids))
        self.grammar_threads = CapacityLimiter(_GRAMMARS_AT_ONCE)
        can_save = isinstance(session.trunk, SharedTrunk)
        self.prefixes = PrefixCache(options.cache_bytes) if can_save and options.cache_bytes else None
        self.scheduler = Scheduler(
            session, num_sequences=options.num_sequences, queue_limit=options.queue_limit, prefixes=self.prefixes
        )
        self.metrics = Metrics(self.scheduler, self.prefixes)
        self.tag_ids = {tag: self._single_token(tag) for tag in (BEGIN, END)}
        self.end_think_id = self._single_token("</think>")

    def close(self, grace_s: float = 0.0) -> None:
        self.scheduler.close(grace_s)
        self.grammars.close()

    @property
    def prompts(self) -> ChatPrompts:
        if self._prompts is None:
            raise ApiError(
                400,
                f"{self.model} has no chat template; use /v1/completions",
                param="messages",
                code="no_chat_template",
            )
        return self._prompts

    def check_model(self, name: str | None) -> None:
        if name not in (None, "", self.model):
            raise ApiError(
                404, f"model: there is no {name!r} here, only {self.model!r}", param="model", code="model_not_found"
            )

    def params(self, request: Common) -> SamplingParams:
        """The request's sampling, with the server's defaults where it says nothing."""
        given = {name: getattr(request, name) for name in ("temperature", "top_p", "top_k", "min_p", "seed")}
        if given["top_k"] == -1:  # "off", as others spell it
            given["top_k"] = 0
        if given["seed"] is not None and given["seed"] < -1:
            given["seed"] &= SEED_MAX
        return dataclasses.replace(
            self.options.defaults, **{name: value for name, value in given.items() if value is not None}
        ).resolved()

    def adjustments(self, request: Common, **more: Any) -> Adjustments:
        """The request's penalties and biases, and ``more`` of `Adjustments`. Raises ApiError naming the field."""
        bias: dict[int, float] = {}
        for key, value in (request.logit_bias or {}).items():
            token = token_id(key)
            if token is None or token >= self.vocab_size:
                raise bad_field("logit_bias", f"{key[:40]!r} is no token; ids are 0 to {self.vocab_size - 1}")
            bias[token] = float(value)
        names = ("repetition_penalty", "frequency_penalty", "presence_penalty")
        given = {name: getattr(request, name) for name in names if getattr(request, name) is not None}
        return Adjustments(**given, logit_bias=bias, **more)

    def check_length(self, prompt: Sequence[int], field: str) -> None:
        """Raises ApiError naming ``field``, that of the prompt."""
        if not prompt:
            raise bad_field(field, "it holds no token")
        if len(prompt) > self.session.context_size:
            held = f"the prompt has {len(prompt)} tokens, the context holds {self.session.context_size}"
            raise too_long(field, held)

    def sampler(self, request: Common, prompt: Sequence[int], adjustments: Adjustments) -> Sampler:
        ends = self.tokenizer.end_token_ids
        return make_sampler(self.params(request), adjustments, prompt, self.vocab_size, ends)

    def submit(
        self,
        request: Common,
        prompt: list[int],
        sampler: Sampler,
        max_tokens: int | None,
        make_listener: Callable[[Callable[[ReplyListener, str], None], SequenceSampler | None], ReplyListener],
        stable_length: int = 0,
    ) -> tuple[Job, ReplyListener]:
        """Queue a generation. make_listener gets what to call at the end, and the sampler whose log-probabilities to
        show. Raises ApiError, QueueFullError, ClosingError."""
        with contextlib.ExitStack() as undo:
            if isinstance(sampler, SequenceSampler):
                undo.callback(sampler.close)
            if request.spec in (True, "on") and self.session.draft is None:
                raise bad_field("spec", f"{self.model} runs without a draft head")
            reports = isinstance(sampler, SequenceSampler) and sampler.reports

            def on_end(listener: ReplyListener, reason: str) -> None:
                self._ended(job, reason, listener.first_token_s)

            listener = make_listener(on_end, sampler if isinstance(sampler, SequenceSampler) and reports else None)
            job = Job(
                prompt,
                sampler,
                -1 if max_tokens is None else max_tokens,
                listener,
                drafting=request.spec not in (False, "off"),
                save_at=self._save_at(len(prompt), stable_length),
                timeout_s=self.options.timeout_s,
            )
            if self.options.log_prompts:
                _log.info("prompt: %r", self.tokenizer.decode(prompt, special=True))
            self.scheduler.submit(job)
            undo.pop_all()
            return job, listener

    def _save_at(self, length: int, stable_length: int) -> list[int]:
        step = max(_SAVE_EVERY, -(-length // (_SAVES_PER_PROMPT * 256)) * 256)
        return [*range(step, length, step), *([stable_length] if 0 < stable_length <= length else [])]

    def _ended(self, job: Job, reason: str, first_token_s: float | None) -> None:
        self.metrics.ended(job.stats, reason, first_token_s)
        stats = job.stats
        _log.info(
            "%s: %d prompt tokens (%d kept) in %.0f ms, %d tokens in %.0f ms, %d of %d drafts accepted",
            *(reason, stats.prompt_n, stats.cache_n, stats.prompt_ms, stats.predicted_n, stats.predicted_ms),
            *(stats.draft_n_accepted, stats.draft_n),
        )

    def _single_token(self, text: str) -> int | None:
        ids = self.tokenizer.encode(text, bos=False)
        return ids[0] if len(ids) == 1 else None


def usage(job: Job) -> Mapping[str, Any]:
    stats = job.stats
    return {
        "prompt_tokens": len(job.prompt),
        "completion_tokens": stats.predicted_n,
        "total_tokens": len(job.prompt) + stats.predicted_n,
        "prompt_tokens_details": {"cached_tokens": stats.cache_n},
    }
