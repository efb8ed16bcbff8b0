"""Requests that join a running pass at a step, in virtual time.

Proves: throughput and the slowest requests are never worse by it than with whole runs, at any load; a pass never has
more rows than its size; whatever fails, is lost, cancelled or stopped for others, every request comes to its end, and
those that are stopped go on at their step in another pass.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from benchmarks.joining import BEGIN_AT, SHAPES, TEXT, UNET, UNETS, VAE, Shape, Way, job_of, serve
from modelpool.pool.values.core.errors import GIB
from modelpool.pool.values.specs.spec import (
    ComponentSpec,
    ComponentUse,
    JobId,
    JobSpec,
    Role,
    RunErrorKind,
    Stage,
    TaskId,
    TaskSpec,
    UserId,
    WorkerId,
)
from modelpool.scheduler.core.invariants import validate
from modelpool.scheduler.core.pass_breaks import MOST_LOST, SWITCH_SECONDS
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.messages import (
    CancelRequested,
    LossCause,
    Outcome,
    RunTask,
    StopTask,
    Submitted,
    WorkerDown,
)
from modelpool.scheduler.simulator.cluster import VirtualCluster
from modelpool.scheduler.simulator.faults import Disturbances
from modelpool.scheduler.simulator.machines import SimulatedGpu
from modelpool.scheduler.simulator.workloads.generators import all_at_once
from modelpool.scheduler.simulator.workloads.mix import Mix
from modelpool.scheduler.simulator.workloads.models import InventedModel
from tests.simulation.test_shared_runs import fixed


def test_joining_is_never_worse_than_waiting_for_whole_runs() -> None:
    worse = []
    for shape in SHAPES:
        for gpus, load in ((1, 0.2), (1, 0.95), (2, 0.6), (2, 0.95)):
            whole, joining = (serve(shape, gpus, load, Way(shape.rows, joins), 150) for joins in (False, True))
            if joining.p99_seconds > 1.03 * whole.p99_seconds or joining.per_second < 0.97 * whole.per_second:
                worse.append((shape.name, gpus, load, whole, joining))
    assert not worse


def test_one_that_comes_while_a_pass_runs_starts_at_its_next_step() -> None:
    """And ends as long after that as it takes; the one before it is not delayed."""
    shape = Shape("s", 0.5, 4, 2.0, (10,), 0.1, 0.1, 1.0)
    cluster = VirtualCluster(SchedulerState(), [SimulatedGpu(WorkerId("a"), 80 * GIB, 1000.0 * GIB)])
    cluster.start((ComponentSpec(UNET, Role.DIFFUSION_MODEL, 2 * GIB, 2 * GIB),))
    for number, at in enumerate((BEGIN_AT, BEGIN_AT + 3.3)):
        cluster.post(Submitted(at, job_of(shape, number, 10, 4, False)))
    cluster.run()
    first, second = sorted(cluster.runs, key=lambda run: run.started_at)
    load_seconds = first.loaded_at - first.started_at
    assert first.ended_at - first.loaded_at == pytest.approx(10.0)
    assert second.loaded_at - BEGIN_AT - load_seconds == pytest.approx(4.0), "its next step, each of one second"
    assert second.ended_at - second.loaded_at == pytest.approx(10.0)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_everybody_comes_to_an_end(seed: int) -> None:
    """Rows that fail, workers that are lost, jobs that are cancelled, and others of a higher priority, for which runs
    are stopped. A row that fails in company is tried alone."""
    rng, shape, jobs = Random(seed), SHAPES[0], 80
    faults = Disturbances(
        run_error=lambda command: RunErrorKind.INTERNAL if command.enters and rng.random() < 0.2 else None
    )
    state = SchedulerState(SchedulerConfig(story_length=None, preemption_wait_seconds=1.0, max_attempts=5))
    machines = [SimulatedGpu(WorkerId(f"gpu-{n}"), 80 * GIB, 25.0 * GIB) for n in range(2)]
    cluster = VirtualCluster(state, machines, disturbances=faults, checkpoint_seconds=0.7)
    cluster.start((ComponentSpec(UNET, Role.DIFFUSION_MODEL, 2 * GIB, 2 * GIB),))
    at, cancelled = BEGIN_AT, set[JobId]()
    for number in range(jobs):
        at += rng.expovariate(4.0)
        rows = 1 if number % 9 == 0 else 8  # those take a worker of their own
        job = job_of(shape, number, rng.choice(shape.steps), rows, False)
        cluster.post(Submitted(at, job if rows > 1 else replace(job, priority=2)))
        if number % 11 == 5:
            cancelled.add(job.job_id)
            cluster.post(CancelRequested(at + rng.random() * 4.0, job.job_id))
    for n in range(3):
        cluster.post(
            WorkerDown(BEGIN_AT + 4.0 * (1 + n), WorkerId(f"gpu-{n % 2}"), -1, "by the test", LossCause.KILLED)
        )
    rows_in_use: list[int] = []

    def check(core: SchedulerState) -> None:
        validate(core)
        rows_in_use.extend(len(worker.task_ids) for worker in core.worker_table.workers.values())

    cluster.run(after_each=check)
    failed = {job_id for job_id, outcome in cluster.outcomes.items() if outcome is not Outcome.SUCCEEDED}
    assert len(cluster.outcomes) == jobs
    assert failed <= cancelled, cluster.errors
    assert 2 < max(rows_in_use) <= 8
    sent = [command for _, command in cluster.commands if isinstance(command, RunTask)]
    assert sum(command.enters for command in sent) > jobs // 4
    assert any(command.enters and command.resume for command in sent), "a stopped one joins another pass at its step"
    assert any(isinstance(command, StopTask) and command.keep_state for _, command in cluster.commands)


def test_what_waits_for_a_pass_waits_for_the_share_window_and_one_run_at_most() -> None:
    """One user sends requests all the time to one GPU, and each image is decoded there. Found: a decode waited for as
    many joins as may overtake it, 94 s where a run takes 10 s: tasks of one user have no virtual starts, and the window
    held for several users only. It costs no throughput."""
    size, jobs = 4, 120
    what = Mix([InventedModel("m", diffusion_bytes=2 * GIB)], steps=(10, 20, 30, 50))
    ends = {}
    for joins in (False, True):
        state = SchedulerState(SchedulerConfig(story_length=None, joins=joins))
        cluster = VirtualCluster(state, [SimulatedGpu(WorkerId("a"), 40 * GIB, 10.0 * GIB)])
        cluster.start(what.components)
        for number, submission in enumerate(what.submissions(all_at_once(jobs), Random(1))):
            job = fixed(submission.job, size)
            tasks = tuple(
                replace(task, needs=(), input_names=()) if task.stage is Stage.SAMPLE else task
                for task in job.tasks
                if task.stage is not Stage.ENCODE
            )
            cluster.post(Submitted(submission.at + 0.8 * number, replace(job, tasks=tasks, batch="")))
        cluster.run()
        assert not cluster.errors
        sampled = {run.job_id: run for run in cluster.runs if run.stage is Stage.SAMPLE}
        decodes = [run for run in cluster.runs if run.stage is Stage.DECODE]
        assert len(decodes) == jobs
        longest = max(run.ended_at - run.started_at for run in sampled.values())
        waited = max(run.started_at - sampled[run.job_id].ended_at for run in decodes)
        assert waited <= state.config.share_window_seconds + longest, joins
        ends[joins] = cluster.now
    assert ends[True] <= ends[False]


def test_one_gpu_that_also_encodes_and_decodes_makes_what_full_passes_make() -> None:
    """With one model, and with two that alternate. Found: 0.77 (0.68) of the images that came, as no text was encoded
    before its row had been empty for long."""
    shape, wrong = SHAPES[0], []
    for models, part in ((1, 0.93), (2, 0.9)):
        found = serve(shape, 1, 0.8, Way(shape.rows, True, True, True), 300, seed=3, models=models)
        if found.per_second < part * 0.8 * shape.per_second(shape.rows):
            wrong.append((models, found))
    assert not wrong


@pytest.mark.parametrize("seed", [1, 2])
def test_no_request_of_another_model_waits_longer_because_of_joins_and_stops(seed: int) -> None:
    """One GPU has more requests of a model than it can serve. Each task of another one starts after the share window,
    the longest run, and what may go before it then: the short tasks of a stop."""
    shape, rng = SHAPES[0], Random(seed)
    state = SchedulerState(SchedulerConfig(story_length=None))
    gpu = SimulatedGpu(WorkerId("a"), 80 * GIB, 25.0 * GIB, resume_seconds=SWITCH_SECONDS)
    cluster = VirtualCluster(state, [gpu])
    parts = ((TEXT, Role.TEXT_ENCODER), (VAE, Role.VAE), *((unet, Role.DIFFUSION_MODEL) for unet in UNETS))
    cluster.start(tuple(ComponentSpec(key, role, GIB, GIB) for key, role in parts))
    at, jobs = BEGIN_AT, 160
    for number in range(jobs):
        at += rng.expovariate(1.1 * shape.per_second(shape.rows))
        unet = UNETS[1] if number % 20 == 7 else UNETS[0]
        cluster.post(Submitted(at, job_of(shape, number, rng.choice(shape.steps), shape.rows, True, unet)))
    cluster.run()
    assert not cluster.errors
    others = {JobId(f"job-{number}") for number in range(jobs) if number % 20 == 7}
    longest = shape.seconds(max(shape.steps), shape.rows)
    short = SWITCH_SECONDS + 2 * shape.rows * shape.text_seconds + shape.rows * shape.image_seconds
    waits = []
    for job_id in others:
        runs = sorted((run for run in cluster.runs if run.job_id == job_id), key=lambda run: run.started_at)
        samplings = [run for run in runs if run.stage is Stage.SAMPLE]
        waits.append(samplings[0].started_at - runs[0].ended_at)
        waits.append(runs[-1].started_at - samplings[-1].ended_at)
    assert max(waits) <= state.config.share_window_seconds + longest + short


@pytest.mark.parametrize(("seconds", "per_second"), [(1.0, 0.8), (0.3, 4.0)])
def test_short_jobs_of_another_user_do_not_take_the_time_of_a_pass(seconds: float, per_second: float) -> None:
    """A pass stopped for each of them again and again: a run of 60 s took 233 s. What follows a sampling is another
    thing: there are no more of these than of samplings."""
    rng, at = Random(1), BEGIN_AT + 5.0
    cluster = VirtualCluster(SchedulerState(), [SimulatedGpu(WorkerId("a"), 80 * GIB, 25.0 * GIB)])
    cluster.start(tuple(ComponentSpec(key, role, GIB, GIB) for key, role in
                        ((VAE, Role.VAE), (UNET, Role.DIFFUSION_MODEL))))  # fmt: skip
    sample = TaskSpec(TaskId("sample"), Stage.SAMPLE, (ComponentUse(UNET, 1, passes=100),), GIB // 4, 60.0, (),
                      together="s", batch_size=4, pass_key="p")  # fmt: skip
    cluster.post(Submitted(BEGIN_AT, JobSpec(JobId("long"), (sample,), sample.task_id, user=UserId("A"))))
    for number in range(100):
        at += rng.expovariate(per_second)
        decode = TaskSpec(TaskId(f"d{number}"), Stage.DECODE, (ComponentUse(VAE, 1),), GIB // 4, seconds, ())
        cluster.post(Submitted(at, JobSpec(JobId(f"short {number}"), (decode,), decode.task_id, user=UserId("B"))))
    cluster.run()
    assert cluster.latency_seconds[JobId("long")] < 60.0 * (1 + MOST_LOST) + 2 * seconds
