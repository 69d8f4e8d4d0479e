"""The synthetic model says and drafts what its tool predicts, with a whole draft head and a cut one."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize

from engines.draft_head import DraftHeadOptions
from export.gguf_file import GGUFFile
from export.token_frequencies import read_table
from runtime.benchmark.expected import load_expected
from tests.bench.make_synthetic_9b import main, write_model, write_table
from tests.bench.synthetic_text import GEOMETRIES, SyntheticText, vocabulary
from tests.exported import Exported, export, generate_tokens
from tests.tiny_gguf import Spec, q4_k_m_type

TINY = GEOMETRIES["tiny"]
IDS = 900  # ids of the text lie below
N_TOKENS = 48
PROMPT = [ord(character) for character in "The prompt ends with x"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("synthetic")


@pytest.fixture(scope="module")
def exported(folder: Path):  # type: ignore[no-untyped-def]
    """``exported(acceptance, options)``: the model, exported."""

    @cache
    def export_of(acceptance: float, options: DraftHeadOptions = DraftHeadOptions()) -> Exported:  # noqa: B008
        model = folder / f"{acceptance}.gguf"
        if not model.exists():
            write_model(model, SyntheticText(TINY, acceptance, IDS))
        return export(model, folder / f"{acceptance}-{options.key()}", options)

    return export_of


def check_run(model: Exported, text: SyntheticText, draft_n: int) -> None:
    trunk, draft = model.engines()
    tokens, _, stats = generate_tokens(trunk, draft, PROMPT, N_TOKENS, draft_n)
    want = text.run(PROMPT[-1], N_TOKENS, draft_n, trunk.max_rows)
    assert tokens == want.tokens
    found = (stats.verify_steps, stats.draft_n, stats.draft_n_accepted)
    assert found == (want.verify_steps, want.draft_n, want.draft_n_accepted)


@pytest.mark.parametrize("acceptance", [0.0, 0.625, 1.0])
@pytest.mark.parametrize("draft_n", [0, 1, 3])
def test_text_and_counts_come_out_as_predicted(exported, acceptance: float, draft_n: int) -> None:  # type: ignore[no-untyped-def]
    check_run(exported(acceptance), SyntheticText(TINY, acceptance, IDS), draft_n)


def test_a_cut_head_that_holds_the_text_by_id(exported) -> None:  # type: ignore[no-untyped-def]
    """Low ids first: the rows of all tokens below IDS, and the control tokens."""
    cut = exported(0.625, DraftHeadOptions(rows=IDS + 3))
    check_run(cut, SyntheticText(TINY, 0.625, IDS), 3)


def test_a_cut_head_by_table(exported, folder: Path) -> None:  # type: ignore[no-untyped-def]
    """A head too small for all ids of the text, but for those of this run. Without the table drafts get lost."""
    text, table = SyntheticText(TINY, 0.625, IDS), folder / "table"
    counts = text.counts(PROMPT[-1], N_TOKENS)
    write_table(table, text, counts)
    assert np.array_equal(read_table(GGUFFile.open(folder / "0.625.gguf"), table), counts)
    check_run(exported(0.625, DraftHeadOptions(rows=340, table=table)), text, 3)
    trunk, draft = exported(0.625, DraftHeadOptions(rows=340)).engines()
    tokens, _, stats = generate_tokens(trunk, draft, PROMPT, N_TOKENS, 3)
    want = text.run(PROMPT[-1], N_TOKENS, 3, trunk.max_rows)
    assert tokens == want.tokens and stats.draft_n_accepted < want.draft_n_accepted / 2


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.625, 1.0])
def test_the_share_of_right_drafts(acceptance: float) -> None:
    text = SyntheticText(GEOMETRIES["small"], acceptance, 6000)
    ordinary = np.array([*range(32, 127), *range(256, 8000)])
    right = text.draft[ordinary] == text.trunk[ordinary]
    assert right.mean() == pytest.approx(acceptance, abs=0.02 if 0 < acceptance < 1 else 0)
    for follower in (text.trunk, text.draft):
        assert np.array_equal(np.sort(follower), np.arange(8192)), "every LM head row is some token's"
    inside = text.after(ord("x"), 20000)
    assert max(inside) < 6000 and len(set(inside)) == 95 + 6000 - 256, "the cycle is walked whole"
    run = text.run(ord("x"), 2000, 3)
    expected = 1 + acceptance + acceptance**2 + acceptance**3
    assert 1 + run.draft_n_accepted / run.verify_steps == pytest.approx(expected, rel=0.05)


def test_an_acceptance_that_changes_along_the_text() -> None:
    text = SyntheticText(GEOMETRIES["small"], (0.9, 0.0, 0.5), 6000, 200)
    assert np.array_equal(text.trunk, SyntheticText(GEOMETRIES["small"], 0.3, 6000).trunk), "the text is the same"
    tokens = np.array([ord("x"), *text.after(ord("x"), 5399)])
    right = (text.draft[tokens[:-1]] == tokens[1:]).astype(float)
    # Where "x" stands within a stretch is chance, so: what share is right of every 100 tokens in a row?
    shares = np.convolve(right, np.ones(100) / 100, "valid")
    zero = shares == 0
    assert shares.max() > 0.82 and zero.mean() == pytest.approx(1 / 6, abs=0.02), "100 of each 600 places"
    assert right.mean() == pytest.approx(1.4 / 3, abs=0.03)
    with pytest.raises(ValueError, match="change_every"):
        SyntheticText(TINY, (0.9, 0.1), IDS)
    with pytest.raises(ValueError, match="change_every"):
        SyntheticText(TINY, 0.9, IDS, 5)
    with pytest.raises(ValueError, match="acceptance"):
        SyntheticText(TINY, (0.9, -0.1), IDS, 5)


def test_the_file(folder: Path, exported) -> None:  # type: ignore[no-untyped-def]
    """A sound GGUF of Q4_K_M's types, all of it data: no tensor is zero or constant, none repeats in another."""
    reader = gguf.GGUFReader(exported(0.625).model)
    spec = Spec(layers=TINY.layers, types="q4_k_m")
    seen = set()
    for tensor in reader.tensors:
        if tensor.name.endswith(".weight") and tensor.data.ndim == 2 and "conv1d" not in tensor.name:
            assert tensor.tensor_type == q4_k_m_type(tensor.name, spec), tensor.name
        values = dequantize(tensor.data, tensor.tensor_type)
        assert np.isfinite(values).all() and values.any()
        if "nextn" not in tensor.name and tensor.name != "output_norm.weight":
            assert values.std() > 0
            seen.add(tensor.data.tobytes())
    assert len(seen) == len([t for t in reader.tensors if "nextn" not in t.name]) - 1


