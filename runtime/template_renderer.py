"""Chat templates, compiled and rendered by a process of their own (`runtime.template_process`), one for all of them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from engines.errors import EngineError, ResourceError, UsageError

READY, TEXT, REFUSED = b"R", b"T", b"X"
RENDER_S = 3.0  # processor time
MEMORY_BYTES = 512 << 20  # beyond what Jinja takes
_STARTS_WITHIN_S = 120.0  # on a busy machine
_ANSWERS_WITHIN_S = 120.0  # it is processor time that is bounded
_ENDS_WITHIN_S = 10.0
_MOST_ANSWER_CHARACTERS = 300
TOO_SLOW = f"it takes more than {RENDER_S:.0f} s"


def compiled(path: Path, source: str) -> None:
    """Raise UsageError for a template that cannot be compiled; ``path`` is where it lies."""
    kind, said = _process().ask(source, None)
    if kind != TEXT:
        raise UsageError(f"{path}: {_one_line(said)}")


def rendered(source: str, values: dict[str, Any]) -> str:
    """The text. Raises UsageError, saying why the template fails; ResourceError when its process was ended."""
    kind, said = _process().ask(source, values)
    if kind != TEXT:
        raise UsageError(f"the chat template cannot render these messages: {_one_line(said)}")
    return said


class _Process:
    """Started by the first question, and again after one that ended it. May be shared by threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def ask(self, source: str, values: dict[str, Any] | None) -> tuple[bytes, str]:
        """TEXT and what ``source`` makes of the values, or REFUSED and why. values None: can it be compiled?"""
        try:
            content = json.dumps([source, values]).encode()
        except (TypeError, ValueError, RecursionError) as error:
            return REFUSED, f"they are no JSON ({error})"
        with self._lock:
            connection = self._started()
            try:
                connection.send_bytes(content)
                if not connection.poll(_ANSWERS_WITHIN_S):
                    self._end()
                    return REFUSED, TOO_SLOW
                answer = connection.recv_bytes()
            except (EOFError, OSError):
                return self._ended()
            except BaseException:  # a signal, say: the answer would be taken for that of the next question
                self._end()
                raise
        return answer[:1], answer[1:].decode("utf-8", "surrogatepass")

    def _started(self) -> Connection:
        if self._connection is not None and self._process is not None and self._process.poll() is None:
            return self._connection
        self._end()  # of one that was killed meanwhile
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "runtime.template_process", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # signals of a terminal are ours to heed
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        self._connection = Connection(ours.detach())
        try:
            ready = self._connection.poll(_STARTS_WITHIN_S) and self._connection.recv_bytes() == READY
        except (EOFError, OSError):
            ready = False
        except BaseException:
            self._end()
            raise
        if not ready:
            self._end()
            raise EngineError(
                f"the process for chat templates does not start ({sys.executable} -m runtime.template_process)"
            )
        return self._connection

    def _ended(self) -> tuple[bytes, str]:
        """What its end without an answer means: REFUSED and why. Raises ResourceError where no template did that."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):  # its socket is closed
            self._process.wait(_ENDS_WITHIN_S)
        code = self._process.returncode
        self._end()
        if code == -signal.SIGPROF:
            return REFUSED, TOO_SLOW
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        raise ResourceError(f"the process for chat templates has ended ({how}): killed, or out of memory; try again")

    def _end(self) -> None:
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._connection = self._process = None


_processes: dict[int, _Process] = {}


def _process() -> _Process:
    """That of this process; a fork must not share its parent's socket."""
    return _processes.setdefault(os.getpid(), _Process())


def _one_line(said: str) -> str:
    return " ".join(said[:_MOST_ANSWER_CHARACTERS].split())
