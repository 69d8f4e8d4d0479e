"""Manifests in which one value is another, or gone: refused by their seal, which a bit of damage breaks; sealed again,
the model opens and works, or it is said to be unusable."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engines.engine_manifest import ENGINES_NAME, load_engine_manifest
from engines.errors import EngineError, NextnError
from engines.manifest import MANIFEST_NAME, load_manifest
from engines.memory_plan import plan_memory
from engines.sealed_json import write_sealed
from runtime.sampling import SamplingParams
from runtime.session import open_session
from runtime.speculative import SpecStats
from tests.exported import Exported
from tests.runtime.fake_passes import GEOMETRY
from tests.runtime.fake_tensorrt import toy_manifest, write_engines

VALUES = (-1, 0, 2**63, 1e308, float("nan"), None, True, "", "../x", "a\0b", "\ud800", [], {}, [1, 2])


def damaged(whole: Any) -> Iterator[Any]:
    """Each value in turn replaced by three of VALUES, and left out."""
    for number, path in enumerate(_paths(whole)):
        for value in (VALUES[(5 * number + 3 * i) % len(VALUES)] for i in range(3)):
            changed = copy.deepcopy(whole)
            _owner(changed, path)[path[-1]] = value
            yield changed
        changed = copy.deepcopy(whole)
        del _owner(changed, path)[path[-1]]
        yield changed


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    places = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for place, each in places:
        yield from _paths(each, (*path, place))


def _owner(value: Any, path: tuple[Any, ...]) -> Any:
    for place in path[:-1]:
        value = value[place]
    return value


def outcomes(file: Path, use: Callable[[], object]) -> tuple[int, int]:
    """How many of the damaged ones work, and how many are refused."""
    whole, counts = json.loads(file.read_text()), [0, 0]
    for changed in damaged(whole):
        write_sealed(file, changed)
        try:
            use()
            counts[0] += 1
        except NextnError as error:
            assert "\n" not in str(error)
            counts[1] += 1
    return counts[0], counts[1]


def test_of_an_export(exported: Callable[[str], Exported], tmp_path: Path) -> None:
    source = exported("bigram_ring").folder
    for file in source.iterdir():
        if file.name == MANIFEST_NAME:
            (tmp_path / file.name).write_bytes(file.read_bytes())
        else:
            (tmp_path / file.name).symlink_to(file)

    def use() -> None:
        session = open_session(tmp_path, threads=1, context_size=16)
        assert list(session.generate([40], SamplingParams(), max_tokens=2, stats=SpecStats())) is not None

    work, refused = outcomes(tmp_path / MANIFEST_NAME, use)
    assert work >= 8 and refused > 120, (work, refused)


def test_of_engines(tmp_path: Path) -> None:
    """Up to what TensorRT itself would have to find: names of its tensors, say."""
    write_engines(tmp_path, toy_manifest())

    def use() -> None:
        manifest = load_engine_manifest(tmp_path)
        plan = plan_memory(manifest, GEOMETRY, tuple(manifest.engines), 0)
        plan.check(1 << 40, 1 << 40)
        for role in manifest.engines:
            manifest.file(tmp_path, role)

    work, refused = outcomes(tmp_path / ENGINES_NAME, use)
    assert work >= 20 and refused > 400, (work, refused)


@pytest.mark.parametrize("name", [MANIFEST_NAME, ENGINES_NAME])
def test_a_flipped_bit_anywhere(exported: Callable[[str], Exported], tmp_path: Path, name: str) -> None:
    """A digit that is another one, a list of end tokens with another in it, a name that nothing looks for."""
    load: Callable[[Path], object] = load_manifest if name == MANIFEST_NAME else load_engine_manifest
    if name == MANIFEST_NAME:
        exported("bigram_ring").manifest.save(tmp_path)
    else:
        write_engines(tmp_path, toy_manifest())
    whole, same = (tmp_path / name).read_bytes(), load(tmp_path)
    other = 0
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 1 << (0 if chr(whole[place]).isdigit() else place % 7)
        (tmp_path / name).write_bytes(changed)
        try:
            assert load(tmp_path) == same  # white space
        except EngineError as error:
            assert "\n" not in str(error)
            other += "not what was written" in str(error)
    assert other > 100
