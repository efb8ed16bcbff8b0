"""Timestep shifts of flow models that depend on the size of the latent. Torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass

#: beyond it every level of a flow except the last rounds to pure noise in float32, or none does; extrapolating the line
#: to the largest latents would overflow
_MOST_EXPONENT = 30.0


def _shift_of(exponent: float) -> float:
    return math.exp(max(-_MOST_EXPONENT, min(_MOST_EXPONENT, exponent)))


@dataclass(frozen=True, slots=True)
class ShiftBySize:
    """A shift that grows with the image: exp(mu), where mu is a line through two points.

    tokens      latent patches of a small and of a large image
    exponents   mu there
    """

    tokens: tuple[int, int]
    exponents: tuple[float, float]

    def exponent(self, tokens: int) -> float:
        """Return mu for `tokens` latent patches, extrapolated beyond both points."""
        (low, high), (start, stop) = self.tokens, self.exponents
        return start + (stop - start) * (tokens - low) / (high - low)

    def shift(self, tokens: int, steps: int) -> float:
        """Return the shift for `tokens` latent patches; independent of `steps`."""
        return _shift_of(self.exponent(tokens))


@dataclass(frozen=True, slots=True)
class ShiftBySizeAndSteps:
    """A shift that also depends on the number of steps: interpolated and extrapolated between two lines.

    largest  above this number of patches the second line applies, whatever the number of steps
    """

    few: ShiftBySize
    many: ShiftBySize
    steps: tuple[int, int]
    largest: int

    def shift(self, tokens: int, steps: int) -> float:
        """Return the shift for `tokens` latent patches and `steps` steps."""
        many = self.many.exponent(tokens)
        if tokens > self.largest:
            return _shift_of(many)
        few, (low, high) = self.few.exponent(tokens), self.steps
        return _shift_of(few + (many - few) * (steps - low) / (high - low))


@dataclass(frozen=True, slots=True)
class ShiftByRoot:
    """A shift that grows with the square root of the number of latent patches.

    tokens  latent patches for which the root is 1
    least   the shift of none
    more    added for as many as `tokens`
    """

    tokens: int
    least: float
    more: float

    def shift(self, tokens: int, steps: int) -> float:
        """Return the shift for `tokens` latent patches; independent of `steps`."""
        return math.sqrt(tokens / self.tokens) * self.more + self.least


@dataclass(frozen=True, slots=True)
class ExponentByRoot:
    """A shift that grows with the image: exp(mu), where mu is the square root of the number of latent patches.

    tokens  latent patches for which mu is 1
    """

    tokens: int

    def shift(self, tokens: int, steps: int) -> float:
        """Return the shift for `tokens` latent patches; independent of `steps`."""
        return _shift_of(math.sqrt(tokens / self.tokens))
