"""Equal tasks of several jobs are one task; results are kept as long as they are of use, and no longer."""

from __future__ import annotations

from dataclasses import replace

from modelpool.pool.values.specs.spec import JobId, JobSpec, RunCost, RunErrorKind, TaskId
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.messages import Outcome, ReleaseResult, ResolveJob, RunTask
from tests.scheduler.world import DRAW, Shell, alone, decode, encode, image, sample


def run_all(shell: Shell, limit: int = 100) -> list[TaskId]:
    """Let every run end well until nothing runs; the tasks in the order in which they ended."""
    done: list[TaskId] = []
    while shell.running:
        assert len(done) < limit
        name = min(shell.running)
        task_id = shell.on(name)
        assert task_id is not None
        done.append(task_id)
        shell.finish(name)
    return done


def test_equal_tasks_of_two_jobs_run_once(shell: Shell) -> None:
    """Two seeds of one prompt: one encode, two samples; the same image twice: nothing new at all."""
    shell.workers(a=64)
    shell.submit(image("first", seed=1))
    shell.submit(image("second", seed=2))
    shell.submit(image("third", seed=1))
    done = run_all(shell)
    assert len(done) == len(set(done)) == 5
    assert {ended.outcome for ended in shell.resolved.values()} == {Outcome.SUCCEEDED}
    assert shell.resolved[JobId("first")].result == shell.resolved[JobId("third")].result


def test_jobs_of_one_submission_start_when_all_are_there(shell: Shell) -> None:
    """Found: of 24 texts that came at once, 12 went to workers one by one, each in a pass of eight of its own."""
    shell.workers(a=64, b=64)
    jobs = [alone(f"j{number}", encode(f"text {number}", batch_size=3)) for number in range(7)]
    started = [command for command in shell.submit_together(jobs) if isinstance(command, RunTask)]
    assert [1 + len(command.batch_mates) for command in started] == [3, 3]
    assert len(set(run_all(shell))) == len(shell.resolved) == 7


def test_a_kept_encode_serves_a_later_job(shell: Shell) -> None:
    """An encode result outlives its job; a sample or an image does not."""
    shell.workers(a=64)
    shell.submit(image("first", seed=1))
    run_all(shell)
    assert shell.held == {encode("cat").task_id}
    shell.submit(image("second", seed=2))
    assert [task.split(":")[0] for task in run_all(shell)] == ["s", "d"]


def test_a_wanted_encode_that_is_kept_resolves_a_new_job_at_once(shell: Shell) -> None:
    shell.workers(a=64)
    shell.submit(alone("first", encode("cat")))
    run_all(shell)
    commands = shell.submit(alone("second", encode("cat")))
    assert commands == [ResolveJob(JobId("second"), Outcome.SUCCEEDED, encode("cat").task_id)]


def test_a_job_is_resolved_before_its_result_is_released(shell: Shell) -> None:
    shell.workers(a=64)
    job = image("only")
    shell.submit(job)
    shell.finish("a")
    shell.finish("a")
    commands = shell.finish("a")
    resolve = ResolveJob(job.job_id, Outcome.SUCCEEDED, job.wanted)
    assert commands.index(resolve) < commands.index(ReleaseResult(job.wanted))


def test_a_result_is_held_while_a_live_job_may_read_it() -> None:
    """1. A sample is read by two decodes. 2. One of them ends. 3. The sample stays until the other has ended."""
    shell = Shell()
    shell.workers(a=64)
    first = encode("cat")
    second = sample(first.task_id)
    small = decode(second.task_id)
    large = replace(small, task_id=TaskId("d:large"), activation_bytes=9)
    shell.submit(JobSpec(JobId("small"), (first, second, small), small.task_id))
    shell.submit(JobSpec(JobId("large"), (first, second, large), large.task_id))
    shell.finish("a")
    shell.finish("a")
    shell.finish("a")
    assert len(shell.resolved) == 1
    assert second.task_id in shell.held
    shell.finish("a")
    assert second.task_id not in shell.held


def test_kept_results_are_bounded_by_count_and_the_oldest_goes_first() -> None:
    """1. Three encodes with room for two. 2. The first is asked for again, so the second is the oldest. 3. A fourth."""
    shell = Shell(SchedulerConfig(kept_results=2))
    shell.workers(a=64)
    for prompt in ("one", "two"):
        shell.submit(alone(prompt, encode(prompt)))
        run_all(shell)
    shell.submit(image("again", prompt="one"))
    run_all(shell)
    shell.submit(alone("three", encode("three")))
    run_all(shell)
    assert shell.held == {encode("one").task_id, encode("three").task_id}


def test_kept_results_are_bounded_by_bytes() -> None:
    """Two of 3 bytes do not fit in 5; one of 6 never does, and drives nothing out."""
    shell = Shell(SchedulerConfig(kept_result_bytes=5))
    shell.workers(a=64)
    for prompt, size in (("one", 3), ("two", 3), ("huge", 6)):
        shell.submit(alone(prompt, encode(prompt)))
        shell.finish("a", result_bytes=size)
    assert shell.held == {encode("two").task_id}


