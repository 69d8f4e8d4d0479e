#!/usr/bin/env python3
"""Make the tiny qwen35 language model with a NextN block that the tests use.

  train.py data  --src SRC --out DIR                      clean text, tokenizer, token files (needs tokenizers)
  train.py train --data DIR --out CKPT                    train on one GPU for about --seconds (needs torch)
  train.py gguf  --data DIR --ckpt CKPT --out F32.gguf    write it (needs torch, gguf); quantise with llama.cpp after

SRC holds one folder per unpacked source package; README.md has the list.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def main(arguments: list[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    # imported here: each command needs only its own packages
    if options.command == "data":
        import prepare

        prepare.prepare(options.src, options.out, options.chats)
    elif options.command == "train":
        import training

        training.train(options)
    else:
        import to_gguf

        to_gguf.write_gguf(options.data / "tokenizer.json", options.ckpt, options.out)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    data = commands.add_parser("data")
    data.add_argument("--src", type=Path, required=True)
    data.add_argument("--out", type=Path, required=True)
    data.add_argument("--chats", type=int, default=60000)
    train = commands.add_parser("train")
    train.add_argument("--data", type=Path, required=True)
    train.add_argument("--out", type=Path, required=True)
    train.add_argument("--resume", type=Path, help="folder of a checkpoint to start from")
    train.add_argument("--seconds", type=float, default=560, help="wall clock, compilation included")
    train.add_argument("--batch", type=int, default=128)
    train.add_argument("--seq", type=int, default=512)
    train.add_argument("--steps", type=int, default=3, choices=[1, 2, 3], help="passes of the NextN chain")
    train.add_argument("--lr", type=float, default=3e-3)
    train.add_argument("--warmup", type=int, default=150, help="steps")
    train.add_argument("--round-from", type=float, default=0.75, help="share of the run before rounding starts")
    train.add_argument("--every", type=int, default=50, help="steps between two lines of progress")
    train.add_argument("--device", default="cuda")
    train.add_argument("--no-compile", dest="compile", action="store_false")
    to_gguf = commands.add_parser("gguf")
    to_gguf.add_argument("--data", type=Path, required=True)
    to_gguf.add_argument("--ckpt", type=Path, required=True)
    to_gguf.add_argument("--out", type=Path, required=True)
    return parser


if __name__ == "__main__":
    main()
