"""Reads the beginning of a GGUF file strictly: its counts and its typed entries. Torch-free.

Knows the format of entries and bounds their cost: every count and size is checked against the file's length before
anything of that size is read or allocated. Does not know tensors (`pool.files.formats.gguf_header`) nor vocabularies.
Source: the GGUF specification (ggml, docs/gguf.md), versions 2 and 3.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import BinaryIO, TypeAlias

from modelpool.pool.files.formats.regular_file import open_regular
from modelpool.pool.files.formats.safetensors_file import MAX_HEADER_BYTES
from modelpool.pool.files.formats.strict_json import brief
from modelpool.pool.values.core.errors import CorruptFile, counted

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT_KEY, _ALIGNMENT_BYTES, _MAX_ALIGNMENT_BYTES = "general.alignment", 32, 1 << 20
_MAX_ALIGNMENT_DIGITS = 7
#: more than any published model has; they bound the cost of a header
_MAX_TENSORS, _MAX_ENTRIES, _MAX_TEXTS = 1 << 16, 1 << 12, 1 << 21
_MAX_NAME_BYTES = 1 << 12
#: least size of a tensor description: length of the name, dimension count, one size, type, offset
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8
#: least size of an entry: length of the name, type, one byte
_MIN_ENTRY_BYTES = 8 + 4 + 1
#: longest text that is kept; longer ones (chat templates, licences) say nothing about weights
_MAX_TEXT_BYTES = 1 << 12

_STRING, _ARRAY, _BOOL = 8, 9, 7
#: struct format characters of the scalar types
_SCALARS: Mapping[int, str] = MappingProxyType(
    {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "?", 10: "Q", 11: "q", 12: "d"}
)

#: the length of a text
_LENGTH = struct.Struct("<Q")
#: bytes read at once of an array of texts
_BLOCK_BYTES = 1 << 18

#: the values of an array
Values: TypeAlias = tuple[int | float | bool | str, ...]


def has_gguf_start(path: str) -> bool:
    """Whether the file at `path` begins with the GGUF magic. Raises CorruptFile if it cannot be read."""
    with open_regular(path, "a file of weights") as (file, _):
        return file.read(len(MAGIC)) == MAGIC


class MalformedGguf(Exception):
    """A fault of a GGUF file, without the file's name."""

    def for_file(self, path: str) -> CorruptFile:
        """Return the error that names the file."""
        return CorruptFile(f"{path}: {self}, expected a complete GGUF file")


@dataclass(slots=True)
class HeaderBudget:
    """Remaining budget for the header of a model; shared by all files of a split model.

    header_bytes  reduced after each header
    tensors       reduced by each tensor count
    texts         in arrays, read or skipped; reduced by each array
    """

    header_bytes: int = MAX_HEADER_BYTES
    tensors: int = _MAX_TENSORS
    texts: int = _MAX_TEXTS


@dataclass(slots=True)
class GgufReader:
    """Reads a file from its beginning, never more than it contains or than `allowed`.

    Every method raises MalformedGguf where the bytes are missing or the budget is exceeded.
    """

    file: BinaryIO
    file_bytes: int
    allowed: HeaderBudget = field(default_factory=HeaderBudget)
    at: int = 0

    def take(self, size_bytes: int) -> bytes:
        """Return the next bytes."""
        self.expect(size_bytes)
        self.at += size_bytes
        data = self.file.read(size_bytes)
        if len(data) != size_bytes:
            raise MalformedGguf(f"ends at byte {self.at - size_bytes + len(data)}, inside its header")
        return data

    def skip(self, size_bytes: int) -> None:
        """Skip the next bytes."""
        self.expect(size_bytes)
        self.at += size_bytes
        self.file.seek(self.at)

    def expect(self, size_bytes: int) -> None:
        """Raise unless `size_bytes` more bytes exist and are within the header budget."""
        if self.at + size_bytes > self.file_bytes:
            raise MalformedGguf(f"truncated inside its header: it needs {size_bytes} bytes at byte {self.at}")
        if self.at + size_bytes > self.allowed.header_bytes:
            raise MalformedGguf(f"its header is larger than {self.allowed.header_bytes} bytes")

    def number(self, letter: str) -> int | float | bool:
        """Return the next number, of the struct format character `letter`."""
        value: int | float | bool = struct.unpack(f"<{letter}", self.take(struct.calcsize(f"<{letter}")))[0]
        return value

    def count(self, least_bytes: int, most: int | None = None) -> int:
        """Return a count of items of at least `least_bytes` bytes each, at most `most`."""
        found = int(self.number("Q"))
        self.expect(found * least_bytes)
        if most is not None and found > most:
            raise MalformedGguf(f"found a count of {found} at byte {self.at}, expected at most {most}")
        return found

    def texts(self, count: int, *, are_kept: bool) -> tuple[str, ...]:
        """Read `count` length-prefixed texts; returns () when they are only skipped.

        Vocabularies have hundreds of thousands: they are read in blocks, not one by one.
        """
        found: list[str] = []
        block, place = b"", 0  # bytes of the file from `at` on, and the offset of the next text in them
        for _ in range(count):
            if place + _LENGTH.size > len(block):
                block, place = self._block(place, _LENGTH.size), 0
            end = place + _LENGTH.size + _LENGTH.unpack_from(block, place)[0]
            if are_kept:
                if end > len(block):
                    block, place, end = self._block(place, end - place), 0, end - place
                found.append(_text(block[place + _LENGTH.size : end]))
            place = end
        self.skip(place)
        return tuple(found)

    def _block(self, passed_bytes: int, least_bytes: int) -> bytes:
        """Return the bytes after the next `passed_bytes`, at least `least_bytes`; they stay to be taken."""
        self.skip(passed_bytes)
        self.expect(least_bytes)
        block = self.file.read(max(_BLOCK_BYTES, least_bytes))
        if len(block) < least_bytes:
            raise MalformedGguf(f"ends at byte {self.at + len(block)}, inside its header")
        return block

    def name(self) -> str:
        """Return the next short text."""
        size_bytes = self.count(1)
        if size_bytes > _MAX_NAME_BYTES:
            raise MalformedGguf(f"found a name of {size_bytes} bytes at byte {self.at}")
        return _text(self.take(size_bytes))


