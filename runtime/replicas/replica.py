"""A replica: the server of `runtime.serve` without a socket."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import AsyncIterator
from typing import Any

from ray import serve

from engines.errors import EngineError
from runtime.replicas.exchange import Asked, Head
from runtime.replicas.loopback import keep_to_loopback
from runtime.serve import MIB, service_options, session_to_serve
from runtime.server.app import create_app
from runtime.server.security import Limits
from runtime.server.service import Service

_log = logging.getLogger("runtime.replicas")
REPLICA_HEADER = b"x-replica"


class Replica:
    """Ray makes one for each GPU, or as many as asked for where there are none."""

    def __init__(self, options: argparse.Namespace) -> None:
        """options: of `runtime.serve_ray`."""
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", stream=sys.stderr)
        keep_to_loopback()
        self._service = Service(session_to_serve(options), service_options(options))
        self._service.grammars.warm_up()
        # Who may ask, and by what name, the front has seen to.
        self._app = create_app(self._service, Limits(body_bytes=options.max_body * MIB))
        self._name = serve.get_replica_context().replica_id.unique_id.encode()
        self._running: set[asyncio.Task[None]] = set()

    async def serve(self, asked: Asked) -> AsyncIterator[Head | bytes]:
        """The answer: its head, then its body in pieces. Ends the request when nobody listens any more."""
        sent: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        gone = asyncio.Event()
        body: list[bytes] = [asked.body]

        async def receive() -> dict[str, Any]:
            if body:
                return {"type": "http.request", "body": body.pop(), "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        task: asyncio.Task[None] = asyncio.create_task(self._app(_scope(asked), receive, sent.put))  # type: ignore[arg-type]
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        task.add_done_callback(lambda _: sent.put_nowait(None))
        complete = False
        try:
            while (message := await sent.get()) is not None:
                if message["type"] == "http.response.start":
                    yield Head(message["status"], [*message["headers"], (REPLICA_HEADER, self._name)])
                    continue
                if message.get("body"):
                    yield message["body"]
                complete = not message.get("more_body", False)
            if complete and task.exception() is not None:  # told to the client already, with a 500
                _log.error("%s failed", asked.path, exc_info=task.exception())
            elif not complete:
                task.result()
        finally:
            gone.set()

    def check_health(self) -> None:
        """Asked by Ray, which replaces a replica that raises."""
        if self._service.scheduler.failed is not None:
            raise EngineError(f"the scheduler has failed ({self._service.scheduler.failed})")

    def __del__(self) -> None:
        """Called by Ray when the replica is to end and its requests have."""
        service = getattr(self, "_service", None)
        if service is not None:
            service.close()


def _scope(asked: Asked) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": asked.method,
        "scheme": "http",
        "path": asked.path,
        "raw_path": asked.path.encode(),
        "query_string": asked.query,
        "root_path": "",
        "headers": asked.headers,
    }
