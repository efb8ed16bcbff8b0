"""Which tokens of an image a text encoder writes. Torch-free and without numpy."""

from __future__ import annotations

from dataclasses import dataclass

from modelpool.pool.values.specs.wire_value import WireValue

#: pixels along a side of the part of an image that a token stands for which a text encoder writes
TOKEN_SIDE = 32


@dataclass(frozen=True, slots=True)
class WrittenTokens(WireValue):
    """The tokens of an image that a text encoder writes: for an image of this width and height in pixels, drawn with
    this seed."""

    width: int
    height: int
    seed: int
