"""Nothing in the product turns data into code: no pickle, no eval, no shell. Read from the source."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PRODUCT = ("export", "plugins", "engines", "runtime")
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib", "code", "codeop", "pty", "yaml"}
CALLS = {"eval", "exec", "compile", "__import__"}
SHELLS = {"os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"}


def faults(source: str) -> list[str]:
    """What of it there is, with its line."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names]
            found += [f"{node.lineno}: imports {name}" for name in names if name.split(".")[0] in MODULES]
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id in CALLS:
            found.append(f"{node.lineno}: calls {node.func.id}")
        if ast.unparse(node.func) in SHELLS:
            found.append(f"{node.lineno}: calls {ast.unparse(node.func)}")
        for keyword in node.keywords:
            if keyword.arg in ("shell", "allow_pickle") and not (
                isinstance(keyword.value, ast.Constant) and keyword.value.value is False
            ):
                found.append(f"{node.lineno}: {keyword.arg}")
    return found


@pytest.mark.parametrize("package", PRODUCT)
def test_product(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    found = {str(path): faults(path.read_text(encoding="utf-8")) for path in files}
    assert not {path: each for path, each in found.items() if each}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "x = eval(y)",
        "import os\nos.system('x')",
        "import subprocess\nsubprocess.run('x', shell=True)",
        "import numpy as np\nnp.load(f, allow_pickle=True)",
        "def f():\n    import yaml",
    ],
)
def test_it_is_noticed(source: str) -> None:
    assert faults(source)


def test_what_is_harmless_is_not() -> None:
    assert not faults("import subprocess, re\nsubprocess.run(['x'], shell=False)\nre.compile('x')\nmodel.eval()")
