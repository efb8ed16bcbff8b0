"""The first images of a batch end soon: proves which loads go before resident tasks of the same batch, and when.

Weights over a link of 1 B/s: PAINT takes 6 s, DRAW 10, TEXT 4, VAE 3; tasks run for 1 s unless stated otherwise.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from modelpool.pool.values.core.errors import GIB
from modelpool.pool.values.specs.spec import Stage, WorkerId
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.decisions.placement.batch_progress import RECURRING_SHARE
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.jobs import Task
from modelpool.scheduler.simulator.cluster import VirtualCluster
from modelpool.scheduler.simulator.machines import SimulatedGpu
from modelpool.scheduler.simulator.workloads.generators import offline_batch
from modelpool.scheduler.simulator.workloads.models import InventedModel
from tests.scheduler.scene import Scene, whole
from tests.scheduler.world import PAINT, TEXT, encode, sample


def begun_batch(scene: Scene, samples: int, run_seconds: float, batch: str = "batch") -> tuple[Task, Task]:
    """The first prompts of a batch are encoded, and more wait: the first sample and the next encode."""
    first = scene.task(replace(sample(model=PAINT), run_seconds=run_seconds), batch=batch)
    for _ in range(samples - 1):
        scene.task(replace(sample(model=PAINT), run_seconds=run_seconds), batch=batch)
    return first, scene.task(encode("another prompt"), batch="batch")


def test_a_load_that_displaces_nothing_goes_before_the_encodes_of_its_batch() -> None:
    scene = Scene()
    scene.worker("a", whole(TEXT))
    sampled, _ = begun_batch(scene, 1, 1.0)
    assert scene.decision() == (sampled, "a")


@pytest.mark.parametrize("batch", ["", "another batch"])
def test_tasks_of_others_do_not_go_before_resident_ones_for_that(batch: str) -> None:
    scene = Scene()
    scene.worker("a", whole(TEXT))
    _, encoded = begun_batch(scene, 1, 1.0, batch)
    assert scene.decision() == (encoded, "a")


def test_a_load_that_evicts_weights_in_demand_waits_for_enough_runs() -> None:
    """It takes 6 s, and the text encoder that it evicts another 4: the runs of those that wait take 100 times that."""
    for samples, is_enough in ((9, False), (10, True)):
        scene = Scene()
        scene.worker("a", whole(TEXT), capacity=18)
        sampled, encoded = begun_batch(scene, samples, 10.0 / RECURRING_SHARE / 10)
        assert scene.decision() == (sampled if is_enough else encoded, "a")


def test_a_load_that_replaces_patches_waits_for_enough_runs() -> None:
    scene = Scene()
    scene.worker("a", whole(TEXT), whole(PAINT, "other"))
    _, encoded = begun_batch(scene, 3, 1.0)
    assert scene.decision() == (encoded, "a")


def test_a_second_copy_waits_for_enough_runs() -> None:
    for run_seconds, is_enough in ((10.0, False), (1000.0, True)):
        scene = Scene()
        scene.worker("busy", whole(PAINT), free_in=1500.0)
        scene.worker("idle", whole(TEXT))
        sampled, encoded = begun_batch(scene, 2, run_seconds)
        assert scene.decision() == (sampled if is_enough else encoded, "idle")


def test_where_tasks_share_runs_as_many_wait_as_one_run_may_have() -> None:
    """Batches of two, whose gain is not known yet, are tried first."""
    for samples, is_enough in ((1, False), (2, True)):
        scene = Scene(batch_limit=4)
        scene.worker("a", whole(TEXT))
        sampled, encoded = begun_batch(scene, samples, 1.0)
        assert scene.decision() == (sampled if is_enough else encoded, "a")


@pytest.mark.parametrize(("gpus", "gibibytes"), [(1, 12), (1, 7), (8, 12), (8, 7)])
def test_a_batch_of_different_prompts_has_images_early_and_is_done_as_soon(gpus: int, gibibytes: int) -> None:
    """The text encoder, 3 GiB, stays next to the diffusion model, 5 GiB, or takes turns with it. Bounded are the first
    image, the prompts that are encoded ahead, the loads, and the time of the batch, by the time of its runs."""
    jobs, model = 400, InventedModel("model", text_encoder_bytes=3 * GIB, activation_bytes=GIB, encode_seconds=0.1)
    workload = offline_batch([model], [""], jobs, Random(1), 1)
    workers = [SimulatedGpu(WorkerId(f"gpu-{n}"), gibibytes * GIB, 10.0 * GIB) for n in range(gpus)]
    cluster = VirtualCluster(SchedulerState(SchedulerConfig(story_length=None)), workers)
    cluster.start(workload.components)
    for job in workload.jobs:
        cluster.post(job)
    cluster.run()
    encoded = ahead = 0
    for run in cluster.runs:
        encoded += {Stage.ENCODE: 1, Stage.SAMPLE: -1}.get(run.stage, 0)
        ahead = max(ahead, encoded)
    run_seconds = sum(task.run_seconds for task in workload.jobs[0].job.tasks)
    assert len(cluster.outcomes) == jobs
    assert min(cluster.latency_seconds.values()) < 5.0 * run_seconds
    assert ahead < jobs / 2
    assert cluster.totals.load_seconds < 0.02 * cluster.totals.run_seconds
    assert max(cluster.latency_seconds.values()) < (1.03 * jobs / gpus + 3.0) * run_seconds
