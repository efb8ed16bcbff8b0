"""Tasks that run in one batch, and what a simulation writes down of its runs.

Proves: a batch takes its seconds and its bytes once, shared out whole; each member ends at the same time, the first
first; a stopped member does not stop the others; runs add up to the totals, and what was cut short took what it took.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from modelpool.pool.values.core.errors import GIB
from modelpool.pool.values.specs.spec import JobId, JobSpec, TaskSpec, WorkerId
from modelpool.scheduler.core.invariants import validate
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.messages import Command, Event, Outcome, RunTask, StopTask, Submitted, Tick
from modelpool.scheduler.simulator.cluster import VirtualCluster
from modelpool.scheduler.simulator.machines import SimulatedGpu
from modelpool.scheduler.simulator.metrics import figures
from modelpool.scheduler.simulator.workloads.generators import poisson
from modelpool.scheduler.simulator.workloads.models import InventedModel
from tests.simulation.scripted import Scripted, Step, component, task
from tests.simulation.worlds import gpus, mix, troubled

A = component("a/d", 31)


def batch(
    core: Scripted, tasks: list[TaskSpec], capacity_bytes: int = 100, marginal: float = 0.5
) -> VirtualCluster[Scripted]:
    """One GPU, up at 0, with a link of 10 bytes a second."""
    gpu = SimulatedGpu(WorkerId("g0"), capacity_bytes, 10.0, start_seconds=0.0, marginal=marginal)
    cluster = VirtualCluster(core, [gpu])
    cluster.post(Submitted(0.0, JobSpec(JobId("job"), tuple(tasks), tasks[-1].task_id)))
    cluster.start([A])
    return cluster


def test_a_batch_takes_its_seconds_once_and_shares_them_out() -> None:
    """3.1 s of load, 10 x (1 + 2 x 0.5) s of computation, for three."""
    core = Scripted({"g0": [Step("t0", batch_mates=("t1", "t2"))]})
    cluster = batch(core, [task(f"t{n}", "a/d") for n in range(3)])
    cluster.run()
    assert [event.report.task_id for event in core.ended] == ["t0", "t1", "t2"]
    assert [event.at for event in core.ended] == [pytest.approx(23.1)] * 3
    costs = [event.report.cost for event in core.ended]
    assert [cost.batched for cost in costs] == [3, 3, 3]
    assert [cost.uploaded_bytes for cost in costs] == [11, 10, 10]
    assert sum(cost.load_seconds for cost in costs) == pytest.approx(3.1)
    assert sum(cost.run_seconds for cost in costs) == pytest.approx(20.0)
    assert cluster.totals.runs == len(cluster.runs) == 3
    assert cluster.totals.run_seconds == pytest.approx(20.0)


def test_a_batch_needs_room_for_all_of_its_members() -> None:
    """Three times 30 bytes of activations leave 10 of 100 for weights: the rest streams, once for all three."""
    core = Scripted({"g0": [Step("t0", batch_mates=("t1", "t2"))]})
    cluster = batch(core, [task(f"t{n}", "a/d", activation_bytes=30, passes=2) for n in range(3)])
    cluster.run()
    assert (cluster.totals.uploaded_bytes, cluster.totals.streamed_bytes) == (10, 2 * 21)


def test_a_stopped_member_leaves_the_others_running() -> None:
    class Stopping(Scripted):
        def handle(self, event: Event) -> list[Command]:
            if isinstance(event, Tick):
                return [StopTask(WorkerId("g0"), 1, task("t1", "a/d").task_id, 0)]
            return super().handle(event)

    core = Stopping({"g0": [Step("t0", batch_mates=("t1",)), Step("t2")]})
    cluster = batch(core, [task(f"t{n}", "a/d") for n in range(3)])
    cluster.post(Tick(5.0))
    cluster.run()
    assert [(e.report.task_id, e.report.error is None) for e in core.ended] == [
        ("t1", False),
        ("t0", True),
        ("t2", True),
    ]
    stopped, first, last = cluster.runs
    assert (stopped.ended_at, stopped.ended_well) == (5.0, False)
    assert first.ended_at == last.started_at == pytest.approx(18.1)
    # found in a review: seconds of a mate that had left were nobody's. Until 5 each has half, then one has all
    assert (stopped.load_seconds, stopped.run_seconds) == (pytest.approx(3.1 / 2), pytest.approx(1.9 / 2))
    assert (first.load_seconds, first.run_seconds) == (pytest.approx(3.1 / 2), pytest.approx(1.9 / 2 + 13.1))
    assert (stopped.uploaded_bytes, first.uploaded_bytes) == (0, 31)
    found = figures(cluster)
    assert found.running_seconds + found.loading_seconds == pytest.approx(found.makespan_seconds)
    (alone,) = found.users
    assert alone.gpu_seconds == pytest.approx(found.makespan_seconds)


@pytest.mark.parametrize("limit", [1, 4])
def test_the_core_batches_what_it_may(limit: int) -> None:
    """40 images of one shape on GPUs on which a further one costs a quarter: with batches the pool is done sooner, in
    fewer starts, and every invariant holds."""
    one = InventedModel("one", activation_bytes=GIB)
    fast = [replace(gpu, marginal=0.25) for gpu in gpus(2)]
    cluster = VirtualCluster(SchedulerState(SchedulerConfig(batch_limit=limit)), fast)
    cluster.start(one.components)
    for number in range(40):
        job = one.job(f"job-{number}", f"prompt {number}", number)
        tasks = tuple(replace(task, together="images") for task in job.tasks)
        cluster.post(Submitted(0.0, replace(job, tasks=tasks)))
    cluster.run(after_each=validate)
    assert set(cluster.outcomes.values()) == {Outcome.SUCCEEDED}
    assert len(cluster.runs) == 120
    starts = sum(isinstance(command, RunTask) for _, command in cluster.commands)
    assert starts == 120 if limit == 1 else starts < 80
    most = max(run.batched for run in cluster.runs)
    assert most == limit
    undivided_seconds = 120 / 3 * (0.1 + 2.0 + 0.4) / 2
    assert (cluster.now < 0.8 * undivided_seconds) == (limit > 1)


def test_runs_add_up_to_the_totals() -> None:
    cluster = VirtualCluster(SchedulerState(), gpus(3))
    what, rng = mix(), Random(5)
    cluster.start(what.components)
    for submission in what.submissions(poisson(80, 1.0, rng), rng):
        cluster.post(submission)
    cluster.run()
    runs, totals = cluster.runs, cluster.totals
    assert len(runs) == totals.runs
    assert sum(run.uploaded_bytes for run in runs) == totals.uploaded_bytes
    assert sum(run.streamed_bytes for run in runs) == totals.streamed_bytes
    assert sum(run.storage_bytes for run in runs) == totals.storage_bytes > 0
    assert sum(run.patch_switches for run in runs) == totals.patch_switches
    assert sum(len(run.adapters_loaded) for run in runs) == totals.adapters_loaded > 0
    assert sum(run.resident for run in runs) == totals.runs_resident
    assert sum(run.load_seconds for run in runs) == pytest.approx(totals.load_seconds)
    assert sum(run.run_seconds for run in runs) == pytest.approx(totals.run_seconds)
    for run in runs:
        named = cluster.submitted[run.job_id].job
        assert run.task_id in {task.task_id for task in named.tasks}
        assert run.ended_at == pytest.approx(run.started_at + run.load_seconds + run.run_seconds)


def test_runs_of_a_worker_never_overlap_whatever_goes_wrong() -> None:
    """With losses, stops and failures: a run takes what passed, and the next one begins after it."""
    cluster = troubled(3, 80, gpus(3, 24, 8))
    cluster.run()
    assert any(not run.ended_well for run in cluster.runs)
    free_at: dict[WorkerId, float] = {}
    for run in sorted(cluster.runs, key=lambda run: (run.started_at, run.ended_at)):
        assert run.started_at >= free_at.get(run.worker_id, 0.0)
        assert run.load_seconds >= 0.0
        assert run.run_seconds >= 0.0
        assert run.load_seconds + run.run_seconds == pytest.approx(run.ended_at - run.started_at)
        free_at[run.worker_id] = run.ended_at
