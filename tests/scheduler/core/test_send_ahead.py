"""A busy worker is sent its next task shortly before its run ends; the task is taken back if it should not start."""

from __future__ import annotations

from math import inf

import pytest

from modelpool.pool.values.specs.spec import JobId, JobSpec, RunCost, RunErrorKind, TaskId, TaskSpec, WorkerId
from modelpool.pool.weights.plan.eviction_plan import Residency
from modelpool.scheduler.core.history import history_of
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.jobs import TaskStatus
from modelpool.scheduler.model.messages import Command, Outcome, PoolEnding, RevokeTask, RunTask
from tests.scheduler.world import DRAW, PAINT, ROOMY, Shell, sample

GIVEN = TaskId("given:1")
RUN_SECONDS = 10.0


def task(seed: int, model=PAINT, run_seconds: float = RUN_SECONDS) -> TaskSpec:
    return sample(GIVEN, model=model, seed=seed, run_seconds=run_seconds)


def submit(shell: Shell, name: str, model=PAINT, priority: int = 0, deadline: float | None = None) -> list[Command]:
    one = task(len(shell.jobs), model)
    return shell.submit(JobSpec(JobId(name), (one,), one.task_id, (GIVEN,), priority, deadline=deadline))


def pool(workers: int = 1, send_ahead_seconds: float = 20.0, node: str = "", capacity: int = ROOMY, **config) -> Shell:
    """Workers that have PAINT and know how long its runs take. Each event takes a second."""
    shell = Shell(SchedulerConfig(story_length=None, send_ahead_seconds=send_ahead_seconds, **config))
    shell.want(*"abc"[:workers])
    for name in "abc"[:workers]:
        shell.come_up(name, capacity, node=node)
    for name in "abc"[:workers]:
        submit(shell, f"first {name}")
    for name in "abc"[:workers]:
        shell.finish(name, cost=RunCost(run_seconds=RUN_SECONDS))
    return shell


def next_on(shell: Shell, name: str = "a") -> TaskId | None:
    queue = shell.queued.get(WorkerId(name))
    return queue[0].task_id if queue else None


def wanted(shell: Shell, name: str) -> TaskId:
    return shell.jobs[JobId(name)].wanted


def test_the_next_task_starts_without_a_command() -> None:
    shell = pool()
    submit(shell, "one")
    (sent,) = [c for c in submit(shell, "two") if isinstance(c, RunTask)]
    assert (sent.task_id, sent.queued) == (wanted(shell, "two"), True)
    assert shell.state.demand.tasks[wanted(shell, "two")].status is TaskStatus.QUEUED
    assert not [c for c in shell.finish("a") if isinstance(c, RunTask)]
    assert shell.on("a") == wanted(shell, "two")
    assert shell.state.demand.tasks[wanted(shell, "two")].started_at == shell.at
    shell.finish("a")
    assert shell.outcome("two") is Outcome.SUCCEEDED
    (attempt,) = history_of(shell.state, JobId("two"), shell.at).tasks[0].attempts
    assert (attempt.attempt, attempt.end) == (1, "done")


def test_a_worker_that_waits_for_such_a_task_counts_as_busy_for_both_runs() -> None:
    shell = pool()
    submit(shell, "one")
    submit(shell, "two")
    worker = shell.state.worker_table.workers[WorkerId("a")]
    left_seconds = worker.expected_end - shell.at
    assert worker.wait_seconds(shell.at) == pytest.approx(left_seconds + RUN_SECONDS)


@pytest.mark.parametrize(
    ("why", "config"),
    [
        ("it is off", {"send_ahead_seconds": 0.0}),
        ("the run ends later", {"send_ahead_seconds": 1.0}),
    ],
)
def test_nothing_is_sent_ahead(why: str, config: dict[str, float]) -> None:
    shell = pool(**config)
    submit(shell, "one")
    submit(shell, "two")
    assert next_on(shell) is None, why


