"""Run times on several GPUs: learned by kind of run, kind of GPU, size and number of GPUs; published figures before.

Published figures (the H100 unless said otherwise; 2, 4 and 8 GPUs):
- Flux at 1024 px, steps of 0.24 s: 1.55 times as fast on 2, 2.2 times on 4 (xDiT, sequence parallelism);
- Wan 14B, steps of 1.75 s: 6.9 times as fast on 8 (vLLM-Omni, sequence parallelism);
- branches of guidance on 2: 1.8 times as fast (xDiT, CFG parallelism).
What a step takes longer than its share is communication: 0.035 s on 2 GPUs and 0.049 s on 4 for Flux, 0.035 s on 8 for
Wan. `prior_seconds` interpolates that, between the two step lengths and over the doublings of GPUs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from math import log, log2
from typing import TypeAlias

from modelpool.pool.values.specs.spec import TaskSpec
from modelpool.scheduler.model.estimates import Estimate
from modelpool.scheduler.model.pool_memory import RememberedGangs
from modelpool.scheduler.model.run_kinds import RunKind, RunKinds

#: seconds until the workers of a gang have found each other, before each run (published for NCCL; 0.03 to 0.8 s with
#: gloo, measured)
FORMING_SECONDS = 0.8
#: steps of the published figures, and what each takes longer than its share on two GPUs, and with each doubling
_SHORT_STEP, _LONG_STEP = 0.24, 1.75
_SHORT_EXTRA, _SHORT_DOUBLING = 0.0348, 0.0143
_LONG_EXTRA = 0.0349
#: the largest number of GPUs that only branches of guidance can use, and how far each is used: 1.8 times as fast on two
_MOST_BRANCHES, _BRANCH_USE = 3, 0.9
#: learned times that are kept, the last used last
MOST_LEARNED = 4096

_Key: TypeAlias = tuple[RunKind, str, int, int]


def prior_seconds(spec: TaskSpec, alone_seconds: float, degree: int, remaining: float = 1.0) -> float:
    """Return the expected seconds of a run on `degree` GPUs that takes `alone_seconds` on one, and computes the
    fraction `remaining` of its steps; by published figures."""
    if degree <= 1 or alone_seconds <= 0.0:
        return alone_seconds
    if spec.degrees[-1] <= _MOST_BRANCHES:
        return alone_seconds / (_BRANCH_USE * degree)
    steps = max(1.0, spec.uses[0].passes * remaining) if spec.uses else 1.0
    step_seconds = alone_seconds / steps
    short = _SHORT_EXTRA + _SHORT_DOUBLING * (log2(degree) - 1.0)
    part = min(1.0, max(0.0, log(step_seconds / _SHORT_STEP) / log(_LONG_STEP / _SHORT_STEP)))
    return steps * (step_seconds / degree + short + part * (_LONG_EXTRA - short))


def speedup(spec: TaskSpec, degree: int, remaining: float = 1.0) -> float:
    """Return how many times as fast a run should be on `degree` GPUs, by its prior estimate and published figures."""
    alone_seconds = spec.run_seconds * remaining
    shared_seconds = prior_seconds(spec, alone_seconds, degree, remaining)
    return alone_seconds / shared_seconds if shared_seconds > 0.0 else 1.0


class GangTimes:
    """Measured run times on several GPUs, as multiples of the prior estimate for one."""

    def __init__(self) -> None:
        self._learned: OrderedDict[_Key, Estimate] = OrderedDict()

    def learn(self, kind: RunKind, gpu: str, size: int, degree: int, measured: float) -> None:
        """A run on `degree` GPUs took `measured` times the prior estimate for one."""
        key = (kind, gpu, size, degree)
        self._estimate(key).add(measured)

    def ratio(self, kind: RunKind, gpu: str, size: int, degree: int) -> float | None:
        """Return the measured multiple; None if nothing was measured."""
        estimate = self._learned.get((kind, gpu, size, degree))
        return None if estimate is None else estimate.value

    def remembered(self) -> tuple[RememberedGangs, ...]:
        """Return what was measured, the last used last."""
        return tuple(
            RememberedGangs(kind.stage, kind.components, gpu, size, degree, estimate.measurements)
            for (kind, gpu, size, degree), estimate in self._learned.items()
        )

    def remember(self, gangs: Iterable[RememberedGangs], kinds: RunKinds) -> None:
        """Take over what an earlier core has measured, where nothing was measured since."""
        for each in gangs:
            key = (kinds.kind(each.stage, each.components), each.gpu, each.size, each.degree)
            self._estimate(key).fill(each.ratios)

    def _estimate(self, key: _Key) -> Estimate:
        """Return the estimate of a key, which is the last used one now."""
        estimate = self._learned.get(key)
        if estimate is None:
            estimate = self._learned[key] = Estimate()
            if len(self._learned) > MOST_LEARNED:
                self._learned.popitem(last=False)
        else:
            self._learned.move_to_end(key)
        return estimate
