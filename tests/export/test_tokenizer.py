"""The GGUF's vocabulary as tokenizer.json: pre-split, kinds of tokens, end tokens, refusals."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from engines.errors import ModelFileError, ResourceError
from export.gguf_file import GGUFFile
from export.tokenizer import write_tokenizer
from tests.tiny_vocab import (
    CONTROL,
    END_THINK,
    ENDOFTEXT,
    FIRST_PAD,
    IM_END,
    IM_START,
    NORMAL,
    TEMPLATE,
    THINK,
    vocabulary_metadata,
)  # fmt: skip
from tests.vocabulary_files import TRAINED_MODEL, vocabulary_file

# As the model's makers wrote it; ours spells the letter cases of the contractions out.
PUBLISHED_PRE_SPLIT = regex.compile(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def has_lasting_category(character: str) -> bool:
    """Assigned long ago and never moved, so that every Unicode version agrees on it."""
    category = unicodedata.category(character)
    return category not in ("Cn", "Cs") and category == unicodedata.ucd_3_2_0.category(character)


def refused(kind: str, said: str, folder: Path, **changes: object) -> None:
    """``changes`` to keys below tokenizer.ggml are refused, and nothing is written."""
    file = vocabulary_file(**{f"tokenizer__ggml__{key}": value for key, value in changes.items()})
    with pytest.raises(ModelFileError, match=said) as caught:
        write_tokenizer(file, folder)
    assert caught.value.kind == kind
    assert str(caught.value).startswith("small.gguf: ") and "\n" not in str(caught.value)
    assert not list(folder.iterdir())


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("written")
    write_tokenizer(vocabulary_file(), folder)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


# ---------------------------------------------------------------- pre-split
# A long s is a letter s to a case-blind regex; neither llama.cpp nor we take it for a contraction.
ANY = st.characters(exclude_categories=["Cs", "Cn"], exclude_characters="\u017f").filter(has_lasting_category)
ODD = st.sampled_from(
    [
        *"ab'sStTdDmMlLrReEvV \t\n\r.,!_-019",
        *("'re", "'LL", "  ", "\r\n", "é", "e\u0301", "\u0301", "\u093f", "日", "ไ", "²", "Ⅷ", "½", "٣", "👋"),
        *"\u00a0\u3000\u2028\x85\x1c\x0b\u200d\ufeff",
    ]
)


@settings(max_examples=500, deadline=None)
@given(st.lists(ODD | ANY, max_size=40).map("".join))
def test_pre_split_equals_the_published_pattern(written, text):
    got = [text[start:end] for _, (start, end) in written.pre_tokenizer.pre_tokenize_str(text)]
    assert got == PUBLISHED_PRE_SPLIT.findall(text)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("I'm HE'LL 'twas", ["I", "'m", " HE", "'LL", " '", "twas"]),
        ("it'\u017f", ["it", "'\u017f"]),
        ("x12.5", ["x", "1", "2", ".", "5"]),
        ("  a\n\n b \n", [" ", " a", "\n\n", " b", " \n"]),
        ("cafe\u0301!\u0301", ["cafe\u0301", "!\u0301"]),
        ("(foo)...\n\nbar", ["(foo", ")...\n\n", "bar"]),
        ("กรุงเทพ", ["กรุงเทพ"]),
    ],
)
def test_pre_split_examples(written, text, pieces):
    assert [text[start:end] for _, (start, end) in written.pre_tokenizer.pre_tokenize_str(text)] == pieces


def test_text_is_not_normalised(written):
    assert written.normalizer is None
    assert written.encode("e\u0301").ids == list(b"e\xcc\x81")


# ---------------------------------------------------------------- what is written
def test_ids_and_kinds_of_tokens(written):
    metadata = vocabulary_metadata(320)
    for token, text in enumerate(metadata["tokenizer.ggml.tokens"]):
        assert written.id_to_token(token) == (text if token < FIRST_PAD else None)
    added = {token: (entry.content, entry.special) for token, entry in written.get_added_tokens_decoder().items()}
    assert added == {
        ENDOFTEXT: ("<|endoftext|>", True),
        IM_START: ("<|im_start|>", True),
        IM_END: ("<|im_end|>", True),
        THINK: ("<think>", False),
        END_THINK: ("</think>", False),
    }


def test_the_trained_model(tmp_path):
    info = write_tokenizer(GGUFFile.open(TRAINED_MODEL), tmp_path)
    assert info.end_token_ids == (4091, 4089) and info.bos_token_id is None and info.has_chat_template
    assert {path.name for path in tmp_path.iterdir()} == {"tokenizer.json", "chat_template.jinja"}
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).get_vocab_size() == 4096


def test_the_template_is_written_to_the_byte(tmp_path):
    template = TEMPLATE + "\r\nüß\n\n"
    write_tokenizer(vocabulary_file(tokenizer__chat_template=template), tmp_path)
    assert (tmp_path / "chat_template.jinja").read_bytes() == template.encode()


def test_no_template(tmp_path):
    info = write_tokenizer(vocabulary_file(tokenizer__chat_template=None), tmp_path)
    assert not info.has_chat_template
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]


def test_a_repeated_merge_keeps_its_first_rank(tmp_path):
    merges = vocabulary_metadata(320)["tokenizer.ggml.merges"]
    write_tokenizer(vocabulary_file(tokenizer__ggml__merges=[*merges, merges[0]]), tmp_path)
    written = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["merges"]
    assert [" ".join(pair) for pair in written] == merges


def test_ids_do_not_move_when_unused_tokens_lie_between(tmp_path):
    metadata = vocabulary_metadata(320)
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    tokens[-1], types[-1] = "<|last|>", CONTROL
    write_tokenizer(vocabulary_file(tokenizer__ggml__tokens=tokens, tokenizer__ggml__token_type=types), tmp_path)
    loaded = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert loaded.encode("a<|last|><think>").ids == [ord("a"), 319, THINK]


# ---------------------------------------------------------------- end tokens and BOS
def test_end_tokens_by_key_and_by_text(tmp_path):
    assert write_tokenizer(vocabulary_file(), tmp_path).end_token_ids == (IM_END, ENDOFTEXT)
    by_text = vocabulary_file(tokenizer__ggml__eos_token_id=None)
    assert write_tokenizer(by_text, tmp_path).end_token_ids == (ENDOFTEXT, IM_END)
    by_keys = vocabulary_file(
        tokenizer__ggml__eos_token_id=ENDOFTEXT,
        tokenizer__ggml__eot_token_id=IM_START,
        tokenizer__ggml__eom_token_id=-1,
    )
    assert write_tokenizer(by_keys, tmp_path).end_token_ids == (ENDOFTEXT, IM_START, IM_END)


def test_an_end_token_of_the_wrong_type_is_still_special(tmp_path):
    types = vocabulary_metadata(320)["tokenizer.ggml.token_type"]
    types[IM_END] = NORMAL
    write_tokenizer(vocabulary_file(tokenizer__ggml__token_type=types), tmp_path)
    loaded = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert loaded.get_added_tokens_decoder()[IM_END].special


def test_bos_only_when_the_file_asks_for_it(tmp_path):
    given_only = vocabulary_file(tokenizer__ggml__bos_token_id=ENDOFTEXT)
    assert write_tokenizer(given_only, tmp_path).bos_token_id is None
    asked = vocabulary_file(tokenizer__ggml__bos_token_id=ENDOFTEXT, tokenizer__ggml__add_bos_token=True)
    assert write_tokenizer(asked, tmp_path).bos_token_id == ENDOFTEXT


# ---------------------------------------------------------------- refusals
@pytest.mark.parametrize(("key", "value"), [("model", "llama"), ("model", "bert"), ("pre", "llama-bpe"), ("pre", None)])
def test_another_kind_of_tokenizer(tmp_path, key, value):
    said = r"tokenizer\.ggml\.model, tokenizer\.ggml\.pre\); supported: 'gpt2' with 'qwen35'"
    refused("unsupported", said, tmp_path, **{key: value})


@pytest.mark.parametrize("key", ["model", "tokens", "merges"])
def test_a_missing_part(tmp_path, key):
    refused("content", rf"'tokenizer\.ggml\.{key}' is missing", tmp_path, **{key: None})


def test_parts_that_contradict_each_other(tmp_path):
    metadata = vocabulary_metadata(320)
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    refused("content", "has 320 entries, .*token_type 319", tmp_path, token_type=types[:-1])
    refused("content", "token 2 is 9", tmp_path, token_type=[1, 1, 9, *types[3:]])
    refused("content", "tokens 0 and 1 are both", tmp_path, tokens=[tokens[0], *tokens[:1], *tokens[2:]])


@pytest.mark.parametrize("merge", ["ab", "a b c", " a", "a ", ""])
def test_a_merge_that_is_no_pair(tmp_path, merge):
    refused("content", f"merge 1 is {merge!r}", tmp_path, merges=["t h", merge])


@pytest.mark.parametrize(("merge", "lacking"), [("日 a", "日"), ("a 日", "日"), ("q z", "qz")])
def test_a_merge_without_its_tokens(tmp_path, merge, lacking):
    refused(
        "content",
        f"merge 0, '{merge}', needs '{lacking}', which is no token",
        tmp_path,
        merges=[merge],
    )


def test_ids_outside_the_vocabulary(tmp_path):
    refused("content", r"eos_token_id is 320; wanted 0 to 319", tmp_path, eos_token_id=320)
    refused(
        "content",
        r"bos_token_id is -2",
        tmp_path,
        add_bos_token=True,
        bos_token_id=-2,
    )


def test_a_bos_that_is_asked_for_but_not_named(tmp_path):
    refused("content", "add_bos_token is true, but .*bos_token_id is missing", tmp_path, add_bos_token=True)


def test_no_end_token(tmp_path):
    tokens = vocabulary_metadata(320)["tokenizer.ggml.tokens"]
    tokens[ENDOFTEXT], tokens[IM_END] = "<|x|>", "<|y|>"
    refused("content", "no end token", tmp_path, tokens=tokens, eos_token_id=None)


def test_a_folder_that_cannot_be_written(tmp_path):
    with pytest.raises(ResourceError, match=r"tokenizer\.json: cannot be written"):
        write_tokenizer(vocabulary_file(), tmp_path / "missing")