def test_a_task_that_has_to_load_is_not_sent_ahead() -> None:
    """There is room for PAINT or for DRAW; how long a run of DRAW takes is known."""
    shell = pool(capacity=24)
    for name, model in (("draw", DRAW), ("paint", PAINT)):
        submit(shell, name, model)
        shell.finish("a", cost=RunCost(run_seconds=RUN_SECONDS))
    submit(shell, "one")
    submit(shell, "two", DRAW)
    assert next_on(shell) is None
    submit(shell, "three")
    assert next_on(shell) == wanted(shell, "three")


def test_a_tick_comes_when_the_run_is_near_its_end() -> None:
    shell = pool(send_ahead_seconds=3.0)
    submit(shell, "one")
    submit(shell, "two")
    assert next_on(shell) is None
    while shell.tick_due is not None and next_on(shell) is None:
        shell.tick_comes()
    worker = shell.state.worker_table.workers[WorkerId("a")]
    assert next_on(shell) == wanted(shell, "two")
    assert worker.expected_end - shell.at <= 3.0


def test_a_task_of_higher_priority_takes_the_place_of_the_next() -> None:
    shell = pool()
    submit(shell, "one")
    submit(shell, "two")
    (revoke,) = [c for c in submit(shell, "urgent", priority=1) if isinstance(c, RevokeTask)]
    assert revoke.task_id == wanted(shell, "two")
    shell.revoke("a")
    shell.tell_revoked()
    assert shell.state.demand.tasks[wanted(shell, "two")].status is TaskStatus.READY
    assert next_on(shell) is None, "one is asked back during a run at most"
    shell.finish("a")
    assert (shell.on("a"), next_on(shell)) == (wanted(shell, "urgent"), wanted(shell, "two"))


def test_a_revoked_task_has_not_failed_and_keeps_its_waiting_time() -> None:
    shell = pool()
    submit(shell, "one")
    submit(shell, "two")
    ready_at = shell.state.worker_table.workers[WorkerId("a")].queue[0].ready_at
    submit(shell, "urgent", priority=1)
    shell.revoke("a")
    shell.tell_revoked()
    found = shell.state.demand.tasks[wanted(shell, "two")]
    assert (found.failures, found.attempt, found.ready_at) == (0, 1, ready_at)


def test_a_revocation_that_comes_too_late_changes_nothing() -> None:
    shell = pool()
    submit(shell, "one")
    submit(shell, "two")
    submit(shell, "urgent", priority=1)
    assert WorkerId("a") in shell.asked_back
    shell.finish("a")
    assert shell.on("a") == wanted(shell, "two")
    assert next_on(shell) is None, "whether it runs is not known, so nothing can be next"
    shell.finish("a")
    assert shell.outcome("two") is Outcome.SUCCEEDED


def test_an_answer_that_comes_after_the_end_of_the_run_before_frees_the_worker() -> None:
    shell = pool()
    submit(shell, "one")
    submit(shell, "two")
    submit(shell, "urgent", priority=1)
    shell.revoke("a")
    shell.finish("a")
    worker = shell.state.worker_table.workers[WorkerId("a")]
    assert (worker.task_id, shell.on("a")) == (wanted(shell, "two"), None), "the core cannot know better"
    shell.tell_revoked()
    assert (shell.on("a"), next_on(shell)) == (wanted(shell, "urgent"), wanted(shell, "two"))


def test_a_cancelled_job_does_not_wait_for_the_run_before() -> None:
    shell = pool()
    submit(shell, "one")
    submit(shell, "two")
    (revoke,) = [c for c in shell.cancel("two") if isinstance(c, RevokeTask)]
    assert revoke.task_id == wanted(shell, "two")
    shell.revoke("a")
    shell.tell_revoked()
    assert shell.outcome("two") is Outcome.CANCELLED
    assert shell.on("a") == wanted(shell, "one")


def test_a_cancelled_task_that_has_started_is_stopped() -> None:
    shell = pool()
    submit(shell, "one")
    submit(shell, "two")
    shell.cancel("two")
    shell.finish("a")
    assert shell.running[WorkerId("a")].stop_requested
    shell.finish("a", RunErrorKind.CANCELLED)
    assert shell.outcome("two") is Outcome.CANCELLED


