"""The tiny model in torch, for training: a qwen35 trunk and its NextN block.

Parameter names are the GGUF leaf names with "." written "_"; value heads are in the file's tiled order (value head h
reads key head h mod K_HEADS), so nothing is permuted on the way out.
"""

from __future__ import annotations

import math

import torch
from delta_rule import delta_chunks
from geometry import (
    CONV,
    EMBD,
    EPS,
    FF,
    HEAD_DIM,
    HEADS,
    INTERVAL,
    K_HEADS,
    KV_HEADS,
    LAYERS,
    QKV,
    ROPE_DIM,
    STATE,
    THETA,
    V_HEADS,
    VOCAB,
)  # fmt: skip
from torch import Tensor, nn
from torch.nn.functional import linear, pad, scaled_dot_product_attention, silu, softplus

KeyValue = tuple[Tensor, Tensor]


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)


def rope(x: Tensor, positions: Tensor) -> Tensor:
    """Rotate the first ROPE_DIM of each head of x [B, T, heads, HEAD_DIM], pairs (i, i + ROPE_DIM/2)."""
    n = ROPE_DIM // 2
    angle = positions[:, None].float() * THETA ** (-torch.arange(n, device=x.device).float() / n)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b, rest = x[..., :n], x[..., n:ROPE_DIM], x[..., ROPE_DIM:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos, rest], -1)


def _ones(n: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(n))


def _matrix(n_out: int, n_in: int, gain: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.randn(n_out, n_in) * gain / math.sqrt(n_in))


