"""What an exported folder holds: `manifest.json`, written last, read by the engine builder and the runtime.

Standard library only; both the export side and the runtime side import it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from engines.errors import EngineError, printable
from engines.given_files import read_bytes, reason
from engines.sealed_json import is_sealed, write_sealed

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 4
MOST_BYTES = 16 << 20  # of a manifest
_WHOLE_BYTES = 64 << 20
_FROM_ZERO = ("gdn_layers", "attention_layers", "draft_layer", "end_token_ids", "bos_token_id", "num_heads")
_MOST = 1 << 31
_PIECES, _PIECE_BYTES = 256, 64 << 10


@dataclass(frozen=True)
class Geometry:
    """Sizes that the runtime needs to make state buffers and check requests."""

    vocab_size: int
    hidden_size: int
    gdn_layers: tuple[int, ...]
    attention_layers: tuple[int, ...]
    draft_layer: int | None
    num_kv_heads: int
    head_dim: int
    gdn_v_heads: int
    gdn_head_dim: int
    conv_channels: int
    conv_kernel: int
    context_length: int
    num_heads: int = 0  # of queries; 0: of an export that does not tell


@dataclass(frozen=True)
class TokenizerInfo:
    """end_token_ids stop generation; bos_token_id is put in front when the file asks for it, else None."""

    end_token_ids: tuple[int, ...]
    bos_token_id: int | None
    has_chat_template: bool


@dataclass(frozen=True)
class Manifest:
    """Contents of an exported folder.

    `files` maps a role (trunk, draft, replay, weights, ...) to [file name, size], `digests` to its `file_digest`. The
    role draft_ids, the token of each row of the draft's logits as int32, is there when those are not all tokens.
    draft_head_key: `engines.draft_head.DraftHeadOptions.key` of the export. exporter: `export.version` of what made it;
    empty: not known."""

    model_name: str
    content_key: str
    target: str
    geometry: Geometry
    tokenizer: TokenizerInfo
    files: dict[str, tuple[str, int]]
    digests: dict[str, str]
    notes: tuple[str, ...] = field(default=())
    draft_head_key: str = ""
    exporter: str = ""
    read_nbytes: dict[str, int] = field(default_factory=dict)  # of weights, by a pass of each role; empty: not known
    whole: dict[str, str] = field(default_factory=dict)  # `engines.whole_files` of large files; empty: not known
    format_version: int = FORMAT_VERSION

    @property
    def has_draft(self) -> bool:
        return self.geometry.draft_layer is not None

    @property
    def _cure(self) -> str:
        if self.target == "tensorrt":
            return "give the .gguf to `python -m engines.build` again"
        return "run `python -m export` again"

    def save(self, folder: Path) -> None:
        """Write `manifest.json` whole or not at all."""
        write_sealed(folder / MANIFEST_NAME, asdict(self))

    def file(self, folder: Path, role: str) -> Path:
        """Path of a role's file. Raises EngineError when the folder is incomplete."""
        if role not in self.files:
            raise EngineError(f"{folder}: the manifest lists no {role!r} file (has {', '.join(sorted(self.files))})")
        name, size = self.files[role]
        path = folder / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            raise EngineError(
                f"{path}: {'missing' if found is None else f'{found} bytes'}, the manifest says {size} bytes;"
                f" the export is damaged, {self._cure}"
            )
        return path

    def verify(self, folder: Path) -> None:
        """Check every file's size and digest. Raises EngineError naming the first that is not as it was written."""
        for role in self.files:
            path = self.file(folder, role)
            try:
                digest = file_digest(path)
            except OSError as error:
                raise EngineError(f"{path}: cannot be read ({error.strerror})") from error
            if digest != self.digests.get(role):
                raise self.damaged(path)

    def damaged(self, path: Path) -> EngineError:
        return EngineError(f"{path}: its content is not what was exported; the file is damaged, {self._cure}")


