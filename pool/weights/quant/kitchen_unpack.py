"""Unpacks the stored parts of packed formats to values, with comfy_kitchen. Pure functions of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from modelpool.pool.weights.quant.formats import WEIGHT, number
from modelpool.pool.weights.quant.kitchen import (
    DTYPE_CODES,
    Parts,
    Settings,
    blocked_shape,
    column,
    float_of,
    package,
    w4a8_parts,
)


def _unpack_mxfp8(parts: Parts, settings: Settings, dtype: torch.dtype) -> Tensor:
    scale = parts["weight_scale"].view(torch.uint8).reshape(blocked_shape(parts[WEIGHT], 32))
    out: Tensor = package().dequantize_mxfp8(parts[WEIGHT], scale.view(torch.float8_e8m0fnu), float_of(dtype))
    return out


def _unpack_nvfp4(parts: Parts, settings: Settings, dtype: torch.dtype) -> Tensor:
    weight = parts[WEIGHT]
    scale = parts["weight_scale"].reshape(blocked_shape(weight, 8))
    out: Tensor = package().dequantize_nvfp4(
        weight.contiguous(), parts["weight_scale_2"].reshape(()), scale, float_of(dtype)
    )
    smoothing = parts.get("pre_quant_scale")
    # the weight may be stored with more columns than there are column factors
    return out if smoothing is None else out[:, : smoothing.numel()] * smoothing.to(out.dtype)


def _unpack_convrot_int8(parts: Parts, settings: Settings, dtype: torch.dtype) -> Tensor:
    package()
    operation = torch.ops.comfy_kitchen.dequantize_int8_convrot_weight_dtype
    out: Tensor = operation(
        parts[WEIGHT],
        column(parts["weight_scale"]),
        number(settings, "convrot_groupsize"),
        DTYPE_CODES[float_of(dtype)],
    )
    return out


def _unpack_w4a4(parts: Parts, settings: Settings, dtype: torch.dtype) -> Tensor:
    out: Tensor = package().dequantize_convrot_w4a4_weight(
        parts[WEIGHT].view(torch.int8),
        parts["weight_scale"].reshape(-1),
        number(settings, "convrot_groupsize"),
        output_dtype=float_of(dtype),
    )
    return out


def _unpack_w4a8(parts: Parts, settings: Settings, dtype: torch.dtype) -> Tensor:
    out: Tensor = package().dequantize_w4a8_int8_weight(
        *w4a8_parts(parts),
        group_size=number(settings, "group_size"),
        convrot_groupsize=number(settings, "convrot_groupsize"),
        output_dtype=float_of(dtype),
    )
    return out


def _unpack_awq(parts: Parts, settings: Settings, dtype: torch.dtype) -> Tensor:
    """(code - 8) * scale + zero, for groups of columns; low bits first. The package unpacks only inside its product."""
    codes = parts[WEIGHT].view(torch.uint8)
    rows, half = codes.shape
    values = torch.stack((codes & 15, codes >> 4), dim=-1).reshape(rows, -1, number(settings, "group_size"))
    scale, zero = (parts[name].float().t().unsqueeze(-1) for name in ("weight_scale", "weight_zeros"))
    return ((values.float() - 8.0) * scale + zero).reshape(rows, half * 2).to(dtype)


#: for each format: returns the values, padding included, in any float type
UNPACKERS: Mapping[str, Callable[[Parts, Settings, torch.dtype], Tensor]] = MappingProxyType(
    {
        "mxfp8": _unpack_mxfp8,
        "nvfp4": _unpack_nvfp4,
        "int8_tensorwise": _unpack_convrot_int8,
        "convrot_w4a4": _unpack_w4a4,
        "asym_w4a8_int8": _unpack_w4a8,
        "awq_w4a16": _unpack_awq,
    }
)
