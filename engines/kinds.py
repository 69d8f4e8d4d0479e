"""Are the values of a dataclass that was read from a file of the kinds that it declares? Standard library only."""

from __future__ import annotations

import dataclasses
import types
from typing import Any, Union, get_args, get_origin, get_type_hints

# Of any number: bytes of a file, say.
_MOST = 1 << 50


def check_kinds(value: Any, kind: Any, where: str) -> None:
    """Raise ValueError at the first value that is not of its kind: dataclasses, tuples of any length, dicts, unions,
    strings that can be written, booleans, and integers from 0 to 2^50."""
    origin = get_origin(kind)
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, kind):  # type: ignore[arg-type]
            raise ValueError(f"{where} is {value!r}")
        hints = get_type_hints(kind)
        for field in dataclasses.fields(kind):
            check_kinds(getattr(value, field.name), hints[field.name], f"{where}: {field.name}")
    elif origin is tuple:
        if not isinstance(value, tuple):
            raise ValueError(f"{where} is {value!r}")
        for each in value:
            check_kinds(each, get_args(kind)[0], where)
    elif origin is dict:
        for key, each in value.items():
            check_kinds(key, get_args(kind)[0], where)
            check_kinds(each, get_args(kind)[1], f"{where}: {key!r}")
    elif origin in (Union, types.UnionType):
        fitting = [each for each in get_args(kind) if type(value) is each]
        if not fitting:
            raise ValueError(f"{where} is {value!r}")
        check_kinds(value, fitting[0], where)
    elif type(value) is not kind or (kind is int and not 0 <= value <= _MOST):
        raise ValueError(f"{where} is {value!r}")
    elif kind is str:
        value.encode()  # UnicodeEncodeError is a ValueError
