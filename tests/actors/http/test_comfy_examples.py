"""Workflows in the layouts of ComfyUI's examples become the requests that they mean; what a request cannot have is
refused."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from PIL import Image

from modelpool.actors.http.comfy_export import api_format
from modelpool.actors.http.comfy_graph import PoolNames, WorkflowRejected, outputs_of, requests_of
from modelpool.actors.http.comfy_node_types import NodeUnsupported
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.core.errors import UserError
from modelpool.pool.sampling.schedules import make_sigmas, sd1_sigma_table
from tests.actors.http import comfy_examples as examples
from tests.actors.http.test_fuzzed_bodies import damaged

NAMES = PoolNames(
    {"shapes": "Stable Diffusion 1", "xl": "Stable Diffusion XL", "flux": "Flux dev", "sd3": "Stable Diffusion 3"},
    ["light"],
)


def read_image(name: str) -> Image.Image:
    return Image.new("RGBA", (64, 64), (255, 0, 0, 0 if name == "clear.png" else 255))


def made(graph: Any) -> list[GenerateRequest]:
    return [one for output in outputs_of(graph, NAMES) for one in requests_of(output, NAMES, read_image)]


def refusal(graph: Any) -> str:
    with pytest.raises((WorkflowRejected, NodeUnsupported)) as found:
        made(graph)
    return str(found.value)


def test_flux_with_a_guider() -> None:
    graph = examples.flux()
    (request,) = made(graph)
    assert (request.model, request.prompt, request.cfg, request.steps) == ("flux", "a red circle", 3.0, 20)
    assert (request.sampler, request.schedule, request.seed) == ("euler", "simple", 11)
    assert (request.width, request.height) == (64, 96)
    graph["guider"]["inputs"]["conditioning"] = ["text", 0]
    assert "cfg" not in made(graph)[0].model_fields_set, "the scale that the model was made for, as in ComfyUI"
    graph["shifted"]["inputs"]["width"] = 128
    assert "expected those of the image" in refusal(graph)
    graph["shifted"]["inputs"]["max_shift"] = 2.0
    assert "found the shift 0.5, 2" in refusal(graph)


def test_stable_diffusion_3_with_its_own_shift() -> None:
    graph = examples.sd3()
    (request,) = made(graph)
    assert (request.model, request.cfg, request.negative) == ("sd3", 7.0, "blurry")
    graph["shifted"]["inputs"]["shift"] = 6.0
    assert "found the shift 6" in refusal(graph)
    graph["negative"] = examples.node("ConditioningZeroOut", conditioning=["positive", 0])
    assert "set to zero" in refusal(graph)


def test_turbo_levels_are_those_of_every_hundredth_training_step() -> None:
    (request,) = made(examples.turbo())
    every_hundredth = make_sigmas("trailing", 10, sd1_sigma_table()).tolist()
    assert request.sigmas == pytest.approx(every_hundredth[:2], rel=1e-5)
    assert (request.steps, request.sampler, request.cfg) == (2, "euler_ancestral", 1.0)


def test_areas_become_regions() -> None:
    graph = examples.areas()
    (request,) = made(graph)
    assert request.prompt == "a red circle"
    found = [(region.prompt, region.box, region.strength) for region in request.regions]
    assert found == [("a sky", (0, 0, 64, 32), 1.5), ("a lawn", (0, 32, 64, 32), 1.0)]
    graph["sampler"]["inputs"]["positive"] = ["parts", 0]
    assert "without an area" in refusal(graph)


def test_two_texts_for_the_whole_image_and_a_mask_become_regions() -> None:
    graph = examples.areas()
    graph["loaded"] = examples.node("LoadImage", image="clear.png")
    graph["below"] = examples.node(
        "ConditioningSetMask", conditioning=["ground", 0], mask=["loaded", 1], strength=1.0, set_cond_area="default"
    )
    graph["above"] = graph["sky"]
    first, second = made(graph)[0].regions
    assert (first.prompt, int(first.mask.pixels.min())) == ("a lawn", 255)
    assert (second.prompt, second.box) == ("a red circle", (0, 0, 64, 64))
    assert made(graph)[0].prompt == "a sky"


def test_a_concatenated_text_is_a_chunk_of_its_own() -> None:
    graph = examples.areas()
    graph["both"] = examples.node("ConditioningConcat", conditioning_to=["positive", 0], conditioning_from=["sky", 0])
    assert made(graph)[0].prompt == "a red circle BREAK a sky"
    graph["model"]["inputs"]["ckpt_name"] = "sd3"
    assert "ConditioningConcat" in refusal(graph)


def test_an_image_is_scaled_and_cut_to_the_middle() -> None:
    (request,) = made(examples.with_image(denoise=0.5))
    assert request.image.pixels.shape == (64, 96, 3)
    graph = examples.with_image()
    graph["scaled"] = examples.node(
        "ImageScaleToTotalPixels", image=["loaded", 0], upscale_method="area", megapixels=0.01
    )
    side = made(graph)[0].image.pixels.shape[0]
    assert side * side == pytest.approx(0.01 * 1024 * 1024, rel=0.02)


def test_outpainting_paints_the_added_space_and_fades_into_the_image() -> None:
    (request,) = made(examples.outpainting())
    assert request.image.pixels.shape == (64, 96, 3)
    mask_HW = request.mask.pixels
    assert (mask_HW[:, 64:].min(), mask_HW[:, :50].max()) == (255, 0)
    assert 0 < mask_HW[30, 60] < 255


def test_a_second_sampler_with_the_same_model_continues_the_run() -> None:
    (request,) = made(examples.two_samplers("xl"))
    assert (request.model, request.steps, request.seed) == ("xl", 8, 5)
    assert "the pool runs no refiner" in refusal(examples.two_samplers("shapes"))
    graph = examples.two_samplers("xl")
    graph["rest"]["inputs"]["start_at_step"] = 5
    assert "add_noise" in refusal(graph)


def test_a_second_pass_over_a_scaled_image() -> None:
    graph = examples.upscaled()
    (request,) = made(graph)
    assert request.hires is not None
    assert (request.hires.scale, request.hires.via, request.hires.steps) == (1.5, "picture", 16)
    graph["saved"]["inputs"]["images"] = ["bigger", 0]
    assert "after they were scaled" in refusal(graph)


def test_an_upscaler_enlarges_the_output_or_the_start_of_a_second_pass() -> None:
    node = examples.node
    graph = examples.basic()
    graph["loader"] = node("UpscaleModelLoader", model_name="4x-sharp.pth")
    graph["large"] = node("ImageUpscaleWithModel", upscale_model=["loader", 0], image=["decoded", 0])
    graph["saved"]["inputs"]["images"] = ["large", 0]
    upscale = made(graph)[0].upscale
    assert upscale is not None
    assert (upscale.model, upscale.scale) == ("4x-sharp", None)
    graph["sized"] = node(
        "ImageScale", image=["large", 0], upscale_method="area", width=128, height=128, crop="disabled"
    )
    graph["saved"]["inputs"]["images"] = ["sized", 0]
    upscale = made(graph)[0].upscale
    assert upscale is not None
    assert upscale.scale == 2.0
    graph = examples.upscaled() | {name: graph[name] for name in ("loader", "large", "sized")}
    graph["again"]["inputs"]["pixels"] = ["sized", 0]
    hires = made(graph)[0].hires
    assert hires is not None
    assert (hires.upscaler, hires.scale, hires.via) == ("4x-sharp", 2.0, "picture")
    graph["bigger"]["inputs"]["image"] = ["large", 0]
    graph["again"]["inputs"]["pixels"] = ["bigger", 0]
    assert "the factor of its upscaler is not known" in refusal(graph)


def test_an_edit_reads_the_image_as_a_reference() -> None:
    (request,) = made(examples.kontext())
    assert (request.width, request.height, request.image) == (1024, 1024, None)
    assert request.references[0].pixels.shape == (1024, 1024, 3)  # type: ignore[union-attr]


def test_a_value_of_a_primitive_node_is_checked_like_a_written_one() -> None:
    graph = examples.basic(steps=["many", 0])
    graph["many"] = examples.node("PrimitiveInt", value=6)
    assert made(graph)[0].steps == 6
    graph["many"]["inputs"]["value"] = 0
    assert "expected at least 1" in refusal(graph)


@pytest.mark.parametrize(("shown", "steps"), [(None, 12), (9, 9)])
def test_a_subgraph_of_the_editor(shown: int | None, steps: int) -> None:
    """Nodes in it get the ids of ComfyUI, a bypassed node passes its input on, and the shown value has priority."""
    graph = api_format(examples.editor_format(12, shown))
    assert set(graph) == {"1", "3", "4", "7", "8", "6:1", "6:2"}
    first, second = made(graph)
    assert (first.steps, first.prompt, first.negative, first.loras) == (steps, "a red circle", "blurry", ())
    assert (first.seed, second.seed) == (5, 6)


def test_subgraphs_that_contain_themselves_are_refused() -> None:
    workflow = examples.editor_format(12, None)
    (subgraph,) = workflow["definitions"]["subgraphs"]
    subgraph["nodes"] += [{"id": number, "type": subgraph["id"]} for number in (7, 8)]
    with pytest.raises(WorkflowRejected, match="more than"):
        api_format(workflow)


def test_changes_of_a_model_become_options_of_its_runs() -> None:
    node = examples.node
    graph = examples.basic(model=["rescaled", 0])
    graph["freeu"] = node("FreeU_V2", model=["model", 0], b1=1.2, b2=1.4, s1=0.9, s2=0.2)
    graph["perturbed"] = node("PerturbedAttentionGuidance", model=["freeu", 0], scale=2.0)
    graph["rescaled"] = node("RescaleCFG", model=["perturbed", 0], multiplier=0.6)
    options = made(graph)[0].run_options
    assert options.freeu is not None
    assert (options.freeu.b1, options.freeu.version) == (1.2, 2)
    assert options.pag is not None
    assert options.pag.scale == 2.0
    assert options.rescale_cfg is not None
    assert options.rescale_cfg.factor == 0.6
    graph["rescaled"] = node("FreeU", model=["perturbed", 0], b1=1.0, b2=1.0, s1=1.0, s2=1.0)
    assert "freeu is set" in refusal(graph)
    graph["rescaled"] = node(
        "SkipLayerGuidanceSD3", model=["freeu", 0], layers="7, x", scale=3.0, start_percent=0.0, end_percent=0.2
    )
    assert "whole numbers" in refusal(graph)
    graph["rescaled"]["inputs"]["layers"] = "7,8"
    slg = made(graph)[0].run_options.slg
    assert slg is not None
    assert (slg.layers, slg.end) == ((7, 8), 0.2)
    positions = {"scale_x": 0.5, "shift_x": 0.0, "scale_y": 1.0, "shift_y": -2.0, "scale_t": 1.0, "shift_t": 0.0}
    graph["rescaled"] = node("ScaleROPE", model=["freeu", 0], **positions)
    rope = made(graph)[0].run_options.rope
    assert rope is not None
    assert dataclasses.asdict(rope) == positions


def test_redux_is_an_image_prompt() -> None:
    graph = examples.flux()
    graph["loaded"] = examples.node("LoadImage", image="red.png")
    graph["vision"] = examples.node("CLIPVisionLoader", clip_name="siglip.safetensors")
    graph["seen"] = examples.node("CLIPVisionEncode", clip_vision=["vision", 0], image=["loaded", 0], crop="center")
    graph["style"] = examples.node("StyleModelLoader", style_model_name="redux.safetensors")
    graph["styled"] = examples.node(
        "StyleModelApply",
        conditioning=["guided", 0], style_model=["style", 0], clip_vision_output=["seen", 0], strength=0.6,
        strength_type="multiply",
    )  # fmt: skip
    graph["guider"]["inputs"]["conditioning"] = ["styled", 0]
    (request,) = made(graph)
    (prompt,) = request.image_prompts
    assert (prompt.model, prompt.strength, len(prompt.images), request.cfg) == ("redux", 0.6, 1, 3.0)
    graph["styled"]["inputs"]["strength_type"] = "attn_bias"
    assert "expected multiply" in refusal(graph)


def test_damaged_workflows_are_refused_or_mean_something() -> None:
    """Neither the conversion of the editor's format nor a node raises anything but an error of the user."""
    chance = random.Random(22)
    graphs = (
        examples.flux(), examples.sd3(), examples.turbo(), examples.areas(), examples.with_image(),
        examples.outpainting(), examples.two_samplers("xl"), examples.upscaled(), examples.editor_format(4, 5),
    )  # fmt: skip
    refused = 0
    for number in range(450):
        graph = damaged(graphs[number % len(graphs)], chance)
        try:
            assert all(isinstance(request, GenerateRequest) for request in made(api_format(graph)))
        except UserError:
            refused += 1
    assert 100 < refused < 450
