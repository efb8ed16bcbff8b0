"""Guidance with another scale in a part of a run.

Shape legend: B batch, C latent channels, H W latent height and width.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from modelpool.pool.inference.guidance.guiders import Guider, Predictions
from modelpool.pool.inference.sampling.schedules import SigmaTable
from modelpool.pool.values.core.run_options import CfgOverride
from modelpool.pool.values.core.sampling_facts import NoiseFacts
from modelpool.pool.values.core.shift_by_size import ShiftByRoot


class SwitchedGuidance(Guider):
    """One of two guiders in each step: `other` at levels for which `acts` returns true."""

    def __init__(self, usual: Guider, other: Guider, acts: Callable[[float], bool]) -> None:
        self.scale = usual.scale
        self.reads_base = usual.reads_base
        self._usual, self._other, self._acts = usual, other, acts

    def combine(self, predicted: Predictions, sigma: float) -> Tensor:
        """Return the guided prediction."""
        return self._at(sigma).combine(predicted, sigma)

    def combine_at(self, x_BCHW: Tensor, predicted: Predictions, sigma: float) -> Tensor:
        """Return the guided prediction for `x_BCHW`."""
        return self._at(sigma).combine_at(x_BCHW, predicted, sigma)

    def combine_clean(self, x_BCHW: Tensor, clean: Predictions, sigma: float) -> Tensor:
        """Return the guided clean latent."""
        return self._at(sigma).combine_clean(x_BCHW, clean, sigma)

    def _at(self, sigma: float) -> Guider:
        return self._other if self._acts(sigma) else self._usual


def acting_levels(option: CfgOverride, noise: NoiseFacts, table: SigmaTable) -> tuple[float, float]:
    """Return the lowest and the highest level at which `option` acts. Its start and end are shares of the noise levels
    of a model's training. The levels of Ideogram 4 are not shifted: its schedule is."""
    if isinstance(noise.shift_by_size, ShiftByRoot):
        return 1.0 - option.end, 1.0 - option.start if option.start else math.inf
    return table.sigma_at_percent(option.end), table.sigma_at_percent(option.start) if option.start else math.inf
