"""What tasks that start from images hold on the device: estimated without one, and measured on a simulated one. No
more than was estimated, and not much less."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modelpool.pool.devices.sim import device as sim
from modelpool.pool.values.core.stage_params import EncodeImageParams
from modelpool.pool.values.specs.spec import Stage
from tests.pool.families.test_from_images import filling
from tests.pool.families.tiny_model import Made, TinyModel
from tests.pool.inference.controlnets.layouts import ldm_controlnet
from tests.pool.models.loading import layouts
from tests.pool.models.loading.layouts import Layout
from tests.pool.models.loading.tiny_checkpoint import write_tiny_checkpoint

pytestmark = pytest.mark.counted

#: an estimate is at most so much above the truth
MOST_OVER = 0.05
PIXELS = np.random.default_rng(0).integers(0, 256, (64, 96, 3), np.uint8)
MASK = PIXELS[:, :, 0] > 100
FIELDS: dict[str, Any] = {"image": PIXELS, "steps": 6, "cfg": 4.0}
CONTROLS = [{"model": name, "image": PIXELS} for name in ("canny", "depth")]
REGIONS = [{"prompt": "a", "box": (0, 0, 32, 32)}, {"prompt": "b " * 100, "box": (32, 0, 32, 32)}]
LONG = "one more word " * 60


def made_on_sim(folder: Path, layout: Layout, **fields: Any) -> Made:
    sim.install()
    sim.configure(0, 1 << 28)
    sim.recover(0)
    for place, name in enumerate(("canny", "depth")):
        write_tiny_checkpoint(folder / f"{name}.safetensors", place, layout=ldm_controlnet(layouts.TINY_UNET))
    tiny = TinyModel(folder, layout, device="sim")
    try:
        return tiny.made(**{**FIELDS, **fields})
    finally:
        tiny.close()


def check(made: Made, stages: tuple[Stage, ...] = (Stage.SAMPLE,)) -> None:
    """Every run of these stages."""
    checked = 0
    for task, cost in zip(made.tasks, made.costs, strict=True):
        if task.stage in stages or isinstance(made.works[task.task_id], EncodeImageParams):
            checked += 1
            assert cost.division is None
            # a ControlNet's weights of half precision are widened one by one where they are used
            scratch_bytes = max((use.scratch_bytes for use in task.uses[1:]), default=0)
            assert cost.working_bytes <= task.activation_bytes + scratch_bytes
            assert task.activation_bytes <= (1 + MOST_OVER) * cost.working_bytes
    assert checked


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"mask": MASK},
        {"mask": MASK, "cfg": 1.0, "sampler": "dpmpp_2m"},
        {"controls": CONTROLS[:1]},
        {"controls": CONTROLS, "negative": LONG},
        {"regions": REGIONS},
        {"regions": REGIONS, "cfg": 1.0, "controls": CONTROLS},
    ],
    ids=["image", "mask", "mask without guidance", "control", "two controls, a long text", "regions", "all"],
)
def test_runs_hold_what_was_estimated(fields: dict[str, Any], tmp_path: Path) -> None:
    """ControlNets of half precision beside a UNet of full, as they are mostly published."""
    check(made_on_sim(tmp_path, layouts.tiny_sd1(), **fields))


def test_a_model_that_fills_holes_holds_what_was_estimated(tmp_path: Path) -> None:
    check(made_on_sim(tmp_path, filling("sd1"), mask=MASK))


def test_a_image_can_be_encoded_by_tiles_where_memory_is_short(tmp_path: Path) -> None:
    """Ways to do it need less and less."""
    tiny = TinyModel(tmp_path, layouts.tiny_sd1())
    work = EncodeImageParams(tiny.model, 256, 256)
    whole, *parts = tiny.catalog.execution_modes(tiny.model, work)
    assert [way.tile for way in parts] == sorted((way.tile for way in parts), reverse=True)
    sizes = [whole.activation_bytes, *(way.activation_bytes for way in parts)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < sizes[0] / 2
    tiny.close()
