"""The process that renders chat templates, so that no template can hold up, starve or end the one that asks.

It takes questions, answers each, and ends when its socket closes, or when an answer takes more processor time than it
may. What takes too much memory is answered as a fault of the template's.
"""

from __future__ import annotations

import json
import os
import sys
from functools import lru_cache
from multiprocessing.connection import Connection

import jinja2
from jinja2.sandbox import SecurityError

from runtime.process_limits import limit_memory, within
from runtime.template_environment import environment
from runtime.template_renderer import MEMORY_BYTES, READY, REFUSED, RENDER_S, TEXT


def serve(asked: Connection) -> None:
    """Sends READY, then an answer to each question, until the socket closes."""
    asked.send_bytes(READY)
    memory = limit_memory(MEMORY_BYTES)
    while True:
        content = asked.recv_bytes()
        with within(RENDER_S):
            answer = _answer(content, memory)
        asked.send_bytes(answer)


def _answer(content: bytes, memory: int) -> bytes:
    """memory: bytes that may be taken."""
    try:
        source, values = json.loads(content)
        template = _compiled(source)
        if values is None:
            return TEXT
        return TEXT + _ENVIRONMENT.text_of(template, values).encode("utf-8", "surrogatepass")
    except jinja2.TemplateSyntaxError as error:
        return REFUSED + f"line {error.lineno} of the chat template: {error.message}".encode("utf-8", "replace")
    except MemoryError:
        return REFUSED + f"it takes more than {memory >> 20} MiB of memory".encode()
    except SecurityError as error:
        return REFUSED + str(error).encode("utf-8", "replace")
    except Exception as error:  # a template is a program: it may fail with anything
        return REFUSED + (str(error) or type(error).__name__).encode("utf-8", "replace")


_ENVIRONMENT = environment()


@lru_cache(maxsize=2)
def _compiled(source: str) -> jinja2.Template:
    return _ENVIRONMENT.bounded(source)


def main() -> None:
    """The argument: a socket's descriptor."""
    try:
        serve(Connection(int(sys.argv[1])))
    except (EOFError, OSError):  # nobody asks any more
        os._exit(0)


if __name__ == "__main__":
    main()
