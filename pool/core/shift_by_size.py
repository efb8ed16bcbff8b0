"""Shifts of flows that depend on the size of what is made, as frozen values. Torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass

#: beyond it every level of a flow but the last is noise alone as float32 has it, or none is; a line that goes on to the
#: largest latents would leave what floats hold
_MOST_EXPONENT = 30.0


def _shift_of(exponent: float) -> float:
    return math.exp(max(-_MOST_EXPONENT, min(_MOST_EXPONENT, exponent)))


@dataclass(frozen=True, slots=True)
class ShiftBySize:
    """A shift that grows with the image: exp(mu), and mu is a straight line through these two points.

    tokens      patches of the latent of a small and of a large image
    exponents   mu there
    """

    tokens: tuple[int, int]
    exponents: tuple[float, float]

    def exponent(self, tokens: int) -> float:
        """mu for a latent of so many patches; the line goes on beyond both points."""
        (low, high), (start, stop) = self.tokens, self.exponents
        return start + (stop - start) * (tokens - low) / (high - low)

    def shift(self, tokens: int, steps: int) -> float:
        """The shift for a latent of so many patches, in any number of steps."""
        return _shift_of(self.exponent(tokens))


@dataclass(frozen=True, slots=True)
class ShiftBySizeAndSteps:
    """A shift that depends on the steps of a run too: between the lines of two numbers of steps, and beyond them.

    largest  patches from which on the second line counts, in any number of steps
    """

    few: ShiftBySize
    many: ShiftBySize
    steps: tuple[int, int]
    largest: int

    def shift(self, tokens: int, steps: int) -> float:
        """The shift for a latent of so many patches in so many steps."""
        many = self.many.exponent(tokens)
        if tokens > self.largest:
            return _shift_of(many)
        few, (low, high) = self.few.exponent(tokens), self.steps
        return _shift_of(few + (many - few) * (steps - low) / (high - low))