def test_however_the_work_is_shared_out(folder: Path, exported, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    text = SyntheticText(TINY, 0.625, IDS)
    parallel = write_model(tmp_path / "parallel.gguf", text, jobs=2)
    assert parallel.read_bytes() == exported(0.625).model.read_bytes()
    write_model(parallel, SyntheticText(TINY, 1.0, IDS), rewrite_head=True)
    assert parallel.read_bytes() == exported(1.0).model.read_bytes()
    with pytest.raises(ValueError, match="no synthetic model of this geometry"):
        write_model(parallel, SyntheticText(GEOMETRIES["small"], 1.0, IDS), rewrite_head=True)


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--geometry", "tiny", "--text-ids", str(IDS), "--acceptance", "0.3"]
    main([*flags, "--expect", "12", "--table", str(tmp_path / "table"), "--write-expected", str(tmp_path / "expected")])
    out, err = capsys.readouterr()
    text = SyntheticText(TINY, 0.3, IDS)
    tokens, _ = vocabulary(TINY)
    assert out == "".join(tokens[token] for token in text.after(ord("x"), 12)).replace("Ġ", " ") + "\n"
    run = text.run(ord("x"), 12, 3)
    assert f"{run.verify_steps} steps, accepted {run.draft_n_accepted}/{run.draft_n}" in err
    assert (tmp_path / "table").exists()
    expected = load_expected(tmp_path / "expected", 12, TINY.vocab)
    assert (expected.after, list(expected.tokens)) == (ord("x"), run.tokens)
    assert [
        text.draft[before] == token for before, token in zip([ord("x"), *run.tokens], run.tokens, strict=False)
    ] == [*expected.right]
    main([str(tmp_path / "m.gguf"), *flags, "--jobs", "1"])
    assert "acceptance 0.3" in capsys.readouterr().out
    changing = ["--acceptance", "0.9,0", "--change-every", "7", "--rewrite-head"]
    main([str(tmp_path / "m.gguf"), *flags[:4], *changing, "--jobs", "1"])
    assert "acceptance 0.9,0.0" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"acceptance 1\.5"):
        SyntheticText(TINY, 1.5, IDS)
