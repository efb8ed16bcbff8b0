"""From a weight to its packed form, and back to it after patching.

Rounding to nearest, or by chance with a seed: then a patch smaller than a step of the format survives on average. With
the seed that belongs to a weight's name (`pool.patches.stochastic_rounding.seed_of`) the same patches give the same
bytes everywhere. 8-bit floats are rounded by chance as these formats are published, with a byte of noise a number
(golden/quant.2026-07); plain 8-bit weights have noise of their own kind (`pool.patches.stochastic_rounding`). Knows no
file. Source: comfyui-behaviour facts, sections 2 and 2.1; golden/quant.2026-07.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from modelpool.pool.core.errors import BadQuantization, unknown_name
from modelpool.pool.ops.packed import PackedWeight, packed_weight
from modelpool.pool.quant import codecs as anywhere
from modelpool.pool.quant.formats import FORMATS, INPUT_SCALE, WEIGHT, misfit, rotates, round_up
from modelpool.pool.quant.kitchen_quantize import CHUNK_SCRATCH_BYTES, CHUNK_VALUES
from modelpool.pool.quant.quant_codec import FP8_DTYPES, INT8, QuantCodec, codec

#: what the package's conversions take
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
#: a scale for each row of a weight of 8-bit floats or plain int8
PER_ROW = "per_row"
#: settings of `quantize` only, with their defaults: files show them by the parts that there are and by their shapes
ONLY_HERE: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        **{name: MappingProxyType({PER_ROW: False}) for name in (*FP8_DTYPES, INT8)},
        "asym_w4a8_int8": MappingProxyType({"bits": 4, "symmetric": True, "codebook": True, "float_scales": False}),
    }
)
#: parts that do not follow from a weight's values
_KEPT = (INPUT_SCALE, "pre_quant_scale")
#: bytes for each value that storing takes beside the values and the codes, and chunks of them. Of scaled formats: the
#: scaled values, and for int8 the noise. Of the others: what comfy_kitchen's pure-torch back end was measured to take
#: with any settings (its kernels take less), rounded up
_SCALED_BYTES: Mapping[str, int] = MappingProxyType({**dict.fromkeys(FP8_DTYPES, 4), INT8: 8})
_BLOCK_BYTES: Mapping[str, int] = MappingProxyType(
    {"mxfp8": 20, "nvfp4": 56, INT8: 16, "convrot_w4a4": 16, "asym_w4a8_int8": 96}
)
#: copies of the scales, in float32, that are alive at once; and bytes of single numbers and tables
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
    """`weight` in the format `format_name`, standing for its own dtype, on its own device. `weight` is not written.

    settings  of the format, beside its defaults, and those of ONLY_HERE
    seed      round by chance with it; None rounds to nearest
    scale     factor of a scaled format (one number, or one for each row); None takes the least that holds the weight.
              Other formats find their scales themselves and do not read it
    name      of the weight, for errors

    Raises BadQuantization for an unknown format, one that cannot be made here, a shape, settings or a `scale` that it
    does not take, and numbers that are not finite.
    """
    given = dict(settings or {})
    only = {key: given.pop(key, default) for key, default in ONLY_HERE.get(format_name, {}).items()}
    _check(weight, format_name, given, name)
    values = weight.detach() if weight.dtype in _FLOATS else weight.detach().float()
    kind = codec(format_name, given)
    if scale is not None and kind.is_scaled:
        _check_scale(scale, kind, tuple(weight.shape), name)
    if kind.is_scaled:
        parts = _scaled(values, kind, bool(only[PER_ROW]), seed, scale)
    else:
        parts = anywhere.quantize(format_name, values, {**kind.settings, **only}, seed)
    return packed_weight(kind, parts, weight.shape, weight.dtype)


def can_requantize(like: PackedWeight) -> bool:
    """Whether new values can be stored in the form of `like`: not where calibration or another program made it."""
    kind = like.codec
    if not isinstance(kind, QuantCodec) or not kind.format.can_quantize:
        return False
    # rotated columns are quantized by rows only
    rotated = kind.name == INT8 and not kind.is_scaled
    return not rotated or like.parts["weight_scale"].numel() == like.shape[0]


def requantize(values: Tensor, like: PackedWeight, seed: int | None = None, name: str = "weight") -> PackedWeight:
    """`values` in the form of `like`, with scales found anew; what else `like` holds (input factors) stays.

    The parts have the shapes and dtypes of those of `like`: as many bytes. `values` are not written. This is how a
    patched weight goes back into storage: give the seed of its name for rounding by chance. Raises BadQuantization
    where `can_requantize` says no.
    """
    kind = like.codec
    if not isinstance(kind, QuantCodec) or not can_requantize(like):
        raise BadQuantization(f"{name}: found a weight packed as {kind.name}, expected a format that is made here")
    settings = dict(kind.settings)
    scale = None
    if kind.is_scaled:
        scale = _least_scale(values, kind, like.parts["weight_scale"].numel() > 1)
        scale = _held_by(scale, like.parts["weight_scale"].dtype)  # codes are multiples of what will be stored
    elif kind.name == "asym_w4a8_int8":
        settings["bits"] = 8 * like.parts[WEIGHT].shape[1] // like.shape[1]
        settings["symmetric"] = "weight_correction" not in like.parts
        settings["codebook"] = "weight_codebook" in like.parts
        settings["float_scales"] = like.parts["weight_s_rel"].dtype is torch.float32
    elif "pre_quant_scale" in like.parts:
        values = values / like.parts["pre_quant_scale"].to(values.dtype)
    fresh = quantize(values, kind.name, settings, seed, scale, name)
    parts = {
        key: part if key in _KEPT else _in_form_of(part, fresh.parts[key], f"{name}: {key}")
        for key, part in like.parts.items()
    }
    return packed_weight(kind, parts, like.shape, like.dtype)


def requantize_scratch_bytes(like: PackedWeight) -> int:
    """Bytes that `requantize` needs at most beside its float32 `values` and its result, with or without a seed.

    A bound: for scaled formats of the copies that are alive at once, for others of what the package was measured to
    take. 0 where `can_requantize` says no.
    """
    kind = like.codec
    if not isinstance(kind, QuantCodec) or not can_requantize(like):
        return 0
    numel = math.prod(round_up(size, kind.format.pads_to) for size in like.shape)
    bytes_each = (_SCALED_BYTES if kind.is_scaled else _BLOCK_BYTES)[kind.name]
    if "pre_quant_scale" in like.parts:
        bytes_each += 4  # values without it
    chunk_bytes = min(numel, CHUNK_VALUES) * CHUNK_SCRATCH_BYTES if kind.name in (*FP8_DTYPES, "mxfp8") else 0
    scales_bytes = sum(4 * part.numel() for name, part in like.parts.items() if name != WEIGHT)
    return numel * bytes_each + chunk_bytes + _SCALE_COPIES * scales_bytes + _SMALL_BYTES


def _in_form_of(like: Tensor, fresh: Tensor, what: str) -> Tensor:
    """The part `fresh` in the shape and dtype of `like`; types of one byte are names of the same bits."""
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
    """The least float32 factor of the whole weight, or of each row (a column), with which the format holds `values`."""
    sizes = values.abs()
    largest = sizes.reshape(sizes.shape[0], -1).amax(-1) if per_row else sizes.amax()
    if kind.name == INT8:
        scale = (largest.float() / 127.0).clamp(min=1e-30)
    else:
        scale = largest.float() / torch.finfo(FP8_DTYPES[kind.name]).max
        if values.dtype is torch.float16:  # whose inverse must be a float16 too
            scale = scale.clamp(min=1.0 / torch.finfo(torch.float16).max)
        scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return _by_rows(scale, values.dim())


def _by_rows(scale: Tensor, dimensions: int) -> Tensor:
    """`scale` in the shape that multiplies a weight of so many dimensions, where it is one for each row."""
    return scale.reshape(-1, *(1,) * (dimensions - 1)) if scale.numel() > 1 else scale


def _held_by(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The least number that is not below `scale` (float32, 0 or more) and above 0 in a float `dtype`; in float32."""
    limits = torch.finfo(dtype)
    held = scale.clamp(limits.smallest_normal * limits.eps, limits.max).to(dtype)
    if dtype.itemsize == 2:  # the next number above a positive one has the next bits
        held = (held.view(torch.int16) + (held.float() < scale).to(torch.int16)).view(dtype)
    return held.float()


