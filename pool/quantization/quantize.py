"""From a weight to its packed form, and back to it after patching.

Rounding to nearest, or by chance with a seed: then a patch smaller than a step of the format survives on average. With
the seed that belongs to a weight's name (`pool.patches.rounding.seed_of`) the same patches give the same bytes
everywhere. 8-bit floats are rounded by chance as these formats are published, with a byte of noise a number
(golden/quant.2026-07); plain 8-bit weights have noise of their own kind (`pool.patches.rounding`). Knows no file.
Source: comfyui-behaviour facts, sections 2 and 2.1; golden/quant.2026-07.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from pool.errors import BadQuantization, unknown_name
from pool.ops.packed import PackedWeight, packed_weight
from pool.quantization import anywhere
from pool.quantization.formats import FORMATS, WEIGHT, misfit, rotates
from pool.quantization.quant_codec import FP8_DTYPES, INT8, QuantCodec, codec

#: what the package's conversions take
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
#: a scale for each row of an int8 weight
PER_ROW = "per_row"
#: settings of `quantize` only, with their defaults: files show them by the parts that there are and by their shapes
ONLY_HERE: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        INT8: MappingProxyType({PER_ROW: False}),
        "asym_w4a8_int8": MappingProxyType({"bits": 4, "symmetric": True, "codebook": True, "float_scales": False}),
    }
)


def quantize(
    weight: Tensor,
    format_name: str,
    settings: Mapping[str, object] | None = None,
    seed: int | None = None,
    scale: Tensor | None = None,
    name: str = "weight",
) -> PackedWeight:
    """`weight` in the format `format_name`, standing for its own dtype, on its own device. `weight` is not written.

    settings  of the format, beside its defaults, and those of ONLY_HERE
    seed      round by chance with it; None rounds to nearest
    scale     factor of a scaled format (one number, or one for each row); None takes the least that holds the weight
    name      of the weight, for errors

    Raises BadQuantization for an unknown format, one that cannot be made here, a shape or settings that it does not
    take, and numbers that are not finite.
    """
    given = dict(settings or {})
    only = {key: given.pop(key, default) for key, default in ONLY_HERE.get(format_name, {}).items()}
    _check(weight, format_name, given, name)
    values = weight.detach() if weight.dtype in _FLOATS else weight.detach().float()
    kind = codec(format_name, given)
    if format_name in FP8_DTYPES:
        parts = _scaled_fp8(values, FP8_DTYPES[format_name], seed, scale)
    elif format_name == INT8 and not kind.settings["convrot"]:
        parts = _scaled_int8(values, bool(only[PER_ROW]), seed, scale)
    else:
        parts = anywhere.quantize(format_name, values, {**kind.settings, **only}, seed)
    return packed_weight(kind, parts, weight.shape, weight.dtype)


def can_requantize(like: PackedWeight) -> bool:
    """Whether new values can be stored in the form of `like`: not where calibration or another program made it."""
    return isinstance(like.codec, QuantCodec) and like.codec.format.can_quantize


def requantize(values: Tensor, like: PackedWeight, seed: int | None = None, name: str = "weight") -> PackedWeight:
    """`values` in the form of `like`, with scales found anew; what else `like` holds (input factors) stays.

    This is how a patched weight goes back into storage: give the seed of its name for rounding by chance. Raises
    BadQuantization where `can_requantize` says no.
    """
    kind = like.codec
    if not isinstance(kind, QuantCodec) or not can_requantize(like):
        raise BadQuantization(f"{name}: found a weight packed as {kind.name}, expected a format that is made here")
    settings = dict(kind.settings)
    if kind.name == INT8:
        settings[PER_ROW] = like.parts["weight_scale"].numel() > 1
    elif kind.name == "asym_w4a8_int8":
        settings["bits"] = 8 * like.parts[WEIGHT].shape[1] // like.shape[1]
        settings["symmetric"] = "weight_correction" not in like.parts
        settings["codebook"] = "weight_codebook" in like.parts
        settings["float_scales"] = like.parts["weight_s_rel"].dtype is torch.float32
    elif "pre_quant_scale" in like.parts:
        values = values / like.parts["pre_quant_scale"].to(values.dtype)
    fresh = quantize(values, kind.name, settings, seed, name=name)
    kept = {key: part for key, part in like.parts.items() if key in ("input_scale", "pre_quant_scale")}
    return packed_weight(kind, {**fresh.parts, **kept}, like.shape, like.dtype)


def _check(weight: Tensor, format_name: str, settings: Mapping[str, object], name: str) -> None:
    if format_name not in FORMATS:
        raise BadQuantization(f"{name}: {unknown_name('format', format_name, FORMATS)}")
    kind, shape = FORMATS[format_name], tuple(weight.shape)
    if not kind.can_quantize:
        raise BadQuantization(f"{name}: {format_name} is made by calibration elsewhere; it can only be read here")
    unknown = settings.keys() - {*kind.defaults, "full_precision_matrix_mult"}
    if unknown:
        raise BadQuantization(f"{name}: found settings {sorted(unknown)}, expected only {sorted(kind.defaults)}")
    merged = {**kind.defaults, **settings}
    grouped = kind.group_size or rotates(format_name, merged)
    if not weight.is_floating_point() or not shape or not weight.numel():
        raise BadQuantization(f"{name}: found {weight.dtype} of shape {shape}, expected a floating point weight")
    if grouped:
        if len(shape) != 2:
            raise BadQuantization(f"{name}: found shape {shape}, expected two dimensions for {format_name}")
        wrong = misfit(format_name, shape[1], merged)
        if wrong:
            raise BadQuantization(f"{name}: {wrong}")
    if not bool(torch.isfinite(weight.float().abs().amax())):
        raise BadQuantization(f"{name}: found infinite or undefined numbers, expected finite ones")


def _scaled_fp8(values: Tensor, dtype: torch.dtype, seed: int | None, scale: Tensor | None) -> dict[str, Tensor]:
    largest = torch.finfo(dtype).max
    if scale is None:
        scale = values.abs().amax().float() / largest
        if values.dtype is torch.float16:  # whose inverse must be a float16 too
            scale = scale.clamp(min=1.0 / torch.finfo(torch.float16).max)
        scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    factor = scale.to(values.device, torch.float32)
    if factor.numel() > 1:
        factor = factor.reshape(-1, *(1,) * (values.dim() - 1))
    scaled = (values * (1.0 / factor).to(values.dtype)).clamp(-largest, largest)
    codes = scaled.to(dtype) if seed is None else anywhere.round_to_fp8(scaled, dtype, seed)
    return {WEIGHT: codes, "weight_scale": scale.to(values.device, torch.float32)}


def _scaled_int8(values: Tensor, per_row: bool, seed: int | None, scale: Tensor | None) -> dict[str, Tensor]:
    if values.dtype is torch.float16:  # which holds few scales exactly
        values = values.float()
    if scale is None:
        size = values.abs()
        largest = size.reshape(size.shape[0], -1).amax(-1) if per_row else size.amax()
        scale = (largest.float() / 127.0).clamp(min=1e-30)
    factor = scale.to(values.device, values.dtype)
    if factor.numel() > 1:
        factor = factor.reshape(-1, *(1,) * (values.dim() - 1))
        scale = scale.reshape(-1, *(1,) * (values.dim() - 1))
    scaled = values / torch.where(factor == 0, torch.finfo(values.dtype).tiny, factor)
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        noise = torch.rand(scaled.shape, dtype=scaled.dtype, generator=generator)
        scaled = (scaled + noise.to(scaled.device)).floor()
    return {
        WEIGHT: scaled.round().clamp(-128.0, 127.0).to(torch.int8),
        "weight_scale": scale.to(values.device, torch.float32),
    }
