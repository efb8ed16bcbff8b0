"""How soon components are needed again: the rate at which demand for each begins, from the times without it.

A component is in demand while a task that uses it has not ended. Whether weights should leave the GPU for others
matters while they are not in demand, so the measure is the time from the end of a demand to the begin of the next.
The memory is a number of such times, not a time itself: it is as long for a pool with an image per minute as for one
with a hundred per second.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import exp, inf

from modelpool.pool.values.specs.spec import ComponentKey

#: times without demand that count. In benchmarks/closed_loop.py pools load up to a quarter more often with 4, and as
#: often with 64; but a popularity that shifts is then learned four times as slowly
REMEMBERED = 16
#: components not in demand that are remembered, those that were needed last
MOST_COMPONENTS = 4096


@dataclass(slots=True, eq=False)
class _Demand:
    """The demand for one component: tasks that have not ended, since when there are none, and the latest times without
    demand with their sum."""

    tasks: int = 0
    ended_at: float = 0.0
    gaps: deque[float] = field(default_factory=deque)
    gap_seconds: float = 0.0


class DemandRates:
    """The latest times without demand of each component."""

    def __init__(self) -> None:
        self._live: dict[ComponentKey, _Demand] = {}
        self._idle: OrderedDict[ComponentKey, _Demand] = OrderedDict()

    def arrived(self, components: Iterable[ComponentKey], at: float) -> None:
        """A task that uses these components arrived."""
        for key in components:
            demand = self._live.get(key)
            if demand is None:
                demand = self._idle.pop(key, None)
                if demand is None:
                    demand = _Demand()
                else:
                    if len(demand.gaps) == REMEMBERED:
                        demand.gap_seconds -= demand.gaps.popleft()
                    demand.gaps.append(at - demand.ended_at)
                    demand.gap_seconds += at - demand.ended_at
                self._live[key] = demand
            demand.tasks += 1

    def ended(self, components: Iterable[ComponentKey], at: float) -> None:
        """A task that arrived with these components has ended."""
        for key in components:
            demand = self._live[key]
            demand.tasks -= 1
            if not demand.tasks:
                del self._live[key]
                demand.ended_at = at
                self._idle[key] = demand
                if len(self._idle) > MOST_COMPONENTS:
                    self._idle.popitem(last=False)

    def is_in_demand(self, component: ComponentKey) -> bool:
        """Whether a task that uses it has not ended."""
        return component in self._live

    def per_second(self, component: ComponentKey, at: float) -> float:
        """The rate at which demand for it begins while there is none; 0 if it never was in demand.

        The number of the latest times without demand over their sum. The current one counts as if it ended now: a
        component that nothing needs any more loses its rate while time passes."""
        demand, seconds = self._live.get(component), 0.0
        if demand is None:
            demand = self._idle.get(component)
            if demand is None:
                return 0.0
            seconds = at - demand.ended_at
        seconds += demand.gap_seconds
        return (len(demand.gaps) + 1) / seconds if seconds > 0.0 else inf

    def needed_within(self, component: ComponentKey, seconds: float, at: float) -> float:
        """The probability that demand for it begins within that time, if tasks arrive independently: 1 - exp(-rate x
        seconds)."""
        return 1.0 - exp(-self.per_second(component, at) * seconds) if seconds > 0.0 else 0.0
