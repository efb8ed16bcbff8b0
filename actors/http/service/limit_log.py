"""`LimitLog`: what the limits of one server have done: a line in the log, not more often than it can be read, and a
counter for each limit."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from modelpool.actors.control.metrics.families import MetricFamily, MetricKind, Sample

logger = logging.getLogger(__name__)

#: between two lines about the same limit
LINE_SECONDS = 10.0


@dataclass(slots=True)
class _Count:
    """How often a limit has acted, how often at its last line, and when that was."""

    total: int = 0
    told: int = 0
    told_at: float = float("-inf")


class LimitLog:
    """Belongs to one event loop. The names of limits come from the code, so that their number is bounded."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """`now` returns seconds of a monotonic clock."""
        self._now = now
        self._counts: dict[str, _Count] = {}
        #: the number of open connections, where this process counts them
        self.open_connections: Callable[[], int] | None = None

    def acted(self, limit: str, what: str) -> None:
        """Note that `limit` has acted; `what` it did is for the log. It must not contain what callers send."""
        count = self._counts.setdefault(limit, _Count())
        count.total += 1
        now = self._now()
        if now - count.told_at < LINE_SECONDS:
            return
        more = count.total - count.told - 1
        logger.warning("limit %s: %s%s", limit, what, f" ({more} more since the last line)" if more else "")
        count.told, count.told_at = count.total, now

    def count(self, limit: str) -> int:
        """Return how often a limit has acted."""
        found = self._counts.get(limit)
        return 0 if found is None else found.total

    def families(self) -> tuple[MetricFamily, ...]:
        """Return the counters as metrics, and the number of open connections if it is known."""
        acted = MetricFamily(
            "modelpool_http_limits_total",
            MetricKind.COUNTER,
            "Times that a limit of the HTTP server has acted, by limit.",
            ("limit",),
            tuple(Sample((limit,), float(count.total)) for limit, count in sorted(self._counts.items())),
        )
        if self.open_connections is None:
            return (acted,)
        text = "Open connections of the HTTP server."
        count = Sample((), float(self.open_connections()))
        return (acted, MetricFamily("modelpool_http_connections", MetricKind.GAUGE, text, (), (count,)))
