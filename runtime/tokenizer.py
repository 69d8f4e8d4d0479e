"""Text to token ids and back, for an exported folder.

Decoding is exact to the byte: a token stands for bytes, and text is made from the joined bytes, so a character split
over tokens comes out whole. Control tokens stand for nothing unless asked for; user-defined ones such as <think> are
shown.
"""

from __future__ import annotations

import codecs
import threading
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer as TokenizersTokenizer

from engines.errors import EngineError, UsageError
from engines.given_files import read_bytes
from engines.manifest import TokenizerInfo

TOKENIZER_NAME = "tokenizer.json"
MOST_FILE_BYTES = 256 << 20
# A text of no more bytes a token is within a small factor of what the context holds.
_BYTES_A_TOKEN = 4
_PIECE_CHARACTERS = 1 << 14


class TooManyTokens(UsageError):
    """A text that the context cannot hold."""


def _byte_letters() -> dict[str, int]:
    """The byte-level alphabet, letter -> byte: printable Latin-1 stands for itself, the rest for U+0100 onwards."""
    letters, spare = {}, 0x100
    for byte in range(256):
        if 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or byte >= 0xAE:
            letters[chr(byte)] = byte
        else:
            letters[chr(spare)] = byte
            spare += 1
    return letters


_BYTE_OF_LETTER = _byte_letters()


class Tokenizer:
    """The tokenizer of an exported folder. May be shared by threads."""

    def __init__(self, folder: Path, info: TokenizerInfo) -> None:
        """Load `tokenizer.json`. Raises EngineError when it is missing or broken."""
        path = folder / TOKENIZER_NAME
        try:
            self._library = TokenizersTokenizer.from_str(read_bytes(path, MOST_FILE_BYTES).decode())
        except OSError as error:
            raise EngineError(f"{path}: {error.strerror}; run `python -m export` again") from error
        except Exception as error:  # the library raises bare Exception
            raise EngineError(f"{path}: broken tokenizer ({error}); run `python -m export` again") from error
        self.end_token_ids = frozenset(info.end_token_ids)
        self.bos_token_id = info.bos_token_id
        self.eos_token = self._library.id_to_token(info.end_token_ids[0]) or ""
        self.bos_token = "" if info.bos_token_id is None else self._library.id_to_token(info.bos_token_id) or ""
        added = self._library.get_added_tokens_decoder()
        self._control = {token_id: token.content.encode() for token_id, token in added.items() if token.special}
        self._pieces = {token_id: token.content.encode() for token_id, token in added.items() if not token.special}
        self._missing_bytes = bytes(
            byte for letter, byte in _BYTE_OF_LETTER.items() if self._library.token_to_id(letter) is None
        )
        self._lock = threading.Lock()

    def encode(self, text: str, special: bool = True, bos: bool = True, most: int | None = None) -> list[int]:
        """Token ids of ``text``.

        special  take control tokens spelled in the text, such as <|im_start|>, for what they name; else as plain text
        bos      put the file's BOS token in front, if it asks for one and the text does not begin with it
        most     tokens of use to the caller: a text of far more is not taken in whole to find that out

        Raises UsageError for text that is no Unicode (lone surrogates) or has bytes that the vocabulary lacks, and
        TooManyTokens for one of far more than ``most``.
        """
        try:
            raw = text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"the text has a lone surrogate, U+{ord(text[error.start]):04X}, at character {error.start}; "
                "give valid Unicode"
            ) from None
        if self._missing_bytes and (lost := set(raw) & set(self._missing_bytes)):
            raise UsageError(f"the model's vocabulary has no token for byte 0x{min(lost):02X} of the text")
        if most is not None and len(raw) > _BYTES_A_TOKEN * most:
            self._check_length(text, special, most)
        ids = self._encode(text, special)
        if bos and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            return [self.bos_token_id, *ids]
        return ids

    def _encode(self, text: str, special: bool) -> list[int]:
        with self._lock:  # the switch belongs to the library object
            self._library.encode_special_tokens = not special
            ids: list[int] = self._library.encode(text, add_special_tokens=False).ids
        return ids

    def _check_length(self, text: str, special: bool, most: int) -> None:
        """Count piece by piece: the library takes seconds and gigabytes for a text of some megabytes. A cut changes
        the number of tokens by a few, so twice as many in pieces are too many in any case."""
        found = 0
        for start in range(0, len(text), _PIECE_CHARACTERS):
            found += len(self._encode(text[start : start + _PIECE_CHARACTERS], special))
            if found > 2 * most:
                counted = min(start + _PIECE_CHARACTERS, len(text))
                raise TooManyTokens(
                    f"the prompt has {len(text)} characters, some {found * len(text) // counted} "
                    f"tokens, the context holds {most}; shorten it or raise --ctx-size"
                )

    def piece(self, token_id: int, special: bool = False) -> bytes:
        """The bytes that a token stands for; none for control tokens (unless ``special``) and unused ids."""
        if token_id in self._control:
            return self._control[token_id] if special else b""
        found = self._pieces.get(token_id)
        if found is None:
            letters = self._library.id_to_token(token_id) or ""
            found = b"".join(
                bytes([_BYTE_OF_LETTER[letter]]) if letter in _BYTE_OF_LETTER else letter.encode() for letter in letters
            )
            self._pieces[token_id] = found
        return found

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """The text of ``ids``; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(self.piece(token_id, special) for token_id in ids).decode("utf-8", "replace")


class StreamDecoder:
    """Text of tokens as they come. The joined chunks equal ``decode`` of all the ids.

    A character split over tokens is held back until it is whole. Bytes that cannot begin or go on a character give
    U+FFFD at once, so they hold nothing up.
    """

    def __init__(self, tokenizer: Tokenizer, special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that this token completes; may be empty."""
        return self._utf8.decode(self._tokenizer.piece(token_id, self._special))

    def finish(self) -> str:
        """What is left at the end: U+FFFD for a cut character, else nothing. The decoder can then start anew."""
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest
