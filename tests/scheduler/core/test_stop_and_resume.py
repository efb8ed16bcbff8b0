"""Runs that stop with their state: tasks resume on any worker, states are released, and lost ones cost only time."""

from __future__ import annotations

import pytest

from modelpool.pool.values.specs.spec import RunCost, RunErrorKind, TaskId, WorkerId
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.kept_states import KeptState, state_id, step_seconds, task_of_state
from modelpool.scheduler.model.messages import Outcome, ReleaseResult, RunTask, StateKept, StopTask
from tests.scheduler.world import PAINT, STEPS, Shell, alone, sample

GIVEN = TaskId("given:1")


def shell_with(*jobs: str, workers: str = "a", **config: float | bool | None) -> Shell:
    """Workers that are up, and samples of one cost class, in order."""
    shell = Shell(SchedulerConfig(story_length=None, **config))  # type: ignore[arg-type]
    shell.workers(**dict.fromkeys(workers, 64))
    for seed, job in enumerate(jobs):
        shell.submit(alone(job, sample(GIVEN, seed=seed), given=(GIVEN,)))
    return shell


def runs(commands: list) -> list[RunTask]:
    return [command for command in commands if isinstance(command, RunTask)]


def test_a_stopped_run_resumes_elsewhere_and_its_state_is_released() -> None:
    shell = shell_with("j", workers="ab")
    task_id = shell.on("a")
    assert task_id is not None
    (stop,) = [c for c in shell.pause("a") if isinstance(c, StopTask)]
    assert (stop.task_id, stop.attempt, stop.keep_state) == (task_id, 1, True)
    assert not any(isinstance(c, StopTask) for c in shell.pause("a")), "asked twice"
    shell.want("b")
    (again,) = runs(shell.stop_at("a", 3))
    assert (again.worker_id, again.task_id, again.attempt, again.resume) == ("b", task_id, 2, True)
    task = shell.state.demand.tasks[task_id]
    assert task.kept == KeptState(3, STEPS, 1)
    assert (task.failures, task.crashed, task.spec.run_seconds, task.full_run_seconds) == (0, (), 2.5, 10.0)
    released = [c for c in shell.finish("b") if isinstance(c, ReleaseResult)]
    assert ReleaseResult(state_id(task_id)) in released
    assert shell.outcome("j") is Outcome.SUCCEEDED


def test_a_stop_does_not_count_as_a_failure_however_often() -> None:
    shell = shell_with("j", max_attempts=1)
    for step in (1, 1, 2, 3):
        shell.pause("a")
        shell.stop_at("a", step)
    shell.pause("a")
    shell.finish("a", RunErrorKind.CANCELLED)  # it had not begun: the earlier state stays
    assert shell.running[WorkerId("a")].command.resume
    shell.finish("a")
    assert shell.outcome("j") is Outcome.SUCCEEDED


def test_a_run_that_ends_before_it_could_stop_has_a_result() -> None:
    shell = shell_with("j")
    shell.pause("a")
    shell.finish("a")
    assert shell.outcome("j") is Outcome.SUCCEEDED


def test_a_lost_state_starts_the_task_from_its_beginning() -> None:
    """While it waits, and when only the run finds out."""
    shell = shell_with("j", "k", max_attempts=1)
    first = shell.on("a")
    assert first is not None
    shell.pause("a")
    shell.lose("a")  # the state does not arrive: the run is lost with its worker
    assert first not in shell.states
    shell = shell_with("j", "k", max_attempts=1)
    shell.pause("a")
    shell.want()
    shell.stop_at("a", 2)
    assert shell.state.demand.tasks[first].spec.run_seconds == 5.0
    shell.lose_state(first)
    task = shell.state.demand.tasks[first]
    assert (task.kept, task.spec.run_seconds) == (None, 10.0)
    shell.workers(b=64)
    assert (shell.on("b"), shell.running[WorkerId("b")].command.resume) == (first, False)

    shell = shell_with("j", max_attempts=1)
    shell.pause("a")
    shell.stop_at("a", 2)
    assert shell.running[WorkerId("a")].command.resume
    commands = shell.finish("a", RunErrorKind.INPUT_LOST)
    assert ReleaseResult(state_id(first)) in commands
    (again,) = runs(commands)
    assert not again.resume, "its input is still held, so only the state was lost"
    assert shell.state.demand.tasks[first].failures == 0
    shell.finish("a")
    assert shell.outcome("j") is Outcome.SUCCEEDED


def test_a_cancelled_task_releases_its_state() -> None:
    """While it waits, and while it stops: then the state arrives later than the cancellation."""
    shell = shell_with("j", "k")
    first = shell.on("a")
    assert first is not None
    shell.want()
    shell.pause("a")
    shell.stop_at("a", 2)
    assert ReleaseResult(state_id(first)) in shell.cancel("j")
    assert shell.outcome("j") is Outcome.CANCELLED

    shell = shell_with("j", "k")
    shell.pause("a")
    (stop,) = [c for c in shell.cancel("j") if isinstance(c, StopTask)]
    assert not stop.keep_state
    assert ReleaseResult(state_id(first)) in shell.stop_at("a", 2)
    assert shell.outcome("j") is Outcome.CANCELLED


