"""Ctrl-C, SIGTERM and SIGHUP as exceptions, and where these must not come: in code that is not Python's."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

_PACKAGES = ("engines", "export", "plugins", "runtime")


class Terminated(BaseException):
    """SIGTERM came: what is open is to be cleared up, as after Ctrl-C."""


class HungUp(Terminated):
    """SIGHUP came: the terminal was closed, or the connection to it was lost."""


_ERRORS: dict[int, type[BaseException]] = {
    signal.SIGINT: KeyboardInterrupt,
    signal.SIGTERM: Terminated,
    signal.SIGHUP: HungUp,
}
_IMPORTER = "<frozen importlib._bootstrap>"
_LATER_S = 0.05


@contextlib.contextmanager
def signals_kept(kept: Callable[[BaseException], None]) -> Iterator[None]:
    """Inside the block Ctrl-C, SIGTERM and SIGHUP raise nothing; ``kept`` is given what they would have raised."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        kept(_ERRORS[number]())

    with _handlers(on_signal):
        yield


@contextlib.contextmanager
def _handlers(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for number in _ERRORS:
            stack.enter_context(handling(number, handler))
        yield


@contextlib.contextmanager
def handling(number: int, handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Inside the block. Python takes signals in its main thread only, and what the process was started to ignore it
    goes on ignoring."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(number) is signal.SIG_IGN:
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        # None: a handler that was not set from Python.
        signal.signal(number, signal.SIG_DFL if before is None else before)


def quiet_start() -> None:
    """Until `run_command` begins, Ctrl-C ends ``python -m`` of a module of ours as SIGTERM does: a command line whose
    modules are still loading has nothing to clear up, and nobody wants to see where it was."""
    module = sys.orig_argv[sys.orig_argv.index("-m") + 1 :][:1] if "-m" in sys.orig_argv else []
    starting = sys.argv[:1] == ["-m"] and module and module[0].split(".")[0] in _PACKAGES
    if starting and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextlib.contextmanager
def signals_raise() -> Iterator[None]:
    """Inside the block Ctrl-C, SIGTERM and SIGHUP raise what `_ERRORS` says; while a module is being loaded, a little
    later: libraries make another error of an exception then, end the process, or are left half loaded."""

    outside = _imports(sys._getframe())

    def on_signal(number: int, frame: FrameType | None) -> None:
        if _imports(frame) == outside:
            raise _ERRORS[number]
        again = threading.Timer(_LATER_S, signal.pthread_kill, (threading.main_thread().ident, number))
        again.daemon = True
        again.start()

    with _handlers(on_signal):
        yield


def _imports(frame: FrameType | None) -> int:
    """How many modules are being loaded there, one for another."""
    count = 0
    while frame is not None:
        count += frame.f_code.co_filename == _IMPORTER
        frame = frame.f_back
    return count
