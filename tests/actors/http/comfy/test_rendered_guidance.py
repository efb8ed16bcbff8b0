"""Nodes that change guidance, rendered with a tiny model: the images follow from the formulas of the nodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.pipelines.ideogram4.pipeline_ideogram4 import _logit_normal_sigmas, _resolution_aware_mu
from PIL import Image

from modelpool import PoolConfig
from modelpool.actors.client.client import ModelPool
from modelpool.actors.http.comfy.comfy_graph import PoolNames
from modelpool.actors.http.comfy.comfy_workflow import outputs_of
from modelpool.actors.http.comfy.node_errors import WorkflowRejected
from modelpool.actors.request.workflow_fields import SampleNode
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


def graph(
    *patches: dict[str, Any], negative: str = "snow", guider: dict[str, Any] | None = None, cfg: float = CFG
) -> dict[str, Any]:
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
    kind, more = ("CFGGuider", {"cfg": cfg}) if guider is None else ("PerpNegGuider", guider)
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


def test_a_scale_in_a_part_of_the_run_replaces_the_usual_one_there(pool: ModelPool, tmp_path: Path) -> None:
    def overridden(cfg: float, start: float, end: float) -> dict[str, Any]:
        return node("CFGOverride", cfg=cfg, start_percent=start, end_percent=end)

    plain, other = (image(pool, graph(cfg=cfg), tmp_path / str(cfg)) for cfg in (CFG, 9.0))
    everywhere = image(pool, graph(overridden(9.0, 0.0, 1.0)), tmp_path / "everywhere")
    assert np.abs(everywhere - other).max() <= 1
    late = image(pool, graph(overridden(9.0, 0.2, 1.0)), tmp_path / "late")
    assert all(np.abs(late - each).max() > 1 for each in (plain, other))


def second_model(model: str, **changes: Any) -> dict[str, Any]:
    """As ComfyUI's template of Ideogram 4 samples."""
    made = graph()
    made["model"]["inputs"]["ckpt_name"] = model
    made["second"] = node("UNETLoader", unet_name="second", weight_dtype="default")
    made["zero"] = node("ConditioningZeroOut", conditioning=["text positive", 0])
    given = {"model": ["patched", 0], "positive": ["text positive", 0], "negative": ["zero", 0], "cfg": 7.0}
    made["patched"] = node("CFGOverride", model=["model", 0], cfg=3.0, start_percent=0.7, end_percent=1.0)
    made["guider"] = node("DualModelGuider", **{**given, "model_negative": ["second", 0], **changes})
    made["levels"] = node("Ideogram4Scheduler", steps=20, width=1024, height=512, mu=0.5, std=1.75)
    return made


def test_a_second_model_is_a_part_of_a_model_of_ideogram() -> None:
    names = PoolNames({"ideo": "Ideogram 4", "second": "Ideogram 4", "sd1": "Stable Diffusion 1"}, ())
    (output,) = outputs_of(second_model("ideo"), names)
    assert any("model_negative: found second" in warning for warning in output.warnings)
    (request,) = requests(second_model("ideo"), names)
    assert request.workflow is not None
    (run,) = [each for each in request.workflow.nodes.values() if isinstance(each, SampleNode)]
    assert run.request.options is not None
    assert run.request.options.settings() == {
        "cfg_override": {"cfg": 3.0, "shares_of": "noise", "start": 0.7, "end": 1.0}
    }
    expected = _logit_normal_sigmas(20, _resolution_aware_mu(512, 1024, 0.5), std=1.75).tolist()
    assert run.request.sigmas == pytest.approx(expected, rel=1e-6)
    for wrong, message in (
        (second_model("sd1"), "model_negative: found 'second' next to Stable Diffusion 1"),
        (second_model("ideo", negative=["text negative", 0]), "negative: expected none"),
        (second_model("ideo", model_negative=["patched", 0]), "model_negative: expected a model as it is loaded"),
    ):
        with pytest.raises((UserError, WorkflowRejected)) as refused:
            requests(wrong, names)
        told = str(refused.value) + "".join(error.details for error in getattr(refused.value, "errors", ()))
        assert message in told


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
