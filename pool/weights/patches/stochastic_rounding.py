"""Stochastic rounding to 8-bit floats, seeded by the weight's name.

Two variants are published, with equal distributions and different bytes. This is the older one: half-precision
arithmetic with noise drawn in half precision. It was chosen because the published patched 8-bit weights were computed
with it, and because its noise has 11 bits: the newer one's has 8, which moves the mean of a value by up to 1/512 of a
step.

Knows numbers; no patches. The result is a function of (values, dtype, seed, kind of device): a CUDA device uses its own
generator, every other device the CPU's numbers, so the simulated device gives the CPU's bytes.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

#: numbers rounded at once; the published bytes of larger weights depend on it
SLICE_ELEMENTS = 4096 * 4096
#: scratch bytes per number: at most ten half-precision tensors exist at once
ROUNDING_BYTES = 20


@dataclass(frozen=True, slots=True)
class _Layout:
    """The bit fields of an 8-bit float."""

    exponent_bits: int
    mantissa_bits: int
    bias: int


def seed_of(name: str) -> int:
    """Return the seed for the weight `name`: the CRC-32 of its UTF-8 bytes."""
    return zlib.crc32(name.encode())


def round_to(values: Tensor, dtype: torch.dtype, seed: int) -> Tensor:
    """Round `values` to `dtype`, on their device: stochastically to float8_e4m3fn and float8_e5m2, to nearest for any
    other.

    `values` are not modified. Numbers beyond the range of `dtype` become its largest number; numbers beyond the range
    of half precision (65504) or not finite become NaN if `dtype` has no infinity, as in the published bytes.
    """
    layout = _layout(dtype)
    if layout is None:
        return values.to(dtype)
    generator = torch.Generator(values.device if values.device.type == "cuda" else "cpu")
    generator.manual_seed(seed)
    if values.numel() < SLICE_ELEMENTS or values.ndim == 0:
        return _rounded(values, dtype, layout, generator)
    rows = max(1, round(values.shape[0] / (values.numel() / SLICE_ELEMENTS)))
    result = torch.empty_like(values, dtype=dtype, memory_format=torch.contiguous_format)
    for start in range(0, values.shape[0], rows):
        result[start : start + rows].copy_(_rounded(values[start : start + rows], dtype, layout, generator))
    return result


def rounding_scratch_bytes(like: Tensor) -> int:
    """Upper bound of the bytes that `round_to` needs besides values and result, for a weight stored as `like`.

    0 for dtypes that are rounded to nearest. The steps are half-precision tensors of the current slice.
    """
    if _layout(like.dtype) is None:
        return 0
    return min(like.numel(), 2 * SLICE_ELEMENTS) * ROUNDING_BYTES


def _layout(dtype: torch.dtype) -> _Layout | None:
    if dtype is torch.float8_e4m3fn:
        return _Layout(4, 3, 7)
    return _Layout(5, 2, 15) if dtype is torch.float8_e5m2 else None


def _rounded(values: Tensor, dtype: torch.dtype, layout: _Layout, generator: torch.Generator) -> Tensor:
    """Compute in half precision throughout: the rounding of each operation is part of the published bytes."""
    x = values.to(torch.float16)
    size = x.abs()
    exponent = size.log2().floor_().add_(layout.bias).clamp_(0, 2**layout.exponent_bits - 1)
    is_normal = exponent != 0
    scale = torch.exp2(exponent - layout.bias)
    least = 2.0 ** (1 - layout.bias)
    steps = torch.where(
        is_normal,
        (size / scale - 1.0) * 2**layout.mantissa_bits,
        size / (least * 2.0**-layout.mantissa_bits),
    )
    noise = torch.rand(x.shape, dtype=torch.float16, generator=generator, device=generator.device)
    mantissa = steps.add_(noise.to(x.device)).floor_().div_(2**layout.mantissa_bits)
    rounded = torch.where(is_normal, scale * (mantissa + 1.0), mantissa * least).mul_(x.sign())
    limits = torch.finfo(dtype)
    return rounded.clamp_(limits.min, limits.max).to(dtype)
