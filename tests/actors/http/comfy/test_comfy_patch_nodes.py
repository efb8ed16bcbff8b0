"""ControlNets that patch a model act on every run of it, ControlNets with a mask read both, Lotus reads an image in the
place of noise, and texts are encoded with as many images as are linked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PIL import Image

from modelpool.actors.http.comfy.comfy_graph import PoolNames
from modelpool.actors.http.comfy.comfy_workflow import outputs_of, requests_of
from modelpool.actors.http.comfy.node_errors import WorkflowRejected
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.request.workflow_fields import SampleNode
from modelpool.pool.values.core.errors import UserError
from tests.actors.http.comfy.comfy_examples import Graph, basic, node

TITLES = {"shapes": "Stable Diffusion 1", "z": "Z-Image", "lotus": "Lotus D (depth and normals)", "joy": "JoyImage",
          "qwen": "Qwen-Image 2.1", "qwen_image": "Qwen-Image"}  # fmt: skip
NAMES = PoolNames(TITLES, [], image_size=lambda name: (96, 64))


def requests(graph: Graph) -> list[GenerateRequest]:
    read = lambda name: Image.new("RGBA", (96, 64), (255, 0, 0, 128))  # noqa: E731
    return [one for output in outputs_of(graph, NAMES) for one in requests_of(output, NAMES, read)]


def problem(graph: Graph) -> str:
    with pytest.raises(UserError) as found:
        requests(graph)
    return str(found.value.as_json()) if isinstance(found.value, WorkflowRejected) else str(found.value)


def with_model(name: str, **changed: Any) -> Graph:
    graph = basic(**{"cfg": 1.0, **changed})
    graph["model"]["inputs"]["ckpt_name"] = name
    graph["loaded"] = node("LoadImage", image="a.png")
    return graph


def patched(model: str, image: str = "loaded", **inputs: Any) -> Graph:
    graph = with_model(model, model=["patched", 0])
    graph["drawn"] = node("ImageInvert", image=["turned", 0])
    graph["turned"] = node("ImageFlip", image=["loaded", 0], flip_method="x-axis: vertically")
    graph["patch"] = node("ModelPatchLoader", name="fun/union.safetensors")
    links = {"model": ["model", 0], "model_patch": ["patch", 0], "vae": ["model", 2], "image": [image, 0]}
    graph["patched"] = node("QwenImageDiffsynthControlnet", **{**links, "strength": 0.75, **inputs})
    return graph


@pytest.mark.parametrize("model", ["z", "qwen_image"])
def test_a_patch_is_a_controlnet_of_every_run_of_its_model(model: str) -> None:
    (plain,) = requests(patched(model, start_percent=0.25))
    (control,) = plain.controls
    assert plain.workflow is None
    assert (control.model, control.strength, control.start, control.end) == ("union", 0.75, 0.25, 1.0)
    assert control.image.pixels.shape == (64, 96, 3)
    (request,) = requests(patched(model, "drawn"))
    assert request.workflow is not None
    (run,) = [each for each in request.workflow.nodes.values() if isinstance(each, SampleNode)]
    assert run.inputs == {"controls.0": "drawn"}
    assert [(each.model, each.strength) for each in run.request.controls] == [("union", 0.75)]
    (request,) = requests(patched(model, strength=0.0))
    assert not request.controls, "as ComfyUI, a patch of strength 0 is none"


def test_patches_that_the_pool_does_not_have_are_refused_by_their_file() -> None:
    for image in ("loaded", "drawn"):
        found = problem(patched("shapes", image))
        assert (
            "model_patch: found 'union' on Stable Diffusion 1, expected a ControlNet of Z-Image or Qwen-Image" in found
        ), image
    found = problem(patched("z", mask=["loaded", 1]))
    assert "mask: expected none" in found


def test_a_controlnet_with_a_mask_reads_its_image_and_its_mask() -> None:
    for mask in (["loaded", 1], ["grown", 0]):
        graph = with_model("shapes", positive=["hiding", 0], negative=["hiding", 1], cfg=4.0)
        graph["net"] = node("ControlNetLoader", control_net_name="inpaint")
        graph["grown"] = node("ThresholdMask", mask=["loaded", 1], value=0.4)
        graph["hiding"] = node(
            "ControlNetInpaintingAliMamaApply", positive=["positive", 0], negative=["negative", 0],
            control_net=["net", 0], vae=["model", 2], image=["loaded", 0], mask=mask, strength=0.5, start_percent=0.0,
            end_percent=0.5,
        )  # fmt: skip
        (request,) = requests(graph)
        if request.workflow is None:
            (control,) = request.controls
            assert np.unique(control.mask.pixels).tolist() == [127], "transparent pixels are hidden"
        else:
            (run,) = [each for each in request.workflow.nodes.values() if isinstance(each, SampleNode)]
            (control,) = run.request.controls
            assert sorted(run.inputs) == ["controls.0", "controls.0.mask"]
            assert run.inputs["controls.0.mask"] == "grown"
        assert (control.model, control.strength, control.end) == ("inpaint", 0.5, 0.5)


def lotus(**changed: Any) -> Graph:
    graph = with_model("lotus")
    graph["encoded"] = node("VAEEncode", pixels=["loaded", 0], vae=["model", 2])
    graph["text"] = node("LotusConditioning")
    graph["guider"] = node("BasicGuider", model=["model", 0], conditioning=["text", 0])
    graph["noise"] = node("DisableNoise")
    graph["euler"] = node("KSamplerSelect", sampler_name="euler")
    graph["levels"] = node("BasicScheduler", model=["model", 0], scheduler="normal", steps=1, denoise=1.0)
    graph["first"] = node("SetFirstSigma", sigmas=["levels", 0], sigma=999.0000000000002)
    links = {"noise": ["noise", 0], "guider": ["guider", 0], "sampler": ["euler", 0], "sigmas": ["first", 0]}
    graph["sampler"] = node("SamplerCustomAdvanced", **{**links, "latent_image": ["encoded", 0], **changed})
    return graph


@pytest.mark.parametrize("sigma", [999.0000000000002, 10_000.0, 14.6146])
def test_lotus_reads_an_image_in_the_place_of_noise(sigma: float) -> None:
    """Every level from the largest one on is the last training step. Before: 999 was accepted alone."""
    graph = lotus()
    graph["first"]["inputs"]["sigma"] = sigma
    (request,) = requests(graph)
    assert request.workflow is not None
    (run,) = [each for each in request.workflow.nodes.values() if isinstance(each, SampleNode)]
    assert list(run.inputs) == ["image"]
    assert (run.request.prompt, run.request.steps, run.adds_noise, run.last_step) == ("", 1, True, 0)


def test_other_runs_of_lotus_and_other_models_with_its_level_are_refused() -> None:
    graph = lotus()
    graph["first"]["inputs"]["sigma"] = 5.0
    assert "sigmas: expected a schedule, with a first level of at least 14.614" in problem(graph)
    graph = lotus()
    graph["levels"]["inputs"]["steps"] = 4
    assert "one step, and DisableNoise" in problem(graph)
    graph = lotus(noise=["random", 0])
    graph["random"] = node("RandomNoise", noise_seed=3)
    assert "one step, and DisableNoise" in problem(graph)
    graph = lotus()
    graph["model"]["inputs"]["ckpt_name"] = "shapes"
    assert "SetFirstSigma changes listed levels" in problem(graph)


def test_the_first_of_listed_levels_is_replaced() -> None:
    graph = lotus(latent_image=["blank", 0], noise=["random", 0])
    graph["model"]["inputs"]["ckpt_name"] = "shapes"
    graph["random"] = node("RandomNoise", noise_seed=3)
    graph["text"] = node("CLIPTextEncode", clip=["model", 1], text="a fox")
    graph["levels"] = node("ManualSigmas", sigmas="14.6, 3.0, 1.0, 0")
    graph["first"]["inputs"]["sigma"] = 12.0
    (request,) = requests(graph)
    assert request.workflow is not None
    (run,) = [each for each in request.workflow.nodes.values() if isinstance(each, SampleNode)]
    assert run.request.sigmas == (12.0, 3.0, 1.0)


def test_texts_are_encoded_with_as_many_images_as_are_linked() -> None:
    graph = with_model("joy", positive=["text", 0], negative=["none", 0], cfg=4.0, model=["normed", 0])
    graph["normed"] = node("CFGNorm", model=["model", 0], strength=1.0, pre_cfg=True)
    for name, prompt in (("text", "a glacier"), ("none", "")):
        images = {"images.image0": ["loaded", 0], "images.image2": ["loaded", 0]}
        graph[name] = node("TextEncodeJoyImageEdit", clip=["model", 1], vae=["model", 2], prompt=prompt, **images)
    (request,) = requests(graph)
    assert (request.prompt, len(request.references), request.options) == ("a glacier", 2, basic_options(request))
    graph["normed"]["inputs"]["strength"] = 0.5
    assert "CFGNorm, pre_cfg: found true with JoyImage" in problem(graph)
    graph["normed"]["inputs"]["strength"] = 1.0
    graph["model"]["inputs"]["ckpt_name"] = "shapes"
    assert "CFGNorm, pre_cfg: found true with Stable Diffusion 1" in problem(graph)


def basic_options(request: GenerateRequest) -> Any:
    """The options of a request without any."""
    return GenerateRequest(model=request.model, prompt=request.prompt).options


def test_qwen_image_21_has_both_texts_and_its_latent() -> None:
    graph = with_model("qwen", positive=["text", 0], negative=["text", 1], latent_image=["text", 2])
    texts = {"prompt": "a portrait", "negative_prompt": "bad", "resolution": 1024}
    graph["text"] = node("TextEncodeQwenImage21", clip=["model", 1], **texts)
    (request,) = requests(graph)
    assert (request.prompt, request.width, request.height) == ("a portrait", 1024, 1024)
    graph["text"]["inputs"]["images.image_1"] = ["loaded", 0]
    assert "generates from texts" in problem(graph)
    del graph["text"]["inputs"]["images.image_1"]
    graph["text"]["inputs"]["resolution"] = 0
    assert "resolution: found 0, expected 1024 without images" in problem(graph)
