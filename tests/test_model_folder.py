"""The trained model's folder: the file is the documented one, and the scripts that made it still start."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent / "model"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(FOLDER / "train.py"), *arguments], capture_output=True, text=True, timeout=120, check=False
    )


def test_the_model_is_the_documented_one():
    readme = (FOLDER / "README.md").read_text()
    data = (FOLDER / "tiny-qwen35-mtp-Q4_K_M.gguf").read_bytes()
    assert hashlib.sha256(data).hexdigest() in readme
    assert f"{len(data):,} bytes" in readme


def test_the_scripts_explain_themselves_without_torch():
    done = run("--help")
    assert done.returncode == 0 and "train.py data" in done.stdout


def test_data_preparation_reads_documents_and_refuses_too_few(tmp_path):
    page = tmp_path / "src" / "python3-doc" / "library" / "itertools.rst"
    page.parent.mkdir(parents=True)
    sentence = "Make an iterator that returns elements from the first iterable until it is exhausted."
    words = "\n\n".join(f"Paragraph {n} says something of its own about iterators, at some length." for n in range(20))
    page.write_text(f".. module:: itertools\n\n.. function:: chain(*iterables)\n\n   {sentence}\n\n{words}\n")
    done = run("data", "--src", str(tmp_path / "src"), "--out", str(tmp_path / "out"))
    assert "1 documents, 0.0 MB train, 0.0 MB held out, 1 facts" in done.stdout
    assert done.returncode == 1 and "the text is enough for a vocabulary of" in done.stderr