class Block(nn.Module):
    """One block: full attention or Gated DeltaNet, then the feed-forward part."""

    def __init__(self, full: bool) -> None:
        super().__init__()
        self.full, out_gain = full, 1 / math.sqrt(2 * LAYERS)
        self.attn_norm, self.post_attention_norm = _ones(EMBD), _ones(EMBD)
        if full:
            self.attn_q = _matrix(2 * HEADS * HEAD_DIM, EMBD)
            self.attn_k, self.attn_v = _matrix(KV_HEADS * HEAD_DIM, EMBD), _matrix(KV_HEADS * HEAD_DIM, EMBD)
            self.attn_output = _matrix(EMBD, HEADS * HEAD_DIM, out_gain)
            self.attn_q_norm, self.attn_k_norm = _ones(HEAD_DIM), _ones(HEAD_DIM)
        else:
            self.attn_qkv, self.attn_gate = _matrix(QKV, EMBD), _matrix(V_HEADS * STATE, EMBD)
            self.ssm_conv1d = nn.Parameter(torch.rand(QKV, CONV) - 0.5)
            dt = torch.exp(torch.rand(V_HEADS) * math.log(100) + math.log(1e-3))
            self.ssm_dt = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))
            self.a_log = nn.Parameter(torch.log(torch.rand(V_HEADS) * 15 + 1))
            self.ssm_beta, self.ssm_alpha = _matrix(V_HEADS, EMBD), _matrix(V_HEADS, EMBD)
            self.ssm_norm, self.ssm_out = _ones(STATE), _matrix(EMBD, V_HEADS * STATE, out_gain)
        self.ffn_gate, self.ffn_up, self.ffn_down = _matrix(FF, EMBD), _matrix(FF, EMBD), _matrix(EMBD, FF, out_gain)

    def forward(self, x: Tensor, past: tuple[KeyValue, ...] = ()) -> tuple[Tensor, KeyValue | None]:
        """x [B, T, EMBD] -> the same, and this pass's keys and values (None for Gated DeltaNet)."""
        a, own = rms_norm(x, self.attn_norm), None
        if self.full:
            y, own = self._attention(a, past)
        else:
            y = self._delta_net(a)
        x = x + y.float()
        b = rms_norm(x, self.post_attention_norm)
        y = linear(silu(linear(b, self.ffn_gate)) * linear(b, self.ffn_up), self.ffn_down)
        return x + y.float(), own

    def _delta_net(self, a: Tensor) -> Tensor:
        batch, n_tokens, _ = a.shape
        mixed, z = linear(a, self.attn_qkv), linear(a, self.attn_gate)
        before = pad(mixed, (0, 0, CONV - 1, 0)).float()
        y = silu(sum(before[:, j : j + n_tokens] * self.ssm_conv1d[:, j] for j in range(CONV)))
        with torch.autocast(a.device.type, enabled=False):
            beta = torch.sigmoid(linear(a, self.ssm_beta))
            g = -self.a_log.exp() * softplus(linear(a, self.ssm_alpha) + self.ssm_dt)
            q, k, v = y.split([K_HEADS * STATE, K_HEADS * STATE, V_HEADS * STATE], -1)
            q, k = (unit(x.reshape(batch, n_tokens, K_HEADS, STATE)) for x in (q, k))
            q, k = (x.repeat(1, 1, V_HEADS // K_HEADS, 1) for x in (q / math.sqrt(STATE), k))
            o = delta_chunks(q, k, v.reshape(batch, n_tokens, V_HEADS, STATE), beta, g)
        o = rms_norm(o, self.ssm_norm) * silu(z.float()).reshape(batch, n_tokens, V_HEADS, STATE)
        return linear(o.reshape(batch, n_tokens, -1), self.ssm_out)

    def _attention(self, a: Tensor, past: tuple[KeyValue, ...]) -> tuple[Tensor, KeyValue]:
        """``past``: keys and values of the earlier passes of the NextN chain, newest last."""
        batch, n_tokens, _ = a.shape
        q, gate = linear(a, self.attn_q).reshape(batch, n_tokens, HEADS, 2 * HEAD_DIM).split(HEAD_DIM, -1)
        k = linear(a, self.attn_k).reshape(batch, n_tokens, KV_HEADS, HEAD_DIM)
        v = linear(a, self.attn_v).reshape(batch, n_tokens, KV_HEADS, HEAD_DIM)
        positions = torch.arange(n_tokens, device=a.device)
        q, k = rope(rms_norm(q, self.attn_q_norm), positions), rope(rms_norm(k, self.attn_k_norm), positions)
        own = (k, v)
        q, k, v = q.transpose(1, 2).to(v.dtype), _for_heads(k, v.dtype), _for_heads(v, v.dtype)
        o = _chained_attention(q, k, v, past) if past else scaled_dot_product_attention(q, k, v, is_causal=True)
        o = o.transpose(1, 2).float() * torch.sigmoid(gate.float())
        return linear(o.reshape(batch, n_tokens, -1), self.attn_output), own


def _for_heads(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, T, KV_HEADS, HEAD_DIM] -> [B, HEADS, T, HEAD_DIM]."""
    return x.repeat_interleave(HEADS // KV_HEADS, 2).transpose(1, 2).to(dtype)


def _chained_attention(q: Tensor, k: Tensor, v: Tensor, past: tuple[KeyValue, ...]) -> Tensor:
    """Attention of pass s = len(past) + 1, with what it sees at inference.

    Row r sees rows up to r-s+1 of pass 1 (true hiddens), row r-s+j of each later pass j, and itself.
    """
    n, n_tokens = len(past), q.shape[2]
    first_k, first_v = (_for_heads(x, v.dtype) for x in past[0])
    seen = torch.ones(n_tokens, n_tokens, dtype=torch.bool, device=q.device).tril(-n)
    scores, values = [(q @ first_k.transpose(-1, -2)).float().masked_fill(~seen, -1e30)], []
    for j in range(1, n + 1):
        kj, vj = (_for_heads(x, v.dtype) for x in past[j]) if j < n else (k, v)
        kj, vj = (pad(x, (0, 0, n - j, 0))[:, :, :n_tokens] for x in (kj, vj))
        scores.append((q.float() * kj.float()).sum(-1, keepdim=True))
        values.append(vj)
    p = (torch.cat(scores, -1) / math.sqrt(HEAD_DIM)).softmax(-1).to(v.dtype)
    later = (p[..., n_tokens + j : n_tokens + j + 1] * vj for j, vj in enumerate(values))
    return p[..., :n_tokens] @ first_v + sum(later)


class Model(nn.Module):
    """The trunk, blocks 0 .. LAYERS-1, and the NextN block LAYERS."""

    def __init__(self) -> None:
        super().__init__()
        self.token_embd = nn.Parameter(torch.randn(VOCAB, EMBD) * 0.1)
        self.output = nn.Parameter(torch.randn(VOCAB, EMBD) * 0.02)
        self.output_norm = _ones(EMBD)
        self.blk = nn.ModuleList([Block((i + 1) % INTERVAL == 0) for i in range(LAYERS)] + [Block(True)])
        self.nextn_eh_proj = _matrix(EMBD, 2 * EMBD)
        self.nextn_enorm, self.nextn_hnorm, self.nextn_shared_head_norm = _ones(EMBD), _ones(EMBD), _ones(EMBD)

    def trunk(self, ids: Tensor) -> Tensor:
        """ids [B, T] -> hidden after output_norm [B, T, EMBD]."""
        x = self.token_embd[ids].float()
        for block in self.blk[:LAYERS]:
            x = block(x)[0]
        return rms_norm(x, self.output_norm)

    def chain(self, ids: Tensor, hidden: Tensor, n_passes: int) -> list[Tensor]:
        """Hiddens of the NextN block, one [B, T, EMBD] a pass: row r takes token r and the row r-1 of the pass before
        (the trunk's hidden in the first pass, zeros in front of row 0)."""
        embedded, past, outs = rms_norm(self.token_embd[ids], self.nextn_enorm), (), []
        for _ in range(n_passes):
            hidden = pad(hidden, (0, 0, 1, 0))[:, :-1]
            joined = torch.cat([embedded, rms_norm(hidden, self.nextn_hnorm)], -1)
            x, own = self.blk[LAYERS](linear(joined, self.nextn_eh_proj).float(), past)
            past = (*past, own)
            hidden = rms_norm(x, self.nextn_shared_head_norm)
            outs.append(hidden)
        return outs
