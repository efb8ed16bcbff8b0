"""The beginning of a GGUF file, read strictly: its counts and its typed entries. Torch-free.

Knows the format of entries, and what they may cost: every count and size is held against the file's length before
anything of that size is read or made. Does not know tensors (`pool.formats.gguf_header`) nor vocabularies.
Source: the GGUF specification (ggml, docs/gguf.md), versions 2 and 3.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import BinaryIO, TypeAlias

from modelpool.pool.core.errors import CorruptFile
from modelpool.pool.formats.regular_file import open_regular
from modelpool.pool.formats.safetensors_file import MAX_HEADER_BYTES
from modelpool.pool.formats.strict_json import brief

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT_KEY, _ALIGNMENT_BYTES, _MOST_ALIGNMENT_BYTES = "general.alignment", 32, 1 << 20
_MOST_ALIGNMENT_DIGITS = 7
#: more than any published model has: what a header may cost is bounded by them
_MOST_TENSORS, _MOST_ENTRIES, _MOST_TEXTS = 1 << 16, 1 << 12, 1 << 21
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

#: the length of a text
_LENGTH = struct.Struct("<Q")
#: what is read of an array of texts in one go
_BLOCK_BYTES = 1 << 18

#: the values of an array
Values: TypeAlias = tuple[int | float | bool | str, ...]


def has_gguf_start(path: str) -> bool:
    """Whether the file at `path` begins as a GGUF file does. Raises CorruptFile where it cannot be read."""
    with open_regular(path, "a file of weights") as (file, _):
        return file.read(len(MAGIC)) == MAGIC


class Damaged(Exception):
    """What is wrong, without the file's name."""

    def of(self, path: str) -> CorruptFile:
        """The error that names the file."""
        return CorruptFile(f"{path}: {self}, expected a whole GGUF file")


@dataclass(slots=True)
class Allowance:
    """What the header of a model may still have; where it is split over several files, those of all of them together.

    header_bytes  taken off when a header was read
    tensors       taken off with each count of them
    texts         in arrays, read or passed over; taken off with each array
    """

    header_bytes: int = MAX_HEADER_BYTES
    tensors: int = _MOST_TENSORS
    texts: int = _MOST_TEXTS


@dataclass(slots=True)
class Reader:
    """A file from its beginning, of which no more is read than it has, nor than `allowed`.

    Every method raises Damaged where that is not there.
    """

    file: BinaryIO
    file_bytes: int
    allowed: Allowance = field(default_factory=Allowance)
    at: int = 0

    def take(self, size_bytes: int) -> bytes:
        """The next bytes."""
        self.expect(size_bytes)
        self.at += size_bytes
        data = self.file.read(size_bytes)
        if len(data) != size_bytes:
            raise Damaged(f"ends at byte {self.at - size_bytes + len(data)}, inside its header")
        return data

    def skip(self, size_bytes: int) -> None:
        """Pass over the next bytes."""
        self.expect(size_bytes)
        self.at += size_bytes
        self.file.seek(self.at)

    def expect(self, size_bytes: int) -> None:
        """Raise unless so many bytes more are there, and may belong to a header."""
        if self.at + size_bytes > self.file_bytes:
            raise Damaged(f"truncated inside its header: it needs {size_bytes} bytes at byte {self.at}")
        if self.at + size_bytes > self.allowed.header_bytes:
            raise Damaged(f"its header is larger than {self.allowed.header_bytes} bytes")

    def number(self, letter: str) -> int | float | bool:
        """The next number, of the kind that `letter` is to `struct`."""
        value: int | float | bool = struct.unpack(f"<{letter}", self.take(struct.calcsize(f"<{letter}")))[0]
        return value

    def count(self, least_bytes: int, most: int | None = None) -> int:
        """A number of things that take so many bytes each at least, no more than `most`."""
        found = int(self.number("Q"))
        self.expect(found * least_bytes)
        if most is not None and found > most:
            raise Damaged(f"found a count of {found} at byte {self.at}, expected at most {most}")
        return found

    def texts(self, count: int, *, are_kept: bool) -> tuple[str, ...]:
        """So many texts, each with its length before it; none where they are only passed over.

        Vocabularies have hundreds of thousands: they are read by the block, not one by one.
        """
        found: list[str] = []
        block, place = b"", 0  # the bytes of the file from `at` on, and the next text among them
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
        """The bytes behind the next `passed_bytes`, `least_bytes` of them or more, which are still to be taken."""
        self.skip(passed_bytes)
        self.expect(least_bytes)
        block = self.file.read(max(_BLOCK_BYTES, least_bytes))
        if len(block) < least_bytes:
            raise Damaged(f"ends at byte {self.at + len(block)}, inside its header")
        return block

    def name(self) -> str:
        """A short text."""
        size_bytes = self.count(1)
        if size_bytes > _MOST_NAME_BYTES:
            raise Damaged(f"found a name of {size_bytes} bytes at byte {self.at}")
        return _text(self.take(size_bytes))


