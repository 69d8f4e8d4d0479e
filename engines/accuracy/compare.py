"""A model's two forms made ready, run by Polygraphy, and compared place by place."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from polygraphy.backend.onnxrt import OnnxrtRunner
from polygraphy.comparator import Comparator, RunResults
from polygraphy.exception import PolygraphyException
from polygraphy.logger import G_LOGGER

from engines.accuracy import weight_bytes
from engines.accuracy.graphs import EngineGraph, engine_graph, write_marked_reference
from engines.accuracy.inputs import Feed, load_feeds, make_feeds, save_feeds, session
from engines.accuracy.measures import Measure
from engines.accuracy.plan import CANONICAL, LOWERED, PLAN_NAME, Plan, load_plan, roles_of
from engines.accuracy.runner import SemanticsRunner
from engines.accuracy.scripts import compare_results, load_network, profile_shapes, write_script
from engines.accuracy.tolerances import ORACLE_RUNNER
from engines.draft_head import DraftHeadOptions
from engines.engine_manifest import Profile
from engines.errors import EngineError, UsageError
from engines.given_files import reason
from engines.manifest import Manifest, load_manifest
from engines.whole_files import verify_whole
from engines.work_folders import new_parents_removed
from export.config import load_config
from export.exporter import WHOLE_HEAD, export_model
from export.gguf_file import GGUFFile
from plugins.load import tensorrt

REFERENCE = "onnxruntime"
TENSORRT, ORACLE = "tensorrt", ORACLE_RUNNER
BACKENDS = (TENSORRT, ORACLE)


@dataclass(frozen=True)
class Comparison:
    """One pass of one role."""

    role: str
    index: int
    tokens: int
    measures: list[Measure]

    @property
    def ok(self) -> bool:
        return all(each.ok for each in self.measures)


def prepare(
    model: Path,
    folder: Path,
    plan: Plan,
    text: str,
    export: Path | None = None,
    draft_head: DraftHeadOptions = WHOLE_HEAD,
    draft: bool = True,
) -> None:
    """Fill ``folder`` (see `plan`). export: an exported folder for TensorRT to check, instead of a fresh one. draft
    False: the trunk alone.

    A file that is no model leaves no folder. Raises ModelFileError, UsageError, EngineError, ResourceError."""
    if folder.exists() and any(folder.iterdir()) and not (folder / CANONICAL).is_dir():
        raise UsageError(f"{folder}: holds something else; choose another -o")
    if not model.is_file():
        raise UsageError(f"{model}: no such file; give a .gguf file, or a folder that was prepared")
    load_config(GGUFFile.open(model), draft=draft)
    with new_parents_removed(folder / CANONICAL / "export"):
        (folder / CANONICAL).mkdir(parents=True, exist_ok=True)
        (folder / PLAN_NAME).unlink(missing_ok=True)
        manifest = export_model(model, folder / CANONICAL, draft=draft, draft_head=draft_head)
    fresh = export_model(model, folder / LOWERED, draft=draft, target="tensorrt", draft_head=draft_head)
    weight_bytes.remember(folder / LOWERED, fresh, folder / weight_bytes.FILE_NAME)
    if export is not None:
        _take(export, folder / LOWERED, manifest)
    feeds = make_feeds(folder, plan, manifest, text)
    lowered = load_manifest(folder / LOWERED)
    for role in roles_of(lowered):
        if role not in feeds:
            raise UsageError(f"{export}: has a draft head, {model} has none; give the model that it was exported from")
        # After every op: what is off after a layer is looked for among its parts.
        write_marked_reference(folder, role, engine_graph(folder, role, replace(plan, lowering="ops"), lowered).model)
        save_feeds(folder / f"{role}.npz", feeds[role])
        outputs_of(folder, role).unlink(missing_ok=True)  # of other passes
        write_script(folder, role)
    plan.save(folder)


def _take(export: Path, target: Path, canonical: Manifest) -> None:
    """An export under another name, its files linked."""
    manifest = load_manifest(export)
    if manifest.target != "tensorrt":
        raise UsageError(f"{export}: exported for {manifest.target}; give one made with --target tensorrt")
    if manifest.content_key != canonical.content_key:
        raise UsageError(f"{export}: exported from another model; give the .gguf that it was made from")
    if manifest.draft_head_key != canonical.draft_head_key:
        raise UsageError(f"{export}: exported with another LM head for the drafts; give the same --draft-head-...")
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for role in manifest.files:
        path = manifest.file(export, role)
        (target / path.name).symlink_to(path.resolve())
    manifest.save(target)


def compare(
    folder: Path, backend: str, reference: bool = True, lowering: str = "", only: str = ""
) -> Iterator[Comparison]:
    """Run both sides of a prepared folder, role by role. reference False: its outputs are read if they are there.
    lowering: instead of the plan's. only: this role alone.

    Raises EngineError."""
    plan, manifest = load_plan(folder)
    plan = replace(plan, lowering=lowering or plan.lowering)
    with quiet():
        for role in [only] if only else roles_of(manifest):
            feeds, outputs = load_feeds(folder / f"{role}.npz"), outputs_of(folder, role)
            if reference or not outputs.is_file():
                _run_reference(folder, role, feeds)
            ours = _runner(engine_graph(folder, role, plan, manifest), backend, folder, role, plan)
            results = _load_outputs(outputs, len(feeds))
            results.extend(Comparator.run([ours], feeds, save_outputs_path=str(folder / f"{role}.{backend}.json")))
            found: list[list[Measure]] = []

            def judge(first: Any, second: Any, found: list[list[Measure]] = found) -> dict[str, bool]:
                found.append(compare_results(first, second, plan, manifest))
                return {each.name: each.ok for each in found[-1]}

            Comparator.compare_accuracy(results, compare_func=judge)
            for index, (feed, measures) in enumerate(zip(feeds, found, strict=True)):
                yield Comparison(role, index, len(feed["tokens"]), measures)


def inside_layer(folder: Path, backend: str, bad: Comparison) -> Comparison | None:
    """The same pass with a layer's parts as nodes of their own, to tell which of them is off; None: none is.

    Raises EngineError."""
    parts = compare(folder, backend, reference=False, lowering="ops", only=bad.role)
    return next((each for each in parts if each.index == bad.index and not each.ok), None)


def damaged_weights(folder: Path) -> tuple[list[weight_bytes.Damage], int]:
    """Of a prepared folder: what engines would read that is not the model's, and how many tensors were looked at.

    Raises EngineError, also for bytes that only the equations would take from a damaged file."""
    _, manifest = load_plan(folder)
    found, count = weight_bytes.damages(folder / LOWERED, manifest, folder / weight_bytes.FILE_NAME)
    if not found:
        verify_whole(folder / LOWERED, manifest)
    return found, count


def run_reference(folder: Path) -> None:
    """ONNX Runtime's side of a prepared folder, for a machine without it. Raises EngineError."""
    _, manifest = load_plan(folder)
    with quiet():
        for role in roles_of(manifest):
            _run_reference(folder, role, load_feeds(folder / f"{role}.npz"))


