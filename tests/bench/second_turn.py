"""`python -m tests.bench.second_turn [MODEL]`: how long the first token of a chat's turns takes, on the real server.

A prompt of some 2,000 tokens, its reply, and three more turns; then the last turn again on a server that keeps nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from tests.soak.__main__ import server
from tests.vocabulary_files import TRAINED_MODEL

AGAIN_MAX = 100  # old tokens that a turn may process again
_WAIT_S = 600.0
_LONG = "What does len do? " * 330
_FIELDS = {"temperature": 0.7, "seed": 3, "max_tokens": 30, "stream": True}


def turn(url: str, messages: list[dict[str, str]]) -> tuple[str, float, dict[str, Any]]:
    """(the reply, milliseconds to its first text, timings)"""
    text, first_ms, timings = "", 0.0, {}
    began = time.perf_counter()
    with httpx.stream(
        "POST", f"{url}/v1/chat/completions", json={"messages": messages, **_FIELDS}, timeout=_WAIT_S
    ) as r:
        for line in r.iter_lines():
            if not line.startswith("data: ") or line.endswith("[DONE]"):
                continue
            event = json.loads(line.removeprefix("data: "))
            delta = event["choices"][0]["delta"]
            if not text and (delta.get("content") or delta.get("reasoning_content")):
                first_ms = 1000 * (time.perf_counter() - began)
            text += delta.get("content") or ""
            timings = event.get("timings", timings)
    return text, first_ms, timings


def main(arguments: list[str] | None = None) -> int:
    """1: old tokens were processed again, or a reply was not the one of a server that has seen nothing."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.second_turn", description=__doc__)
    parser.add_argument("model", nargs="?", type=Path, default=TRAINED_MODEL, help="a .gguf, or engines")
    model = parser.parse_args(arguments).model
    messages: list[dict[str, str]] = []
    firsts, again = [], []
    held = 0  # tokens of prompt and reply so far
    with server(model, "--cache-ram", 1024) as (_, url):
        turn(url, [{"role": "user", "content": "Hello."}])  # the first pass of all takes longer
        for asked in (_LONG, "And map?", "And zip?", "And all of them?"):
            messages.append({"role": "user", "content": asked})
            text, first_ms, timings = turn(url, messages)
            kept, new = timings["cache_n"], timings["prompt_n"]
            firsts.append(first_ms)
            again.append(max(0, held - kept))
            held = kept + new + timings["predicted_n"]
            print(
                f"turn {len(firsts)}: {kept:5} tokens kept, {new:5} processed, {again[-1]} of them again; "
                f"first text after {first_ms:7.1f} ms"
            )
            messages.append({"role": "assistant", "content": text})
    with server(model, "--cache-ram", 0) as (_, url):
        turn(url, [{"role": "user", "content": "Hello."}])
        same, cold_ms, timings = turn(url, messages[:-1])
    print(f"turn {len(firsts)}, nothing kept:  {timings['prompt_n']:5} processed, first text after {cold_ms:7.1f} ms")
    print(f"first text of the second turn against the first: {firsts[1] / firsts[0]:.3f}")
    print(f"of the last turn against a cold run: {firsts[-1] / cold_ms:.3f}; replies are the same: {same == text}")
    return int(same != text or max(again[1:]) >= AGAIN_MAX)


if __name__ == "__main__":
    sys.exit(main())