def test_the_loss_of_the_worker_is_no_failure_of_the_next_task() -> None:
    shell = pool(workers=2)
    for name in ("one", "two", "three"):
        submit(shell, name)
    name = next(iter(shell.queued))
    task_id = next_on(shell, name)
    shell.lose(name)
    lost = shell.state.demand.tasks[task_id]
    assert (lost.failures, lost.crashed, lost.status) in [(0, (), TaskStatus.READY), (0, (), TaskStatus.QUEUED)]


def test_a_worker_that_will_end_gives_its_next_task_back() -> None:
    def drain(shell: Shell) -> None:
        shell.drain("n1", 600.0)

    def unwanted(shell: Shell) -> None:
        shell.want()

    def end(shell: Shell) -> None:
        shell.feed(PoolEnding(shell.tick(), inf))

    for change in (drain, unwanted, end):
        shell = pool(node="n1")
        submit(shell, "one")
        submit(shell, "two")
        assert next_on(shell) == wanted(shell, "two")
        change(shell)
        assert WorkerId("a") in shell.asked_back, change.__name__


def test_an_idle_worker_takes_the_next_task_of_one_that_is_late() -> None:
    shell = pool(workers=2, send_ahead_seconds=12.0)
    for name in ("one", "two", "three"):
        submit(shell, name)
    (late,) = shell.queued
    (other,) = set(shell.running) - {late}
    shell.finish(other)
    worker = shell.state.worker_table.workers[late]
    assert late not in shell.asked_back, "it is not late yet"
    while late not in shell.asked_back:
        shell.tick_comes()
    assert shell.at >= worker.expected_end + 12.0
    task_id = next_on(shell, late)
    shell.revoke(late)
    shell.tell_revoked()
    assert shell.on(other) == task_id


def queue_on(shell: Shell, name: str = "a") -> list[TaskId]:
    return [queued.task_id for queued in shell.queued.get(WorkerId(name), [])]


def test_short_runs_are_queued_up_to_the_expected_seconds() -> None:
    """A run of 10 s, and queued ones while the worker has work for 35 s at most in front of another."""
    shell = pool(send_ahead_seconds=35.0)
    for number in range(9):
        submit(shell, f"job {number}")
    queued = len(queue_on(shell))
    worker = shell.state.worker_table.workers[WorkerId("a")]
    assert 1 < queued < 5
    assert worker.queued_seconds == pytest.approx(queued * RUN_SECONDS)
    assert worker.wait_seconds(shell.at) == pytest.approx(worker.expected_end - shell.at + queued * RUN_SECONDS)
    order = [shell.on("a"), *queue_on(shell)]
    for task_id in order:
        assert shell.on("a") == task_id
        shell.finish("a")


def test_a_queue_is_filled_by_one_event_and_its_tasks_are_sent_in_one_call() -> None:
    shell = pool(send_ahead_seconds=60.0)
    for number in range(30):
        submit(shell, f"job {number}")
    filled: list[RunTask] = []
    while not any(command.joins for command in filled):
        filled = [c for c in shell.finish("a", cost=RunCost(run_seconds=RUN_SECONDS)) if isinstance(c, RunTask)]
    calls = [command.joins for command in filled]
    assert not calls[0], "the first begins a call"
    assert max(len(call) for call in "".join("01"[joins] for joins in calls).split("0")) <= 3, "at most 40 s in a call"


def test_the_worker_with_the_least_work_is_filled_first() -> None:
    shell = pool(workers=2, send_ahead_seconds=60.0)
    for number in range(8):
        submit(shell, f"job {number}")
    assert abs(len(queue_on(shell, "a")) - len(queue_on(shell, "b"))) <= 1


