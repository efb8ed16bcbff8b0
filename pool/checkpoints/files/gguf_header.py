"""The header of a GGUF file, read strictly, as a `Header`: named tensors and where their bytes are. Torch-free.

Knows the format: counts, typed entries, then each tensor's name, sizes, type and place. Quantized tensors have ggml's
name of their type, "Q4_K", as their dtype, and the shape that a model has; the others have the names of safetensors.
Every count, size and place is held against the file's length before anything of that size is read or made.
Source: the GGUF specification (ggml, docs/gguf.md), versions 2 and 3; city96's converters (ComfyUI-GGUF, Apache-2.0)
for `comfy.gguf.orig_shape.*` entries, of weights whose rows fill no blocks, and for weights of five dimensions.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import BinaryIO

from pool.checkpoints.files.ggml_types import PLAIN_NAMES, block_of, is_readable, type_names
from pool.checkpoints.files.gguf_names import renamed
from pool.checkpoints.files.regular_file import open_regular
from pool.checkpoints.files.strict_json import brief
from pool.checkpoints.safetensors_file import MAX_ELEMENTS, MAX_HEADER_BYTES, Header, Shape, TensorEntry, is_countable
from pool.errors import CorruptFile, UnknownArchitecture

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT_KEY, _ALIGNMENT_BYTES = "general.alignment", 32
_ORIGINAL_SHAPE = "comfy.gguf.orig_shape."
#: which names a file has follows from what it says it is
_ARCHITECTURE_KEY = "general.architecture"
#: ggml has four; converters put weights of films back with the five that they have
_MOST_DIMENSIONS = 8
#: more than any published model has: what a header may cost is bounded by them
_MOST_TENSORS, _MOST_ENTRIES, _MOST_STRINGS = 1 << 17, 1 << 12, 1 << 21
#: what the parts of a file that was split say
_SPLIT_KEY = "split.count"
_MOST_NAME_BYTES = 1 << 12
#: of the description of a tensor: its name's length, a count, one size, a type, a place
_LEAST_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8
#: of an entry: its name's length, a type, one byte
_LEAST_ENTRY_BYTES = 8 + 4 + 1
#: texts that are kept; longer ones (templates of chats, licences) say nothing of weights
_MOST_TEXT_BYTES = 1 << 12

_STRING, _ARRAY, _BOOL = 8, 9, 7
#: struct's letters of the kinds of single values
_SCALARS: Mapping[int, str] = MappingProxyType(
    {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "?", 10: "Q", 11: "q", 12: "d"}
)


class _Damaged(Exception):
    """What is wrong, without the file's name."""


def read_gguf_header(path: str) -> Header:
    """What the GGUF file at `path` holds; reads no weights.

    Single numbers and texts of its entries are the header's metadata. Text encoders that have llama.cpp's names get
    those of transformers. Raises CorruptFile, naming the file and what is wrong with it, when it is no whole GGUF file;
    UnknownArchitecture for text encoders whose values are not those that transformers has.
    """
    with open_regular(path, "a GGUF file") as (file, file_bytes):
        try:
            return _header(path, _Reader(file, file_bytes), file_bytes)
        except _Damaged as error:
            raise CorruptFile(f"{path}: {error}, expected a whole GGUF file") from None
        except UnknownArchitecture as error:
            raise UnknownArchitecture(f"{path}: {error}") from None


