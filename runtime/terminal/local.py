"""A model in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from engines.errors import UsageError
from runtime.chat_template import ChatTemplate, chat_prompt
from runtime.controller import FixedDraft
from runtime.engine import SharedTrunk
from runtime.prefix_cache import PrefixCache
from runtime.server.reply_parts import Parts, ReplyParts
from runtime.session import Session, make_sampler
from runtime.spec_stats import SpecStats
from runtime.speculative import MAX_TOKENS_UNLIMITED, Generation
from runtime.terminal.model import Delta, Reply, Settings
from runtime.tokenizer import StreamDecoder


class LocalModel:
    """See `runtime.terminal.model.ChatModel`. The state of earlier turns is kept in at most ``cache_bytes``."""

    def __init__(self, session: Session, cache_bytes: int) -> None:
        """Raises UsageError when the model has no chat template."""
        self._session = session
        self._template = ChatTemplate(session.folder, session.tokenizer)
        can_save = isinstance(session.trunk, SharedTrunk)
        self._prefixes = PrefixCache(cache_bytes) if can_save and cache_bytes else None
        self.name = session.manifest.model_name

    def reply(
        self, messages: Sequence[Mapping[str, str]], settings: Settings, reply: Reply, stopped: Callable[[], bool]
    ) -> Iterator[Delta]:
        session, stats = self._session, SpecStats()
        if settings.spec and session.draft is None:
            raise UsageError(f"{self.name} runs without a draft head: /spec auto takes that back")
        options = {} if settings.thinking is None else {"enable_thinking": settings.thinking}
        prompt = chat_prompt(self._template, session.tokenizer, messages, session.context_size, **options)
        generation = Generation(
            session.trunk,
            session.draft,
            prompt.ids,
            sampler=make_sampler(settings.sampling().resolved()),
            # Without drafts the head is kept level all the same: the next turn may draft.
            controller=FixedDraft(0) if settings.spec is False else session.controller,
            max_tokens=MAX_TOKENS_UNLIMITED if settings.max_tokens is None else settings.max_tokens,
            end_token_ids=session.tokenizer.end_token_ids,
            context_size=session.context_size,
            stats=stats,
            prefixes=self._prefixes,
            save_at=[prompt.stable_length] if prompt.stable_length else [],
            message_ends=session.tokenizer.end_token_ids,
        )
        try:
            yield from self._run(generation, ReplyParts(prompt.ends_in_think, None), stats, stopped)
        except KeyboardInterrupt:  # it may have come in the middle of anything
            if self._prefixes is not None:
                self._prefixes.clear()
            raise
        reply.finish_reason, reply.timings = stats.finish_reason, stats.timings()

    def _run(
        self, generation: Generation, parts: ReplyParts, stats: SpecStats, stopped: Callable[[], bool]
    ) -> Iterator[Delta]:
        decoder = StreamDecoder(self._session.tokenizer)
        while not stopped():
            block = generation.step()
            stats.predicted_n += len(block.tokens)
            yield from _deltas(parts.push("".join(map(decoder.push, block.tokens))))
            if block.finish_reason:
                stats.finish_reason = block.finish_reason
                break
        generation.save()
        yield from _deltas(parts.push(decoder.finish()))
        yield from _deltas(parts.finish())


def _deltas(parts: Parts) -> Iterator[Delta]:
    if parts.reasoning or parts.content:
        yield Delta(parts.reasoning, parts.content)
