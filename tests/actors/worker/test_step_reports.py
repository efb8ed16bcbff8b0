"""Steps of runs that are computed together are told in one message.

Proves: a message has the last step of every run, once the last one has done it, and not more often than at the
interval; the end of a run is not told as a step, and none is told right before the ends of all runs; if the run that
tells has left, the next step tells; nothing is sent for a controller that is not current.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from modelpool.actors.worker import step_reports
from modelpool.actors.worker.step_reports import StepReports
from modelpool.actors.worker.wire.messages import StepDone
from modelpool.pool.values.specs.spec import TaskId, WorkerId

STEPS = 4


class Rows:
    """Three runs that are computed together; `sent` has the runs and steps of each message."""

    def __init__(self, interval_seconds: float = 0.0, current_epoch: int = 1) -> None:
        self.sent: list[list[tuple[int, int]]] = []
        self.current_epoch = current_epoch
        self.reports = StepReports(interval_seconds, self.send, lambda request: request.epoch >= self.current_epoch)

    def send(self, steps: Sequence[StepDone]) -> None:
        self.sent.append([(step.run, step.step) for step in steps])

    def done(self, step: int, runs: Sequence[int] = (1, 2, 3), tells: bool = True, steps: int = STEPS) -> None:
        for run in runs:
            request: Any = SimpleNamespace(run=run, epoch=1)
            self.reports.note(request, StepDone(WorkerId("gpu-0"), 1, TaskId(f"task-{run}"), run, step, steps))
        if tells:
            self.reports.tell()


def test_one_message_has_the_step_of_every_run() -> None:
    rows = Rows()
    for step in range(1, STEPS + 1):
        rows.done(step)
    assert rows.sent == [[(run, step) for run in (1, 2, 3)] for step in range(1, STEPS)]


def test_messages_keep_the_interval_and_have_the_latest_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(step_reports.time, "monotonic", lambda: now[0])
    rows = Rows(interval_seconds=10.0)
    for step, at in ((1, 4.0), (2, 11.0), (3, 20.0)):
        now[0] = at
        rows.done(step, steps=100)
    assert rows.sent == [[(1, 2), (2, 2), (3, 2)]], "nothing in the first interval, nor in that after a message"


def test_a_run_that_should_end_within_the_interval_is_not_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """An image of 0.15 s cost a message about its steps, although its end followed at once."""
    now = [0.0]
    monkeypatch.setattr(step_reports.time, "monotonic", lambda: now[0])
    rows = Rows(interval_seconds=10.0)
    for step, at in ((1, 6.0), (2, 12.0), (3, 18.0)):
        now[0] = at
        rows.done(step, runs=(1,))
    assert rows.sent == [[(1, 2)]], "12 s are left after the second step, and 6 s after the third"
    now[0] = 24.0
    rows.done(3, runs=(1,), tells=False)
    rows.done(1, runs=(2,))
    assert rows.sent[1:] == [[(1, 3), (2, 1)]], "the longest of the runs counts"


def test_steps_of_several_calls_and_of_other_lengths_count_at_their_mean_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: a call of half a step, or a step that a cache made, counted as the pace of all that were left."""
    now = [0.0]
    monkeypatch.setattr(step_reports.time, "monotonic", lambda: now[0])
    halves = Rows(interval_seconds=10.0)
    for call, at in enumerate((4.0, 8.0, 12.0, 16.0), start=1):  # two calls a step, three steps of 8 s are left
        now[0] = at
        halves.done(call // 2, runs=(1,), steps=4)
    assert halves.sent == [[(1, 1)]]
    now[0] = 0.0
    cached = Rows(interval_seconds=10.0)
    for step, at in ((1, 5.0), (2, 9.9), (3, 10.0)):  # the third one took no time
        now[0] = at
        cached.done(step, runs=(1,), steps=8)
    assert cached.sent == [[(1, 3)]]


def test_a_run_that_does_not_end_when_it_should_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps may become slower, or have no end. Before, nothing was told of such a run."""
    now = [0.0]
    monkeypatch.setattr(step_reports.time, "monotonic", lambda: now[0])
    rows = Rows(interval_seconds=10.0)
    for step, at in enumerate(range(2, 42, 2), start=1):
        now[0] = float(at)
        rows.done(step, runs=(1,), steps=step + 1)
    assert rows.sent == [[(1, 10)], [(1, 20)]]


def test_the_next_step_tells_if_the_run_that_tells_has_left() -> None:
    rows = Rows()
    rows.done(1, runs=(1, 2), tells=False)
    rows.done(2, runs=(1,), tells=False)
    assert rows.sent == [[(1, 1), (2, 1)]]


def test_the_end_of_a_run_is_not_told_as_a_step() -> None:
    rows = Rows()
    rows.done(STEPS, runs=(1,), tells=False)
    rows.done(1, runs=(2,))
    assert rows.sent == [[(2, 1)]]


def test_nothing_is_told_of_runs_of_an_earlier_controller() -> None:
    rows = Rows(current_epoch=2)
    rows.done(1)
    assert rows.sent == []
