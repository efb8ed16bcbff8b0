"""What a pool will be, from its configuration and the GPUs there are."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from modelpool.actors.config.config import PoolConfig, PoolSection
from modelpool.actors.control.computed_by import computed_by_of
from modelpool.actors.control.pool_plan import SIMULATED_WORKERS, plan_pool
from modelpool.actors.worker.gpu_worker import Measuring
from modelpool.pool.catalog.catalog import Catalog
from modelpool.pool.devices.capabilities import cuda_capabilities
from modelpool.pool.devices.detection import capabilities_here, detect
from modelpool.pool.devices.device_kinds import open_device
from modelpool.pool.devices.kind_names import DeviceKind
from modelpool.pool.devices.memory_limits import HostMemory
from modelpool.pool.devices.nvml import NvmlReading
from modelpool.pool.devices.vram_policy import VramPolicy
from modelpool.pool.engine.diagnosis import DiagnosisSettings, diagnose
from modelpool.pool.values.core.errors import UnusableField
from modelpool.pool.values.core.fast_path import FastPath, FastPaths
from modelpool.pool.values.core.results import RunState, SamplerState
from modelpool.pool.values.specs.spec import TaskId
from modelpool.pool.weights.ops.layer_choice import Products
from modelpool.pool.weights.patcher.compiled_blocks import CACHE_VARIABLE
from modelpool.pool.weights.patcher.weight_form import MemoryFormat
from tests.pool.devices.fake_modules import GIB, Properties, UsualModule, only

SHAPES = Path(__file__).parents[3] / "examples" / "shapes" / "models"


@pytest.mark.parametrize(
    ("device", "workers", "gpus", "kind", "count", "gpus_each"),
    [
        ("auto", "all", 0, "sim", SIMULATED_WORKERS, 0),
        ("auto", "all", 4, "auto", 4, 1),
        ("auto", 3, 8, "auto", 3, 1),
        ("auto", 3, 0, "sim", 3, 0),
        ("sim", "all", 4, "sim", SIMULATED_WORKERS, 0),
        ("sim", 5, 4, "sim", 5, 0),
        ("cpu", 1, 4, "cpu", 1, 0),
        ("rocm", "all", 2, "rocm", 2, 1),
        ("xpu", 1, 2, "xpu", 1, 1),
        ("mps", "all", 0, "mps", 1, 0),
        ("npu", 1, 0, "npu", 1, 0),
    ],
)
def test_device_and_workers_follow_from_wishes_and_gpus(device, workers, gpus, kind, count, gpus_each) -> None:
    config = PoolConfig().override(device=device, workers=workers, vram="1GiB", threads=3)
    plan = plan_pool(config, gpus, can_grow=False)
    assert plan.worker_ids == tuple(f"gpu-{i}" for i in range(count))
    assert plan.gpus_per_worker == gpus_each
    assert plan.budget_bytes == 1 << 30
    assert plan.open_engine.args == (kind, 1 << 30, 3)
    assert plan.open_catalog.args[2] == kind


def test_simulated_gpus_of_a_joined_cluster_occupy_its_gpus() -> None:
    """Else all of them would start on one node, and a test of a cluster would have no use for its others."""
    for workers, gpus, count, gpus_each in (("all", 3, 3, 1), (5, 3, 5, 1), ("all", 0, SIMULATED_WORKERS, 0)):
        plan = plan_pool(PoolConfig().override(device="sim", workers=workers), gpus, can_grow=True)
        assert (len(plan.worker_ids), plan.gpus_per_worker) == (count, gpus_each)
        assert plan.open_engine.args[0] == "sim"


@pytest.mark.parametrize(
    ("device", "policy", "gpus", "kind", "chosen"),
    [
        ("auto", "auto", 1, "auto", None),
        ("auto", "low", 1, "auto", VramPolicy.LOW),
        ("auto", "disabled", 1, "cpu", VramPolicy.DISABLED),
        ("cuda", "disabled", 0, "cpu", VramPolicy.DISABLED),
        ("mps", "auto", 0, "mps", None),
        ("sim", "high", 0, "sim", VramPolicy.HIGH),
        ("cpu", "auto", 0, "cpu", None),
    ],
)
def test_the_policy_is_what_was_asked_for_or_left_to_the_worker(device, policy, gpus, kind, chosen) -> None:
    """Found in a review: kind and policy were decided here, by less than the worker sees, and the doctor said other."""
    plan = plan_pool(PoolConfig().override(device=device, vram_policy=policy, reserve_vram="1GiB"), gpus, False)
    assert plan.open_engine.args[0] == kind
    found = plan.open_engine.keywords
    assert (found["vram_policy"], found["reserve_bytes"]) == (chosen, 1 << 30)


def test_a_stated_link_among_gpus_reaches_the_engine() -> None:
    """And what a worker introduces itself with; by default gangs measure it, also on simulated devices."""
    for text, speed in (("50GB", 50e9), (None, 0.0)):
        pool = {"device": "sim", "vram": "64MiB"} | ({"gpu_link": text} if text else {})
        engine: Any = plan_pool(PoolConfig.model_validate({"pool": pool}), 0, can_grow=False).open_engine()
        facts = engine.introduce()
        engine.close()
        assert (facts.holds_shares, facts.gang_link_bytes_per_second) == (True, speed)


def test_options_of_the_fast_path_reach_the_engine_and_are_off_by_default() -> None:
    """Those for CUDA have no effect elsewhere."""
    usual = plan_pool(PoolConfig(), 0, can_grow=False).open_engine.keywords
    wanted = {"attention": "measured", "loras": "runtime", "memory_format": "channels_last", "cuda_graphs": True}
    config = PoolConfig.model_validate({"pool": {"device": "cpu", "vram": "64MiB", **wanted}})
    plan = plan_pool(config, 0, can_grow=False)
    names = ("measuring", "loras_at_run_time", "memory_format", "fast_paths")
    assert [usual[name] for name in names] == [Measuring(), False, "contiguous", FastPaths()]
    graphs = FastPaths(FastPath(captures=True))
    expected = [Measuring(attention=True), True, "channels_last", graphs]
    assert [plan.open_engine.keywords[name] for name in names] == expected
    engine = plan.open_engine()
    assert engine._settings.loras_at_run_time
    assert engine._settings.memory_format is MemoryFormat.CHANNELS_LAST
    assert engine._tools.graphs is None
    assert engine._tools.attention.choices is None
    engine.close()


def test_compiled_code_is_kept_for_the_kind_of_device_and_never_on_sim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODELPOOL_CACHE_DIR", str(tmp_path))
    for device, compiles in (("cpu", True), ("sim", False)):
        with monkeypatch.context() as patching:
            patching.setenv(CACHE_VARIABLE, "of the user")
            patching.delenv(CACHE_VARIABLE)
            config = PoolConfig.model_validate({"pool": {"device": device, "vram": "64MiB", "compile": "blocks"}})
            engine = plan_pool(config, 0, can_grow=False).open_engine()
            assert (engine._tools.compiler is not None) == compiles
            folder = os.environ.get(CACHE_VARIABLE, "")
            engine.close()
        expected = f"CPU-torch-{torch.__version__.replace('+', '-')}"
        assert folder == (str(tmp_path / "compiled" / expected) if compiles else "")


def test_settings_of_single_models_replace_those_of_all() -> None:
    config = PoolConfig.model_validate(
        {"pool": {"compile": "blocks", "models": {"a": {"compile": "off"}, "b": {"cuda_graphs": True}}}}
    )
    plan = plan_pool(config, 0, can_grow=False)
    paths = plan.open_engine.keywords["fast_paths"]
    assert (paths.of("other"), paths.of("a"), paths.of("b")) == (FastPath(True), FastPath(), FastPath(True, True))
    assert [paths.any.on(kind).words for kind in ("cuda", "cpu", "sim")] == [
        "compiled blocks, CUDA graphs",
        "compiled blocks",
        "as usual",
    ]
    assert plan.named == ("a", "b")
    recorded = {model: computed_by_of(plan.computed_by, model) for model in ("a", "b")}
    assert recorded == {"a": {}, "b": {"compile": "blocks"}}, "an image of a is that of a pool with the defaults"


def test_the_configured_products_reach_the_engine() -> None:
    config = PoolConfig.model_validate({"pool": {"device": "cpu", "products": "reference"}})
    engine = plan_pool(config, 0, can_grow=False).open_engine()
    assert engine._settings.products is Products.REFERENCE
    engine.close()


def test_settings_that_change_pixels_are_recorded_where_they_differ_from_the_defaults() -> None:
    """In recipes, and in checkpoints: a run does not continue with other products."""
    for expected in ({}, {"products": "auto", "compile": "blocks"}):
        plan = plan_pool(PoolConfig.model_validate({"pool": {"device": "cpu", **expected}}), 0, can_grow=False)
        assert plan.computed_by == expected
        assert plan.checkpoints is not None
        assert plan.checkpoints.computed_by == {**expected, "device": "cpu", "threads": "1"}


@pytest.mark.parametrize("allowed", [False, True])
def test_the_catalog_reads_pickles_where_the_configuration_allows_them(allowed, tmp_path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "old.ckpt")
    config = PoolConfig().override(models=tmp_path, device="sim", allow_pickle=allowed)
    models = plan_pool(config, 0, False).open_catalog().models()
    assert ["a PyTorch pickle" in model.problem for model in models] == [not allowed]


@pytest.mark.parametrize("seen", [DeviceKind.CUDA, DeviceKind.ROCM, DeviceKind.XPU])
def test_a_worker_takes_what_the_doctor_says(seen) -> None:
    """Found in a review: on a machine with an Intel GPU alone, the doctor said sim and the pool cuda."""
    find = only(**{seen.value: UsualModule(Properties("a card", 16 * GIB), count=1)})
    plan = plan_pool(PoolConfig(), 1, False)
    doctor = diagnose(detect(NvmlReading(), find, HostMemory(GIB, GIB)), DiagnosisSettings())
    assert [d.device.kind for d in doctor.devices if d.is_used] == [seen]
    assert open_device(plan.open_engine.args[0], 0, None, find).kind is seen
    assert capabilities_here(plan.open_catalog.args[2], NvmlReading(), find).kind is seen


def test_sizes_are_reckoned_for_the_weakest_card_that_is_here(monkeypatch) -> None:
    """Found in a review: every card was taken for one of the Ampere generation, whatever it was."""
    turing = cuda_capabilities("Tesla T4", (7, 5), 16 * GIB)
    monkeypatch.setattr("modelpool.pool.devices.detection.capabilities_here", {"auto": turing}.__getitem__)
    config = PoolConfig().override(models=SHAPES)
    found = plan_pool(config, 1, False).open_catalog()
    expected = Catalog((SHAPES,), (), turing)
    assumed = Catalog((SHAPES,), (), "cuda")
    model = found.find_model("shapes")
    assert found.components(model) == expected.components(model) != assumed.components(model)


def test_on_a_machine_without_a_card_the_catalog_opens() -> None:
    catalog = plan_pool(PoolConfig().override(models=SHAPES, device="cuda"), 1, False).open_catalog()
    assert catalog.components(catalog.find_model("shapes"))


def test_one_worker_where_workers_cannot_be_kept_apart() -> None:
    with pytest.raises(
        UnusableField, match="workers: found 2, expected 1: Ray cannot assign a separate Ascend NPU to each worker"
    ):
        plan_pool(PoolConfig().override(device="npu", workers=2), 0, can_grow=True)


def test_more_workers_than_gpus_only_where_more_may_come() -> None:
    config = PoolConfig().override(device="cuda", workers=3)
    with pytest.raises(UnusableField, match="workers: found 3, expected at most 2"):
        plan_pool(config, 2, can_grow=False)
    assert len(plan_pool(config, 2, can_grow=True).worker_ids) == 3


def test_a_single_machine_without_a_gpu_is_refused_and_a_cluster_is_waited_for() -> None:
    with pytest.raises(UnusableField, match="device: found 'cuda', expected sim or cpu"):
        plan_pool(PoolConfig().override(device="cuda"), 0, can_grow=False)
    plan = plan_pool(PoolConfig().override(device="cuda"), 0, can_grow=True)
    assert (plan.worker_ids, plan.gpus_per_worker, plan.elastic) == ((), 1, True)


def test_a_cluster_without_gpus_is_never_simulated_silently() -> None:
    with pytest.raises(
        UnusableField, match=r'device: found .auto., expected "cuda" .* to wait for GPU nodes, or "sim"'
    ):
        plan_pool(PoolConfig(), 0, can_grow=True)
    assert len(plan_pool(PoolConfig().override(device="sim"), 0, can_grow=True).worker_ids) == 2


def test_a_pool_of_a_fixed_size_does_not_follow_the_cluster() -> None:
    assert plan_pool(PoolConfig().override(device="cuda", workers=2), 4, can_grow=True).elastic is False
    assert plan_pool(PoolConfig().override(device="cuda"), 4, can_grow=False).elastic is False
    assert plan_pool(PoolConfig().override(device="cuda"), 4, can_grow=True).elastic is True


def test_a_plan_travels() -> None:
    plan = plan_pool(PoolConfig(), 0, can_grow=False)
    again = pickle.loads(pickle.dumps(plan))
    assert again.worker_ids == plan.worker_ids
    assert again.open_engine.args == plan.open_engine.args


def test_checkpoints_follow_from_the_pool_and_are_refused_by_one_that_computes_otherwise(tmp_path: Path) -> None:
    (tmp_path / "pool.toml").write_text(
        "[pool]\ndevice = 'cpu'\ncheckpoint_seconds = 5\ncheckpoint_dir = 'kept'\ncheckpoint_bytes = '1GiB'\n"
    )
    config = PoolConfig.load(tmp_path / "pool.toml")
    kept = plan_pool(config, 0, False).checkpoints
    assert kept is not None
    assert (kept.seconds, kept.bound_bytes, kept.folder) == (5.0, GIB, tmp_path / "kept")
    default = plan_pool(PoolConfig(), 0, False).checkpoints
    assert default is not None
    assert (default.seconds, default.folder) == (30.0, None)
    assert plan_pool(PoolConfig(pool=PoolSection(checkpoint_seconds=0)), 0, False).checkpoints is None
    (tmp_path / "volume.toml").write_text("[pool]\njournal = 'volume/jobs.sqlite'\n")
    beside = plan_pool(PoolConfig.load(tmp_path / "volume.toml"), 0, False).checkpoints
    assert beside is not None
    assert beside.folder == tmp_path / "volume" / "checkpoints", "a volume for the journal is one for checkpoints"

    task_id, state = TaskId("sample-1"), RunState(2, 4, SamplerState(np.zeros((1, 2, 2), np.float32)))
    kept.folder_at(tmp_path).save(task_id, state)
    for changed, steps in (({}, [2]), ({"threads": 4}, []), ({"device": "sim"}, [])):
        other = plan_pool(config.override(**changed), 0, False).checkpoints
        assert other is not None
        found = other.folder_at(tmp_path).newest(task_id, 4)
        assert ([] if found is None else [found.step]) == steps, changed
