"""Token bucket for GPU time spent on loads for tasks that waited long, while there is work for loaded weights.

Serving every task in order would change weights with each; serving only loaded weights would starve others. The budget
bounds both. It fills with a share of all time that workers are up, and with all of the time that they are idle, which
would be unused otherwise. Each such load takes its seconds from it. So with scarce GPUs these loads never take more
than the share, and otherwise order is kept nearly as if loads cost nothing. A task waits for a multiple of its load
time first: the fuller the budget, the less.

The price of waiting time when the cheapest task is chosen (rule 4 of
`scheduler.decisions.placement.expected_completion`) is paid from it while it lasts, and is not bounded by it.
"""

from __future__ import annotations

#: capacity, in seconds per worker: long waits after a calm hour must not change weights for minutes on end
_MOST_SECONDS = 10.0
#: interval between two searches for long-waiting tasks, if there were none
_CHECK_SECONDS = 0.5


class SwitchBudget:
    """GPU-seconds that such loads may take."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._at = 0.0
        self._workers = 0
        self.seconds = 0.0
        self._next_check = 0.0

    def allowed_seconds(self, at: float) -> float:
        """The GPU-seconds available now; 0 also if a search found no long-waiting task a moment ago."""
        return self.seconds if at >= self._next_check else 0.0

    @property
    def wait_factor(self) -> float:
        """The multiple of its load time that a task waits before it is served from the budget."""
        most_seconds = _MOST_SECONDS * self._workers
        fill = max(0.0, self.seconds) / most_seconds if most_seconds else 0.0
        return (1.0 - fill) / self._share + fill if self._share else float("inf")

    def nothing_due(self, at: float) -> None:
        """A search at this time found no long-waiting task."""
        self._next_check = at + _CHECK_SECONDS

    def pass_time(self, at: float, workers: int, idle: int) -> None:
        """Account for the time until `at`, which never falls: `workers` were up, `idle` of them idle."""
        if at > self._at:
            self._workers = workers
            earned_seconds = (at - self._at) * (workers * self._share + (idle if self._share else 0))
            self.seconds = min(self.seconds + earned_seconds, _MOST_SECONDS * workers)
            self._at = at

    def spend(self, seconds: float) -> None:
        """Take the seconds of a load that starts. The last one may overdraw the budget."""
        self.seconds -= seconds
