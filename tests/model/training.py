"""The training run: next-token loss of the trunk and of the NextN block, unrolled as it drafts, on one GPU."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import checkpoint
import numpy as np
import torch
from geometry import stays_six_bit
from network import Model
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

CHAT_SHARE = 10  # one row in ten of a batch is chat
DRAFT_WEIGHTS = (0.3, 0.2, 0.2)  # of the passes of the NextN chain, beside 1 for the trunk
SAVES = 0.3  # a checkpoint each time this share of the run is over
_IGNORED = -100  # cross_entropy's mark for a row without target

Loss = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def train(options: argparse.Namespace) -> None:
    """Train for about ``options.seconds`` and write the checkpoint into ``options.out``."""
    started = time.time()
    torch.manual_seed(1)
    torch.backends.cuda.matmul.allow_tf32 = True
    options.out.mkdir(parents=True, exist_ok=True)
    model = Model().to(options.device)
    if options.resume:
        checkpoint.load(model, options.resume)
    rounder = WeightRounding(model)
    optimizer = _optimizer(model, options)
    loss: Loss = next_token_loss
    if options.compile:
        for block in model.blk:
            block.compile(dynamic=False)
        loss, rounder.round = torch.compile(loss, dynamic=False), torch.compile(rounder.round)
    data = Data(options)
    print("parameters", sum(p.numel() for p in model.parameters()), "text", len(data.text), "chat", len(data.chats))
    window, seen, next_save = time.time(), 0, SAVES
    for step, done in schedule(started, options):
        _set_rate(optimizer, options, step, done)
        rounding = done > options.round_from or step == 1  # step 1: so that it is compiled early
        if rounding:
            rounder.enter()
        results = losses(model, data.batch(), loss, options)
        optimizer.zero_grad(set_to_none=True)
        sum(w * r[0] for w, r in zip((1.0, *DRAFT_WEIGHTS), results, strict=False)).backward()
        if rounding:
            rounder.leave()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seen += options.batch * options.seq
        if (step + 1) % options.every == 0 or step < 4:
            values = " ".join(f"{r[0].item():.3f}/{r[1].item():.3f}" for r in results)
            speed = seen / (time.time() - window) / 1e3
            print(f"step {step + 1} t {time.time() - started:.0f}s {values} {speed:.0f}k tok/s", flush=True)
            window, seen = time.time(), 0
            if not math.isfinite(results[0][0].item()):
                raise SystemExit("diverged")
        if done > next_save:
            next_save += SAVES
            checkpoint.save(model, options.out)
    _evaluate(model, data, loss, options)
    checkpoint.save(model, options.out)
    print("steps", step + 1, "seconds", round(time.time() - started))


def schedule(started: float, options: argparse.Namespace) -> Iterator[tuple[int, float]]:
    """(step, share of the run that is over). The run's clock starts at step 3, when all is compiled."""
    step, clock = 0, None
    while True:
        now = time.time()
        if step == 3:
            if options.device == "cuda":
                torch.cuda.synchronize()
            clock = now = time.time()
        done = 0.0 if clock is None else (now - clock) / max(20, options.seconds - (clock - started))
        if done >= 1:
            return
        yield step, done
        step += 1


