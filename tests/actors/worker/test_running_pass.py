"""Who joins a pass, and who is told of its ends, whatever comes first.

Proves: runs that come before a pass has begun are in it, and those after its end are refused; each end is told once,
also after the next pass has begun; a run that cannot be prepared ends, and the others go on; nobody waits for a pass
that does not begin.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from modelpool.actors.worker.running_pass import Passes, PassIsOver, RunningPass
from modelpool.actors.worker.wire.messages import CallId, EndsWanted, RunMode
from modelpool.actors.worker.worker_lease import WorkerLease


def request(run: int) -> Any:
    return SimpleNamespace(run=run, epoch=0, needed_next=(), own=(), resume=False, task=SimpleNamespace(needs=()))


class Rows:
    """An engine with two rows: `at_step` is called before each step; each run takes one step."""

    def __init__(self, at_step: Callable[[], None] = lambda: None, broken: int = 0) -> None:
        self.at_step, self.broken = at_step, broken
        self.steps: list[list[int]] = []

    def run(self, running: RunningPass, needed_next: tuple[Any, ...]) -> None:
        while members := list(running.take(2, 0)):
            self.at_step()
            members += running.take(2 - len(members), len(members))
            self.steps.append([member.run for member in members])  # type: ignore[attr-defined]
            for member in members:
                running.ended(member, RuntimeError("over"))

    def prepare(self, asked: Any, inputs: Any, joins: bool) -> Any:
        if asked.run == self.broken:
            raise ValueError("broken")
        return SimpleNamespace(run=asked.run), None

    def report(self, asked: Any, member: Any, outcome: Any, in_use: Any) -> Any:
        return f"{asked.run}: {outcome}", None

    def stepped(self) -> None:
        raise AssertionError("these steps are not reported")


def ends(passes: Passes, number: int) -> list[Any]:
    found: list[Any] = []
    while one := passes.ends(EndsWanted(pass_of(number), len(found), waits=True)):
        found += [report for report, _ in one]
    return found


def pass_of(number: int) -> CallId:
    return CallId(number, RunMode.PASS)


def join(passes: Passes, number: int, run: int) -> bool:
    return passes.join(pass_of(number), request(run), ())


def begin(passes: Passes, number: int, *runs: int) -> None:
    passes.run(pass_of(number), [request(run) for run in runs], ())


def test_runs_join_before_and_while_a_pass_runs_and_are_refused_after_its_end() -> None:
    rows = Rows()
    passes = Passes(WorkerLease(), rows)
    assert join(passes, 7, 2), "it has not begun"
    joined: list[bool] = []
    rows.at_step = lambda: joined.append(join(passes, 7, 3)) if not joined else None  # type: ignore[func-returns-value]
    begin(passes, 7, 1)
    assert joined == [True]
    assert rows.steps == [[2, 1], [3]], "in the order in which they came, two at a time"
    assert not join(passes, 7, 4)
    assert ends(passes, 7) == ["2: over", "1: over", "3: over"]
    assert ends(passes, 7) == [], "each once"


def test_ends_are_told_after_the_next_pass_has_begun() -> None:
    passes = Passes(WorkerLease(), Rows())
    begin(passes, 1, 1)
    begin(passes, 2, 2)
    assert not join(passes, 1, 3)
    assert (ends(passes, 1), ends(passes, 2)) == (["1: over"], ["2: over"])
    assert passes._known == {}, "nothing of them is kept"


def test_one_that_cannot_be_prepared_ends_alone() -> None:
    passes = Passes(WorkerLease(), Rows(broken=1))
    begin(passes, 1, 1, 2)
    assert ends(passes, 1) == ["1: broken", "2: over"]


def test_nobody_waits_for_a_pass_that_does_not_begin() -> None:
    """The call that should have begun it failed, and another pass comes; or another controller does."""
    for what in ("another", "controller"):
        passes, told = Passes(WorkerLease(), Rows()), list[list[Any]]()
        waiting = threading.Thread(target=lambda passes=passes, told=told: told.append(ends(passes, 1)))
        assert join(passes, 1, 1)
        waiting.start()
        begin(passes, 2, 2) if what == "another" else passes.close()
        waiting.join(10.0)
        assert told == [[]], what


def test_runs_of_a_pass_that_is_over_are_refused_by_name() -> None:
    """Their call fails, so that the controller fails them. They would have vanished: nobody is told of their ends."""
    passes = Passes(WorkerLease(), Rows())
    assert join(passes, 1, 1)
    assert join(passes, 2, 2), "what should have begun the first has failed"
    with pytest.raises(PassIsOver, match="pass 1"):
        begin(passes, 1, 1)
    begin(passes, 2, 3)
    assert ends(passes, 2) == ["2: over", "3: over"]


def test_nobody_joins_a_pass_that_was_closed() -> None:
    """Also while it goes on: those that are in it leave at their next step."""
    running = RunningPass(Rows())
    assert running.join(request(1), ())
    assert len(running.take(2, 0)) == 1
    running.close()
    assert not running.take(1, 1)
    assert not running.join(request(2), ())
