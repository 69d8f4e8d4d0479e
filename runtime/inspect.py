"""`python -m runtime.inspect MODEL.gguf`: what is in the file, what becomes of it, what it needs, how fast it may be.

Nothing is exported or built, and no matrix is read, unless --build names a build of the file to be looked into.
Exit codes: 1 that build is not what the file's equations give, others as runtime.generate.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engines.errors import EngineError, UsageError
from engines.manifest import Geometry
from engines.memory_plan import MemoryPlan, plan_memory
from engines.planned_model import PlannedModel
from engines.report_files import json_text
from runtime.command_line import Parser, run_command, say
from runtime.cuda import free_and_total_bytes, open_device
from runtime.diagnosis import diagnose
from runtime.inspection.cards import CARDS, Card, card_named, find_cards
from runtime.inspection.roofline import bounds, traffic_of
from runtime.inspection.table import table
from runtime.model_cache import described
from runtime.session import DRAFT_N_DEFAULT, open_session

FORMAT = 1
EXIT_FAILED = 1
_GIGABYTE = 1 << 30
_F32_BYTES = 4


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.bandwidth is not None and not 0 < options.bandwidth < float("inf"):
        raise UsageError(f"--bandwidth {options.bandwidth:g}: wanted GB/s above 0")
    cards, note = _cards(options)
    report = _report(described(options.model, options.ctx_size), cards, note)
    report["build"] = None if options.build is None else _build(options.build, options.model)
    say(json_text(report, indent=1) if options.json else table(report))
    return EXIT_FAILED if report["build"] and report["build"]["faults"] else 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m runtime.inspect", description="Tell what a model file holds, needs and allows.")
    parser.add_argument("model", type=Path, metavar="MODEL.gguf")
    parser.add_argument(
        "-c", "--ctx-size", type=int, default=0, metavar="N", help="tokens of context to plan for; 0: as engines have"
    )
    parser.add_argument("--gpu", metavar="NAME", help="a card to reckon with (default: the one here, else all known)")
    parser.add_argument(
        "--bandwidth", type=float, metavar="GB/s", help="speed of the card's memory, in place of a known one"
    )
    parser.add_argument(
        "--build",
        type=Path,
        metavar="DIR",
        help="also compare this export, or its engines, with what the file's equations give; minutes for a large one",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    return parser


def _build(folder: Path, model: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise UsageError(f"--build {folder}: no such folder; give an exported folder")
    session = open_session(folder)
    diagnosis = diagnose(session, model)
    return {"folder": str(folder), "backend": session.backend, "said": str(diagnosis), **diagnosis.as_dict()}


def _cards(options: argparse.Namespace) -> tuple[list[Card], str]:
    """The cards to reckon with, and where their figures come from. gigabytes 0: not known."""
    if options.gpu is not None and options.bandwidth is None:
        return [card_named(options.gpu)], "peak of its data sheet"
    if options.bandwidth is not None:
        return [Card(options.gpu or "as given", options.bandwidth, 0)], "speed as given"
    try:
        device = open_device()
    except EngineError as error:
        return list(CARDS), f"peaks of data sheets; no GPU here: {str(error).split(';')[0]}"
    found = find_cards(device.name)
    if len(found) == 1:
        gigabytes = free_and_total_bytes()[1] / _GIGABYTE
        return [Card(device.name, found[0].gb_per_s, gigabytes)], f"peak of the data sheet of {found[0].name}"
    return [], f"{device.name} is not in the table; give its memory's speed with --bandwidth"


def _report(planned: PlannedModel, cards: list[Card], note: str) -> dict[str, Any]:
    engines, geometry = planned.engines, planned.geometry
    plans = {kind: plan_memory(each, geometry, each.engines, planned.activations) for kind, each in engines.items()}
    context = planned.context
    roofline: dict[str, Any] = {"note": note, "draft_n": DRAFT_N_DEFAULT, "cards": []}
    if engines:
        traffic = traffic_of(engines["f16"], geometry, planned.reads)
        roofline["traffic"] = {role: asdict(each) for role, each in traffic.items()}
        for card in cards:
            places = [bounds(traffic, card.gb_per_s, position, DRAFT_N_DEFAULT) for position in (0, context - 1)]
            roofline["cards"].append({**asdict(card), "fits": _fits(plans["f16"], card), "bounds": places})
    else:
        roofline["note"] = "the plugins do not take this model"
    return {
        "format": FORMAT,
        **planned.facts,
        "context": context,
        "memory": {
            "tensorrt": {kind: {**asdict(plan), "total": plan.total} for kind, plan in plans.items()},
            "onnxruntime": _cpu_memory(planned.facts, geometry, context),
        },
        "roofline": roofline,
    }


def _fits(plan: MemoryPlan, card: Card) -> bool | None:
    return plan.fits(int(card.gigabytes * _GIGABYTE)) if card.gigabytes else None


def _cpu_memory(facts: dict[str, Any], geometry: Geometry, context: int) -> dict[str, int]:
    """Weights as exported; float32 caches once filled, which grow with the text; recurrent state."""
    layers = len(geometry.attention_layers) + (geometry.draft_layer is not None)
    state = geometry.gdn_v_heads * geometry.gdn_head_dim**2
    window = (geometry.conv_kernel - 1) * geometry.conv_channels
    parts = {
        "weights": sum(group["onnx_bytes"] for group in facts["tensors"]),
        "kv_caches": layers * 2 * geometry.num_kv_heads * geometry.head_dim * context * _F32_BYTES,
        "states": len(geometry.gdn_layers) * (state + window) * _F32_BYTES,
    }
    return {**parts, "total": sum(parts.values())}


if __name__ == "__main__":
    run_command(main)
