"""Tensors as the bytes that files have: in blocks, so that a mapped tensor is never in memory whole.

Knows types and their ranges. Does not know files, nor what a tensor is for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from modelpool.pool.core.errors import UnusableField
from modelpool.pool.formats.safetensors_writer import TensorToWrite
from modelpool.pool.mapping.mapped_file import MappedFile
from modelpool.pool.ops.dtypes import TORCH_DTYPES
from modelpool.pool.ops.packed import PackedWeight

#: what is written, or converted, in one go
BLOCK_BYTES = 16 << 20
#: the format's name of each type of torch
DTYPE_NAMES: Mapping[torch.dtype, str] = MappingProxyType({dtype: name for name, dtype in TORCH_DTYPES.items()})


def made(name: str, dtype: torch.dtype, shape: Iterable[int], make: Callable[[], Tensor]) -> TensorToWrite:
    """A tensor that `make` makes when it is its turn, of `dtype` and `shape`."""
    wanted = tuple(shape)

    def blocks() -> Iterator[memoryview]:
        tensor = make()
        assert (tensor.dtype, tuple(tensor.shape)) == (dtype, wanted), f"{name}: {tensor.dtype} {tuple(tensor.shape)}"
        return tensor_blocks(tensor)

    return TensorToWrite(name, DTYPE_NAMES[dtype], wanted, blocks)


def carried(mapped: MappedFile, name: str) -> TensorToWrite:
    """The tensor `name` of a file, byte for byte, whatever its type."""
    entry = mapped.header.tensors[name]
    if not entry.is_as_stored:
        return TensorToWrite(name, entry.dtype, entry.shape, lambda: tensor_blocks(mapped.tensor(name)))
    return TensorToWrite(name, entry.dtype, entry.shape, lambda: tensor_blocks(mapped.raw(name)))


def unpacked(name: str, dtype: torch.dtype, weight: Callable[[], Tensor], shape: Iterable[int]) -> TensorToWrite:
    """The packed weight that `weight` gives as plain numbers of `dtype`.

    Writing it raises UnusableField for numbers that `dtype` cannot hold.
    """

    def values() -> Tensor:
        packed = weight()
        assert isinstance(packed, PackedWeight), f"{name} is not packed"
        numbers = packed.unpack(torch.float32)
        converted = numbers.to(dtype)
        expect_in_range(name, numbers, converted)
        return converted

    return made(name, dtype, shape, values)


def cast(mapped: MappedFile, name: str, dtype: torch.dtype) -> TensorToWrite:
    """The floating point tensor `name` of a file in `dtype`, converted block by block.

    Writing it raises UnusableField for numbers that `dtype` cannot hold.
    """
    entry = mapped.header.tensors[name]

    def blocks() -> Iterator[memoryview]:
        numbers: Iterable[Tensor] = mapped.numbers(name, BLOCK_BYTES)
        if not entry.is_as_stored:  # in the order of the file they would be in another one's place
            numbers = (mapped.tensor(name).contiguous().reshape(-1),)
        for block in numbers:
            converted = block.to(dtype)
            expect_in_range(name, block, converted)
            yield from tensor_blocks(converted)

    return TensorToWrite(name, DTYPE_NAMES[dtype], entry.shape, blocks)


def expect_in_range(name: str, before: Tensor, after: Tensor) -> None:
    """Raise UnusableField when numbers of `before` that were finite are not so any more in the dtype of `after`."""
    lost = _not_finite(after) - _not_finite(before)
    if lost > 0:
        raise UnusableField(
            f"tensor {name!r}: {lost} of {after.numel()} numbers are beyond the range of {DTYPE_NAMES[after.dtype]}, "
            f"expected weights that it can hold: BF16 and F32 have a wider range"
        )


def _not_finite(numbers: Tensor) -> int:
    wide = numbers.float() if numbers.dtype.itemsize == 1 else numbers  # 8-bit floats have no arithmetic of their own
    return int(wide.numel() - torch.isfinite(wide).sum())


def tensor_blocks(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of `tensor` in the order of its indices. Nothing is copied where they lie in that order."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    for block in torch.split(flat, BLOCK_BYTES) if flat.numel() else ():
        yield block.numpy().data
