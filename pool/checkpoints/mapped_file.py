"""Tensors of a safetensors file as views of one mapping. No weight is copied, none is read before it is used.

Knows how bytes become torch tensors. Does not know what they mean. Processes that map the same file share its pages;
the mapping is private, so a write to a view would make a private copy of a page and never reaches the file: nothing in
this project writes to one. A file must not be shortened in place while it is mapped; replace it by renaming.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pool.checkpoints.safetensors_file import Header, TensorEntry, read_header
from pool.errors import CorruptFile

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
}

#: numbers looked at in one go by `find_non_finite`; bounds its memory to a few times as many bytes
CHECK_BLOCK_ELEMENTS = 1 << 22


@dataclass(frozen=True, slots=True)
class MappedFile:
    """A safetensors file mapped into memory. The mapping lives as long as this value or any view of it."""

    header: Header
    _storage: torch.UntypedStorage

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> MappedFile:
        """Map the file at `path`; reads only its header.

        Raises CorruptFile as `read_header` does.
        """
        header = read_header(path)
        try:
            storage = torch.UntypedStorage.from_file(header.path, False, header.file_bytes)
            assert isinstance(storage, torch.UntypedStorage)
        except RuntimeError as error:
            raise CorruptFile(f"{header.path}: cannot be mapped into memory: {error}") from error
        return cls(header, storage)

    def tensor(self, name: str) -> Tensor:
        """The tensor `name`: a view of the mapping, or a copy when its bytes are not aligned for its type.

        Raises KeyError when the file has no such tensor, CorruptFile when torch has no such type.
        """
        entry = self.header.tensors[name]
        dtype = TORCH_DTYPES.get(entry.dtype)
        if dtype is None:
            raise CorruptFile(f"{self.header.path}: tensor {name!r} has type {entry.dtype}, which cannot be read yet")
        if entry.begin % dtype.itemsize == 0:
            view = torch.empty(0, dtype=dtype, device="cpu")
            return view.set_(self._storage, entry.begin // dtype.itemsize, entry.shape)  # type: ignore[call-overload, no-any-return]
        return self._bytes(entry).clone().view(dtype).reshape(entry.shape)

    def tensors(self) -> Mapping[str, Tensor]:
        """All tensors by name; each view is made when it is asked for."""
        return _Views(self)

    def _bytes(self, entry: TensorEntry) -> Tensor:
        view = torch.empty(0, dtype=torch.uint8, device="cpu")
        return view.set_(self._storage, entry.begin, (entry.storage_bytes,))  # type: ignore[call-overload, no-any-return]


class _Views(Mapping[str, Tensor]):
    """A `MappedFile` as a mapping."""

    def __init__(self, mapped: MappedFile) -> None:
        self._mapped = mapped

    def __getitem__(self, name: str) -> Tensor:
        return self._mapped.tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._mapped.header.tensors)

    def __len__(self) -> int:
        return len(self._mapped.header.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._mapped.header.tensors


@dataclass(frozen=True, slots=True)
class NonFinite:
    """A tensor with numbers that are infinite or not numbers."""

    name: str
    count: int
    elements: int


def find_non_finite(mapped: MappedFile, names: Iterable[str] | None = None) -> tuple[NonFinite, ...]:
    """The tensors among `names` (all when None) that hold a number that is infinite or not a number.

    Reads every byte of them, block by block.
    """
    found = []
    for name in mapped.header.tensors if names is None else names:
        tensor = mapped.tensor(name)
        if not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        count = sum(_non_finite_in(block) for block in torch.split(tensor.flatten(), CHECK_BLOCK_ELEMENTS))
        if count:
            found.append(NonFinite(name, count, tensor.numel()))
    return tuple(found)


def check_finite(mapped: MappedFile) -> None:
    """Read the whole file and make sure that every weight is a finite number.

    Raises CorruptFile naming the first tensors that are not.
    """
    found = find_non_finite(mapped)
    if found:
        listed = ", ".join(f"{f.name} ({f.count} of {f.elements})" for f in found[:5])
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        raise CorruptFile(
            f"{mapped.header.path}: {len(found)} tensors hold infinite or undefined numbers: {listed}{more}; "
            f"expected finite weights"
        )


def _non_finite_in(block: Tensor) -> int:
    # 8-bit floats have no arithmetic of their own; complex and 64-bit numbers keep their range
    wide = block if block.is_complex() or block.dtype == torch.float64 else block.float()
    return int(block.numel() - torch.isfinite(wide).sum())
