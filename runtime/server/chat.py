"""/v1/chat/completions."""

from __future__ import annotations

import dataclasses
import time
import uuid
from dataclasses import dataclass
from typing import Any

from anyio import to_thread
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from engines.errors import UsageError
from runtime.chat_template import ChatPrompt
from runtime.engine import Sampler
from runtime.grammar import Grammar
from runtime.scheduler import Job
from runtime.sequence_sampler import TokenLogprob
from runtime.server.chat_grammar import chat_grammar, offered_tools, wants_grammar
from runtime.server.errors import bad_field, too_long
from runtime.server.http import EventStream, Json, collect
from runtime.server.listener import End, Origin, Piece, ReplyListener
from runtime.server.reply_parts import ReplyParts
from runtime.server.schema import ChatRequest, check_stream_options, check_text
from runtime.server.service import Service, usage
from runtime.server.stops import stop_strings
from runtime.server.tool_calls import ToolCall, ToolCallReader
from runtime.tokenizer import Tokenizer, TooManyTokens


@dataclass(frozen=True)
class _Prepared:
    prompt: ChatPrompt
    tools: list[dict[str, Any]]
    sampler: Sampler


async def chat_completion(service: Service, body: ChatRequest, request: Request) -> Response:
    """Serve a request, whole or as a stream. Raises ApiError and what the scheduler raises."""
    service.check_model(body.model)
    tools, prompt = await run_in_threadpool(_prompt, service, body)
    grammar = None
    if wants_grammar(body):  # in threads of their own: those of prompts are not to wait for slow grammars
        grammar = await to_thread.run_sync(chat_grammar, service, body, tools, limiter=service.grammar_threads)
    prepared = await run_in_threadpool(_prepare, service, body, tools, prompt, grammar)
    calls_max = 1 if body.parallel_tool_calls is False else 0

    def listen(on_end: Any, reporting: Any) -> ReplyListener:
        reader = ToolCallReader(prepared.tools) if prepared.tools else None
        reply = ReplyParts(prepared.prompt.ends_in_think, reader)
        stops = stop_strings(body)
        return ReplyListener(
            service.tokenizer, stops, reply=reply, calls_max=calls_max, sampler=reporting, on_end=on_end
        )

    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    job, listener = service.submit(
        body, prepared.prompt.ids, prepared.sampler, limit, listen, prepared.prompt.stable_length
    )
    writer = _Writer(service, body, job, listener)

    def cancel() -> None:
        service.scheduler.cancel(job)

    if body.stream:
        return EventStream(listener, writer.frames, cancel)
    pieces = await collect(request, listener, cancel)
    return Json(writer.whole(pieces))


