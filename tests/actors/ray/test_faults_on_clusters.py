"""Pools with nodes that lack files, are lost, join and are drained: every image exists once, with the bytes of a run
without faults, and no job fails.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from modelpool import ModelPool
from tests.actors.ray.local_cluster import (
    Finished,
    LocalCluster,
    can_hide,
    expected_of,
    finish,
    local_cluster,
    shapes_requests,
    sim_pool,
    until,
)

pytestmark = [pytest.mark.ray, pytest.mark.nightly(usually="tests/actors/ray/test_ray_losses.py")]

WANTED = shapes_requests(10)
#: some seconds: long enough to lose a machine in between
LONG = shapes_requests(1, steps=150)
#: longer than a notice of six seconds, of which a run may use three, on a fast machine too: with 400 steps, a run ended
#: in time on a machine without other work, and none was stopped
VERY_LONG = shapes_requests(1, steps=900)
NOTICE_SECONDS = 6.0
READY_SECONDS = 200


@pytest.fixture(scope="module")
def expected() -> dict[str, Finished]:
    """The outcomes of the three batches, rendered in one pool."""
    pixels, failures = expected_of([*WANTED, *LONG, *VERY_LONG])
    assert not failures
    count = len(WANTED)
    return {"WANTED": (pixels[:count], []), "LONG": ([pixels[count]], []), "VERY_LONG": ([pixels[count + 1]], [])}


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
def test_a_node_without_the_files_costs_no_image(weights: Path, expected: dict[str, Finished]) -> None:
    """Its worker failed in 0.3 s with BAD_INPUT, was always idle first, and received all images of a batch."""
    with local_cluster() as cluster:
        cluster.add_node("bare", gpus=1, hides=[weights])
        cluster.add_node("full", gpus=1)
        done, used, lacking = cluster.run(batch_with_a_bare_node, weights)
    assert done == expected["WANTED"]
    assert used == {"full"}
    assert lacking == ["bare"]


def through_all_changes(cluster: LocalCluster) -> tuple[list[Finished], int]:
    """One pool through joins, a drain with seconds of notice, two lost machines and the end of a node. Returns
    the number of runs that stopped with their state too."""
    with sim_pool(cluster) as pool:
        until(lambda: nodes_up(pool) == ["a"])
        done = [finish(pool.submit(WANTED, output=False))]

        cluster.add_node("b", gpus=1)
        until(lambda: nodes_up(pool) == ["a", "b"])
        jobs = pool.submit(WANTED, output=False)
        images = list(jobs.images())
        assert {task.node for image in images for task in image.tasks} == {"a", "b"}
        done.append(finish(jobs, *images))

        jobs = pool.submit(VERY_LONG, output=False)
        until(lambda: sampling(pool))
        leaving = sampling(pool)
        cluster.drain(cluster.nodes[leaving], NOTICE_SECONDS)
        until(lambda: not sampling(pool, leaving, 0))
        cluster.remove(cluster.nodes[leaving])
        images = list(jobs.images())
        tasks = {task.task_id: task for image in images for task in pool.history(image.job_id).tasks}
        ends = [attempt.end for task in tasks.values() for attempt in task.attempts]
        assert set(ends) <= {"done", "cancelled"}, ends
        done.append(finish(jobs, *images))
        until(lambda: len(pool.status().workers) == 1)

        for name in "cd":
            cluster.add_node(name, gpus=1)
        until(lambda: len(nodes_up(pool)) == 3)
        jobs = pool.submit(LONG, output=False)
        for _ in range(2):
            until(lambda: sampling(pool) in cluster.nodes)
            cluster.kill(cluster.nodes[sampling(pool)])
        done.append(finish(jobs))
        until(lambda: len(pool.status().workers) == 1)
        return done, ends.count("cancelled")


def test_a_pool_follows_its_cluster_and_loses_nothing(expected: dict[str, Finished]) -> None:
    """A pool never grew onto a node that joined and never shrank; runs went on after the deadline of a drain and were
    lost with their node; a task that lost two machines counted as the cause and was rejected."""
    with local_cluster() as cluster:
        cluster.add_node("a", gpus=1)
        done, stopped = cluster.run(through_all_changes)
    assert done == [expected[name] for name in ("WANTED", "WANTED", "VERY_LONG", "LONG")]
    assert stopped == 1, "the run on the drained node was lost, or ended in time"
