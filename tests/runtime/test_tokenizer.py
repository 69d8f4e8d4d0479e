"""Text to ids as llama.cpp does, ids to text to the byte, streaming that never cuts a character."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.errors import EngineError, UsageError
from engines.manifest import TokenizerInfo
from export.gguf_file import GGUFFile
from runtime.tokenizer import StreamDecoder, Tokenizer, TooManyTokens
from tests.tiny_vocab import FIRST_PAD, IM_END, IM_START, THINK, UNUSED, vocabulary_metadata
from tests.vocabulary_files import TRAINED_MODEL, exported, vocabulary_file

# Made once with llama.cpp on the trained model; the file says how.
RECORDED = json.loads((Path(__file__).parents[1] / "data" / "tokenizer_llamacpp.json").read_text())


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Tokenizer:
    return exported(GGUFFile.open(TRAINED_MODEL), tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Tokenizer:
    """Id b is byte b, so any bytes can be spelled."""
    return exported(vocabulary_file(), tmp_path_factory.mktemp("small"))


def stream(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    decoder = StreamDecoder(tokenizer)
    return [*(decoder.push(token) for token in ids), decoder.finish()]


# ---------------------------------------------------------------- against llama.cpp
@pytest.mark.parametrize("entry", RECORDED["strings"], ids=lambda entry: ascii(entry["text"])[:40])
def test_ids_equal_llamacpp(trained, entry):
    assert trained.encode(entry["text"]) == entry["ids"]
    assert trained.encode(entry["text"], special=False) == entry.get("plain_ids", entry["ids"])
    assert trained.decode(entry["ids"], special=True) == entry["text"]


@pytest.mark.parametrize("key", ["pieces", "special_pieces"])
def test_every_piece_equals_llamacpp(trained, key):
    digest = hashlib.sha256()
    for token in range(4096):
        piece = trained.piece(token, special=key == "special_pieces")
        digest.update(len(piece).to_bytes(4, "little") + piece)
    assert digest.hexdigest() == RECORDED[key]


# ---------------------------------------------------------------- round trips and streaming
@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_text_comes_back(trained, text):
    ids = trained.encode(text, special=False)
    assert trained.decode(ids) == text
    assert "".join(stream(trained, ids)) == text


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 319), max_size=40))
def test_streamed_chunks_equal_the_whole(small, ids):
    assert "".join(stream(small, ids)) == small.decode(ids)


@settings(max_examples=100, deadline=None)
@given(st.text(st.sampled_from("aé日👋🏽\u0301\n "), min_size=1, max_size=20))
def test_no_replacement_character_inside_good_text(small, text):
    chunks = stream(small, list(text.encode()))  # one byte a token
    assert "".join(chunks) == text
    assert all("\ufffd" not in chunk for chunk in chunks)


def test_a_character_comes_when_it_is_whole(small):
    assert stream(small, list("é👋".encode())) == ["", "é", "", "", "", "👋", ""]


def test_a_cut_tail_gives_one_replacement_character(small):
    assert stream(small, list("é👋".encode())[:-1]) == ["", "é", "", "", "", "\ufffd"]
    assert small.decode(list("é👋".encode())[:-1]) == "é\ufffd"


def test_invalid_bytes_do_not_stall_the_stream(small):
    assert stream(small, [0xFF, 0xFE, ord("a")]) == ["\ufffd", "\ufffd", "a", ""]
    assert stream(small, [0xE2, 0x82, ord("a")])[2] == "\ufffda"
    assert stream(small, [0xC3, 0xFF]) == ["", "\ufffd\ufffd", ""]


def test_a_decoder_can_start_anew(small):
    decoder = StreamDecoder(small)
    assert (decoder.push(0xC3), decoder.finish(), decoder.push(ord("a")), decoder.finish()) == ("", "\ufffd", "a", "")


# ---------------------------------------------------------------- control, user-defined and unused tokens
def test_control_tokens_are_hidden_unless_asked_for(small):
    ids = small.encode("<|im_start|>a<|im_end|>")
    assert ids == [IM_START, ord("a"), IM_END]
    assert small.decode(ids) == "a"
    assert small.decode(ids, special=True) == "<|im_start|>a<|im_end|>"
    decoder = StreamDecoder(small, special=True)
    assert decoder.push(IM_END) == "<|im_end|>"


def test_control_tokens_as_plain_text(small):
    ids = small.encode("<|im_end|>", special=False)
    assert IM_END not in ids and small.decode(ids) == "<|im_end|>"
    assert small.encode("<|im_end|>") == [IM_END]  # the switch does not stick


def test_user_defined_tokens_are_always_matched_and_shown(small):
    for special in (True, False):
        assert small.encode("<think>", special=special) == [THINK]
    assert small.decode([THINK]) == "<think>"


def test_unused_and_unknown_ids_stand_for_nothing(small):
    assert small.decode([FIRST_PAD, ord("x"), 319, 10**6]) == "x"
    assert FIRST_PAD not in small.encode("[PAD0]")


def test_a_hidden_token_does_not_split_a_character(small):
    first, *rest = "é".encode()
    assert "".join(stream(small, [first, IM_END, *rest])) == "é"


def test_end_tokens(small, trained):
    assert trained.end_token_ids == set(RECORDED["end_token_ids"])
    assert small.eos_token == trained.eos_token == "<|im_end|>"
    assert IM_END in small.end_token_ids


# ---------------------------------------------------------------- BOS
def test_nothing_is_put_in_front(small, trained, tmp_path):
    """Id 11 is what some loaders take for BOS when the file names none."""
    tokens = vocabulary_metadata(320)["tokenizer.ggml.tokens"]
    tokens[11], tokens[ord(",")] = tokens[ord(",")], tokens[11]
    comma = exported(vocabulary_file(tokenizer__ggml__tokens=tokens, tokenizer__ggml__add_bos_token=None), tmp_path)
    assert comma.encode(",") == [11]
    for tokenizer in (small, trained, comma):
        assert tokenizer.bos_token_id is None and tokenizer.bos_token == ""
        assert tokenizer.encode("") == []
        assert tokenizer.encode("a")[0] != 11
        assert tokenizer.decode(tokenizer.encode(" \n ")) == " \n "


def test_bos_is_put_in_front_once_when_the_file_asks(tmp_path):
    asks = exported(
        vocabulary_file(tokenizer__ggml__add_bos_token=True, tokenizer__ggml__bos_token_id=IM_START), tmp_path
    )
    assert asks.encode("a") == [IM_START, ord("a")]
    assert asks.encode("<|im_start|>a") == [IM_START, ord("a")]
    assert asks.encode("a", bos=False) == [ord("a")]
    assert asks.encode("") == [IM_START]


# ---------------------------------------------------------------- refusals
def test_lone_surrogates_are_refused(small):
    with pytest.raises(UsageError, match=r"lone surrogate, U\+D83D, at character 2"):
        small.encode("ab\ud83d")


def test_text_is_never_lost_to_a_vocabulary_without_its_bytes(tmp_path):
    types = vocabulary_metadata(320)["tokenizer.ggml.token_type"]
    types[ord("z")] = UNUSED
    lacking = exported(vocabulary_file(tokenizer__ggml__token_type=types), tmp_path)
    assert lacking.encode("a") == [ord("a")]
    with pytest.raises(UsageError, match="byte 0x7A"):
        lacking.encode("az")


def test_a_missing_or_broken_file_is_an_engine_error(tmp_path):
    info = TokenizerInfo((1,), None, False)
    with pytest.raises(EngineError, match=r"tokenizer\.json.*run `python -m export` again"):
        Tokenizer(tmp_path, info)
    for broken in (b"{}", b"\xff", b"[1"):
        (tmp_path / "tokenizer.json").write_bytes(broken)
        with pytest.raises(EngineError, match=r"tokenizer\.json: broken tokenizer"):
            Tokenizer(tmp_path, info)


def test_a_long_text(trained):
    text = "def f(x):\n    return x  # naïve 日本\n" * 3000
    ids = trained.encode(text)
    assert trained.decode(ids) == text


# ---------------------------------------------------------------- more than the context holds
LONG = {"words": "a b ", "one word": "a", "line ends": "\n", "control tokens": "<|im_start|>", "no ASCII": "x1é! 日"}


@pytest.mark.parametrize("kind", LONG)
def test_what_cannot_fit_is_not_taken_in_whole(trained, monkeypatch, kind):
    """Eight million characters would take the library seconds and gigabytes."""
    text, taken, encode = LONG[kind] * (8_000_000 // len(LONG[kind])), [], trained._encode
    monkeypatch.setattr(trained, "_encode", lambda piece, special: taken.append(len(piece)) or encode(piece, special))
    with pytest.raises(
        TooManyTokens, match=rf"{len(text)} characters, some \d+ tokens, the context holds 512; shorten"
    ):
        trained.encode(text, most=512)
    assert sum(taken) < 200_000, taken


def test_the_tokens_of_a_short_one_too_many_are_told(trained):
    text = "Explain itertools.chain. " * 4
    tokens = len(trained.encode(text))
    with pytest.raises(TooManyTokens, match=rf"100 characters, some {tokens} tokens, the context holds 2; shorten"):
        trained.encode(text, most=2)


@pytest.mark.parametrize("kind", LONG)
@pytest.mark.parametrize("most", [100, 4096])
def test_what_fits_is_taken_whatever_its_length(trained, kind, most):
    unit = LONG[kind]
    for length in (most // 2, most - 1, most, most + 1, most * 3 // 2):
        text = unit * length
        ids = trained.encode(text)
        if len(ids) <= most:
            assert trained.encode(text, most=most) == ids


def test_a_long_text_of_long_tokens_fits(trained):
    """Sixteen bytes a token: longer than what is looked at more closely."""
    text = " " * 128 * 500
    ids = trained.encode(text)
    assert len(text) > 8 * len(ids) and trained.encode(text, most=len(ids)) == ids
