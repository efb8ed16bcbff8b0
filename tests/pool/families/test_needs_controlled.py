"""What tasks with ControlNets of transformers hold on the device: estimated without one, and measured on a simulated
one. No more than was estimated, and not much less."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modelpool.pool.devices.sim import device as sim
from tests.pool.families.test_needs_from_images import LONG
from tests.pool.families.test_needs_shown import check
from tests.pool.families.test_transformer_controlnets import CONTROLS
from tests.pool.families.tiny_shown import TinyFamilyModel
from tests.pool.families.tiny_transformers import FAMILIES
from tests.pool.inference.controlnets import tiny_controls

pytestmark = pytest.mark.counted

PIXELS = np.random.default_rng(0).integers(0, 256, (64, 96, 3), np.uint8)
REGIONS = [{"prompt": "cat", "box": (0, 0, 32, 48)}]
#: of tiny models a sample of a ControlNet is large beside what its blocks hold at once
MOST_OVER = 0.08


@pytest.mark.parametrize(
    ("case", "fields"),
    [
        ("flux", {}),
        ("flux of xlabs", {}),
        ("flux", {"image": PIXELS, "strength": 0.9}),
        ("flux", {"prompt": "red", "negative": "dog", "regions": REGIONS}),
        ("qwen_image", {"prompt": "red", "negative": "dog", "regions": REGIONS}),
        ("sd3", {}),
        ("sd3", {"negative": LONG}),
        ("sd35_large", {}),
        ("qwen_image", {}),
        ("qwen_image", {"prompt": "red", "negative": "dog"}),
        ("qwen_image, blockwise", {}),
        ("z_image", {}),
        ("z_image 2.1", {}),
    ],
    ids=[
        "flux",
        "xlabs",
        "from an image",
        "flux in a region",
        "qwen in a region",
        "sd3",
        "sd3 apart",
        "sd35_large",
        "qwen apart",
        "qwen",
        "blockwise",
        "z",
        "z 2.1",
    ],
)
@pytest.mark.parametrize("count", [1, 2])
def test_runs_hold_what_was_estimated(case: str, fields: dict[str, Any], count: int, tmp_path: Path) -> None:
    family, make, publish = CONTROLS[case]
    sim.install()
    sim.configure(0, 1 << 28)
    sim.recover(0)
    controls = []
    for place in range(count):
        tiny_controls.write(tmp_path / "controlnet" / f"c{place}.safetensors", make, place, publish)
        controls.append({"model": f"c{place}", "image": PIXELS})
    tiny = TinyFamilyModel(tmp_path, FAMILIES[family], device="sim")
    try:
        check(tiny.made(steps=6, cfg=4.0, width=96, height=64, controls=controls, **fields), MOST_OVER)
    finally:
        tiny.close()
