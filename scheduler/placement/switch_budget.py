"""How much of the GPUs' time may go to loads that serve who waited long, while there is work for what is loaded.

Serving every task in order would change weights with each; serving only what is loaded would let others wait without
end. Both are bounded by an account. It fills with a share of all time that workers are up, and with all of the time
that they are idle: what a pool with room to spare would not have used otherwise. Each such load takes its seconds from
it. So where GPUs are short these loads never take more than the share, and where they are not, order is kept nearly as
if loads cost nothing. A task waits for a multiple of its load before that: the fuller the account, the less.

What waiting is worth when the cheapest is chosen (rule 4 of `scheduler.placement.expected_completion`) is paid from it
as long as there is something in it, and is not bounded by it.
"""

from __future__ import annotations

#: what the account holds at most, in seconds of every worker: who waited through a calm hour may not change weights
#: for minutes on end
_MOST_SECONDS = 10.0
#: between two looks for who waited long, when nobody had
_LOOK_SECONDS = 0.5


class SwitchAccount:
    """GPU-seconds that may be spent so."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._at = 0.0
        self._workers = 0
        self.seconds = 0.0
        self._next_look = 0.0

    def allowed_seconds(self, at: float) -> float:
        """What may be spent now; 0 also where it was looked a moment ago, and nobody had waited long."""
        return self.seconds if at >= self._next_look else 0.0

    @property
    def patience(self) -> float:
        """For how many times the length of its load a task waits before it is served so."""
        most_seconds = _MOST_SECONDS * self._workers
        fill = max(0.0, self.seconds) / most_seconds if most_seconds else 0.0
        return (1.0 - fill) / self._share + fill if self._share else float("inf")

    def looked(self, at: float) -> None:
        """Nobody had waited long by then."""
        self._next_look = at + _LOOK_SECONDS

    def pass_time(self, at: float, workers: int, idle: int) -> None:
        """So many workers were up until `at`, which never falls, and so many of them idle."""
        if at > self._at:
            self._workers = workers
            earned_seconds = (at - self._at) * (workers * self._share + (idle if self._share else 0))
            self.seconds = min(self.seconds + earned_seconds, _MOST_SECONDS * workers)
            self._at = at

    def spend(self, seconds: float) -> None:
        """A load of so long is on its way. The account may be overdrawn by the last of them."""
        self.seconds -= seconds