def _run_reference(folder: Path, role: str, feeds: list[Feed]) -> None:
    canonical = OnnxrtRunner(session(folder / CANONICAL / f"{role}.marked.onnx"), REFERENCE)
    Comparator.run([canonical], feeds, save_outputs_path=str(outputs_of(folder, role)))


def _load_outputs(path: Path, count: int) -> RunResults:
    """Of ``count`` passes. Raises EngineError."""
    try:
        results = RunResults.load(str(path))
        found = [len(iterations) for _, iterations in results]
    except (OSError, ValueError, TypeError, AttributeError, LookupError, RecursionError, PolygraphyException) as error:
        raise EngineError(f"{path}: cannot be read ({reason(error)}); make it anew with --again") from error
    if found != [count]:
        raise EngineError(f"{path}: holds {found} passes, wanted one run of {count}; make it anew with --again")
    return results


def outputs_of(folder: Path, role: str) -> Path:
    """What the reference gave."""
    return folder / f"{role}.{REFERENCE}.json"


def _runner(graph: EngineGraph, backend: str, folder: Path, role: str, plan: Plan) -> Any:
    if backend == ORACLE:
        return SemanticsRunner(graph, ORACLE)
    from polygraphy.backend.trt import EngineFromNetwork, TrtRunner

    return TrtRunner(EngineFromNetwork(lambda: load_network(graph, folder / LOWERED / role), build_config(graph, plan)))


def build_config(graph: EngineGraph, plan: Plan) -> Any:
    """Polygraphy's configuration: one profile over all passes, state in place."""
    from polygraphy.backend.trt import CreateConfig
    from polygraphy.backend.trt import Profile as Shapes

    shapes = Shapes()
    for name, (low, high) in profile_shapes(graph, limits(plan)).items():
        shapes.add(name, low, high, high)
    feature = tensorrt().module.PreviewFeature.ALIASED_PLUGIN_IO_10_03
    return CreateConfig(profiles=[shapes], preview_features=[feature])


def limits(plan: Plan) -> Profile:
    return Profile("all", plan.prompt_n, plan.prompt_n)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without Polygraphy's own log; what it raises is told by us."""
    try:
        with G_LOGGER.verbosity(G_LOGGER.CRITICAL + 1):
            yield
    except PolygraphyException as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise EngineError(f"Polygraphy: {lines[0] if lines else type(error).__name__}") from error
