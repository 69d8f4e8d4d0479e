"""TensorRT's log. One logger for the life of the process: TensorRT keeps a pointer to the first it is given, and logs
there even for builders that were made with another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from plugins.load import report_listeners, trt

PLUGIN = "nextn plugin "  # how the plugins' own lines begin
_LISTING = "Engine Layer Information"


class Messages:
    """What was logged meanwhile: errors, and the lines of the layer listing (one message of level verbose)."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.layers: list[str] = []

    @property
    def first_error(self) -> str:
        """The first error; the ones after it are mostly consequences. A plugin's says what is wrong with which op in
        which layer."""
        return self.errors[0] if self.errors else "no reason given"


_listeners: list[Messages] = []


@contextmanager
def messages() -> Iterator[Messages]:
    """Collect what TensorRT logs inside the block, and what our plugins report."""
    collected = Messages()
    take_report = collected.errors.append
    _listeners.append(collected)
    report_listeners.append(take_report)
    try:
        yield collected
    finally:
        _listeners.remove(collected)
        report_listeners.remove(take_report)


@cache
def logger() -> trt.ILogger:
    """The logger to give to every Builder, OnnxParser and Runtime."""

    class Logger(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: trt.ILogger.Severity, message: str) -> None:
            if severity <= trt.ILogger.Severity.ERROR:
                for listener in _listeners:
                    listener.errors.append(message)
            elif message.startswith(_LISTING):
                for listener in _listeners:
                    listener.layers += [line for line in message.splitlines() if line.startswith("Layer(")]

    return Logger()
