"""DualCFGGuider: guidance by a text and by an image, of models that read an image next to their latents."""

from __future__ import annotations

from typing import Any

import pytest
from PIL import Image

from modelpool.actors.http.comfy.comfy_graph import PoolNames
from modelpool.actors.http.comfy.comfy_workflow import outputs_of, requests_of
from modelpool.actors.http.comfy.node_errors import WorkflowRejected
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.request.workflow_fields import SampleNode
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


def test_without_the_image_in_both_other_texts_the_prediction_without_it_is_guided() -> None:
    """n + cfg * (c1 - n) with n without the image, of DualCFGGuider with one text twice, and of CFGGuider. Before, the
    image was read with the negative text, too."""
    graph = edited(cfg_conds=3.0, cfg_cond2_negative=1.5, style="regular")
    graph["guider"]["inputs"]["cond2"] = ["negative", 0]
    found = request(graph)
    assert (found.cfg, found.image_cfg) == (3.0, 3.0)
    links = {"positive": ["pixels", 0], "negative": ["negative", 0], "model": ["model", 0]}
    for negative, image_cfg in ((["negative", 0], 3.0), (["pixels", 1], 1.0)):
        graph["guider"] = node("CFGGuider", cfg=3.0, **{**links, "negative": negative})
        assert request(graph).image_cfg == image_cfg


def test_one_text_twice_on_a_model_with_changed_guidance_is_refused() -> None:
    for style in ("regular", "nested"):
        graph = edited(cfg_conds=3.0, cfg_cond2_negative=1.5, style=style)
        graph["rescaled"] = node("RescaleCFG", model=["model", 0], multiplier=0.7)
        graph["guider"]["inputs"] |= {"model": ["rescaled", 0], "cond2": ["negative", 0]}
        with pytest.raises(WorkflowRejected, match="found the same text on a model with changed guidance"):
            request(graph)


def runs(graph: Graph, names: PoolNames = NAMES) -> SampleNode:
    read = lambda name: Image.new("RGBA", (80, 64))  # noqa: E731
    (found,) = [one for output in outputs_of(graph, names) for one in requests_of(output, names, read)]
    assert found.workflow is not None
    (sample,) = [each for each in found.workflow.nodes.values() if isinstance(each, SampleNode)]
    return sample


def test_changed_guidance_is_nested_in_a_workflow() -> None:
    """Before: it was refused."""
    graph = edited(cfg_conds=3.0, cfg_cond2_negative=1.5, style="nested")
    graph["rescaled"] = node("RescaleCFG", model=["model", 0], multiplier=0.7)
    graph["guider"]["inputs"]["model"] = ["rescaled", 0]
    found = runs(graph)
    assert (found.nested, found.request.cfg, found.request.image_cfg) == (True, 3.0, 1.5)


@pytest.mark.parametrize("text", ["positive", "negative"])
def test_the_prediction_without_the_image_is_for_either_text(text: str) -> None:
    """As the workflows of HiDream E1.1 and of HiDream E1 have it: the model reads its image as a reference, and the
    output has the size of it. Before: the image was what the run began with."""
    names = PoolNames({"shapes": "HiDream I1"}, [], None, FileNames(), image_size=lambda name: (80, 64))
    graph = edited(cfg_conds=3.0, cfg_cond2_negative=1.5, style="regular")
    graph["guider"]["inputs"]["negative"] = [text, 0]
    if text == "negative":
        read = lambda name: Image.new("RGBA", (80, 64))  # noqa: E731
        (found,) = [one for output in outputs_of(graph, names) for one in requests_of(output, names, read)]
        assert found.workflow is None
        assert (found.cfg, found.image_cfg, found.width, found.height) == (3.0, 1.5, 80, 64)
        assert len(found.references) == 1
        assert found.image is None
    else:
        run = runs(graph, names)
        assert (run.prompt_without_image, run.nested, run.request.image_cfg) == (True, False, 1.5)
        assert [name for name in run.inputs if name.startswith("reference")] == ["reference.0"]
        assert "image" not in run.inputs


OMNIGEN_2 = PoolNames({"shapes": "OmniGen 2"}, [], None, FileNames())


