"""Calls comfy_kitchen's functions for packed formats on every device: unpacking, quantizing, stochastic rounding.

On devices that comfy_kitchen supports, its functions run directly. On any other (the simulated one) each call is one
torch operation, defined here at first use, which computes on the CPU: the package caches tables for each device, which
would otherwise be charged to the simulated device for ever.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from modelpool.pool.devices.torch_modules import as_current
from modelpool.pool.weights.quant.formats import WEIGHT, number
from modelpool.pool.weights.quant.kitchen import (
    DTYPE_CODES,
    KNOWN_DEVICES,
    Parts,
    Settings,
    blocked_shape,
    column,
    float_of,
    package,
    w4a8_parts,
)
from modelpool.pool.weights.quant.kitchen_quantize import QUANTIZERS, fp8_stochastic


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


def unpack(name: str, parts: Parts, settings: Settings, dtype: torch.dtype) -> Tensor:
    """Return the values of a weight in the format `name`, padding included, in `dtype` (any float type)."""
    if parts[WEIGHT].device.type in KNOWN_DEVICES:
        with as_current(parts[WEIGHT].device):
            return UNPACKERS[name](parts, settings, dtype)
    names = list(parts)
    out: Tensor = _operations()[0](list(parts.values()), json.dumps([name, names, dict(settings)]), dtype)
    return out


def quantize(name: str, weight: Tensor, settings: Settings, seed: int | None) -> dict[str, Tensor]:
    """Return the parts of `weight` (two dimensions, a float type that the format accepts) in the format `name`.

    seed  for stochastic rounding; None rounds to nearest. The result depends only on the values and the seed, and for
          integer formats on the kind of device: the package draws their noise on the weight's device
    """
    if weight.device.type in KNOWN_DEVICES:
        with as_current(weight.device):
            return QUANTIZERS[name](weight, settings, seed)
    tensors: list[Tensor] = _operations()[1](weight, json.dumps([name, dict(settings)]), -1 if seed is None else seed)
    names = bytes(tensors[0].cpu().tolist()).decode().split()
    return dict(zip(names, tensors[1:], strict=True))


def round_to_fp8(x: Tensor, dtype: torch.dtype, seed: int) -> Tensor:
    """Round `x` stochastically to the 8-bit float `dtype`, with noise that depends only on `seed`."""
    if x.device.type not in KNOWN_DEVICES:
        parts: list[Tensor] = _operations()[1](x, json.dumps(["fp8", {"dtype": str(dtype)}]), seed)
        return parts[0]
    with as_current(x.device):
        return fp8_stochastic(x, dtype, seed)


@functools.cache
def _operations() -> tuple[Callable[..., Tensor], Callable[..., list[Tensor]]]:
    """Register unpacking and quantizing as torch operations and return them."""

    @torch.library.custom_op("modelpool::unpack", mutates_args=())
    def unpack_operation(parts: Sequence[Tensor], what: str, dtype: torch.dtype) -> Tensor:
        name, names, settings = json.loads(what)
        return UNPACKERS[name](dict(zip(names, parts, strict=True)), settings, dtype)

    @torch.library.custom_op("modelpool::quantize", mutates_args=())
    def quantize_operation(weight: Tensor, what: str, seed: int) -> list[Tensor]:
        name, settings = json.loads(what)
        if name == "fp8":
            return [fp8_stochastic(weight, getattr(torch, settings["dtype"].removeprefix("torch.")), seed)]
        parts = QUANTIZERS[name](weight, settings, None if seed < 0 else seed)
        # an operation returns only tensors: the first encodes the names of the others
        return [torch.tensor(list(" ".join(parts).encode()), dtype=torch.uint8), *parts.values()]

    return unpack_operation, quantize_operation
