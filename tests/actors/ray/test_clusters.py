"""Pools on clusters of several nodes: placement of controller and catalog, code and environments, several pools.

Every test compares the bytes of all images with a run without Ray.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from modelpool import GenerateRequest
from modelpool.pool.values.specs.spec import Stage
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
from tests.s3_server import s3_server

pytestmark = pytest.mark.ray

WANTED = shapes_requests(8)
READY_SECONDS = 200


@pytest.fixture(scope="module")
def expected() -> Finished:
    return expected_of(WANTED)


@pytest.fixture(scope="module")
def shared() -> Iterator[LocalCluster]:
    """A cluster with two GPUs, on the nodes "head" and "a"; tests leave it as it is."""
    with local_cluster(head_gpus=1) as cluster:
        cluster.add_node("a", gpus=1)
        yield cluster


def outlive_the_catalog(cluster: LocalCluster, weights: Path) -> list[Finished]:
    """Run a batch while the node of the catalog is lost, then another."""
    with sim_pool(cluster, models=[weights], controller="head", record=cluster.folder / "log.jsonl") as pool:
        assert [model.name for model in pool.models()] == ["shapes"]
        pool.wait_ready(READY_SECONDS)
        status = pool.status()
        assert status.controller == "head"
        assert sorted(worker.node_name for worker in status.workers) == ["a", "b"]
        jobs = pool.submit(WANTED, output=False)
        first = next(jobs.images())
        assert {task.node for task in first.tasks} <= {"a", "b"}
        history = pool.history(first.job_id)
        assert {attempt.node for task in history.tasks for attempt in task.attempts} <= {"a", "b"}
        cluster.kill(cluster.nodes["a"])
        done = finish(jobs, first)
        assert [model.name for model in pool.models()] == ["shapes"]
        done_again = finish(pool.submit(WANTED, output=False))
        assert (cluster.folder / "log.jsonl").exists()
        return [done, done_again]


@pytest.mark.skipif(not can_hide(), reason="this machine allows no mount namespaces")
@pytest.mark.nightly(usually="tests/actors/ray/test_clusters.py")
def test_controller_and_driver_can_be_on_nodes_without_the_models(weights: Path, expected: Finished) -> None:
    """The catalog read the folders of the controller's node: on a head without weights it found no models."""
    with local_cluster(head_hides=[weights]) as cluster:
        driver = cluster.add_node("driver", hides=[weights])
        cluster.add_node("a", gpus=1)
        cluster.add_node("b", gpus=1)
        assert cluster.run(outlive_the_catalog, weights, node=driver) == [expected, expected]


def packages_of_workers(cluster: LocalCluster, connects_first: bool) -> tuple[Finished, list[str]]:
    """Run a batch, at the address of the environment; return what the workers' import paths have of two packages."""
    if connects_first:
        import ray

        environment = json.loads(Path(cluster.folder / "environment.json").read_text())
        ray.init(cluster.address, runtime_env=environment, log_to_driver=False, logging_level="ERROR")
    with sim_pool(cluster, address=None) as pool:
        pool.wait_ready(READY_SECONDS)
        done = finish(pool.submit(WANTED, output=False))
        (memory,) = pool.memory().values()
        variables = psutil.Process(memory.pid).environ()
        folders = [Path(folder) for folder in variables["PYTHONPATH"].split(":") if folder]
    assert variables["OF_THE_JOB"] == "1"
    names = ("modelpool", "of_the_user")
    return done, [name for folder in folders for name in names if (folder / name / "__init__.py").exists()]


