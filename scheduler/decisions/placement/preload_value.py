"""The value of a preload in seconds: the load that it hides, less the loads that it causes. Pure, with learned state.

Whether a preload is used, and how much later than expected, is learned for each kind of run from the preloads of that
kind that were sent: where requests come one by one, the work for resident weights grows while it is done.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass

from modelpool.scheduler.model.estimates import Estimate
from modelpool.scheduler.model.run_kinds import RunKind

#: preloads of one kind that count
REMEMBERED = 16
#: refusals in a row after which what was learned of a kind is forgotten
MOST_REFUSED = 256
#: kinds of run that are remembered
MOST_KINDS = 1024
#: delays that are learned: a preload that is used at once says nothing about the next one
LEAST_DELAY, MOST_DELAY = 1.0, 8.0


@dataclass(frozen=True, slots=True)
class Victim:
    """Weights that a preload evicts.

    needed_first    probability that a task needs them before the preloaded ones are used
    reload_seconds  time of loading them again
    """

    needed_first: float
    reload_seconds: float


def preload_value(hidden_seconds: float, used_part: float, victims: Iterable[Victim]) -> float:
    """Return the expected seconds of load that a preload saves; negative if it causes more than it hides.

    value = used_part x hidden_seconds - sum over the victims of needed_first x reload_seconds

    `used_part` is the probability that the task, or another one of its line, runs there before the weights leave. A
    victim that is not needed first costs nothing: without the preload, the same load would evict it later.
    """
    value = used_part * hidden_seconds
    for victim in victims:
        value -= victim.needed_first * victim.reload_seconds
    return value


class PreloadUse:
    """How the latest preloads of one kind of run were used."""

    __slots__ = ("_delays", "_refused", "_used")

    def __init__(self) -> None:
        self._used: deque[bool] = deque(maxlen=REMEMBERED)
        self._delays = Estimate()
        self._refused = 0

    @property
    def used_part(self) -> float:
        """The part of them that was used. One that was used is assumed in addition: without any, all are."""
        return (1 + sum(self._used)) / (1 + len(self._used))

    @property
    def delay(self) -> float | None:
        """Seconds until the use over the expected seconds; None if none was used."""
        return self._delays.value

    def was_used(self, delay: float) -> None:
        """A preload was used."""
        self._used.append(True)
        self._delays.add(delay)

    def was_not_used(self) -> None:
        """The weights left, or all tasks that waited for them ran elsewhere."""
        self._used.append(False)

    def decided(self, is_sent: bool) -> None:
        """A preload was sent or refused. After many refusals in a row nothing is known any more: refusals
        alone would teach nothing new."""
        self._refused = 0 if is_sent else self._refused + 1
        if self._refused == MOST_REFUSED:
            self._refused, self._delays = 0, Estimate()
            self._used.clear()


class PreloadUses:
    """`PreloadUse` of each kind of run, and the delay of all kinds, for kinds without a used preload."""

    def __init__(self) -> None:
        #: the kinds that were asked for last
        self._uses: OrderedDict[RunKind, PreloadUse] = OrderedDict()
        self._delays = Estimate()

    def of(self, kind: RunKind) -> PreloadUse:
        """The one object for this kind."""
        use = self._uses.get(kind)
        if use is None:
            use = self._uses[kind] = PreloadUse()
            if len(self._uses) > MOST_KINDS:
                self._uses.popitem(last=False)
        else:
            self._uses.move_to_end(kind)
        return use

    def delay(self, kind: RunKind) -> float:
        """Seconds until a preload of this kind is used over the expected seconds; 1 while no preload was used."""
        return self.of(kind).delay or self._delays.value or LEAST_DELAY

    def was_used(self, kind: RunKind, seconds: float, expected_seconds: float) -> None:
        """A preload was used that long after it was sent."""
        delay = LEAST_DELAY
        if expected_seconds > 0.0:
            delay = min(max(seconds / expected_seconds, LEAST_DELAY), MOST_DELAY)
        self.of(kind).was_used(delay)
        self._delays.add(delay)
