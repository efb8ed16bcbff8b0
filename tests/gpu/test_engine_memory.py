"""The engine on a real CUDA device: residency changes bytes and time, not images, and its plan holds.

The same promises as tests/pool/engine/test_engine.py shows on the simulated device; on a GPU the peak is the
allocator's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from modelpool.pool.catalog.catalog import Catalog
from modelpool.pool.devices.detection import capabilities_here
from modelpool.pool.devices.torch_api.torch_private import free_workspaces
from tests.pool.models.loading.tiny_checkpoint import write_tiny_checkpoint, write_tiny_lora
from tests.pool.pipeline import Pipeline, open_engine

pytestmark = pytest.mark.gpu

MIB = 1 << 20
PLENTY_BYTES = 2048 * MIB


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    write_tiny_checkpoint(tmp_path / "toy.safetensors", 1, metadata={"modelspec.resolution": "64x64"})
    (tmp_path / "loras").mkdir()
    write_tiny_lora(tmp_path / "loras" / "twist.safetensors", 2)
    yield Catalog([tmp_path], [tmp_path / "loras"], capabilities_here("cuda"))
    torch.cuda.set_per_process_memory_fraction(1.0, 0)  # the cap is the process's


def test_images_do_not_depend_on_what_is_resident(catalog: Catalog) -> None:
    """Kernels may be chosen by free memory, so last bits may differ: one level of 255."""
    images = []
    for share in (1.0, 0.5, 0.0):
        with closing(open_engine("cuda", PLENTY_BYTES)) as probe:
            tight_bytes = Pipeline(probe, catalog, {"twist": 0.8}).streaming_budget_bytes(share)
        with closing(open_engine("cuda", PLENTY_BYTES if share == 1.0 else tight_bytes)) as engine:
            pipeline = Pipeline(engine, catalog, {"twist": 0.8})
            images.append(pipeline.image().astype(int))
        for cost in pipeline.costs:
            assert cost.peak_bytes <= cost.planned_bytes, "the plan's figure does not hold"
            assert cost.oom_steps == ()
        assert (share == 1.0) == (pipeline.costs[2].streamed_bytes == 0)
    assert all(np.abs(other - images[0]).max() <= 1 for other in images[1:])


def test_everything_is_given_back(catalog: Catalog) -> None:
    """Also the workspaces of cuBLAS, which torch counts as tensors."""
    free_workspaces()  # of tests before
    torch.cuda.empty_cache()
    before_bytes = torch.cuda.memory_allocated(0)
    with closing(open_engine("cuda", PLENTY_BYTES)) as engine:
        Pipeline(engine, catalog, {}).image()
        assert torch.cuda.memory_allocated(0) > before_bytes
    assert torch.cuda.memory_allocated(0) == before_bytes


def test_memory_that_another_program_takes_is_got_over(catalog: Catalog) -> None:
    """Memory taken between plan and load ends in a result or in a typed error; the account stays exact."""
    with closing(open_engine("cuda", PLENTY_BYTES)) as engine:
        pipeline = Pipeline(engine, catalog, {})
        expected = pipeline.image()
        taken = torch.empty(256 * MIB, dtype=torch.uint8, device="cuda:0")
        engine.vram.unload_all()
        assert np.array_equal(pipeline.image(), expected)
        del taken
