"""`StepReports`: reports the steps of runs that are computed together to the controller, in one message.

A message costs the controller about as much as a task. So there is one for all rows of a pass, at intervals, once the
last row has done the step. If all rows should end within the next interval, their ends are the report.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from modelpool.actors.worker.wire.messages import RunRequest, StepDone
from modelpool.pool.values.specs.spec import WorkerId


@dataclass(frozen=True, slots=True)
class _Noted:
    """The last unreported step of a run, the number of calls of `tell` before it, and the first unreported step with
    its time."""

    request: RunRequest
    step: StepDone
    calls: int
    first_step: int
    first_at: float


class StepReports:
    """The last unreported step of each of some runs. Used by one thread at a time."""

    def __init__(
        self,
        interval_seconds: float,
        send: Callable[[Sequence[StepDone]], None],
        is_current: Callable[[RunRequest], bool],
    ) -> None:
        """Sends at most one message per interval, and none before the first one is over; only of current runs."""
        self._interval_seconds = interval_seconds
        self._send = send
        self._is_current = is_current
        self._told_at = time.monotonic()
        #: by run
        self._steps: dict[int, _Noted] = {}
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
        """Remember a step until the others have done theirs. The last step of a run is not reported: its end is."""
        known = self._steps.get(request.run)
        if known is not None and known.calls == self._calls:  # the run that reports steps has ended
            self.tell()
            known = self._steps.get(request.run)
        if step.step < step.steps:
            first = (step.step, time.monotonic()) if known is None else (known.first_step, known.first_at)
            self._steps[request.run] = _Noted(request, step, self._calls, *first)
        else:
            self._steps.pop(request.run, None)

    def tell(self) -> None:
        """Send the noted steps, unless the last message was sent just now, or these runs should end within the
        interval. Called when all runs have done a step, or a part of one."""
        self._calls += 1
        now = time.monotonic()
        silent_seconds = now - self._told_at
        if silent_seconds < self._interval_seconds:
            return
        if silent_seconds < 2 * self._interval_seconds and self._left_seconds(now) < self._interval_seconds:
            return  # these runs should end soon; if not, the next step is reported
        steps = tuple(noted.step for noted in self._steps.values() if self._is_current(noted.request))
        self._steps.clear()
        if steps:
            self._told_at = now
            self._send(steps)

    def _left_seconds(self, now: float) -> float:
        """Return the time until the last of these runs should end, at the mean pace of its unreported steps: steps may
        have several parts, and some take no time."""
        left_seconds = 0.0
        for noted in self._steps.values():
            done = noted.step.step - noted.first_step
            pace_seconds = (now - noted.first_at) / done if done else now - self._told_at
            left_seconds = max(left_seconds, (noted.step.steps - noted.step.step) * pace_seconds)
        return left_seconds
