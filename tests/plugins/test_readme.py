"""plugins/README.md says what the contract says: every op, tensor, attribute and refusal."""

from __future__ import annotations

from pathlib import Path

import pytest

from plugins import ops

README = Path(ops.__file__).with_name("README.md").read_text(encoding="utf-8")


def section(name: str) -> str:
    return README.split(f"\n## {name}\n")[1].split("\n## ")[0]


@pytest.mark.parametrize("op", ops.OPS.values(), ids=lambda op: op.name)
def test_readme_matches_the_contract(op: ops.Op) -> None:
    text = section(op.name)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    listed = {(kind, name, dtype, shape) for kind, name, dtype, shape, _ in rows[1:]}
    assert listed == {
        (kind, f"`{tensor.name}`", tensor.dtype, tensor.shape)
        for kind, tensors in (("in", op.inputs), ("out", op.outputs))
        for tensor in tensors
    }
    assert op.meaning.lower() in text.lower()
    for attribute in op.attributes:
        assert f"`{attribute.name}` ({attribute.kind}" in text
    for refusal in op.refuses:
        assert refusal in text


def test_readme_lists_no_other_op() -> None:
    titles = {line[3:] for line in README.splitlines() if line.startswith("## ")}
    assert titles - {"TensorRT-RTX 1.6"} == set(ops.OPS)
