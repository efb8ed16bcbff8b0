"""Pools whose nodes lack files, are lost, join and are drained: every image exists once, with the bytes of a run
without faults, and no job fails.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from modelpool import ModelPool
from tests.actors.ray.local_cluster import (
    SHAPES,
    Finished,
    LocalCluster,
    can_hide,
    expected_of,
    finish,
    local_cluster,
    new_folder,
    shapes_requests,
    sim_pool,
    until,
)

pytestmark = pytest.mark.ray

WANTED = shapes_requests(10)
#: some seconds each on a slow machine: long enough to lose a machine in between
LONG = shapes_requests(3, steps=300)
READY_SECONDS = 200


@pytest.fixture
def weights() -> Iterator[Path]:
    """A copy of the example's models, which nodes may lack."""
    folder = new_folder()
    shutil.copytree(SHAPES / "models", folder / "models")
    yield folder / "models"
    shutil.rmtree(folder)


def nodes_up(pool: ModelPool) -> list[str]:
    return sorted(worker.node_name for worker in pool.status().workers if worker.state in ("idle", "busy"))


def sampling(pool: ModelPool, node: str = "", steps: int = 1) -> str:
    """Return the name of a node on which a run has done this many steps; "" if there is none."""
    for worker in pool.status().workers:
        if worker.run is not None and worker.run.step >= steps and worker.node_name.startswith(node):
            return worker.node_name
    return ""


def batch_with_a_bare_node(cluster: LocalCluster, weights: Path) -> tuple[Finished, set[str], list[str]]:
    with sim_pool(cluster, models=[weights]) as pool:
        pool.wait_ready(READY_SECONDS)
        jobs = pool.submit(WANTED, output=False)
        images = list(jobs.images())
        used = {task.node for image in images for task in image.tasks}
        lacking = [worker.node_name for worker in pool.status().workers if worker.unavailable]
        return finish(jobs, *images), used, lacking


@pytest.mark.skipif(not can_hide(), reason="this machine allows no mount namespaces")
def test_a_node_without_the_files_costs_no_image(weights: Path) -> None:
    """Its worker failed in 0.3 s with BAD_INPUT, was always idle first, and received all images of a batch."""
    with local_cluster() as cluster:
        cluster.add_node("bare", gpus=1, hides=[weights])
        cluster.add_node("full", gpus=1)
        done, used, lacking = cluster.run(batch_with_a_bare_node, weights)
    assert done == expected_of(WANTED)
    assert used == {"full"}
    assert lacking == ["bare"]


def batch_with_two_losses(cluster: LocalCluster) -> tuple[Finished, int]:
    with sim_pool(cluster) as pool:
        until(lambda: len(nodes_up(pool)) == 3)
        jobs = pool.submit(LONG[:1], output=False)
        for _ in range(2):
            until(lambda: sampling(pool) in cluster.nodes)
            cluster.kill(cluster.nodes[sampling(pool)])
        done = finish(jobs)
        return done, len(pool.status().workers)


def test_a_task_that_loses_two_machines_is_not_the_cause(tmp_path: Path) -> None:
    """Two losses were two crashes: with crash_limit 2 the task was rejected, and equal work after it."""
    with local_cluster() as cluster:
        for name in "abc":
            cluster.add_node(name, gpus=1)
        done, _ = cluster.run(batch_with_two_losses)
    assert done == expected_of(LONG[:1])


def follow_the_cluster(cluster: LocalCluster) -> list[Finished]:
    """Start with one node; one joins, and leaves again."""
    with sim_pool(cluster) as pool:
        until(lambda: nodes_up(pool) == ["a"])
        first = finish(pool.submit(WANTED, output=False))
        cluster.add_node("b", gpus=1)
        until(lambda: nodes_up(pool) == ["a", "b"])
        jobs = pool.submit(WANTED, output=False)
        images = list(jobs.images())
        assert {task.node for image in images for task in image.tasks} == {"a", "b"}
        cluster.remove(cluster.nodes["a"])
        until(lambda: nodes_up(pool) == ["b"] and len(pool.status().workers) == 1)
        return [first, finish(jobs, *images), finish(pool.submit(WANTED, output=False))]


def test_a_pool_follows_the_nodes_of_its_cluster() -> None:
    """It never grew onto a node that joined, and never shrank."""
    with local_cluster() as cluster:
        cluster.add_node("a", gpus=1)
        assert cluster.run(follow_the_cluster) == [expected_of(WANTED)] * 3


def leave_a_drained_node(cluster: LocalCluster) -> tuple[Finished, int]:
    """Drain the node of a long run with eight seconds of notice, and end it when the run has left. Returns the number
    of runs that stopped with their state too."""
    with sim_pool(cluster) as pool:
        until(lambda: len(nodes_up(pool)) == 2)
        finish(pool.submit(shapes_requests(4), output=False))  # durations are measured
        jobs = pool.submit(LONG[:2], output=False)
        until(lambda: sampling(pool))
        leaving = sampling(pool)
        cluster.drain(cluster.nodes[leaving], 8.0)
        until(lambda: not sampling(pool, leaving, 0))
        cluster.remove(cluster.nodes[leaving])
        images = list(jobs.images())
        tasks = {task.task_id: task for image in images for task in pool.history(image.job_id).tasks}
        ends = [attempt.end for task in tasks.values() for attempt in task.attempts]
        assert set(ends) <= {"done", "cancelled"}, ends
        return finish(jobs, *images), ends.count("cancelled")


def test_a_run_on_a_drained_node_continues_elsewhere_with_the_same_bytes() -> None:
    """Runs went on after the deadline, and were lost with their node."""
    with local_cluster() as cluster:
        cluster.add_node("a", gpus=1)
        cluster.add_node("b", gpus=1)
        done, stopped = cluster.run(leave_a_drained_node)
    assert done == expected_of(LONG[:2])
    assert stopped == 1, "the run was lost, or ended in time"