def test_a_released_result_is_made_again_when_a_later_job_needs_it() -> None:
    shell = Shell(SchedulerConfig(kept_results=0))
    shell.workers(a=64)
    shell.submit(image("first"))
    run_all(shell)
    assert shell.held == set()
    shell.submit(image("second"))
    assert [task.split(":")[0] for task in run_all(shell)] == ["e", "s", "d"]


def test_a_failing_shared_task_fails_its_jobs_and_no_other(shell: Shell) -> None:
    """1. Two jobs share an encode, a third does not. 2. The encode fails. 3. Both fail and name it; the third ends."""
    shell.workers(a=64)
    shell.submit(image("one", prompt="bad", seed=1))
    shell.submit(image("two", prompt="bad", seed=2))
    shell.submit(image("other", prompt="good", model=DRAW))
    assert shell.on("a") == encode("bad").task_id
    shell.finish("a", RunErrorKind.INTERNAL)
    for name in ("one", "two"):
        assert shell.error(name).kind is RunErrorKind.INTERNAL
        assert encode("bad").task_id in shell.error(name).message
        assert "it ended as internal" in shell.error(name).message
    run_all(shell)
    assert shell.outcome("other") is Outcome.SUCCEEDED


def test_a_given_result_is_read_and_released_when_its_job_ends(shell: Shell) -> None:
    shell.workers(a=64)
    given = TaskId("from the driver")
    job = alone("only", sample(given), given=(given,))
    (run,) = [c for c in shell.submit(job) if isinstance(c, RunTask)]
    assert run.task_id == job.wanted
    commands = shell.finish("a")
    assert ReleaseResult(given) in commands
    assert shell.held == set()


def test_a_given_result_is_held_while_its_job_lives(shell: Shell) -> None:
    """1. A sample was made of a given result. 2. The decode waits for a large worker. 3. The sample's result is lost:
    it can be made again, because what was given is still there."""
    given = TaskId("from the driver")
    second = sample(given)
    third = decode(second.task_id, activation_bytes=30)
    shell.want("small", "large")
    shell.come_up("small", 20)
    shell.submit(JobSpec(JobId("j"), (second, third), third.task_id, (given,)))
    shell.finish("small")
    assert given in shell.held
    shell.lose_result(second.task_id)
    assert shell.on("small") == second.task_id


def test_a_given_result_saves_others_the_run(shell: Shell) -> None:
    """1. A job waits for an encode. 2. Another job brings that very result. 3. The encode does not run any more."""
    first = encode("cat")
    shell.submit(image("waiting", seed=1))
    shell.submit(alone("bringing", sample(first.task_id, seed=2), given=(first.task_id,)))
    shell.workers(a=64)
    assert first.task_id not in run_all(shell)
    assert shell.outcome("waiting") is Outcome.SUCCEEDED


def test_a_given_result_stops_the_run_that_makes_it(shell: Shell) -> None:
    """1. An encode runs. 2. A job brings its result. 3. The run is stopped; the first job goes on without it."""
    shell.workers(a=64, b=64)
    first = encode("cat")
    shell.submit(image("running", seed=1))
    assert shell.on("a") == first.task_id
    shell.submit(alone("bringing", sample(first.task_id, seed=2), given=(first.task_id,)))
    assert shell.running[min(shell.running)].stop_requested
    shell.finish("a", RunErrorKind.CANCELLED)
    run_all(shell)
    assert shell.outcome("running") is Outcome.SUCCEEDED


def test_a_second_submission_does_nothing(shell: Shell) -> None:
    """While the job is live, and when it has ended."""
    shell.workers(a=64)
    shell.submit(image("only"))
    assert shell.submit(image("only")) == []
    run_all(shell)
    assert shell.submit(image("only")) == []


def test_tasks_of_one_id_must_need_the_same(shell: Shell) -> None:
    first = encode("cat")
    honest = sample(first.task_id)
    other = replace(honest, needs=())
    shell.submit(JobSpec(JobId("honest"), (first, honest), honest.task_id))
    shell.submit(alone("other", other))
    assert shell.error("other").kind is RunErrorKind.BAD_INPUT
    assert honest.task_id in shell.error("other").message


def test_only_a_task_that_makes_a_pass_longer_counts_as_overtaking() -> None:
    """Found: tasks that end with the pass counted, too, so that what waits for it was passed over beyond the limit."""
    shell = Shell(SchedulerConfig(overtaking_limit=2))
    shell.workers(a=64)
    shell.submit(alone("measured", sample(seed=9, batch_size=4)))
    shell.finish("a", cost=RunCost(run_seconds=2.5, batched=4))
    shell.submit(alone("long", sample(seed=1, batch_size=4, run_seconds=100.0)))
    waiting = encode("cat")
    shell.submit(alone("waits", waiting))
    for seed in (2, 3, 4):
        (joined, *_) = shell.submit(alone(f"short {seed}", sample(seed=seed, batch_size=4, run_seconds=10.0)))
        assert isinstance(joined, RunTask)
        assert joined.enters
        assert shell.state.demand.tasks[waiting.task_id].passed == 0.0, seed
