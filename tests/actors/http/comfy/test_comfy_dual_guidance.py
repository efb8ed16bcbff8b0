"""DualCFGGuider: guidance by a text and by an image, of models that read an image next to their latents."""

from __future__ import annotations

from typing import Any

import pytest
from PIL import Image

from modelpool.actors.http.comfy.comfy_graph import PoolNames
from modelpool.actors.http.comfy.comfy_workflow import outputs_of, requests_of
from modelpool.actors.http.comfy.node_errors import WorkflowRejected
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.catalog.registry.listings import FileNames
from tests.actors.http.comfy.comfy_examples import Graph, basic, node

NAMES = PoolNames({"shapes": "Stable Diffusion 1 InstructPix2Pix"}, [], None, FileNames())


def edited(**settings: Any) -> Graph:
    graph = basic()
    graph["photo"] = node("LoadImage", image="a.png")
    graph["pixels"] = node(
        "InstructPixToPixConditioning", positive=["positive", 0], negative=["negative", 0], vae=["model", 2],
        pixels=["photo", 0],
    )  # fmt: skip
    links = {"cond1": ["pixels", 0], "cond2": ["pixels", 1], "negative": ["negative", 0], "model": ["model", 0]}
    graph["guider"] = node("DualCFGGuider", **links, **settings)
    graph["noise"] = node("RandomNoise", noise_seed=3)
    graph["euler"] = node("KSamplerSelect", sampler_name="euler")
    graph["levels"] = node("BasicScheduler", model=["model", 0], scheduler="normal", steps=4, denoise=1.0)
    graph["sampler"] = node(
        "SamplerCustomAdvanced", noise=["noise", 0], guider=["guider", 0], sampler=["euler", 0], sigmas=["levels", 0],
        latent_image=["pixels", 2],
    )  # fmt: skip
    return graph


def request(graph: Graph) -> GenerateRequest:
    read = lambda name: Image.new("RGBA", (64, 64))  # noqa: E731
    (found,) = [one for output in outputs_of(graph, NAMES) for one in requests_of(output, NAMES, read)]
    return found


@pytest.mark.parametrize("style", ["regular", "nested"])
def test_both_styles_are_guidance_by_text_and_by_image(style: str) -> None:
    """By the predictions n, c2 and c1 of numbers, a request gives n + b * (c2 - n) + cfg * (c1 - c2), as
    `TextAndImageGuidance` does. Before: nested was refused."""
    a, b, n, c2, c1 = 3.0, 1.5, 0.25, 0.75, 2.0
    found = request(edited(cfg_conds=a, cfg_cond2_negative=b, style=style))
    assert found.cfg is not None
    assert found.image_cfg == b
    made = n + found.image_cfg * (c2 - n) + found.cfg * (c1 - c2)
    middle = c2 + a * (c1 - c2)
    assert made == (n + b * (c2 - n) + a * (c1 - c2) if style == "regular" else n + b * (middle - n))


def test_what_two_scales_cannot_say_is_refused() -> None:
    """Before: with a scale of 1 of the text, the guidance by the image was dropped without a word."""
    with pytest.raises(WorkflowRejected) as refused:
        request(edited(cfg_conds=1.0, cfg_cond2_negative=1.5, style="regular"))
    assert any("cfg_conds: found 1 with cfg_cond2_negative 1.5" in error.details for error in refused.value.errors)
    graph = edited(cfg_conds=3.0, cfg_cond2_negative=1.5, style="nested")
    graph["rescaled"] = node("RescaleCFG", model=["model", 0], multiplier=0.7)
    graph["guider"]["inputs"]["model"] = ["rescaled", 0]
    with pytest.raises(WorkflowRejected) as refused:
        request(graph)
    assert any("style: found nested on a model with changed guidance" in e.details for e in refused.value.errors)
