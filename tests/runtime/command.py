"""Runs a command line inside the test process: same parsing, output and exit codes, none of the start-up time."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from runtime.command_line import run_command


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The one object on stdout of a run that went well."""
        assert self.code == 0, self.err
        result: dict[str, Any] = json.loads(self.out)
        return result

    def refused(self, code: int, *says: str) -> None:
        """Assert a clean refusal: the exit code, nothing on stdout, one line on stderr that says these things."""
        assert (self.code, self.out) == (code, ""), self
        assert self.err.startswith("error: ") and self.err.count("\n") == 1, self.err
        for word in says:
            assert word in self.err, self.err


def run_main(main: Callable[[list[str]], int], *arguments: object, stdin: bytes | None = None) -> Outcome:
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="ascii") for _ in range(2))
    given = io.TextIOWrapper(io.BytesIO(stdin or b""), encoding="utf-8")
    before, sys.stdin = sys.stdin, given
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as left:
            run_command(lambda: main([str(argument) for argument in arguments]))
    finally:
        sys.stdin = before
    texts = []
    for stream in (out, err):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode())
    return Outcome(int(left.value.code or 0), *texts)
