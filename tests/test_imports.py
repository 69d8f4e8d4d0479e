"""Imports point one way, and product files stay small. Read from the source."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PRODUCT = ("export", "plugins", "engines", "runtime")
MAX_LINES = 300

# What each part may import of this project; packages may also import from themselves, modules of ALONE may not.
ALLOWED = {
    "plugins.ops": (),
    "engines.errors": (),
    "engines.signals": (),
    "engines.work_folders": (),
    "engines.command": ("engines.errors", "engines.signals"),
    "engines.sizes": (),
    "engines.given_files": ("engines.errors",),
    "engines.report_files": ("engines.errors", "engines.given_files"),
    "engines.sealed_json": (),
    "engines.manifest": ("engines.errors", "engines.given_files", "engines.sealed_json"),
    "engines.draft_head": ("engines.errors", "engines.given_files"),
    "engines": ("export", "plugins"),
    "plugins": ("engines.errors",),
    "engines.whole_files": ("engines.manifest", "engines.errors"),
    "export": (
        "plugins.ops",
        "engines.manifest",
        "engines.whole_files",
        "engines.draft_head",
        "engines.command",
        "engines.given_files",
        "engines.signals",
        "engines.sizes",
        "engines.work_folders",
        "engines.errors",
    ),
    "runtime": (
        "plugins.load",
        "plugins.log",
        "engines.manifest",
        "engines.draft_head",
        "engines.engine_manifest",
        "engines.planned_model",
        "engines.evidence",
        "engines.memory_plan",
        "engines.command",
        "engines.signals",
        "engines.given_files",
        "engines.report_files",
        "engines.whole_files",
        "engines.sizes",
        "engines.cache",
        "engines.work_folders",
        "engines.errors",
    ),
}
ALONE = (
    "plugins.ops",
    "engines.errors",
    "engines.sizes",
    "engines.signals",
    "engines.work_folders",
    "engines.given_files",
    "engines.sealed_json",
    "engines.command",
    "engines.manifest",
    "engines.draft_head",
)
# Its functions export a .gguf that a command line was given, or describe what it would become.
EXPORTS_ON_DEMAND = "runtime.model_cache"
ON_DEMAND = ("export", "engines.description", "engines.witness")
# What a machine that only runs exported folders does without.
NOT_FOR_RUNTIME = ("onnx", "onnx_graphsurgeon", "gguf")


@dataclass(frozen=True)
class Import:
    module: str  # the one that imports
    name: str  # what it imports, as deep as known: package.module.name
    line: int
    in_function: bool

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.name}"

    def within(self, *packages: str) -> bool:
        return any(self.name == package or self.name.startswith(f"{package}.") for package in packages)


def product_files() -> list[Path]:
    files = [path for package in PRODUCT for path in sorted((ROOT / package).rglob("*.py"))]
    assert len(files) > 30
    return files


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports_of(path: Path) -> Iterator[Import]:
    """Every import statement of a file, those inside functions too."""

    def walk(node: ast.AST, in_function: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                names = [alias.name for alias in child.names]
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0 and child.module, f"{path}:{child.lineno}: imports are absolute"
                names = [f"{child.module}.{alias.name}" for alias in child.names]
            else:
                inside = in_function or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
                yield from walk(child, inside)
                continue
            for name in names:
                yield Import(module_of(path), name, child.lineno, in_function)

    return walk(ast.parse(path.read_text(encoding="utf-8")), False)


def imports(*packages: str) -> list[Import]:
    found = [each for path in product_files() if module_of(path).split(".")[0] in packages for each in imports_of(path)]
    assert found
    return found


def refused(each: Import) -> bool:
    """Whether an import goes against ALLOWED."""
    if not each.within(*PRODUCT, "tests"):
        return False
    if each.module == EXPORTS_ON_DEMAND and each.in_function and each.within(*ON_DEMAND):
        return False
    package = each.module.split(".")[0]
    part = each.module if each.module in ALONE else package
    return not each.within(*ALLOWED[part], *(() if part in ALONE else (package,)))


def test_imports_point_one_way() -> None:
    assert [str(each) for each in imports(*PRODUCT) if refused(each)] == []


@pytest.mark.parametrize(
    ("module", "name", "in_function", "wrong"),
    [
        ("export.layers", "export.graph.Graph", False, False),
        ("export.layers", "plugins.ops", False, False),
        ("export.layers", "plugins.load.tensorrt", False, True),
        ("export.layers", "runtime.engine", True, True),
        ("export.layers", "engines.build.main", False, True),
        ("runtime.session", "export.exporter", True, True),
        ("runtime.session", "engines.manifest.Manifest", False, False),
        ("runtime.session", "engines.build", False, True),
        ("runtime.model_cache", "export", True, False),
        ("runtime.model_cache", "export.exporter", False, True),
        ("runtime.model_cache", "engines.description.describe", True, False),
        ("runtime.model_cache", "engines.description.describe", False, True),
        ("runtime.inspect", "engines.description.describe", True, True),
        ("runtime.model_cache", "tests.compare", True, True),
        ("engines.manifest", "engines.errors.EngineError", False, False),
        ("engines.manifest", "engines.build", False, True),
        ("engines.errors", "engines.manifest", False, True),
        ("plugins.ops", "plugins.load", False, True),
        ("plugins.ops", "dataclasses.dataclass", False, False),
    ],
)
def test_the_rule_itself(module: str, name: str, in_function: bool, wrong: bool) -> None:
    assert refused(Import(module, name, 1, in_function)) == wrong


def test_leaves_need_the_standard_library_alone() -> None:
    files = [path for path in product_files() if module_of(path) in ALONE]
    assert len(files) == len(ALONE)
    outside = [
        str(each)
        for path in files
        for each in imports_of(path)
        if each.name.split(".")[0] not in sys.stdlib_module_names and not each.within(*ALLOWED[each.module])
    ]
    assert outside == []


def test_runtime_needs_no_exporter_packages() -> None:
    assert [str(each) for each in imports("runtime") if each.within(*NOT_FOR_RUNTIME)] == []


def test_loading_the_command_lines_loads_no_exporter() -> None:
    """What runtime imports must not bring them along either."""
    code = (
        "import runtime.chat, runtime.check, runtime.engine_onnxruntime, runtime.eval, runtime.generate\n"
        "import runtime.inspect, runtime.serve, runtime.server.app, sys\n"
        f"print(*sorted({{name.split('.')[0] for name in sys.modules}} & {{'export', 'tests', *{NOT_FOR_RUNTIME}}}))"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == []


def test_product_files_are_small() -> None:
    lines = {module_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in product_files()}
    assert {module: n for module, n in lines.items() if n > MAX_LINES} == {}
