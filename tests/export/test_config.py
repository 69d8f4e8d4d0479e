"""Model configuration: what a sound file gives, unusual files that are accepted, and the draft head."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from export.config import load_config
from export.gguf_file import GGUFFile
from tests.export.edited_models import DRAFT, Tiny, edited, load_edited, refused
from tests.tiny_gguf import Spec, build


def test_geometry(tiny: Tiny) -> None:
    config = load_config(GGUFFile.open(tiny("heads_256")))
    assert (config.vocab_size, config.hidden_size, config.ffn_size, config.num_layers) == (320, 64, 128, 4)
    assert (config.context_length, config.full_attention_interval) == (4096, 4)
    assert math.isclose(config.rms_eps, 1e-6, rel_tol=1e-6)
    assert dataclasses.astuple(config.attention) == (4, 2, 256)
    assert dataclasses.astuple(config.gdn) == (2, 6, 128, 4)
    assert (config.gdn.key_dim, config.gdn.value_dim, config.gdn.conv_dim) == (256, 768, 1280)
    assert dataclasses.astuple(config.rope) == (1e7, 64, (11, 11, 10, 0), 1.0, 0)
    assert config.draft is not None and config.draft.layer == 4
    assert config.attention_layers == (3,) and config.gdn_layers == (0, 1, 2)
    assert config.is_attention(4)
    assert dataclasses.asdict(config)["gdn"] == dataclasses.asdict(config.gdn)


@pytest.mark.parametrize("name", ["f32", "yarn", "q4_k_m", "mixed_types", "split_first", "bigram_ring", "other_types"])
def test_every_tensor_is_named_once(tiny: Tiny, name: str) -> None:
    file = GGUFFile.open(tiny(name))
    config = load_config(file)
    assert sorted(config.tensor_names()) == sorted(file.tensors)
    assert config.tensor("attn_qkv", 0) == "blk.0.attn_qkv.weight"
    assert config.tensor("ssm_dt", 0) == "blk.0.ssm_dt.bias" and config.tensor("ssm_a", 0) == "blk.0.ssm_a"
    assert config.tensor("attn_q", 3) == "blk.3.attn_q.weight"
    assert config.tensor("eh_proj", 4) == "blk.4.nextn.eh_proj.weight"
    assert config.tensor("output") == "output.weight" and not config.tied


def test_fallbacks(tiny: Tiny) -> None:
    """Tied LM head, and a draft head without norm, embedding and LM head of its own."""
    config = load_config(GGUFFile.open(tiny("tied_no_head_norm")))
    assert config.tied
    assert config.tensor("output") == config.tensor("embed_tokens", 4) == config.tensor("shared_head_head", 4)
    assert config.tensor("output") == "token_embd.weight"
    assert config.tensor("shared_head_norm", 4) == "output_norm.weight"
    untied = load_config(GGUFFile.open(tiny("f32")))
    assert untied.tensor("shared_head_head", 4) == "output.weight"
    assert untied.tensor("shared_head_norm", 4) == "blk.4.nextn.shared_head_norm.weight"
    assert not load_config(GGUFFile.open(tiny("tied_copied"))).tied


def test_draft_head_with_embedding_and_lm_head_of_its_own(tmp_path: Path) -> None:
    model = edited()
    own = {"embed_tokens": "token_embd.weight", "shared_head_head": "output.weight"}
    for leaf, like in own.items():
        model.tensors[f"{DRAFT}nextn.{leaf}.weight"] = model.tensors[like] * 2
    config = load_edited(model, tmp_path)
    for leaf in own:
        assert config.tensor(leaf, 4) == f"{DRAFT}nextn.{leaf}.weight"


def test_unusual_but_equal(tmp_path: Path) -> None:
    """Files of other converters: three sections, per-block arrays, ssm_dt without .bias, foreign tensors, defaults."""
    plain = load_edited(edited(), tmp_path)
    without_bias = edited()
    without_bias.tensors = {name.replace("ssm_dt.bias", "ssm_dt"): v for name, v in without_bias.tensors.items()}
    with_vision = edited()
    with_vision.tensors |= {name: np.ones((2, 2)) for name in ("v.blk.0.attn_q.weight", "mm.0.weight", "mtp.fc.weight")}
    for model in (
        edited(rope__dimension_sections=[3, 3, 2]),
        edited(attention__head_count_kv=[0, 0, 0, 2, 2]),
        edited(attention__head_count_kv=[0, 0, 0, 2]),
        edited(attention__head_count_kv=[2, 2, 2, 2, 2], attention__head_count=[4, 4, 4, 4, 4]),
        edited(feed_forward_length=[128] * 5),
        edited(attention__recurrent_layers=np.array([True, True, True, False, False])),
        edited(attention__recurrent_layers=np.array([True, True, True, False])),
        edited(drop=("qwen35.full_attention_interval",)),
        edited(attention__scale=32**-0.5),
        edited(vocab_size=320),
        edited(drop=("tokenizer.ggml.tokens",)),
        edited(rope__scaling__type="none", rope__scaling__factor=4.0),
        edited(rope__scaling__type="linear", rope__scaling__factor=1.0),
        edited(rope__scaling__type="yarn", rope__scaling__factor=1.0),
        with_vision,
        without_bias,
    ):
        config = load_edited(model, tmp_path)
        assert dataclasses.replace(config, names={}) == dataclasses.replace(plain, names={})
    assert load_edited(without_bias, tmp_path).tensor("ssm_dt", 0) == "blk.0.ssm_dt"


def test_interval(tmp_path: Path) -> None:
    config = load_edited(build(Spec(layers=6, interval=3, conv_kernel=2)), tmp_path)
    assert config.attention_layers == (2, 5) and config.gdn.conv_kernel == 2


def test_yarn(tiny: Tiny, tmp_path: Path) -> None:
    rope = load_config(GGUFFile.open(tiny("yarn_keys"))).rope
    assert (rope.yarn_factor, rope.yarn_orig_ctx) == (4.0, 262144)
    rope = load_config(GGUFFile.open(tiny("yarn_keys_small"))).rope
    assert (rope.yarn_factor, rope.yarn_orig_ctx) == (2.0, 32)
    usual = edited(rope__scaling__type="yarn", rope__scaling__factor=2.0, rope__scaling__yarn_beta_fast=32.0)
    assert load_edited(usual, tmp_path).rope.yarn_orig_ctx == 4096


# --- the draft head


def test_without_draft_head(tiny: Tiny) -> None:
    assert load_config(GGUFFile.open(tiny("nextn_absent"))).draft is None
    config = load_config(GGUFFile.open(tiny("f32")), draft=False)
    assert config.draft is None and config.num_layers == 4
    assert not [name for name in config.tensor_names() if name.startswith(DRAFT)]


def test_promised_but_stripped(tiny: Tiny, tmp_path: Path) -> None:
    file = GGUFFile.open(tiny("nextn_promised"))
    refused(lambda: load_config(file), "content", "NextN", "blk.4 is missing", "--spec-type none")
    config = load_config(file, draft=False)
    assert config.draft is None
    assert config.names == load_config(GGUFFile.open(tiny("f32")), draft=False).names
    for name in (f"{DRAFT}nextn.eh_proj.weight", f"{DRAFT}attn_q.weight", f"{DRAFT}ffn_up.weight"):
        half = edited(drop=(name,))
        refused(partial(load_edited, half, tmp_path), "content", "NextN", repr(name), "--spec-type none")
        assert load_edited(half, tmp_path, draft=False).draft is None


def test_draft_only(tiny: Tiny) -> None:
    file = GGUFFile.open(tiny("nextn_only"))
    refused(lambda: load_config(file), "unsupported", "draft head", "without a trunk")
    refused(lambda: load_config(file, draft=False), "unsupported", "draft head", "without a trunk")