@dataclass(slots=True)
class GgufEntries:
    """The contents of a GGUF header except its tensors.

    tensor_count     number of tensors described
    metadata         scalars and short texts, as texts
    arrays           the requested ones
    alignment_bytes  tensor offsets are multiples of it
    """

    tensor_count: int
    metadata: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, Values] = field(default_factory=dict)
    alignment_bytes: int = _ALIGNMENT_BYTES


def read_entries(reader: GgufReader, most_values: Callable[[str], int]) -> GgufEntries:
    """Read the file up to its first tensor. `most_values` returns the largest number of values to read of the array of
    a name; 0 skips it. Raises MalformedGguf."""
    if reader.take(len(MAGIC)) != MAGIC:
        raise MalformedGguf("does not begin with GGUF")
    version = int(reader.number("I"))
    if version not in _VERSIONS:
        raise MalformedGguf(f"found version {version}, expected {' or '.join(map(str, _VERSIONS))}")
    entries, names = GgufEntries(reader.count(_MIN_TENSOR_BYTES, reader.allowed.tensors)), set[str]()
    reader.allowed.tensors -= entries.tensor_count
    for _ in range(reader.count(_MIN_ENTRY_BYTES, _MAX_ENTRIES)):
        name = reader.name()
        if name in names:
            raise MalformedGguf(f"entry {brief(name)}: found twice")
        names.add(name)
        kind = int(reader.number("I"))
        if kind == _ARRAY:
            values = _array(reader, name, most_values(name))
            if values is not None:
                entries.arrays[name] = values
        elif kind == _STRING:
            size_bytes = reader.count(1)
            if size_bytes > _MAX_TEXT_BYTES:
                reader.skip(size_bytes)
            else:
                entries.metadata[name] = _text(reader.take(size_bytes))
        else:
            entries.metadata[name] = str(reader.number(_scalar(kind, name)))
    entries.alignment_bytes = _alignment_bytes(entries.metadata.get(_ALIGNMENT_KEY, str(_ALIGNMENT_BYTES)))
    return entries


def _alignment_bytes(text: str) -> int:
    """Return the alignment of tensor offsets. Raises MalformedGguf."""
    found = int(text) if text.isdecimal() and len(text) <= _MAX_ALIGNMENT_DIGITS else 0
    if not 1 <= found <= _MAX_ALIGNMENT_BYTES or found % 8:
        raise MalformedGguf(
            f"found {_ALIGNMENT_KEY} {brief(text)}, expected a multiple of 8 up to {_MAX_ALIGNMENT_BYTES}"
        )
    return found


def _array(reader: GgufReader, name: str, most: int) -> Values | None:
    """Return the values of an array, at most `most`; None for one that is skipped."""
    kind = int(reader.number("I"))
    is_text = kind == _STRING
    letter = "" if is_text else _scalar(kind, name)
    item_bytes = 8 if is_text else struct.calcsize(f"<{letter}")
    count = reader.count(item_bytes, reader.allowed.texts if is_text else None)
    if most and count > most:
        raise MalformedGguf(f"entry {brief(name)}: found {counted(count, 'value')}, expected at most {most}")
    if is_text:
        reader.allowed.texts -= count
        texts = reader.texts(count, are_kept=most > 0)
        return texts if most else None
    if most:
        return struct.unpack(f"<{count}{letter}", reader.take(count * item_bytes))
    reader.skip(count * item_bytes)
    return None


def _scalar(kind: int, name: str) -> str:
    if kind not in _SCALARS:
        raise MalformedGguf(f"entry {brief(name)}: found a value of kind {kind}, expected one of those of the format")
    return _SCALARS[kind]


def _text(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise MalformedGguf(f"found a text that is not UTF-8: {error}") from None
