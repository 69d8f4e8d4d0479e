"""Model configuration: files that are not for us, lack parts or contradict themselves are refused by name."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines.errors import ModelFileError
from export.config import load_config
from export.gguf_file import GGUFFile
from tests.export.edited_models import DRAFT, SPEC, Tiny, edited, load_edited, refused
from tests.tiny_gguf import TinyModel, build


def test_other_architectures(tiny: Tiny, tmp_path: Path) -> None:
    refused(lambda: load_config(GGUFFile.open(tiny("mmproj"))), "unsupported", "projector", "text model")
    for name in ("qwen35moe", "llama"):
        model = TinyModel({"general.architecture": name}, {"t": np.zeros(1)})
        refused(partial(load_edited, model, tmp_path), "unsupported", repr(name), "supported: qwen35")
    adapter = edited()
    adapter.metadata["general.type"] = "adapter"
    refused(lambda: load_edited(adapter, tmp_path), "unsupported", "adapter")


def test_rope_scaling_unknown(tiny: Tiny) -> None:
    refused(lambda: load_config(GGUFFile.open(tiny("rope_scaling_unknown"))), "unsupported", "'spiral'", "yarn")


YARN = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}


@pytest.mark.parametrize(
    ("keys", "kind", "words"),
    [
        ({"nextn_predict_layers": 2}, "unsupported", ["2 NextN blocks", "0 or 1"]),
        ({"nextn_predict_layers": 5}, "unsupported", ["5 NextN blocks"]),
        ({"block_count": 1}, "content", ["no trunk block"]),
        ({"block_count": 0}, "content", ["block_count' is 0"]),
        ({"block_count": 2**32 - 1}, "content", ["block_count"]),
        ({"block_count": 2**31 - 1}, "content", ["holds only"]),
        ({"block_count": 7}, "content", ["blk.6 is missing"]),
        ({"block_count": "five"}, "content", ["block_count", "int"]),
        ({"embedding_length": 128}, "content", ["'token_embd.weight'", "[320, 64]", "[320, 128]"]),
        ({"feed_forward_length": 64}, "content", ["'blk.0.ffn_gate.weight'", "[128, 64]", "[64, 64]"]),
        ({"feed_forward_length": [128, 64, 128, 128, 128]}, "unsupported", ["feed_forward_length"]),
        ({"full_attention_interval": 2}, "content", ["'blk.1.attn_q.weight' is missing"]),
        ({"full_attention_interval": 0}, "content", ["full_attention_interval"]),
        ({"attention__head_count": 3}, "content", ["attention.head_count is 3", "multiple"]),
        ({"attention__head_count": 8}, "content", ["'blk.3.attn_q.weight'"]),
        ({"attention__head_count_kv": [0, 0, 0, 0, 2]}, "unsupported", ["head_count_kv", "block to block"]),
        ({"attention__head_count_kv": [0, 0, 1, 2, 2]}, "unsupported", ["head_count_kv", "block to block"]),
        ({"attention__head_count_kv": [2, 2]}, "content", ["head_count_kv", "2 entries"]),
        ({"attention__head_count_kv": [0, 0, 0, -2, -2]}, "content", ["head_count_kv"]),
        ({"attention__recurrent_layers": np.array([True] * 5)}, "unsupported", ["recurrent_layers"]),
        ({"attention__recurrent_layers": 3}, "content", ["recurrent_layers"]),
        ({"attention__value_length": 16}, "unsupported", ["value_length 16"]),
        ({"attention__key_length": 16, "attention__value_length": 16}, "content", ["attn_q"]),
        ({"attention__scale": 0.5}, "unsupported", ["attention.scale"]),
        ({"attention__layer_norm_rms_epsilon": 0.0}, "content", ["epsilon"]),
        ({"attention__layer_norm_rms_epsilon": math.nan}, "content", ["epsilon"]),
        ({"rope__dimension_count": 15}, "content", ["dimension_count is 15"]),
        ({"rope__dimension_count": 64}, "content", ["dimension_count is 64"]),
        ({"rope__dimension_count": 32}, "unsupported", ["dimension_sections", "16 rotated pairs"]),
        ({"rope__dimension_sections": [3, 3]}, "content", ["2 entries"]),
        ({"rope__dimension_sections": [3, 3, 1, 1]}, "unsupported", ["[3, 3, 1, 1]"]),
        ({"rope__dimension_sections": [-3, 9, 2, 0]}, "content", ["dimension_sections"]),
        ({"rope__freq_base": 0.5}, "content", ["freq_base"]),
        ({"rope__freq_base": math.inf}, "content", ["freq_base"]),
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}, "unsupported", ["'linear'"]),
        ({"rope__scaling__factor": 4.0}, "unsupported", ["'linear'"]),
        ({"rope__scale_linear": 2.0}, "unsupported", ["'linear'"]),
        ({"rope__scaling__type": "longrope", "rope__scaling__factor": 4.0}, "unsupported", ["'longrope'"]),
        ({"rope__scaling__type": "yarn"}, "content", ["factor is missing"]),
        ({**YARN, "rope__scaling__factor": 0.5}, "unsupported", ["factor is 0.5"]),
        ({**YARN, "rope__scaling__factor": -4.0}, "content", ["rope.scaling.factor"]),
        ({**YARN, "rope__scaling__original_context_length": 0}, "content", ["original_context_length"]),
        ({**YARN, "rope__scaling__attn_factor": 0.5}, "unsupported", ["attn_factor is 0.5"]),
        ({**YARN, "rope__scaling__yarn_beta_fast": 16.0}, "unsupported", ["beta_fast is 16.0"]),
        ({**YARN, "rope__scaling__yarn_log_multiplier": 0.1}, "unsupported", ["log_multiplier"]),
        ({"ssm__time_step_rank": 3}, "content", ["time_step_rank is 3", "multiple"]),
        ({"ssm__group_count": 4}, "content", ["'blk.0.attn_qkv.weight'"]),
        ({"ssm__inner_size": 64}, "content", ["inner_size is 64", "128"]),
        ({"ssm__conv_kernel": 1}, "content", ["conv_kernel"]),
        ({"ssm__conv_kernel": 3}, "content", ["'blk.0.ssm_conv1d.weight'", "[256, 4]", "[256, 3]"]),
        ({"context_length": 0}, "content", ["context_length"]),
        ({"vocab_size": 999}, "content", ["320 embedding rows", "999"]),
    ],
)
def test_contradictory_metadata(tmp_path: Path, keys: dict[str, Any], kind: str, words: list[str]) -> None:
    refused(lambda: load_edited(edited(**keys), tmp_path), kind, *words)


@pytest.mark.parametrize(
    "name",
    ["block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
     "attention.head_count_kv", "attention.layer_norm_rms_epsilon", "rope.dimension_sections", "ssm.conv_kernel",
     "ssm.state_size", "ssm.group_count", "ssm.time_step_rank", "ssm.inner_size"],
)  # fmt: skip
def test_missing_key(tmp_path: Path, name: str) -> None:
    refused(lambda: load_edited(edited(drop=(f"qwen35.{name}",)), tmp_path), "content", f"'qwen35.{name}' is missing")


def test_missing_tensor(tmp_path: Path) -> None:
    optional = {"output.weight", f"{DRAFT}nextn.shared_head_norm.weight"}
    for name in build(SPEC).tensors:
        if name in optional:
            assert load_edited(edited(drop=(name,)), tmp_path).draft is not None
        else:
            refused(partial(load_edited, edited(drop=(name,)), tmp_path), "content", name)


def test_wrong_shape(tmp_path: Path) -> None:
    """Any tensor of another shape, a transposed one too, is refused by name; but the vocabulary's size is free."""
    for name, values in build(SPEC).tensors.items():
        model = edited()
        model.tensors[name] = values[:-1] if values.ndim == 1 else np.ascontiguousarray(values.T)
        if values.ndim == 1 or values.shape[0] != values.shape[1]:
            words = ["embedding rows"] if name == "token_embd.weight" else [repr(name), str(list(values.shape))]
            refused(partial(load_edited, model, tmp_path), "content", *words)


