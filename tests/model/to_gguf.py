"""Write a checkpoint as a float32 GGUF of architecture qwen35."""

from __future__ import annotations

import json
import re
from pathlib import Path

import checkpoint
import gguf
import numpy as np
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
    ROPE_DIM,
    SPECIAL,
    STATE,
    THETA,
    V_HEADS,
    VOCAB,
)  # fmt: skip
from network import Model

LICENSE = "PSF-2.0 AND BSD-3-Clause AND MIT AND Apache-2.0 AND PostgreSQL AND HPND AND CC-BY-SA-4.0"
TEMPLATE = (
    r"{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content | trim + '<|im_end|>\n' }}{%- endfor %}"
    r"{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    r"{%- if enable_thinking is defined and enable_thinking is true %}{{- '<think>\n' }}"
    r"{%- else %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}{%- endif %}"
)


def write_gguf(tokenizer: Path, folder: Path, out: Path) -> None:
    """``tokenizer``: the tokenizer.json of `prepare.py`; ``folder``: a checkpoint."""
    model = checkpoint.load(Model(), folder)
    writer = gguf.GGUFWriter(out, "qwen35")
    _add_geometry(writer)
    _add_tokenizer(writer, json.loads(tokenizer.read_text()))
    for name, parameter in model.named_parameters():
        writer.add_tensor(*stored(name, parameter.detach().numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def stored(name: str, values: np.ndarray) -> tuple[str, np.ndarray]:
    """GGUF name and values of a parameter of `network.Model`."""
    match = re.fullmatch(r"blk\.(\d+)\.(.*)", name)
    leaf = match[2] if match else name
    if leaf == "a_log":
        leaf, values = "ssm_a", -np.exp(values)
    elif leaf == "ssm_dt":
        leaf = "ssm_dt.bias"
    else:
        leaf = re.sub("^nextn_", "nextn.", leaf) + ".weight"
    block = match[1] if match else LAYERS if leaf.startswith("nextn.") else None
    return leaf if block is None else f"blk.{block}.{leaf}", np.ascontiguousarray(values, np.float32)


def _add_geometry(writer: gguf.GGUFWriter) -> None:
    writer.add_name("tiny-qwen35-mtp")
    writer.add_license(LICENSE)
    writer.add_description("Tiny test model with a NextN block, trained on Python documentation")
    writer.add_block_count(LAYERS + 1)
    writer.add_context_length(4096)
    writer.add_embedding_length(EMBD)
    writer.add_feed_forward_length(FF)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(EPS)
    writer.add_rope_dimension_count(ROPE_DIM)
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.add_rope_freq_base(THETA)
    writer.add_ssm_conv_kernel(CONV)
    writer.add_ssm_state_size(STATE)
    writer.add_ssm_group_count(K_HEADS)
    writer.add_ssm_time_step_rank(V_HEADS)
    writer.add_ssm_inner_size(V_HEADS * STATE)
    writer.add_uint32("qwen35.full_attention_interval", INTERVAL)
    writer.add_uint32("qwen35.nextn_predict_layers", 1)
    writer.add_file_type(0)


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: dict) -> None:
    names = {token: text for text, token in tokenizer["model"]["vocab"].items()}
    added = {entry["content"]: entry["id"] for entry in tokenizer["added_tokens"]}
    names.update({token: text for text, token in added.items()})
    kinds = {text: gguf.TokenType.CONTROL if text.startswith("<|") else gguf.TokenType.USER_DEFINED for text in SPECIAL}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list([names[token] for token in range(VOCAB)])
    writer.add_token_types([kinds.get(names[token], gguf.TokenType.NORMAL) for token in range(VOCAB)])
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(added["<|im_end|>"])
    writer.add_pad_token_id(added["<|endoftext|>"])
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
