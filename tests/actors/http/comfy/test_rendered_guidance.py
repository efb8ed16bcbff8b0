"""Nodes that change guidance, rendered with a tiny model: the images follow from the formulas of the nodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from modelpool import PoolConfig
from modelpool.actors.client.client import ModelPool
from modelpool.actors.http.comfy.comfy_graph import PoolNames
from modelpool.actors.http.comfy.node_errors import WorkflowRejected
from modelpool.pool.values.core.errors import UserError
from tests.actors.http.comfy.comfy_examples import node
from tests.actors.http.comfy.test_public_kinds import CONFIG, requests
from tests.actors.loop_connection import open_real_pool
from tests.pool.models.loading.tiny_checkpoint import write_tiny_checkpoint

CFG = 4.0


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelPool]:
    folder = tmp_path_factory.mktemp("models")
    write_tiny_checkpoint(folder / "sd1.safetensors", seed=1, dtype=torch.float32)
    config = PoolConfig.load(CONFIG).override(device="cpu", models=[folder], workers=1, vram="512 MiB")
    with open_real_pool(config) as opened:
        yield opened


def graph(*patches: dict[str, Any], negative: str = "snow", guider: dict[str, Any] | None = None) -> dict[str, Any]:
    """A workflow with nodes that change its model one after the other, and perhaps another guider."""
    made = {
        "model": node("CheckpointLoaderSimple", ckpt_name="sd1.safetensors"),
        **{
            f"text {name}": node("CLIPTextEncode", clip=["model", 1], text=text)
            for name, text in {"positive": "a fox", "negative": negative, "empty": ""}.items()
        },
        "latent": node("EmptyLatentImage", width=64, height=64, batch_size=1),
        "noise": node("RandomNoise", noise_seed=5),
        "sampler": node("KSamplerSelect", sampler_name="euler"),
    }
    source: list[Any] = ["model", 0]
    for place, patch in enumerate(patches):
        made[f"patch {place}"] = {**patch, "inputs": {**patch["inputs"], "model": source}}
        source = [f"patch {place}", 0]
    texts = {"positive": ["text positive", 0], "negative": ["text negative", 0]}
    kind, more = ("CFGGuider", {"cfg": CFG}) if guider is None else ("PerpNegGuider", guider)
    made["guider"] = node(kind, model=source, **texts, **more)
    made["levels"] = node("BasicScheduler", model=source, scheduler="normal", steps=4, denoise=1.0)
    parts = {"noise": ["noise", 0], "guider": ["guider", 0], "sampler": ["sampler", 0], "sigmas": ["levels", 0]}
    made["sample"] = node("SamplerCustomAdvanced", latent_image=["latent", 0], **parts)
    made["decode"] = node("VAEDecode", samples=["sample", 0], vae=["model", 2])
    made["save"] = node("SaveImage", images=["decode", 0], filename_prefix="x")
    return made


def perpendicular(scale: float = 1.0, **changes: Any) -> dict[str, Any]:
    return {"empty_conditioning": ["text empty", 0], "cfg": CFG, "neg_scale": scale, **changes}


def image(pool: ModelPool, prompt: dict[str, Any], output: Path) -> np.ndarray[Any, Any]:
    names = PoolNames({each.name: each.family for each in pool.models()}, (), None, pool.file_names())
    (result,) = pool.submit(requests(prompt, names), output=output).results()
    assert result.path is not None
    return np.asarray(Image.open(result.path).convert("RGB")).astype(np.float64)


def test_settings_without_effect_make_the_plain_image_and_others_another(pool: ModelPool, tmp_path: Path) -> None:
    plain = image(pool, graph(), tmp_path)
    without = {
        "apg": node("APG", eta=1.0, norm_threshold=0.0, momentum=0.0),
        "epsilon": node("EpsilonScaling", scaling_factor=1.0),
    }
    for name, patch in without.items():
        assert np.abs(image(pool, graph(patch), tmp_path / name) - plain).max() <= 1, name
    acting = {
        "apg": node("APG", eta=0.0, norm_threshold=5.0, momentum=-0.5),
        "tcfg": node("TCFG"),
        "epsilon": node("Epsilon Scaling", scaling_factor=1.1),
    }
    found = [image(pool, graph(patch), tmp_path / f"acting {name}") for name, patch in acting.items()]
    found.append(image(pool, graph(acting["apg"], node("RescaleCFG", multiplier=0.7)), tmp_path / "both"))
    for place, one in enumerate(found):
        assert all(np.abs(one - other).max() > 1 for other in (plain, *found[:place])), place


def test_an_empty_negative_prompt_has_no_perpendicular_part(pool: ModelPool, tmp_path: Path) -> None:
    """Then, and with weight 0, guidance is from the empty text."""
    plain = image(pool, graph(negative=""), tmp_path)
    for name, prompt in {
        "empty": graph(negative="", guider=perpendicular()),
        "no weight": graph(guider=perpendicular(0.0)),
    }.items():
        assert np.abs(image(pool, prompt, tmp_path / name) - plain).max() <= 1, name
    acting = image(pool, graph(guider=perpendicular()), tmp_path / "acting")
    assert np.abs(acting - plain).max() > 1
    assert np.abs(acting - image(pool, graph(), tmp_path / "usual")).max() > 1


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (graph(guider=perpendicular(empty_conditioning=["text negative", 0])), "empty_conditioning"),
        (graph(guider=perpendicular(cfg=1.0)), "cfg: found 1"),
        (graph(node("FreSca", scale_low=1.0, scale_high=2.0, freq_cutoff=2), guider=perpendicular()), "fresca"),
        (graph(node("APG", eta=1.0, norm_threshold=5.0, momentum=0.0), node("CFGZeroStar")), "cfg_zero"),
    ],
    ids=["another text", "no guidance", "two predictions", "two kinds"],
)
def test_what_cannot_act_together_is_refused(
    pool: ModelPool, tmp_path: Path, prompt: dict[str, Any], message: str
) -> None:
    names = PoolNames({each.name: each.family for each in pool.models()}, (), None, pool.file_names())
    with pytest.raises((UserError, WorkflowRejected)) as refused:
        list(pool.submit(requests(prompt, names), output=tmp_path).results())
    told = str(refused.value) + "".join(error.details for error in getattr(refused.value, "errors", ()))
    assert message in told
