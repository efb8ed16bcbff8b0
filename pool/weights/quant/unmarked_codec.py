"""Weights that are their codes times factors: one factor for each block of rows and columns, for each row or for all.

The codes are a plain tensor of any type, or a weight in one of ggml's formats. Covers what has no published marker:
the 8-bit floats of transformers (`weight_scale_inv`), LLM.int8 of bitsandbytes, and GGUF files that have scales beside
their weights. `pool.weights.quant.marked_codec` has the formats with markers.
Source: `FP8Linear` of transformers 5.23; Dettmers et al. 2022, "LLM.int8()", section 3: a factor is the largest size of
a row, which the code 127 stands for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from modelpool.pool.weights.ops.packed import Codec, PackedWeight, packed_weight
from modelpool.pool.weights.quant.formats import (
    BLOCK_COLUMNS,
    BLOCK_ROWS,
    LLM_INT8,
    LLM_INT8_SCALE,
    SCALED_GGML,
    WEIGHT,
    WEIGHT_SCALE,
    number,
)

#: the largest code of LLM.int8
_LLM_INT8_MAX = 127.0


@dataclass(frozen=True)
class ScaledCodec:
    """A `pool.weights.ops.packed.Codec` of codes with factors.

    name           of the format
    scale_part     name of the part with the factors
    divisor        of the factors
    block_rows     rows that share factors; 0 if all do
    block_columns  columns that share a factor; 0 if all do
    codes          the codec of the codes; None for plain tensors
    """

    name: str
    scale_part: str = WEIGHT_SCALE
    divisor: float = 1.0
    block_rows: int = 0
    block_columns: int = 0
    codes: Codec | None = None

    @property
    def row_step(self) -> int:
        """The rows that share factors, where the codes can be separated there."""
        rows = self.block_rows or 1
        if self.codes is None:
            return rows
        own = self.codes.row_step
        return rows if own == 1 else own if rows == 1 else 0

    def row_dims(self, parts: Mapping[str, Tensor]) -> Mapping[str, int]:
        """Return the codes, and the factors if they are not shared by all rows, by their first dimension."""
        return {WEIGHT: 0, self.scale_part: 0} if self.block_rows else {WEIGHT: 0}

    def row_entries(self, name: str, rows: int) -> int:
        """Return one entry for each row of codes and for each block of factors."""
        return rows // self.block_rows if name == self.scale_part else rows

    def reshaped(
        self, parts: Mapping[str, Tensor], before: Sequence[int], after: Sequence[int]
    ) -> Mapping[str, Tensor] | None:
        """Return the parts with plain codes reshaped to `after`; None for blocks and for ggml's formats."""
        is_by_row = self.block_rows == 1 and tuple(before[:1]) == tuple(after[:1])
        if self.codes is not None or self.block_columns or (self.block_rows and not is_by_row):
            return None
        return {**parts, WEIGHT: parts[WEIGHT].view(tuple(after))}

    def unpack(self, parts: Mapping[str, Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the weight's values, computed in float32, as a new tensor."""
        values = self._codes(parts, shape)
        factors = parts[self.scale_part].to(torch.float32)
        if self.divisor != 1.0:
            factors = factors / self.divisor
        if not self.block_columns:
            values *= self._by_row(factors.reshape(-1), values)
            return values.to(dtype)
        rows = factors.reshape(-1, factors.shape[-1])
        if self.block_rows > 1:
            rows = rows.repeat_interleave(self.block_rows, 0)[: values.shape[0]]
        # factors are expanded over rows only; a view of the complete blocks of columns spreads them
        complete = values.shape[1] // self.block_columns
        end = complete * self.block_columns
        values[:, :end].unflatten(1, (complete, self.block_columns)).mul_(rows[:, :complete, None])
        values[:, end:].mul_(rows[:, complete:])
        return values.to(dtype)

    def _codes(self, parts: Mapping[str, Tensor], shape: Sequence[int]) -> Tensor:
        """Return a new tensor of the codes in float32."""
        if self.codes is not None:
            return self.codes.unpack({WEIGHT: parts[WEIGHT]}, shape, torch.float32)
        return parts[WEIGHT].to(torch.float32, copy=True).reshape(tuple(shape))

    def _by_row(self, factors: Tensor, values: Tensor) -> Tensor:
        if not self.block_rows:
            return factors.reshape(())
        rows = factors if self.block_rows == 1 else factors.repeat_interleave(self.block_rows)[: values.shape[0]]
        return rows.reshape(-1, *(1,) * (values.dim() - 1))

    def scratch_bytes(self, elements: int, dtype: torch.dtype) -> int:
        """Upper bound of the bytes that `unpack` needs besides the parts and its result: values in float32, and factors
        for every row, of which there are fewer than values."""
        values = 0 if dtype == torch.float32 else elements * 4
        factors = elements * 4 if self.block_rows != 1 and self.block_columns else 0
        codes = 0 if self.codes is None else self.codes.scratch_bytes(elements, torch.float32)
        return values + factors + codes + 4096


def is_scaled_codes(format_name: str, settings: Mapping[str, object]) -> bool:
    """Whether weights of a format are read by a `ScaledCodec`."""
    return format_name in (LLM_INT8, SCALED_GGML) or BLOCK_ROWS in settings


def scaled_codes(
    name: str, settings: Mapping[str, object], parts: Mapping[str, Tensor], shape: Sequence[int], dtype: torch.dtype
) -> PackedWeight:
    """Return the packed weight of `shape` with the nominal dtype `dtype` over the stored `parts`, as views."""
    arranged, codes = dict(parts), parts[WEIGHT]
    own = None
    if isinstance(codes, PackedWeight):
        own, arranged[WEIGHT] = codes.codec, codes.parts[WEIGHT]
    if BLOCK_ROWS in settings:
        rows, columns = number(settings, BLOCK_ROWS), number(settings, BLOCK_COLUMNS)
        codec = ScaledCodec(name, block_rows=rows, block_columns=columns, codes=own)
    elif name == LLM_INT8:
        codec = ScaledCodec(name, LLM_INT8_SCALE, _LLM_INT8_MAX, 1)
    else:
        codec = ScaledCodec(name, block_rows=int(parts[WEIGHT_SCALE].numel() > 1), codes=own)
    return packed_weight(codec, arranged, shape, dtype)
