"""Weights in ggml's formats: packed as in a GGUF file, unpacked for computation.

The `gguf` package is the fallback for formats that `pool.weights.quant.gguf_blocks` does not implement. Knows bytes,
formats and shapes; no files (`pool.files.formats.gguf_header`), nor the meaning of the weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from modelpool.pool.files.formats.ggml_types import block_size, package
from modelpool.pool.weights.ops.packed import NOMINAL_DTYPE, packed_weight
from modelpool.pool.weights.quant.formats import WEIGHT, Shape
from modelpool.pool.weights.quant.gguf_blocks import BLOCKS

#: values unpacked at once, and largest scratch bytes for each: bounds the memory besides the result
CHUNK_VALUES = 1 << 20
CHUNK_SCRATCH_BYTES = 16


@dataclass(frozen=True, slots=True)
class GgufCodec:
    """A `pool.weights.ops.packed.Codec` of one of ggml's formats.

    name         ggml's name of it
    block_bytes  bytes per block
    row_step     1 where rows are stored separately; 0 where blocks cross row ends; the rows of an attention head where
                 the file interleaves the rows of its two halves
    """

    name: str
    block_bytes: int
    row_step: int

    def row_dims(self, parts: Mapping[str, Tensor]) -> Mapping[str, int]:
        """The codes run over the rows in their first dimension."""
        return {WEIGHT: 0}

    def row_entries(self, name: str, rows: int) -> int:
        """One for each row."""
        return rows

    def reshaped(self, parts: Mapping[str, Tensor], before: Sequence[int], after: Sequence[int]) -> None:
        """None: blocks are laid out for the shape in the file."""

    def unpack(self, parts: Mapping[str, Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the weight's values, computed in float32, as a new tensor."""
        codes = parts[WEIGHT]
        blocks = (deinterleave_halves(codes, self.row_step) if self.row_step > 1 else codes).reshape(
            -1, self.block_bytes
        )
        known = BLOCKS.get(self.name)
        size = math.prod(shape) // max(blocks.shape[0], 1)
        values = torch.empty((blocks.shape[0], size), dtype=dtype, device=blocks.device)
        for some, into in zip(*(t.split(max(CHUNK_VALUES // max(size, 1), 1)) for t in (blocks, values)), strict=True):
            into.copy_(known(some) if known else _by_package(some, self.name))
        return values.reshape(tuple(shape))

    def scratch_bytes(self, elements: int, dtype: torch.dtype) -> int:
        """Upper bound of the bytes that `unpack` needs besides the parts and its result."""
        ordered = elements // block_size(self.name)[0] * self.block_bytes if self.row_step > 1 else 0
        return min(elements, CHUNK_VALUES) * CHUNK_SCRATCH_BYTES + ordered


def gguf_tensor(codes: Tensor, kind: str, shape: Shape, dtype: torch.dtype = NOMINAL_DTYPE, heads: int = 0) -> Tensor:
    """Return the packed weight of `shape` with the nominal dtype `dtype` from `codes` (uint8, flat, as in the file) in
    ggml's format `kind`; shares their memory. With `heads`, its rows are that many heads with interleaved halves."""
    values, block_bytes = block_size(kind)
    by_row = len(shape) > 1 and math.prod(shape[1:]) % values == 0
    assert by_row or not heads, f"heads of {kind} {shape}, whose rows are not stored separately"
    codec = GgufCodec(kind, block_bytes, shape[0] // heads if heads else int(by_row))
    return packed_weight(codec, {WEIGHT: codes.reshape(shape[0], -1) if by_row else codes}, shape, dtype)


def gguf_values(codes: Tensor, kind: str, max_bytes: int) -> Iterator[Tensor]:
    """Yield the values of `codes` (as for `gguf_tensor`) in float32, flat, from at most `max_bytes` of codes at a
    time."""
    values, block_bytes = block_size(kind)
    for some in codes.reshape(-1, block_bytes).split(max(max_bytes // block_bytes, 1)):
        yield GgufCodec(kind, block_bytes, 1).unpack({WEIGHT: some}, (len(some) * values,), torch.float32)


def deinterleave_halves(rows: Tensor, head_rows: int) -> Tensor:
    """Return a copy of `rows`, whose heads of `head_rows` rows alternate rows of their first and second half, with the
    second half of each head after the first.

    llama.cpp stores the queries and keys of Llama and Mistral interleaved; transformers rotates halves, not neighbours.
    """
    pairs = rows.reshape(-1, head_rows // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def _by_package(blocks: Tensor, kind: str) -> Tensor:
    """Dequantize blocks with the package, on the host in numpy."""
    gguf = package()
    values = gguf.dequantize(blocks.cpu().numpy(), gguf.GGMLQuantizationType[kind])
    return torch.from_numpy(values).to(blocks.device)
