"""`PendingRun`: a run that the device may still compute while the next runs begin.

The thread of the engine begins it and releases what it holds; any thread may wait for its results.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Generic, TypeVar

from modelpool.pool.devices.copy_streams import Event
from modelpool.pool.values.specs.spec import ComponentKey, RunCost

#: results of a run
ResultT = TypeVar("ResultT")


class PendingRun(Generic[ResultT]):
    """A run that has been begun. Its weights and memory are leased until `release`."""

    def __init__(
        self,
        bring: Callable[[], ResultT],
        cost: RunCost,
        end: Event,
        components: frozenset[ComponentKey],
        held: ExitStack,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`bring` moves the results to the host, once they are computed. `cost` is the run's so far, `end` its
        end on the device, `held` the lease of its `components`."""
        self.components = components
        self._bring: Callable[[], ResultT] | None = bring
        self._cost = cost
        self._end = end
        self._held = held
        self._clock = clock
        self._began_at = clock()
        self._ended_at: float | None = None
        self._lock = threading.Lock()
        self._outcome: tuple[ResultT, RunCost] | Exception | None = None

    def result(self) -> tuple[ResultT, RunCost]:
        """Wait for the results, and return them and the cost. Any thread, any number of times. Raises what the device
        reports, each time."""
        with self._lock:
            if self._bring is not None:
                bring, self._bring = self._bring, None
                try:
                    self._end.synchronize()
                    self.note_end()
                    self._outcome = bring(), self._whole_cost()
                except Exception as error:
                    self._outcome = error
            outcome = self._outcome
        assert outcome is not None, "set with the first result"
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def note_end(self) -> None:
        """Note the time, if the device has just ended the run."""
        if self._ended_at is None and self._end.query():
            self._ended_at = self._clock()

    @property
    def is_over(self) -> bool:
        """Whether somebody has its results: the device has nothing of it any more."""
        return self._outcome is not None

    def release(self) -> None:
        """Wait for the run, and release what it holds. Its results stay for whoever waits for them. Thread of the
        engine. Does not raise."""
        with self._held, suppress(Exception):  # an error goes to whoever waits for the results
            self.result()

    def _whole_cost(self) -> RunCost:
        """The cost with the time that the device took behind the host."""
        ended_at = self._clock() if self._ended_at is None else self._ended_at
        return replace(self._cost, run_seconds=self._cost.run_seconds + max(0.0, ended_at - self._began_at))
