"""Each tool on each deliberately broken build: what it names. docs/accuracy.md has the table."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from engines import evidence
from engines.accuracy import __main__ as accuracy
from engines.witness import give_evidence
from export.exporter import export_model
from runtime import check, diagnosis, eval, inspect, profile
from runtime.session import open_session
from tests.dequantized import write_dequantized
from tests.documented import ROOT
from tests.faults import CONV, EH_PROJ, GRAPH, HALF, ROPE, SEMANTICS, STATE, V_HEADS
from tests.named_inputs import NAMED
from tests.peer.speculation import recorded
from tests.runtime.command import run_main
from tests.runtime.test_profile import engines_and_profile
from tests.vocabulary_files import TRAINED_MODEL

Tiny = Callable[[str], Path]
Patch = pytest.MonkeyPatch
ALL = {**GRAPH, **STATE}

# What the tools say of each fault. None: nothing, since a build that is wrong in itself agrees with itself.
ACCURACY = {
    V_HEADS: ("blk.0.state", "which key head a value head reads"),
    EH_PROJ: ("blk.4/concat", "enorm and hnorm, and which of them comes first"),
    HALF: ("blk.0.state", "the precision of the recurrent state"),
    CONV: ("blk.0.conv", "the window of the convolution: the slot"),
    ROPE: ("blk.3.key_cache", "rope (position, frequencies, pairs)"),
}
CHECK = {
    V_HEADS: None,
    EH_PROJ: "suspect eh_proj (the order of its halves)",
    HALF: "blk.0.state after 4 of 4 tokens of a pass; suspect the recurrent state, which is rounded between passes",
    CONV: "blk.0.conv after 1 of 4 tokens of a pass; suspect the convolution's window, which is not taken back",
    ROPE: None,
}
# What they say against the model's equations.
AGAINST = {
    V_HEADS: "blk.0.state is not what the model's equations give (NMSE 3.1e-01); suspect the order of value heads",
    EH_PROJ: "suspect eh_proj: its halves are the other way round (which explains it)",
    HALF: "suspect the precision of the recurrent state",
    CONV: "suspect the convolution's window, which is not taken back",
    ROPE: "suspect rope: each pair turns with the frequency of the next one (which explains it)",
}
SOUND = re.compile(
    r"(build: |  )as the model's equations have it, at 36 places|equations +equal   worst NMSE \S+ at 36 places"
)
PEER = {
    V_HEADS: "from position 0 on; suspect what the first token meets: weights, norms, order of heads",
    EH_PROJ: "suspect the head (order of eh_proj's halves, its norms), not the trunk",
    HALF: "suspect state after rejected drafts (rollback, or its precision)",
    CONV: "suspect state after rejected drafts (rollback, or its precision)",
    ROPE: "from position 1 on; suspect what only later tokens meet: rope",
}


@pytest.mark.parametrize("fault", ACCURACY)
def test_accuracy(
    tiny: Tiny, tmp_path: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    """Against a sound canonical graph: the fault is in the engine's graph, or in what runs it."""
    flags = ["--tokens", "12", "--max-draft", "2", "--backend", "oracle"]
    if fault in SEMANTICS:
        SEMANTICS[fault](monkeypatch)
    else:
        with monkeypatch.context() as patch:
            GRAPH[fault](patch)
            export_model(tiny("q4_k_m"), tmp_path / "engines", target="tensorrt")
        flags += ["--export", str(tmp_path / "engines")]
    assert accuracy.main([str(tiny("q4_k_m")), "-o", str(tmp_path / "x"), *flags]) == accuracy.EXIT_FAILED
    place, suspect = ACCURACY[fault]
    verdict = capsys.readouterr().out.rstrip().splitlines()[-1]
    assert verdict.startswith(f"FAILED: first off at {place} (") and suspect in verdict


