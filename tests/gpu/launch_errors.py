"""What is said when launches of the plugins fail, each in turn: `python -m tests.gpu.launch_errors FOLDER [MOST]`.

Needs `failing_launches.c` preloaded. A text is made in a new sequence, so that its passes are queued and recorded anew;
one of its launches fails, with an error that does not last; then the same sequence makes the text again, whole. Prints
JSON: how many launches a text takes, and for each that failed what was said. MOST: launches that fail, evenly chosen.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path

from engines.errors import DeviceLostError, EngineError
from engines.manifest import load_manifest
from runtime.controller import FixedDraft
from runtime.engine_tensorrt import open_engines
from runtime.speculative import SpecStats, generate
from runtime.tensorrt_draft import TensorrtDraft
from runtime.tensorrt_trunk import GREEDY, TensorrtTrunk
from tests.gpu.prepare import MAX_ROWS, PREFILL_CHUNK

OUT_OF_RESOURCES = 701  # of a launch; does not last
CONTEXT, NEW_TOKENS, DRAFTS = PREFILL_CHUNK + 64, 12, 2
# A whole chunk, and a rest that short passes take.
PROMPT = [(7 * i) % 250 for i in range(PREFILL_CHUNK + 5)]

Engines = tuple[TensorrtTrunk, TensorrtDraft]


class Launches:
    """The preloaded library."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.environ["LD_PRELOAD"])
        self._library.fail_launch.argtypes = (ctypes.c_long, ctypes.c_int)
        self._library.launches.restype = ctypes.c_long

    def fail(self, after: int, status: int = OUT_OF_RESOURCES) -> None:
        self._library.fail_launch(after, status)

    def none_fails(self) -> None:
        self._library.fail_launch(-1, 0)

    @property
    def count(self) -> int:
        return int(self._library.launches())


def text(trunk: TensorrtTrunk, draft: TensorrtDraft) -> list[int]:
    tokens = generate(
        trunk, draft, PROMPT, sampler=GREEDY, controller=FixedDraft(DRAFTS), max_tokens=NEW_TOKENS, end_token_ids=(),
        context_size=CONTEXT, stats=SpecStats(),
    )  # fmt: skip
    return list(tokens)


def what_is_said(engines: Engines, launches: Launches, after: int, want: list[int]) -> str:
    """Of one failing launch. Whatever the outcome, the sequence must then be as good as new."""
    trunk = engines[0].another()
    draft = engines[1].another(trunk)
    launches.fail(after)
    said = ""
    try:
        text(trunk, draft)
    except EngineError as error:
        said = f"{'lost: ' if isinstance(error, DeviceLostError) else ''}{error}"
    launches.none_fails()
    got = text(trunk, draft)
    assert got == want, (after, said, got, want)
    return said


def main(folder: Path, most: int) -> None:
    launches = Launches()
    launches.none_fails()
    trunk, draft = open_engines(folder, load_manifest(folder), context_size=CONTEXT, max_rows=MAX_ROWS)
    assert draft is not None
    want = text(trunk, draft)
    other = trunk.another()
    launches.none_fails()
    assert text(other, draft.another(other)) == want
    count = launches.count
    print(json.dumps({"launches": count}), flush=True)
    most = min(most, count)
    for after in sorted({count * i // most for i in range(most)}):
        print(json.dumps({"after": after, "said": what_is_said((trunk, draft), launches, after, want)}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else sys.maxsize)
