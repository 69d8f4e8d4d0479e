"""What every command line does alike: one line for an error, exit codes, signals, closed pipes."""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TextIO

from engines.errors import (
    DeviceLostError,
    EngineError,
    NextnError,
    ResourceError,
    UsageError,
    printable,
    printable_lines,
)
from engines.signals import HungUp, Terminated, signals_raise

EXIT_HUNG_UP = 129  # 128 + SIGHUP
EXIT_INTERRUPTED = 130  # 128 + SIGINT
EXIT_TERMINATED = 143  # 128 + SIGTERM
EXIT_PIPE_CLOSED = 141  # 128 + SIGPIPE
_WRONG_PATHS = (
    errno.ENAMETOOLONG, errno.ELOOP, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EINVAL,
)  # fmt: skip
_NO_MORE = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)
_NO_ROOM = ("failed to map segment", "annot allocate memory")


class Parser(argparse.ArgumentParser):
    """Reports wrong flags as UsageError: one line, exit code 2."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.register("type", Path, _path)  # whatever takes a path

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def _path(text: str) -> Path:
    """As `Path`, but that of nothing is not the current folder: a shell's variable that is not set gives one."""
    if not text:
        raise argparse.ArgumentTypeError("an empty path; write . for the current folder")
    return Path(text)


def whole_numbers(text: str) -> list[int]:
    """``1,2,3`` of a flag; without anything none."""
    try:
        return [int(part) for part in text.split(",")] if text.strip() else []
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: wanted whole numbers, as in 1,2,3") from None


def run_command(main: Callable[[], int]) -> NoReturn:
    """Run a command line and leave with its exit code; what it raises becomes one line on stderr."""
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):  # text is UTF-8 whatever the locale says
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="replace")
    if isinstance(sys.stdin, io.TextIOWrapper) and not sys.stdin.isatty():
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")
    try:
        with signals_raise():
            code = main()
            sys.stdout.flush()
    except DeviceLostError as error:
        end_now(report(error))
    except NextnError as error:
        code = report(error)
    except MemoryError as error:
        code = report(ResourceError(f"out of memory ({error})" if str(error) else "out of memory"))
    except ImportError as error:
        code = report(_of_a_library(error))
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except HungUp:
        code = EXIT_HUNG_UP
    except Terminated:
        code = EXIT_TERMINATED
    except BrokenPipeError:  # nobody reads stdout any more, or stderr
        _discard(sys.stdout)
        _discard(sys.stderr)
        code = EXIT_PIPE_CLOSED
    except OSError as error:
        if error.filename is None:
            code = report(_of_no_file(error))
            _discard(sys.stdout)
        else:
            code = report(_of_a_file(error))
    sys.exit(code)


def end_now(code: int) -> NoReturn:
    """Without clearing up: to give back what a lost GPU holds would end the process by a signal."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _of_a_library(error: ImportError) -> NextnError:
    reason = str(error).strip().partition("\n")[0]
    if any(sign in str(error) for sign in _NO_ROOM):  # what the loader says under ulimit -v
        return ResourceError(f"not enough memory to load {error.name or 'a library'} ({reason})")
    return EngineError(f"{error.name or 'a library'} does not load ({reason}); install the project again")


def _of_no_file(error: OSError) -> NextnError:
    if error.errno == errno.ENOENT:  # of os.getcwd
        return UsageError("the current folder is there no more; change to another")
    if error.errno in _NO_MORE:
        return ResourceError(f"the system gives this process no more ({error.strerror}); see `ulimit -a`")
    return ResourceError(f"the output cannot be written ({error.strerror or error})")  # a full disk under it


def _of_a_file(error: OSError) -> NextnError:
    """What a path that was given led to where nothing more is known of it."""
    message = f"{os.fsdecode(error.filename)}: cannot be used ({error.strerror or error})"
    return UsageError(message) if error.errno in _WRONG_PATHS else ResourceError(message)


def say(text: str, to: TextIO | None = None) -> None:
    """Print lines to stdout, or ``to``. Names in them, of files, tensors and models, must not speak to the terminal."""
    print(printable_lines(text), file=to or sys.stdout)


@contextlib.contextmanager
def said_at_last(text: str) -> Iterator[None]:
    """Say it after the block, whatever becomes of the files that are written there."""
    try:
        yield
    finally:
        say(text)


def report(error: NextnError) -> int:
    """Print the error; its exit code. What a file had in its names must not speak to the terminal."""
    try:
        print("error:", printable(str(error)), file=sys.stderr, flush=True)
    except OSError:  # stderr takes nothing: the exit code says it alone
        _discard(sys.stderr)
    return error.exit_code


def _open_closed_streams() -> None:
    """A standard stream that the caller closed is None in Python, and print(file=None) writes to stdout."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - stays open


def _discard(stream: TextIO) -> None:
    """Keep the interpreter from flushing what is left into a stream that takes nothing."""
    with contextlib.suppress(OSError):  # one without a descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
