"""`ActivationBook`: what measured peaks teach about estimates of activations. Torch-free.

Estimates are counted without a device (`pool.tracing.activation_bytes`); a device's libraries take more, or its margin
is not used. For each component, stage, division and kind of device the book keeps what was measured beside what was
estimated, by powers of two of the estimate, because a constant that a library takes weighs differently at each size.
Rules 1. Up at once: a correction is never below what was measured in one of the last `REMEMBERED_RUNS` runs of such a
size. 2. Down slowly: by a part of the way with each measured run. All runs are one window: exact peaks push old lower
bounds
   out of it, and lower bounds push out old peaks; without any peak a correction above the estimate comes down to that,
   since it may itself be why later runs stream and are not measured exactly.
3. Running out of memory is a step up: the true figure is above the estimate by an unknown amount. Each run that ends
   well takes a part of the step back: it may have been a moment's bad luck.
4. Bounded: what was not measured moves an estimate by no more than `LOWEST` to `HIGHEST` times, and what was measured
   at other sizes raises it by no more than `OTHER_SIZES` times.
5. A correction is for planning weights, which changes no image. What may divide a run, which can, is a peak that a
   run of just this kind had (`most_measured`).
Same calls, same answers. One thread's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

from modelpool.pool.core.lru_cache import Recent
from modelpool.pool.specs.spec import ComponentKey, RunCost, Stage

#: a correction looks back so many runs
REMEMBERED_RUNS = 8
#: the way from a correction down to what was measured that one run takes
DOWN_SHARE = 0.25
#: room above the measured peak that is kept when a correction is below the estimate: kernels differ from run to run
HEADROOM = 1.05
#: one step after running out of memory
STEP_UP = 1.25
#: what is left of a step when it is that near to what was measured is forgotten
STEP_FORGOTTEN = 1.01
#: a size that was never run is raised by its neighbours in size no further than this
OTHER_SIZES = 1.25
#: bounds of a correction, as multiples of the estimate; a measured peak may be above
LOWEST, HIGHEST = 0.5, 4.0
#: components, stages and sizes that are remembered
KEYS_REMEMBERED = 1024


@dataclass(frozen=True, slots=True)
class ActivationKey:
    """What a correction is about: runs of one component, whole or divided in one way (`batch`, `tile`: as
    `pool.specs.spec.Division`), since whole runs and tiles hold other things; so do runs of several tasks `together`.
    `device_kind` is "cuda", "sim", ..."""

    component: ComponentKey
    stage: Stage
    device_kind: str
    batch: int = 0
    tile: int = 0
    together: int = 1


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
class Seen:
    """A run that ended well, estimated at `estimated_bytes`: it held `measured_bytes`; unless `exact`, that or more."""

    estimated_bytes: int
    measured_bytes: int
    exact: bool

    @property
    def ratio(self) -> float:
        """What it held as a multiple of the estimate."""
        return self.measured_bytes / self.estimated_bytes


@dataclass(frozen=True, slots=True)
class Correction:
    """What was learnt of one key at one size, as multiples of estimates; the latest last.

    measured  what the exact peaks come to; 1 before the first
    seen      what the remembered runs held
    step      what running out of memory raised it to; 0 when that is over
    ran_out   how often that was
    """

    measured: float = 1.0
    seen: tuple[Seen, ...] = ()
    step: float = 0.0
    ran_out: int = 0

    @property
    def factor(self) -> float:
        """What to multiply an estimate by."""
        return max([self.measured, self.step, *(run.ratio for run in self.seen)])

    @property
    def peaks(self) -> tuple[Seen, ...]:
        """Those of the remembered runs that were measured exactly."""
        return tuple(run for run in self.seen if run.exact)

    @property
    def ratios(self) -> tuple[float, ...]:
        """The exact peaks as multiples of the estimates."""
        return tuple(run.ratio for run in self.peaks)

    def after_peak(self, estimated_bytes: int, measured_bytes: int, exact: bool) -> Correction:
        """After a run that ended well with such a peak, or (not `exact`) that or more."""
        found = replace(self, seen=(*self.seen, Seen(estimated_bytes, measured_bytes, exact))[-REMEMBERED_RUNS:])
        if exact:
            floor = max(found.ratios)
            resting = max(floor, min(1.0, floor * HEADROOM), LOWEST)
        else:  # a lower bound does not lower what a remembered peak says
            resting = self.measured if found.peaks else min(1.0, self.measured)
        down = self.measured - (self.measured - resting) * DOWN_SHARE
        return replace(found, measured=max(resting, down))._calmer()

    def after_running_out(self) -> Correction:
        """After a run that ran out of memory."""
        step = min(HIGHEST, max(1.0, self.factor) * STEP_UP)
        return replace(self, step=max(self.step, step), ran_out=self.ran_out + 1)

    def _calmer(self) -> Correction:
        """With less of a step up."""
        settled = replace(self, step=0.0).factor
        step = self.step - (self.step - settled) * DOWN_SHARE
        return replace(self, step=step if step > settled * STEP_FORGOTTEN else 0.0)


class ActivationBook:
    """Corrections of estimates, of bounded memory."""

    def __init__(self) -> None:
        self._corrections: Recent[tuple[ActivationKey, int], Correction] = Recent(KEYS_REMEMBERED)

    def corrected(self, key: ActivationKey, estimated_bytes: int) -> int:
        """What to plan with for a run that is estimated at `estimated_bytes`.

        A size that was never run is not planned below its estimate, and above it as exact peaks of its neighbours in
        size were, within `OTHER_SIZES`.
        """
        known = self._corrections.kept((key, _size(estimated_bytes)))
        if known is None:
            near = (self._corrections.kept((key, _size(estimated_bytes) + step)) for step in (-1, 1))
            ratios = [ratio for c in near if c is not None for ratio in c.ratios]
            factor = min(OTHER_SIZES, max([1.0, *ratios]))
        else:
            factor = known.factor
        return math.ceil(estimated_bytes * factor)

    def most_measured(self, key: ActivationKey, estimated_bytes: int) -> int:
        """The largest peak that was measured exactly in one of the remembered runs with just this estimate; 0 when
        there was none."""
        known = self._corrections.kept((key, _size(estimated_bytes)))
        peaks = () if known is None else known.peaks
        return max((run.measured_bytes for run in peaks if run.estimated_bytes == estimated_bytes), default=0)

    def learn(self, key: ActivationKey, estimated_bytes: int, measured_bytes: int, exact: bool = True) -> None:
        """A run estimated at `estimated_bytes` held `measured_bytes`; without `exact`, that or more."""
        if estimated_bytes > 0:
            self._change(key, estimated_bytes, lambda c: c.after_peak(estimated_bytes, measured_bytes, exact))

    def ran_out(self, key: ActivationKey, estimated_bytes: int) -> None:
        """A run planned with the estimate `estimated_bytes` ran out of memory, although it had all that was planned."""
        if estimated_bytes > 0:
            self._change(key, estimated_bytes, Correction.after_running_out)

    def report(self) -> tuple[ActivationError, ...]:
        """The error of the estimates of each key that anything was learnt of, by name."""
        by_key: dict[ActivationKey, list[Correction]] = {}
        for (key, _), correction in self._corrections.items():
            by_key.setdefault(key, []).append(correction)
        order = sorted(by_key, key=lambda k: (k.component, k.stage.value, k.device_kind, k.together))
        return tuple(_error(key, by_key[key]) for key in order)

    def _change(self, key: ActivationKey, estimated_bytes: int, change: Callable[[Correction], Correction]) -> None:
        place = (key, _size(estimated_bytes))
        self._corrections.put(place, change(self._corrections.kept(place) or Correction()))


def measured_activations(cost: RunCost, scratch_bytes: int) -> tuple[int, bool] | None:
    """Bytes of activations that a finished run shows, and whether that is exact; None where nobody counted.

    `scratch_bytes` is the plan's figure for weights on their way. A run with resident weights used none of it. One that
    streams used an unknown part of it, so what is left is the least that its activations were.
    """
    if cost.working_bytes <= 0:
        return None
    if cost.streamed_bytes == 0:
        return cost.working_bytes, True
    return max(0, cost.working_bytes - scratch_bytes), False


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
