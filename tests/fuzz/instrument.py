"""Imports that atheris instruments, however the project is installed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
from types import FunctionType

import atheris

_MARK = "__ATHERIS_INSTRUMENTED__"  # among the constants of instrumented code


@contextmanager
def instrumented(package: str) -> Iterator[None]:
    """What is imported of ``package`` meanwhile guides the search. Ends the process when it would not: a search without
    a guide looks like one that finds nothing."""
    # Without the finder of an editable installation, whose modules atheris leaves as they are.
    sys.meta_path[:] = [BuiltinImporter, FrozenImporter, PathFinder]
    with atheris.instrument_imports(include=[package]):
        yield
    modules = [module for name, module in sys.modules.items() if name.startswith(f"{package}.")]
    functions = [each for module in modules for each in vars(module).values() if isinstance(each, FunctionType)]
    if not any(_MARK in each.__code__.co_consts for each in functions):
        sys.exit(f"{package} is not instrumented, so nothing would guide the search; see atheris.instrument_imports")
