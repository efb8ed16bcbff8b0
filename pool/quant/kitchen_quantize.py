"""From values to the stored parts of packed formats, with comfy_kitchen. Pure functions of tensors.

Rounding to nearest, or up and down by chance with noise that depends on a seed alone: where it is ours it is drawn on
the host, so that every device rounds alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from modelpool.pool.quant.formats import WEIGHT, number
from modelpool.pool.quant.kitchen import Settings, package, padded

#: values that are rounded by chance at a time, and bytes for each of them that this takes in half-precision numbers
CHUNK_VALUES = 1 << 20
CHUNK_SCRATCH_BYTES = 20


def _quantize_mxfp8(weight: Tensor, settings: Settings, seed: int | None) -> dict[str, Tensor]:
    whole = padded(weight, 32)
    codes, scale = package().quantize_mxfp8(whole)
    if seed is not None:
        exponents = package().from_blocked(scale.view(torch.uint8), whole.shape[0], whole.shape[1] // 32)
        factors = torch.where(exponents == 0, 1.0, torch.exp2(exponents.float() - 127.0))
        blocks = whole.float().reshape(*factors.shape, 32) / factors.unsqueeze(-1)
        codes = fp8_by_chance(blocks.reshape(whole.shape), torch.float8_e4m3fn, seed)
    return {WEIGHT: codes, "weight_scale": scale}


def _quantize_nvfp4(weight: Tensor, settings: Settings, seed: int | None) -> dict[str, Tensor]:
    whole = padded(weight, 16)
    scale = (weight.abs().amax() / (448.0 * 6.0)).float()
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    codes, blocks = package().quantize_nvfp4(whole, scale)
    if seed is not None:
        factors = scale * package().from_blocked(blocks, whole.shape[0], whole.shape[1] // 16).float()
        noisy = _with_e2m1_noise(whole, factors, weight.shape, seed)
        codes = _e2m1_codes(noisy, signs=whole)
    return {WEIGHT: codes, "weight_scale": blocks, "weight_scale_2": scale}


def _with_e2m1_noise(whole: Tensor, factors: Tensor, shape: torch.Size, seed: int) -> Tensor:
    """Values in units of their block's scale, moved by up to 5/8 of the distance of E2M1 numbers.

    That is the noise of published stochastic rounding (golden/quant.2026-07, `nvfp4_stochastic`). There, a value that
    it moves beyond 7 becomes 4; here it becomes 6.
    """
    safe = torch.where(factors == 0, torch.ones_like(factors), factors)
    values = (whole.float().reshape(*factors.shape, 16) / safe.unsqueeze(-1)).reshape(whole.shape)
    binade = torch.exp2(torch.floor(torch.log2(values.abs())).clamp(min=-1.0))
    noise = torch.zeros_like(values)
    generator = torch.Generator().manual_seed(seed)
    noise[: shape[0], : shape[1]] = torch.rand(shape, generator=generator).to(values.device) - 0.5
    return values + noise * 0.625 * binade


def _e2m1_codes(values: Tensor, signs: Tensor) -> Tensor:
    """`values` rounded to the nearest E2M1 number (6 at most), even codes for ties; two codes a byte, first one high.

    A value that noise has moved over zero becomes a zero with the sign that it had.
    """
    steps = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=values.device)
    size = values.abs()
    above, below = torch.bucketize(size, steps, right=True), torch.bucketize(size, steps)
    codes = torch.where(above % 2 == 0, above, below)  # they differ on a tie only, and one of the two is even
    codes = (codes + 8 * (signs < 0)).to(torch.uint8)
    return codes[:, 0::2] << 4 | codes[:, 1::2]


def _quantize_convrot_int8(weight: Tensor, settings: Settings, seed: int | None) -> dict[str, Tensor]:
    options = {"stochastic_rounding": _kitchen_seed(seed)}
    size = number(settings, "convrot_groupsize")
    # the operation that the package registers with torch has no seed
    made_by = package().registry.get_implementation(
        "quantize_int8_convrot_weight", kwargs={"weight": weight, "group_size": size, **options}
    )
    codes, scale = made_by(weight, size, **options)
    return {WEIGHT: codes, "weight_scale": scale}


def _quantize_w4a4(weight: Tensor, settings: Settings, seed: int | None) -> dict[str, Tensor]:
    codes, scale = package().quantize_convrot_w4a4_weight(
        weight, number(settings, "convrot_groupsize"), stochastic_rounding=_kitchen_seed(seed)
    )
    return {WEIGHT: codes, "weight_scale": scale}


def _quantize_w4a8(weight: Tensor, settings: Settings, seed: int | None) -> dict[str, Tensor]:
    codes, s_rel, s_channel, correction, codebook = package().quantize_w4a8_int8_weight(
        weight,
        group_size=number(settings, "group_size"),
        convrot_groupsize=number(settings, "convrot_groupsize"),
        symmetric=bool(settings["symmetric"]),
        scale_dtype=torch.float32 if settings["float_scales"] else torch.float8_e4m3fn,
        codebook=bool(settings["codebook"]),
        stochastic_rounding=_kitchen_seed(seed),
        bits=number(settings, "bits"),
    )
    parts = {WEIGHT: codes, "weight_s_rel": s_rel, "weight_s_channel": s_channel}
    if codebook is not None:
        parts["weight_codebook"] = codebook
    if correction is not None:
        parts["weight_correction"] = correction
    return parts


def _kitchen_seed(seed: int | None) -> int:
    """The package's number for `seed`, for which 0 means to round to nearest."""
    return 0 if seed is None else max(seed, 1)


def fp8_by_chance(x: Tensor, dtype: torch.dtype, seed: int) -> Tensor:
    """`x` in the 8-bit float `dtype`, each number up or down by chance, with a byte of noise for each.

    Byte-equal to golden/stochastic_rounding.ck-u8.
    """
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randint(0, 256, x.shape, dtype=torch.uint8, generator=generator)
    rounded = torch.empty(x.shape, dtype=dtype, device=x.device)
    # each number is rounded on its own: some at a time take little memory
    for some, chances, into in zip(*(t.reshape(-1).split(CHUNK_VALUES) for t in (x, noise, rounded)), strict=True):
        into.copy_(package().stochastic_rounding_fp8(some, chances.to(x.device), dtype))
    return rounded


#: for each format: the parts of a weight; the seed is of rounding by chance, None rounds to nearest
QUANTIZERS: Mapping[str, Callable[[Tensor, Settings, int | None], dict[str, Tensor]]] = MappingProxyType(
    {
        "mxfp8": _quantize_mxfp8,
        "nvfp4": _quantize_nvfp4,
        "int8_tensorwise": _quantize_convrot_int8,
        "convrot_w4a4": _quantize_w4a4,
        "asym_w4a8_int8": _quantize_w4a8,
    }
)
