"""What a comparison comes to: a line a pass, what is off first and why, and the report."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from engines.accuracy.compare import Comparison
from engines.accuracy.plan import Plan
from engines.accuracy.suspects import first_bad, suspect
from engines.accuracy.tolerances import tolerance_for
from engines.accuracy.weight_bytes import Damage
from engines.evidence import Place
from engines.evidence import first_off as first_off_equations

FORMAT = 2
_MOST_NAMED = 3


@dataclass(frozen=True)
class Verdict:
    """done: of every pass. inside: the first pass that is off once more, its layers as their parts, where layers were
    compared; None: no part is off. damaged: weights that are not the model's, of ``tensors``."""

    done: list[Comparison]
    damaged: list[Damage]
    tensors: int
    layers: bool = False
    inside: Comparison | None = None
    equations: list[Place] | None = None  # the reference against the model's equations; None: not looked at

    @property
    def passed(self) -> bool:
        return self.bad is None and not self.damaged and not self.misled

    @property
    def misled(self) -> str:
        """What is wrong with the reference itself; "" for nothing."""
        return "; ".join(first_off_equations(self.equations or []))

    @property
    def bad(self) -> Comparison | None:
        return next((each for each in self.done if not each.ok), None)

    @property
    def first_off(self) -> str:
        """The name of the first place that is off; "" when none is."""
        first = first_bad(self.bad.measures) if self.bad else None
        return first.name if first else ""

    @property
    def suspect(self) -> str:
        """What may be wrong; "" when nothing is."""
        misled = f"the reference itself: {self.misled}" if self.misled else ""
        bad, named = self.bad, "; ".join(filter(None, (self._named(), misled)))
        if bad is None:
            return named
        if self.inside is not None:
            first = first_bad(self.inside.measures)
            assert first is not None
            said = suspect(self.inside.measures)
            if first.name != self.first_off:
                said += f" (of the layer's parts {first.name} is off first)"
        elif self.layers:
            said = "what makes a layer one node, its kernels or its pack of weights: as single ops its parts are right"
        else:
            said = suspect(bad.measures)
        return f"{said}; {named}" if named else said

    def _named(self) -> str:
        if not self.damaged:
            return ""
        more = f", and in {len(self.damaged) - _MOST_NAMED} tensors more" if len(self.damaged) > _MOST_NAMED else ""
        return "other bytes than the model's in " + ", ".join(map(str, self.damaged[:_MOST_NAMED])) + more

    def summary(self) -> str:
        """For people, the verdict last."""
        lines = [_line(each) for each in self.done]
        if not self.damaged:
            lines.append(f"weights: {self.tensors} tensors, byte for byte the model's")
        if self.equations and not self.misled:
            worst = max(place.nmse for place in self.equations)
            places = f"{len(self.equations)} places as the model's equations have them"
            lines.append(f"reference: {places}, worst NMSE {worst:.1e}")
        if self.passed:
            return "\n".join([*lines, "passed"])
        if self.bad is None:
            said = f"both forms alike, {self.suspect}"
            if self.damaged:
                said = f"{self.suspect}; these passes do not show it"
            return "\n".join([*lines, f"FAILED: {said}"])
        where = f"{self.first_off} ({self.bad.role}, {self.bad.tokens} tokens)"
        return "\n".join([*lines, f"FAILED: first off at {where}; suspect {self.suspect}"])

    def as_dict(self, backend: str, plan: Plan) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "passed": self.passed,
            "backend": backend,
            "plan": asdict(plan),
            "first_off": self.first_off or None,
            "suspect": self.suspect or None,
            "reference": None
            if self.equations is None
            else {"places": [asdict(place) for place in self.equations], "off": self.misled or None},
            "weights": {"tensors": self.tensors, "damaged": [each.as_dict() for each in self.damaged]},
            "passes": [
                {
                    "role": each.role,
                    "tokens": each.tokens,
                    "tolerance": asdict(tolerance_for(backend, plan, each.tokens)),
                    "places": [measure.as_dict() for measure in each.measures],
                }
                for each in self.done
            ],
        }


def _line(each: Comparison) -> str:
    worst = max(each.measures, key=lambda measure: measure.nmse if measure.nmse == measure.nmse else float("inf"))
    logits = next(measure for measure in each.measures if measure.name == "logits")
    return (
        f"{each.role:<6} {each.tokens:>4} tokens: {len(each.measures)} places, worst NMSE {worst.nmse:.1e} at "
        f"{worst.name.split('+')[0]}; logits: max error {logits.max_abs:.1e}, KL {logits.kl_mean:.1e}, "
        f"top-1 {logits.top1:.3f}"
    )
