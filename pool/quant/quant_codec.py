"""Codecs: what `pool.ops` needs to know of each format to compute with its packed weights.

Scaled formats (8-bit floats, plain int8) are two lines of torch and are here; they need no package and no import. The
others go through `pool.quant.codecs`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from modelpool.pool.quant import codecs as anywhere
from modelpool.pool.quant.formats import FORMATS, FULL_PRECISION, WEIGHT, Format

#: torch's 8-bit float of each scaled format
FP8_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}
)
INT8 = "int8_tensorwise"

#: bytes for each value that the package's pure-torch back end takes at most while it unpacks (codes as 32-bit numbers,
#: values in float32, values turned back); its kernels take less
BLOCK_SCRATCH_BYTES = 16

#: parts that are one thing for the whole weight, whatever their shape
_WHOLE = ("input_scale", "weight_scale_2", "pre_quant_scale", "weight_codebook")
#: parts that run over the rows in their second dimension
_SECOND = {"asym_w4a8_int8": ("weight_correction",), "awq_w4a16": ("weight_scale", "weight_zeros")}


@dataclass(frozen=True)
class QuantCodec:
    """A `pool.ops.packed.Codec` of one of the published formats.

    settings     of the format, complete
    marker       the JSON text that a file says this with
    flat_scales  the file has the block scales in one dimension (`published.save` writes them so; parts have two)
    """

    format: Format
    settings: Mapping[str, object]
    marker: str
    flat_scales: bool = False

    @property
    def name(self) -> str:
        """What files call the format."""
        return self.format.name

    @property
    def row_step(self) -> int:
        """Block scales come in tiles of 128 rows; in all other formats rows stand alone."""
        return 128 if self.format.pads_to > 1 else 1

    @property
    def is_scaled(self) -> bool:
        """Whether a value is its code times one factor, of the whole weight or of its row."""
        return self.name in FP8_DTYPES or (self.name == INT8 and not self.settings["convrot"])

    @property
    def full_precision(self) -> bool:
        """Whether the file asks to multiply with the unpacked weight always."""
        return bool(self.settings[FULL_PRECISION])

    def row_dims(self, parts: Mapping[str, Tensor]) -> Mapping[str, int]:
        """For each part with an entry for every row: the dimension that runs over the rows."""
        second = _SECOND.get(self.name, ())
        return {
            name: 1 if name in second else 0
            for name, part in parts.items()
            if name == WEIGHT or (name not in _WHOLE and part.numel() > 1)
        }

    def reshaped(
        self, parts: Mapping[str, Tensor], before: Sequence[int], after: Sequence[int]
    ) -> Mapping[str, Tensor] | None:
        """The parts with codes of the shape `after`, where values are a code times the factor of all or of its row.

        The factors keep the shape that the file has them in. None for blocks and rotated columns, which are matrices.
        """
        if not self.is_scaled:
            return None
        if parts["weight_scale"].numel() > 1 and tuple(before[:1]) != tuple(after[:1]):
            return None
        return {**parts, WEIGHT: parts[WEIGHT].view(tuple(after))}

    def unpack(self, parts: Mapping[str, Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The weight's values, without padding, as a fresh tensor."""
        if self.name in FP8_DTYPES:
            return _scaled(parts[WEIGHT], parts["weight_scale"], _fp8_product_dtype(dtype), dtype)
        if self.name == INT8 and not self.settings["convrot"]:
            return _scaled(parts[WEIGHT], parts["weight_scale"], torch.float32, dtype)
        values = anywhere.unpack(self.name, parts, self.settings, dtype).to(dtype)
        if values.shape != torch.Size(shape):
            values = values[: shape[0], : shape[1]].contiguous()
        return values

    def scratch_bytes(self, elements: int, dtype: torch.dtype) -> int:
        """Bytes that `unpack` needs at most beside the parts and its result."""
        if self.name in FP8_DTYPES:
            return 0 if _fp8_product_dtype(dtype) == dtype else elements * 4
        if self.name == INT8 and not self.settings["convrot"]:
            return 0 if dtype == torch.float32 else elements * 4
        return elements * BLOCK_SCRATCH_BYTES


def codec(name: str, settings: Mapping[str, object] | None = None, marker: str | None = None) -> QuantCodec:
    """The codec of the format `name` with `settings` beside its defaults.

    marker  as a file has it; made from the settings where there is none
    """
    given = dict(settings or {})
    said = {key: value for key, value in given.items() if key != FULL_PRECISION or value}
    complete = MappingProxyType({**FORMATS[name].defaults, FULL_PRECISION: False, **given})
    return QuantCodec(FORMATS[name], complete, json.dumps({"format": name, **said}) if marker is None else marker)


def _fp8_product_dtype(dtype: torch.dtype) -> torch.dtype:
    """Scales of float16 weights are often below what float16 holds exactly, so their product is made in float32."""
    return torch.float32 if dtype is torch.float16 else dtype


def _scaled(weight: Tensor, scale: Tensor, product_dtype: torch.dtype, dtype: torch.dtype) -> Tensor:
    values = weight.to(product_dtype)  # a copy: codes have no floating point type of two bytes or more
    return values.mul_(_factor(scale, weight).to(product_dtype)).to(dtype)


def _factor(scale: Tensor, weight: Tensor) -> Tensor:
    """`scale` in the shape that multiplies `weight`: a number, or one for each row."""
    if scale.numel() == 1:
        return scale.reshape(())
    return scale.reshape(-1, *(1,) * (weight.dim() - 1))
