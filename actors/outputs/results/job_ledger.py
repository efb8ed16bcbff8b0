"""`JobLedger`: which jobs of a submission have ended, and how. Each job has one end. Pure: no I/O, clock or locks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeAlias, TypeVar

EndState: TypeAlias = Literal["succeeded", "failed", "cancelled"]
E = TypeVar("E")

#: how often a job runs again since its output was lost
MOST_REPEATS = 3


@dataclass(slots=True)
class LostOutputs:
    """How often the output of each job was lost, by index."""

    counts: Counter[int] = field(default_factory=Counter)

    def note(self, index: int) -> bool:
        """Note a loss; return whether the job runs again."""
        self.counts[index] += 1
        return self.counts[index] <= MOST_REPEATS


class JobLedger(Generic[E]):
    """The ends of the jobs of one submission, by index. An `E` is what a follower remembers of an end.

    The same event can arrive twice, and late: after a takeover, or from a submission that was repeated. The first end
    of a job counts, until `reopen`.
    """

    __slots__ = ("_counts", "_ends", "_left_out", "_requests", "_sealed", "_state_of")

    def __init__(self, state_of: Callable[[E], str], ends: MutableMapping[int, E] | None = None) -> None:
        """`state_of` returns the state of an end, an `EndState`. `ends` is where they are kept, empty; a dict without
        it."""
        self._state_of = state_of
        self._requests = 0
        self._left_out = 0
        self._sealed = False
        self._ends: MutableMapping[int, E] = {} if ends is None else ends
        self._counts: Counter[str] = Counter()

    @property
    def sealed(self) -> bool:
        """Whether no requests will be added."""
        return self._sealed

    @property
    def expected(self) -> int:
        """Number of jobs that end, of the requests so far."""
        return self._requests - self._left_out

    @property
    def ended(self) -> int:
        """Number of jobs that have ended."""
        return len(self._ends)

    @property
    def unended(self) -> int:
        """Number of jobs that have not ended, of the requests so far."""
        return self.expected - self.ended

    @property
    def over(self) -> bool:
        """Whether every job has ended, and no more will come."""
        return self._sealed and self.unended <= 0

    @property
    def counts(self) -> Counter[str]:
        """Ended jobs by state; a copy."""
        return self._counts.copy()

    def count(self, state: EndState) -> int:
        """Return how many jobs ended in that state."""
        return self._counts[state]

    def end_of(self, index: int) -> E | None:
        """Return the end of a job; None if it has not ended."""
        return self._ends.get(index)

    def has_ended(self, index: int) -> bool:
        """Whether a job has ended."""
        return index in self._ends

    def add(self, count: int) -> None:
        """Add `count` requests."""
        self._requests += count

    def leave_out(self, count: int) -> None:
        """Note that `count` of the requests are not queued: they never end."""
        self._left_out += count

    def seal(self) -> None:
        """Note that no requests will be added. Idempotent."""
        self._sealed = True

    def end(self, index: int, end: E) -> bool:
        """Note the end of a job. False, and no effect, if it has one."""
        if index in self._ends:
            return False
        self._ends[index] = end
        self._counts[self._state_of(end)] += 1
        return True

    def reopen(self, index: int) -> E:
        """Forget the end of a job that runs again, and return it. Raises KeyError if it has none."""
        end = self._ends.pop(index)
        self._counts[self._state_of(end)] -= 1
        return end

    def replace(self, index: int, end: E) -> None:
        """Replace the end of a job by another one. Raises KeyError if it has none."""
        self.reopen(index)
        self.end(index, end)