def _scaled(
    values: Tensor, kind: QuantCodec, per_row: bool, seed: int | None, scale: Tensor | None
) -> dict[str, Tensor]:
    if kind.name == INT8 and values.dtype is torch.float16:  # which holds few scales exactly
        values = values.float()
    stored = _least_scale(values, kind, per_row) if scale is None else scale.to(values.device, torch.float32)
    factor = _by_rows(stored, values.dim())
    codes = _int8_codes(values, factor, seed) if kind.name == INT8 else _fp8_codes(values, factor, kind.name, seed)
    return {WEIGHT: codes, "weight_scale": stored}


def _fp8_codes(values: Tensor, factor: Tensor, format_name: str, seed: int | None) -> Tensor:
    dtype = FP8_DTYPES[format_name]
    largest = torch.finfo(dtype).max
    scaled = (values * (1.0 / factor).to(values.dtype)).clamp_(-largest, largest)
    return scaled.to(dtype) if seed is None else anywhere.round_to_fp8(scaled, dtype, seed)


def _int8_codes(values: Tensor, factor: Tensor, seed: int | None) -> Tensor:
    scaled = values / factor.to(values.dtype)
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        noise = torch.rand(scaled.shape, dtype=scaled.dtype, generator=generator)
        scaled = scaled.add_(noise.to(scaled.device)).floor_()
    return scaled.round_().clamp_(-128.0, 127.0).to(torch.int8)
