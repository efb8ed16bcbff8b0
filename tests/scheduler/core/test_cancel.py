"""Cancelling at every moment. A GPU does not let go when asked: the job waits for the end of what only it needed."""

from __future__ import annotations

from modelpool.pool.values.specs.spec import JobId, JobSpec, RunErrorKind
from modelpool.scheduler.model.messages import Outcome, ResolveJob, RunTask, ScheduleTick, StopTask
from tests.scheduler.world import Shell, encode, image, sample


def test_a_waiting_job_is_cancelled_at_once(shell: Shell) -> None:
    shell.submit(image("j"))
    assert shell.cancel("j") == [ResolveJob(JobId("j"), Outcome.CANCELLED)]
    shell.workers(a=64)
    assert not shell.running, "its tasks are gone"


def test_a_running_job_ends_when_its_run_has_ended(shell: Shell) -> None:
    """1. The encode runs. 2. Cancel: a StopTask, and a look whether it stopped. 3. Cancel again: nothing. 4. The run
    ends: resolved."""
    shell.workers(a=64)
    shell.submit(image("j"))
    assert [type(c) for c in shell.cancel("j")] == [StopTask, ScheduleTick]
    assert shell.cancel("j") == []
    assert shell.outcome("j") is None
    shell.finish("a", RunErrorKind.CANCELLED)
    assert shell.outcome("j") is Outcome.CANCELLED


def test_a_run_that_ends_well_before_it_could_stop_still_cancels(shell: Shell) -> None:
    """The job is cancelled whatever the run says, and its encode is of use to a later job."""
    shell.workers(a=64)
    shell.submit(image("j"))
    shell.cancel("j")
    shell.finish("a")
    assert shell.outcome("j") is Outcome.CANCELLED
    assert shell.held == {encode("cat").task_id}


def test_a_worker_that_is_lost_ends_the_wait(shell: Shell) -> None:
    shell.workers(a=64)
    shell.submit(image("j"))
    shell.cancel("j")
    shell.lose("a")
    assert shell.outcome("j") is Outcome.CANCELLED


def test_a_shared_run_goes_on_and_the_cancelled_job_ends_at_once(shell: Shell) -> None:
    """1. Two jobs share the running encode. 2. One is cancelled: resolved, no StopTask. 3. The other goes on."""
    shell.workers(a=64)
    shell.submit(image("gone", seed=1))
    shell.submit(image("stays", seed=2))
    assert shell.cancel("gone") == [ResolveJob(JobId("gone"), Outcome.CANCELLED)]
    for _ in range(3):
        shell.finish("a")
    assert shell.outcome("stays") is Outcome.SUCCEEDED


def test_a_stopping_task_that_a_new_job_needs_runs_again(shell: Shell) -> None:
    """1. The only job of a running encode is cancelled. 2. A new job needs that encode. 3. The run stops.
    4. The first job is resolved; the encode is sent again, and that stop counts as no failure."""
    shell.workers(a=64)
    shell.submit(image("first", seed=1))
    shell.cancel("first")
    assert shell.submit(image("second", seed=2)) == []
    commands = shell.finish("a", RunErrorKind.CANCELLED)
    assert shell.outcome("first") is Outcome.CANCELLED
    (run,) = [c for c in commands if isinstance(c, RunTask)]
    assert (run.task_id, run.attempt) == (encode("cat").task_id, 2)
    assert shell.state.demand.tasks[encode("cat").task_id].failures == 0


def test_a_stopping_task_that_a_new_job_needs_may_also_succeed(shell: Shell) -> None:
    """1. as above, 3. the run ends well. 4. The new job takes the result."""
    shell.workers(a=64)
    shell.submit(image("first", seed=1))
    shell.cancel("first")
    shell.submit(image("second", seed=2))
    shell.finish("a")
    assert shell.outcome("first") is Outcome.CANCELLED
    assert shell.on("a") == image("second", seed=2).tasks[1].task_id


def test_both_jobs_of_a_stopping_task_may_be_cancelled(shell: Shell) -> None:
    """1. First job cancelled, its encode is stopping. 2. A second job needs it, and is cancelled too: no second stop.
    3. The run ends: both are resolved."""
    shell.workers(a=64)
    shell.submit(image("first", seed=1))
    shell.cancel("first")
    shell.submit(image("second", seed=2))
    assert shell.cancel("second") == []
    shell.finish("a", RunErrorKind.CANCELLED)
    assert {shell.outcome("first"), shell.outcome("second")} == {Outcome.CANCELLED}


def two_prompts(job_id: str) -> JobSpec:
    """A sample that reads two encodes; the second takes longer."""
    first, other = encode("cat"), encode("dog", run_seconds=2.0)
    both = sample(first.task_id, other.task_id)
    return JobSpec(JobId(job_id), (first, other, both), both.task_id)


def test_a_job_waits_for_all_of_its_runs(shell: Shell) -> None:
    """Two encodes of one job run on two workers; the job ends with the second."""
    shell.workers(a=64, b=64)
    shell.submit(two_prompts("j"))
    assert len(shell.running) == 2
    assert [type(c) for c in shell.cancel("j")] == [StopTask, StopTask, ScheduleTick]
    shell.finish("a", RunErrorKind.CANCELLED)
    assert shell.outcome("j") is None
    shell.finish("b", RunErrorKind.CANCELLED)
    assert shell.outcome("j") is Outcome.CANCELLED


def test_cancelled_without_being_asked_is_a_mistake_of_ours(shell: Shell) -> None:
    shell.workers(a=64)
    shell.submit(image("j"))
    shell.finish("a", RunErrorKind.CANCELLED)
    assert shell.error("j").kind is RunErrorKind.INTERNAL


def test_a_failing_job_stops_what_only_it_needed(shell: Shell) -> None:
    """1. Two encodes of one job run. 2. One fails for good. 3. The other is stopped; the job does not wait for it."""
    shell.workers(a=64, b=64)
    shell.submit(two_prompts("j"))
    shell.finish("a", RunErrorKind.BAD_INPUT)
    assert shell.outcome("j") is Outcome.FAILED
    assert shell.running[min(shell.running)].stop_requested
    shell.finish("b", RunErrorKind.CANCELLED)
    assert not shell.state.demand.tasks