def test_a_job_that_comes_back_resumes_from_the_state() -> None:
    shell = shell_with("j")
    first = shell.on("a")
    shell.pause("a")
    shell.cancel("j")
    shell.submit(alone("again", sample(GIVEN, seed=0), given=(GIVEN,)))
    (again,) = runs(shell.stop_at("a", 3))
    assert (again.task_id, again.resume) == (first, True)


def test_a_checkpoint_is_what_a_lost_run_resumes_from() -> None:
    shell = shell_with("j", workers="ab")
    first = shell.on("a")
    assert first is not None
    shell.save("a", 1)
    shell.save("a", 3)
    assert shell.state.demand.tasks[first].spec.run_seconds == 10.0, "the run in progress is as long as before"
    (again,) = runs(shell.lose("a"))
    assert (again.worker_id, again.task_id, again.resume) == ("b", first, True)
    assert shell.state.demand.tasks[first].kept == KeptState(3, STEPS, 1)
    assert ReleaseResult(state_id(first)) in shell.finish("b")


def test_a_state_that_comes_too_late_is_released() -> None:
    shell = shell_with("j")
    run = shell.running[WorkerId("a")]
    shell.finish("a")
    shell.running[WorkerId("a")] = run
    assert ReleaseResult(state_id(run.command.task_id)) in shell.save("a", 2)


def test_only_complete_runs_teach_their_length() -> None:
    """The steps that are left are held against the seconds that they took."""
    ratios = []
    for pauses in ((), (1,), (1, 3)):
        shell = shell_with("j")
        cost, done = 40.0, 0
        for step in pauses:
            shell.pause("a")
            shell.stop_at("a", step)
            done = step
        shell.finish("a", cost=RunCost(run_seconds=cost * (STEPS - done) / STEPS))
        shell.submit(alone("next", sample(GIVEN, seed=9), given=(GIVEN,)))
        worker = shell.state.worker_table.workers[WorkerId("a")]
        task = shell.state.demand.tasks[worker.task_id]  # type: ignore[index]
        ratios.append(shell.state.costs.resident_seconds(task.spec, task.cost_class, worker))
    assert ratios == [40.0, 40.0, 40.0]


def test_tasks_resume_together_only_from_one_step() -> None:
    shell = shell_with("i", "j", "k", batch_limit=2)
    shell.finish("a")
    assert len(shell.running[WorkerId("a")].members) == 2
    names = {one.command.task_id for one in shell.running[WorkerId("a")].members}
    (first, second) = [c for c in shell.pause("a") if isinstance(c, StopTask)]
    assert {first.task_id, second.task_id} == names
    assert not runs(shell.stop_at("a", 2)), "the worker is free after the last of them"
    (again,) = runs(shell.stop_at("a", 2))
    assert {again.task_id, *(mate.task_id for mate in again.batch_mates)} == names
    assert again.resume
    shell.pause("a")
    shell.stop_at("a", 3)
    shell.finish("a", RunErrorKind.CANCELLED)  # this one's state did not arrive
    assert len(shell.running[WorkerId("a")].members) == 1


@pytest.mark.parametrize("seconds", [10.0, 0.0])
def test_ids_and_figures_of_states(seconds: float) -> None:
    task = sample(GIVEN, model=PAINT, run_seconds=seconds)
    assert task_of_state(state_id(task.task_id)) == task.task_id
    assert task_of_state(task.task_id) is None
    assert KeptState(3, 4).remaining == 0.25
    assert step_seconds(task, seconds) == seconds / STEPS


def test_a_run_that_resumed_from_a_state_unknown_here_teaches_the_length_of_its_own_steps() -> None:
    """Its worker found the state on its disk: half of the steps, in half of the time, are no faster run."""
    seconds = []
    for cost in (RunCost(run_seconds=40.0), RunCost(run_seconds=20.0, steps_before=STEPS // 2, steps=STEPS)):
        shell = shell_with("j")
        shell.finish("a", cost=cost)
        shell.submit(alone("next", sample(GIVEN, seed=9), given=(GIVEN,)))
        worker = shell.state.worker_table.workers[WorkerId("a")]
        task = shell.state.demand.tasks[worker.task_id]  # type: ignore[index]
        seconds.append(shell.state.costs.resident_seconds(task.spec, task.cost_class, worker))
    assert seconds == [40.0, 40.0]


def test_a_state_that_an_earlier_pool_left_is_that_of_a_waiting_task() -> None:
    """It comes right after the submission, from no run."""
    shell = shell_with("j", "k")
    waiting = next(name for name in shell.state.demand.tasks if name != shell.on("a"))
    shell.states[waiting] = 3
    shell.feed(StateKept(shell.tick(), WorkerId(""), 0, waiting, 0, 3, STEPS, 1))
    assert shell.state.demand.tasks[waiting].spec.run_seconds == 2.5
    (start,) = runs(shell.finish("a"))
    assert (start.task_id, start.resume) == (waiting, True)
    causes = {str(line.cause) for line in shell.state.story("k")}
    assert any("state of an earlier pool found after step 3 of 4" in cause for cause in causes)
