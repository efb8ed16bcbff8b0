"""The header of a safetensors file, read strictly. Torch-free.

Knows the file format: eight bytes of header size, a JSON header, then the tensors end to end. Does not know what the
tensors mean, nor how to convert their bytes to numbers (`pool.weights.quant.mapped_file`).

Rules, each checked: header and tensors cover the file exactly; tensors do not overlap and leave no gap; each tensor's
bytes agree with its type and shape; no name occurs twice.
Source: https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import itertools
import math
import operator
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO, TypeAlias

from modelpool.pool.files.formats.regular_file import open_regular
from modelpool.pool.files.formats.strict_json import BadJson, are_texts, brief, read_object
from modelpool.pool.values.core.errors import CorruptFile, counted, format_bytes

Shape: TypeAlias = tuple[int, ...]

SIZE_BYTES = 8
#: limit of the format
MAX_HEADER_BYTES = 100_000_000
METADATA_KEY = "__metadata__"
#: more dimensions than any tensor library supports
MAX_DIMENSIONS = 64
#: element counts must fit signed 64-bit integers
MAX_ELEMENTS = (1 << 63) - 1

#: bits per element of each type of the format
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

#: magic bytes of other formats that are passed by mistake
_OTHER_FORMATS: tuple[tuple[bytes, str], ...] = (
    (b"PK\x03\x04", "a zip archive, which is how PyTorch writes .ckpt, .pt and .bin pickles"),
    (b"\x80\x02", "a Python pickle (an old .ckpt, .pt or .bin)"),
    (b"\x80\x04", "a Python pickle"),
    (b"\x89PNG", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"RIFF", "a RIFF file, such as a WebP image"),
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

    dtype       safetensors' name of the type, "F16"
    begin, end  byte range in the file
    path        the file that contains it, if the header covers several files; "" for the header's path
    strides     element strides of each dimension; None for contiguous tensors
    heads       number of attention heads with rows that the file interleaves: a row of the first half, then one of the
                second; 0 for rows in order
    added       constant that the file has added to each element
    is_ggml     whether it is in a GGUF file: programs that convert scaled weights to it leave their scales beside them
    """

    name: str
    dtype: str
    shape: Shape
    begin: int
    end: int
    path: str = ""
    strides: Shape | None = None
    heads: int = 0
    added: float = 0.0
    is_ggml: bool = False

    @property
    def is_as_stored(self) -> bool:
        """Whether its bytes in the file are its elements in order."""
        return self.strides is None and not self.heads and not self.added

    @property
    def storage_bytes(self) -> int:
        """Bytes in the file."""
        return self.end - self.begin

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Header:
    """The contents of a file according to its header, checked against its size.

    path        the file, or the index of several files that are one checkpoint
    file_bytes  size of all files that contain tensors
    tensors     by name, in byte order
    metadata    free text pairs from the writer of the file
    shards      size of each file by its path, in order, if there are several; else empty
    configs     configuration of each component of a diffusers folder, by the component's name; else empty
    """

    path: str
    file_bytes: int
    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]
    shards: Mapping[str, int] = field(default_factory=dict)
    configs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def files(self) -> Mapping[str, int]:
        """The files that contain tensors, with their sizes."""
        return self.shards or {self.path: self.file_bytes}

    def path_of(self, name: str) -> str:
        """Return the file that contains the tensor `name`."""
        return self.tensors[name].path or self.path

    @property
    def shapes(self) -> dict[str, Shape]:
        """The shape of each tensor, by name."""
        return {name: entry.shape for name, entry in self.tensors.items()}


def read_header(path: str | os.PathLike[str]) -> Header:
    """Read and check the header of the file at `path`; reads no weights.

    Raises CorruptFile, naming the file, the value found and the value expected, for anything that is not a complete and
    well-formed safetensors file, and for a path that cannot be read.
    """
    with open_regular(path) as (file, file_bytes):
        return _parse(os.fspath(path), file, file_bytes)


def stored_bytes(header: Header, name: str) -> bytes:
    """Read the bytes of the tensor `name`: for markers and single numbers, without a mapping.

    Raises CorruptFile when the file can no longer be read.
    """
    entry = header.tensors[name]
    with open_regular(header.path_of(name)) as (file, _):
        file.seek(entry.begin)
        return file.read(entry.storage_bytes)


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
    try:
        header = read_object(file.read(header_bytes))
    except BadJson as error:
        raise CorruptFile(f"{path}: the header {error}") from None
    entries, metadata = _entries(path, header, data_begin)
    ordered = sorted(entries, key=lambda e: (e.begin, e.end, e.name))
    _check_covers(path, ordered, data_begin, file_bytes)
    return Header(path, file_bytes, {e.name: e for e in ordered}, metadata)


