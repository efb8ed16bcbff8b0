"""Noise whose level is a place along a cosine: Stable Cascade's. Pure arithmetic on Python floats.

At the way r, from 0 (clean) to 1 (noise), the image's share of the variance is

    cos((s + r) / (1 + s) * pi / 2) ** 2, divided by what that is at r = 0

and no more than `MOST_SHARE`, no less than `LEAST_SHARE`. Levels here are deviations of noise beside a latent of unit
scale, as everywhere in this folder.
Source: `DDPMWuerstchenScheduler` of diffusers; Nichol and Dhariwal 2021, "Improved DDPM", equation 17, for the cosine.
"""

from __future__ import annotations

import math

#: the s above
_START = 0.008
LEAST_SHARE, MOST_SHARE = 0.0001, 0.9999
_CLEAN = math.cos(_START / (1.0 + _START) * math.pi / 2.0) ** 2
#: what a level differs by, of itself, from the one a whole way further where the share is at one of its ends: runs of
#: many steps have several levels there, and the levels of a run fall. A thousandth of it is more than float32 rounds by
_SLOPE = 2e-4


def _of_share(share: float) -> float:
    return math.sqrt((1.0 - share) / share)


#: the noise at both ends of the way
SIGMA_MIN, SIGMA_MAX = _of_share(MOST_SHARE), _of_share(LEAST_SHARE)


def sigma(way: float, shift: float = 1.0) -> float:
    """The noise at `way`, 0 to 1. With `shift` so many times as much, within the same ends."""
    way = min(max(way, 0.0), 1.0)
    share = math.cos((_START + way) / (1.0 + _START) * math.pi / 2.0) ** 2 / _CLEAN
    free = _of_share(max(share, 1e-12)) * shift if share < 1.0 else 0.0
    lowest, highest = SIGMA_MIN * (1.0 + _SLOPE * way), SIGMA_MAX * (1.0 - _SLOPE * (1.0 - way))
    return min(max(free, lowest), highest)


def way(sigma: float) -> float:
    """How far along the way the noise is `sigma`: the inverse of `sigma` without a shift."""
    if sigma >= SIGMA_MAX * (1.0 - _SLOPE * (1.0 - _LAST_FREE)):
        return min(1.0, 1.0 - (1.0 - sigma / SIGMA_MAX) / _SLOPE)
    if sigma <= SIGMA_MIN * (1.0 + _SLOPE * _FIRST_FREE):
        return max(0.0, (sigma / SIGMA_MIN - 1.0) / _SLOPE)
    return _free_way(sigma)


def _free_way(sigma: float) -> float:
    """The way to `sigma` between the ends of the share."""
    angle = math.acos(math.sqrt(_CLEAN / (1.0 + sigma**2)))
    return angle / (math.pi / 2.0) * (1.0 + _START) - _START


#: between these the share is at neither end
_FIRST_FREE, _LAST_FREE = _free_way(SIGMA_MIN), _free_way(SIGMA_MAX)
