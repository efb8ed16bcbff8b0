"""Who goes before whom: what time, limits, deadlines and accounts do to each other, case by case."""

from __future__ import annotations

from dataclasses import replace

import pytest

from modelpool.pool.values.specs.spec import JobId, JobSpec, TaskId, UserId, WorkerId
from modelpool.scheduler.decisions.placement.batching import Batching
from modelpool.scheduler.decisions.queue.deadlines import SAFETY, Deadlines
from modelpool.scheduler.decisions.queue.shares import Shares
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.jobs import Job
from modelpool.scheduler.model.user_account import NO_VIRTUAL_START
from modelpool.scheduler.model.user_share import UserShare
from tests.scheduler.scene import Scene, whole
from tests.scheduler.world import DRAW, PAINT, Shell, alone, sample

ANN, BOB, CARL = UserId("ann"), UserId("bob"), UserId("carl")


def job(name: str, seed: int, user: UserId = ANN, deadline: float | None = None, **more: int) -> JobSpec:
    return replace(alone(name, sample(seed=seed), **more), user=user, deadline=deadline)


def live(shares: Shares, name: str, user: UserId, priority: int = 0) -> Job:
    """A job that has joined."""
    found = Job(job(name, 0, user), 0, {}, priority=priority)
    shares.join(found)
    return found


# ---- accounts --------------------------------------------------------------------------------------------------------


def accounts() -> Shares:
    """Nothing is set aside for any job."""
    return Shares((), lambda job, flow: None)


def test_a_user_whose_jobs_are_over_makes_no_turns() -> None:
    shares = accounts()
    over = live(shares, "a", ANN)
    shares.leave(over)
    assert live(shares, "b", BOB).virtual_start == NO_VIRTUAL_START


def test_who_owes_is_remembered_when_idle_accounts_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modelpool.scheduler.decisions.queue.shares.MOST_IDLE_ACCOUNTS", 1)
    shares = accounts()
    shares.account(ANN)
    shares.pay(BOB, 50.0, 0.0)
    assert list(shares.accounts) == [BOB], "who owes nothing is as good as new"
    shares.account(CARL)
    assert BOB in shares.accounts


def test_a_job_that_is_raised_stands_before_later_jobs_of_its_new_priority() -> None:
    shares = accounts()
    shares.pay(ANN, 50.0, 0.0)
    live(shares, "other", BOB)
    raised = live(shares, "raised", ANN)
    assert raised.virtual_start == 50.0
    shares.accounts[ANN].paid = 0.0
    shares.move(raised, 1)
    assert live(shares, "later", ANN, priority=1).virtual_start == 50.0


def test_priorities_age_no_further_than_the_highest() -> None:
    shell = Shell(SchedulerConfig(story_length=None, ageing_seconds=1.0))
    shell.workers(gpu=64)
    for number in range(3):
        shell.submit(job(f"high{number}", number, priority=1))
    shell.submit(job("low", 9))
    for _ in range(5):
        shell.tick(10.0)
        shell.submit(job(f"more{shell.at}", int(shell.at), priority=1))
    assert {each.priority for each in shell.state.demand.jobs.values()} == {1}


@pytest.mark.parametrize(("waited_seconds", "priority"), [(0.0, 0), (9.0, 0), (25.0, 2), (90.0, 3)])
def test_a_job_that_has_waited_outside_of_the_core_joins_as_old_as_it_is(waited_seconds: float, priority: int) -> None:
    shell = Shell(SchedulerConfig(story_length=None, ageing_seconds=10.0))
    shell.workers(gpu=64)
    for number in range(2):
        shell.submit(job(f"high{number}", number, priority=3))
    shell.tick(100.0)
    shell.submit(job("low", 9), waited_seconds)
    low = shell.state.demand.jobs[JobId("low")]
    assert low.priority == priority
    until = shell.at + 10.0
    while shell.at < until:
        shell.tick_comes()
    assert low.priority == min(priority + 1, 3)


def test_a_shared_task_falls_back_when_the_higher_priority_goes() -> None:
    shell = Shell(SchedulerConfig(story_length=None))
    shell.workers(gpu=64)
    shell.submit(job("busy", 0))
    shell.submit(job("low", 1))
    task = shell.state.demand.tasks[sample(seed=1).task_id]
    shell.submit(job("high", 1, priority=2))
    assert task.priority == 2
    shell.cancel("high")
    assert task.priority == 0


def test_who_was_passed_over_too_often_goes_first_also_when_its_priority_is_raised() -> None:
    """Found in a review. 1. `old` needs another model than the resident one, and `resident` starts before it. 2. A job
    of higher priority wants the same task, which is filed anew. `Shell` checks that it goes before all others all the
    same."""
    shell = Shell(SchedulerConfig(story_length=None, overtaking_limit=1))
    shell.workers(gpu=20)
    shell.submit(job("busy", 0))
    shell.submit(alone("old", sample(model=DRAW)))
    shell.submit(job("resident", 1))
    shell.finish("gpu")
    assert shell.on("gpu") == sample(seed=1).task_id
    task = shell.state.demand.tasks[sample(model=DRAW).task_id]
    assert task in shell.state.demand.backlog.urgent
    shell.submit(alone("high", sample(model=DRAW), priority=1))
    assert task.priority == 1
    assert task in shell.state.demand.backlog.urgent
    shell.submit(job("also high", 2, priority=1))
    shell.finish("gpu")
    assert shell.on("gpu") == task.name


