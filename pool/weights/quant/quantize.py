"""Quantizes weights to packed form, and packs them again after patching.

Rounds to nearest, or stochastically with a seed: then a patch smaller than a step of the format survives on average.
With the seed of a weight's name (`pool.weights.patches.stochastic_rounding.seed_of`) the same patches give the same
bytes everywhere. Packed 8-bit floats are rounded as these formats are published, with a byte of noise per number
(golden/quant.2026-07); plain 8-bit weights have a different noise (`pool.weights.patches.stochastic_rounding`). Knows
no file. Source: comfyui-behaviour facts, sections 2 and 2.1; golden/quant.2026-07.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from modelpool.pool.values.core.errors import BadQuantization, unknown_name
from modelpool.pool.weights.ops.packed import PackedWeight, packed_weight
from modelpool.pool.weights.quant import kitchen_dispatch
from modelpool.pool.weights.quant.formats import FORMATS, INPUT_SCALE, WEIGHT, misfit, rotates, round_up
from modelpool.pool.weights.quant.kitchen_quantize import CHUNK_SCRATCH_BYTES, CHUNK_VALUES
from modelpool.pool.weights.quant.marked_codec import FP8_DTYPES, INT8, QuantCodec, codec

#: dtypes that the package can quantize
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
#: setting: a scale per row of a weight of 8-bit floats or plain int8
PER_ROW = "per_row"
#: settings of `quantize` only, with their defaults: in files they follow from the existing parts and their shapes
QUANTIZE_SETTINGS: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        **{name: MappingProxyType({PER_ROW: False}) for name in (*FP8_DTYPES, INT8)},
        "asym_w4a8_int8": MappingProxyType({"bits": 4, "symmetric": True, "codebook": True, "float_scales": False}),
    }
)
#: parts that do not depend on a weight's values
_KEPT = (INPUT_SCALE, "pre_quant_scale")
#: scratch bytes per value of quantizing, besides values, codes and chunks. Scaled formats: the scaled values, and for
#: int8 the noise. Others: measured for comfy_kitchen's pure-torch back end with any settings (its kernels need less),
#: rounded up
_SCALED_BYTES: Mapping[str, int] = MappingProxyType({**dict.fromkeys(FP8_DTYPES, 4), INT8: 8})
_BLOCK_BYTES: Mapping[str, int] = MappingProxyType(
    {"mxfp8": 20, "nvfp4": 56, INT8: 16, "convrot_w4a4": 16, "asym_w4a8_int8": 96}
)
#: copies of the scales, in float32, that exist at once; and bytes of single numbers and tables
_SCALE_COPIES = 4
_SMALL_BYTES = 4096


def quantize(
    weight: Tensor,
    format_name: str,
    settings: Mapping[str, object] | None = None,
    seed: int | None = None,
    scale: Tensor | None = None,
    name: str = "weight",
) -> PackedWeight:
    """Quantize `weight` to the format `format_name`, on its device, with its dtype as nominal dtype. `weight` is not
    modified.

    settings  override the defaults of the format and of QUANTIZE_SETTINGS
    seed      for stochastic rounding; None rounds to nearest
    scale     factor of a scaled format (one number, or one per row); None computes the smallest that holds the weight.
              Other formats compute their scales and ignore it
    name      of the weight, for errors

    Raises BadQuantization for an unknown format, one that cannot be quantized here, an unsupported shape, settings or
    `scale`, and numbers that are not finite.
    """
    options = dict(settings or {})
    extra = {key: options.pop(key, default) for key, default in QUANTIZE_SETTINGS.get(format_name, {}).items()}
    _check(weight, format_name, options, name)
    values = weight.detach() if weight.dtype in _FLOATS else weight.detach().float()
    kind = codec(format_name, options)
    if scale is not None and kind.is_scaled:
        _check_scale(scale, kind, tuple(weight.shape), name)
    if kind.is_scaled:
        parts = _scaled(values, kind, bool(extra[PER_ROW]), seed, scale)
    else:
        parts = kitchen_dispatch.quantize(format_name, values, {**kind.settings, **extra}, seed)
    return packed_weight(kind, parts, weight.shape, weight.dtype)


def can_requantize(like: PackedWeight) -> bool:
    """Whether new values can be packed like `like`: not for formats calibrated or produced by other programs."""
    kind = like.codec
    if not isinstance(kind, QuantCodec) or not kind.format.can_quantize:
        return False
    # rotated columns are quantized only with a scale per row
    rotated = kind.name == INT8 and not kind.is_scaled
    return not rotated or like.parts["weight_scale"].numel() == like.shape[0]


def requantize(values: Tensor, like: PackedWeight, seed: int | None = None, name: str = "weight") -> PackedWeight:
    """Pack `values` in the form of `like`, with new scales; parts that do not depend on values (input factors) are
    kept.

    The parts have the shapes and dtypes of the parts of `like`, and so the same size, and are on the device of
    `values`, wherever `like` is. `values` are not modified. This is how a patched weight is stored again: pass the seed
    of its name for stochastic rounding. Raises BadQuantization unless `can_requantize`.
    """
    kind = like.codec
    if not isinstance(kind, QuantCodec) or not can_requantize(like):
        raise BadQuantization(
            f"{name}: found a weight packed as {kind.name}, expected a format that can be quantized here"
        )
    settings = dict(kind.settings)
    scale = None
    if kind.is_scaled:
        scale = _least_scale(values, kind, like.parts["weight_scale"].numel() > 1)
        scale = _least_in_dtype(scale, like.parts["weight_scale"].dtype)  # codes are multiples of the stored scale
    elif kind.name == "asym_w4a8_int8":
        settings["bits"] = 8 * like.parts[WEIGHT].shape[1] // like.shape[1]
        settings["symmetric"] = "weight_correction" not in like.parts
        settings["codebook"] = "weight_codebook" in like.parts
        settings["float_scales"] = like.parts["weight_s_rel"].dtype is torch.float32
    elif "pre_quant_scale" in like.parts:
        values = values / like.parts["pre_quant_scale"].to(values)
    fresh = quantize(values, kind.name, settings, seed, scale, name)
    parts = {
        key: part.to(values.device) if key in _KEPT else _stored_like(part, fresh.parts[key], f"{name}: {key}")
        for key, part in like.parts.items()
    }
    return packed_weight(kind, parts, like.shape, like.dtype)


def requantize_scratch_bytes(like: PackedWeight) -> int:
    """Upper bound of the bytes that `requantize` needs besides its float32 `values` and its result, with or without a
    seed.

    For scaled formats it counts the simultaneous copies, for others it is based on measurements of the package. 0
    unless `can_requantize`.
    """
    kind = like.codec
    if not isinstance(kind, QuantCodec) or not can_requantize(like):
        return 0
    numel = math.prod(round_up(size, kind.format.pads_to) for size in like.shape)
    bytes_each = (_SCALED_BYTES if kind.is_scaled else _BLOCK_BYTES)[kind.name]
    if "pre_quant_scale" in like.parts:
        bytes_each += 4  # values divided by it
    chunk_bytes = min(numel, CHUNK_VALUES) * CHUNK_SCRATCH_BYTES if kind.name in (*FP8_DTYPES, "mxfp8") else 0
    scales_bytes = sum(4 * part.numel() for name, part in like.parts.items() if name != WEIGHT)
    return numel * bytes_each + chunk_bytes + _SCALE_COPIES * scales_bytes + _SMALL_BYTES


def _stored_like(like: Tensor, fresh: Tensor, what: str) -> Tensor:
    """Return the part `fresh` in the shape and dtype of `like`; one-byte types are reinterpreted bit by bit."""
    if fresh.numel() != like.numel():
        raise BadQuantization(f"{what}: found {tuple(fresh.shape)}, expected {tuple(like.shape)}, as it is stored")
    if fresh.dtype != like.dtype:
        one_byte = fresh.dtype.itemsize == like.dtype.itemsize == 1
        fresh = fresh.view(like.dtype) if one_byte else fresh.to(like.dtype)
    return fresh.reshape(like.shape)


def _check(weight: Tensor, format_name: str, settings: Mapping[str, object], name: str) -> None:
    if format_name not in FORMATS:
        raise BadQuantization(f"{name}: {unknown_name('format', format_name, FORMATS)}")
    kind, shape = FORMATS[format_name], tuple(weight.shape)
    if not kind.can_quantize:
        raise BadQuantization(f"{name}: {format_name} requires calibration elsewhere; it can only be read here")
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


def _check_scale(scale: Tensor, kind: QuantCodec, shape: tuple[int, ...], name: str) -> None:
    allowed = tuple(dict.fromkeys(kind.format.expected(shape, kind.settings)["weight_scale"]))
    if tuple(scale.shape) not in allowed:
        raise BadQuantization(
            f"{name}: found a scale of shape {tuple(scale.shape)}, expected {' or '.join(map(str, allowed))}"
        )
    if not scale.is_floating_point() or not bool((torch.isfinite(scale) & (scale > 0)).all()):
        found = f"{scale.dtype} from {scale.amin():g} to {scale.amax():g}"
        raise BadQuantization(f"{name}: found a scale of {found}, expected finite floating point numbers above 0")


def _least_scale(values: Tensor, kind: QuantCodec, per_row: bool) -> Tensor:
    """Return the smallest float32 factor, of the weight or of each row (a column), with which the format holds
    `values`."""
    sizes = values.abs()
    largest = sizes.reshape(sizes.shape[0], -1).amax(-1) if per_row else sizes.amax()
    if kind.name == INT8:
        scale = (largest.float() / 127.0).clamp(min=1e-30)
    else:
        scale = largest.float() / torch.finfo(FP8_DTYPES[kind.name]).max
        if values.dtype is torch.float16:  # the inverse must be representable in float16 too
            scale = scale.clamp(min=1.0 / torch.finfo(torch.float16).max)
        scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return _row_factor(scale, values.dim())


def _row_factor(scale: Tensor, dimensions: int) -> Tensor:
    """Return `scale` in a shape that multiplies a weight of `dimensions` dimensions, if it is one per row."""
    return scale.reshape(-1, *(1,) * (dimensions - 1)) if scale.numel() > 1 else scale


def _least_in_dtype(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the smallest positive number of a float `dtype` that is not below `scale` (float32, 0 or more); in
    float32."""
    limits = torch.finfo(dtype)
    rounded = scale.clamp(limits.smallest_normal * limits.eps, limits.max).to(dtype)
    if dtype.itemsize == 2:  # the next larger positive number has the next bit pattern
        rounded = (rounded.view(torch.int16) + (rounded.float() < scale).to(torch.int16)).view(dtype)
    return rounded.float()


