"""Files of equal components.

Proves: of a job of two models with equal components, in files with other headers, each file has its own fingerprint; a
pinned model with equal weights in two roles is loaded.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from modelpool.actors.control.opened_catalog import OpenedCatalog, PinnableModel
from modelpool.actors.control.task_store import TaskStore
from modelpool.actors.graph.features.auto_batch import USUAL_TERMS
from modelpool.actors.worker.file_check import FileCheck
from modelpool.pool.catalog.catalog import Catalog
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.specs.spec import ComponentKey, ComponentSpec, JobId, Role, WorkerId
from modelpool.scheduler.model.messages import LoadWeights, RunTask
from tests.actors.graph.test_workflow_graph import request_of, sampling
from tests.actors.worker.test_gpu_worker import Bench
from tests.pool.separate import write_atomically


@pytest.mark.slow
def test_a_job_of_two_models_with_equal_components_finds_both_files(tmp_path: Path) -> None:
    """Found with two checkpoints with one text encoder: the worker refused the first one, "its content differs"."""
    one = load_file(write_atomically(tmp_path / "one.safetensors", "tiny_sd1", seed=1))
    unet = load_file(write_atomically(tmp_path / "two.safetensors", "tiny_sd1", seed=2))
    unet = {key: tensor for key, tensor in unet.items() if key.startswith("model.diffusion_model.")}
    save_file(one | unet, tmp_path / "two.safetensors", {"made": "with another header"})
    opened = OpenedCatalog(Catalog([tmp_path], [], "sim", tmp_path / "state"), {})
    nodes = {
        "a": sampling(request={"model": "one"}),
        "b": sampling("a", request={"model": "two"}, strength=0.5),
        "d": {"kind": "decode", "model": "two", "inputs": {"latent": "b"}},
    }
    (built,) = opened.build_some([(JobId("job"), request_of(nodes))], None, True, USUAL_TERMS)
    assert not isinstance(built, UserError), built
    graph = built.graph
    tasks = TaskStore()
    tasks.add(graph.job, graph.works, {}, graph.fingerprints)
    files = [file for task in graph.job.tasks for file in tasks.files(task.task_id)]
    parts = {key: {part for other, part in files if other == key} for key, _ in files}
    assert any(len(each) == 2 for each in parts.values()), "they have a component in common"
    check = FileCheck()
    for number, task in enumerate(graph.job.tasks):
        command = RunTask(WorkerId("a"), 0, task.task_id, 1)
        request, _ = tasks.begin(command, number, own=dict.fromkeys(task.needs, number))
        assert {file.component for file in request.files} == set(task.reads), "each of its files is checked"
        check.check(request.files)


def test_a_pinned_model_with_equal_weights_in_two_roles_is_loaded() -> None:
    """Such as two experts that are the same file. Before: the worker expected as many components as roles."""
    bench, tasks = Bench(), TaskStore()
    bench.worker.start()
    roles = (Role.TEXT_ENCODER, Role.DIFFUSION_MODEL, Role.VAE)
    keys = (ComponentKey("same"), ComponentKey("same"), ComponentKey("vae"))
    specs = tuple((role, ComponentSpec(key, role, 8, 8)) for role, key in zip(roles, keys, strict=True))
    pinned = PinnableModel(bench.work.model, specs, {})
    tasks.pin(pinned)
    assert pinned.keys == keys[1:]
    request = tasks.load_request(LoadWeights(WorkerId("gpu-0"), 1, pinned.keys), 3)
    assert (request.roles, request.components) == (roles, keys)
    assert bench.worker.load(request).error is None
