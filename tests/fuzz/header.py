"""A GGUF header taken apart, changed and put together again, so that damage gets past the first checks.

Written from the format alone: nothing of the product is used here."""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass, field

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

_FORMATS = {
    GGUFValueType.UINT8: "<B", GGUFValueType.INT8: "<b", GGUFValueType.UINT16: "<H", GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I", GGUFValueType.INT32: "<i", GGUFValueType.FLOAT32: "<f", GGUFValueType.BOOL: "<B",
    GGUFValueType.UINT64: "<Q", GGUFValueType.INT64: "<q", GGUFValueType.FLOAT64: "<d",
}  # fmt: skip
_NUMBERS = (
    0, 1, 2, 3, 4, 5, 7, 8, 16, 31, 32, 33, 63, 64, 128, 255, 256, 257, 1024, 4096, 65535, 65536, 2**20, 2**31 - 1,
    2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -1, -2, -(2**31), -(2**63),
)  # fmt: skip
_FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-6, 1e-45, 1e30, 1e300, float("inf"), float("-inf"), float("nan"), 4.0, 2.0)
_STRINGS = (
    b"", b"\0", b"yarn", b"linear", b"none", b"longrope", b"clip", b"qwen35", b"qwen35moe", b"mmproj", b"adapter",
    b"gpt2", b"qwen2", b"llama", b"a" * 300, b"\xff\xfe", b"\xed\xa0\x80", b"\xc3\xa9", b"{% for", b"{{ messages }}",
    b"\x1b[31m\n", b"{%- for m in messages %}{{ m.content }}{% endfor %}", b"../../x", b"{{ 'a' * 9999999 }}",
)  # fmt: skip


@dataclass
class Value:
    """One metadata value: its type, and items (one, unless it is an array) as numbers or bytes."""

    kind: int
    items: list[int | float | bytes]
    item_kind: int | None = None  # of an array

    def packed(self) -> bytes:
        if self.item_kind is None:
            return _packed(self.kind, self.items[0])
        parts = [_packed(self.item_kind, item) for item in self.items]
        return struct.pack("<IQ", self.item_kind, len(parts)) + b"".join(parts)


@dataclass
class Tensor:
    name: bytes
    dims: list[int]
    kind: int
    offset: int