def _scaled(
    values: Tensor, kind: QuantCodec, per_row: bool, seed: int | None, scale: Tensor | None
) -> dict[str, Tensor]:
    if kind.name == INT8 and values.dtype is torch.float16:  # float16 represents few scales exactly
        values = values.float()
    stored = _least_scale(values, kind, per_row) if scale is None else scale.to(values.device, torch.float32)
    factor = _row_factor(stored, values.dim())
    codes = _int8_codes(values, factor, seed) if kind.name == INT8 else _fp8_codes(values, factor, kind.name, seed)
    return {WEIGHT: codes, "weight_scale": stored}


def _fp8_codes(values: Tensor, factor: Tensor, format_name: str, seed: int | None) -> Tensor:
    dtype = FP8_DTYPES[format_name]
    largest = torch.finfo(dtype).max
    scaled = (values * (1.0 / factor).to(values.dtype)).clamp_(-largest, largest)
    return scaled.to(dtype) if seed is None else kitchen_dispatch.round_to_fp8(scaled, dtype, seed)


def _int8_codes(values: Tensor, factor: Tensor, seed: int | None) -> Tensor:
    scaled = values / factor.to(values.dtype)
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        noise = torch.rand(scaled.shape, dtype=scaled.dtype, generator=generator)
        scaled = scaled.add_(noise.to(scaled.device)).floor_()
    return scaled.round_().clamp_(-128.0, 127.0).to(torch.int8)
