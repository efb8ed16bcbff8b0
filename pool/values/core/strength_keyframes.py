"""Strengths that change over the steps of a run: keyframes, and the interpolation between them. Torch-free.

A strength is a function of the step alone, so that a run that resumes at a step has the strength that it would have had
there.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import TypeAlias

#: (share of the steps, strength from there on), sorted by share, the first at 0
Keyframes: TypeAlias = tuple[tuple[float, float], ...]

#: different strengths of a run: each is another set of patched weights, and a change moves all weights that it touches
MAX_KEYFRAMES = MAX_LEVELS = 32
#: decimals of interpolated strengths: a cosine may differ between machines in its last bits
_DECIMALS = 6
#: a share such as 0.07 of 100 steps is not exactly a whole number
_TOLERANCE = 1e-6


class Interpolation(StrEnum):
    """Interpolation of the strength from one keyframe to another."""

    LINEAR = "linear"
    EASE_IN = "ease_in"
    EASE_OUT = "ease_out"
    EASE_IN_OUT = "ease_in_out"

    def weight(self, share: float) -> float:
        """Return the interpolation weight at `share` of the time; 0.0 at 0.0 and 1.0 at 1.0."""
        match self:
            case Interpolation.LINEAR:
                return share
            case Interpolation.EASE_IN:
                return share**2
            case Interpolation.EASE_OUT:
                return 1.0 - (1.0 - share) ** 2
            case Interpolation.EASE_IN_OUT:
                return (1.0 - math.cos(share * math.pi)) / 2.0


def strength_at(keyframes: Keyframes, interpolation: str, step: int, steps: int) -> float:
    """Return the strength in step number `step`, from 0, of `steps`.

    Without interpolation, the last keyframe that the beginning of the step has reached determines it. With one, it is
    interpolated at the beginning of the step; if there are more than `MAX_LEVELS` steps, at the beginning of the part
    of 1 / `MAX_LEVELS` of the schedule that the step begins in.
    """
    if interpolation and steps > MAX_LEVELS:
        step, steps = step * MAX_LEVELS // steps, MAX_LEVELS
    reached = [place for place, (share, _) in enumerate(keyframes) if share * steps <= step + _TOLERANCE]
    last = reached[-1] if reached else 0
    start, strength = keyframes[last]
    if not interpolation or last == len(keyframes) - 1:
        return strength
    end, following = keyframes[last + 1]
    weight = Interpolation(interpolation).weight(max(0.0, step / steps - start) / (end - start))
    return round(strength + (following - strength) * weight, _DECIMALS)


def strongest(keyframes: Keyframes) -> float:
    """Return the strength that is furthest from 0; the first of several."""
    return max((strength for _, strength in keyframes), key=abs)
