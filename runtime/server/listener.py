"""From the tokens of a sequence, in the scheduler's thread, to what a reply shows, in the event loop's."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from runtime.sequence_sampler import SequenceSampler, TokenLogprob
from runtime.server.partial import StopStrings
from runtime.server.reply_parts import Parts, ReplyParts
from runtime.tokenizer import StreamDecoder, Tokenizer


@dataclass(frozen=True)
class Origin:
    """Text that a token brought: of the thinking or of the answer. drafted: by an accepted draft."""

    reasoning: bool
    text: str
    drafted: bool


@dataclass
class Piece:
    """What one step added. start: of each log-probability's token in the text, in characters. origins: the text again,
    token by token; text that was held back came with the token that showed what it was."""

    parts: Parts = field(default_factory=Parts)
    origins: list[Origin] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    num_tokens: int = 0  # of the reply so far

    def __bool__(self) -> bool:
        return bool(self.parts or self.logprobs)


@dataclass(frozen=True)
class End:
    """The last of a reply. reason: "stop", "length", "cancelled" or "error", then with the error."""

    reason: str
    error: Exception | None


class ReplyListener:
    """See `runtime.scheduler.Listener`. `events` yields a `Piece` for every step that shows something, then an `End`.

    reply: None for text that is not taken apart. calls_max: the text ends after so many tool calls, 0: any number."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        *,
        reply: ReplyParts | None = None,
        calls_max: int = 0,
        sampler: SequenceSampler | None = None,
        on_end: Callable[[ReplyListener, str], None] = lambda listener, reason: None,
    ) -> None:
        """sampler: whose log-probabilities are shown. Make it in the event loop that reads the events."""
        self._loop = asyncio.get_running_loop()
        self.events: asyncio.Queue[Piece | End] = asyncio.Queue()
        self._decoder, self._stops = StreamDecoder(tokenizer), StopStrings(stops)
        self._reply, self._calls_max, self._sampler, self._on_end = reply, calls_max, sampler, on_end
        self._num_tokens = self._num_decoded = self._num_shown = 0  # tokens; characters
        self._waiting: deque[tuple[int, TokenLogprob]] = deque()  # until their text is shown
        self.began = time.perf_counter()
        self.first_token_s: float | None = None
        self.num_calls = 0
        self._drafted = False  # the last token

    def tokens(self, tokens: list[int], num_drafted: int) -> int | None:
        piece, kept = Piece(), None
        if tokens and self.first_token_s is None:
            self.first_token_s = time.perf_counter() - self.began
        for i, token in enumerate(tokens):
            if self._sampler is not None:
                self._waiting.append((self._num_decoded, self._sampler.logprobs.pop(self._num_tokens)))
            self._num_tokens += 1
            self._drafted = i < num_drafted
            text = self._decoder.push(token)
            self._num_decoded += len(text)
            self._show(self._stops.push(text), piece)
            if self._stops.found or (self._calls_max and self.num_calls >= self._calls_max):
                kept = i + 1
                break
        self._release(piece, final=False)
        piece.num_tokens = self._num_tokens
        if piece:
            self._post(piece)
        return kept

    def ended(self, reason: str, error: Exception | None) -> None:
        piece = Piece()
        if reason in ("stop", "length"):
            rest = "" if self._stops.found else self._stops.push(self._decoder.finish()) + self._stops.finish()
            self._show(rest, piece)
            if self._reply is not None:
                self._add(self._reply.finish(), piece)
            self._release(piece, final=not self._stops.found)
        self._on_end(self, reason)
        piece.num_tokens = self._num_tokens
        if piece:
            self._post(piece)
        self._post(End(reason, error))

    def _show(self, text: str, piece: Piece) -> None:
        self._num_shown += len(text)
        self._add(Parts(content=text) if self._reply is None else self._reply.push(text), piece)

    def _add(self, parts: Parts, piece: Piece) -> None:
        piece.parts.reasoning += parts.reasoning
        piece.parts.content += parts.content
        for reasoning, text in ((True, parts.reasoning), (False, parts.content)):
            if text:
                piece.origins.append(Origin(reasoning, text, self._drafted))
        for call in parts.calls:
            if not self._calls_max or self.num_calls < self._calls_max:
                piece.parts.calls.append(call)
                self.num_calls += 1

    def _release(self, piece: Piece, final: bool) -> None:
        """Log-probabilities of tokens whose text is shown: not of what a stop string takes away."""
        while self._waiting and (final or self._waiting[0][0] < self._num_shown):
            start, logprob = self._waiting.popleft()
            piece.starts.append(start)
            piece.logprobs.append(logprob)

    def _post(self, event: Piece | End) -> None:
        self._loop.call_soon_threadsafe(self.events.put_nowait, event)
