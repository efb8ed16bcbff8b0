"""Weights of a GGUF file as views of its mapping, packed where they are quantized.

The one module that imports the `gguf` package, when a file is first opened: it reads the header, and it is the fallback
for formats whose blocks `pool.quantization.gguf_blocks` does not know. No weight is copied, none is read before it is
used. Does not know what the weights mean.
Source: the GGUF specification (ggml, docs/gguf.md); `comfy.gguf.orig_shape.*` entries as city96's converter
(ComfyUI-GGUF, Apache-2.0) writes them for weights whose shape ggml cannot hold.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from pool.errors import CorruptFile
from pool.ops.packed import packed_weight
from pool.quantization.formats import WEIGHT, Shape
from pool.quantization.gguf_blocks import BLOCKS
from pool.quantization.published import STANDS_FOR

#: types of a file that torch has
_PLAIN: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F64": torch.float64,
        "I8": torch.int8,
        "I16": torch.int16,
        "I32": torch.int32,
        "I64": torch.int64,
    }
)
#: values that are unpacked at once, and bytes that each takes at most meanwhile: bounds the memory beside the result
CHUNK_VALUES = 1 << 20
CHUNK_SCRATCH_BYTES = 16
_ORIGINAL_SHAPE = "comfy.gguf.orig_shape."


@dataclass(frozen=True, slots=True)
class GgufCodec:
    """A `pool.ops.packed.Codec` of one of ggml's formats.

    name         as ggml calls it
    block_bytes  bytes of a block
    row_step     1 where each row is stored on its own; 0 where blocks run over the ends of rows
    """

    name: str
    block_bytes: int
    row_step: int

    def row_dims(self, parts: Mapping[str, Tensor]) -> Mapping[str, int]:
        """The codes run over the rows in their first dimension."""
        return {WEIGHT: 0}

    def reshaped(self, parts: Mapping[str, Tensor], before: Sequence[int], after: Sequence[int]) -> None:
        """Blocks are laid out for the shape that the file says: None."""

    def unpack(self, parts: Mapping[str, Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The weight's values, computed in float32, as a fresh tensor."""
        blocks = parts[WEIGHT].reshape(-1, self.block_bytes)
        known = BLOCKS.get(self.name)
        size = math.prod(shape) // max(blocks.shape[0], 1)
        values = torch.empty((blocks.shape[0], size), dtype=dtype, device=blocks.device)
        for some, into in zip(*(t.split(max(CHUNK_VALUES // max(size, 1), 1)) for t in (blocks, values)), strict=True):
            into.copy_(known(some) if known else _by_package(some, self.name))
        return values.reshape(tuple(shape))

    def scratch_bytes(self, elements: int, dtype: torch.dtype) -> int:
        """Bytes that `unpack` needs at most beside the parts and its result."""
        return min(elements, CHUNK_VALUES) * CHUNK_SCRATCH_BYTES


@dataclass(frozen=True, slots=True)
class GgufEntry:
    """One tensor of a file.

    kind    ggml's name of its type
    shape   as a model has it, slowest dimension first
    begin   its first byte in the file
    """

    name: str
    kind: str
    shape: Shape
    begin: int
    storage_bytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A GGUF file mapped into memory. The mapping lives as long as this value or any view of it.

    metadata  single numbers and texts of the header; lists are left out
    """

    path: str
    entries: Mapping[str, GgufEntry]
    metadata: Mapping[str, str | int | float | bool]
    _storage: torch.UntypedStorage

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> GgufFile:
        """Map the file at `path`; reads only its header.

        Raises CorruptFile, naming the file and what is wrong with it, when it is no whole GGUF file.
        """
        place = os.fspath(path)
        if not Path(place).is_file():
            raise CorruptFile(f"{place}: no such file, expected a GGUF file")
        try:
            reader = _package().GGUFReader(place)
            entries = {t.name: _entry(place, t, reader) for t in reader.tensors}
            metadata = _metadata(reader)
        except CorruptFile:
            raise
        except Exception as error:  # the package reads damaged counts and offsets as they are
            raise CorruptFile(f"{place}: {type(error).__name__}: {error}, expected a whole GGUF file") from None
        storage = torch.UntypedStorage.from_file(place, False, Path(place).stat().st_size)
        assert isinstance(storage, torch.UntypedStorage)
        return cls(place, MappingProxyType(entries), MappingProxyType(metadata), storage)

    def tensor(self, name: str, dtype: torch.dtype = STANDS_FOR) -> Tensor:
        """The tensor `name`: a view of the mapping, packed (standing for `dtype`) where it is quantized.

        Raises KeyError when the file has no such tensor.
        """
        entry = self.entries[name]
        data = torch.empty(0, dtype=torch.uint8)
        data.set_(self._storage, entry.begin, (entry.storage_bytes,))  # type: ignore[call-overload]
        plain = _PLAIN.get(entry.kind)
        if plain is not None:
            aligned = data if entry.begin % plain.itemsize == 0 else data.clone()
            return aligned.view(plain).reshape(entry.shape)
        values, block_bytes = _block_size(entry.kind)
        by_row = len(entry.shape) > 1 and math.prod(entry.shape[1:]) % values == 0
        codes = data.reshape(entry.shape[0], -1) if by_row else data
        codec = GgufCodec(entry.kind, block_bytes, int(by_row))
        return packed_weight(codec, {WEIGHT: codes}, entry.shape, dtype)

    def tensors(self, dtype: torch.dtype = STANDS_FOR) -> dict[str, Tensor]:
        """All tensors by name."""
        return {name: self.tensor(name, dtype) for name in self.entries}


@functools.cache
def _package() -> Any:
    import gguf

    return gguf


@functools.cache
def _block_size(kind: str) -> tuple[int, int]:
    """How many values a block of ggml's type `kind` has, and how many bytes."""
    package = _package()
    values, block_bytes = package.GGML_QUANT_SIZES[package.GGMLQuantizationType[kind]]
    return int(values), int(block_bytes)


def _entry(path: str, found: Any, reader: Any) -> GgufEntry:
    shape = tuple(int(size) for size in reversed(found.shape.tolist()))
    original = reader.get_field(_ORIGINAL_SHAPE + found.name)
    if original is not None:
        wanted = tuple(int(size) for size in original.contents())
        if math.prod(wanted) != math.prod(shape):
            raise CorruptFile(f"{path}: tensor {found.name!r}: found shape {shape}, its header says {wanted}")
        shape = wanted
    return GgufEntry(found.name, found.tensor_type.name, shape, int(found.data_offset), int(found.n_bytes))


def _metadata(reader: Any) -> dict[str, str | int | float | bool]:
    types = _package().GGUFValueType
    return {
        name: field.contents()
        for name, field in reader.fields.items()
        if field.types and field.types[0] != types.ARRAY and not name.startswith("GGUF.")
    }


def _by_package(blocks: Tensor, kind: str) -> Tensor:
    """Blocks of a format that only the package knows: on the host, in numpy."""
    package = _package()
    values = package.dequantize(blocks.cpu().numpy(), package.GGMLQuantizationType[kind])
    return torch.from_numpy(values).to(blocks.device)
