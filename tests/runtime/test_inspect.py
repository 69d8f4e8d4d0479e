"""`python -m runtime.inspect`: cards, bounds, memory, what is printed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engines.errors import EngineError, UsageError
from runtime import inspect
from runtime.cuda import Device
from runtime.inspection.cards import CARDS, card_named, find_cards
from runtime.inspection.roofline import Traffic, bounds
from tests.runtime.command import run_main
from tests.vocabulary_files import TRAINED_MODEL

Tiny = Callable[[str], Path]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> Device:
        raise EngineError("no NVIDIA GPU found (the driver shows none); check CUDA_VISIBLE_DEVICES and nvidia-smi")

    monkeypatch.setattr(inspect, "open_device", absent)


def report(model: Path, *flags: object) -> dict[str, Any]:
    return run_main(inspect.main, model, "--json", *flags).json


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "RTX 4070 Ti SUPER"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000 Blackwell"),
        ("NVIDIA L4", "L4"),
        ("5090", "RTX 5090"),
        ("rtx4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4070 Ti", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA L40", None),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_cards_by_name(name: str, card: str | None) -> None:
    assert [each.name for each in find_cards(name)] == ([] if card is None else [card])


def test_every_card_is_found_by_its_name() -> None:
    for card in CARDS:
        assert card_named(card.name) == card
    with pytest.raises(UsageError, match="RTX 5090"):
        card_named("Voodoo 2")
    with pytest.raises(UsageError, match="say which"):
        card_named("rtx")


def test_bounds() -> None:
    traffic = {"trunk": Traffic(4_000_000, 1_000_000, 1000), "draft": Traffic(500_000, 0, 500)}
    found = bounds(traffic, 1.0, 1000, 3)
    assert (found["pass_ms"], found["draft_ms"]) == (6.0, 1.0)
    assert found["tokens_per_second"] == pytest.approx(1000 / 6)
    assert found["drafting_tokens_per_second"] == pytest.approx(1000 * 4 / 9)
    assert bounds({"trunk": traffic["trunk"]}, 2.0, 0, 3)["drafting_tokens_per_second"] is None


def test_json_of_the_trained_model() -> None:
    found = report(TRAINED_MODEL, "--gpu", "h200", "-c", 2048)
    assert found["context"] == 2048 and found["name"] == "tiny-qwen35-mtp"
    for kind, plan in found["memory"]["tensorrt"].items():
        assert plan["kv_cache"] == kind
        parts = [value for part, value in plan.items() if part not in ("kv_cache", "context", "sequences", "total")]
        assert plan["total"] == sum(parts)
        # Three caches of keys and values, two heads of 256.
        assert plan["kv_caches"] == 3 * 2 * 2048 * 2 * (512 if kind == "f16" else 272)
    (card,) = found["roofline"]["cards"]
    assert (card["name"], card["fits"]) == ("H200", True)
    assert [place["position"] for place in card["bounds"]] == [0, 2047]
    trunk = found["roofline"]["traffic"]["trunk"]
    assert card["bounds"][0]["pass_ms"] == pytest.approx((trunk["weights"] + trunk["state"]) / 4800 / 1e6)
    assert trunk["kv_row"] == 2 * 2 * 2 * 512


def test_the_table() -> None:
    ran = run_main(inspect.main, TRAINED_MODEL, "--gpu", "4090")
    assert ran.code == 0 and ran.err == ""
    for words in (
        "NextN head   block 8",
        "native blocks  plugin, as it is",
        "trunk: 8 layers of one node each",
        "GPU, int8 KV caches",
        "RTX 4090",
        "mixed types, ffn down: 4 Q6_K, 4 Q4_K",
    ):
        assert words in ran.out
    assert not [line for line in ran.out.splitlines() if line != line.rstrip()]


def test_without_a_gpu_all_cards() -> None:
    found = report(TRAINED_MODEL)["roofline"]
    assert [card["name"] for card in found["cards"]] == [card.name for card in CARDS]
    assert "no GPU here" in found["note"]


def test_the_present_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect, "open_device", lambda: Device("NVIDIA H200", (9, 0)))
    monkeypatch.setattr(inspect, "free_and_total_bytes", lambda: (1, 60 << 20))
    (card,) = report(TRAINED_MODEL)["roofline"]["cards"]
    assert (card["name"], card["gb_per_s"], card["fits"]) == ("NVIDIA H200", 4800, False)
    monkeypatch.setattr(inspect, "open_device", lambda: Device("NVIDIA Z9", (12, 0)))
    found = report(TRAINED_MODEL)["roofline"]
    assert found["cards"] == [] and "NVIDIA Z9" in found["note"] and "--bandwidth" in found["note"]
    assert "NVIDIA Z9" in run_main(inspect.main, TRAINED_MODEL).out


def test_a_speed_of_ones_own() -> None:
    (card,) = report(TRAINED_MODEL, "--bandwidth", 500, "--gpu", "Z9")["roofline"]["cards"]
    assert (card["name"], card["gb_per_s"], card["fits"]) == ("Z9", 500, None)


def test_a_model_that_the_plugins_do_not_take(tmp_path: Path) -> None:
    from tests.tiny_gguf import Spec, build

    model = build(Spec(heads=18, kv_heads=2)).write(tmp_path / "nine_heads.gguf")
    found = report(model)
    assert found["memory"]["tensorrt"] == {} and found["roofline"]["cards"] == []
    assert "9 query heads" in found["tensorrt"]["refusal"]
    assert "TensorRT: not possible" in run_main(inspect.main, model).out


def test_without_a_draft_head(tiny: Tiny) -> None:
    ran = run_main(inspect.main, tiny("nextn_promised"), "--gpu", "L4")
    assert ran.code == 0 and "NextN head stripped" in ran.out and "draft:" not in ran.out


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        (["--gpu", "Voodoo"], 2, "--bandwidth"),
        (["--bandwidth", 0], 2, "GB/s"),
        (["--bandwidth", "nan"], 2, "GB/s"),
        (["-c", 5000], 2, "4096"),
    ],
)
def test_wrong_use(flags: list[object], code: int, says: str) -> None:
    run_main(inspect.main, TRAINED_MODEL, *flags).refused(code, says)


def test_wrong_files(tiny: Tiny, tmp_path: Path) -> None:
    run_main(inspect.main, tmp_path).refused(2, "folder")
    run_main(inspect.main, tmp_path / "none.gguf").refused(2, "no such file")
    run_main(inspect.main, tiny("html_page")).refused(3, "GGUF")


def test_the_docs_show_what_is_printed() -> None:
    page = (Path(__file__).parents[2] / "docs" / "inspect.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    printed = run_main(inspect.main, TRAINED_MODEL, "--gpu", "RTX 4090").out
    assert shown.splitlines()[1:] == printed.splitlines()[1:]  # the first names the file's place