def test_tasks_that_may_have_started_on_a_lost_worker_run_alone_afterwards() -> None:
    """Ends of one call are reported together: any of its tasks may have been the cause. The others were not there."""
    shell = pool(send_ahead_seconds=60.0)
    for number in range(30):
        submit(shell, f"job {number}")
    worker = shell.state.worker_table.workers[WorkerId("a")]
    while not worker.joined:
        shell.finish("a", cost=RunCost(run_seconds=RUN_SECONDS))
    suspects = [worker.task_id, *(queued.task_id for queued in worker.joined)]
    others = [queued.task_id for queued in worker.queue if queued.task_id not in suspects]
    shell.lose("a")
    tasks = shell.state.demand.tasks
    assert [tasks[task_id].alone for task_id in suspects] == [True] * len(suspects)
    assert not any(tasks[task_id].alone for task_id in others)
    assert not any(tasks[task_id].failures for task_id in suspects)
    shell.come_up("a")
    while set(suspects) & {name for name, task in tasks.items() if task.status is not TaskStatus.RUNNING}:
        joined = {command.task_id for queue in shell.queued.values() for command in queue if command.joins}
        assert not joined & set(suspects)
        shell.finish("a", cost=RunCost(run_seconds=RUN_SECONDS))


def test_a_run_that_may_have_ended_before_its_worker_was_lost_has_not_failed() -> None:
    """Its end would have been reported with the next run of its call, which took the worker down. With one attempt, its
    job does not fail. The run that is alone afterwards counts."""
    shell = pool(send_ahead_seconds=60.0, max_attempts=1)
    for number in range(30):
        submit(shell, f"job {number}")
    worker = shell.state.worker_table.workers[WorkerId("a")]
    while not worker.joined:
        shell.finish("a", cost=RunCost(run_seconds=RUN_SECONDS))
    begun = worker.task_id
    name = next(name for name, job in shell.jobs.items() if job.wanted == begun)
    shell.lose("a")
    assert shell.outcome(name) is None
    shell.come_up("a")
    while shell.on("a") != begun:
        shell.finish("a", cost=RunCost(run_seconds=RUN_SECONDS))
    shell.lose("a")
    assert shell.outcome(name) is Outcome.FAILED


def test_a_revocation_in_the_middle_keeps_the_order_of_the_others() -> None:
    shell = pool(send_ahead_seconds=60.0)
    for number in range(5):
        submit(shell, f"job {number}")
    first, middle, last = queue_on(shell)[:3]
    name = next(name for name, job in shell.jobs.items() if job.wanted == middle)
    shell.cancel(name)
    shell.revoke("a")
    shell.tell_revoked()
    assert shell.outcome(name) is Outcome.CANCELLED
    assert queue_on(shell)[:2] == [first, last]


def test_a_revoked_task_that_seemed_to_run_makes_way_for_the_next_one() -> None:
    shell = pool(send_ahead_seconds=60.0)
    for number in range(5):
        submit(shell, f"job {number}")
    first, second = queue_on(shell)[:2]
    shell.cancel(next(name for name, job in shell.jobs.items() if job.wanted == first))
    shell.revoke("a")
    shell.finish("a")
    worker = shell.state.worker_table.workers[WorkerId("a")]
    assert (worker.task_id, shell.on("a")) == (first, second), "the core cannot know better"
    shell.tell_revoked()
    assert (worker.task_id, shell.on("a")) == (second, second)


def until_ahead(shell: Shell) -> None:
    """Let the run on the worker come near its end."""
    while shell.tick_due is not None and next_on(shell) is None and shell.at < near_end(shell):
        shell.tick_comes()


def near_end(shell: Shell) -> float:
    return shell.state.worker_table.workers[WorkerId("a")].expected_end - 1.0


def test_with_batches_a_task_is_sent_ahead_if_it_would_run_alone() -> None:
    """Nothing else is like it, batches of its kind were measured and do not pay, or it may not share a run."""
    shell = pool(send_ahead_seconds=3.0, batch_limit=2)
    submit(shell, "running")
    submit(shell, "only")
    until_ahead(shell)
    assert next_on(shell) == wanted(shell, "only")
    shell.finish("a", cost=RunCost(run_seconds=RUN_SECONDS))
    for name in ("one", "two", "three", "four"):
        submit(shell, name)
    until_ahead(shell)
    assert next_on(shell) is None, "a batch of two is tried, and forms when the worker is idle"
    while shell.running:
        members = len(shell.running[WorkerId("a")].members)
        for _ in range(members):  # each takes as long as alone
            shell.finish("a", cost=RunCost(run_seconds=RUN_SECONDS))
    for name in ("running again", "five", "six"):
        submit(shell, name)
    assert len(shell.running[WorkerId("a")].members) == 1, "two batches were measured"
    until_ahead(shell)
    assert next_on(shell) == wanted(shell, "five")
    shell.finish("a", cost=RunCost(run_seconds=RUN_SECONDS))
    assert shell.on("a") == wanted(shell, "five")


