"""What tasks of models that are shown an image hold on the device: estimated without one, and measured on a simulated
one. No more than was estimated, and not much less."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modelpool.pool.devices.sim import device as sim
from modelpool.pool.values.core.stage_params import EncodeImageParams
from modelpool.pool.values.specs.spec import Stage
from tests.pool.families.test_needs_from_images import MOST_OVER
from tests.pool.families.tiny_model import Made, TinyModel
from tests.pool.families.tiny_shown import SHOWN_FAMILIES, SHOWN_LAYOUTS, TinyFamilyModel
from tests.pool.families.tiny_transformers import FAMILIES

pytestmark = pytest.mark.counted

PIXELS = np.random.default_rng(0).integers(0, 256, (64, 96, 3), np.uint8)
MASK = PIXELS[:, :, 0] > 100
LONG = "one more word " * 60


def on_sim(folder: Path, name: str) -> TinyModel:
    sim.install()
    sim.configure(0, 1 << 28)
    sim.recover(0)
    if name in SHOWN_LAYOUTS:
        return TinyModel(folder, SHOWN_LAYOUTS[name](), device="sim")
    return TinyFamilyModel(folder, {**FAMILIES, **SHOWN_FAMILIES}[name], device="sim")


def check(made: Made, most_over: float) -> None:
    checked = 0
    for task, cost in zip(made.tasks, made.costs, strict=True):
        if task.stage is Stage.SAMPLE or isinstance(made.works[task.task_id], EncodeImageParams):
            checked += 1
            assert cost.division is None
            assert cost.working_bytes <= task.activation_bytes
            assert task.activation_bytes <= (1 + most_over) * cost.working_bytes
    assert checked


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("sd1_ip2p", {"image": PIXELS}),
        ("sd1_ip2p", {"image": PIXELS, "negative": LONG, "image_cfg": 1.0}),
        ("sd1_ip2p", {"image": PIXELS, "negative": LONG, "regions": [{"prompt": "a", "box": (0, 0, 32, 32)}]}),
        ("sd_x4", {"image": PIXELS[:24, :32]}),
        ("sd2_depth", {"image": PIXELS}),
        ("flux_fill", {"image": PIXELS, "mask": MASK}),
        ("flux_control", {"image": PIXELS}),
        ("flux_dev", {"reference": PIXELS, "width": 64, "height": 128}),
    ],
    ids=[
        "instructed",
        "image by itself",
        "instructed in regions",
        "enlarged",
        "by depth",
        "filled",
        "followed",
        "referred to",
    ],
)  # fmt: skip
def test_runs_hold_what_was_estimated(name: str, fields: dict[str, Any], tmp_path: Path) -> None:
    tiny = on_sim(tmp_path, name)
    try:
        check(tiny.made(steps=6, cfg=4.0, **fields), MOST_OVER)
    finally:
        tiny.close()
