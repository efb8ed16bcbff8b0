"""8-bit floats to 16 bits and more, on the CPU, several numbers at once: torch converts them one by one.

The bits of an 8-bit float, moved to where a wider type has its sign, exponent and mantissa, are the same number times a
power of two, subnormal numbers included. Knows four pairs of types; what it does not know is left to torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn

#: below this torch is as fast
LEAST_ELEMENTS = 1 << 14
_TENSORS = (Tensor, nn.Parameter)


@dataclass(frozen=True, slots=True)
class _Move:
    """From one type to another.

    left     bits that the number moves to the left
    clears   bits that copies of the sign come to lie on
    scale    what the moved number is to be multiplied with
    largest  finite number of the 8-bit type; what is larger afterwards was infinite or no number
    """

    left: int
    clears: int
    scale: float
    largest: float


_MOVES: Mapping[tuple[torch.dtype, torch.dtype], _Move] = MappingProxyType(
    {
        (torch.float8_e4m3fn, torch.float16): _Move(7, 0x4000, 2.0**8, 448.0),
        (torch.float8_e4m3fn, torch.bfloat16): _Move(4, 0x7800, 2.0**120, 448.0),
        (torch.float8_e5m2, torch.float16): _Move(8, 0, 1.0, 57344.0),
        (torch.float8_e5m2, torch.bfloat16): _Move(5, 0x7000, 2.0**112, 57344.0),
    }
)


def converted(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x.to(dtype)`, bit for bit: the faster way where there is one.

    `x` itself when it has that type. Takes no memory beside the result's, but a second time that for float32.
    """
    between = torch.float16 if dtype is torch.float32 else dtype
    move = _MOVES.get((x.dtype, between))
    if move is None or not _is_plain(x):
        return x.to(dtype)
    bits = x.view(torch.int8).to(torch.int16).bitwise_left_shift_(move.left)
    if move.clears:
        bits.bitwise_and_(~move.clears)
    wide = bits.view(between)
    if move.scale != 1.0:
        wide.mul_(move.scale)
        low, high = torch.aminmax(wide)
        if not -move.largest <= low <= high <= move.largest:
            return x.to(dtype)
    return wide.to(dtype)


def _is_plain(x: Tensor) -> bool:
    """Whether `x` is numbers in the host's memory, and enough of them."""
    return (
        type(x) in _TENSORS
        and x.device.type == "cpu"
        and x.numel() >= LEAST_ELEMENTS
        and not x.requires_grad
        and not torch.compiler.is_compiling()
    )