def test_vocabulary_sizes(tmp_path: Path) -> None:
    model = edited()
    model.metadata["tokenizer.ggml.tokens"] = model.metadata["tokenizer.ggml.tokens"][:-1]
    refused(lambda: load_edited(model, tmp_path), "content", "320 embedding rows", "319 tokens")


def test_tensor_of_another_variant(tmp_path: Path) -> None:
    """A bias or scale that would be ignored changes the output, so it is refused."""
    for name in ("blk.0.attn_qkv.bias", "blk.3.attn_sinks", "output.bias", "rope_freqs.weight", f"{DRAFT}attn_q.bias"):
        model = edited()
        model.tensors[name] = np.ones(64)
        refused(partial(load_edited, model, tmp_path), "unsupported", repr(name))
    model = edited()
    model.tensors[f"{DRAFT}attn_q.bias"] = np.ones(64)
    assert load_edited(model, tmp_path, draft=False).draft is None


# --- any metadata


VALUES = st.one_of(
    st.integers(0, 2**32 - 1), st.integers(0, 300), st.floats(width=32), st.booleans(), st.text(max_size=5),
    st.lists(st.integers(-1, 70), min_size=1, max_size=6),
)  # fmt: skip
KEYS = [key for key in build(SPEC).metadata if key.startswith(("qwen35.", "general.type"))]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1, max_size=3), draft=st.booleans())
def test_any_metadata(tmp_path: Path, changes: dict[str, Any], draft: bool) -> None:
    """Whatever the keys say: a configuration the tensors bear out, or a refusal in one line."""
    model = build(SPEC)
    model.metadata |= changes
    file = GGUFFile.open(model.write(tmp_path / "any.gguf"))
    try:
        config = load_config(file, draft)
    except ModelFileError as error:
        assert "\n" not in str(error)
    else:
        assert set(config.tensor_names()) <= set(file.tensors)
