"""Jobs with a deadline go first when they must, by when they are due, and not before; who looks when; the figures."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from modelpool.pool.values.specs.spec import JobId, JobSpec, RunCost, TaskId, UserId
from modelpool.scheduler.decisions.queue.deadlines import LEAST_CHECK_SECONDS, SAFETY, Deadlines
from modelpool.scheduler.decisions.queue.shares import UserShare
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.jobs import Job
from tests.scheduler.world import Shell, alone, image, sample

MARGIN = 5.0


def shell_with(**config) -> Shell:
    shell = Shell(SchedulerConfig(story_length=None, deadline_margin_seconds=MARGIN, **config))
    shell.workers(gpu=64)
    return shell


def job(name: str, seed: int, deadline: float | None = None, priority: int = 0, seconds: float = 10.0) -> JobSpec:
    spec = alone(name, sample(seed=seed, run_seconds=seconds), priority)
    return replace(spec, deadline=deadline)


def ended_in_order(shell: Shell) -> list[str]:
    """Let all that waits run, each run as long as it says; the jobs by their end."""
    while (task_id := shell.on("gpu")) is not None:
        shell.tick(shell.tasks[task_id].run_seconds - 1.0)
        shell.finish("gpu", cost=RunCost(run_seconds=shell.tasks[task_id].run_seconds))
    return [str(name) for name in shell.resolved]


def test_a_deadline_far_away_changes_nothing() -> None:
    shell = shell_with()
    for number in range(4):
        shell.submit(job(f"j{number}", number, deadline=10_000.0 if number == 3 else None))
    assert ended_in_order(shell) == ["j0", "j1", "j2", "j3"]


def test_a_job_goes_first_when_its_deadline_comes_near() -> None:
    """1. Six jobs wait, sixty seconds of work. 2. The last must be done in forty. 3. It goes on time, not at once."""
    shell = shell_with()
    for number in range(5):
        shell.submit(job(f"j{number}", number))
    deadline = shell.at + 40.0
    shell.submit(job("due", 9, deadline))
    order = ended_in_order(shell)
    assert 0 < order.index("due") < 4
    assert shell.state.demand.fair_queue.deadlines.met == 1


def test_what_is_due_first_goes_first() -> None:
    shell = shell_with()
    shell.submit(job("busy", 0))
    start = shell.at
    for name, seconds in (("third", 34.0), ("first", 30.0), ("second", 32.0)):
        shell.submit(job(name, int(seconds), start + seconds))
    assert ended_in_order(shell) == ["busy", "first", "second", "third"]


def test_many_jobs_of_one_deadline_begin_in_time_for_the_last_of_them() -> None:
    """Each alone could wait until the end: all of them together have to go before those that were there first."""
    shell = shell_with()
    for number in range(10):
        shell.submit(job(f"j{number}", number))
    deadline = shell.at + 130.0
    for number in range(8):
        shell.submit(job(f"due{number}", 20 + number, deadline))
    ended_in_order(shell)
    deadlines = shell.state.demand.fair_queue.deadlines
    assert (deadlines.met, deadlines.missed) == (8, 0)


def test_deadlines_come_before_shares_but_not_before_priorities() -> None:
    shell = shell_with(shares=(UserShare(user=UserId("ann"), weight=10.0),))
    shell.submit(job("busy", 0))
    shell.submit(replace(job("ann", 1), user=UserId("ann")))
    shell.submit(job("high", 2, priority=1))
    shell.submit(replace(job("due", 3, shell.at + 25.0), user=UserId("bob")))
    assert ended_in_order(shell) == ["busy", "high", "due", "ann"]


def test_a_missed_deadline_hurries_no_more_is_counted_and_told() -> None:
    shell = shell_with()
    shell.submit(job("busy", 0, seconds=50.0))
    shell.submit(job("other", 1))
    shell.submit(job("due", 2, shell.at + 20.0))
    shell.tick(100.0)
    assert ended_in_order(shell) == ["busy", "other", "due"]
    deadlines = shell.state.demand.fair_queue.deadlines
    assert (deadlines.met, deadlines.missed) == (0, 1)
    assert any("deadline missed" in line.note for line in shell.state.story(JobId("due")))
    snapshot = shell.state.snapshot()
    assert (snapshot.deadlines_met, snapshot.deadlines_missed) == (0, 1)


def test_a_deadline_that_cannot_be_met_is_accepted_and_told(shell: Shell) -> None:
    shell.workers(gpu=64)
    shell.submit(job("busy", 0))
    shell.submit(job("due", 1, shell.at + 3.0))
    assert shell.state.demand.jobs[JobId("due")].hopeless_seconds == 10.0
    assert any("cannot be done by its deadline" in line.note for line in shell.state.story(JobId("due")))
    shell.finish("gpu")
    shell.finish("gpu")
    assert shell.outcome("due") is not None


def test_cancelled_jobs_neither_meet_nor_miss(shell: Shell) -> None:
    shell.workers(gpu=64)
    shell.submit(job("busy", 0))
    shell.submit(job("due", 1, shell.at + 300.0))
    shell.cancel("due")
    deadlines = shell.state.demand.fair_queue.deadlines
    assert (deadlines.met, deadlines.missed, len(deadlines)) == (0, 0, 0)


def test_somebody_looks_in_time_though_nothing_else_happens() -> None:
    """Two workers wait for nothing to happen, and a Tick comes when work for the deadline has to begin."""
    shell = shell_with()
    shell.submit(job("busy", 0, seconds=500.0))
    shell.submit(job("other", 1))
    deadline = shell.at + 100.0
    shell.submit(job("due", 2, deadline))
    while not shell.state.demand.jobs[JobId("due")].urgent:
        assert shell.tick_due is not None, "nobody will look"
        shell.tick_comes()
    begin = deadline - MARGIN - SAFETY * (10.0 + 6 / 4)  # its run, and the load of PAINT over the link
    assert shell.at == pytest.approx(begin, abs=LEAST_CHECK_SECONDS)


def test_all_stages_of_an_urgent_job_go_first() -> None:
    shell = shell_with()
    shell.submit(job("busy", 0))
    for number in range(4):
        shell.submit(image(f"p{number}", prompt=f"prompt {number}", seed=number))
    shell.submit(replace(image("due", prompt="soon", seed=9), deadline=shell.at + 24.0))
    assert ended_in_order(shell)[:2] == ["busy", "due"]


def test_a_shared_task_is_hurried_for_the_job_that_needs_it() -> None:
    """Both want the image; when the one with the deadline goes, there is no hurry any more."""
    shell = shell_with()
    shell.submit(job("busy", 0, seconds=100.0))
    shell.submit(job("other", 1))
    shell.submit(job("calm", 2))
    shell.submit(job("due", 2, shell.at + 15.0))
    task = shell.state.demand.tasks[shell.jobs[JobId("due")].wanted]
    assert task.urgent_by < float("inf")
    shell.cancel("due")
    assert task.urgent_by == float("inf")
    assert not shell.state.demand.backlog.urgent
    assert ended_in_order(shell)[1:] == ["busy", "other", "calm"]


# ---- the rule by itself ----------------------------------------------------------------------------------------------


def member(number: int, deadline: float) -> Job:
    return Job(job(f"j{number}", number, deadline), number, {})


def test_work_that_is_due_later_does_not_make_earlier_work_late() -> None:
    """Sooner deadlines go first anyway: work of later deadlines does not count for it, but it does for them."""
    deadlines = Deadlines(0.0)
    early, late = member(1, 100.0), member(2, 200.0)
    deadlines.add(early, {TaskId("a"): 8.0}, 8.0, 0.0)
    deadlines.add(late, {TaskId("b"): 80.0}, 8.0, 0.0)
    assert deadlines.check(100.0 - SAFETY * 8.0 - 10.0, 1) == []
    assert deadlines.check(200.0 - SAFETY * 88.0, 1) == [early, late]


def test_more_workers_may_begin_later() -> None:
    for workers, begin in ((1, 100.0 - SAFETY * 40.0), (4, 100.0 - SAFETY * 10.0), (40, 100.0 - SAFETY * 10.0)):
        deadlines = Deadlines(0.0)
        jobs = [member(number, 100.0) for number in range(4)]
        for each in jobs:
            deadlines.add(each, {TaskId(each.name): 10.0}, 10.0, 0.0)
        assert deadlines.check(begin - 0.1, workers) == []
        assert deadlines.next_check == pytest.approx(begin)
        assert deadlines.check(begin, workers) == jobs


def test_work_that_is_done_is_not_waited_for() -> None:
    deadlines = Deadlines(0.0)
    one, two = member(1, 100.0), member(2, 100.0)
    for each in (one, two):
        deadlines.add(each, {TaskId(each.name): 30.0}, 30.0, 0.0)
    deadlines.done(one, TaskId(one.name))
    deadlines.drop(one)
    assert deadlines.check(100.0 - SAFETY * 30.0 - 1.0, 1) == []
    assert deadlines.check(100.0 - SAFETY * 30.0, 1) == [two]


def test_what_was_hurried_for_a_job_that_was_cancelled_is_hurried_no_more() -> None:
    """Found by the state machine: 1. A job that is due runs. 2. It is cancelled, and the run has not stopped yet.
    3. Another job wants the same, whenever."""
    shell = shell_with()
    shell.submit(job("due", 0, shell.at + 12.0))
    (task,) = shell.state.demand.tasks.values()
    assert task.urgent_by < math.inf
    shell.cancel("due")
    shell.submit(job("again", 0))
    assert task.urgent_by == math.inf