def test_a_task_is_queued_behind_a_batch() -> None:
    shell = pool(send_ahead_seconds=3.0, batch_limit=2, capacity=ROOMY)
    submit(shell, "first", DRAW)
    shell.finish("a", cost=RunCost(run_seconds=RUN_SECONDS))
    submit(shell, "running")
    for name, model in (("one", PAINT), ("two", PAINT), ("other", DRAW)):
        submit(shell, name, model)
    shell.finish("a", cost=RunCost(run_seconds=RUN_SECONDS))
    assert len(shell.running[WorkerId("a")].members) == 2
    until_ahead(shell)
    assert next_on(shell) == wanted(shell, "other")
    shell.finish("a", cost=RunCost(run_seconds=RUN_SECONDS))
    assert shell.on("a") != wanted(shell, "other"), "the batch has another task"
    shell.finish("a", cost=RunCost(run_seconds=RUN_SECONDS))
    assert shell.on("a") == wanted(shell, "other")
    shell.finish("a")
    assert shell.outcome("other") is Outcome.SUCCEEDED


def test_a_long_run_is_followed_by_a_queued_task_without_any_other_event() -> None:
    """A run of more than 40 times `send_ahead_seconds` had no tick near its end."""
    shell = pool(send_ahead_seconds=0.05)
    submit(shell, "running")
    submit(shell, "next")
    ticks = 0
    while next_on(shell) is None:
        assert shell.tick_due is not None
        shell.tick_comes()
        ticks += 1
    left_seconds = shell.state.worker_table.workers[WorkerId("a")].expected_end - shell.at
    assert next_on(shell) == wanted(shell, "next")
    assert 0.0 < left_seconds <= 0.0501
    assert ticks == 1


def test_every_task_that_waits_for_a_worker_waits_no_longer_once_its_machine_lacks_the_file() -> None:
    """Found by the state machine: two runs in a row ran out of memory, so both tasks wait for the worker to start its
    process again. The third finds that its file is unavailable. Only the first of the two stopped waiting."""
    shell = pool(node="n1", send_ahead_seconds=60.0)
    shell.want("a", "b")  # b may start on another machine
    for name in ("one", "two", "three"):
        submit(shell, name)
    assert next_on(shell) is not None
    shell.finish("a", RunErrorKind.OUT_OF_VRAM, residency=Residency(ROOMY))
    shell.finish("a", RunErrorKind.OUT_OF_VRAM, residency=Residency(ROOMY))
    waiting = [shell.state.demand.tasks[wanted(shell, name)] for name in ("one", "two")]
    assert [task.pinned_to for task in waiting] == ["a", "a"]
    shell.lacks("a", PAINT)
    assert [task.pinned_to for task in waiting] == [None, None]


def test_a_queued_task_whose_worker_is_lost_fails_if_no_other_machine_has_its_file() -> None:
    """Found by the state machine: the move from queued to failed was not allowed."""
    shell = pool(workers=2, node="n1")
    for name in ("one", "two", "three"):
        submit(shell, name)
    (queued,) = (name for name in ("two", "three") if wanted(shell, name) in {next_on(shell, "a"), next_on(shell, "b")})
    (holder,) = (name for name in "ab" if next_on(shell, name) == wanted(shell, queued))
    (other,) = {"a", "b"} - {holder}
    shell.want(other)
    shell.up[WorkerId(other)] = (shell.up[WorkerId(other)][0], Residency(ROOMY))  # its weights are gone, too
    shell.lacks(other, PAINT)
    shell.lose(holder)
    assert shell.outcome(queued) is Outcome.FAILED
    assert shell.error(queued).kind is RunErrorKind.FILE_UNAVAILABLE
