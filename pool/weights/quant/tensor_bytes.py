"""Converts tensors to the bytes of files, in blocks, so that a mapped tensor is never fully in memory.

Knows types and their ranges. Does not know files, nor the meaning of a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from modelpool.pool.files.formats.safetensors_writer import TensorToWrite
from modelpool.pool.values.core.errors import UnusableField
from modelpool.pool.weights.ops.dtypes import TORCH_DTYPES
from modelpool.pool.weights.ops.packed import PackedWeight
from modelpool.pool.weights.quant.mapped_file import MappedFile

#: bytes written or converted at once
BLOCK_BYTES = 16 << 20
#: safetensors' name of each torch type
DTYPE_NAMES: Mapping[torch.dtype, str] = MappingProxyType({dtype: name for name, dtype in TORCH_DTYPES.items()})


def computed_tensor(name: str, dtype: torch.dtype, shape: Iterable[int], make: Callable[[], Tensor]) -> TensorToWrite:
    """Return a tensor of `dtype` and `shape` to write; `make` computes it when it is written."""
    sizes = tuple(shape)

    def blocks() -> Iterator[memoryview]:
        tensor = make()
        assert (tensor.dtype, tuple(tensor.shape)) == (dtype, sizes), f"{name}: {tensor.dtype} {tuple(tensor.shape)}"
        return tensor_blocks(tensor)

    return TensorToWrite(name, DTYPE_NAMES[dtype], sizes, blocks)


def copied_tensor(mapped: MappedFile, name: str) -> TensorToWrite:
    """Return the tensor `name` of a file to write byte for byte, whatever its type."""
    entry = mapped.header.tensors[name]
    if not entry.is_as_stored:
        return TensorToWrite(name, entry.dtype, entry.shape, lambda: tensor_blocks(mapped.tensor(name)))
    return TensorToWrite(name, entry.dtype, entry.shape, lambda: tensor_blocks(mapped.raw(name)))


def unpacked_tensor(name: str, dtype: torch.dtype, weight: Callable[[], Tensor], shape: Iterable[int]) -> TensorToWrite:
    """Return the packed weight that `weight` returns, to write as plain numbers of `dtype`.

    Writing it raises UnusableField for numbers that `dtype` cannot hold.
    """

    def values() -> Tensor:
        packed = weight()
        assert isinstance(packed, PackedWeight), f"{name} is not packed"
        numbers = packed.unpack(torch.float32)
        converted = numbers.to(dtype)
        expect_in_range(name, numbers, converted)
        return converted

    return computed_tensor(name, dtype, shape, values)


def cast_tensor(mapped: MappedFile, name: str, dtype: torch.dtype) -> TensorToWrite:
    """Return the floating point tensor `name` of a file to write in `dtype`, converted block by block.

    Writing it raises UnusableField for numbers that `dtype` cannot hold.
    """
    entry = mapped.header.tensors[name]

    def blocks() -> Iterator[memoryview]:
        numbers: Iterable[Tensor] = mapped.numbers(name, BLOCK_BYTES)
        if not entry.is_as_stored:  # blocks in file order would be permuted
            numbers = (mapped.tensor(name).contiguous().reshape(-1),)
        for block in numbers:
            converted = block.to(dtype)
            expect_in_range(name, block, converted)
            yield from tensor_blocks(converted)

    return TensorToWrite(name, DTYPE_NAMES[dtype], entry.shape, blocks)


def expect_in_range(name: str, before: Tensor, after: Tensor) -> None:
    """Raise UnusableField if finite numbers of `before` are not finite in the dtype of `after`."""
    if after.dtype == before.dtype:
        return
    lost = _not_finite(after)
    if lost and (lost := lost - _not_finite(before)) > 0:
        raise UnusableField(
            f"tensor {name!r}: {lost} of {after.numel()} numbers are beyond the range of {DTYPE_NAMES[after.dtype]}, "
            f"expected weights in its range: BF16 and F32 have a wider one"
        )


def _not_finite(numbers: Tensor) -> int:
    wide = numbers.float() if numbers.dtype.itemsize == 1 else numbers  # 8-bit floats have no arithmetic
    return int(wide.numel() - torch.isfinite(wide).sum())


def tensor_blocks(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of `tensor` in the order of its indices. Copies nothing if they are stored in that order."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    for block in torch.split(flat, BLOCK_BYTES) if flat.numel() else ():
        yield block.numpy().data
