"""Weights in ggml's formats: packed as a GGUF file has them, and unpacked where they are computed with.

The `gguf` package is the fallback for formats whose blocks `pool.quant.gguf_blocks` does not know. Knows bytes,
formats and shapes; no files (`pool.formats.gguf_header`), nor what the weights mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from modelpool.pool.formats.ggml_types import block_of, package
from modelpool.pool.ops.packed import STANDS_FOR, packed_weight
from modelpool.pool.quant.formats import WEIGHT, Shape
from modelpool.pool.quant.gguf_blocks import BLOCKS

#: values that are unpacked at once, and bytes that each takes at most meanwhile: bounds the memory beside the result
CHUNK_VALUES = 1 << 20
CHUNK_SCRATCH_BYTES = 16


@dataclass(frozen=True, slots=True)
class GgufCodec:
    """A `pool.ops.packed.Codec` of one of ggml's formats.

    name         as ggml calls it
    block_bytes  bytes of a block
    row_step     1 where each row is stored on its own; 0 where blocks run over the ends of rows; the rows of a head of
                 attention where the file has a row of its first half and one of its second in turns
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
        codes = parts[WEIGHT]
        blocks = (in_halves(codes, self.row_step) if self.row_step > 1 else codes).reshape(-1, self.block_bytes)
        known = BLOCKS.get(self.name)
        size = math.prod(shape) // max(blocks.shape[0], 1)
        values = torch.empty((blocks.shape[0], size), dtype=dtype, device=blocks.device)
        for some, into in zip(*(t.split(max(CHUNK_VALUES // max(size, 1), 1)) for t in (blocks, values)), strict=True):
            into.copy_(known(some) if known else _by_package(some, self.name))
        return values.reshape(tuple(shape))

    def scratch_bytes(self, elements: int, dtype: torch.dtype) -> int:
        """Bytes that `unpack` needs at most beside the parts and its result."""
        ordered = elements // block_of(self.name)[0] * self.block_bytes if self.row_step > 1 else 0
        return min(elements, CHUNK_VALUES) * CHUNK_SCRATCH_BYTES + ordered


def gguf_tensor(codes: Tensor, kind: str, shape: Shape, dtype: torch.dtype = STANDS_FOR, heads: int = 0) -> Tensor:
    """The weight of `shape` that `codes` (uint8, flat, as the file has them) are, in ggml's format `kind`: packed, a
    view of them, standing for `dtype`. With `heads` its rows are so many, each with its halves' rows in turns."""
    values, block_bytes = block_of(kind)
    by_row = len(shape) > 1 and math.prod(shape[1:]) % values == 0
    assert by_row or not heads, f"heads of {kind} {shape}, whose rows hang together"
    codec = GgufCodec(kind, block_bytes, shape[0] // heads if heads else int(by_row))
    return packed_weight(codec, {WEIGHT: codes.reshape(shape[0], -1) if by_row else codes}, shape, dtype)


def gguf_values(codes: Tensor, kind: str, at_most_bytes: int) -> Iterator[Tensor]:
    """The values of `codes` (as `gguf_tensor` takes them) in float32, flat, so many bytes of codes at a time."""
    values, block_bytes = block_of(kind)
    for some in codes.reshape(-1, block_bytes).split(max(at_most_bytes // block_bytes, 1)):
        yield GgufCodec(kind, block_bytes, 1).unpack({WEIGHT: some}, (len(some) * values,), torch.float32)


def in_halves(rows: Tensor, head_rows: int) -> Tensor:
    """A copy of `rows`, heads of `head_rows` in each of which a row of the first half and one of the second follow each
    other in turns, with the second half of each head behind the first.

    llama.cpp has the queries and keys of Llama and Mistral so; transformers turns halves, not neighbours.
    """
    pairs = rows.reshape(-1, head_rows // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def _by_package(blocks: Tensor, kind: str) -> Tensor:
    """Blocks of a format that only the package knows: on the host, in numpy."""
    gguf = package()
    values = gguf.dequantize(blocks.cpu().numpy(), gguf.GGMLQuantizationType[kind])
    return torch.from_numpy(values).to(blocks.device)
