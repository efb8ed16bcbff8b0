"""What a task that has not started waits for: with the evaluation of the placement that let it wait, and with what each
worker would cost it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from modelpool.pool.values.specs.spec import JobId, RunCost, Stage, UserId
from modelpool.scheduler.core.history import TaskHistory, history_of
from modelpool.scheduler.core.waiting_task import TaskWait
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.messages import PoolEnding
from modelpool.scheduler.model.node_groups import NodeGroup
from modelpool.scheduler.model.user_share import UserShare
from tests.scheduler.world import Shell, alone, encode, image, sample


def tasks(shell: Shell, job: str) -> dict[Stage, TaskHistory]:
    return {task.stage: task for task in history_of(shell.state, JobId(job)).tasks}


def wait(shell: Shell, job: str, stage: Stage = Stage.ENCODE) -> TaskWait:
    found = tasks(shell, job)[stage].wait
    assert found is not None
    return found


def patient_shell() -> tuple[Shell, str, str]:
    """`first` has the weights and runs `long`; `patient` waits for it although `other` is idle."""
    shell = Shell()
    shell.workers(a=64, b=64)
    shell.submit(alone("first", encode("first")))
    first = next(name for name in ("a", "b") if shell.on(name))
    shell.finish(first, cost=RunCost(run_seconds=0.5))
    shell.submit(alone("long", encode("long")))
    shell.submit(alone("patient", encode("patient")))
    return shell, first, "b" if first == "a" else "a"


def test_a_task_that_waits_for_a_busy_worker_names_it_with_the_evaluation_of_the_placement() -> None:
    shell, first, other = patient_shell()
    submitted_at = shell.at
    found = wait(shell, "patient")
    assert found.worker_id == first
    assert found.reason.startswith(f"waits for {first}: ")
    assert f" on {other}, which was idle" in found.reason
    assert found.since == submitted_at
    assert found.evaluated_at == submitted_at
    assert [option.worker_id for option in found.evaluated] == [first, other]
    there, idle = found.evaluated
    assert there.seconds < idle.seconds
    assert (idle.wait_seconds, there.extra_seconds) == (0.0, 0.0)
    assert idle.extra_seconds > 0.0
    assert found.until == pytest.approx(submitted_at + there.wait_seconds)
    assert {option.worker_id for option in found.options} == {first, other}


def test_an_evaluation_that_is_out_of_date_is_no_reason_any_more() -> None:
    shell, _, other = patient_shell()
    while shell.on(other) is None:
        shell.tick_comes()
    assert tasks(shell, "patient")[Stage.ENCODE].wait is None  # it runs


def test_a_blocked_task_names_what_its_input_does_and_adds_up_when_that_ends() -> None:
    shell = Shell()
    shell.workers(a=64)
    shell.submit(alone("first", encode("first")))
    shell.finish("a", cost=RunCost(run_seconds=0.5))
    shell.submit(image("j"))
    sample, decode = wait(shell, "j", Stage.SAMPLE), wait(shell, "j", Stage.DECODE)
    assert "(runs on a)" in sample.reason
    assert "(blocked)" in decode.reason
    assert sample.until is not None
    assert decode.until is not None
    assert shell.at <= sample.until < decode.until
    assert [option.worker_id for option in sample.options] == ["a"]


def test_a_task_behind_others_counts_them_and_their_time() -> None:
    shell = Shell()
    shell.workers(a=64)
    shell.submit(alone("first", encode("first")))
    shell.finish("a", cost=RunCost(run_seconds=0.5))
    for number in range(4):
        shell.submit(alone(f"j{number}", encode(f"text {number}")))
    second, last = wait(shell, "j1"), wait(shell, "j3")
    assert (second.ahead, last.ahead) == (0, 2)
    assert "1 of 1 are busy, 2 tasks before it" in last.reason
    assert second.until is not None
    assert last.until is not None
    run_seconds = last.options[0].run_seconds
    assert last.until - second.until == pytest.approx(2 * run_seconds)


def test_tasks_that_no_worker_can_take_say_what_they_wait_for() -> None:
    shell = Shell()
    shell.want("a")
    shell.submit(alone("j", encode("x")))
    assert wait(shell, "j").reason == "no worker that is up can run it; starting: a"
    assert wait(shell, "j").until is None
    group = NodeGroup("l4", start_seconds=90.0)
    shell = Shell(SchedulerConfig(groups=(group,)))
    shell.submit(alone("j", encode("x")))
    shell.tick_comes()
    found = wait(shell, "j")
    assert "starting: l4-0" in found.reason
    assert found.until is not None
    assert shell.at < found.until <= shell.at + 90.0


def test_the_limit_of_a_user_and_the_end_of_the_pool_are_reasons() -> None:
    share = UserShare(user=UserId("ann"), running_limit=1)
    shell = Shell(SchedulerConfig(shares=(share,)))
    shell.workers(a=64, b=64)
    for name in ("first", "second"):
        shell.submit(replace(alone(name, encode(name)), user=UserId("ann")))
    assert wait(shell, "second").reason == "its user has reached the limit of running tasks"
    shell.feed(PoolEnding(shell.tick(), shell.at + 60.0))
    assert wait(shell, "second").reason == "the pool is ending, and nothing starts any more"


def test_asking_changes_no_later_decision() -> None:
    def run(asks: bool) -> list[object]:
        shell = Shell()
        shell.workers(a=64, b=16)
        decided: list[object] = []
        for number in range(6):
            shell.submit(image(f"j{number}", seed=number))
        for _ in range(30):
            if asks:
                for number in range(6):
                    history_of(shell.state, JobId(f"j{number}"), shell.at + 1.0)
            for name in ("a", "b"):
                if shell.on(name):
                    decided += shell.finish(name)
        return decided

    assert run(asks=True) == run(asks=False)


def test_a_task_of_a_fixed_batch_size_says_which_pass_it_waits_for() -> None:
    """For a row of the pass that runs; or for a worker, with how many of its kind. Found: before a run was measured, it
    said that no worker could run the task."""
    shell = Shell(SchedulerConfig(joins=True))
    shell.workers(a=64)
    for seed in (1, 2, 3):
        shell.submit(alone(f"job {seed}", sample(seed=seed, batch_size=2)))
    reason = wait(shell, "job 3", Stage.SAMPLE).reason
    assert reason.startswith("waits for a worker: 1 of 1 are busy, with runs of a length that was not measured yet")
    assert reason.endswith("; or joins the pass on a when one of its 2 rows is free")
    shell = Shell(SchedulerConfig(joins=True))
    shell.workers(a=64)
    shell.submit(alone("busy", sample(seed=9)))
    for seed in range(5):
        shell.submit(alone(f"job {seed}", sample(seed=seed, batch_size=2)))
    waits = [found for n in range(5) if (found := tasks(shell, f"job {n}")[Stage.SAMPLE].wait) is not None]
    assert waits
    for found in waits:
        assert found.reason.endswith(f"; then runs in a pass of 2 images, for which {len(waits)} of its kind wait")
