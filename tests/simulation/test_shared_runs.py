"""What running several tasks at once is worth where GPUs gain by it, and what it costs where they do not.

Proves, with models on GPUs with room: nothing is lost and everybody is served, also when runs fail and workers are
lost; a backlog is done sooner where a further image costs a part of one, at next to no cost where it does not; no
more bytes are moved for it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from modelpool.pool.values.core.errors import GIB
from modelpool.pool.values.specs.spec import JobSpec, RunErrorKind, Stage, WorkerId
from modelpool.scheduler.core.invariants import validate
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.messages import Submitted
from modelpool.scheduler.simulator.cluster import VirtualCluster
from modelpool.scheduler.simulator.faults import Disturbances
from modelpool.scheduler.simulator.machines import SimulatedGpu
from modelpool.scheduler.simulator.workloads.generators import all_at_once
from modelpool.scheduler.simulator.workloads.mix import Mix
from modelpool.scheduler.simulator.workloads.models import InventedModel


def alike(job: JobSpec) -> JobSpec:
    """With tasks that may be run together, as images of a real model are."""
    return replace(job, tasks=tuple(replace(task, together=task.stage.value) for task in job.tasks))


def served(limit: int, marginal: float, seed: int, failing: float = 0.0, jobs: int = 120) -> VirtualCluster:
    """Two GPUs, three models, and all jobs at once."""
    rng = Random(seed)
    what = Mix([InventedModel(f"m{n}", diffusion_bytes=(2 + n) * GIB) for n in range(3)], steps=(10, 20))
    gpus = [SimulatedGpu(WorkerId(f"gpu-{n}"), 40 * GIB, 10.0 * GIB, marginal=marginal) for n in range(2)]
    disturbances = Disturbances(
        run_error=lambda command: RunErrorKind.INTERNAL if command.batch_mates and rng.random() < failing else None
    )
    state = SchedulerState(SchedulerConfig(story_length=None, batch_limit=limit))
    cluster = VirtualCluster(state, gpus, disturbances=disturbances)
    cluster.start(what.components)
    for submission in what.submissions(all_at_once(jobs), Random(seed)):
        cluster.post(Submitted(submission.at, alike(submission.job)))
    cluster.run()
    assert not cluster.errors
    assert len(cluster.outcomes) == jobs
    validate(state)
    return cluster


@pytest.mark.parametrize("seed", [1, 2])
def test_a_backlog_is_done_sooner_where_a_further_image_costs_less(seed: int) -> None:
    alone, shared = served(1, 0.4, seed), served(4, 0.4, seed)
    assert max(run.batched for run in alone.runs) == 1
    assert max(run.batched for run in shared.runs) == 4
    assert shared.now < 0.75 * alone.now
    moved_bytes = [one.totals.uploaded_bytes + one.totals.preloaded_bytes for one in (shared, alone)]
    assert moved_bytes[0] <= 1.5 * moved_bytes[1]


def fixed(job: JobSpec, size: int) -> JobSpec:
    """With samplings and decodes in forward passes of `size`, which take half as long for each image."""
    tasks = tuple(
        replace(
            task,
            together=f"{task.stage.value} {size}",
            batch_size=size,
            run_seconds=size * task.run_seconds / 2,
            activation_bytes=size * task.activation_bytes,
            divisions=(),
            pass_key=f"sample {size}" if task.stage is Stage.SAMPLE else "",
        )
        if task.stage is not Stage.ENCODE
        else task
        for task in job.tasks
    )
    return replace(job, tasks=tasks, batch="all")


@pytest.mark.parametrize("gpus", [1, 2, 3])
def test_passes_of_a_fixed_size_are_full_but_for_the_last_ones(gpus: int) -> None:
    """Of each kind, on each GPU: an image that is padded where others of its kind were to come is computed in vain."""
    size, jobs = 8, 120
    what = Mix([InventedModel("m", diffusion_bytes=2 * GIB)], steps=(10,))
    state = SchedulerState(SchedulerConfig(story_length=None))
    machines = [SimulatedGpu(WorkerId(f"gpu-{n}"), 40 * GIB, 10.0 * GIB) for n in range(gpus)]
    cluster = VirtualCluster(state, machines)
    cluster.start(what.components)
    for submission in what.submissions(all_at_once(jobs), Random(1)):
        cluster.post(Submitted(submission.at, fixed(submission.job, size)))
    cluster.run()
    assert len(cluster.outcomes) == jobs
    assert not cluster.errors
    validate(state)
    for stage in (Stage.SAMPLE, Stage.DECODE):
        passes = Counter((run.worker_id, run.started_at) for run in cluster.runs if run.stage is stage)
        assert sum(passes.values()) == jobs
        assert len(passes) <= jobs // size + gpus, (stage, sorted(passes.values()))


@pytest.mark.parametrize("seed", [1, 2])
def test_it_costs_next_to_nothing_where_it_gains_nothing(seed: int) -> None:
    alone, shared = served(1, 1.0, seed), served(4, 1.0, seed)
    assert shared.now < 1.05 * alone.now
    together = sum(run.batched > 1 for run in shared.runs)
    assert together < 0.5 * len(shared.runs), "it was tried, and left"


def test_shared_runs_that_fail_take_nobody_along() -> None:
    """Every second shared run fails, and nothing else does: what was in it is made alone."""
    assert served(4, 0.4, 3, failing=0.5).totals.runs > 0
