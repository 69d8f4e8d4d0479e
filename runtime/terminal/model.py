"""What a chat needs of a model, wherever it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engines.errors import UsageError
from runtime.sampling import SamplingParams

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed")
# Other names that people know these by.
_ALIASES = {"temp": "temperature", "n": "max_tokens", "predict": "max_tokens"}


@dataclass
class Settings:
    """Of the replies to come. None: as the model's side has it; max_tokens None: until the context is full."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    spec: bool | None = None
    thinking: bool | None = None

    @property
    def numbers(self) -> dict[str, float | None]:
        """The values that `set` takes."""
        return {name: getattr(self, name) for name in (*_SAMPLING, "max_tokens")}

    def set(self, name: str, value: str) -> None:
        """Take a number in words; "default" takes a value back. Raises UsageError and changes nothing then."""
        name = name.replace("-", "_")
        name = _ALIASES.get(name, name)
        if name not in self.numbers:
            raise UsageError(f"there is no value {name!r}; wanted one of {', '.join(self.numbers)}")
        number: float | None = None
        if value != "default":
            try:
                number = float(value) if name in ("temperature", "top_p", "min_p") else int(value)
            except ValueError:
                raise UsageError(f"{name} {value!r}: wanted a number, or default") from None
        if name == "max_tokens" and number is not None and number < 0:
            raise UsageError(f"max_tokens {value}: wanted 0 or more, or default (until the context is full)")
        before = getattr(self, name)
        setattr(self, name, number)
        try:
            self.sampling().validate()
        except UsageError:
            setattr(self, name, before)
            raise

    def sampling(self) -> SamplingParams:
        """Greedy without filters, where nothing is set; a seed of -1 is to be drawn."""
        given = {name: getattr(self, name) for name in _SAMPLING if getattr(self, name) is not None}
        return SamplingParams(**{"seed": -1, **given})


@dataclass
class Reply:
    """A reply as far as it has come. finish_reason: "stop", "length" or "cancelled", "" while it runs. timings: see
    `runtime.spec_stats.SpecStats.timings`; empty where a server sends none."""

    reasoning: str = ""
    content: str = ""
    finish_reason: str = ""
    timings: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Delta:
    """What was added to a reply."""

    reasoning: str = ""
    content: str = ""


class ChatModel(Protocol):
    """Answers messages ({"role", "content", ...} each), one reply at a time."""

    name: str

    def reply(
        self, messages: Sequence[Mapping[str, str]], settings: Settings, reply: Reply, stopped: Callable[[], bool]
    ) -> Iterator[Delta]:
        """Yield a reply as it comes; at the end ``reply`` has its finish_reason and timings (the caller adds up the
        text). ``stopped`` is asked often. Raises what the model's side refuses, NextnError."""
