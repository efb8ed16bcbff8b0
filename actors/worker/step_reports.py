"""`StepReports`: tells a controller the steps of runs that are computed together, in one message for all of them.

A message costs the controller about as much as a task. So there is one for all rows of a pass, at intervals, once the
last row has done the step, and none if all of them should end within the interval: their ends tell more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from modelpool.actors.worker.wire.messages import RunRequest, StepDone
from modelpool.pool.values.specs.spec import WorkerId


class StepReports:
    """The steps of some runs that were not told yet: of each the last one. Used by one thread at a time."""

    def __init__(
        self,
        interval_seconds: float,
        send: Callable[[Sequence[StepDone]], None],
        is_current: Callable[[RunRequest], bool],
    ) -> None:
        """At most one message in the interval, and none before it is over. What is not current any more is not sent."""
        self._interval_seconds = interval_seconds
        self._send = send
        self._is_current = is_current
        self._told_at = self._stepped_at = time.monotonic()
        #: by run, with the number of calls of `tell` before
        self._steps: dict[int, tuple[RunRequest, StepDone, int]] = {}
        self._calls = 0

    def callback(
        self, request: RunRequest, worker: Callable[[], tuple[WorkerId, int]], done: list[int], tells: bool
    ) -> Callable[[int, int], None]:
        """Return a callback that notes the steps of a run on `worker`, and tells of them if it `tells`; `done` holds
        their number."""

        def report(step: int, steps: int) -> None:
            done[0] = step
            self.note(request, StepDone(*worker(), request.task.task_id, request.run, step, steps))
            if tells:
                self.tell()

        return report

    def note(self, request: RunRequest, step: StepDone) -> None:
        """Remember a step until the others have done theirs. The last one of a run is not told: its end is."""
        known = self._steps.get(request.run)
        if known is not None and known[2] == self._calls:  # whoever should have told of the step before has left
            self.tell()
        if step.step < step.steps:
            self._steps[request.run] = request, step, self._calls
        else:
            self._steps.pop(request.run, None)

    def tell(self) -> None:
        """Send what was noted, unless the last message was sent just now. Called when all runs have done a step."""
        self._calls += 1
        now = time.monotonic()
        step_seconds, self._stepped_at = now - self._stepped_at, now
        if now - self._told_at < self._interval_seconds:
            return
        left = max((step.steps - step.step for _, step, _ in self._steps.values()), default=0)
        if left * step_seconds < self._interval_seconds:
            return  # the ends of these runs follow
        steps = tuple(step for request, step, _ in self._steps.values() if self._is_current(request))
        self._steps.clear()
        if steps:
            self._told_at = now
            self._send(steps)
