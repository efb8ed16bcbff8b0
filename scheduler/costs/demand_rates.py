"""How often each component is needed: the rate at which tasks that use it arrive, from the latest arrivals.

The memory is a number of arrivals, not a time: it is as long for a pool with an image per minute as for one with a
hundred per second, and a component that nothing needs any more loses its rate while time passes.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from math import exp, inf

from modelpool.pool.specs.spec import ComponentKey

#: arrivals of one component that count
REMEMBERED = 16
#: components that are remembered, those that were needed last
MOST_COMPONENTS = 4096


class DemandRates:
    """The latest arrivals of tasks for each component."""

    def __init__(self) -> None:
        self._arrivals: OrderedDict[ComponentKey, deque[float]] = OrderedDict()

    def arrived(self, components: Iterable[ComponentKey], at: float) -> None:
        """A task that uses these components arrived."""
        known = self._arrivals
        for key in components:
            times = known.get(key)
            if times is None:
                times = known[key] = deque(maxlen=REMEMBERED)
                if len(known) > MOST_COMPONENTS:
                    known.popitem(last=False)
            else:
                known.move_to_end(key)
            times.append(at)

    def per_second(self, component: ComponentKey, at: float) -> float:
        """Tasks per second that need it; 0 if none did so far."""
        times = self._arrivals.get(component)
        if not times:
            return 0.0
        seconds = at - times[0]
        return len(times) / seconds if seconds > 0.0 else inf

    def needed_within(self, component: ComponentKey, seconds: float, at: float) -> float:
        """The probability that a task needs it within that time, if arrivals are independent: 1 - exp(-rate x
        seconds)."""
        expected = self.per_second(component, at) * seconds if seconds > 0.0 else 0.0
        return 1.0 - exp(-expected)
