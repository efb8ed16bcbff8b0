"""Multiplies inputs with packed weights by comfy_kitchen's kernels. Pure functions of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from modelpool.pool.weights.quant.formats import WEIGHT, number
from modelpool.pool.weights.quant.kitchen import Parts, Settings, blocked_shape, column, package, padded, w4a8_parts


def _linear_mxfp8(x: Tensor, parts: Parts, settings: Settings, bias: Tensor | None, width: int) -> Tensor:
    flat = x.reshape(-1, x.shape[-1])
    codes, scale = package().quantize_mxfp8(padded(flat, 32))
    weight = parts[WEIGHT]
    weight_scale = parts["weight_scale"].view(torch.uint8).reshape(blocked_shape(weight, 32))
    out: Tensor = package().scaled_mm_mxfp8(
        codes, weight, scale, weight_scale.view(torch.float8_e8m0fnu), out_dtype=x.dtype
    )
    return _cut(out, x, bias, width)


def _linear_nvfp4(x: Tensor, parts: Parts, settings: Settings, bias: Tensor | None, width: int) -> Tensor:
    smoothing = parts.get("pre_quant_scale")
    flat = x.reshape(-1, x.shape[-1])
    flat = flat if smoothing is None else flat * smoothing.to(flat.dtype)
    scale = parts.get("input_scale")
    if scale is None:
        scale = (flat.abs().amax() / (448.0 * 6.0)).float()
        scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    scale = scale.reshape(()).float()
    codes, blocks = package().quantize_nvfp4(padded(flat, 16), scale)
    weight = parts[WEIGHT]
    out: Tensor = package().scaled_mm_nvfp4(
        codes,
        weight,
        tensor_scale_a=scale,
        tensor_scale_b=parts["weight_scale_2"].reshape(()),
        block_scale_a=blocks,
        block_scale_b=parts["weight_scale"].reshape(blocked_shape(weight, 8)),
        out_dtype=x.dtype,
    )
    return _cut(out, x, bias, width)


def _linear_int8(x: Tensor, parts: Parts, settings: Settings, bias: Tensor | None, width: int) -> Tensor:
    out: Tensor = package().int8_linear(
        x.contiguous(),
        parts[WEIGHT],
        column(parts["weight_scale"]),
        bias,
        x.dtype,
        convrot=bool(settings["convrot"]),
        convrot_groupsize=number(settings, "convrot_groupsize"),
    )
    return out


def _linear_w4a4(x: Tensor, parts: Parts, settings: Settings, bias: Tensor | None, width: int) -> Tensor:
    out: Tensor = package().convrot_w4a4_linear(
        x,
        parts[WEIGHT].view(torch.int8),
        parts["weight_scale"].reshape(-1),
        bias=bias,
        convrot_groupsize=number(settings, "convrot_groupsize"),
        linear_dtype=str(settings["linear_dtype"]),
    )
    return out


def _linear_w4a8(x: Tensor, parts: Parts, settings: Settings, bias: Tensor | None, width: int) -> Tensor:
    out: Tensor = package().w4a8_int8_linear(
        x,
        *w4a8_parts(parts),
        bias=bias,
        group_size=number(settings, "group_size"),
        convrot_groupsize=number(settings, "convrot_groupsize"),
        out_dtype=x.dtype,
    )
    return out


def _cut(out: Tensor, x: Tensor, bias: Tensor | None, width: int) -> Tensor:
    """Return a padded product in the shape of the layer's output."""
    rows = x.numel() // x.shape[-1]
    product = out[:rows, :width].reshape(*x.shape[:-1], width)
    return product if bias is None else product + bias


#: for each format: `x @ weight.T + bias` with packed parts, in the dtype of `x`, `width` columns wide.
#: Each raises the package's or torch's error where the kernels do not accept the operands.
LINEARS: Mapping[str, Callable[[Tensor, Parts, Settings, Tensor | None, int], Tensor]] = MappingProxyType(
    {
        "mxfp8": _linear_mxfp8,
        "nvfp4": _linear_nvfp4,
        "int8_tensorwise": _linear_int8,
        "convrot_w4a4": _linear_w4a4,
        "asym_w4a8_int8": _linear_w4a8,
    }
)
