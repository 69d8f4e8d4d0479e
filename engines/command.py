"""What every command line does alike: one line for an error, exit codes, signals, closed pipes."""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

from engines.errors import DeviceLostError, NextnError, ResourceError, UsageError, printable

EXIT_INTERRUPTED = 130  # 128 + SIGINT
EXIT_TERMINATED = 143  # 128 + SIGTERM
EXIT_PIPE_CLOSED = 141  # 128 + SIGPIPE
_WRONG_PATHS = (
    errno.ENAMETOOLONG, errno.ELOOP, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EINVAL,
)  # fmt: skip


class Parser(argparse.ArgumentParser):
    """Reports wrong flags as UsageError: one line, exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


class Terminated(BaseException):
    """SIGTERM came: what is open is to be cleared up, as after Ctrl-C."""


def run_command(main: Callable[[], int]) -> NoReturn:
    """Run a command line and leave with its exit code; what it raises becomes one line on stderr."""
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):  # text is UTF-8 whatever the locale says
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="replace")
    try:
        with _sigterm_raises():
            code = main()
            sys.stdout.flush()
    except DeviceLostError as error:
        end_now(report(error))
    except NextnError as error:
        code = report(error)
    except MemoryError as error:
        code = report(ResourceError(f"out of memory ({error})" if str(error) else "out of memory"))
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except Terminated:
        code = EXIT_TERMINATED
    except BrokenPipeError:  # nobody reads stdout any more
        _discard_stdout()
        code = EXIT_PIPE_CLOSED
    except OSError as error:
        if error.filename is None:  # a full disk under stdout
            _discard_stdout()
            code = report(ResourceError(f"the output cannot be written ({error.strerror or error})"))
        else:
            code = report(_of_a_file(error))
    sys.exit(code)


def end_now(code: int) -> NoReturn:
    """Without clearing up: to give back what a lost GPU holds would end the process by a signal."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _of_a_file(error: OSError) -> NextnError:
    """What a path that was given led to where nothing more is known of it."""
    message = f"{os.fsdecode(error.filename)}: cannot be used ({error.strerror or error})"
    return UsageError(message) if error.errno in _WRONG_PATHS else ResourceError(message)


def report(error: NextnError) -> int:
    """Print the error; its exit code. What a file had in its names must not speak to the terminal."""
    print("error:", printable(str(error)), file=sys.stderr)
    return error.exit_code


@contextlib.contextmanager
def signals_kept(kept: Callable[[BaseException], None]) -> Iterator[None]:
    """Inside the block Ctrl-C and SIGTERM raise nothing; ``kept`` is given what they would have raised."""
    errors: dict[int, type[BaseException]] = {signal.SIGINT: KeyboardInterrupt, signal.SIGTERM: Terminated}

    def on_signal(number: int, frame: FrameType | None) -> None:
        kept(errors[number]())

    with contextlib.ExitStack() as stack:
        for number in errors:
            stack.enter_context(_handler(number, on_signal))
        yield


@contextlib.contextmanager
def _handler(number: int, handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Python takes signals in its main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        # None: a handler that was not set from Python.
        signal.signal(number, signal.SIG_DFL if before is None else before)


def _sigterm_raises() -> contextlib.AbstractContextManager[None]:
    def on_signal(number: int, frame: FrameType | None) -> None:
        raise Terminated

    return _handler(signal.SIGTERM, on_signal)


def _open_closed_streams() -> None:
    """A standard stream that the caller closed is None in Python, and print(file=None) writes to stdout."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - stays open


def _discard_stdout() -> None:
    """Keep the interpreter from flushing what is left into a stdout that takes nothing."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