@dataclass(slots=True)
class Entries:
    """What a header says beside its tensors.

    tensor_count     how many tensors it describes
    metadata         single numbers and short texts, as texts
    arrays           those that were asked for
    alignment_bytes  the places of tensors are multiples of it
    """

    tensor_count: int
    metadata: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, Values] = field(default_factory=dict)
    alignment_bytes: int = _ALIGNMENT_BYTES


def read_entries(reader: Reader, most_values: Callable[[str], int]) -> Entries:
    """What the file says up to its first tensor. `most_values` says how many values of the array of a name are wanted
    at most: 0 for one that is passed over. Raises Damaged."""
    if reader.take(len(MAGIC)) != MAGIC:
        raise Damaged("does not begin with GGUF")
    version = int(reader.number("I"))
    if version not in _VERSIONS:
        raise Damaged(f"found version {version}, expected {' or '.join(map(str, _VERSIONS))}")
    said, names = Entries(reader.count(_LEAST_TENSOR_BYTES, reader.allowed.tensors)), set[str]()
    reader.allowed.tensors -= said.tensor_count
    for _ in range(reader.count(_LEAST_ENTRY_BYTES, _MOST_ENTRIES)):
        name = reader.name()
        if name in names:
            raise Damaged(f"entry {brief(name)}: found twice")
        names.add(name)
        kind = int(reader.number("I"))
        if kind == _ARRAY:
            values = _array(reader, name, most_values(name))
            if values is not None:
                said.arrays[name] = values
        elif kind == _STRING:
            size_bytes = reader.count(1)
            if size_bytes > _MOST_TEXT_BYTES:
                reader.skip(size_bytes)
            else:
                said.metadata[name] = _text(reader.take(size_bytes))
        else:
            said.metadata[name] = str(reader.number(_scalar(kind, name)))
    said.alignment_bytes = _alignment_bytes(said.metadata.get(_ALIGNMENT_KEY, str(_ALIGNMENT_BYTES)))
    return said


def _alignment_bytes(said: str) -> int:
    """The multiple that places have to be. Raises Damaged."""
    found = int(said) if said.isdecimal() and len(said) <= _MOST_ALIGNMENT_DIGITS else 0
    if not 1 <= found <= _MOST_ALIGNMENT_BYTES or found % 8:
        raise Damaged(f"found {_ALIGNMENT_KEY} {brief(said)}, expected a multiple of 8 up to {_MOST_ALIGNMENT_BYTES}")
    return found


def _array(reader: Reader, name: str, most: int) -> Values | None:
    """The values of an array, of which `most` are wanted; None for one that is passed over."""
    kind = int(reader.number("I"))
    is_text = kind == _STRING
    letter = "" if is_text else _scalar(kind, name)
    item_bytes = 8 if is_text else struct.calcsize(f"<{letter}")
    count = reader.count(item_bytes, reader.allowed.texts if is_text else None)
    if most and count > most:
        raise Damaged(f"entry {brief(name)}: found {count} values, expected at most {most}")
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
        raise Damaged(f"entry {brief(name)}: found a value of kind {kind}, expected one of those of the format")
    return _SCALARS[kind]


def _text(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Damaged(f"found a text that is not UTF-8: {error}") from None
