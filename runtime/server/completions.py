"""/v1/completions."""

from __future__ import annotations

import time
import uuid
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from engines.errors import UsageError
from runtime.engine import Sampler
from runtime.scheduler import Job
from runtime.server.errors import bad_field, too_long
from runtime.server.http import EventStream, Json, collect
from runtime.server.listener import End, Piece, ReplyListener
from runtime.server.schema import CompletionRequest, check_stream_options, check_text
from runtime.server.service import Service, usage
from runtime.server.stops import stop_strings
from runtime.session import check_prompt_ids
from runtime.tokenizer import TooManyTokens

_MAX_TOKENS_DEFAULT = 16  # as OpenAI's


async def completion(service: Service, body: CompletionRequest, request: Request) -> Response:
    """Serve a request, whole or as a stream. Raises ApiError and what the scheduler raises."""
    service.check_model(body.model)
    prompt, sampler = await run_in_threadpool(_prepare, service, body)

    def listen(on_end: Any, reporting: Any) -> ReplyListener:
        return ReplyListener(service.tokenizer, stop_strings(body), sampler=reporting, on_end=on_end)

    limit = _MAX_TOKENS_DEFAULT if body.max_tokens is None else body.max_tokens
    job, listener = service.submit(body, prompt, sampler, limit, listen)
    writer = _Writer(service, body, job)

    def cancel() -> None:
        service.scheduler.cancel(job)

    if body.stream:
        return EventStream(listener, writer.frames, cancel)
    return Json(writer.whole(await collect(request, listener, cancel)))


def _prepare(service: Service, body: CompletionRequest) -> tuple[list[int], Sampler]:
    check_text(body)
    check_stream_options(body)
    prompt = _prompt_ids(service, body.prompt)
    return prompt, service.sampler(body, prompt, service.adjustments(body, top_logprobs=body.logprobs))


def _prompt_ids(service: Service, prompt: str | list[int] | list[str] | list[list[int]]) -> list[int]:
    if isinstance(prompt, list) and any(not isinstance(each, int) for each in prompt):
        if len(prompt) > 1:
            raise bad_field("prompt", f"one at a time, got {len(prompt)}")
        return _prompt_ids(service, prompt[0])  # type: ignore[arg-type]
    try:
        most = service.session.context_size
        ids = service.tokenizer.encode(prompt, most=most) if isinstance(prompt, str) else list(prompt)
        check_prompt_ids(ids, service.session.manifest)  # type: ignore[arg-type]
    except TooManyTokens as error:
        raise too_long("prompt", str(error)) from error
    except UsageError as error:
        raise bad_field("prompt", str(error)) from error
    service.check_length(ids, "prompt")  # type: ignore[arg-type]
    return ids  # type: ignore[return-value]


class _Writer:
    """Puts a text into OpenAI's objects."""

    def __init__(self, service: Service, body: CompletionRequest, job: Job) -> None:
        self._tokenizer, self._job = service.tokenizer, job
        self._with_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._logprobs = body.logprobs is not None
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.model,
            "system_fingerprint": service.fingerprint,
        }

    def whole(self, pieces: list[Piece]) -> dict[str, Any]:
        all_of_it = Piece()
        for piece in pieces:
            all_of_it.parts.content += piece.parts.content
            all_of_it.logprobs += piece.logprobs
            all_of_it.starts += piece.starts
        choice = self._choice(all_of_it, self._job.stats.finish_reason)
        return {**self._head, "choices": [choice], "usage": usage(self._job), "timings": self._job.stats.timings()}

    def frames(self, event: Piece | End) -> list[dict[str, Any]]:
        """The chunks of an event."""
        nothing = {"usage": None} if self._with_usage else {}
        if isinstance(event, Piece):
            return [{**self._head, "choices": [self._choice(event, None)], **nothing}]
        last = {**self._head, "choices": [self._choice(Piece(), event.reason)], **nothing}
        frames = [{**last, "timings": self._job.stats.timings()}]
        if self._with_usage:
            frames.append({**self._head, "choices": [], "usage": usage(self._job)})
        return frames

    def _choice(self, piece: Piece, reason: str | None) -> dict[str, Any]:
        logprobs = self._legacy_logprobs(piece) if self._logprobs else None
        return {"index": 0, "text": piece.parts.content, "logprobs": logprobs, "finish_reason": reason}

    def _legacy_logprobs(self, piece: Piece) -> dict[str, Any]:
        def text(token: int) -> str:
            return self._tokenizer.piece(token, special=True).decode("utf-8", "replace")

        return {
            "tokens": [text(each.token) for each in piece.logprobs],
            "token_logprobs": [max(each.logprob, -9999.0) for each in piece.logprobs],
            "top_logprobs": [
                {text(token): max(value, -9999.0) for token, value in each.top} for each in piece.logprobs
            ],
            "text_offset": piece.starts,
        }