def of_references(guider: str, on_negative: int, count: int = 2, **settings: Any) -> Graph:
    """A graph of OmniGen 2 with `count` reference images, chained, on the positive text, and so many on another one:
    of DualCFGGuider cond2, else the negative text."""
    graph = basic()
    ends = {"positive": ["positive", 0], "negative": ["negative", 0]}
    for number in range(count):
        graph[f"photo{number}"] = node("LoadImage", image=f"{number}.png")
        graph[f"pixels{number}"] = node("VAEEncode", pixels=[f"photo{number}", 0], vae=["model", 2])
        for name, shown in (("positive", count), ("negative", on_negative)):
            if number < shown:
                latent = [f"pixels{number}", 0]
                graph[f"{name}{number}"] = node("ReferenceLatent", conditioning=ends[name], latent=latent)
                ends[name] = [f"{name}{number}", 0]
    links = {"positive": ends["positive"], "negative": ends["negative"]}
    if guider == "DualCFGGuider":
        links = {"cond1": ends["positive"], "cond2": ends["negative"], "negative": ["negative", 0]}
    graph["guider"] = node(guider, model=["model", 0], **links, **settings)
    graph["noise"] = node("RandomNoise", noise_seed=3)
    graph["euler"] = node("KSamplerSelect", sampler_name="euler")
    graph["levels"] = node("BasicScheduler", model=["model", 0], scheduler="simple", steps=4, denoise=1.0)
    graph["empty"] = node("EmptySD3LatentImage", width=64, height=64, batch_size=1)
    graph["sampler"] = node(
        "SamplerCustomAdvanced", noise=["noise", 0], guider=["guider", 0], sampler=["euler", 0], sigmas=["levels", 0],
        latent_image=["empty", 0],
    )  # fmt: skip
    return graph


def of_omnigen_2(graph: Graph) -> GenerateRequest:
    sides = iter(range(1, 9))
    read = lambda name: Image.new("RGB", (64, 16 * next(sides)))  # noqa: E731
    (found,) = [one for output in outputs_of(graph, OMNIGEN_2) for one in requests_of(output, OMNIGEN_2, read)]
    return found


@pytest.mark.parametrize("style", ["regular", "nested"])
def test_reference_images_of_both_texts_are_guidance_by_images(style: str) -> None:
    """By the same formulas, with the prediction n for the negative text without images."""
    a, b, n, c2, c1 = 3.0, 1.5, 0.25, 0.75, 2.0
    found = of_omnigen_2(of_references("DualCFGGuider", 2, cfg_conds=a, cfg_cond2_negative=b, style=style))
    assert (found.cfg, found.image_cfg) == (a if style == "regular" else a * b, b)
    assert found.cfg is not None
    assert found.image_cfg is not None
    assert len(found.references) == 2
    made = n + found.image_cfg * (c2 - n) + found.cfg * (c1 - c2)
    middle = c2 + a * (c1 - c2)
    assert made == (n + b * (c2 - n) + a * (c1 - c2) if style == "regular" else n + b * (middle - n))


@pytest.mark.parametrize("style", ["regular", "nested"])
def test_one_text_as_cond2_and_negative_is_guidance_by_the_text(style: str) -> None:
    """c2 is n: n + b * (n - n) + a * (c1 - n), nested n + b * (n + a * (c1 - n) - n). So are ComfyUI's graphs of
    OmniGen 2 without images."""
    found = of_omnigen_2(of_references("DualCFGGuider", 0, 0, cfg_conds=3.0, cfg_cond2_negative=1.5, style=style))
    assert (found.cfg, found.image_cfg, found.references) == (3.0 if style == "regular" else 4.5, None, ())


def test_a_guider_with_one_scale_guides_by_the_images_that_the_negative_text_lacks() -> None:
    """n + cfg * (c1 - n) is n + image_cfg * (c2 - n) + cfg * (c1 - c2) with equal scales; where both texts have the
    images, it is c2 + cfg * (c1 - c2), with an image_cfg of 1."""
    for on_negative, image_cfg in ((0, 5.0), (2, 1.0)):
        found = of_omnigen_2(of_references("CFGGuider", on_negative, cfg=5.0))
        assert (found.cfg, found.image_cfg, len(found.references)) == (5.0, image_cfg, 2)
    unguided = of_omnigen_2(of_references("CFGGuider", 0, cfg=1.0))
    assert (unguided.cfg, unguided.image_cfg) == (1.0, None)


def test_images_of_other_numbers_on_the_second_text_are_refused() -> None:
    for on_second in (0, 1):
        graph = of_references("DualCFGGuider", on_second, cfg_conds=3.0, cfg_cond2_negative=1.5, style="regular")
        if not on_second:  # another text as negative
            graph["other"] = node("CLIPTextEncode", text="other", clip=["model", 1])
            graph["guider"]["inputs"]["negative"] = ["other", 0]
        with pytest.raises(WorkflowRejected) as refused:
            of_omnigen_2(graph)
        assert any("or the same images of ReferenceLatent" in error.details for error in refused.value.errors)


def test_a_family_without_guidance_by_references_tells_that_both_texts_have_them() -> None:
    """Before: without a word."""
    names = PoolNames({"shapes": "Qwen-Image"}, [], None, FileNames())
    for on_negative, told in ((0, 1), (2, 0)):
        (output,) = outputs_of(of_references("CFGGuider", on_negative, cfg=5.0), names)
        found = [text for text in output.warnings if "found no reference images" in text]
        assert len(found) == told
