"""Pools of which one node has another file under the name of the right one: every image has the bytes of a run without
such a node, and the pool names node and file.

A fingerprint samples a file, so the nodes below pass it: what counts is the SHA-256 that recipes name.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from modelpool import ModelPool
from modelpool.pool.files.formats.weights_file import read_single_header
from modelpool.pool.models.loading.file_fingerprint import fingerprint
from modelpool.pool.values.core.file_part import FilePart
from modelpool.pool.values.specs.spec import Role
from modelpool.pool.weights.quant.file_hash import file_sha256
from tests.actors.ray.local_cluster import (
    SHAPES,
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

pytestmark = [pytest.mark.ray, pytest.mark.skipif(not can_hide(), reason="this machine allows no mount namespaces")]

FILE = "shapes.safetensors"
WANTED = shapes_requests(16)
#: by node
Lacking = Mapping[str, tuple[str, ...]]
#: reasons, and numbers of runs
Lost = Sequence[tuple[str, int]]
READY_SECONDS = 200


def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A folder with the model, and one with another model of that name: the keys and values of one layer are 0."""
    right, other = tmp_path / "models", tmp_path / "other"
    for folder in (right, other):
        shutil.copytree(SHAPES / "models", folder)
    header = read_single_header(right / FILE)
    layer = [entry for name, entry in header.tensors.items() if ".attn2.to_k." in name or ".attn2.to_v." in name]
    assert layer
    with (other / FILE).open("r+b") as file:
        for entry in layer:
            file.seek(entry.begin)
            file.write(bytes(entry.end - entry.begin))
    return right, other


def lacking(pool: ModelPool) -> dict[str, tuple[str, ...]]:
    return {worker.node_name: worker.unavailable for worker in pool.status().workers if worker.unavailable}


def batches(cluster: LocalCluster, right: Path, other: Path) -> tuple[list[Finished], list[set[str]], Lacking, Lost]:
    """Two batches, and in between the right file comes to the node. Return also what it lacked, and why runs were
    lost."""
    done, used = [], []
    with sim_pool(cluster, models=[right], workers=3) as pool:
        pool.wait_ready(READY_SECONDS)
        for _ in range(2):
            jobs = pool.submit(WANTED, output=False)
            images = list(jobs.images())
            used.append({task.node for image in images for task in image.tasks})
            done.append(finish(jobs, *images))
            if len(done) == 1:
                until(lambda: lacking(pool))
                lacked, lost = lacking(pool), tuple(jobs.summary().lost_runs())
                shutil.copyfile(right / FILE, other / FILE)
                until(lambda: not lacking(pool))
        return done, used, lacked, lost


def test_a_node_with_one_changed_layer_makes_no_image(tmp_path: Path) -> None:
    """Found on a cluster: 7 of 16 images were wrong under the hash of the right file, without a warning."""
    right, other = folders(tmp_path)
    parts = [FilePart(str(folder / FILE), Role.DIFFUSION_MODEL) for folder in (right, other)]
    assert fingerprint(parts[0]) == fingerprint(parts[1]), "the samples do not show it"
    with local_cluster() as cluster:
        cluster.add_node("a", gpus=1)
        cluster.add_node("b", gpus=1)
        cluster.add_node("odd", gpus=1, shows={right: other})
        wrong = file_sha256(other / FILE)
        done, used, lacked, lost = cluster.run(batches, right, other)
    assert done == 2 * [expected_of(WANTED)]
    assert "odd" not in used[0]
    assert "odd" in used[1], "it has the right file again"
    assert set(lacked) == {"odd"}
    for reason in (*lacked["odd"], *(reason for reason, _ in lost)):
        for part in (str(right / FILE), file_sha256(right / FILE), wrong):
            assert part in reason
    assert all(reason.startswith("odd: ") for reason, _ in lost)
