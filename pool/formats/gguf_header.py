"""The header of a GGUF file, or of a model split over several, as a `Header`: named tensors and where their bytes are.
Torch-free.

Knows how tensors are described: name, sizes, type and place. Quantized tensors have ggml's name of their type, "Q4_K",
as their dtype, and the shape that a model has; the others have the names of safetensors. Every size and place is held
against the file's length before anything of that size is made.
Source: the GGUF specification (ggml, docs/gguf.md), versions 2 and 3; city96's converters (ComfyUI-GGUF, Apache-2.0)
for `comfy.gguf.orig_shape.*` entries, of weights whose rows fill no blocks, and for weights of five dimensions;
llama.cpp's tools/gguf-split for `split.*`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from modelpool.pool.core.errors import CorruptFile, UnknownArchitecture
from modelpool.pool.formats.containment import contained
from modelpool.pool.formats.ggml_types import PLAIN_NAMES, block_of, is_readable, type_names
from modelpool.pool.formats.gguf_entries import Allowance, Damaged, Entries, Reader, Values, read_entries
from modelpool.pool.formats.gguf_names import renamed
from modelpool.pool.formats.gguf_parts import MOST_PARTS, part_name, parts_of
from modelpool.pool.formats.regular_file import open_regular
from modelpool.pool.formats.safetensors_file import MAX_ELEMENTS, Header, Shape, TensorEntry, is_countable
from modelpool.pool.formats.strict_json import brief

_ORIGINAL_SHAPE = "comfy.gguf.orig_shape."
#: ggml has four; converters put weights of videos back with the five that they have
_MOST_DIMENSIONS = 8
#: what the parts of a file that was split say: which it is, from 0 on, of how many, with how many tensors together
_SPLIT_NUMBER, _SPLIT_COUNT, _SPLIT_TENSORS = "split.no", "split.count", "split.tensors.count"
#: of the largest number that an entry can be
_MOST_DIGITS = 20


@dataclass(frozen=True, slots=True)
class _Part:
    """One file: what it says, and its tensors as it calls them, in the order of their bytes."""

    path: str
    file_bytes: int
    said: Entries
    tensors: tuple[TensorEntry, ...]


def read_gguf_header(path: str) -> Header:
    """What the GGUF file at `path` holds, or the model that is split over several files, of which it is the first;
    reads no weights.

    Single numbers and texts of its entries are the header's metadata. Text encoders that have llama.cpp's names get
    those of transformers. Raises CorruptFile, naming the file and what is wrong with it, when it is no whole GGUF file,
    or a part is missing or another model's; UnsafeFile for a part that lies elsewhere; UnknownArchitecture for text
    encoders whose values are not those that transformers has.
    """
    allowed = Allowance()
    first = _read(path, {}, allowed)
    parts = [first]
    if _said(first, _SPLIT_COUNT, "1") not in ("0", "1"):
        parts += _others(first, allowed)
    elif (name := part_name(path)) is not None:
        raise CorruptFile(
            f"{path}: is called as part {name.number} of {name.count}, and says that it is whole, expected a name "
            f"without that"
        )
    return _joined(path, parts)


def read_gguf_part(path: str) -> Header:
    """What the GGUF file at `path` itself holds, whichever part of a model it is, under the names that it has for it.

    Raises CorruptFile when it is no whole GGUF file.
    """
    part = _read(path, {}, Allowance())
    return Header(path, part.file_bytes, {entry.name: entry for entry in part.tensors}, part.said.metadata)


def _others(first: _Part, allowed: Allowance) -> list[_Part]:
    """The parts of a model behind its first, which together have no more than `allowed`. Raises CorruptFile, naming the
    part that is missing or another model's."""
    path, count = first.path, _said(first, _SPLIT_COUNT, "")
    if count.isdecimal() and int(count) > MOST_PARTS:
        raise CorruptFile(f"{path}: is one of {count} parts, expected at most {MOST_PARTS}")
    name = part_name(path)
    if name is None or str(name.count) != count:
        raise CorruptFile(
            f"{path}: is one of {count} parts and not called so, expected NAME-00001-of-{count:0>5}.gguf and the "
            f"others beside it"
        )
    begin = os.path.join(os.path.dirname(path), name.named(1))
    if name.number != 1:
        raise CorruptFile(f"{path}: is part {name.number} of {count}, expected the first, {begin}, for all of them")
    _expect_part(first, 0, first)
    folder, found = Path(path).parent, [first]
    for number, place in enumerate(parts_of(path)):
        if number == 0:
            continue
        if not os.path.lexists(place):
            raise CorruptFile(f"{path}: part {number + 1} of {count} is missing, expected {place} beside it")
        contained(Path(place), folder)
        part = _read(place, first.said.arrays, allowed)
        _expect_part(part, number, first)
        found.append(part)
    tensors, said = sum(part.said.tensor_count for part in found), _said(first, _SPLIT_TENSORS, "")
    if str(tensors) != said:
        raise CorruptFile(f"{path}: found {tensors} tensors in its {count} parts, expected the {said or 'number'} said")
    return found[1:]


def _expect_part(part: _Part, number: int, first: _Part) -> None:
    """Raise CorruptFile unless `part` says that it is this part of the model that `first` begins."""
    wanted = {_SPLIT_NUMBER: str(number)}
    wanted |= {key: _said(first, key, "") for key in (_SPLIT_COUNT, _SPLIT_TENSORS)}
    for key, expected in wanted.items():
        found = _said(part, key, "nothing")
        if found != expected:
            raise CorruptFile(f"{part.path}: {key} is {found}, expected {expected}: it is no part of {first.path}")