@pytest.mark.parametrize("fault", GRAPH)
def test_accuracy_with_a_broken_exporter(
    tiny: Tiny, tmp_path: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    """Both forms, or the canonical one alone, are wrong: the reference is held against the model's equations."""
    GRAPH[fault](monkeypatch)
    flags = ["--tokens", "12", "--max-draft", "2", "--backend", "oracle", "--json", str(tmp_path / "r.json")]
    assert accuracy.main([str(tiny("q4_k_m")), "-o", str(tmp_path / "x"), *flags]) == accuracy.EXIT_FAILED
    verdict = capsys.readouterr().out.rstrip().splitlines()[-1]
    assert "the reference itself: " in verdict and AGAINST[fault].split("; ")[-1] in verdict
    assert verdict.startswith("FAILED: both forms alike") == (fault != V_HEADS)
    assert json.loads((tmp_path / "r.json").read_text())["reference"]["off"]
    assert accuracy.main([str(tmp_path / "x"), *flags[4:6], "--no-equations"]) == (fault == V_HEADS)


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Engines as if built, with a profile as if timed: this machine has no GPU."""
    return engines_and_profile(tmp_path_factory.mktemp("timed"))


@pytest.fixture
def equations(monkeypatch: Patch) -> None:
    """What the model's equations give is worked out once for all faults, which are none of its own."""
    monkeypatch.setattr(diagnosis, "evidence_of", lambda model, tokens: _evidence(model, tuple(tokens)))


@cache
def _evidence(model: Path, tokens: tuple[int, ...]) -> evidence.Evidence:
    return give_evidence(model, tokens)


@pytest.mark.parametrize("fault", [None, *CHECK])
def test_check_eval_inspect_profile(
    tmp_path: Path, timed: Path, monkeypatch: Patch, equations: None, fault: str | None
) -> None:
    """By itself a build shows a fault of its state, and a bad head, which changes no text, is warned of. Against the
    model's equations each of these tools names each fault."""
    build = tmp_path / "x"
    if fault:
        ALL[fault](monkeypatch)
    export_model(TRAINED_MODEL, build)
    (tmp_path / "prompt").write_text('{"category": "code", "prompt": "What does len do? Say it twice."}\n')
    said, named = CHECK.get(fault or ""), AGAINST.get(fault or "", "")
    monkeypatch.setattr(profile, "open_session", lambda folder: open_session(build, threads=1))
    for main, given in (
        (check.main, (build, "--n-prompts", 1, "--prompt-length", 8, "-n", 24, "--threads", 1)),
        (eval.main, (build, "--prompts", tmp_path / "prompt", "-n", 16, "--temps", 0, "--threads", 1)),
        (profile.main, (timed, "--trtexec", timed / "profile.json")),
    ):
        outcome = run_main(main, *given, "--against", TRAINED_MODEL)
        assert outcome.code == (1 if fault else 0) and named in outcome.err, outcome
        own = [line for line in outcome.err.splitlines() if not line.startswith("failed: build: ")]
        assert said in "\n".join(own) if said and main is not profile.main else not own
        if not fault:
            assert SOUND.search(outcome.out)
    looked = run_main(inspect.main, TRAINED_MODEL, "--gpu", "L4", "--build", build)
    assert looked.code == (1 if fault else 0) and named in looked.out
    assert fault or SOUND.search(looked.out)


class TestTrunkAgainstLlamaCpp:
    """One text of 40 tokens, through llama.cpp once."""

    pytestmark = pytest.mark.peer

    @pytest.fixture(scope="class")
    def corpus(self) -> list[list[int]]:
        return [run.prompt[:40] for run in recorded()[:2]]

    @pytest.fixture(scope="class")
    def theirs(self, corpus: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Any:
        from tests.bench.trunk_vs_llamacpp import llamacpp

        file = write_dequantized(TRAINED_MODEL, tmp_path_factory.mktemp("peer") / "f32.gguf")
        return llamacpp(file, corpus, 3, 1)

    @pytest.mark.parametrize("fault", [None, *PEER])
    def test_fault(
        self, corpus: list[list[int]], theirs: Any, tmp_path: Path, monkeypatch: Patch, fault: str | None
    ) -> None:
        from tests.bench.trunk_vs_llamacpp import judge, ours, table

        if fault:
            ALL[fault](monkeypatch)
        mine = ours(TRAINED_MODEL, tmp_path, corpus, 3)
        report = judge(mine, theirs, [i for text in corpus for i in range(len(text))], as_is=False)
        if fault is None:
            assert report["passed"] and "the trunk is UNCHANGED by the head's presence" in table(report)
        else:
            assert not report["passed"]
            (said,) = report["failures"]
            assert said.endswith(PEER[fault]) or f"{PEER[fault]}, " in said
        verdict = table(report).splitlines()[-1]
        assert ("and agrees with llama.cpp's" in verdict) == (fault not in (V_HEADS, ROPE))

    def test_command_line(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        from tests.bench.trunk_vs_llamacpp import main

        (tmp_path / "text").write_text("Return the length of an object. Sort a list of names.")
        flags = ["--corpus", str(tmp_path / "text"), "--json", str(tmp_path / "r.json"), "--as-is"]
        assert main(flags) == 0
        assert "the trunk is UNCHANGED by the head's presence" in capsys.readouterr().out
        assert json.loads((tmp_path / "r.json").read_text())["trunk_unchanged_by_head"] is True
        run_main(main, "--corpus", tmp_path / "none").refused(2, "--corpus: cannot be read")
        (tmp_path / "text").write_text("a")
        run_main(main, "--corpus", tmp_path / "text").refused(2, "no text of two tokens")
        run_main(main, "--json", tmp_path).refused(2, "is a folder")
        for flag in ("--texts", "--tokens", "--drafts", "--threads"):
            for value in (0, -1, 1000000000):
                run_main(main, flag, value).refused(2, f"{flag} {value}: wanted")
        run_main(main, "--tokens", 4096).refused(2, "of the model's 4096")
        (tmp_path / "x.gguf").write_bytes(b"GGUF")
        run_main(main, tmp_path / "x.gguf").refused(3, "x.gguf")
        run_main(main, tmp_path / "none.gguf").refused(2, "none.gguf: no such file")
        run_main(main, NAMED["nextn_absent"](tmp_path / "plain.gguf")).refused(2, "plain.gguf: has no NextN head")


def test_the_table_in_the_docs() -> None:
    page = (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ")][-len(ACCURACY) :]
    for fault, row, (place, _), said in zip(ACCURACY, rows, ACCURACY.values(), CHECK.values(), strict=True):
        _, _, accuracy_says, check_says, against_says, peer_says, _ = row.split("|")
        assert re.sub(r"blk\.[1-9]", "blk.N", f"`{place}`") in accuracy_says
        assert (check_says.strip() == "-") == (said is None) and peer_says.strip()
        assert re.split("suspect |: ", AGAINST[fault])[-1].split(" (")[0].split(",")[0] in against_says
