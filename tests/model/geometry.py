"""Sizes of the tiny model and its vocabulary: what the scripts of this folder share."""

from __future__ import annotations

import re

VOCAB = 4096
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")

EMBD, FF = 256, 768
LAYERS, INTERVAL = 8, 4  # trunk blocks; every INTERVAL-th is full attention, the rest Gated DeltaNet (GDN)
K_HEADS, V_HEADS, STATE, CONV = 2, 4, 128, 4  # GDN: key heads, value heads, head size, convolution taps
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 256  # full attention
ROPE_DIM, THETA = 64, 1e7
EPS = 1e-6
QKV = 2 * K_HEADS * STATE + V_HEADS * STATE  # convolution channels: q, k, v


def stays_six_bit(name: str) -> bool:
    """Whether llama.cpp's Q4_K_M keeps this matrix at 6 bits, for LAYERS + 1 = 9 blocks."""
    match = re.fullmatch(r"blk\.(\d+)\.(ffn_down|attn_v|attn_qkv)", name)
    return name == "output" or (bool(match) and (int(match[1]) in (0, 7, 8) or (int(match[1]) - 1) % 3 == 2))
