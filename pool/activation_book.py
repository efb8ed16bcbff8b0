"""`ActivationBook`: what measured peaks teach about estimates of activations. Torch-free.

Estimates are counted without a device (`pool.activation`); a device's libraries take more, or its margin is not used.
For each component, stage and kind of device the book keeps ratios of measured to estimated bytes, by powers of two of
the estimate, because a constant that a library takes weighs differently at each size. Rules
1. Up at once: a correction is never below what was measured in one of the last `REMEMBERED_RUNS` runs of such a size.
2. Down slowly: by a part of the way with each measured run.
3. Running out of memory is a step up: the true figure is above the estimate by an unknown amount.
4. Bounded: what was not measured moves an estimate by no more than `LOWEST` to `HIGHEST` times.
Same calls, same answers. One thread's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

from pool.recent import Recent
from pool.spec import ComponentKey, RunCost, Stage

#: a correction looks back so many runs
REMEMBERED_RUNS = 8
#: the way from a correction down to what was measured that one run takes
DOWN_SHARE = 0.25
#: room above the measured peak that is kept when a correction is below the estimate: kernels differ from run to run
HEADROOM = 1.05
#: one step after running out of memory
STEP_UP = 1.25
#: bounds of a correction, as multiples of the estimate; a measured peak may be above
LOWEST, HIGHEST = 0.5, 4.0
#: components, stages and sizes that are remembered
KEYS_REMEMBERED = 1024


@dataclass(frozen=True, slots=True)
class ActivationKey:
    """What a correction is about. `device_kind` is "cuda", "sim", ..."""

    component: ComponentKey
    stage: Stage
    device_kind: str


@dataclass(frozen=True, slots=True)
class ActivationError:
    """How good the estimates of one key were, as (estimated - measured) / measured over the remembered exact runs.

    runs          how many those are
    median_error  of the sizes of the errors; 0 is perfect
    worst_under   how far below the measured peak an estimate was, at most; 0 when none was
    worst_over    how far above, at most
    ran_out       runs that ran out of memory
    """

    key: ActivationKey
    runs: int
    median_error: float
    worst_under: float
    worst_over: float
    ran_out: int


@dataclass(frozen=True, slots=True)
class Correction:
    """What was learnt of one key at one size: measured as a multiple of estimated, the latest last."""

    factor: float = 1.0
    ratios: tuple[float, ...] = ()
    ran_out: int = 0

    def after_peak(self, ratio: float, exact: bool) -> Correction:
        """After a run whose peak was `ratio` times the estimate, or (not `exact`) at least that."""
        if not exact:
            return replace(self, factor=max(self.factor, ratio))
        ratios = (*self.ratios, ratio)[-REMEMBERED_RUNS:]
        floor = max(ratios)
        resting = max(floor, min(1.0, floor * HEADROOM), LOWEST)
        down = self.factor - (self.factor - resting) * DOWN_SHARE
        return replace(self, factor=max(resting, down), ratios=ratios)

    def after_running_out(self) -> Correction:
        """After a run that ran out of memory."""
        stepped = max(self.factor, min(HIGHEST, max(1.0, self.factor) * STEP_UP))
        return replace(self, factor=stepped, ran_out=self.ran_out + 1)


class ActivationBook:
    """Corrections of estimates, of bounded memory."""

    def __init__(self) -> None:
        self._corrections: Recent[tuple[ActivationKey, int], Correction] = Recent(KEYS_REMEMBERED)

    def corrected(self, key: ActivationKey, estimated_bytes: int) -> int:
        """What to plan with for a run that is estimated at `estimated_bytes`.

        A size that was never run is not planned below its estimate, and above it as far as its neighbours in size were.
        """
        known = self._corrections.kept((key, _size(estimated_bytes)))
        if known is None:
            near = (self._corrections.kept((key, _size(estimated_bytes) + step)) for step in (-1, 1))
            factor = max([1.0, *(min(HIGHEST, c.factor) for c in near if c is not None)])
        else:
            factor = known.factor
        return math.ceil(estimated_bytes * factor)

    def learn(self, key: ActivationKey, estimated_bytes: int, measured_bytes: int, exact: bool = True) -> None:
        """A run estimated at `estimated_bytes` held `measured_bytes`; without `exact`, that or more."""
        if estimated_bytes > 0:
            self._change(key, estimated_bytes, lambda c: c.after_peak(measured_bytes / estimated_bytes, exact))

    def ran_out(self, key: ActivationKey, estimated_bytes: int) -> None:
        """A run planned with the estimate `estimated_bytes` ran out of memory."""
        if estimated_bytes > 0:
            self._change(key, estimated_bytes, Correction.after_running_out)

    def report(self) -> tuple[ActivationError, ...]:
        """The error of the estimates of each key that anything was learnt of, by name."""
        by_key: dict[ActivationKey, list[Correction]] = {}
        for (key, _), correction in self._corrections.items():
            by_key.setdefault(key, []).append(correction)
        order = sorted(by_key, key=lambda k: (k.component, k.stage.value, k.device_kind))
        return tuple(_error(key, by_key[key]) for key in order)

    def _change(self, key: ActivationKey, estimated_bytes: int, change: Callable[[Correction], Correction]) -> None:
        place = (key, _size(estimated_bytes))
        self._corrections.put(place, change(self._corrections.kept(place) or Correction()))


def measured_activations(cost: RunCost, scratch_bytes: int, ahead_bytes: int = 0) -> tuple[int, bool] | None:
    """Bytes of activations that a finished run shows, and whether that is exact; None where nobody counted.

    `scratch_bytes` is the plan's figure for weights on their way, `ahead_bytes` what copies ahead may take beside the
    plan. A run with resident weights used neither. One that streams used an unknown part of them, so what is left is
    the least that its activations were.
    """
    if cost.working_bytes <= 0:
        return None
    if cost.streamed_bytes == 0:
        return cost.working_bytes, True
    return max(0, cost.working_bytes - scratch_bytes - ahead_bytes), False


def _size(estimated_bytes: int) -> int:
    return estimated_bytes.bit_length()


def _error(key: ActivationKey, corrections: list[Correction]) -> ActivationError:
    ratios = [ratio for correction in corrections for ratio in correction.ratios]
    errors = [1.0 / max(ratio, 1e-9) - 1.0 for ratio in ratios]
    return ActivationError(
        key=key,
        runs=len(ratios),
        median_error=median(abs(error) for error in errors) if errors else 0.0,
        worst_under=max([0.0, *(-error for error in errors)]),
        worst_over=max([0.0, *errors]),
        ran_out=sum(correction.ran_out for correction in corrections),
    )
