"""`python -m runtime.bench MODEL`: how fast, plainly and with every number of drafts, on the same prompts.

Every text is compared with the plain one; with --expect, text and accepted drafts with what is known beforehand.

Exit codes: 0 done, 1 a text or count was not as it should be, others as runtime.generate.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from tqdm import tqdm

from engines.draft_head import draft_head_options
from engines.errors import UsageError
from engines.manifest import load_manifest
from engines.report_files import json_text, write_report
from runtime.bench_options import bench_parser, check_options
from runtime.benchmark.chart import draw
from runtime.benchmark.expected import Expected, load_expected
from runtime.benchmark.gpu import Gpu
from runtime.benchmark.machine import cpu_read_gb_per_s, machine_facts
from runtime.benchmark.measure import measure, measure_prefill, settings_of
from runtime.benchmark.report import FORMAT, depth_entry, device_entries, failures_of, spread, state_is_finite
from runtime.benchmark.table import table
from runtime.benchmark.text import Texts, load_texts
from runtime.benchmark.traffic import Traffic, traffic_of
from runtime.command_line import run_command, said_at_last, say
from runtime.engine import TimedDraft, TimedTrunk
from runtime.model_cache import exported_folder
from runtime.session import Session, open_session

EXIT_FAILED = 1
_DEVICE_REPEATS = 30


def main(arguments: list[str] | None = None) -> int:
    options = bench_parser().parse_args(arguments)
    spec = check_options(options)
    folder = exported_folder(
        options.model, draft=False, cache_dir=options.cache_dir, draft_head=draft_head_options(options)
    )
    target = load_manifest(folder).target if options.backend == "auto" else options.backend
    gpu = Gpu() if target == "tensorrt" else None
    machine = machine_facts(options.threads)  # before our own load counts
    began = time.perf_counter()
    session = open_session(
        folder, backend=options.backend, context_size=options.ctx_size, threads=options.threads, spec=spec
    )
    load_s = time.perf_counter() - began
    report = {**_Benchmark(session, options, gpu).report(), "machine": machine, "load_s": round(load_s, 3)}
    with said_at_last(table(report)):
        write_report(options.json, json_text(report, indent=1) + "\n")
        if options.chart:
            draw(report, options.chart)
    for line in report["failures"]:
        say(f"failed: {line}", to=sys.stderr)
    return EXIT_FAILED if report["failures"] else 0


class _Benchmark:
    """One run over an open session."""

    def __init__(self, session: Session, options: argparse.Namespace, gpu: Gpu | None) -> None:
        self._session, self._options, self._gpu = session, options, gpu
        self._expected: Expected | None = None
        last: tuple[int, ...] = ()
        if options.expect:
            vocab_size = session.manifest.geometry.vocab_size
            self._expected = load_expected(options.expect, options.predict, vocab_size)
            last = (self._expected.after,)
        self._texts: Texts = load_texts(session.tokenizer, options.prompt_file, last, session.context_size)
        most = session.trunk.max_rows - 1
        draft_ns = options.drafts or range(1, most + 1)
        if session.draft is not None and max(draft_ns, default=0) > most:
            raise UsageError(f"--drafts {max(draft_ns)}: the engines take at most {most} drafts a round")
        self._settings = settings_of(session, draft_ns)
        roles = ("trunk", "draft") if session.draft is not None else ("trunk",)
        self._traffic: dict[str, Traffic] = {role: traffic_of(session, role) for role in roles}
        longest = max(map(len, self._texts.passages)) + options.predict
        if longest > session.context_size:
            raise UsageError(
                f"prompt and text have {longest} tokens, the context holds {session.context_size}; give a shorter "
                "--prompt-file, a smaller --predict or a larger --ctx-size"
            )

    def report(self) -> dict[str, Any]:
        session, options = self._session, self._options
        bandwidth, source = self._bandwidth()
        depths = [self._depth(depth, bandwidth) for depth in options.depths]
        if options.fill:
            depth = session.context_size - options.predict - len(self._texts.passages[0])
            depths.append({**self._depth(depth, bandwidth), "state_is_finite": state_is_finite(session.trunk)})
        report: dict[str, Any] = {
            "format": FORMAT,
            "model": session.manifest.model_name,
            "backend": session.backend,
            "context_size": session.context_size,
            "how": {
                "prompts": len(self._texts.passages),
                "text_digest": self._texts.digest,
                "predict": options.predict,
                "repeats": options.repeats,
                "warm_up": 1,
                "expected": self._expected is not None,
            },
            "bandwidth": {"gb_per_s": bandwidth, "source": source},
            "depths": depths,
            **self._device_times(bandwidth),
            "prefill": self._prefill(),
        }
        report["gpu"], report["memory"] = (None, None) if self._gpu is None else self._gpu.facts(session)
        report["failures"] = failures_of(report)
        return report

    def _bandwidth(self) -> tuple[float, str]:
        if self._options.bandwidth is not None:
            return self._options.bandwidth, "as given"
        if self._gpu is not None:
            return self._gpu.read_gb_per_s(), "measured, by a kernel that only reads"
        return cpu_read_gb_per_s(self._options.threads), "measured, by threads that only read"

    def _depth(self, depth: int, bandwidth: float) -> dict[str, Any]:
        session, options = self._session, self._options
        prompts = self._texts.prompts(depth)
        needed = max(map(len, prompts)) + options.predict
        if needed > session.context_size:
            return {
                "depth": depth,
                "left_out": f"{needed} tokens are needed, the context holds {session.context_size}",
            }
        total = len(self._settings) * len(prompts) * (options.repeats + 1)
        with self._progress(f"context {depth}", total) as done:
            results = measure(session, self._settings, prompts, options.predict, options.repeats, self._expected, done)
        return {"left_out": "", **depth_entry(depth, results, prompts, self._traffic, bandwidth)}

    def _device_times(self, bandwidth: float) -> dict[str, Any]:
        """Passes timed on the device, where the backend can."""
        trunk, draft = self._session.trunk, self._session.draft
        passes: dict[int, list[float]] = {}
        drafts: dict[int, list[float]] = {}
        if isinstance(trunk, TimedTrunk):
            passes = {rows: trunk.time_verify(rows, _DEVICE_REPEATS) for rows in range(1, trunk.max_rows + 1)}
        if isinstance(draft, TimedDraft):
            drafts = {n: draft.time_draft(n, _DEVICE_REPEATS) for n in range(1, trunk.max_rows)}
        return {
            "device_passes": device_entries(passes, "rows", self._traffic["trunk"].nbytes(0), bandwidth),
            "device_drafts": device_entries(drafts, "drafts", self._traffic["draft"].nbytes(0), bandwidth)
            if drafts
            else [],
        }

    def _prefill(self) -> list[dict[str, Any]]:
        session, options, entries = self._session, self._options, []
        heads = (False, True) if session.draft is not None else (False,)
        for count in options.prefill:
            if count > session.context_size:
                entries.append({"tokens": count, "left_out": f"the context holds {session.context_size} tokens"})
                continue
            for with_head in heads:
                speeds = measure_prefill(session, self._texts.filling(count), options.repeats, plain=not with_head)
                entry = {"tokens": count, "left_out": "", "with_head": with_head, "tokens_per_second": spread(speeds)}
                entries.append(entry)
        return entries

    @contextlib.contextmanager
    def _progress(self, title: str, total: int) -> Iterator[Callable[[], None]]:
        """A bar on a terminal's stderr; between two steps the GPU's clocks are looked at."""
        with tqdm(total=total, desc=title, file=sys.stderr, leave=False, disable=None) as bar:

            def done() -> None:
                bar.update()
                if self._gpu is not None:
                    self._gpu.sample()

            yield done


if __name__ == "__main__":
    run_command(main)