@dataclass(slots=True)
class _Reader:
    """A file from its beginning, of which no more is read than it has, nor than a header may have."""

    file: BinaryIO
    file_bytes: int
    at: int = 0

    def take(self, size_bytes: int) -> bytes:
        self.expect(size_bytes)
        self.at += size_bytes
        data = self.file.read(size_bytes)
        if len(data) != size_bytes:
            raise _Damaged(f"ends at byte {self.at - size_bytes + len(data)}, inside its header")
        return data

    def skip(self, size_bytes: int) -> None:
        self.expect(size_bytes)
        self.at += size_bytes
        self.file.seek(self.at)

    def expect(self, size_bytes: int) -> None:
        """Raise unless so many bytes more are there, and may belong to a header."""
        if self.at + size_bytes > self.file_bytes:
            raise _Damaged(f"truncated inside its header: it needs {size_bytes} bytes at byte {self.at}")
        if self.at + size_bytes > MAX_HEADER_BYTES:
            raise _Damaged(f"its header is larger than {MAX_HEADER_BYTES} bytes")

    def number(self, letter: str) -> int | float | bool:
        value: int | float | bool = struct.unpack(f"<{letter}", self.take(struct.calcsize(f"<{letter}")))[0]
        return value

    def count(self, least_bytes: int, most: int | None = None) -> int:
        """A number of things that take so many bytes each at least, no more than `most`."""
        found = int(self.number("Q"))
        self.expect(found * least_bytes)
        if most is not None and found > most:
            raise _Damaged(f"found {found} of what files have {most} of at most, at byte {self.at}")
        return found

    def name(self) -> str:
        size_bytes = self.count(1)
        if size_bytes > _MOST_NAME_BYTES:
            raise _Damaged(f"found a name of {size_bytes} bytes at byte {self.at}")
        return _text(self.take(size_bytes))


@dataclass(slots=True)
class _Entries:
    """What a header says beside its tensors."""

    metadata: dict[str, str] = field(default_factory=dict)
    shapes: dict[str, Shape] = field(default_factory=dict)
    alignment_bytes: int = _ALIGNMENT_BYTES


