"""Workers that end in all ways on a real Ray: the pool names the cause, and every image is rendered."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, NodeDiedError, OutOfMemoryError

from modelpool import GenerateRequest, ModelPool, PoolConfig
from modelpool.actors.config.config import ClusterSection
from modelpool.actors.control.losses import Death
from modelpool.actors.ray import ray_losses
from modelpool.actors.ray.ray_losses import death_by_error, one_line, open_trace
from modelpool.actors.ray.ray_nodes import RayNodes
from modelpool.pool.values.core.errors import OutputFailed
from modelpool.pool.values.specs.spec import NodeId, WorkerId
from tests.actors.fakes import start_fake_pool
from tests.actors.ray.crashing_engine import ENDS, CrashingEngine
from tests.actors.ray.local_autoscaler import eventually
from tests.actors.ray.local_cluster import SHAPES, LocalCluster, local_cluster

SENTENCES = {
    "SEGMENTATION-FAULT": ("crash", "its process crashed: Segmentation fault in "),
    "ABORT": ("crash", "its process crashed: Aborted in crashing_engine.py"),
    "NATIVE-EXIT": ("crash", "its process ended itself: a library called exit"),
    "SIGKILL": ("killed", "another process killed it"),
}


def events_of(record: Path) -> list[dict[str, Any]]:
    """The events of an event log, of which a last line may be half written."""
    whole, _, _ = record.read_text().rpartition("\n")
    return [json.loads(line).get("event", {}) for line in whole.splitlines()]


def losses(record: Path) -> list[tuple[str, str]]:
    """Cause and reason of the lost workers in an event log, in order."""
    downs = [event["WorkerDown"] for event in events_of(record) if "WorkerDown" in event]
    return [(down.get("cause", "crash"), down["reason"]) for down in downs]


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_the_cause_of_each_loss_is_found_and_the_image_rendered(tmp_path) -> None:
    assert SENTENCES.keys() == ENDS.keys()
    record = tmp_path / "record.jsonl"
    with start_fake_pool("losses", workers=2, record=record, folder=tmp_path, engine=CrashingEngine) as pool:
        pool.wait_ready(120)
        for name in ENDS:
            (image,) = pool.submit(GenerateRequest(model="shapes", prompt=name, seed=1, steps=2)).images()
            assert image.pixels.size
        pool.wait_ready(120)
        troubles = [worker.trouble for worker in pool.status().workers if worker.trouble]
    assert troubles
    found = losses(record)
    assert [cause for cause, _ in found] == [cause for cause, _ in SENTENCES.values()], found
    for (_, reason), (_, sentence) in zip(found, SENTENCES.values(), strict=True):
        assert reason.startswith(sentence), found


def test_errors_of_ray_that_explain_themselves() -> None:
    cases = {
        OutOfMemoryError("Task was killed due to the node running low on memory."): Death.MEMORY_MONITOR,
        NodeDiedError("the node died"): Death.NODE_DIED,
        ActorDiedError(): Death.PROCESS_ENDED,
    }
    for error, death in cases.items():
        assert death_by_error(error).death is death


def test_a_machine_without_a_folder_for_traces_has_workers_all_the_same(monkeypatch, tmp_path) -> None:
    (tmp_path / "file").touch()

    def no_folder() -> Path:
        raise OutputFailed("no writable folder")

    for folder in (no_folder, lambda: tmp_path / "file" / "traces"):
        monkeypatch.setattr(ray_losses, "trace_folder", folder)
        assert open_trace("w") is None


def test_messages_of_ray_become_one_line_without_ids() -> None:
    text = "The actor died.\n\tclass_name: W\n\tactor_id: 3f\n\tpid: 7\n\tip: 127.0.0.1\nThe actor is dead."
    assert one_line(text) == "The actor died. The actor is dead."
    long = one_line("begin " + "x" * 5000 + " end")
    assert len(long) < 2000
    assert (long[:5], long[-3:]) == ("begin", "end")


def pool_of(cluster: LocalCluster, record: Path, notice: Path) -> ModelPool:
    """A pool of simulated GPUs that polls often."""
    settings = ClusterSection(notice_command=f"cat {notice}", notice_seconds=0.5, poll_seconds=0.5)
    config = PoolConfig(cluster=settings).override(
        address=cluster.address, device="sim", vram="64MiB", models=[SHAPES / "models"], record=record
    )
    return ModelPool.start(config)


def lose_workers(cluster: LocalCluster, record: Path, notice: Path) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """Lose the workers of two nodes in all ways; return cause and reason of each loss. Then let the notice command of
    a third machine report; return the nodes that Ray drains."""
    found: dict[str, tuple[str, str]] = {}

    def next_loss(name: str) -> None:
        known = len(found)
        eventually(lambda: len(losses(record)) > known, f"{name} is reported")
        found[name] = losses(record)[known]

    with pool_of(cluster, record, notice) as pool:
        pool.wait_ready(200)
        nodes = {worker.id: worker.node for worker in pool.status().workers}
        names = {node.node_id: name for name, node in cluster.nodes.items()}
        of_a = next(worker for worker, node in nodes.items() if names[node] == "a")
        # a busy machine may take longer to start the process that reads traces there than a loss is examined
        ray.get(ray_losses._probe(NodeId(nodes[of_a]), ray_losses.take_evidence).remote(""))
        os.kill(pool.memory()[WorkerId(of_a)].pid, signal.SIGKILL)
        next_loss("killed on another node")
        pool.wait_ready(200)
        cluster.kill(cluster.nodes["b"])
        next_loss("node lost")
        cluster.drain(cluster.nodes["a"], 60.0)
        eventually(lambda: bool(notices(record)), "the drain is noticed")
        cluster.remove(cluster.nodes["a"])
        next_loss("drained node")
        third = cluster.add_node("c", gpus=1)

        def idle() -> list[str]:
            return [worker.node for worker in pool.status().workers if worker.state == "idle"]

        eventually(lambda: idle() == [third.node_id], "the third machine has a worker")
        notice.write_text("+300\n")
        eventually(lambda: len(notices(record)) > 1, "the notice arrives")
        eventually(lambda: bool(ray_drains()), "Ray drains the node too")
        return found, ray_drains()


def notices(record: Path) -> list[dict[str, Any]]:
    """The drain notices in an event log."""
    return [event["NodeDraining"] for event in events_of(record) if "NodeDraining" in event]


def ray_drains() -> list[str]:
    """The nodes that Ray drains, in a process that is connected to it."""
    nodes = asyncio.run(RayNodes().poll()).nodes
    return [node.node_id for node in nodes if node.alive and node.drain_deadline is not None]


@pytest.mark.ray
def test_losses_on_other_nodes_are_told_apart_and_a_notice_command_drains_its_node(tmp_path) -> None:
    record = tmp_path / "record.jsonl"
    with local_cluster() as cluster:
        for name in ("a", "b"):
            cluster.add_node(name, gpus=1)
        found, drained = cluster.run(lose_workers, record, tmp_path / "notice")
        third = cluster.nodes["c"].node_id
    assert {name: cause for name, (cause, _) in found.items()} == {
        "killed on another node": "killed",
        "node lost": "node lost",
        "drained node": "preempted",
    }, found
    by_ray, by_command = notices(record)[:2]
    assert by_ray["reason"] == "Ray drains its node"
    assert 0 < by_ray["deadline"] - by_ray["at"] <= 60.0
    assert drained == [third]
    assert by_command["node"] == third
    assert by_command["reason"] == "its notice command reports that it will be taken back"
    assert 200 < by_command["deadline"] - by_command["at"] <= 300.0
