"""Multiplies inputs with packed weights by native kernels: faster, and less exact than with unpacked weights.

The input is quantized too, so the result differs from the product with unpacked weights by the input's rounding.
Therefore nothing here runs unless the chosen kind of layers requests it. Where a device does not support something the
result is None, and the caller computes with unpacked weights: a format is never refused.
Source: comfyui-behaviour facts, section 1 (`fp8_linear`) and 2.1.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import TypeAlias

import torch
from torch import Tensor

from modelpool.pool.devices.device_errors import may_try_otherwise
from modelpool.pool.weights.ops.cast import cast
from modelpool.pool.weights.ops.packed import PackedWeight
from modelpool.pool.weights.quant.formats import FORMATS, WEIGHT, Format
from modelpool.pool.weights.quant.kitchen import KNOWN_DEVICES
from modelpool.pool.weights.quant.kitchen_linear import LINEARS
from modelpool.pool.weights.quant.marked_codec import FP8_DTYPES, INT8, QuantCodec

_LOG = logging.getLogger(__name__)
#: (codes, transposed codes of the weight, their two factors, bias, dtype) -> product
ScaledProduct: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, torch.dtype], Tensor]

#: largest number of float8_e4m3fn, to which inputs are quantized
E4M3_MAX = 448.0
#: formats that a CPU can multiply packed: block formats have no kernels there
_CPU_FORMATS = (*FP8_DTYPES, INT8, "convrot_w4a4", "asym_w4a8_int8")
_FP8_NAMES: Mapping[torch.dtype, str] = MappingProxyType({dtype: name for name, dtype in FP8_DTYPES.items()})
_INPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: cuBLAS requires matrix sizes that are multiples of this
_CUBLAS_STEP = 16


def runs_natively(format_name: str, device_type: str, capability: tuple[int, int] | None) -> bool:
    """Whether a device can multiply packed weights of a format.

    capability  of a CUDA device, such as (8, 9); None for any other
    """
    kind: Format = FORMATS[format_name]
    if device_type != "cuda":
        return format_name in (FP8_DTYPES if device_type not in KNOWN_DEVICES else _CPU_FORMATS)
    return kind.native_from is not None and capability is not None and capability >= kind.native_from


def native_linear(
    x: Tensor, packed: PackedWeight, bias: Tensor | None, capability: tuple[int, int] | None = None
) -> Tensor | None:
    """Compute `x @ weight.T + bias` with the packed weight; None where that is not supported.

    `x` (two or more dimensions, not modified) is quantized as the format's kernels require: 8-bit floats with the
    layer's input factor, or 1 and clamped to the largest number; integers and blocks with dynamic factors. The result
    has the dtype of `x`. If a kernel refuses the call, that is logged once and the result is None. Raises
    errors after which the device computes nothing more, and those about memory.
    """
    kind = packed.codec
    if not isinstance(kind, QuantCodec) or kind.full_precision or packed.dim() != 2:
        return None
    if x.dim() < 2 or x.dtype not in _INPUT_DTYPES or not x.numel() or x.device != packed.device:
        return None
    if not runs_natively(kind.name, x.device.type, capability):
        return None
    try:
        if kind.name in FP8_DTYPES:
            return fp8_linear(
                x, packed.parts[WEIGHT], bias, packed.parts["weight_scale"], packed.parts.get("input_scale")
            )
        return LINEARS[kind.name](x, packed.parts, kind.settings, bias, packed.shape[0])
    except (RuntimeError, TypeError, ValueError) as error:
        if not may_try_otherwise(error):
            raise
        _log_once(kind.name, x.device.type, str(error))
        return None


def native_fp8_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, capability: tuple[int, int] | None = None
) -> Tensor | None:
    """As `native_linear`, for a weight that is a plain tensor of 8-bit floats: its factor is 1."""
    name = _FP8_NAMES.get(weight.dtype)
    if name is None or weight.dim() != 2 or x.dim() not in (2, 3) or x.dtype not in _INPUT_DTYPES or not x.numel():
        return None
    if x.device != weight.device or not runs_natively(name, x.device.type, capability):
        return None
    try:
        return fp8_linear(x, weight, bias)
    except (RuntimeError, TypeError, ValueError) as error:
        if not may_try_otherwise(error):
            raise
        _log_once(name, x.device.type, str(error))
        return None


def scaled_product(
    codes: Tensor, weight_t: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """Return `(codes * scale_a) @ (weight_t * scale_b) + bias` in `out_dtype` by torch's product of 8-bit floats.

    On CUDA it accumulates fast: tensor cores keep partial sums in fewer bits, which the Ada and Hopper generations need
    for full speed. The inputs are rounded more than the sums.
    """
    is_fast = codes.device.type == "cuda"
    return torch._scaled_mm(
        codes, weight_t, scale_a=scale_a, scale_b=scale_b, bias=bias, out_dtype=out_dtype, use_fast_accum=is_fast
    )


def reference_product(
    codes: Tensor, weight_t: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """Return what `scaled_product` returns, on any device: in float32, with exact products of the 8-bit numbers."""
    out = (codes.float() @ weight_t.float()) * (scale_a * scale_b)
    return (out if bias is None else out + bias.float()).to(out_dtype)


def fp8_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weight_scale: Tensor | None = None,
    input_scale: Tensor | None = None,
    product: ScaledProduct = scaled_product,
) -> Tensor | None:
    """Compute `x @ (weight * weight_scale).T + bias` by torch's product of 8-bit floats, in the dtype of `x`.

    `x` is divided by `input_scale` (default 1), clamped to the range of float8_e4m3fn, and rounded to it; it is not
    modified. None where the device's library does not accept the matrix sizes. Raises torch's errors.
    """
    flat = x.reshape(-1, x.shape[-1])
    is_odd = any(size % _CUBLAS_STEP for size in weight.shape)
    if is_odd and x.device.type == "cuda" and product is scaled_product:
        return None
    one = torch.ones((), dtype=torch.float32, device=x.device)
    factor = one if input_scale is None else input_scale.reshape(()).float()
    scaled = flat if input_scale is None else flat * (1.0 / factor).to(flat.dtype)
    codes = scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).contiguous()
    by_row = weight_scale is not None and weight_scale.numel() > 1
    by_all = one if weight_scale is None or by_row else weight_scale.reshape(()).float()
    out_dtype = torch.float32 if by_row else x.dtype
    fused_bias = bias if bias is not None and out_dtype is not torch.float32 else None
    out = product(codes, weight.t(), factor, by_all, fused_bias, out_dtype)
    if by_row and weight_scale is not None:
        out = out * weight_scale.reshape(1, -1).float()
    if bias is not None and fused_bias is None:
        out = out + bias
    return out.to(x.dtype).reshape(*x.shape[:-1], weight.shape[0])


def linear_kernel(
    formats: Collection[str], capability: tuple[int, int] | None = None
) -> Callable[[Tensor, Tensor, Tensor | None], Tensor | None]:
    """Return the `pool.weights.ops.context.LinearKernel` that multiplies weights of `formats` as they are stored.

    It takes stored weights: packed ones and plain 8-bit floats are moved to the input's device in storage form. It
    declines (None) every other weight, and anything that this device does not support, before moving data.
    """

    def kernel(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        name = weight.codec.name if isinstance(weight, PackedWeight) else _FP8_NAMES.get(weight.dtype, "")
        if name not in formats or not runs_natively(name, x.device.type, capability):
            return None
        own_bias = None if bias is None else cast(bias, x.device, x.dtype)
        if isinstance(weight, PackedWeight):
            moved = weight.moved(x.device, lambda part: cast(part, x.device, part.dtype))
            return native_linear(x, moved, own_bias, capability)
        return native_fp8_linear(x, cast(weight, x.device, weight.dtype), own_bias, capability)

    return kernel


def reference_kernel(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """The `pool.weights.ops.context.LinearKernel` that multiplies 8-bit floats as `linear_kernel` does on a GPU, in
    float32 arithmetic on any device; slower than with unpacked weights. Declines (None) every other weight."""
    name = weight.codec.name if isinstance(weight, PackedWeight) else _FP8_NAMES.get(weight.dtype, "")
    if name not in FP8_DTYPES or weight.dim() != 2 or x.dtype not in _INPUT_DTYPES or not x.numel():
        return None
    own_bias = None if bias is None else cast(bias, x.device, x.dtype)
    if not isinstance(weight, PackedWeight):
        return fp8_linear(x, cast(weight, x.device, weight.dtype), own_bias, product=reference_product)
    if not isinstance(weight.codec, QuantCodec) or weight.codec.full_precision:
        return None
    parts = weight.moved(x.device, lambda part: cast(part, x.device, part.dtype)).parts
    return fp8_linear(x, parts[WEIGHT], own_bias, parts["weight_scale"], parts.get("input_scale"), reference_product)


def generations(formats: Collection[str]) -> dict[str, tuple[int, int] | None]:
    """Return, for each of `formats`, the generation of CUDA cards from which it is multiplied natively; None for no
    card.

    Input of `pool.weights.ops.layer_choice.pick_operations` for quantized files.
    """
    return {name: FORMATS[name].native_from if name in FORMATS else None for name in formats}


@functools.lru_cache(maxsize=256)
def _log_once(format_name: str, device_type: str, error: str) -> None:
    _LOG.warning(
        "%s on %s: computed with unpacked weights, because its kernel failed: %s", format_name, device_type, error
    )
