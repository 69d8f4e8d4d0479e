"""A model behind a server: `runtime.serve`, or another that speaks OpenAI's chat completions."""

from __future__ import annotations

import http.client
import json
import queue
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from engines.errors import EngineError, NextnError, ResourceError, UsageError
from runtime.server_address import server_address
from runtime.terminal.model import Delta, Reply, Settings

_CONNECT_S = 10.0
_LOOK_S = 0.1  # how often it is asked whether to stop
_BODY_BYTES_MAX = 1 << 20  # of an answer that is no stream


class RemoteModel:
    """See `runtime.terminal.model.ChatModel`."""

    def __init__(self, url: str, api_key: str = "") -> None:
        """url: with or without /v1. Asks the server for its model. Raises UsageError, ResourceError, EngineError."""
        parts = server_address("--url", url if "://" in url else f"http://{url}")
        self._host, self._port = parts.hostname or "", parts.port
        self._secure = parts.scheme == "https"
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._url = f"{parts.scheme}://{parts.netloc}{self._path}"
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self.name = self._first_model()

    def reply(
        self, messages: Sequence[Mapping[str, str]], settings: Settings, reply: Reply, stopped: Callable[[], bool]
    ) -> Iterator[Delta]:
        stream = _Stream(self._connection(), f"{self._path}/v1/chat/completions", self._body(messages, settings))
        stream.start(self._headers)
        reply.finish_reason = "cancelled"
        try:
            while not stopped():
                event = stream.next(_LOOK_S)
                if event is None:
                    continue
                if isinstance(event, BaseException):
                    raise self._translated(event)
                if event == {}:  # the end
                    return
                yield from self._read(event, reply)
        finally:
            stream.close()

    def _read(self, event: Mapping[str, Any], reply: Reply) -> Iterator[Delta]:
        if event.get("error"):
            raise EngineError(f"{self._url}: {_message(event)}")
        if event.get("timings"):
            reply.timings = event["timings"]
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            given = Delta(delta.get("reasoning_content") or "", delta.get("content") or "")
            if given != Delta():
                yield given
            reply.finish_reason = choice.get("finish_reason") or reply.finish_reason

    def _body(self, messages: Sequence[Mapping[str, str]], settings: Settings) -> bytes:
        body: dict[str, Any] = {"model": self.name, "messages": list(messages), "stream": True}
        body |= {name: value for name, value in settings.numbers.items() if value is not None}
        if settings.spec is not None:
            body["spec"] = "on" if settings.spec else "off"
        if settings.thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": settings.thinking}
        return json.dumps(body).encode()

    def _connection(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        return kind(self._host, self._port, timeout=_CONNECT_S)

    def _first_model(self) -> str:
        connection = self._connection()
        try:
            connection.request("GET", f"{self._path}/v1/models", headers=self._headers)
            return str(_json(connection.getresponse())["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise EngineError(f"{self._url}: the list of its models cannot be read") from None
        except (OSError, http.client.HTTPException, _RefusedError) as error:
            raise self._translated(error) from None
        finally:
            connection.close()

    def _translated(self, error: BaseException) -> NextnError:
        if isinstance(error, _RefusedError):
            if error.status in (429, 503):
                return ResourceError(f"{self._url}: {error}")
            return (UsageError if error.status < 500 else EngineError)(f"{self._url}: {error}")
        if isinstance(error, OSError):
            return ResourceError(f"{self._url}: no connection ({error.strerror or error})")
        return EngineError(f"{self._url}: its answer broke off ({error or type(error).__name__})")


class _RefusedError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Stream:
    """Server-sent events of one request, read in a thread of their own: Ctrl-C must not wait for the server."""

    def __init__(self, connection: http.client.HTTPConnection, path: str, body: bytes) -> None:
        self._connection, self._path, self._body = connection, path, body
        self._events: queue.Queue[dict[str, Any] | BaseException] = queue.Queue()
        self._socket: socket.socket | None = None

    def start(self, headers: Mapping[str, str]) -> None:
        threading.Thread(target=self._run, args=(headers,), name="reply", daemon=True).start()

    def next(self, timeout: float) -> dict[str, Any] | BaseException | None:
        """An event, {} after the last, an error, or None when nothing came in time."""
        try:
            return self._events.get(timeout=timeout)
        except queue.Empty:
            return None

    def close(self) -> None:
        """Leave: the server stops what it does for us."""
        if self._socket is not None:
            try:
                self._socket.shutdown(socket.SHUT_RDWR)
            except OSError:  # it has gone already
                return

    def _run(self, headers: Mapping[str, str]) -> None:
        try:
            self._connection.connect()
            self._socket = self._connection.sock
            self._socket.settimeout(None)  # a long prompt takes its time
            self._connection.request("POST", self._path, body=self._body, headers=dict(headers))
            self._read(self._connection.getresponse())
        except Exception as error:
            self._events.put(error)
        finally:
            self._connection.close()

    def _read(self, response: http.client.HTTPResponse) -> None:
        if response.status != 200:
            _json(response)
            raise http.client.HTTPException(f"status {response.status}")
        for line in response:
            kind, _, data = line.decode("utf-8", "replace").strip().partition(":")
            if kind != "data":
                continue
            if data.strip() == "[DONE]":
                self._events.put({})
                return
            event = json.loads(data)
            if isinstance(event, dict) and event:
                self._events.put(event)
        raise http.client.HTTPException("before its end")


def _json(response: http.client.HTTPResponse) -> dict[str, Any]:
    """The body of an answer that is no stream. Raises _RefusedError for one that is an error."""
    text = response.read(_BODY_BYTES_MAX).decode("utf-8", "replace")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if response.status >= 400:
        raise _RefusedError(response.status, f"{response.status}: {_message(value)}")
    return value if isinstance(value, dict) else {}


def _message(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return str(message) if message else "the server does not say why"
