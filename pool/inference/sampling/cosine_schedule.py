"""The cosine noise schedule of Stable Cascade. Pure arithmetic on Python floats.

At position r, from 0 (clean) to 1 (noise), the signal's share of the variance is

    cos((s + r) / (1 + s) * pi / 2) ** 2, divided by its value at r = 0

clamped to `MIN_SHARE` and `MAX_SHARE`. Noise levels are standard deviations relative to a latent of unit scale, as
everywhere in this folder.
Source: `DDPMWuerstchenScheduler` of diffusers; Nichol and Dhariwal 2021, "Improved DDPM", equation 17, for the cosine.
"""

from __future__ import annotations

import math

#: the s above
_START = 0.008
MIN_SHARE, MAX_SHARE = 0.0001, 0.9999
_CLEAN = math.cos(_START / (1.0 + _START) * math.pi / 2.0) ** 2
#: relative slope of the noise level where the share is clamped: runs of many steps have several levels there, and the
#: levels of a run must fall strictly. A thousandth of it exceeds the rounding of float32
_SLOPE = 2e-4


def _of_share(share: float) -> float:
    return math.sqrt((1.0 - share) / share)


#: the noise at both ends
SIGMA_MIN, SIGMA_MAX = _of_share(MAX_SHARE), _of_share(MIN_SHARE)


def sigma(position: float, shift: float = 1.0) -> float:
    """Return the noise at `position`, 0 to 1; multiplied by `shift`, within the same limits."""
    position = min(max(position, 0.0), 1.0)
    share = math.cos((_START + position) / (1.0 + _START) * math.pi / 2.0) ** 2 / _CLEAN
    free = _of_share(max(share, 1e-12)) * shift if share < 1.0 else 0.0
    lowest, highest = SIGMA_MIN * (1.0 + _SLOPE * position), SIGMA_MAX * (1.0 - _SLOPE * (1.0 - position))
    return min(max(free, lowest), highest)


def position(sigma: float) -> float:
    """Return the position at which the noise is `sigma`: the inverse of `sigma` without a shift."""
    if sigma >= SIGMA_MAX * (1.0 - _SLOPE * (1.0 - _LAST_FREE)):
        return min(1.0, 1.0 - (1.0 - sigma / SIGMA_MAX) / _SLOPE)
    if sigma <= SIGMA_MIN * (1.0 + _SLOPE * _FIRST_FREE):
        return max(0.0, (sigma / SIGMA_MIN - 1.0) / _SLOPE)
    return _free_position(sigma)


def _free_position(sigma: float) -> float:
    """Return the position of `sigma` where the share is not clamped."""
    angle = math.acos(math.sqrt(_CLEAN / (1.0 + sigma**2)))
    return angle / (math.pi / 2.0) * (1.0 + _START) - _START


#: the share is not clamped between these positions
_FIRST_FREE, _LAST_FREE = _free_position(SIGMA_MIN), _free_position(SIGMA_MAX)