@pytest.mark.nightly(usually="tests/actors/test_ray_pool.py")
def test_jobs_with_packages_of_their_own_keep_them_and_get_ours(tmp_path: Path, expected: Finished) -> None:
    """Ray refuses a field that both the job and `ray.init` set; an address on loopback shipped no code."""
    package = tmp_path / "of_the_user"
    package.mkdir()
    (package / "__init__.py").touch()
    environment = {"py_modules": [str(package)], "env_vars": {"OF_THE_JOB": "1"}}
    with local_cluster(code=False, head_gpus=1) as cluster:
        (cluster.folder / "environment.json").write_text(json.dumps(environment))
        submitted = {
            "RAY_ADDRESS": cluster.address,
            "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"runtime_env": environment, "metadata": {}}),
        }
        for connects_first, variables in ((False, submitted), (True, {})):
            done, packages = cluster.run(packages_of_workers, connects_first, **variables)
            assert done == expected
            assert sorted(packages) == ["modelpool", "of_the_user"]


def first_pool(cluster: LocalCluster) -> None:
    """Hold all GPUs until a file appears."""
    with sim_pool(cluster, name="first") as pool:
        pool.wait_ready(READY_SECONDS)
        (cluster.folder / "first-is-up").touch()
        until((cluster.folder / "second-waits").exists)


def second_pool(cluster: LocalCluster) -> tuple[str, list[str], Finished]:
    """Submit a batch to a pool without GPUs: another one has them."""
    until((cluster.folder / "first-is-up").exists)
    with sim_pool(cluster, name="second") as pool:
        jobs = pool.submit(WANTED, output=False)
        until(lambda: pool.status().waiting_for)
        status = pool.status()
        with pytest.raises(TimeoutError, match="waiting for 2 GPUs"):
            pool.wait_ready(0.1)
        (cluster.folder / "second-waits").touch()
        return status.waiting_for, [worker.not_up for worker in status.workers], finish(jobs)


def serve(cluster: LocalCluster) -> None:
    """A pool that several drivers use, until a file appears."""
    with sim_pool(cluster) as pool:
        pool.wait_ready(READY_SECONDS)
        (cluster.folder / "serves").touch()
        until((cluster.folder / "served").exists)


def use(cluster: LocalCluster) -> Finished:
    """A driver of that pool."""
    from modelpool import ModelPool

    until((cluster.folder / "serves").exists)
    with ModelPool.connect(cluster.address) as pool:
        return finish(pool.submit(WANTED, output=False))


def test_a_second_pool_says_what_it_waits_for_and_two_drivers_share_one(
    shared: LocalCluster, expected: Finished
) -> None:
    with shared.start(first_pool) as first, shared.start(second_pool) as second:
        waiting_for, not_up, done = second.result()
        first.result()
    assert waiting_for == "waiting for 2 GPUs: 0 of 2 are free; pool 'first' uses 2"
    assert not_up == ["pending: no node with a free GPU"] * 2
    assert done == expected
    with shared.start(serve) as server, shared.start(use) as one, shared.start(use) as other:
        assert one.result() == other.result() == expected
        (shared.folder / "served").touch()
        server.result()


def refused(cluster: LocalCluster) -> list[str]:
    """Join in ways that cannot work; return the messages."""
    import ray

    from modelpool import UserError

    found = []
    original = ray._private.utils.compute_version_info
    for address, versions in (
        (cluster.address, ("2.1.0", "3.12.1")),
        (f"ray://{cluster.address}", original()),
        ("127.0.0.1:1", original()),
    ):
        ray._private.utils.compute_version_info = lambda versions=versions: versions
        with pytest.raises(UserError) as problem:
            sim_pool(cluster, address=address)
        found.append(str(problem.value))
    return found


def test_what_cannot_be_joined_is_explained_completely(shared: LocalCluster) -> None:
    import platform

    import ray

    versions, client, nobody = shared.run(refused)
    there = f"runs Ray {ray.__version__} on Python {platform.python_version()}"
    here = "this program runs Ray 2.1.0 on Python 3.12.1."
    assert versions.startswith(f"the Ray cluster at {shared.address} {there}; {here}")
    assert f"pip install ray=={ray.__version__}" in versions
    assert "Ray Client" in client
    assert "ray job submit" in client
    assert nobody.startswith("no Ray cluster answers at '127.0.0.1:1'")