def _said(part: _Part, key: str, otherwise: str) -> str:
    """A number that a part says, as it is put into messages; `otherwise` where it says none."""
    said = part.said.metadata.get(key, otherwise)
    return said if said == otherwise or (said.isdecimal() and len(said) <= _MOST_DIGITS) else brief(said)


def _joined(path: str, parts: list[_Part]) -> Header:
    """All tensors of `parts`, as their models call them, as one header. What the first says holds for all."""
    metadata, tensors = parts[0].said.metadata, dict[str, TensorEntry]()
    for part in parts:
        try:
            own = _named(part, metadata)
        except Damaged as error:
            raise error.of(part.path) from None
        except UnknownArchitecture as error:
            raise UnknownArchitecture(f"{part.path}: {error}") from None
        twice = next((name for name in own if name in tensors), None)
        if twice is not None:
            raise CorruptFile(f"{part.path}: tensor {brief(twice)} is in {tensors[twice].path} too, expected it once")
        tensors |= own if len(parts) == 1 else {name: replace(entry, path=part.path) for name, entry in own.items()}
    shards = {} if len(parts) == 1 else {part.path: part.file_bytes for part in parts}
    return Header(path, sum(part.file_bytes for part in parts), tensors, metadata, shards)


def _named(part: _Part, metadata: Mapping[str, str]) -> dict[str, TensorEntry]:
    tensors: dict[str, TensorEntry] = {}
    for entry in part.tensors:
        known = renamed(entry, metadata)
        if known is None:
            continue
        if known.name in tensors:
            raise Damaged(f"tensor {brief(entry.name)}: found twice")
        tensors[known.name] = known
    return tensors


def _read(path: str, more: Mapping[str, Values], allowed: Allowance) -> _Part:
    """The part at `path`, whose header is taken off `allowed`; `more` are arrays that another part says for all.

    Raises CorruptFile.
    """
    with open_regular(path, "a GGUF file") as (file, file_bytes):
        try:
            reader = Reader(file, file_bytes, allowed)
            said = read_entries(reader, lambda name: _MOST_DIMENSIONS if name.startswith(_ORIGINAL_SHAPE) else 0)
            shapes = {
                name.removeprefix(_ORIGINAL_SHAPE): _shape(name, s) for name, s in {**more, **said.arrays}.items()
            }
            described = [_described(reader, said, shapes) for _ in range(said.tensor_count)]
            allowed.header_bytes -= reader.at
            begin = -(-reader.at // said.alignment_bytes) * said.alignment_bytes
            entries = [
                _placed(name, kind, shape, begin + offset, file_bytes) for name, kind, shape, offset in described
            ]
            ordered = sorted(entries, key=lambda e: (e.begin, e.end, e.name))
            _refuse_overlaps(ordered)
        except Damaged as error:
            raise error.of(path) from None
        return _Part(path, file_bytes, said, tuple(ordered))


def _shape(name: str, values: Values) -> Shape:
    shape = tuple(value for value in values if type(value) is int)
    if len(shape) != len(values) or not _is_shape(shape):
        raise Damaged(f"entry {brief(name)}: found {values}, expected the sizes of a tensor")
    return shape


def _described(reader: Reader, said: Entries, shapes: Mapping[str, Shape]) -> tuple[str, str, Shape, int]:
    """Name, type, shape and place of one tensor."""
    name = reader.name()
    dimensions = int(reader.number("I"))
    if dimensions > _MOST_DIMENSIONS:
        raise Damaged(f"tensor {brief(name)}: found {dimensions} dimensions, expected at most {_MOST_DIMENSIONS}")
    shape = tuple(int(reader.number("Q")) for _ in range(dimensions))[::-1]
    number, offset = int(reader.number("I")), int(reader.number("Q"))
    if not _is_shape(shape):
        raise Damaged(f"tensor {brief(name)}: found shape {shape}")
    kind = type_names().get(number)
    if kind is None or not is_readable(kind):
        found = number if kind is None else kind
        raise Damaged(f"tensor {brief(name)}: found type {found}, expected one of ggml's for weights")
    if offset % said.alignment_bytes:
        raise Damaged(f"tensor {brief(name)}: found place {offset}, expected a multiple of {said.alignment_bytes}")
    values, _ = block_of(kind)
    if values > 1 and (not shape or not math.prod(shape)):
        raise Damaged(f"tensor {brief(name)}: found shape {shape}, expected some values as {kind}")
    if shape and shape[-1] % values:
        raise Damaged(f"tensor {brief(name)}: found rows of {shape[-1]}, expected a multiple of {values} as {kind}")
    original = shapes.get(name)
    if original is not None and math.prod(original) != math.prod(shape):
        raise Damaged(f"tensor {brief(name)}: found shape {shape}, its header says {original}")
    return name, kind, shape if original is None else original, offset


def _is_shape(sizes: Shape) -> bool:
    return all(0 <= size <= MAX_ELEMENTS for size in sizes) and is_countable(sizes)


def _placed(name: str, kind: str, shape: Shape, begin: int, file_bytes: int) -> TensorEntry:
    values, block_bytes = block_of(kind)
    end = begin + math.prod(shape) // values * block_bytes
    if end > file_bytes:
        raise Damaged(f"truncated: tensor {brief(name)} ends at byte {end}, the file has {file_bytes}")
    return TensorEntry(name, PLAIN_NAMES.get(kind, kind), shape, begin, end)


def _refuse_overlaps(ordered: list[TensorEntry]) -> None:
    end, before = 0, ""
    for entry in ordered:
        if entry.begin < end:
            raise Damaged(f"tensors {brief(before)} and {brief(entry.name)} overlap")
        end, before = entry.end, entry.name
