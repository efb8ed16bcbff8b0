"""Samplings gather while prompts of their batch are encoded, and decodes of one run start together.

Proves when a sampling waits for more like it, that the ends of a batch count together, and that later submissions run
in full batches where these pay.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from modelpool.pool.values.core.errors import GIB
from modelpool.pool.values.specs.spec import JobId, JobSpec, RunCost, Stage, TaskId, WorkerId
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.messages import Submitted
from modelpool.scheduler.simulator.cluster import VirtualCluster
from modelpool.scheduler.simulator.machines import SimulatedGpu
from modelpool.scheduler.simulator.workloads.generators import offline_batch
from modelpool.scheduler.simulator.workloads.models import InventedModel
from tests.scheduler.scene import Scene, whole
from tests.scheduler.world import PAINT, ROOMY, TEXT, Shell, decode, encode, sample

GIVEN = TaskId("given:1")


@pytest.mark.parametrize(
    ("samples", "limit", "batch", "waits"),
    [(1, 4, "batch", True), (2, 4, "batch", False), (1, 1, "batch", False), (1, 4, "another", False)],
)
def test_a_sampling_waits_for_encodes_of_its_batch_until_a_run_is_full(
    samples: int, limit: int, batch: str, waits: bool
) -> None:
    """Batches of two, whose gain is not known yet, are tried first."""
    scene = Scene(batch_limit=limit)
    scene.worker("a", whole(TEXT), whole(PAINT))
    sampled, *_ = [scene.task(sample(model=PAINT), batch=batch) for _ in range(samples)]
    encoded = scene.task(encode("another prompt"), batch="batch")
    assert scene.decision() == (encoded if waits else sampled, "a")


def test_a_sampling_does_not_wait_for_encodes_that_have_to_load() -> None:
    scene = Scene(batch_limit=4)
    scene.worker("a", whole(PAINT))
    sampled = scene.task(sample(model=PAINT), batch="batch")
    scene.task(encode("another prompt"), batch="batch")
    assert scene.decision() == (sampled, "a")


def test_what_the_tasks_of_a_batch_lead_to_starts_with_the_last_of_their_reports() -> None:
    """They are reported one after the other. An idle worker does not take the first decode alone."""
    shell = Shell(SchedulerConfig(story_length=None, batch_limit=4))
    shell.workers(a=ROOMY)
    for number in range(4):
        sampled = sample(GIVEN, seed=number, run_seconds=10.0)
        decoded = decode(sampled.task_id)
        shell.submit(JobSpec(JobId(f"job {number}"), (sampled, decoded), decoded.task_id, (GIVEN,), batch="batch"))
    while len(shell.running[WorkerId("a")].members) == 1 or not shell.on("a").startswith("s:"):
        shell.finish("a", cost=RunCost(run_seconds=10.0))
    shell.workers(a=ROOMY, b=ROOMY)
    while shell.on("b") is not None:
        shell.finish("b", cost=RunCost(run_seconds=10.0))
    shell.finish("a", cost=RunCost(run_seconds=5.0))
    assert shell.on("b") is None
    shell.finish("a", cost=RunCost(run_seconds=5.0))
    assert [str(shell.on(name))[:2] for name in ("a", "b")] == ["d:", "d:"], "each takes its part"


def test_once_the_gain_is_known_submissions_run_in_full_batches() -> None:
    """Two GPUs on which a further image costs three tenths of one: two thirds of each stage but the encodes, the first
    of which start before the others are submitted, run in batches of 8, and nothing runs alone."""
    model = InventedModel("model", diffusion_bytes=GIB, encode_seconds=0.01, step_seconds=0.01, decode_seconds=0.05)
    gpus = [SimulatedGpu(WorkerId(f"gpu-{number}"), 64 * GIB, 10.0 * GIB, marginal=0.3) for number in range(2)]
    cluster = VirtualCluster(SchedulerState(SchedulerConfig(story_length=None, batch_limit=8)), gpus)
    cluster.start(model.components)
    for name in ("first", "second", "third", "last"):
        for submitted in offline_batch([model], [""], 24, Random(1), 1).jobs:
            ids = {task.task_id: TaskId(f"{task.task_id} {name}") for task in submitted.job.tasks}
            tasks = [
                replace(task, task_id=ids[task.task_id], needs=tuple(ids[need] for need in task.needs))
                for task in submitted.job.tasks
            ]
            job_id = JobId(f"{submitted.job.job_id} {name}")
            job = JobSpec(job_id, tuple(tasks), ids[submitted.job.wanted], batch=name)
            cluster.post(Submitted(cluster.now, job))
        cluster.run()
    for stage in (Stage.SAMPLE, Stage.DECODE):
        sizes = Counter(run.batched for run in cluster.runs if run.stage is stage and run.task_id.endswith("last"))
        assert sizes[8] >= 16, f"{stage}: {sizes}"
        assert not sizes[1], f"{stage}: {sizes}"
