"""`OwnResults`: the latest results of a worker, for runs that follow on the same worker and read them there.

Such a run was sent before its inputs existed. It begins right after the last of the runs that make them, so the latest
few are enough. One that does not find its inputs does not start, and is sent again with them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from modelpool.pool.values.core.stage_params import Result

#: results that are kept: more than the missing inputs of any task
MOST_KEPT = 4
#: bytes of them together. Larger results are videos: their next run takes longer than any message
MOST_BYTES = 64 << 20


class OwnResults:
    """Results by run, latest last. Thread-safe: a decode that overlaps with the next runs ends on a thread of its
    own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: with their bytes
        self._kept: OrderedDict[int, tuple[Result, int]] = OrderedDict()
        #: runs with results that stay for the run that is about to begin
        self._claimed: frozenset[int] = frozenset()

    def keep(self, run: int, result: Result, result_bytes: int) -> None:
        """Keep the result of a run, in place of the oldest that is not claimed."""
        with self._lock:
            self._kept[run] = (result, result_bytes)
            for oldest in [kept for kept in self._kept if kept not in self._claimed]:
                if len(self._kept) <= MOST_KEPT and sum(size for _, size in self._kept.values()) <= MOST_BYTES:
                    break
                del self._kept[oldest]

    def claim(self, own: Sequence[int]) -> bool:
        """Return whether the results of all these runs are there; 0 means an input that was sent. Then they stay until
        `complete`, in place of those that were claimed before."""
        if not any(own):
            return True
        with self._lock:
            is_there = all(not run or run in self._kept for run in own)
            self._claimed = frozenset(own) if is_there else frozenset()
            return is_there

    def complete(self, own: Sequence[int], sent: Sequence[Result]) -> tuple[Result, ...]:
        """Return all inputs of a run in order: results of `own`, which are forgotten, between results that were `sent`.
        What was sent beyond its inputs follows them. Raises KeyError if one is not there any more."""
        rest = list(sent)
        with self._lock:
            self._claimed = frozenset()
            inputs = [self._kept[run][0] if run else rest.pop(0) for run in own]
            for run in own:
                self._kept.pop(run, None)
        return (*inputs, *rest)