def file_digest(path: Path) -> str:
    """Hex digest of a file's size and content: all of it up to 64 MiB, beyond that 256 evenly spread pieces of 64 KiB.

    Quick on a file of many gigabytes; notices a file that was swapped, cut and padded, or damaged over a stretch."""
    size = path.stat().st_size
    digest = hashlib.blake2b(size.to_bytes(8, "little"), digest_size=16)
    with open(path, "rb") as file:
        if size <= _WHOLE_BYTES:
            digest.update(file.read())
        else:
            for index in range(_PIECES):
                file.seek(index * (size - _PIECE_BYTES) // (_PIECES - 1))
                digest.update(file.read(_PIECE_BYTES))
    return digest.hexdigest()


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def load_manifest(folder: Path) -> Manifest:
    """Read `manifest.json` of an exported folder. Raises EngineError naming what is wrong with it."""
    path = folder / MANIFEST_NAME
    try:
        raw = json.loads(read_bytes(path, MOST_BYTES).decode())
    except FileNotFoundError:
        raise EngineError(
            f"{folder}: no {MANIFEST_NAME}; not an exported model (make one with `python -m export`)"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise EngineError(f"{path}: unreadable manifest ({reason(error)}); run `python -m export` again") from None
    if not isinstance(raw, dict) or raw.get("format_version") != FORMAT_VERSION:
        found = raw.get("format_version") if isinstance(raw, dict) else None
        raise EngineError(f"{path}: manifest format {found!r}, wanted {FORMAT_VERSION}; run `python -m export` again")
    if not is_sealed(raw):
        raise EngineError(f"{path}: damaged manifest, not what was written; run `python -m export` again")
    try:
        manifest = Manifest(
            model_name=printable(raw["model_name"]),
            content_key=raw["content_key"],
            target=raw["target"],
            geometry=Geometry(**{key: _tuples(value) for key, value in raw["geometry"].items()}),
            tokenizer=TokenizerInfo(**{key: _tuples(value) for key, value in raw["tokenizer"].items()}),
            files={role: _tuples(entry) for role, entry in raw["files"].items()},
            digests=dict(raw["digests"]),
            notes=_tuples(raw["notes"]),
            draft_head_key=str(raw["draft_head_key"]),
            exporter=str(raw.get("exporter", "")),
            read_nbytes={role: int(nbytes) for role, nbytes in raw.get("read_nbytes", {}).items()},
            whole={role: str(digest) for role, digest in raw.get("whole", {}).items()},
        )
        _check_kinds(manifest)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise EngineError(f"{path}: incomplete manifest ({error}); run `python -m export` again") from None
    return manifest


def check_file_name(name: str) -> None:
    """Raise ValueError for what would lead out of the folder of a manifest."""
    if Path(name).name != name or name in ("", ".."):
        raise ValueError(f"{name!r} is not the name of a file in the folder")


def _check_kinds(manifest: Manifest) -> None:
    """Raise ValueError at the first entry that is not of its kind."""
    for name, value in (*asdict(manifest.geometry).items(), *asdict(manifest.tokenizer).items()):
        if name == "has_chat_template" or (value is None and name in ("draft_layer", "bos_token_id")):
            continue
        numbers = value if isinstance(value, tuple) else (value,)
        wants_tuple = name in ("gdn_layers", "attention_layers", "end_token_ids")
        if wants_tuple != isinstance(value, tuple) or any(type(number) is not int for number in numbers):
            raise ValueError(f"{name} is {value!r}")
        # From what size on a number means something, and what no model has.
        least = 0 if name in _FROM_ZERO else 1
        if any(number is not None and not least <= number <= _MOST for number in numbers):
            raise ValueError(f"{name} is {value!r}")
    if any(token >= manifest.geometry.vocab_size for token in manifest.tokenizer.end_token_ids):
        raise ValueError(f"end_token_ids are {manifest.tokenizer.end_token_ids!r}")
    if not manifest.tokenizer.end_token_ids:
        raise ValueError("end_token_ids is empty")
    for role, entry in manifest.files.items():
        if not (isinstance(entry, tuple) and [type(part) for part in entry] == [str, int]):
            raise ValueError(f"the entry of {role!r} is {entry!r}")
        check_file_name(entry[0])
