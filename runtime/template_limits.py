"""Bounds for chat templates, which are programs from strangers: steps, size of the text, size of the template.

Every round of a loop and every call of a macro is a step, counted by a call that is put into the parsed template; so
the bound is the same on every machine.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

MAX_SOURCE_CHARS = 1 << 20
MAX_TEXT_CHARS = 8 << 20
MAX_STEPS = 200_000  # a fraction of a second
_MAX_REPEATED = 1 << 20


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox whose templates cannot run for ever. Templates are made by `bounded`."""

    intercepted_binops = frozenset(["*", "**"])

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._run = threading.local()  # requests are rendered by several threads
        for name in ("center", "indent"):
            self.filters[name] = _refuses_large_numbers(self.filters[name])

    def bounded(self, source: str) -> jinja2.Template:
        """Compile ``source``. Raises SecurityError for one that is too large, and Jinja's TemplateSyntaxError."""
        if len(source) > MAX_SOURCE_CHARS:
            raise SecurityError(f"the template has {len(source)} characters, at most {MAX_SOURCE_CHARS} are taken")
        try:
            return self._counted(source)
        except (RecursionError, MemoryError):  # of Jinja's parser and compiler, and of Python's
            raise SecurityError("the template is nested too deeply") from None

    def _counted(self, source: str) -> jinja2.Template:
        tree = self.parse(source)
        for node in list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock))):
            assert isinstance(node, (nodes.For, nodes.Macro, nodes.CallBlock))
            step = nodes.Call(nodes.EnvironmentAttribute("step"), [], [], None, None)
            node.body.insert(0, nodes.ExprStmt(step).set_lineno(node.lineno))
        return self.from_string(tree)

    def text_of(self, template: jinja2.Template, values: dict[str, Any]) -> str:
        """Render. Raises SecurityError past a bound, and whatever the template raises."""
        self._run.steps = 0
        return "".join(self._pieces(template, values))

    def step(self) -> None:
        """Called by templates."""
        self._run.steps += 1
        if self._run.steps > MAX_STEPS:
            raise SecurityError(f"the template takes more than {MAX_STEPS} steps")

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        sizes = [each for each in (left, right) if isinstance(each, int)]
        if operator == "**" and (abs(left) > _MAX_REPEATED or abs(right) > 64):
            raise SecurityError(f"the template computes {left} ** {right}")
        for each in (left, right):
            if hasattr(each, "__len__") and sizes and len(each) * sizes[0] > _MAX_REPEATED:
                raise SecurityError(f"the template repeats {len(each)} things {sizes[0]} times")
        return super().call_binop(context, operator, left, right)

    def _pieces(self, template: jinja2.Template, values: dict[str, Any]) -> Iterator[str]:
        size = 0
        for piece in template.generate(values):
            size += len(piece)
            if size > MAX_TEXT_CHARS:
                raise SecurityError(f"the template writes more than {MAX_TEXT_CHARS} characters")
            yield piece


def _refuses_large_numbers(filter_: Any) -> Any:
    def bounded(value: Any, *arguments: Any, **named: Any) -> Any:
        for number in (*arguments, *named.values()):
            if isinstance(number, int) and number > _MAX_REPEATED:
                raise SecurityError(f"the template asks for {number} spaces")
        return filter_(value, *arguments, **named)

    return bounded
