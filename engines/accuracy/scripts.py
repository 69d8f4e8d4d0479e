"""What Polygraphy's command line calls: network, data loader and comparison of a prepared folder.

A folder's ROLE.py is one line over this; `polygraphy run` takes that file for all three.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from engines.accuracy import weight_bytes
from engines.accuracy.graphs import EngineGraph, engine_graph
from engines.accuracy.inputs import Feed, load_feeds
from engines.accuracy.measures import Measure, measure_all
from engines.accuracy.plan import LOWERED, Plan, load_plan
from engines.accuracy.suspects import first_bad, suspect
from engines.accuracy.tolerances import tolerance_for
from engines.command import say
from engines.engine_manifest import Profile
from engines.manifest import Manifest
from engines.network import import_network
from plugins.load import load_plugins, prepare_parser

_TEMPLATE = '''"""Network, data loader and comparison for `polygraphy run`; written by `python -m engines.accuracy`."""
from pathlib import Path

from engines.accuracy.scripts import functions

load_network, load_data, compare_outputs = functions(Path(__file__).parent, "{role}")
'''
# Networks are built after this module has given them away; their weights must live as long.
_kept: list[EngineGraph] = []


def write_script(folder: Path, role: str) -> Path:
    path = folder / f"{role}.py"
    path.write_text(_TEMPLATE.format(role=role), encoding="utf-8")
    return path


def functions(folder: Path, role: str) -> tuple[Callable[[], Any], Callable[[], list[Feed]], Callable[..., Any]]:
    """load_network, load_data, compare_outputs of a role."""
    plan, manifest = load_plan(folder)

    def network() -> Any:
        return load_network(engine_graph(folder, role, plan, manifest), folder / LOWERED / role)

    def data() -> list[Feed]:
        return load_feeds(folder / f"{role}.npz")

    @cache
    def wrong_bytes() -> list[weight_bytes.Damage]:
        return weight_bytes.damages(folder / LOWERED, manifest, folder / weight_bytes.FILE_NAME)[0]

    def compare(first: Any, second: Any) -> OrderedDict[str, bool]:
        measures = compare_results(first, second, plan, manifest)
        print_measures(measures, role, plan.lowering == "layers")
        damaged = wrong_bytes()
        if damaged:
            say(f"weights: other bytes than the model's in {', '.join(map(str, damaged))}")
        return OrderedDict([("weights", not damaged), *((each.name, each.ok) for each in measures)])

    return network, data, compare


def load_network(graph: EngineGraph, place: Path) -> Any:
    """Builder, network and parser, the plugins loaded and the weights embedded. Raises EngineError."""
    load_plugins()
    prepare_parser()
    _kept.append(graph)
    places = [(name, array.ctypes.data, array.nbytes) for name, array in graph.weights.items()]
    return import_network(graph.model, place, places)


def compare_results(first: Any, second: Any, plan: Plan, manifest: Manifest) -> list[Measure]:
    """Two IterationResults of Polygraphy, in either order: the engine's is the one with pools and caches of its own."""
    results = [{name: np.asarray(value) for name, value in each.items()} for each in (first, second)]
    runners = [first.runner_name, second.runner_name]
    if any(name.endswith((".pool.out", ".cache.out")) for name in results[0]):
        results.reverse()
        runners.reverse()
    reference, engine = results
    tolerance = tolerance_for(runners[1], plan, len(engine["hidden.out"]))
    return measure_all(reference, engine, manifest.geometry, plan, tolerance)


def print_measures(measures: list[Measure], role: str, layers: bool = False) -> None:
    """A table, and the first place that is off. layers: see `suspects.suspect`."""
    width = max(len(short(each.name)) for each in measures)
    say(f"{role:<{width}} {'max error':>10} {'NMSE':>9} {'worst column':>13}  {'KL mean':>9} {'top-1':>6}")
    for each in measures:
        numbers = f"{each.max_abs:10.2g} {each.nmse:9.2g} {each.channel:13.2g}"
        extra = f"  {each.kl_mean:9.2g} {each.top1:6.3f}" if each.kl_mean is not None else " " * 18
        say(f"{short(each.name):<{width}} {numbers}{extra}{'' if each.ok else '  off'}".rstrip())
    bad = first_bad(measures)
    if bad is not None:
        say(f"first off: {bad.name}; suspect {suspect(measures, layers)}")


def short(name: str) -> str:
    """Of products side by side, the first's name."""
    first, *others = name.split("+")
    return f"{first} .. {others[-1].split('/')[-1]}" if others else name


def profile_shapes(graph: EngineGraph, limits: Profile) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Least and largest shape of every input whose size varies."""
    shapes = {}
    for value in graph.model.graph.input:
        dims = value.type.tensor_type.shape.dim
        if any(dim.dim_param for dim in dims):
            largest = limits.max_rows if value.name == "rows" else limits.max_tokens
            low, high = (tuple(dim.dim_value or size for dim in dims) for size in (1, largest))
            shapes[value.name] = low, high
    return shapes