@pytest.mark.parametrize(("tag", "joins"), [(15.0, True), (16.0, False)])
def test_mates_are_tasks_whose_turn_has_come(tag: float, joins: bool) -> None:
    """One worker, and a window of 15 s: behind that, others' turns come first."""
    scene = Scene(share_window_seconds=15, batch_limit=2)
    worker = scene.worker("gpu", whole(PAINT), capacity=1000)
    first, second = scene.task(sample(seed=1)), scene.task(sample(seed=2))
    for task, its_tag in ((first, 0.0), (second, tag)):
        scene.backlog.remove(task)
        task.set_priority(0, its_tag)
        scene.backlog.add(task)
    choice = scene.ask()
    assert choice is not None
    assert (choice.task, choice.worker) == (first, worker)
    assert Batching(2).batch_mates(scene.query(), choice) == ((second,) if joins else ())


def test_one_of_a_run_that_was_cancelled_is_not_asked_to_stop_again_with_the_others() -> None:
    """1. Two tasks share a run. 2. The job of one is cancelled, which is asked to stop. 3. The run takes too long: the
    other is asked too. `Shell` refuses a second StopTask for one task."""
    shell = Shell(SchedulerConfig(story_length=None, run_timeout_seconds=30.0, batch_limit=2))
    shell.workers(gpu=1000)
    for number in range(3):
        shell.submit(job(f"j{number}", number))
    shell.finish("gpu")
    run = shell.running[WorkerId("gpu")]
    assert len(run.members) == 2
    shell.cancel("j1")
    while not all(one.stop_requested for one in run.members):
        shell.tick_comes()
    assert shell.at > 30.0


# ---- deadlines -------------------------------------------------------------------------------------------------------


def test_of_two_deadlines_the_sooner_hurries_a_shared_task() -> None:
    shell = Shell(SchedulerConfig(story_length=None))
    shell.workers(gpu=64)
    shell.submit(job("busy", 0))
    due = shell.at + 20.0
    shell.submit(job("soon", 1, deadline=due))
    shell.submit(job("later", 1, deadline=due + 5.0))
    shell.submit(job("first of all", 2, deadline=due))
    shell.tick(2.0)
    shell.submit(job("more", 3))
    task = shell.state.demand.tasks[sample(seed=1).task_id]
    assert task.urgent_by == due


def test_with_fewer_workers_work_begins_sooner() -> None:
    """Two workers have time for the work that is due in 100 s; one of them alone has to begin now."""
    shell = Shell(SchedulerConfig(story_length=None, deadline_margin_seconds=5.0))
    shell.workers(one=64, two=64)
    for number in range(2):
        shell.submit(job(f"busy{number}", number))
    names = [f"j{number}" for number in range(10)]
    for number, name in enumerate(names):
        shell.submit(job(name, 100 + number, deadline=130.0))
    shell.tick_comes()
    assert not shell.state.demand.jobs["j0"].urgent
    assert not shell.ticks or min(shell.ticks) > shell.at + 2.0, "nobody would look for some time"
    shell.lose("two")
    assert shell.state.demand.jobs["j0"].urgent


def test_a_task_of_a_job_that_is_done_is_not_waited_for() -> None:
    deadlines = Deadlines(0.0)
    member = Job(job("j", 1, deadline=100.0), 1, {})
    deadlines.add(member, {TaskId("a"): 30.0, TaskId("b"): 10.0}, 10.0, 0.0)
    deadlines.done(member, TaskId("a"))
    assert deadlines.check(100.0 - SAFETY * 10.0 - 1.0, 1) == []
    assert deadlines.check(100.0 - SAFETY * 10.0, 1) == [member]


def test_who_was_held_back_by_a_limit_is_still_hurried_when_it_comes_in() -> None:
    """1. Ann may have one task on workers, and has. 2. Bob waits, then a job of Ann that is urgent. 3. Her first task
    ends: the urgent one goes before Bob's."""
    shell = Shell(SchedulerConfig(story_length=None, shares=(UserShare(user=ANN, running_limit=1),)))
    shell.workers(gpu=64)
    shell.submit(job("busy", 0))
    shell.submit(job("bob", 1, BOB, priority=0))
    shell.submit(job("urgent", 2, deadline=shell.at + 20.0))
    shell.finish("gpu")
    assert shell.on("gpu") == sample(seed=2).task_id


def test_a_start_that_moves_jobs_forward_leaves_none_held_back_without_need() -> None:
    """A started job gives later jobs of its user a virtual start: they are sorted in again, and the first of them goes
    to the backlog in the same event, as the invariants that the shell checks demand."""
    shell = Shell(SchedulerConfig(story_length=None, shares=(UserShare(user=UserId("*"), running_limit=6),)))
    for seed in range(12):
        shell.submit(job(f"ann {seed}", seed))
    for seed in range(12, 24):
        shell.submit(job(f"bob {seed}", seed, BOB))
    shell.workers(a=64, b=64)
    for number in range(48):
        if shell.running:
            shell.finish(sorted(shell.running)[number % len(shell.running)])
    assert set(shell.resolved) == set(shell.jobs)
