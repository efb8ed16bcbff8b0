"""The budgets of the tests on a GPU make a run stream there: here for cards that are not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from modelpool.pool.catalog.catalog import Catalog
from modelpool.pool.devices.capabilities import cuda_capabilities
from modelpool.pool.devices.kind_names import DeviceKind
from modelpool.pool.devices.workspaces import workspace_bytes
from modelpool.pool.engine.engine import AHEAD_SHARE
from modelpool.pool.values.specs.spec import Role
from modelpool.pool.weights.plan.eviction_plan import needed_bytes
from tests.pool.models.loading.tiny_checkpoint import write_tiny_checkpoint, write_tiny_lora
from tests.pool.pipeline import Pipeline

CARDS = {"NVIDIA H100 80GB HBM3": (9, 0), "NVIDIA A100": (8, 0), "Tesla T4": (7, 5)}


def test_budgets_of_the_tests_on_a_gpu_make_the_diffusion_model_stream(tmp_path: Path) -> None:
    """Found in a review: the budget was 1.05 of the need, which a margin of 128 MiB dominates, so that the whole tiny
    model was resident and the test failed on every card."""
    write_tiny_checkpoint(tmp_path / "toy.safetensors", 1, metadata={"modelspec.resolution": "64x64"})
    (tmp_path / "loras").mkdir()
    write_tiny_lora(tmp_path / "loras" / "twist.safetensors", 2)
    failures = []
    for name, generation in CARDS.items():
        catalog = Catalog([tmp_path], [tmp_path / "loras"], cuda_capabilities(name, generation, 80 << 30))
        unopened: Any = None
        pipeline = Pipeline(unopened, catalog, {"twist": 0.8})
        sample = pipeline.task(pipeline.works()[2])
        weight_bytes = catalog.components(pipeline.model)[Role.DIFFUSION_MODEL].weight_bytes
        resident_bytes = needed_bytes(sample.uses, sample.activation_bytes) + weight_bytes
        workspaces_bytes = workspace_bytes(DeviceKind.CUDA, generation, 80 << 30, {})
        assert workspaces_bytes > 0
        for share in (0.5, 0.0):
            budget_bytes = pipeline.streaming_budget_bytes(share, workspaces_bytes)
            capacity_bytes = budget_bytes - budget_bytes // AHEAD_SHARE - workspaces_bytes
            if not pipeline.smallest_bytes() <= capacity_bytes < resident_bytes:
                failures.append((name, share, capacity_bytes, resident_bytes))
    assert not failures
