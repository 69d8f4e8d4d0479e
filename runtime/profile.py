"""`python -m runtime.profile DIR`: where a pass of the built engines spends its time, layer by layer.

Times of layers grouped by kind of op, bytes moved and the share of the memory's speed, launches, and the same pass as
one recorded graph. Needs an NVIDIA GPU, but for --trtexec, which reads what the SDK's own tool has exported.
Exit codes: 1 the build is not what its model's equations give (--against), others as runtime.generate.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
from pathlib import Path
from typing import Any

from engines.command import whole_numbers
from engines.engine_manifest import EngineManifest, load_engine_manifest
from engines.errors import UsageError
from engines.manifest import Manifest, load_manifest
from engines.report_files import check_places, json_text, write_report
from runtime.command_line import Parser, add_against_argument, run_command, said_at_last, say
from runtime.cuda import open_device
from runtime.diagnosis import diagnose
from runtime.inspection.cards import card_named
from runtime.profiling.chart import check_chart_can_be_drawn, draw
from runtime.profiling.kinds import LayerKinds, Pass, check_pass
from runtime.profiling.report import GraphTimes, pass_entry, table
from runtime.profiling.trtexec import check_same_engine, read_layer_names, read_profile
from runtime.session import open_session

FORMAT = 1
EXIT_FAILED = 1
_MOST_REPEATS = 10_000


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    _check(options)
    if not options.trtexec:
        open_device()  # what is missing is said before anything else is looked at
    manifest, engines = load_manifest(options.folder), load_engine_manifest(options.folder)
    # Before the engines are loaded to be timed: there may be memory for them once only.
    diagnosis = diagnose(open_session(options.folder), options.against) if options.against else None
    gc.collect()
    report = _read(options, manifest, engines) if options.trtexec else _measured(options, manifest)
    against = diagnosis.as_dict() if diagnosis else None
    report = {"format": FORMAT, "model": manifest.model_name, **report, "against": against}
    with said_at_last(table(report)):
        write_report(options.json, json_text(report, indent=1) + "\n")
        if options.chart:
            draw(report, options.chart)
    if diagnosis:
        say(f"\nbuild: {diagnosis}")
    for fault in diagnosis.faults if diagnosis else ():
        say(f"failed: build: {fault}", to=sys.stderr)
    return EXIT_FAILED if diagnosis and diagnosis.faults else 0


def _measured(options: argparse.Namespace, manifest: Manifest) -> dict[str, Any]:
    from runtime.benchmark.gpu import read_gb_per_s
    from runtime.profiling.passes import open_profiled

    described = load_engine_manifest(options.folder)
    for tokens in options.rows:
        check_pass(described, "trunk", Pass(tokens, options.position))
    engines, opened, device = open_profiled(options.folder)
    speed, source = _bandwidth(options)
    if not source:
        speed, source = read_gb_per_s(), "measured, by a kernel that only reads"
    passes = []
    for role, engine in opened.items():
        kinds = LayerKinds(engines, engines.engines[role], manifest.geometry)
        sizes = options.rows if role == "trunk" else [1]
        graphs = {}
        for tokens in sizes:  # all before layers are timed, which graphs would take on
            engine.prepare(tokens, options.position)
            times, kernels, copies = engine.graph(options.repeats)
            graphs[tokens] = GraphTimes(statistics.median(times), kernels, copies)
        for tokens in sizes:
            engine.prepare(tokens, options.position)
            work = Pass(tokens, options.position)
            passes.append(pass_entry(role, work, kinds, engine.layers(options.repeats), speed, graphs[tokens]))
    about = f"{engines.tensorrt} {engines.tensorrt_version}"
    return {
        "gpu": f"{device}, {about}",
        "source": "runtime.profile",
        "repeats": options.repeats,
        "bandwidth": {"gb_per_s": speed, "source": source},
        "passes": passes,
    }


def _read(options: argparse.Namespace, manifest: Manifest, engines: EngineManifest) -> dict[str, Any]:
    if options.role not in engines.engines:
        raise UsageError(f"--role {options.role}: {options.folder} has {', '.join(engines.engines)}")
    work = Pass(options.rows[0], options.position)
    check_pass(engines, options.role, work, prefill=True)
    layers = read_profile(options.trtexec)
    kinds = {role: LayerKinds(engines, engine, manifest.geometry) for role, engine in engines.engines.items()}
    other = next((each for role, each in kinds.items() if role != options.role), None)
    kinds[options.role].check_names((name for name, _ in layers), options.role, other)
    if options.layer_info:
        check_same_engine(layers, read_layer_names(options.layer_info), options.layer_info)
    speed, source = _bandwidth(options)
    return {
        "gpu": f"{options.gpu or 'a GPU'} ({options.trtexec.name})",
        "source": "trtexec",
        "repeats": 0,
        "bandwidth": {"gb_per_s": speed, "source": source},
        "passes": [pass_entry(options.role, work, kinds[options.role], layers, speed)],
    }


def _bandwidth(options: argparse.Namespace) -> tuple[float, str]:
    """(0, "") when nothing is said about it."""
    if options.bandwidth is not None:
        return options.bandwidth, "as given"
    if options.gpu is not None:
        return card_named(options.gpu).gb_per_s, "peak of its data sheet"
    return 0.0, ""


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m runtime.profile", description="Tell where built engines spend their time.")
    parser.add_argument("folder", type=Path, metavar="DIR", help="a folder with built engines")
    parser.add_argument(
        "--rows",
        type=whole_numbers,
        metavar="N,...",
        help="tokens of a trunk's pass (default: 1,4; of a profile read: 1)",
    )
    parser.add_argument("--position", type=int, default=0, metavar="N", help="tokens before the pass (default: 0)")
    parser.add_argument("--repeats", type=int, default=20, metavar="N", help="passes (default: %(default)s)")
    parser.add_argument("--bandwidth", type=float, metavar="GB/s", help="of the memory (default: measured)")
    parser.add_argument("--gpu", metavar="NAME", help="a card whose data sheet says it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there")
    parser.add_argument("--chart", type=Path, metavar="FILE.png", help="draw a picture there")
    add_against_argument(parser)
    group = parser.add_argument_group("profiles of trtexec and tensorrt_rtx (see `python -m engines.trtexec`)")
    group.add_argument("--trtexec", type=Path, metavar="PROFILE.json", help="read what --exportProfile wrote")
    group.add_argument("--layer-info", type=Path, metavar="LAYERS.json", help="and check with --exportLayerInfo's")
    group.add_argument("--role", choices=("trunk", "draft"), default="trunk", help="whose it is (default: trunk)")
    return parser


def _check(options: argparse.Namespace) -> None:
    options.rows = options.rows or ([1] if options.trtexec else [1, 4])
    if not 1 <= options.repeats <= _MOST_REPEATS:
        raise UsageError(f"--repeats {options.repeats}: wanted 1 to {_MOST_REPEATS}")
    if min(options.rows) < 1 or options.position < 0:
        raise UsageError("--rows: wanted 1 or more, --position: 0 or more")
    if options.trtexec and len(options.rows) > 1:
        raise UsageError("--rows: a profile is of one pass; give its tokens alone")
    if not options.trtexec and options.role != "trunk":
        raise UsageError(f"--role {options.role}: belongs to a profile that is read; engines here are all timed")
    if options.bandwidth is not None and not 0 < options.bandwidth < float("inf"):
        raise UsageError(f"--bandwidth {options.bandwidth:g}: wanted GB/s above 0")
    if options.layer_info and not options.trtexec:
        raise UsageError("--layer-info: belongs to a profile; give --trtexec too")
    if options.chart:
        check_chart_can_be_drawn()
    check_places(json=options.json, chart=options.chart)


if __name__ == "__main__":
    run_command(main)
