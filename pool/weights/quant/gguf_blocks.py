"""Dequantizes blocks of ggml's formats: pure functions of tensors, on any device.

A block is a row of bytes: one or two factors in float16, codes of a few bits, and for the K formats factors of
sub-blocks. Each function maps blocks of shape (blocks, bytes per block) to float32 of shape (blocks, values per block),
equal bit for bit to `gguf.quants.dequantize`.
They run where the weights are; the package's run in numpy. On one CPU thread those take 2.2 times as long for Q8_0, and
0.4 to 0.6 times as long for Q4_K, Q5_0 and Q6_K (3,072 x 3,072 values).
Source: ggml's block layouts (ggml-common.h, MIT) as the `gguf` package 0.19 (MIT) has them in Python.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

#: values per block of the K formats
_K = 256
_NIBBLES = (0, 4)
_PAIRS = (0, 2, 4, 6)
_BITS = tuple(range(8))


def _split(blocks: Tensor, *sizes: int) -> tuple[Tensor, ...]:
    """Split the bytes of each block into pieces of `sizes` and the remainder."""
    return torch.split(blocks, [*sizes, blocks.shape[1] - sum(sizes)], dim=1)


def _halves(piece: Tensor) -> Tensor:
    """Convert bytes of float16 numbers to float32."""
    return piece.contiguous().view(torch.float16).float()


def _fields(piece: Tensor, width: int, shifts: Sequence[int]) -> Tensor:
    """Return the bit fields of each `width` bytes: the lowest field of all of them, then the next; as uint8, flat."""
    shift = torch.tensor(shifts, dtype=torch.uint8, device=piece.device).reshape(1, 1, -1, 1)
    mask = (1 << (8 // len(shifts))) - 1
    return ((piece.reshape(piece.shape[0], -1, 1, width) >> shift) & mask).reshape(piece.shape[0], -1)


def _q8_0(blocks: Tensor) -> Tensor:
    d, q = _split(blocks, 2)
    return q.contiguous().view(torch.int8).float() * _halves(d)


def _q4_0(blocks: Tensor) -> Tensor:
    d, q = _split(blocks, 2)
    return _halves(d) * (_fields(q, 16, _NIBBLES).float() - 8.0)


def _q4_1(blocks: Tensor) -> Tensor:
    d, m, q = _split(blocks, 2, 2)
    return _halves(d) * _fields(q, 16, _NIBBLES).float() + _halves(m)


def _fifth_bits(piece: Tensor) -> Tensor:
    """Return 32 bits in order, each shifted to the fifth bit of a code."""
    shift = torch.arange(8, dtype=torch.uint8, device=piece.device)
    return ((piece.unsqueeze(-1) >> shift) & 1).reshape(piece.shape[0], 32) << 4


def _q5_0(blocks: Tensor) -> Tensor:
    d, high, low = _split(blocks, 2, 4)
    return _halves(d) * ((_fields(low, 16, _NIBBLES) | _fifth_bits(high)).float() - 16.0)


def _q5_1(blocks: Tensor) -> Tensor:
    d, m, high, low = _split(blocks, 2, 2, 4)
    return _halves(d) * (_fields(low, 16, _NIBBLES) | _fifth_bits(high)).float() + _halves(m)


def _q2_k(blocks: Tensor) -> Tensor:
    scales, q, d, d_min = _split(blocks, _K // 16, _K // 4, 2)
    scale = (_halves(d) * (scales & 15).float()).unsqueeze(-1)
    least = (_halves(d_min) * (scales >> 4).float()).unsqueeze(-1)
    return (scale * _fields(q, 32, _PAIRS).float().reshape(-1, 16, 16) - least).reshape(-1, _K)


def _q3_k(blocks: Tensor) -> Tensor:
    mask, low, scales, d = _split(blocks, _K // 8, _K // 4, 12)
    low_scales, high_scales = _split(scales, 8)
    scale = (_fields(low_scales, 8, _NIBBLES) | (_fields(high_scales, 4, _PAIRS) << 4)).float() - 32.0
    # a set bit of the mask adds nothing, an unset one subtracts four
    missing = (_fields(mask, 32, _BITS) ^ 1).float() * 4.0
    codes = _fields(low, 32, _PAIRS).float() - missing
    return ((_halves(d) * scale).unsqueeze(-1) * codes.reshape(-1, 16, 16)).reshape(-1, _K)


def _scales_and_minima(piece: Tensor) -> tuple[Tensor, Tensor]:
    """Return eight scales and eight minima of 6 bits from 12 bytes: the last four of each are spread over all bytes."""
    first, second, third = piece[:, :4], piece[:, 4:8], piece[:, 8:]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 2) & 48)), dim=1)
    minima = torch.cat((second & 63, (third >> 4) | ((second >> 2) & 48)), dim=1)
    return scales.float(), minima.float()


def _q4_k(blocks: Tensor) -> Tensor:
    d, d_min, packed, q = _split(blocks, 2, 2, 12)
    scales, minima = _scales_and_minima(packed)
    codes = _fields(q, 32, _NIBBLES).float().reshape(-1, 8, 32)
    return ((_halves(d) * scales).unsqueeze(-1) * codes - (_halves(d_min) * minima).unsqueeze(-1)).reshape(-1, _K)


def _q5_k(blocks: Tensor) -> Tensor:
    d, d_min, packed, high, low = _split(blocks, 2, 2, 12, _K // 8)
    scales, minima = _scales_and_minima(packed)
    codes = (_fields(low, 32, _NIBBLES) | (_fields(high, 32, _BITS) << 4)).float().reshape(-1, 8, 32)
    return ((_halves(d) * scales).unsqueeze(-1) * codes - (_halves(d_min) * minima).unsqueeze(-1)).reshape(-1, _K)


def _q6_k(blocks: Tensor) -> Tensor:
    low, high, scales, d = _split(blocks, _K // 2, _K // 4, _K // 16)
    scale = _halves(d) * scales.contiguous().view(torch.int8).float()
    codes = (_fields(low, 64, _NIBBLES) | (_fields(high, 32, _PAIRS) << 4)).float() - 32.0
    return (scale.unsqueeze(-1) * codes.reshape(-1, 16, 16)).reshape(-1, _K)


#: by ggml's name of the format
BLOCKS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "Q8_0": _q8_0,
        "Q4_0": _q4_0,
        "Q4_1": _q4_1,
        "Q5_0": _q5_0,
        "Q5_1": _q5_1,
        "Q2_K": _q2_k,
        "Q3_K": _q3_k,
        "Q4_K": _q4_k,
        "Q5_K": _q5_k,
        "Q6_K": _q6_k,
    }
)
