"""`ActivationCalibration`: corrects estimates of activation bytes by measured peaks. Torch-free.

Estimates are counted without a device (`pool.weights.tracing.activation_bytes`); the libraries of a device take more,
or its margin is not used. For each component, stage, execution mode and device kind, measurements are stored with their
estimates, by powers of two of the estimate, because a constant overhead has a different weight at each size.

Rules
1. Up at once: a correction is never below the measurements of the last `REMEMBERED_RUNS` runs of that size.
2. Down slowly: by a fraction with each measured run. All runs share one window: exact peaks displace old lower bounds,
   and lower bounds displace old peaks; without any peak a correction above the estimate comes down to it, since it may
   itself be why later runs stream and are not measured exactly.
3. Running out of memory is a step up: the true value is above the estimate by an unknown amount. Each successful run
   takes back a part of the step: the cause may have been temporary.
4. Bounded: unmeasured corrections stay within `LOWEST` to `HIGHEST` times the estimate, and measurements at other sizes
   raise it by at most `OTHER_SIZES` times.
5. Corrections are for planning weights, which changes no image. A run is divided, which can, only by the measured peak
   of an equal run (`most_measured`).

Deterministic. Not thread-safe.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

from modelpool.pool.values.core.lru_cache import LruCache
from modelpool.pool.values.specs.spec import ComponentKey, RunCost, Stage

#: number of runs that a correction remembers
REMEMBERED_RUNS = 8
#: fraction of the distance down to the measurement that one run takes
DOWN_SHARE = 0.25
#: margin above the measured peak if a correction is below the estimate: kernels differ between runs
HEADROOM = 1.05
#: one step after running out of memory
STEP_UP = 1.25
#: a step this close to the measurement is dropped
STEP_FORGOTTEN = 1.01
#: limit of raising a size without measurements by its neighbours
OTHER_SIZES = 1.25
#: bounds of a correction as multiples of the estimate; a measured peak may exceed them
LOWEST, HIGHEST = 0.5, 4.0
#: maximum number of remembered keys and sizes
KEYS_REMEMBERED = 1024


@dataclass(frozen=True, slots=True)
class ActivationKey:
    """Key of a correction: runs of one component in one execution mode (`batch`, `tile`: as in
    `pool.values.specs.spec.ExecutionMode`), since full and tiled runs hold different tensors; so do batches of several
    tasks (`together`), and runs with `options`, by name. `device_kind` is "cuda", "sim", ..."""

    component: ComponentKey
    stage: Stage
    device_kind: str
    batch: int = 0
    tile: int = 0
    together: int = 1
    options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ActivationError:
    """Accuracy of the estimates of one key, as (estimated - measured) / measured over the remembered exact runs.

    runs          number of these runs
    median_error  median of the absolute errors; 0 is perfect
    worst_under   largest underestimate; 0 if there was none
    worst_over    largest overestimate
    ran_out       runs that ran out of memory
    """

    key: ActivationKey
    runs: int
    median_error: float
    worst_under: float
    worst_over: float
    ran_out: int


@dataclass(frozen=True, slots=True)
class MeasuredPeak:
    """A successful run, estimated at `estimated_bytes`, that held `measured_bytes`; unless `exact`, a lower bound."""

    estimated_bytes: int
    measured_bytes: int
    exact: bool

    @property
    def ratio(self) -> float:
        """Measured bytes as a multiple of the estimate."""
        return self.measured_bytes / self.estimated_bytes


@dataclass(frozen=True, slots=True)
class Correction:
    """Correction of one key at one size, as multiples of estimates; latest last.

    measured  from exact peaks; 1 before the first
    seen      the remembered runs
    step      raised by running out of memory; 0 when that is over
    ran_out   number of times
    """

    measured: float = 1.0
    seen: tuple[MeasuredPeak, ...] = ()
    step: float = 0.0
    ran_out: int = 0

    @property
    def factor(self) -> float:
        """Factor for an estimate."""
        return max([self.measured, self.step, *(run.ratio for run in self.seen)])

    @property
    def peaks(self) -> tuple[MeasuredPeak, ...]:
        """The exactly measured runs among the remembered ones."""
        return tuple(run for run in self.seen if run.exact)

    @property
    def ratios(self) -> tuple[float, ...]:
        """The exact peaks as multiples of the estimates."""
        return tuple(run.ratio for run in self.peaks)

    def after_peak(self, estimated_bytes: int, measured_bytes: int, exact: bool) -> Correction:
        """Return the correction after a successful run with this peak, or (not `exact`) this lower bound."""
        found = replace(
            self, seen=(*self.seen, MeasuredPeak(estimated_bytes, measured_bytes, exact))[-REMEMBERED_RUNS:]
        )
        if exact:
            floor = max(found.ratios)
            resting = max(floor, min(1.0, floor * HEADROOM), LOWEST)
        else:  # a lower bound does not lower a remembered peak
            resting = self.measured if found.peaks else min(1.0, self.measured)
        down = self.measured - (self.measured - resting) * DOWN_SHARE
        return replace(found, measured=max(resting, down))._calmer()

    def after_running_out(self) -> Correction:
        """Return the correction after a run that ran out of memory."""
        step = min(HIGHEST, max(1.0, self.factor) * STEP_UP)
        return replace(self, step=max(self.step, step), ran_out=self.ran_out + 1)

    def _calmer(self) -> Correction:
        """With a smaller step."""
        settled = replace(self, step=0.0).factor
        step = self.step - (self.step - settled) * DOWN_SHARE
        return replace(self, step=step if step > settled * STEP_FORGOTTEN else 0.0)


class ActivationCalibration:
    """Corrections of estimates, in bounded memory."""

    def __init__(self) -> None:
        self._corrections: LruCache[tuple[ActivationKey, int], Correction] = LruCache(KEYS_REMEMBERED)

    def corrected(self, key: ActivationKey, estimated_bytes: int) -> int:
        """Return the bytes to plan with for a run that is estimated at `estimated_bytes`.

        A size without measurements is not planned below its estimate, and above it like the exact peaks of neighbouring
        sizes, within `OTHER_SIZES`.
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
        """Return the largest exactly measured peak of the remembered runs with this very estimate; 0 if there is
        none."""
        known = self._corrections.kept((key, _size(estimated_bytes)))
        peaks = () if known is None else known.peaks
        return max((run.measured_bytes for run in peaks if run.estimated_bytes == estimated_bytes), default=0)

    def learn(self, key: ActivationKey, estimated_bytes: int, measured_bytes: int, exact: bool = True) -> None:
        """A run estimated at `estimated_bytes` held `measured_bytes`; without `exact`, at least that."""
        if estimated_bytes > 0:
            self._change(key, estimated_bytes, lambda c: c.after_peak(estimated_bytes, measured_bytes, exact))

    def ran_out(self, key: ActivationKey, estimated_bytes: int) -> None:
        """A run planned with the estimate `estimated_bytes` ran out of memory, although it had all planned memory."""
        if estimated_bytes > 0:
            self._change(key, estimated_bytes, Correction.after_running_out)

    def report(self) -> tuple[ActivationError, ...]:
        """Return the errors of the estimates of each measured key, by name."""
        by_key: dict[ActivationKey, list[Correction]] = {}
        for (key, _), correction in self._corrections.items():
            by_key.setdefault(key, []).append(correction)
        order = sorted(by_key, key=lambda k: (k.component, k.stage.value, k.device_kind, k.together))
        return tuple(_error(key, by_key[key]) for key in order)

    def _change(self, key: ActivationKey, estimated_bytes: int, change: Callable[[Correction], Correction]) -> None:
        place = (key, _size(estimated_bytes))
        self._corrections.put(place, change(self._corrections.kept(place) or Correction()))


def measured_activations(cost: RunCost, scratch_bytes: int) -> tuple[int, bool] | None:
    """Return the activation bytes of a finished run, and whether they are exact; None if they were not measured.

    `scratch_bytes` is the planned scratch for weights. A run with resident weights used none of it. A streamed run used
    an unknown part of it, so the rest is a lower bound of its activations.
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