def lose_finished_images(cluster: LocalCluster, wanted: list[GenerateRequest]) -> Finished:
    """Lose a node with finished images that the driver has not fetched."""
    cluster.add_node("b", gpus=1)
    with sim_pool(cluster) as pool:
        pool.wait_ready(READY_SECONDS)
        assert sorted(worker.node_name for worker in pool.status().workers) == ["a", "b", "head"]
        jobs = pool.submit(wanted, output=False)
        summary = jobs.wait()
        assert summary.succeeded == len(wanted)
        assert "b" in {task.node for task in summary.tasks if task.stage is Stage.DECODE}, "nothing would be lost"
        cluster.kill(cluster.nodes["b"])
        done = finish(jobs)
        assert jobs.summary().succeeded == len(wanted)
        return done


@pytest.mark.nightly(usually="tests/actors/ray/test_ray_losses.py")
def test_finished_images_that_are_lost_with_their_node_are_generated_again(shared: LocalCluster) -> None:
    """Larger ones than Ray sends with its answers: they stay on the node until they are fetched."""
    wanted = shapes_requests(6, width=256, height=256, steps=1)
    assert shared.run(lose_finished_images, wanted) == expected_of(wanted)


def write_outputs(cluster: LocalCluster, access: dict[str, str], folder: Path) -> dict[str, Any]:
    """Write batches to a store and to a folder until the nodes write, then one more; return of each place the number of
    outputs, whether only the driver's node writes, and of the last batch how many were fetched, and made elsewhere.
    """
    from modelpool.actors.outputs.open_outputs import existing_outputs
    from modelpool.actors.ray.output_writers import RayNodeWriters
    from modelpool.actors.ray.ray_connection import RayConnection

    os.environ |= access
    with sim_pool(cluster) as pool:
        pool.wait_ready(READY_SECONDS)
        writers, connection = pool._outputs._node_writers, pool._connection
        assert isinstance(writers, RayNodeWriters)
        assert isinstance(connection, RayConnection)
        fetched: list[str] = []
        fetch = connection.fetch
        connection.fetch = lambda ref: (fetched.append(address), fetch(ref))[1]  # type: ignore[method-assign]
        found: dict[str, Any] = {}
        count = 0
        for address, nodes in (("s3://bucket/cluster", 2), (str(folder), 1)):

            def open_nodes(address: str = address) -> set[str]:
                opened = writers._opened.items()
                return {node for (node, place), each in opened if each.is_open and str(place) == address}

            while len(open_nodes()) < nodes:
                requests = shapes_requests(count + 12, width=128, height=128, steps=1)[count:]
                assert pool.submit(requests, output=address).wait(120).succeeded == 12
                count += 12
            fetched.clear()
            requests = shapes_requests(count + 12, width=128, height=128, steps=1)[count:]
            results = list(pool.submit(requests, output=address).images())
            count += 12
            place = existing_outputs(folder if nodes == 1 else address)
            assert not list(place.damaged())
            assert len(place.kept()) == len(place.entries())
            here = open_nodes() == {writers._node}
            elsewhere = sum(image.tasks[-1].node != "head" for image in results)
            found[address] = (len(place.entries()), here, len(fetched), elsewhere)
        found["count"] = count
        return found


@pytest.mark.nightly(usually="tests/actors/ray/test_output_writers.py")
def test_each_node_writes_its_outputs_to_a_store_and_the_drivers_node_those_to_a_folder(
    shared: LocalCluster, tmp_path: Path
) -> None:
    """The nodes were started without access to the store. The others' outputs for the folder are the driver's work."""
    with s3_server():
        access = {name: value for name, value in os.environ.items() if name.startswith(("AWS_", "NO_PROXY"))}
        found = shared.run(write_outputs, access, tmp_path / "out")
    in_store, is_here, fetched, _ = found["s3://bucket/cluster"]
    assert (is_here, fetched) == (False, 0)
    in_folder, is_here, fetched, elsewhere = found[str(tmp_path / "out")]
    assert is_here
    assert fetched == elsewhere
    assert in_store + in_folder == found["count"]