def _prompt(service: Service, body: ChatRequest) -> tuple[list[dict[str, Any]], ChatPrompt]:
    """The tools that are offered, and the prompt."""
    check_text(body)
    check_stream_options(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_field("top_logprobs", "needs logprobs to be true")
    tools = offered_tools(body)
    try:
        prompt = service.prompts.prompt(body, tools)
    except TooManyTokens as error:
        raise too_long("messages", str(error)) from error
    except UsageError as error:  # of the template
        raise bad_field("messages", str(error)) from error
    service.check_length(prompt.ids, "messages")
    if wants_grammar(body) and prompt.ends_in_think and service.end_think_id is None:
        raise bad_field("response_format", "not with thinking: this model's vocabulary has no token for </think>")
    return tools, prompt


def _prepare(
    service: Service, body: ChatRequest, tools: list[dict[str, Any]], prompt: ChatPrompt, grammar: Grammar | None
) -> _Prepared:
    adjustments = service.adjustments(
        body,
        grammar=grammar,
        grammar_after=service.end_think_id if grammar is not None and prompt.ends_in_think else None,
        top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    return _Prepared(prompt, tools, service.sampler(body, prompt.ids, adjustments))


class _Writer:
    """Puts a reply into OpenAI's objects."""

    def __init__(self, service: Service, body: ChatRequest, job: Job, listener: ReplyListener) -> None:
        self._tokenizer, self._job, self._listener = service.tokenizer, job, listener
        self._with_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._logprobs = bool(body.logprobs)
        self._origins, self._timings = bool(body.token_origins), bool(body.timings_per_token)
        self._head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": service.model,
            "system_fingerprint": service.fingerprint,
        }
        self._begun = False
        self._num_calls = 0

    def whole(self, pieces: list[Piece]) -> dict[str, Any]:
        reasoning = "".join(piece.parts.reasoning for piece in pieces)
        content = "".join(piece.parts.content for piece in pieces)
        calls = [call for piece in pieces for call in piece.parts.calls]
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = [_call(call) for call in calls]
            message["content"] = content or None
        logprobs = [each for piece in pieces for each in piece.logprobs]
        choice = {
            "index": 0,
            "message": message,
            "logprobs": _logprobs(self._tokenizer, logprobs) if self._logprobs else None,
            "finish_reason": self._finish_reason(self._job.stats.finish_reason),
        }
        if self._origins:
            choice["token_origins"] = _origins([each for piece in pieces for each in piece.origins])
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [choice],
            "usage": usage(self._job),
            "timings": self._job.stats.timings(),
        }

    def frames(self, event: Piece | End) -> list[dict[str, Any]]:
        """The chunks of an event."""
        frames = []
        if not self._begun:
            self._begun = True
            frames.append(self._chunk({"role": "assistant", "content": ""}))
        if isinstance(event, End):
            last = self._chunk({}, self._finish_reason(event.reason))
            frames.append({**last, "timings": self._job.stats.timings()})
            if self._with_usage:
                frames.append({**self._chunk({}), "choices": [], "usage": usage(self._job)})
            return frames
        logprobs = _logprobs(self._tokenizer, event.logprobs) if event.logprobs else None
        delta: dict[str, Any] = {}
        if event.parts.reasoning:
            delta["reasoning_content"] = event.parts.reasoning
        if event.parts.content:
            delta["content"] = event.parts.content
        if delta or logprobs:
            chunk = self._chunk(delta, logprobs=logprobs)
            if self._origins:
                chunk["choices"][0]["token_origins"] = _origins(event.origins)
            frames.append(chunk)
        for call in event.parts.calls:
            opening = {"index": self._num_calls, **_call(ToolCall(call.name, ""))}
            frames.append(self._chunk({"tool_calls": [opening]}))
            more = {"index": self._num_calls, "function": {"arguments": call.arguments}}
            frames.append(self._chunk({"tool_calls": [more]}))
            self._num_calls += 1
        if self._timings:
            # The scheduler counts a step's tokens once it has told of them, which may be later than this.
            so_far = dataclasses.replace(self._job.stats, predicted_n=event.num_tokens)
            frames = [{**frame, "timings": so_far.timings()} for frame in frames]
        return frames

    def _chunk(
        self, delta: dict[str, Any], finish_reason: str | None = None, logprobs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": [choice]}
        return {**chunk, "usage": None} if self._with_usage else chunk

    def _finish_reason(self, reason: str) -> str:
        return "tool_calls" if reason == "stop" and self._listener.num_calls else reason


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def _origins(origins: list[Origin]) -> dict[str, Any]:
    """Of each text the tokens, in order: {"text", "draft"}; joined they are the text."""
    out: dict[str, Any] = {}
    for each in origins:
        name = "reasoning_content" if each.reasoning else "content"
        out.setdefault(name, []).append({"text": each.text, "draft": each.drafted})
    return out


def _logprobs(tokenizer: Tokenizer, logprobs: list[TokenLogprob]) -> dict[str, Any]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        piece = tokenizer.piece(token, special=True)
        return {"token": piece.decode("utf-8", "replace"), "bytes": list(piece), "logprob": max(logprob, -9999.0)}

    content = [
        {**entry(each.token, each.logprob), "top_logprobs": [entry(*other) for other in each.top]} for each in logprobs
    ]
    return {"content": content, "refusal": None}
