"""Strength of a hook at each step: keyframes over the completed fraction of the schedule.

Pure: a run's position among the keyframes is a value; each step creates a new one. Knows neither weights nor models.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from modelpool.pool.values.core.errors import unusable_field
from modelpool.pool.values.core.strength_keyframes import Interpolation as Interpolation

#: completed fraction of the schedule, 0.0 to 1.0 -> noise level; infinity at 0.0, 0 at 1.0
SigmaAtPercent: TypeAlias = Callable[[float], float]
#: tolerance: a keyframe that starts at a step's noise level has started at that step; the levels of a run are float32
SIGMA_TOLERANCE = 1.0 - 1e-6


@dataclass(frozen=True, slots=True)
class HookKeyframe:
    """The strength of a hook from a point of the schedule on.

    start_percent    completed fraction of the schedule at its start, 0.0 to 1.0
    guarantee_steps  minimum number of steps it lasts, however soon the next one starts; counts only for a keyframe that
                     starts inside the run
    """

    strength: float
    start_percent: float = 0.0
    guarantee_steps: int = 1

    def __post_init__(self) -> None:
        """Raises UnusableField for a share outside 0.0 to 1.0, a strength that is no number, fewer than 0 steps."""
        if not 0.0 <= self.start_percent <= 1.0:
            raise unusable_field("start_percent", self.start_percent, "a fraction between 0.0 and 1.0")
        if not math.isfinite(self.strength):
            raise unusable_field("strength", self.strength, "a finite number")
        if self.guarantee_steps < 0:
            raise unusable_field("guarantee_steps", self.guarantee_steps, "0 or more")


@dataclass(frozen=True, slots=True)
class KeyframePosition:
    """The position of a run among the keyframes.

    used_steps  steps that the keyframe at `index` was in force, including the one at `sigma`
    sigma       noise level of the last step; None before the first
    """

    index: int = 0
    used_steps: int = 0
    sigma: float | None = None


@dataclass(frozen=True, slots=True)
class HookKeyframes:
    """Keyframes, sorted by start. Without any, the strength is 1.0 throughout.

    The first one is in force from the start, whatever its `start_percent`.
    """

    keyframes: tuple[HookKeyframe, ...] = ()

    def __post_init__(self) -> None:
        """Sorts by start; equal starts stay in their order."""
        object.__setattr__(self, "keyframes", tuple(sorted(self.keyframes, key=lambda k: k.start_percent)))

    def strength_at(self, place: KeyframePosition) -> float:
        """Return the strength in force at `place`."""
        return self.keyframes[place.index].strength if self.keyframes else 1.0

    def advance(
        self, place: KeyframePosition, sigma: float, max_sigma: float, sigma_at: SigmaAtPercent
    ) -> KeyframePosition:
        """Return the position of the step at noise level `sigma` in a run that begins at `max_sigma`.

        A second call at the same level is the same step. After the guaranteed steps of the keyframe in force, the last
        of the following ones that have started takes over, or the first of them that has guaranteed steps.
        """
        if not self.keyframes or sigma == place.sigma:
            return place
        index, used_steps = place.index, place.used_steps
        if used_steps >= self._guaranteed(index, max_sigma, sigma_at):
            for following in range(index + 1, len(self.keyframes)):
                if sigma_at(self.keyframes[following].start_percent) < sigma * SIGMA_TOLERANCE:
                    break
                index, used_steps = following, 0
                if self._guaranteed(following, max_sigma, sigma_at) > 0:
                    break
        return replace(place, index=index, used_steps=used_steps + 1, sigma=sigma)

    def _guaranteed(self, index: int, max_sigma: float, sigma_at: SigmaAtPercent) -> int:
        keyframe = self.keyframes[index]
        return 0 if sigma_at(keyframe.start_percent) > max_sigma else keyframe.guarantee_steps


def interpolated(
    strength_start: float,
    strength_end: float,
    start_percent: float = 0.0,
    end_percent: float = 1.0,
    count: int = 5,
    method: Interpolation = Interpolation.LINEAR,
) -> HookKeyframes:
    """Return `count` keyframes, evenly spaced over a part of the schedule, strengths by `method`; the first has one
    guaranteed step.

    Raises UnusableField for fewer than 2, or an end before the start.
    """
    if count < 2:
        raise unusable_field("count", count, "2 keyframes or more")
    if end_percent < start_percent:
        raise unusable_field("end_percent", end_percent, f"start_percent ({start_percent}) or more")
    keyframes = []
    for number in range(count):
        share = number / (count - 1)
        strength = strength_start + (strength_end - strength_start) * method.weight(share)
        percent = start_percent + (end_percent - start_percent) * share
        keyframes.append(HookKeyframe(strength, min(percent, 1.0), 1 if number == 0 else 0))
    return HookKeyframes(tuple(keyframes))
