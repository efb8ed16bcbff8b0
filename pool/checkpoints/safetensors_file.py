"""The header of a safetensors file, read strictly. Torch-free.

Knows the file format: eight bytes of header size, a JSON header, then the tensors end to end. Does not know what the
tensors mean, nor how to turn their bytes into numbers (`pool.checkpoints.mapped_file`).

Rules, each checked: the header covers the whole file and nothing but it; tensors do not overlap and leave no gap; each
tensor's bytes agree with its type and shape; no name occurs twice.
Source: https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from pool.errors import CorruptFile, format_bytes

Shape: TypeAlias = tuple[int, ...]

SIZE_BYTES = 8
#: the format's own limit
MAX_HEADER_BYTES = 100_000_000
METADATA_KEY = "__metadata__"

#: bits of one number of each type that the format names
DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
}

#: how files that are handed in by mistake begin
_OTHER_FORMATS: tuple[tuple[bytes, str], ...] = (
    (b"PK\x03\x04", "a zip archive, which is how PyTorch writes .ckpt, .pt and .bin pickles"),
    (b"\x80\x02", "a Python pickle (an old .ckpt, .pt or .bin)"),
    (b"\x80\x04", "a Python pickle"),
    (b"\x89PNG", "a PNG picture"),
    (b"\xff\xd8\xff", "a JPEG picture"),
    (b"RIFF", "a RIFF file, such as a WebP picture"),
    (b"GGUF", "a GGUF file"),
    (b"\x89HDF", "an HDF5 file"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"7z\xbc\xaf", "a 7z archive"),
    (b"version https://git-lfs", "a Git LFS pointer: the weights themselves were never downloaded"),
    (b"<!DOCTYPE", "a web page, probably saved in place of a download"),
    (b"<html", "a web page, probably saved in place of a download"),
    (b"<?xml", "an XML file, probably an error saved in place of a download"),
    (b'{"', "JSON text"),
)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file.

    dtype       the format's name of the type, "F16"
    begin, end  its bytes in the file, counted from the file's first byte
    """

    name: str
    dtype: str
    shape: Shape
    begin: int
    end: int

    @property
    def storage_bytes(self) -> int:
        """Bytes in the file."""
        return self.end - self.begin

    @property
    def elements(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says of itself, checked against its size.

    tensors   by name, in the order of their bytes in the file
    metadata  free text pairs, written by whoever made the file
    """

    path: str
    file_bytes: int
    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]

    @property
    def shapes(self) -> dict[str, Shape]:
        """The shape of each tensor."""
        return {name: entry.shape for name, entry in self.tensors.items()}


def read_header(path: str | os.PathLike[str]) -> Header:
    """Read and check the header of the file at `path`; reads no weights.

    Raises CorruptFile, naming the file, what was found and what was expected, for anything that is not a whole and
    well-formed safetensors file, and for a path that cannot be read.
    """
    place = os.fspath(path)
    try:
        with Path(place).open("rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise CorruptFile(f"{place}: not a regular file, expected a safetensors file")
            return _parse(place, file, status.st_size)
    except FileNotFoundError:
        raise CorruptFile(f"{place}: no such file, expected a safetensors file") from None
    except IsADirectoryError:
        raise CorruptFile(f"{place}: a folder, expected a safetensors file") from None
    except OSError as error:
        raise CorruptFile(f"{place}: cannot be read: {error.strerror or error}") from error


def _parse(path: str, file: BinaryIO, file_bytes: int) -> Header:
    start = file.read(64)
    if not start:
        raise CorruptFile(f"{path}: the file is empty, expected a safetensors file")
    header_bytes = int.from_bytes(start[:SIZE_BYTES], "little")
    looks_right = len(start) > SIZE_BYTES and start[SIZE_BYTES : SIZE_BYTES + 1] == b"{"
    if not looks_right or header_bytes > MAX_HEADER_BYTES:
        raise CorruptFile(f"{path}: {_describe_start(start, header_bytes)}, expected a safetensors file")
    data_begin = SIZE_BYTES + header_bytes
    if data_begin > file_bytes:
        raise CorruptFile(
            f"{path}: truncated inside its header: the file has {file_bytes} bytes, the header alone ends at byte "
            f"{data_begin}"
        )
    file.seek(SIZE_BYTES)
    entries, metadata = _entries(path, _load_json(path, file.read(header_bytes)), data_begin)
    ordered = sorted(entries, key=lambda e: (e.begin, e.end, e.name))
    _check_covers(path, ordered, data_begin, file_bytes)
    return Header(path, file_bytes, {e.name: e for e in ordered}, metadata)


def _describe_start(start: bytes, header_bytes: int) -> str:
    """What a file that begins with `start` seems to be."""
    for magic, name in _OTHER_FORMATS:
        if start.startswith(magic):
            return f"this is {name}"
    if start[SIZE_BYTES : SIZE_BYTES + 1] == b"{":
        return f"the header claims {header_bytes} bytes, more than the {MAX_HEADER_BYTES} that the format allows"
    if all(byte in b"\t\n\r" or 32 <= byte < 127 for byte in start):
        return "this is a text file"
    if len(start) <= SIZE_BYTES:
        return f"the file has only {len(start)} bytes"
    return f"unknown contents beginning with {start[:SIZE_BYTES].hex()}"


class _DuplicateName(ValueError):
    """A name occurs twice in one JSON object."""


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        raise _DuplicateName(next(name for name, _ in pairs if name in seen or seen.add(name)))  # type: ignore[func-returns-value]
    return result


def _load_json(path: str, text: bytes) -> dict[str, Any]:
    try:
        loaded = json.loads(text.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except _DuplicateName as error:
        raise CorruptFile(f"{path}: the header names {str(error)!r} twice, expected each name once") from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CorruptFile(f"{path}: the header is damaged: {error}, expected JSON") from error
    if not isinstance(loaded, dict):
        raise CorruptFile(f"{path}: the header is a JSON {type(loaded).__name__}, expected an object")
    return loaded


def _entries(path: str, header: dict[str, Any], data_begin: int) -> tuple[list[TensorEntry], dict[str, str]]:
    metadata = header.pop(METADATA_KEY, None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CorruptFile(f"{path}: {METADATA_KEY} is damaged, expected pairs of texts")
    return [_entry(path, name, fields, data_begin) for name, fields in header.items()], metadata


def _entry(path: str, name: str, fields: Any, data_begin: int) -> TensorEntry:
    def damaged(found: str, expected: str) -> CorruptFile:
        return CorruptFile(f"{path}: tensor {name!r}: found {found}, expected {expected}")

    if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
        raise damaged(str(fields), "dtype, shape and data_offsets")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if dtype not in DTYPE_BITS:
        raise damaged(f"dtype {dtype!r}", f"one of {', '.join(DTYPE_BITS)}")
    if not _are_counts(shape):
        raise damaged(f"shape {shape!r}", "a list of whole numbers, none negative")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise damaged(f"data_offsets {offsets!r}", "two offsets, the first not after the second")
    wanted_bits = math.prod(shape) * DTYPE_BITS[dtype]
    if (offsets[1] - offsets[0]) * 8 != wanted_bits:
        raise damaged(
            f"{offsets[1] - offsets[0]} bytes", f"{wanted_bits / 8:g} bytes for {dtype} of shape {tuple(shape)}"
        )
    return TensorEntry(name, dtype, tuple(shape), data_begin + offsets[0], data_begin + offsets[1])


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(v) is int and v >= 0 for v in value)


def _check_covers(path: str, ordered: list[TensorEntry], data_begin: int, file_bytes: int) -> None:
    """Tensors follow each other without gap or overlap from the header to the end of the file."""
    expected = data_begin
    previous = "the header"
    for entry in ordered:
        if entry.begin != expected:
            fault = "overlaps" if entry.begin < expected else "leaves a gap after"
            raise CorruptFile(
                f"{path}: tensor {entry.name!r} {fault} {previous}: "
                f"it begins at byte {entry.begin}, expected {expected}"
            )
        expected, previous = entry.end, f"tensor {entry.name!r}"
    if file_bytes < expected:
        raise CorruptFile(
            f"{path}: truncated: the file has {file_bytes} bytes, its header promises {expected} "
            f"({format_bytes(expected - file_bytes)} are missing)"
        )
    if file_bytes > expected:
        raise CorruptFile(
            f"{path}: too long: the file has {file_bytes} bytes, its header promises {expected} "
            f"({format_bytes(file_bytes - expected)} follow the last tensor)"
        )