def next_token_loss(hidden: Tensor, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """(cross entropy in nats, share of rows whose top-1 is the target) of hidden [B, T, EMBD]."""
    logits, flat = linear(hidden, output).float().flatten(0, 1), target.flatten()
    return cross_entropy(logits, flat, ignore_index=_IGNORED), (logits.argmax(-1) == flat).float().mean()


def losses(model: Model, rows: Tensor, loss: Loss, options: argparse.Namespace) -> list[tuple[Tensor, Tensor]]:
    """Loss of the trunk, then of each pass of the NextN chain.   rows: [B, T + 1] ids."""
    ids, target = rows[:, :-1], rows[:, 1:].contiguous()
    with torch.autocast(options.device, torch.bfloat16, enabled=options.device == "cuda"):
        hidden = model.trunk(ids)
        results = [loss(hidden, model.output, target)]
        for n_pass, out in enumerate(model.chain(ids, hidden, options.steps)):
            wanted = target.clone()
            wanted[:, :n_pass] = _IGNORED  # a later pass has no input for its first rows
            results.append(loss(out, model.output, wanted))
    return results


class Data:
    """Token files of `prepare.py`, wholly on the device, and random rows of them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self.text, self.held_out, self.chats = (self._ids(name, np.uint16) for name in ("train", "val", "chat"))
        self._chat_starts = self._ids("chat_at", np.uint32)
        self._span = torch.arange(options.seq + 1, device=options.device)

    def _ids(self, name: str, dtype: type) -> Tensor:
        values = np.fromfile(Path(self._options.data) / f"{name}.bin", dtype)
        return torch.from_numpy(values.astype(np.int64)).to(self._options.device, torch.int32)

    def batch(self) -> Tensor:
        """[batch, seq + 1] ids: text from anywhere, chats from the start of one."""
        n_rows, length, device = self._options.batch, self._options.seq, self._options.device
        n_chats = n_rows // CHAT_SHARE
        at = torch.randint(len(self.text) - length - 1, (n_rows - n_chats, 1), device=device)
        chosen = torch.randint(len(self._chat_starts), (n_chats, 1), device=device)
        chat_at = self._chat_starts[chosen].clamp(max=len(self.chats) - length - 1)
        return torch.cat([self.text[at + self._span], self.chats[chat_at + self._span]]).long()


class WeightRounding:
    """Rounds the matrices that will be 4-bit to a Q4_K-like grid for a forward pass: gradient at the rounded weights.

    They are made views of one flat buffer, so that this is one operation.
    """

    def __init__(self, model: Model) -> None:
        chosen = [p for name, p in _matrices(model) if not stays_six_bit(name)]
        self._flat = torch.cat([p.data.flatten() for p in chosen])
        self._kept = self._flat
        at = 0
        for p in chosen:
            p.data = self._flat[at : at + p.numel()].view_as(p)
            at += p.numel()

    @staticmethod
    def round(weights: Tensor) -> Tensor:
        """32 weights share a scale and a minimum; 8 such groups share the steps of those."""
        x = weights.reshape(-1, 8, 32)
        low = x.amin(-1, keepdim=True).clamp(max=0)
        scale, minimum = (x.amax(-1, keepdim=True) - low) / 15, -low
        scale_step = scale.amax(1, keepdim=True) / 63 + 1e-12
        minimum_step = minimum.amax(1, keepdim=True) / 63 + 1e-12
        scale = (scale / scale_step).round().clamp(min=1) * scale_step
        minimum = (minimum / minimum_step).round() * minimum_step
        return (((x + minimum) / scale).round().clamp(0, 15) * scale - minimum).reshape(-1)

    def enter(self) -> None:
        self._kept = self._flat.clone()
        self._flat.copy_(self.round(self._flat))

    def leave(self) -> None:
        self._flat.copy_(self._kept)


def _matrices(model: Model) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if p.dim() == 2 and "conv1d" not in name]


def _optimizer(model: Model, options: argparse.Namespace) -> torch.optim.AdamW:
    decayed = {name for name, _ in _matrices(model)} - {"token_embd", "output"}
    groups = [
        {"params": [p for name, p in model.named_parameters() if (name in decayed) == wanted], "weight_decay": decay}
        for wanted, decay in ((True, 0.1), (False, 0.0))
    ]
    return torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.95), eps=1e-8, fused=options.device == "cuda")


def _set_rate(optimizer: torch.optim.Optimizer, options: argparse.Namespace, step: int, done: float) -> None:
    """Linear warm-up by step, then a cosine over the wall clock down to 2 %."""
    warmup = min(1, (step + 1) / options.warmup)
    for group in optimizer.param_groups:
        group["lr"] = options.lr * warmup * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))


def _evaluate(model: Model, data: Data, loss: Loss, options: argparse.Namespace) -> None:
    rows = data.held_out[: options.seq * 256 + 1].unfold(0, options.seq + 1, options.seq).long()
    with torch.no_grad():
        found = [
            torch.tensor([value.item() for pair in losses(model, part, loss, options) for value in pair])
            for part in rows.split(options.batch)
            if len(part) == options.batch  # one shape: compiled once
        ]
    if found:
        mean = [round(value, 4) for value in torch.stack(found).mean(0).tolist()]
        print("held out, loss/top-1 of trunk, pass 1..:", mean)
