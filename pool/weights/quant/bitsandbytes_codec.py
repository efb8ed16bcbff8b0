"""Weights in the 4-bit formats of bitsandbytes (NF4 and FP4): packed as in a file, unpacked for computation.

Two codes a byte, the first in the upper half. Every block of consecutive values has a scale, and a table of 16 numbers
is stored with each weight: a value is its entry of the table times the scale of its block. Scales may be quantized in
turn: to 8-bit codes of a second table, with a factor per block of scales and an offset ("double quantization").
Needs neither the package nor a GPU. Source: Dettmers et al. 2023, "QLoRA: Efficient Finetuning of Quantized LLMs",
sections 2 and 3; the layout of files that bitsandbytes 0.50 writes (`QuantState.as_dict`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from modelpool.pool.weights.ops.packed import PackedWeight, packed_weight
from modelpool.pool.weights.quant.formats import (
    BITSANDBYTES_ABSMAX,
    BITSANDBYTES_MAP,
    BITSANDBYTES_NESTED_ABSMAX,
    BITSANDBYTES_NESTED_MAP,
    WEIGHT,
    number,
)

#: bytes of codes unpacked at once, and largest scratch bytes for each: 32-bit indices, two values and their products
_CHUNK_CODES = 1 << 19
_SCRATCH_BYTES = 24


@dataclass(frozen=True)
class BitsAndBytesCodec:
    """A `pool.weights.ops.packed.Codec` of a 4-bit format of bitsandbytes.

    name      of the format
    settings  of the layer: block sizes, offset of the scales
    marker    JSON text that describes the layer in a file
    columns   values of a row
    """

    name: str
    settings: Mapping[str, object]
    marker: str
    columns: int

    @property
    def block_values(self) -> int:
        """Values that share a scale."""
        return number(self.settings, "blocksize")

    @property
    def nested_blocks(self) -> int:
        """Scales that share a factor; 0 if scales are not quantized."""
        return number(self.settings, "nested_blocksize")

    @property
    def row_step(self) -> int:
        """The least number of rows with separate codes, scales and factors of scales; 0 if blocks cross rows."""
        if not self.columns or self.columns % self.block_values:
            return 0
        blocks = self.columns // self.block_values
        return self.nested_blocks // math.gcd(self.nested_blocks, blocks) if self.nested_blocks else 1

    def row_dims(self, parts: Mapping[str, Tensor]) -> Mapping[str, int]:
        """All but the tables run over the rows in their first dimension."""
        return {name: 0 for name in (WEIGHT, BITSANDBYTES_ABSMAX, BITSANDBYTES_NESTED_ABSMAX) if name in parts}

    def row_entries(self, name: str, rows: int) -> int:
        """Return the number of entries of a part for `rows` rows, a multiple of `row_step`."""
        if name != BITSANDBYTES_NESTED_ABSMAX or self.row_step == 1:
            return rows
        return rows * (self.columns // self.block_values) // self.nested_blocks

    def reshaped(self, parts: Mapping[str, Tensor], before: Sequence[int], after: Sequence[int]) -> None:
        """None: the parts are laid out for the rows of the file."""

    def unpack(self, parts: Mapping[str, Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the weight's values, computed in float32, as a new tensor."""
        codes, table = parts[WEIGHT].reshape(-1), parts[BITSANDBYTES_MAP].float()
        pairs = torch.stack((table.repeat_interleave(16), table.repeat(16)), dim=1)  # both values of every byte
        scales, step = self._scales(parts), self.block_values // 2
        values = torch.empty(2 * codes.numel(), dtype=dtype, device=codes.device)
        complete = codes.numel() // step * step
        each = max(_CHUNK_CODES // step, 1) * step
        for start in range(0, complete, each):
            some = codes[start : min(start + each, complete)]
            found = pairs.index_select(0, some.int()).view(-1, self.block_values)
            found *= scales[start // step : start // step + len(found), None]
            values[2 * start : 2 * (start + some.numel())].view(found.shape).copy_(found)
        if complete < codes.numel():  # the last block may be shorter
            found = pairs.index_select(0, codes[complete:].int()).view(-1)
            values[2 * complete :].copy_(found * scales[-1])
        return values[: math.prod(shape)].view(tuple(shape))

    def _scales(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Return the scale of each block, in float32."""
        stored = parts[BITSANDBYTES_ABSMAX].reshape(-1)
        if not self.nested_blocks:
            return stored.float()
        table, factors = parts[BITSANDBYTES_NESTED_MAP].float(), parts[BITSANDBYTES_NESTED_ABSMAX].float().reshape(-1)
        found = table.index_select(0, stored.int())
        found *= factors.repeat_interleave(self.nested_blocks)[: found.numel()]
        offset = self.settings["nested_offset"]
        assert isinstance(offset, float), offset
        return found.add_(offset)

    def scratch_bytes(self, elements: int, dtype: torch.dtype) -> int:
        """Upper bound of the bytes that `unpack` needs besides the parts and its result."""
        return min(elements // 2 + 1, _CHUNK_CODES) * _SCRATCH_BYTES + 16 * (elements // self.block_values + 1) + 4096

    def stored(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the parts in the shapes that they have in files."""
        flat = {name: part.reshape(-1) for name, part in parts.items()}
        return {**flat, WEIGHT: parts[WEIGHT].reshape(-1, 1)}


def bitsandbytes_weight(
    name: str,
    settings: Mapping[str, object],
    marker: str,
    parts: Mapping[str, Tensor],
    shape: Sequence[int],
    dtype: torch.dtype,
) -> PackedWeight:
    """Return the packed weight of `shape` with the nominal dtype `dtype` over the stored `parts`, as views."""
    columns = math.prod(shape[1:]) if len(shape) > 1 else 0
    codec = BitsAndBytesCodec(name, settings, marker, columns)
    arranged = dict(parts)
    if codec.row_step:
        arranged[WEIGHT] = parts[WEIGHT].reshape(shape[0], columns // 2)
        arranged[BITSANDBYTES_ABSMAX] = parts[BITSANDBYTES_ABSMAX].reshape(shape[0], columns // codec.block_values)
    if codec.row_step == 1 and codec.nested_blocks:
        arranged[BITSANDBYTES_NESTED_ABSMAX] = parts[BITSANDBYTES_NESTED_ABSMAX].reshape(shape[0], -1)
    return packed_weight(codec, arranged, shape, dtype)
