"""llama.cpp's own speculative decoding on the trained model, recorded for machines without it.

`python -m tests.peer.speculation` writes the record anew (about a minute). Prompts: `tests/data/prompts.json`, texts in
the manner of documentation, written for this purpose and so in no training text; of each the first PROMPT_TOKENS.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.dequantized import write_dequantized
from tests.vocabulary_files import TRAINED_MODEL

if TYPE_CHECKING:
    from tests.peer.llamacpp import LlamaCpp

DATA = Path(__file__).parents[1] / "data"
RECORD = DATA / "acceptance_llamacpp.json"
PROMPT_TOKENS = 64
NEW_TOKENS = 96
RECORDED_DRAFTS = (2, 3)


@dataclass(frozen=True)
class Run:
    """One prompt: its ids, the greedy continuation, and {drafts a round: accepted drafts, round by round}."""

    prompt: list[int]
    greedy: list[int]
    accepted: dict[int, list[int]]


def texts() -> list[str]:
    loaded: list[str] = json.loads((DATA / "prompts.json").read_text())
    return loaded


def recorded() -> list[Run]:
    runs = json.loads(RECORD.read_text())["runs"]
    return [
        Run(run["prompt"], run["greedy"], {int(n): counts for n, counts in run["accepted"].items()}) for run in runs
    ]


def measure(peer: LlamaCpp, text: str) -> Run:
    """Run one prompt on the dequantised model."""
    prompt = peer.tokenize(text)[:PROMPT_TOKENS]
    greedy = peer.plain(prompt, NEW_TOKENS)
    accepted = {}
    for n in RECORDED_DRAFTS:
        tokens, accepted[n] = peer.speculate(prompt, NEW_TOKENS, n)
        assert tokens == greedy, "llama.cpp's speculation changed the text"
    return Run(prompt, greedy, accepted)


def main() -> None:
    from tests.peer.llamacpp import LlamaCpp

    with tempfile.TemporaryDirectory() as folder:
        peer = LlamaCpp(write_dequantized(TRAINED_MODEL, Path(folder) / "f32.gguf"), max_drafts=max(RECORDED_DRAFTS))
        runs = [measure(peer, text) for text in texts()]
        peer.close()
    lines = ",\n".join(json.dumps(asdict(run), separators=(",", ":")) for run in runs)
    made_with = "llama.cpp b11739 (wheel llama-cpp-py-sync 0.11739), trained model dequantised, KV float32, greedy"
    RECORD.write_text(f'{{"made_with": "{made_with}",\n"runs": [\n{lines}\n]}}\n')
    for n in RECORDED_DRAFTS:
        rounds = [count for run in runs for count in run.accepted[n]]
        print(f"draft_n {n}: {sum(rounds)}/{n * len(rounds)} = {sum(rounds) / (n * len(rounds)):.3f} accepted")


if __name__ == "__main__":
    main()
