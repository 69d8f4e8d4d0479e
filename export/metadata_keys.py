"""Range-checked reading of the metadata keys below one prefix. Knows no model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engines.errors import ModelFileError
from export.gguf_file import GGUFFile

_MAX_COUNT = 2**31 - 1


@dataclass(frozen=True)
class MetadataKeys:
    """Keys ``prefix.name`` of ``file``. Without a default a key must exist; every refusal names file and key."""

    file: GGUFFile
    prefix: str

    def key(self, name: str) -> str:
        return f"{self.prefix}.{name}"

    def __contains__(self, name: str) -> bool:
        return self.key(name) in self.file.metadata

    def refuse(self, message: str, kind: str = "content") -> ModelFileError:
        """The error to raise for this file."""
        return ModelFileError(kind, f"{self.file.path}: {message}")

    def text(self, name: str, default: str | None = None) -> str:
        if default is not None:
            return self.file.get(self.key(name), str, default)
        return self.file.get(self.key(name), str)

    def number(self, name: str, default: float) -> float:
        """Any finite number."""
        value = self.file.get(self.key(name), float, default)
        if not math.isfinite(value):
            raise self.refuse(f"metadata key {self.key(name)!r} is {value}; wanted a finite number")
        return value

    def positive(self, name: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.file.get(self.key(name), float) if default is None else self.number(name, default)
        if not (math.isfinite(value) and value > 0):
            raise self.refuse(f"metadata key {self.key(name)!r} is {value}; wanted a positive number")
        return value

    def count(self, name: str, default: int | None = None, low: int = 1) -> int:
        """An integer from ``low`` to 2^31 - 1."""
        if default is not None and name not in self:
            return default
        value = self.file.get(self.key(name), int)
        if not low <= value <= _MAX_COUNT:
            raise self.refuse(f"metadata key {self.key(name)!r} is {value}; wanted {low} to {_MAX_COUNT}")
        return value

    def counts(self, name: str) -> tuple[int, ...]:
        """A list of integers, each from 0 to 2^31 - 1."""
        values = self.file.get(self.key(name), list[int])
        if any(not 0 <= value <= _MAX_COUNT for value in values):
            raise self.refuse(f"metadata key {self.key(name)!r} holds {values[:8]}; wanted 0 to {_MAX_COUNT} each")
        return tuple(values)

    def flags(self, name: str) -> list[bool] | None:
        """A list of booleans, which some converters write as integers; None when the key is absent."""
        value = self.file.metadata.get(self.key(name))
        if value is None:
            return None
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "biu":
            raise self.refuse(f"metadata key {self.key(name)!r} is no list of booleans")
        return [bool(each) for each in value]

    def per_block(self, name: str, counts: Sequence[bool]) -> int:
        """One number for all blocks, written once or as an array with one entry per block.

        ``counts`` says for which blocks the number means something; array entries of the others may be 0 instead.
        An array may stop one short, before the draft head's block.
        """
        if not isinstance(self.file.metadata.get(self.key(name)), np.ndarray):
            return self.count(name)
        values = self.counts(name)
        if len(values) not in (len(counts), len(counts) - 1):
            raise self.refuse(
                f"metadata key {self.key(name)!r} has {len(values)} entries; wanted one for each of the "
                f"{len(counts)} blocks"
            )
        distinct = set(values) - {0}
        zero_where_needed = any(counted and value == 0 for value, counted in zip(values, counts, strict=False))
        if len(distinct) != 1 or zero_where_needed:
            raise self.refuse(
                f"metadata key {self.key(name)!r} differs from block to block ({list(values[:8])}...); supported: one "
                "number, or 0 at the Gated DeltaNet blocks and one number at the others",
                "unsupported",
            )
        return distinct.pop()

    def check_multiple(self, name: str, value: int, divisor: int, divisor_name: str) -> None:
        if value % divisor:
            raise self.refuse(f"{name} is {value}; wanted a multiple of {divisor_name}, which is {divisor}")
