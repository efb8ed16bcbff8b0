"""The path from noise to image: how much of the image and of the noise a latent has at each noise level."""

from __future__ import annotations

import math
from dataclasses import dataclass

from modelpool.pool.inference.sampling.schedules import SigmaTable

#: share of the training timesteps after which the noise-to-image ratio of a flow, infinite at its first level, is read.
#: Source: the value used by ComfyUI
_FIRST_SHARE = 1e-4


@dataclass(frozen=True, slots=True)
class NoisePath:
    """A latent at level `sigma` is `image(sigma)` times the clean latent plus `sigma` times noise.

    is_flow  the image has the share 1 - sigma; else it has the share 1
    highest  a flow: the highest level at which ratios are finite
    """

    is_flow: bool = False
    highest: float = math.inf

    def finite(self, sigma: float) -> float:
        """Return `sigma`, or the highest level at which the ratio of noise and image is finite."""
        return min(sigma, self.highest)

    def image(self, sigma: float) -> float:
        """Return the share of the image at `sigma`."""
        return 1.0 - sigma if self.is_flow else 1.0

    def half_log_snr(self, sigma: float) -> float:
        """Return log(image / noise) at `sigma`, the variable of exponential integrators; infinite at 0."""
        return math.log(self.image(sigma) / sigma) if sigma > 0.0 else math.inf

    def ratio(self, sigma: float) -> float:
        """Return noise / image at `sigma`; infinite without an image."""
        image = self.image(sigma)
        return sigma / image if image else math.inf

    def sigma(self, half_log_snr: float) -> float:
        """Return the level with this ratio of image and noise; the inverse of `half_log_snr`."""
        return 1.0 / (math.exp(half_log_snr) + 1.0) if self.is_flow else math.exp(-half_log_snr)


#: noise is added to an image that keeps its scale
EXPLODING = NoisePath()


def flow_path(table: SigmaTable) -> NoisePath:
    """Return the path of a flow with the levels of `table`."""
    return NoisePath(is_flow=True, highest=table.sigma_at_percent(_FIRST_SHARE))