def _describe_start(start: bytes, header_bytes: int) -> str:
    """Describe the format of a file that begins with `start`."""
    for magic, name in _OTHER_FORMATS:
        if start.startswith(magic):
            return f"this is {name}"
    if start[SIZE_BYTES : SIZE_BYTES + 1] == b"{":
        return f"the header claims {header_bytes} bytes, more than the {MAX_HEADER_BYTES} that the format allows"
    if all(byte in b"\t\n\r" or 32 <= byte < 127 for byte in start):
        return "this is a text file"
    if len(start) <= SIZE_BYTES:
        return f"the file has only {counted(len(start), 'byte')}"
    return f"unknown contents beginning with {start[:SIZE_BYTES].hex()}"


def _entries(path: str, header: dict[str, Any], data_begin: int) -> tuple[list[TensorEntry], dict[str, str]]:
    metadata = header.pop(METADATA_KEY, None)
    if metadata is None:
        metadata = {}
    if not are_texts(metadata):
        raise CorruptFile(f"{path}: {METADATA_KEY} is {brief(metadata)}, expected pairs of texts")
    return [_entry(path, name, fields, data_begin) for name, fields in header.items()], metadata


def _entry(path: str, name: str, fields: Any, data_begin: int) -> TensorEntry:
    def damaged(found: str, expected: str) -> CorruptFile:
        return CorruptFile(f"{path}: tensor {brief(name)}: found {found}, expected {expected}")

    if not isinstance(fields, dict) or fields.keys() != {"dtype", "shape", "data_offsets"}:
        raise damaged(brief(fields), "dtype, shape and data_offsets")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise damaged(f"dtype {brief(dtype)}", f"one of {', '.join(DTYPE_BITS)}")
    if not _are_counts(shape):
        raise damaged(f"shape {brief(shape)}", "a list of whole numbers, none negative or beyond 2**63")
    if not is_countable(shape):
        raise damaged(
            f"shape {brief(shape)}", f"at most {MAX_DIMENSIONS} dimensions and 2**63 - 1 elements, partial products too"
        )
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise damaged(f"data_offsets {brief(offsets)}", "two offsets within 2**63, the first not after the second")
    wanted_bits = math.prod(shape) * DTYPE_BITS[dtype]
    if (offsets[1] - offsets[0]) * 8 != wanted_bits:
        raise damaged(
            f"{offsets[1] - offsets[0]} bytes", f"{wanted_bits / 8:.15g} bytes for {dtype} of shape {tuple(shape)}"
        )
    return TensorEntry(name, dtype, tuple(shape), data_begin + offsets[0], data_begin + offsets[1])


def is_countable(shape: Iterable[int]) -> bool:
    """Whether tensors of `shape`, sizes from 0 to `MAX_ELEMENTS`, can be represented: at most MAX_DIMENSIONS
    dimensions, and every partial product of sizes fits 64 bits, also before a size of zero."""
    sizes = tuple(shape)
    if len(sizes) > MAX_DIMENSIONS:
        return False
    if 0 not in sizes:
        return math.prod(sizes) <= MAX_ELEMENTS
    return all(product <= MAX_ELEMENTS for product in itertools.accumulate(sizes, operator.mul))


def _are_counts(value: Any) -> bool:
    if not isinstance(value, list):
        return False
    for number in value:  # noqa: SIM110 - a generator takes twice as long, and this runs twice for every tensor
        if type(number) is not int or not 0 <= number <= MAX_ELEMENTS:
            return False
    return True


def _check_covers(path: str, ordered: list[TensorEntry], data_begin: int, file_bytes: int) -> None:
    """Raise CorruptFile unless tensors follow each other without gap or overlap from the header to the end of the
    file."""
    expected = data_begin
    previous: TensorEntry | None = None
    for entry in ordered:
        if entry.begin != expected:
            fault = "overlaps" if entry.begin < expected else "leaves a gap after"
            raise CorruptFile(
                f"{path}: tensor {brief(entry.name)} {fault} "
                f"{'the header' if previous is None else f'tensor {brief(previous.name)}'}: "
                f"it begins at byte {entry.begin}, expected {expected}"
            )
        expected, previous = entry.end, entry
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