@dataclass
class Parts:
    """What a header says. ``lies``: added to the counts of tensors and keys."""

    version: int
    keys: list[tuple[bytes, Value]]
    tensors: list[Tensor]
    lies: list[int] = field(default_factory=lambda: [0, 0])

    def packed(self) -> bytes:
        counts = [len(self.tensors) + self.lies[0], len(self.keys) + self.lies[1]]
        out = [b"GGUF", struct.pack("<IQQ", self.version, *(count % 2**64 for count in counts))]
        for name, value in self.keys:
            out += [_packed(GGUFValueType.STRING, name), struct.pack("<I", value.kind % 2**32), value.packed()]
        for tensor in self.tensors:
            dims = struct.pack(f"<I{len(tensor.dims)}Q", len(tensor.dims), *(dim % 2**64 for dim in tensor.dims))
            out += [_packed(GGUFValueType.STRING, tensor.name), dims]
            out += [struct.pack("<IQ", tensor.kind % 2**32, tensor.offset % 2**64)]
        return b"".join(out)

    def alignment(self) -> int:
        found = [value.items[0] for name, value in self.keys if name == b"general.alignment" and value.items]
        return found[0] if found and isinstance(found[0], int) and 0 < found[0] <= 1 << 20 else 32

    def lay_out(self) -> None:
        """Give every tensor a place of its own."""
        at = 0
        for tensor in self.tensors:
            tensor.offset = at
            at += -(-_nbytes(tensor) // self.alignment()) * self.alignment()

    def data_nbytes(self) -> int:
        return max((tensor.offset + _nbytes(tensor) for tensor in self.tensors), default=0)


def parse(content: bytes) -> tuple[Parts, int] | None:
    """The parts and where they end; None for what is no header."""
    try:
        magic, version, num_tensors, num_keys = struct.unpack_from("<4sIQQ", content)
        if magic != b"GGUF" or num_tensors > 4096 or num_keys > 4096:
            return None
        at, keys, tensors = 24, [], []
        for _ in range(num_keys):
            name, at = _string(content, at)
            (kind,) = struct.unpack_from("<I", content, at)
            value, at = _value(content, at + 4, kind)
            keys.append((name, value))
        for _ in range(num_tensors):
            name, at = _string(content, at)
            (count,) = struct.unpack_from("<I", content, at)
            if count > 64:
                return None
            *dims, tensor_kind, offset = struct.unpack_from(f"<{count}QIQ", content, at + 4)
            at += 4 + 8 * count + 12
            tensors.append(Tensor(name, list(dims), tensor_kind, offset))
    except (struct.error, KeyError, ValueError):
        return None
    return Parts(version, keys, tensors), at


def mutate(parts: Parts, chance: random.Random) -> None:
    """Change one thing; tensors are mostly laid out anew, so that the rest stays in order."""
    ways = [_change_value] * 6 + [_change_tensor] * 4 + [_change_keys] * 2 + [_change_tensors] * 2 + [_lie]
    chance.choice(ways)(parts, chance)
    if chance.random() < 0.8:
        parts.lay_out()


def _change_value(parts: Parts, chance: random.Random) -> None:
    if not parts.keys:
        return
    index = chance.randrange(len(parts.keys))
    name, value = parts.keys[index]
    if chance.random() < 0.1:  # another type
        value.kind, value.item_kind = chance.choice([*_FORMATS, GGUFValueType.STRING, 13, 77]), None
        value.items = value.items[:1] or [0]
    elif value.item_kind is not None and chance.random() < 0.5:
        _change_array(value, chance)
    elif value.items:
        at = chance.randrange(len(value.items))
        value.items[at] = _other(value.items[at], chance)
    parts.keys[index] = (name, value)


def _change_array(value: Value, chance: random.Random) -> None:
    match chance.randrange(4):
        case 0:
            value.items = value.items[: chance.randrange(len(value.items) + 1)]
        case 1:
            value.items = value.items + value.items[: chance.choice([1, 2, 100])]
        case 2:
            value.item_kind = chance.choice([*_FORMATS, GGUFValueType.STRING, GGUFValueType.ARRAY])
        case 3 if len(value.items) > 1:
            left, right = chance.sample(range(len(value.items)), 2)
            value.items[left], value.items[right] = value.items[right], value.items[left]


def _change_tensor(parts: Parts, chance: random.Random) -> None:
    if not parts.tensors:
        return
    tensor = chance.choice(parts.tensors)
    match chance.randrange(5):
        case 0 if tensor.dims:
            at = chance.randrange(len(tensor.dims))
            tensor.dims[at] = int(_other(tensor.dims[at], chance))
        case 1:
            tensor.dims = chance.choice([tensor.dims[::-1], [*tensor.dims, 1], tensor.dims[:-1], [1] * 5])
        case 2:
            tensor.kind = chance.choice([*GGMLQuantizationType, 99])
        case 3:
            tensor.offset = chance.choice([tensor.offset + 32, tensor.offset + 1, 0, 2**63])
        case 4:
            tensor.name = chance.choice(parts.tensors).name


def _change_keys(parts: Parts, chance: random.Random) -> None:
    if len(parts.keys) < 2:
        return
    left, right = chance.sample(range(len(parts.keys)), 2)
    match chance.randrange(3):
        case 0:
            del parts.keys[left]
        case 1:
            parts.keys.append((parts.keys[left][0] + chance.choice([b"", b"_kv", b".x"]), parts.keys[right][1]))
        case 2:
            parts.keys[left] = (parts.keys[left][0], parts.keys[right][1])


def _change_tensors(parts: Parts, chance: random.Random) -> None:
    if not parts.tensors:
        return
    at = chance.randrange(len(parts.tensors))
    match chance.randrange(4):
        case 0:
            del parts.tensors[at]
        case 1:
            found = parts.tensors[at]
            parts.tensors.append(
                Tensor(found.name + chance.choice([b"", b"2"]), [*found.dims], found.kind, found.offset)
            )
        case 2:
            chance.shuffle(parts.tensors)
        case 3:
            parts.tensors = parts.tensors[:at]


def _lie(parts: Parts, chance: random.Random) -> None:
    parts.lies[chance.randrange(2)] = chance.choice([-1, 1, 2, 2**32, 2**63])
    parts.version = chance.choice([parts.version, parts.version, 1, 2, 3, 4, 0x03000000])


def _other(item: int | float | bytes, chance: random.Random) -> int | float | bytes:
    if isinstance(item, bytes):
        return chance.choice([chance.choice(_STRINGS), item + chance.choice(_STRINGS), item[: len(item) // 2]])
    if isinstance(item, float):
        return chance.choice([*_FLOATS, -item, item * 2, item / 3])
    return chance.choice(
        [chance.choice(_NUMBERS), item + 1, item - 1, item * 2, item // 2, item ^ 1 << chance.randrange(32)]
    )


def _packed(kind: int, item: int | float | bytes) -> bytes:
    """``item`` as ``kind``, whatever it is: what does not fit wraps around."""
    if kind == GGUFValueType.STRING:
        text = item if isinstance(item, bytes) else str(item).encode()
        return struct.pack("<Q", len(text)) + text
    code = _FORMATS.get(
        GGUFValueType(kind) if kind in GGUFValueType.__members__.values() else GGUFValueType.UINT8, "<Q"
    )
    number = len(item) if isinstance(item, bytes) else item
    if code in ("<f", "<d"):
        try:
            return struct.pack(code, float(number))
        except OverflowError:
            return struct.pack(code, float("inf"))
    whole = int(number) if number == number and abs(number) != float("inf") else 0
    return (whole % 2**64).to_bytes(8, "little")[: struct.calcsize(code)]


def _string(content: bytes, at: int) -> tuple[bytes, int]:
    (nbytes,) = struct.unpack_from("<Q", content, at)
    if nbytes > len(content) - at - 8:
        raise ValueError(nbytes)
    return content[at + 8 : at + 8 + nbytes], at + 8 + nbytes


def _item(content: bytes, at: int, kind: int) -> tuple[int | float | bytes, int]:
    if kind == GGUFValueType.STRING:
        return _string(content, at)
    code = _FORMATS[GGUFValueType(kind)]
    return struct.unpack_from(code, content, at)[0], at + struct.calcsize(code)


def _value(content: bytes, at: int, kind: int) -> tuple[Value, int]:
    if kind != GGUFValueType.ARRAY:
        item, at = _item(content, at, kind)
        return Value(kind, [item]), at
    item_kind, count = struct.unpack_from("<IQ", content, at)
    if count > len(content):
        raise ValueError(count)
    items, at = [], at + 12
    for _ in range(count):
        item, at = _item(content, at, item_kind)
        items.append(item)
    return Value(kind, items, item_kind), at


def _nbytes(tensor: Tensor) -> int:
    values = 1
    for dim in tensor.dims:
        values *= dim
    if tensor.kind not in GGMLQuantizationType.__members__.values():
        return 4 * values
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.kind)]
    return values // block * size