def _header(path: str, reader: _Reader, file_bytes: int) -> Header:
    if reader.take(len(MAGIC)) != MAGIC:
        raise _Damaged("does not begin with GGUF")
    version = int(reader.number("I"))
    if version not in _VERSIONS:
        raise _Damaged(f"found version {version}, expected {' or '.join(map(str, _VERSIONS))}")
    tensor_count = reader.count(_LEAST_TENSOR_BYTES, _MOST_TENSORS)
    said = _entries(reader, reader.count(_LEAST_ENTRY_BYTES, _MOST_ENTRIES))
    if said.metadata.get(_SPLIT_KEY, "1") not in ("0", "1"):
        raise _Damaged(f"one of {said.metadata[_SPLIT_KEY]} parts, which have to be put together first")
    described = [_described(reader, said) for _ in range(tensor_count)]
    begin = -(-reader.at // said.alignment_bytes) * said.alignment_bytes
    entries = [_placed(name, kind, shape, begin + offset, file_bytes) for name, kind, shape, offset in described]
    architecture = said.metadata.get(_ARCHITECTURE_KEY, "")
    tensors: dict[str, TensorEntry] = {}
    for entry in sorted(entries, key=lambda e: (e.begin, e.end, e.name)):
        known = renamed(entry, architecture)
        if known is None:
            continue
        if known.name in tensors:
            raise _Damaged(f"tensor {brief(entry.name)}: found twice")
        tensors[known.name] = known
    _refuse_overlaps(tensors)
    return Header(path, file_bytes, tensors, said.metadata)


def _entries(reader: _Reader, count: int) -> _Entries:
    said, names = _Entries(), set[str]()
    for _ in range(count):
        name = reader.name()
        if name in names:
            raise _Damaged(f"entry {brief(name)}: found twice")
        names.add(name)
        kind = int(reader.number("I"))
        if kind == _ARRAY:
            values = _array(reader, name)
            if values is not None:
                said.shapes[name.removeprefix(_ORIGINAL_SHAPE)] = values
        elif kind == _STRING:
            size_bytes = reader.count(1)
            if size_bytes > _MOST_TEXT_BYTES:
                reader.skip(size_bytes)
            else:
                said.metadata[name] = _text(reader.take(size_bytes))
        else:
            said.metadata[name] = str(reader.number(_scalar(kind, name)))
    alignment = said.metadata.get(_ALIGNMENT_KEY, str(_ALIGNMENT_BYTES))
    if not alignment.isdecimal() or not 1 <= int(alignment) <= 1 << 20 or int(alignment) % 8:
        raise _Damaged(f"found {_ALIGNMENT_KEY} {alignment}, expected a multiple of 8 up to {1 << 20}")
    said.alignment_bytes = int(alignment)
    return said


def _array(reader: _Reader, name: str) -> Shape | None:
    """Pass over an array; the numbers of one that is a shape."""
    kind = int(reader.number("I"))
    if kind == _STRING:
        for _ in range(reader.count(8, _MOST_STRINGS)):
            reader.skip(reader.count(1))
        return None
    letter = _scalar(kind, name)
    item_bytes = struct.calcsize(f"<{letter}")
    count = reader.count(item_bytes)
    if not name.startswith(_ORIGINAL_SHAPE):
        reader.skip(count * item_bytes)
        return None
    if count > _MOST_DIMENSIONS:
        raise _Damaged(f"entry {brief(name)}: found {count} sizes")
    values = [reader.number(letter) for _ in range(count)]
    shape = tuple(value for value in values if type(value) is int)
    if len(shape) != count or not _is_shape(shape):
        raise _Damaged(f"entry {brief(name)}: found {values}, expected the sizes of a tensor")
    return shape


def _scalar(kind: int, name: str) -> str:
    if kind not in _SCALARS:
        raise _Damaged(f"entry {brief(name)}: found a value of kind {kind}, expected one of those of the format")
    return _SCALARS[kind]


def _described(reader: _Reader, said: _Entries) -> tuple[str, str, Shape, int]:
    """Name, type, shape and place of one tensor."""
    name = reader.name()
    dimensions = int(reader.number("I"))
    if dimensions > _MOST_DIMENSIONS:
        raise _Damaged(f"tensor {brief(name)}: found {dimensions} dimensions, expected at most {_MOST_DIMENSIONS}")
    shape = tuple(int(reader.number("Q")) for _ in range(dimensions))[::-1]
    number, offset = int(reader.number("I")), int(reader.number("Q"))
    if not _is_shape(shape):
        raise _Damaged(f"tensor {brief(name)}: found shape {shape}")
    kind = type_names().get(number)
    if kind is None or not is_readable(kind):
        found = number if kind is None else kind
        raise _Damaged(f"tensor {brief(name)}: found type {found}, expected one of ggml's for weights")
    if offset % said.alignment_bytes:
        raise _Damaged(f"tensor {brief(name)}: found place {offset}, expected a multiple of {said.alignment_bytes}")
    values, _ = block_of(kind)
    if values > 1 and (not shape or not math.prod(shape)):
        raise _Damaged(f"tensor {brief(name)}: found shape {shape}, expected some values as {kind}")
    if shape and shape[-1] % values:
        raise _Damaged(f"tensor {brief(name)}: found rows of {shape[-1]}, expected a multiple of {values} as {kind}")
    original = said.shapes.get(name)
    if original is not None and math.prod(original) != math.prod(shape):
        raise _Damaged(f"tensor {brief(name)}: found shape {shape}, its header says {original}")
    return name, kind, shape if original is None else original, offset


def _is_shape(sizes: Shape) -> bool:
    return all(0 <= size <= MAX_ELEMENTS for size in sizes) and is_countable(sizes)


def _placed(name: str, kind: str, shape: Shape, begin: int, file_bytes: int) -> TensorEntry:
    values, block_bytes = block_of(kind)
    end = begin + math.prod(shape) // values * block_bytes
    if end > file_bytes:
        raise _Damaged(f"truncated: tensor {brief(name)} ends at byte {end}, the file has {file_bytes}")
    return TensorEntry(name, PLAIN_NAMES.get(kind, kind), shape, begin, end)


def _refuse_overlaps(tensors: Mapping[str, TensorEntry]) -> None:
    end, before = 0, ""
    for entry in tensors.values():
        if entry.begin < end:
            raise _Damaged(f"tensors {brief(before)} and {brief(entry.name)} overlap")
        end, before = entry.end, entry.name


def _text(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _Damaged(f"found a text that is not UTF-8: {error}") from None
