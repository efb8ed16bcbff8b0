"""Codecs: the properties of each format that `pool.weights.ops` needs to compute with its packed weights.

Scaled formats (8-bit floats, plain int8) are two lines of torch and are implemented here, without the package. The
others use `pool.weights.quant.kitchen_dispatch`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from modelpool.pool.weights.quant import kitchen_dispatch
from modelpool.pool.weights.quant.formats import FORMATS, FULL_PRECISION, WEIGHT, Format

#: torch's dtype of each scaled 8-bit float format
FP8_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}
)
INT8 = "int8_tensorwise"

#: largest scratch bytes per value of the package's pure-torch back end while it unpacks (codes as 32-bit numbers,
#: values
#: in float32, rotated values); its kernels need less
BLOCK_SCRATCH_BYTES = 16

#: parts without an entry per row, whatever their shape
_PER_WEIGHT = ("input_scale", "weight_scale_2", "pre_quant_scale", "weight_codebook")
#: parts with the rows in their second dimension
_ROWS_IN_SECOND_DIM = {"asym_w4a8_int8": ("weight_correction",), "awq_w4a16": ("weight_scale", "weight_zeros")}


@dataclass(frozen=True)
class QuantCodec:
    """A `pool.weights.ops.packed.Codec` of one of the published formats.

    settings     of the format, complete
    marker       JSON text that describes it in a file
    flat_scales  the file has one-dimensional block scales, which `pool.weights.quant.state_dict.save` restores (parts
                 have two)
    """

    format: Format
    settings: Mapping[str, object]
    marker: str
    flat_scales: bool = False

    @property
    def name(self) -> str:
        """Name of the format in files."""
        return self.format.name

    @property
    def row_step(self) -> int:
        """128 for block scales, which are tiled by 128 rows; 1 for formats with independent rows."""
        return 128 if self.format.pads_to > 1 else 1

    @property
    def is_scaled(self) -> bool:
        """Whether a value is its code times one factor per weight or per row."""
        return self.name in FP8_DTYPES or (self.name == INT8 and not self.settings["convrot"])

    @property
    def full_precision(self) -> bool:
        """Whether the file requires multiplying with the unpacked weight."""
        return bool(self.settings[FULL_PRECISION])

    def row_dims(self, parts: Mapping[str, Tensor]) -> Mapping[str, int]:
        """Return, for each part with an entry for every row, its dimension that runs over the rows."""
        second = _ROWS_IN_SECOND_DIM.get(self.name, ())
        return {
            name: 1 if name in second else 0
            for name, part in parts.items()
            if name == WEIGHT or (name not in _PER_WEIGHT and part.numel() > 1)
        }

    def row_entries(self, name: str, rows: int) -> int:
        """One for each row."""
        return rows

    def reshaped(
        self, parts: Mapping[str, Tensor], before: Sequence[int], after: Sequence[int]
    ) -> Mapping[str, Tensor] | None:
        """Return the parts with codes reshaped to `after`, for formats with one factor per weight or per row.

        The factors keep their shape in the file. None for blocks and rotated columns, which are matrices.
        """
        if not self.is_scaled:
            return None
        if parts["weight_scale"].numel() > 1 and tuple(before[:1]) != tuple(after[:1]):
            return None
        return {**parts, WEIGHT: parts[WEIGHT].view(tuple(after))}

    def unpack(self, parts: Mapping[str, Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the weight's values, without padding, as a new tensor."""
        if self.name in FP8_DTYPES:
            return _scaled(parts[WEIGHT], parts["weight_scale"], _fp8_product_dtype(dtype), dtype)
        if self.name == INT8 and not self.settings["convrot"]:
            return _scaled(parts[WEIGHT], parts["weight_scale"], torch.float32, dtype)
        values = kitchen_dispatch.unpack(self.name, parts, self.settings, dtype).to(dtype)
        if values.shape != torch.Size(shape):
            values = values[: shape[0], : shape[1]].contiguous()
        return values

    def scratch_bytes(self, elements: int, dtype: torch.dtype) -> int:
        """Upper bound of the bytes that `unpack` needs besides the parts and its result."""
        if self.name in FP8_DTYPES:
            return 0 if _fp8_product_dtype(dtype) == dtype else elements * 4
        if self.name == INT8 and not self.settings["convrot"]:
            return 0 if dtype == torch.float32 else elements * 4
        return elements * BLOCK_SCRATCH_BYTES


def codec(name: str, settings: Mapping[str, object] | None = None, marker: str | None = None) -> QuantCodec:
    """Return the codec of the format `name`; `settings` override its defaults.

    marker  as in a file; generated from the settings when None
    """
    overrides = dict(settings or {})
    marked = {key: value for key, value in overrides.items() if key != FULL_PRECISION or value}
    complete = MappingProxyType({**FORMATS[name].defaults, FULL_PRECISION: False, **overrides})
    return QuantCodec(FORMATS[name], complete, json.dumps({"format": name, **marked}) if marker is None else marker)


def _fp8_product_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for float16 weights: their scales are often too small to be exact in float16."""
    return torch.float32 if dtype is torch.float16 else dtype


def _scaled(weight: Tensor, scale: Tensor, product_dtype: torch.dtype, dtype: torch.dtype) -> Tensor:
    values = weight.to(product_dtype)  # a copy: codes are never of a wider floating point type
    return values.mul_(_factor(scale, weight).to(product_dtype)).to(dtype)


def _factor(scale: Tensor, weight: Tensor) -> Tensor:
    """Return `scale` in a shape that multiplies `weight`: a number, or one per row."""
    if scale.numel() == 1:
        return scale.reshape(())
    return scale.reshape(-1, *(1,) * (weight.dim() - 1))
