"""Which tokens a cut head keeps, and the counts by which it chooses them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from engines.draft_head import DraftHeadOptions, table_head
from engines.errors import UsageError
from export import token_frequencies
from export.draft_tokens import choose_tokens, tokens_always_kept
from export.gguf_file import GGUFFile
from export.token_frequencies import count_tokens, coverage, main, read_table, write_table
from export.tokenizer import vocabulary
from tests import tiny_vocab
from tests.tiny_vocab import FIRST_PAD, FIRST_SPECIAL
from tests.vocabulary_files import exported, vocabulary_file

TEXT = "the thing and the others\n\nand <|im_end|> é\n" * 3
ALWAYS = [*range(256), *range(FIRST_SPECIAL, FIRST_PAD)]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def test_bytes_and_special_tokens_are_always_kept() -> None:
    assert tokens_always_kept(vocabulary_file()).tolist() == ALWAYS
    assert choose_tokens(vocabulary_file(), len(ALWAYS), np.arange(320)).tolist() == ALWAYS
    with pytest.raises(UsageError, match=f"--draft-head-rows {len(ALWAYS) - 1}: wanted {len(ALWAYS)} or more"):
        choose_tokens(vocabulary_file(), len(ALWAYS) - 1, None)


@pytest.mark.parametrize("spelling", ["<tool_call>", "</tool_call>", "<think>", "<|fim_pad|>", "</tool_response>"])
def test_markup_is_kept_whatever_kind_the_file_gives_it(spelling: str) -> None:
    metadata = tiny_vocab.vocabulary_metadata(320)
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    place = tokens.index(spelling) if spelling in tokens else FIRST_PAD + 3
    tokens[place], kinds[place] = spelling, tiny_vocab.NORMAL
    file = vocabulary_file(tokenizer__ggml__tokens=tokens, tokenizer__ggml__token_type=kinds)
    assert place in tokens_always_kept(file)


def test_an_end_token_is_kept_though_it_looks_ordinary() -> None:
    file = vocabulary_file(tokenizer__ggml__eos_token_id=260)
    assert 260 in tokens_always_kept(file)


def test_by_id_where_nothing_was_counted() -> None:
    ids = choose_tokens(vocabulary_file(), len(ALWAYS) + 4, None)
    assert ids.dtype == np.int32
    assert ids.tolist() == sorted([*ALWAYS, 256, 257, 258, 259])


def test_by_count_then_by_id() -> None:
    counts = np.zeros(320, np.int64)
    counts[[270, 260, 262, FIRST_PAD]] = 9, 5, 5, 100  # padding comes last whatever was counted
    for more, chosen in ((1, [270]), (2, [260, 270]), (3, [260, 262, 270]), (4, [256, 260, 262, 270])):
        ids = choose_tokens(vocabulary_file(), len(ALWAYS) + more, counts)
        assert ids.tolist() == sorted([*ALWAYS, *chosen])


def test_counts_are_those_of_the_runtimes_tokenizer(text: Path, tmp_path: Path) -> None:
    ids = exported(vocabulary_file(), tmp_path).encode(TEXT)
    counts = count_tokens(vocabulary_file(), [text, text])
    assert counts.tolist() == (2 * np.bincount(ids, minlength=320)).tolist()
    assert coverage(counts, np.array(sorted(set(ids)))) == 1.0
    assert coverage(counts, np.array([ids[0]])) == ids.count(ids[0]) / len(ids)


def test_a_long_text_is_read_in_pieces(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = count_tokens(vocabulary_file(), [text])
    monkeypatch.setattr(token_frequencies, "_PIECE_CHARACTERS", 3)
    pieces = count_tokens(vocabulary_file(), [text])
    assert [piece.count("\n") for piece in token_frequencies._pieces(text)] == [1, 2] * 3
    assert np.array_equal(whole, pieces)


def test_table_round_trip(text: Path, tmp_path: Path) -> None:
    file, table = vocabulary_file(), tmp_path / "table"
    counts = count_tokens(file, [text])
    write_table(file, counts, table)
    assert np.array_equal(read_table(file, table), counts)
    lines = table.read_text().splitlines()[1:]
    assert [int(line.split("\t")[1]) for line in lines] == sorted(counts[counts > 0].tolist(), reverse=True)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is no table of token frequencies"),
        (b"once upon a time\n", "plain text goes to --draft-head-text"),
        (b"\xff\xfe", "cannot be read"),
        (b"# nextn token frequencies, vocabulary 0123\n5\t7\n", "another vocabulary"),
        (b"HEAD\n5 7\n", "line 2 is '5 7'; wanted a token below 320"),
        (b"HEAD\n5\t7\n320\t1\n", "line 3 is"),
        (b"HEAD\n-1\t7\n", "line 2 is"),
    ],
)
def test_tables_that_are_refused(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "table"
    path.write_bytes(content.replace(b"HEAD", table_head(*vocabulary(vocabulary_file())).encode()))
    with pytest.raises(UsageError, match=says):
        read_table(vocabulary_file(), path)


def test_texts_that_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "latin").write_bytes("é".encode("latin-1"))
    for name, says in (("absent", "cannot be read"), ("latin", "cannot be read as UTF-8"), ("empty", "no text")):
        with pytest.raises(UsageError, match=says):
            count_tokens(vocabulary_file(), [tmp_path / name])


def test_command_line(
    tiny: Callable[[str], Path], text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, table = tiny("f32"), tmp_path / "table"
    assert main([str(model), str(text), "-o", str(table)]) == 0
    counts = read_table(GGUFFile.open(model), table)
    out = capsys.readouterr().out
    assert out.startswith(f"{counts.sum()} tokens, {np.count_nonzero(counts)} of 320 occur\n")
    assert main([str(model), str(tmp_path / "absent")]) == 2
    assert main([str(text), str(text)]) == 3
    assert main([str(model), str(text), "-o", str(tmp_path / "no" / "table")]) == 6
    assert capsys.readouterr().err.count("error: ") == 3


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (DraftHeadOptions(rows=-1), "--draft-head-rows -1"),
        (DraftHeadOptions(head_type="q2_k"), "--draft-head-type q2_k: wanted one of keep, q4_k"),
        (DraftHeadOptions(rows=9, texts=(Path("a"),), table=Path("b")), "give one"),
        (DraftHeadOptions(texts=(Path("a"),)), "--draft-head-text chooses rows, but all are kept"),
        (DraftHeadOptions(table=Path("a")), "--draft-head-table chooses rows, but all are kept"),
    ],
)
def test_options_without_a_meaning(options: DraftHeadOptions, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        options.validate()


def test_the_key_tells_what_the_result_depends_on(text: Path, tmp_path: Path) -> None:
    assert DraftHeadOptions().key() == ""
    again = tmp_path / "copy"
    again.write_bytes(text.read_bytes())
    by_text = DraftHeadOptions(rows=300, texts=(text,))
    assert by_text.key() == DraftHeadOptions(rows=300, texts=(again,)).key(), "content counts, not the name"
    others = [
        DraftHeadOptions(rows=300),
        DraftHeadOptions(rows=301, texts=(text,)),
        DraftHeadOptions(rows=300, table=text),
        DraftHeadOptions(rows=300, texts=(text,), head_type="q4_k"),
        DraftHeadOptions(head_type="q4_k"),
        DraftHeadOptions(rows=300, texts=(text, text)),
    ]
    assert len({each.key() for each in [by_text, *others]}) == len(others) + 1
    with pytest.raises(UsageError, match="cannot be read"):
        DraftHeadOptions(rows=300, texts=(tmp_path / "absent",)).key()
