"""The time inputs of a model in a part of the noise levels of its training."""

from __future__ import annotations

import math

import numpy as np

from modelpool.pool.inference.sampling.schedules import SigmaTable


def levels_between(start: float, end: float, table: SigmaTable) -> tuple[float, float]:
    """Return the lowest and the highest time input of the model in the part from `start` to `end`, shares of the noise
    levels from the highest one down; both are in it. The ends of all levels have no bound."""
    low, high = (
        # as time inputs are in a call
        float(np.float32(table.time_input(table.sigma_at_percent(share))))
        if 0 < share < 1
        else -math.inf
        if share
        else math.inf
        for share in (end, start)
    )
    return low, high
