"""A ControlNet that acts at a part of the noise levels: a run that is divided into two is the whole run, to the last
bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from modelpool import PoolConfig
from tests.actors.loop_connection import open_real_pool
from tests.pool.inference.controlnets.layouts import ldm_controlnet
from tests.pool.models.loading import layouts
from tests.pool.models.loading.tiny_checkpoint import write_tiny_checkpoint

CONFIG = Path(__file__).parents[4] / "configs" / "laptop.toml"
STEPS = 8


def made_of(shares_of: str, *ends: int) -> dict[str, Any]:
    """A workflow with runs that end at these steps, and at the last one. The ControlNet acts in the middle."""
    control = {"model": "canny", "strength": 2.0, "start": 0.25, "end": 0.6, "shares_of": shares_of}
    request = {"model": "shapes", "prompt": "a fox", "steps": STEPS, "width": 64, "height": 64, "controls": [control]}
    gradient = np.asarray(Image.linear_gradient("L").resize((64, 64)).convert("RGB"))
    nodes: dict[str, Any] = {"photo": {"kind": "image", "image": gradient}}
    latent = ""
    for first, last in zip((0, *ends), (*ends, 0), strict=True):
        inputs = {"controls.0": "photo"} | ({"latent": latent} if latent else {})
        steps = {"first_step": first, "last_step": last, "adds_noise": not first, "keeps_noise": bool(last)}
        latent = f"run {first}"
        nodes[latent] = {"kind": "sample", "request": request, "inputs": inputs, **steps}
    nodes["image"] = {"kind": "decode", "model": "shapes", "inputs": {"latent": latent}}
    return {"nodes": nodes, "output": "image"}


def test_divided_runs_have_the_controlnet_of_the_whole_run(tmp_path: Path) -> None:
    """Shares of the steps began anew in each part."""
    write_tiny_checkpoint(tmp_path / "shapes.safetensors", 3, layout=layouts.tiny_sd1())
    (tmp_path / "controls").mkdir()
    layout = ldm_controlnet(layouts.TINY_UNET)
    write_tiny_checkpoint(tmp_path / "controls" / "canny.safetensors", seed=6, dtype=torch.float32, layout=layout)
    config = PoolConfig.load(CONFIG).override(device="cpu", models=[tmp_path], workers=1)

    with open_real_pool(config) as pool:

        def pixels(*given: Any) -> Any:
            (image,) = pool.run(made_of(*given), seed=5).images()
            return image.pixels

        whole, of_steps = pixels("noise"), pixels("steps")
        assert not np.array_equal(whole, of_steps), "the shares are of other steps"
        for ends in ((3,), (2, 5)):
            assert np.array_equal(pixels("noise", *ends), whole), ends
        assert not np.array_equal(pixels("steps", 3), of_steps), "as in requests, a part has steps of its own"
