"""The routes."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from engines.errors import NextnError
from runtime.server.chat import chat_completion
from runtime.server.completions import completion
from runtime.server.errors import ApiError, api_error, bad_field
from runtime.server.http import ClientGoneError, Json, error_response
from runtime.server.metrics import CONTENT_TYPE
from runtime.server.page import add_page
from runtime.server.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest, check_text
from runtime.server.security import Guard, Limits
from runtime.server.service import Service

_log = logging.getLogger("runtime.server")


def create_app(service: Service, limits: Limits, grace_s: float = 0.0) -> FastAPI:
    """The application. It closes ``service`` when it shuts down, after ``grace_s`` seconds at the most."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await run_in_threadpool(service.close, grace_s)

    app = FastAPI(title="nextn-trt", docs_url=None, redoc_url=None, lifespan=lifespan)
    app.add_middleware(Guard, limits=limits)
    _add_error_handlers(app, service)
    _add_completions(app, service)
    _add_model_routes(app, service)
    _add_state_routes(app, service)
    add_page(app)
    _describe(app, service)
    return app


def _add_completions(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions", response_model=None)
    async def chat(body: ChatRequest, request: Request) -> Response:
        return await _served(chat_completion(service, body, request))

    @app.post("/v1/completions", response_model=None)
    async def text(body: CompletionRequest, request: Request) -> Response:
        return await _served(completion(service, body, request))


def _add_model_routes(app: FastAPI, service: Service) -> None:
    created = int(time.time())

    def model() -> dict[str, Any]:
        meta = {"n_ctx": service.session.context_size, "n_vocab": service.vocab_size, "spec": service.session.spec_type}
        return {"id": service.model, "object": "model", "created": created, "owned_by": "nextn-trt", "meta": meta}

    @app.get("/v1/models", response_model=None)
    async def models() -> Response:
        return Json({"object": "list", "data": [model()]})

    @app.get("/v1/models/{name:path}", response_model=None)
    async def one_model(name: str) -> Response:
        service.check_model(name)
        return Json(model())

    @app.post("/tokenize", response_model=None)
    async def tokenize(body: TokenizeRequest) -> Response:
        check_text(body)
        encode = service.tokenizer.encode
        return Json({"tokens": await run_in_threadpool(encode, body.content, body.parse_special, body.add_special)})

    @app.post("/detokenize", response_model=None)
    async def detokenize(body: DetokenizeRequest) -> Response:
        for i, token in enumerate(body.tokens):
            if token >= service.vocab_size:
                raise bad_field(f"tokens[{i}]", f"{token} is no token; ids are 0 to {service.vocab_size - 1}")
        return Json({"content": await run_in_threadpool(service.tokenizer.decode, body.tokens, True)})


def _add_state_routes(app: FastAPI, service: Service) -> None:
    @app.get("/health", response_model=None)
    async def health() -> Response:
        failed = service.scheduler.failed
        if failed is not None:
            return Json({"status": "error"}, status_code=503)
        return Json({"status": "ok"})

    @app.get("/metrics", response_model=None)
    async def metrics() -> Response:
        return Response(service.metrics.text(), headers={"Content-Type": CONTENT_TYPE})


async def _served(reply: Awaitable[Response]) -> Response:
    try:
        return await reply
    except ClientGoneError:
        return Response(status_code=499)  # nobody reads it


def _describe(app: FastAPI, service: Service) -> None:
    """Let the description at /openapi.json say what the schemas alone do not: the model's name, 400 for a bad field."""
    described = app.openapi()
    schemas = described["components"]["schemas"]
    for name in ("ChatRequest", "CompletionRequest"):
        schemas[name]["properties"]["model"] = {"type": ["string", "null"], "enum": [service.model, None]}
    for path in described["paths"].values():
        for operation in path.values():
            if operation["responses"].pop("422", None):
                operation["responses"]["400"] = {"description": "A field that cannot be served; error.param names it"}


def _add_error_handlers(app: FastAPI, service: Service) -> None:
    def handler(translate: Callable[[Request, Any], ApiError]) -> Callable[[Request, Exception], Awaitable[Response]]:
        async def handle(request: Request, error: Exception) -> Response:
            told = translate(request, error)
            service.metrics.refused(told.status)
            if told.status >= 500 and told.code in ("internal_error", "engine_error", "not_finite"):
                _log.error("%s: %s", request.url.path, told.message, exc_info=error)
            return error_response(told)

        return handle

    app.add_exception_handler(RequestValidationError, handler(lambda _, error: _validation_error(error)))
    app.add_exception_handler(HTTPException, handler(_http_error))
    app.add_exception_handler(Exception, handler(lambda _, error: api_error(error)))
    # Answered without being passed on to the web server, which would log a traceback.
    for kind in (ApiError, NextnError, MemoryError, RecursionError):
        app.add_exception_handler(kind, handler(lambda _, error: api_error(error)))


def _http_error(request: Request, error: HTTPException) -> ApiError:
    """What the framework made of an error: the error itself, where it was ours."""
    if isinstance(error.__cause__, ApiError):
        return error.__cause__
    if isinstance(error.__cause__, UnicodeDecodeError):
        return ApiError(400, "the body is no JSON: it is not in UTF-8", code="invalid_json")
    if isinstance(error.__cause__, ValueError):  # of Python's reader, which bounds the digits of an integer
        return ApiError(400, "the body has a number of too many digits", code="invalid_json")
    if isinstance(error.__cause__, RecursionError):
        return ApiError(400, "the body is nested too deeply", code="invalid_json")
    if error.status_code == 404:
        return ApiError(404, f"there is no {request.url.path} here", code="not_found")
    if error.status_code == 405:
        allow = (error.headers or {}).get("Allow", "")
        message = f"{request.url.path} takes {allow}, not {request.method}"
        return ApiError(405, message, code="method_not_allowed", allow=allow)
    return ApiError(error.status_code, str(error.detail), code="http_error")


def _validation_error(error: RequestValidationError) -> ApiError:
    """The first error, by the path of its field in the body."""
    found = [(_field_path(each["loc"], error.body), each) for each in error.errors()]
    # Of the members of a union, the one that the value was meant for got farthest.
    path, first = max(
        found, key=lambda each: (each[0].count(".") + each[0].count("["), not each[1]["type"].endswith("_type"))
    )
    if first["type"] == "json_invalid":
        return ApiError(400, "the body is no JSON", code="invalid_json")
    if not path and isinstance(error.body, bytes):
        return ApiError(415, "the body must be JSON, with Content-Type: application/json", code="invalid_json")
    message = "there is no such field" if first["type"] == "extra_forbidden" else first["msg"]
    return ApiError(400, f"{path or 'body'}: {message}", param=path or None, code="invalid_value")


def _field_path(location: Sequence[str | int], body: Any) -> str:
    """A location without the names of union members, which are no fields."""
    path, value = "", body
    for i, part in enumerate(location[1:] if location[:1] == ("body",) else location):
        last = i == len(location) - 2
        if isinstance(part, int) and isinstance(value, list) and part < len(value):
            path, value = f"{path}[{part}]", value[part]
        elif isinstance(part, str) and isinstance(value, dict) and (part in value or (last and part.isidentifier())):
            path, value = f"{path}.{part}" if path else part, value.get(part)
    return path
