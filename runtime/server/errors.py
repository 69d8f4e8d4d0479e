"""Errors as OpenAI's clients read them: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from typing import Any

from engines.errors import NextnError, NumericError, ResourceError, UsageError
from runtime.grammar_state import GrammarError
from runtime.scheduler import ClosingError, QueueFullError, TimedOutError

RETRY_AFTER_S = 2


class ApiError(Exception):
    """An answer other than 200. param: the field at fault, as a path such as ``messages[0].content``. allow: of a 405,
    the methods that are served."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry: bool = False,
        allow: str = "",
    ) -> None:
        super().__init__(message)
        self.allow = allow
        self.status, self.message, self.param, self.code, self.retry = status, message, param, code, retry

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        headers = {"Retry-After": str(RETRY_AFTER_S)} if self.retry else {}
        headers |= {"Allow": self.allow} if self.allow else {}
        return {**headers, "WWW-Authenticate": "Bearer"} if self.status == 401 else headers


def bad_field(param: str, message: str) -> ApiError:
    """A field that cannot be served as given; the message names it."""
    return ApiError(400, message if param in message else f"{param}: {message}", param=param, code="invalid_value")


def too_long(param: str, message: str) -> ApiError:
    """A prompt that does not fit. What else the message says after a semicolon is for command lines."""
    return ApiError(400, f"{message.partition(';')[0]}; shorten {param}", param=param, code="context_length_exceeded")


def api_error(error: Exception) -> ApiError:
    """What a client hears of any error. What is not foreseen is not told in words: it may hold anything."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, GrammarError):
        return ApiError(400, str(error), param=error.field or None, code="invalid_value")
    if isinstance(error, UsageError):
        return ApiError(400, str(error), code="invalid_value")
    if isinstance(error, QueueFullError):
        return ApiError(503, str(error), code="queue_full", retry=True)
    if isinstance(error, ClosingError):
        return ApiError(503, str(error), code="shutting_down", retry=True)
    if isinstance(error, TimedOutError):
        return ApiError(504, str(error), code="timeout")
    if isinstance(error, (ResourceError, MemoryError)):
        return ApiError(503, str(error) or "out of memory", code="out_of_memory", retry=True)
    if isinstance(error, NumericError):
        return ApiError(500, str(error), code="not_finite")
    if isinstance(error, NextnError):
        return ApiError(500, str(error), code="engine_error")
    return ApiError(500, f"internal error ({type(error).__name__}); the server's log says more", code="internal_error")
