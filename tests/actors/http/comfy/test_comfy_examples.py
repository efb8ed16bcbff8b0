"""Workflows in the layouts of ComfyUI's examples become the requests that they mean; what a request cannot have is
refused."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from PIL import Image

from modelpool.actors.graph.features.schedule_guidance import check_shift, shift_default
from modelpool.actors.http.comfy.comfy_export import api_format
from modelpool.actors.http.comfy.comfy_graph import PoolNames
from modelpool.actors.http.comfy.comfy_node_types import NodeUnsupported
from modelpool.actors.http.comfy.comfy_nodes import NODE_TYPES
from modelpool.actors.http.comfy.comfy_workflow import outputs_of, requests_of
from modelpool.actors.http.comfy.node_errors import WorkflowRejected
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.families.supported import running_families
from modelpool.pool.inference.sampling.schedules import flow_table, make_sigmas, sd1_sigma_table, sigma_table
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.core.shift_by_size import ShiftBySize
from tests.actors.http.comfy import comfy_examples as examples
from tests.actors.http.test_fuzzed_bodies import damaged

NAMES = PoolNames(
    {"shapes": "Stable Diffusion 1", "xl": "Stable Diffusion XL", "flux": "Flux dev", "sd3": "Stable Diffusion 3"},
    ["light"],
)


def read_image(name: str) -> Image.Image:
    return Image.new("RGBA", (64, 64), (255, 0, 0, 0 if name == "clear.png" else 255))


def made(graph: Any) -> list[GenerateRequest]:
    return [one for output in outputs_of(graph, NAMES) for one in requests_of(output, NAMES, read_image)]


def nodes_of(graph: Any) -> dict[str, Any]:
    """The nodes of the workflow of the pool that a graph becomes, by id."""
    (request,) = made(graph)
    assert request.workflow is not None, "one request without a workflow cannot say it"
    return dict(request.workflow.nodes)


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
    assert made(graph)[0].shift is None, "the shift that the model has for this size"
    graph["shifted"]["inputs"]["width"] = 128
    by_size = ShiftBySize((256, 4096), (0.5, 1.15))
    assert made(graph)[0].shift == pytest.approx(by_size.shift(8 * 6, 20))
    graph["shifted"]["inputs"]["max_shift"] = 2.0
    by_size = ShiftBySize((256, 4096), (0.5, 2.0))
    assert made(graph)[0].shift == pytest.approx(by_size.shift(8 * 6, 20))


def test_stable_diffusion_3_with_a_shift() -> None:
    graph = examples.sd3()
    (request,) = made(graph)
    assert (request.model, request.cfg, request.negative) == ("sd3", 7.0, "blurry")
    for shift in (3.0, 6.0):
        graph["shifted"]["inputs"]["shift"] = shift
        assert made(graph)[0].shift == shift
    graph["negative"] = examples.node("ConditioningZeroOut", conditioning=["positive", 0])
    nodes = nodes_of(graph)
    (zero,) = (node for node in nodes.values() if node.kind == "operation")
    assert (zero.name, nodes[zero.inputs["text"]].prompt) == ("encoded_zero", "a red circle")
    assert "sampler/negative/zero" in nodes["sampler"].inputs["negative"]


def unpadded(graph: Any, min_padding: int = 1) -> Any:
    """With the tokens of T5 as the template for Chroma has them."""
    graph["tokens"] = examples.node("T5TokenizerOptions", clip=["clip", 0], min_padding=min_padding, min_length=0)
    for name in ("positive", "negative"):
        graph[name]["inputs"]["clip"] = ["tokens", 0]
    return graph


def test_padding_of_other_models_than_chroma_is_refused() -> None:
    graph = unpadded(examples.from_parts("flow", ("ModelSamplingAuraFlow", 1.0)))
    names = PoolNames({"flow": "Lumina 2"}, [])
    with pytest.raises(NodeUnsupported, match="found min_padding 1 and min_length 0 with Lumina 2, expected a model"):
        requests_of(outputs_of(graph, names)[0], names, read_image)


def test_templates_of_flow_models_with_a_shift_are_accepted() -> None:
    """As far as the pool decides it: the models' own shift is no shift of the recipe, another one is its."""
    families = running_families()
    templates = [
        ("qwen_image", examples.from_parts("flow", ("ModelSamplingAuraFlow", 3.1)), 3.1),
        ("z_image", examples.from_parts("flow", ("ModelSamplingAuraFlow", 3.0), "res_multistep", 1.0, zero=True), 0.0),
        ("lumina2", examples.from_parts("flow", ("ModelSamplingAuraFlow", 6.0), "res_multistep"), 0.0),
        ("chroma", unpadded(examples.from_parts("flow", ("ModelSamplingAuraFlow", 1.0))), 0.0),
        ("hidream_i1", examples.from_parts("flow", ("ModelSamplingSD3", 3.0), "uni_pc", 5.0), 0.0),
        ("hidream_i1", examples.from_parts("flow", ("ModelSamplingSD3", 6.0), "lcm", 1.0, zero=True), 6.0),
    ]
    for name, graph, shift in templates:
        names = PoolNames({"flow": families[name].title}, [])
        (request,) = [one for output in outputs_of(graph, names) for one in requests_of(output, names, read_image)]
        facts = families[name].sampling
        check_shift(request, facts)
        own = shift_default(request, facts)
        assert (0.0 if "shift" in own else request.shift) == shift, name
        assert sigma_table(facts.noise.shifted_by(request.shift or 0.0), 16, 20).sigma(500.0) == pytest.approx(
            flow_table(graph["shifted"]["inputs"]["shift"]).sigma(500.0)
        )


def test_samplers_with_settings_become_fields() -> None:
    node = examples.node
    levels = node("BasicScheduler", model=["model", 0], scheduler="karras", steps=8, denoise=1.0)
    adaptive = {"order": 3, "rtol": 0.05, "atol": 0.0078, "h_init": 0.05, "pcoeff": 0.0, "icoeff": 1.0, "dcoeff": 0.0}
    cases = [
        (node("SamplerEulerAncestral", eta=0.5, s_noise=0.9), ("euler_ancestral", 0.5, 0.9)),
        (node("SamplerEulerAncestral", eta=1.0, s_noise=1.0), ("euler_ancestral", None, 1.0)),
        (node("SamplerEulerAncestralCFGPP", eta=0.0, s_noise=1.0), ("euler_ancestral_cfg_pp", 0.0, 1.0)),
        (node("SamplerEulerCFGpp", version="regular"), ("euler_cfg_pp", None, 1.0)),
        (
            node("SamplerDPMPP_2M_SDE", solver_type="heun", eta=0.7, s_noise=1.1, noise_device="gpu"),
            ("dpmpp_2m_sde_heun", 0.7, 1.1),
        ),
        (
            node("SamplerDPMPP_2M_SDE", solver_type="midpoint", eta=1.0, s_noise=1.0, noise_device="cpu"),
            ("dpmpp_2m_sde", None, 1.0),
        ),
        (node("SamplerDPMPP_3M_SDE", eta=0.3, s_noise=1.0, noise_device="gpu"), ("dpmpp_3m_sde", 0.3, 1.0)),
        (node("SamplerDPMPP_SDE", eta=1.0, s_noise=1.2, r=0.5, noise_device="gpu"), ("dpmpp_sde", None, 1.2)),
        (node("SamplerDPMPP_2S_Ancestral", eta=0.2, s_noise=1.0), ("dpmpp_2s_ancestral", 0.2, 1.0)),
        (node("SamplerLMS", order=4), ("lms", None, 1.0)),
        (node("SamplerLCM", s_noise=1.2, s_noise_end=1.2, noise_clip_std=0.0), ("lcm", None, 1.2)),
        (
            node("SamplerDPMAdaptative", **adaptive, accept_safety=0.81, eta=0.0, s_noise=1.0),
            ("dpm_adaptive", None, 1.0),
        ),
    ]
    solver = {"sde_start_percent": 0.2, "sde_end_percent": 0.8, "predictor_order": 3, "corrector_order": 4}
    solver |= {"model": ["model", 0], "simple_order_2": False}
    cases += [
        (node("SamplerER_SDE", solver_type="ER-SDE", max_stage=3, eta=1.0, s_noise=0.9), ("er_sde", None, 0.9)),
        (node("SamplerSASolver", **solver, eta=0.5, s_noise=1.0, use_pece=True), ("sa_solver_pece", 0.5, 1.0)),
    ]
    for sampler, expected in cases:
        (request,) = made(examples.with_parts(sampler, levels))
        assert (request.sampler, request.eta, request.s_noise) == expected
        assert (request.schedule, request.steps) == ("karras", 8)
    for sampler, said in (
        (node("SamplerEulerCFGpp", version="alternative"), "version: found alternative, expected regular"),
        (node("SamplerDPMPP_SDE", eta=1.0, s_noise=1.0, r=0.3, noise_device="gpu"), "r: found 0.3, expected 0.5"),
        (node("SamplerLMS", order=2), "order: found 2, expected 4"),
        (
            node("SamplerLCM", s_noise=1.0, s_noise_end=0.5, noise_clip_std=0.0),
            "s_noise_end: found 0.5, expected s_noise, 1",
        ),
        (
            node("SamplerLCM", s_noise=1.0, s_noise_end=1.0, noise_clip_std=2.0),
            "noise_clip_std: found 2.0, expected 0.0",
        ),
        (node("SamplerER_SDE", solver_type="ODE", max_stage=3, eta=1.0, s_noise=1.0), "solver_type: found ODE"),
        (
            node("SamplerSASolver", **{**solver, "predictor_order": 2}, eta=1.0, s_noise=1.0, use_pece=False),
            "predictor_order: found 2, expected 3",
        ),
        (node("SamplerEulerAncestral", eta=2.0, s_noise=1.0), "eta: found 2.0, expected at most 1"),
    ):
        assert said in refusal(examples.with_parts(sampler, levels))


def test_noise_levels_of_nodes_become_schedules_or_lists() -> None:
    node = examples.node
    sampler, table = node("KSamplerSelect", sampler_name="euler"), sd1_sigma_table()
    ends = {"sigma_max": table.sigma_max, "sigma_min": table.sigma_min}
    for levels, schedule in (
        (node("KarrasScheduler", steps=8, **ends, rho=7.0), "karras"),
        (node("ExponentialScheduler", steps=8, **ends), "exponential"),
        (node("PolyexponentialScheduler", steps=8, **ends, rho=1.0), "polyexponential"),
    ):
        (request,) = made(examples.with_parts(sampler, levels))
        assert request.sigmas == pytest.approx(make_sigmas(schedule, 8, table)[:-1].tolist(), rel=1e-5)
    bent = made(examples.with_parts(sampler, node("PolyexponentialScheduler", steps=3, **ends, rho=2.0)))[0].sigmas
    assert bent[1] == pytest.approx(table.sigma_min**0.75 * table.sigma_max**0.25)
    for levels, fields in (
        (node("AlignYourStepsScheduler", model_type="SD1", steps=10, denoise=1.0), ("ays_sd1", 10)),
        (node("AlignYourStepsScheduler", model_type="SVD", steps=25, denoise=1.0), ("ays_svd", 25)),
        (node("GITSScheduler", coeff=1.2, steps=7, denoise=1.0), ("gits", 7)),
        (node("BetaSamplingScheduler", model=["model", 0], steps=9, alpha=0.6, beta=0.6), ("beta", 9)),
    ):
        (request,) = made(examples.with_parts(sampler, levels))
        assert (request.schedule, request.steps, request.sigmas) == (*fields, ())
    (request,) = made(examples.with_parts(sampler, node("ManualSigmas", sigmas="14.6, 7  1.5,0")))
    assert request.sigmas == (14.6, 7.0, 1.5)
    (request,) = made(examples.with_parts(sampler, node("Flux2Scheduler", steps=6, width=1024, height=768), "flux"))
    noise = running_families()["flux2_dev"].sampling.noise
    assert request.sigmas == pytest.approx(make_sigmas("simple", 6, sigma_table(noise, 3072, 6))[:-1].tolist())
    for levels, said in (
        (node("ManualSigmas", sigmas="1, 0.5"), "expected 0 at the end"),
        (node("ManualSigmas", sigmas="0.5, 1, 0"), "expected levels that fall"),
        (node("ManualSigmas", sigmas="1, x"), "expected numbers with commas"),
        (node("GITSScheduler", coeff=0.9, steps=7, denoise=1.0), "coeff: found 0.9, expected 1.2"),
        (node("BetaSamplingScheduler", model=["model", 0], steps=9, alpha=0, beta=0.6), "alpha: found 0, expected 0.1"),
        (
            node("BetaSamplingScheduler", model=["model", 0], steps=9, alpha=1.0, beta=20),
            "beta: found 20, expected 0.1",
        ),
        (node("KarrasScheduler", steps=8, sigma_max=1.0, sigma_min=2.0, rho=7.0), "expected levels that fall"),
        (node("ExponentialScheduler", steps=8, sigma_max=1.0, sigma_min=0.0), "found 0, expected more"),
        (node("AlignYourStepsScheduler", model_type="SD1", steps=10, denoise=0.01), "of 10 steps is none"),
    ):
        assert said in refusal(examples.with_parts(sampler, levels))
    graph = examples.with_image()
    graph["chosen"], graph["levels"] = sampler, node("GITSScheduler", coeff=1.2, steps=8, denoise=0.5)
    graph["sampler"] = {**examples.with_parts(sampler, sampler)["sampler"]}
    graph["sampler"]["inputs"]["latent_image"] = ["encoded", 0]
    (request,) = made(graph)
    assert (request.steps, request.first_step(rounds_up=False)) == (8, 4)


def test_the_beta_distribution_of_a_node_becomes_that_of_the_schedule() -> None:
    """Only 0.6 and 0.6 were accepted, though requests have both numbers; the usual ones change no id."""
    sampler = examples.node("KSamplerSelect", sampler_name="euler")
    shapes = []
    for alpha, beta in ((0.6, 0.6), (0.5, 2.0)):
        levels = examples.node("BetaSamplingScheduler", model=["model", 0], steps=9, alpha=alpha, beta=beta)
        (request,) = made(examples.with_parts(sampler, levels))
        assert (request.schedule, request.steps) == ("beta", 9)
        shapes.append((request.beta_alpha, request.beta_beta))
    assert shapes == [(None, None), (0.5, 2.0)]


def test_numbers_at_the_ends_of_their_ranges_never_fail_a_server() -> None:
    """The power of a large level by a small rho overflowed: an answer with 500."""
    node = examples.node
    sampler = node("KSamplerSelect", sampler_name="euler")
    chance, refused = random.Random(1), 0
    kinds = [name for name, kind in NODE_TYPES.items() if "SIGMAS" in kind.outputs and name.endswith("Scheduler")]
    assert len(kinds) > 5
    for name in kinds:
        given = NODE_TYPES[name].inputs
        for _ in range(60):
            numbers = {
                each.name: (int if each.type == "INT" else float)(
                    chance.choice((each.least, each.least + 1e-3, each.most))
                )
                for each in given
                if each.type in ("INT", "FLOAT")
            }
            links = {"model": ["model", 0]} if any(each.name == "model" for each in given) else {}
            others = {each.name: each.choices[0] for each in given if each.type == "COMBO" and each.choices}
            try:
                made(examples.with_parts(sampler, node(name, **links, **others, **numbers)))
            except UserError:
                refused += 1
    assert refused


def test_hypertile_and_skipped_layers_as_nodes_propose_them() -> None:
    node = examples.node
    graph = examples.basic(model=["tiled", 0])
    graph["tiled"] = node("HyperTile", model=["model", 0], tile_size=256, swap_size=2, max_depth=0, scale_depth=True)
    found = made(graph)[0].run_options.hypertile
    assert found is not None
    assert (found.tile, found.depth) == (256, 0)
    graph["tiled"]["inputs"]["max_depth"] = 1
    assert "scale_depth: expected false" in refusal(graph)
    graph["tiled"] = node(
        "SkipLayerGuidanceDiT",
        model=["model", 0], double_layers="7, 8", single_layers="9", scale=3.0, start_percent=0.0, end_percent=0.5,
        rescaling_scale=0.4,
    )  # fmt: skip
    slg = made(graph)[0].run_options.slg
    assert slg is not None
    assert (slg.layers, slg.single, slg.rescale) == ((7, 8), (9,), 0.4)


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
    (output,) = outputs_of(graph, NAMES)
    (request,) = made(graph)
    assert (request.prompt, [region.strength for region in request.regions]) == ("", [100.0, pytest.approx(100 / 1.5)])
    assert "100 times the weight" in output.warnings[0]


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
    nodes = nodes_of(graph)
    joined = nodes[nodes["sampler"].inputs["positive"]]
    assert joined.name == "encoded_concat"
    assert [nodes[joined.inputs[name]].prompt for name in ("first", "second")] == ["a red circle", "a sky"]


def test_an_image_is_scaled_and_cut_to_the_middle() -> None:
    (request,) = made(examples.with_image(denoise=0.5))
    assert request.image.pixels.shape == (64, 96, 3)
    graph = examples.with_image()
    graph["scaled"] = examples.node(
        "ImageScaleToTotalPixels", image=["loaded", 0], upscale_method="area", megapixels=0.01
    )
    side = round((0.01 * 1024 * 1024) ** 0.5)
    assert made(graph)[0].image.pixels.shape == (side // 8 * 8, side // 8 * 8, 3)


def test_outpainting_paints_the_added_space_and_fades_into_the_image() -> None:
    (request,) = made(examples.outpainting())
    assert request.image.pixels.shape == (64, 96, 3)
    mask_HW = request.mask.pixels
    assert (mask_HW[:, 64:].min(), mask_HW[:, :50].max()) == (255, 0)
    assert 0 < mask_HW[30, 60] < 255


def test_a_second_sampler_with_the_same_model_continues_the_run() -> None:
    (request,) = made(examples.two_samplers("xl"))
    assert (request.model, request.steps, request.seed) == ("xl", 8, 5)
    nodes = nodes_of(examples.two_samplers("shapes"))
    first, rest = nodes["sampler"], nodes["rest"]
    assert (first.request.model, first.last_step, first.keeps_noise, first.adds_noise) == ("xl", 6, True, True)
    assert (rest.request.model, rest.first_step, rest.last_step, rest.adds_noise) == ("shapes", 6, 0, False)
    graph = examples.two_samplers("xl")
    graph["rest"]["inputs"]["start_at_step"] = 5
    assert nodes_of(graph)["rest"].first_step == 5


def test_a_second_pass_over_a_scaled_image() -> None:
    graph = examples.upscaled()
    (request,) = made(graph)
    assert request.hires is not None
    assert (request.hires.scale, request.hires.via, request.hires.steps) == (1.5, "image", 16)
    graph["saved"]["inputs"]["images"] = ["bigger", 0]
    bigger = nodes_of(graph)["bigger"]
    assert (bigger.name, bigger.inputs) == ("image_scale_by", {"image": "decoded"})


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
    assert (hires.upscaler, hires.scale, hires.via) == ("4x-sharp", 2.0, "image")
    graph["bigger"]["inputs"]["image"] = ["large", 0]
    graph["again"]["inputs"]["pixels"] = ["bigger", 0]
    nodes = nodes_of(graph)
    assert (nodes["large"].upscale.model, nodes["bigger"].inputs["image"]) == ("4x-sharp", "large")
    assert (nodes["again"].kind, nodes["again"].model) == ("encode", "shapes")


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


def test_names_of_the_editor_are_followed_and_its_own_nodes_are_left_out() -> None:
    """Templates are the values of widgets, a SetNode is read by its name, and notes and groups do nothing."""
    workflow = examples.editor_format(12, None)
    prompt = api_format(workflow)
    (text_id, *_) = [node_id for node_id, each in prompt.items() if each["class_type"] == "CLIPTextEncode"]
    place = next(place for place, each in enumerate(workflow["nodes"]) if str(each["id"]) == text_id)
    text_node = workflow["nodes"][place]
    text_node["title"] = "Subject"
    text_node["widgets_values"] = ["100% of %Size.width% pixels, %Nothing.here%"]
    workflow["nodes"] += [
        {"id": 901, "type": "EmptyLatentImage", "title": "Size", "widgets_values": [64, 32, 1]},
        {"id": 902, "type": "Fast Groups Muter (rgthree)", "widgets_values": ["x"]},
        {"id": 903, "type": "SaveImage", "mode": 2, "widgets_values": ["muted"]},
        {"id": 904, "type": "PrimitiveInt", "widgets_values": [7, "randomize"]},
    ]
    (clip,) = [each["link"] for each in text_node["inputs"] if each["name"] == "clip"]
    (link,) = [each for each in workflow["links"] if each[0] == clip]
    begin = link[1:3]
    workflow["nodes"].append(
        {"id": 905, "type": "SetNode", "widgets_values": ["encoder"], "inputs": [{"name": "CLIP", "link": 801}]}
    )
    workflow["nodes"].append({"id": 906, "type": "GetNode", "widgets_values": ["encoder"]})
    workflow["links"].append([801, *begin, 905, 0, "CLIP"])
    link[1:3] = [906, 0]
    workflow["groups"] = [{"title": "all", "bounding": [0, 0, 9, 9]}]
    found = api_format(workflow)
    assert found[text_id]["inputs"]["text"] == "100% of 64 pixels, %Nothing.here%"
    assert found[text_id]["inputs"]["clip"] == prompt[text_id]["inputs"]["clip"]
    assert found["904"]["inputs"] == {"value": 7}
    assert set(found) == {*prompt, "901", "904"}


def test_all_problems_of_a_workflow_of_the_editor_are_in_one_answer() -> None:
    workflow = examples.editor_format(12, None)
    workflow["nodes"] += [
        {"id": 901, "type": "EmptyLatentImage", "widgets_values": [64, 32, 1, 5, "new"]},
        {"id": 902, "type": "Unheard Of", "widgets_values": [], "outputs": [{"links": [1]}]},
        {"id": 903, "type": "Another", "widgets_values": [], "inputs": [{"name": "a", "link": 1}]},
    ]
    with pytest.raises(WorkflowRejected) as refused:
        api_format(workflow)
    assert {error.node_id: error.kind for error in refused.value.errors} == {
        "901": "invalid_prompt", "902": "missing_node_type", "903": "missing_node_type",
    }  # fmt: skip
    assert "found 2 values more (5, 'new'), expected values of width, height, batch_size" in str(refused.value)
    workflow["nodes"] = [each for each in workflow["nodes"] if each["id"] not in (902, 903)]
    with pytest.raises(WorkflowRejected, match=r"node 901 .EmptyLatentImage.: the order of its widgets"):
        api_format(workflow)


def test_subgraphs_that_contain_themselves_are_refused() -> None:
    workflow = examples.editor_format(12, None)
    (subgraph,) = workflow["definitions"]["subgraphs"]
    subgraph["nodes"] += [{"id": number, "type": subgraph["id"]} for number in (7, 8)]
    with pytest.raises(WorkflowRejected, match="more than"):
        api_format(workflow)


def test_a_file_of_the_editor_in_which_nothing_runs_says_so() -> None:
    """Published files have all their groups muted; they were refused for a format that they have."""
    for mode in (2, 4):
        saved = {"id": 1, "type": "SaveImage", "mode": mode, "inputs": [], "widgets_values": ["x"]}
        with pytest.raises(WorkflowRejected, match="each is muted, bypassed or a note"):
            api_format({"nodes": [saved], "links": []})


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


def test_truth_values_that_an_extension_of_the_editor_keeps_behind_a_text_are_no_settings() -> None:
    """Before: refused, although 18 of 514 public workflows have them. A node with truth values of its own may be a
    newer one."""
    workflow = examples.editor_format(12, None)
    prompt = api_format(workflow)
    (text, *_) = [each for each in workflow["nodes"] if each["type"] == "CLIPTextEncode"]
    values = text["widgets_values"]
    for more in ([True], [[False, True]], [True, False]):
        text["widgets_values"] = [*values, *more]
        assert api_format(workflow) == prompt
    for more in (["new"], [[1, 2]]):
        text["widgets_values"] = [*values, *more]
        with pytest.raises(WorkflowRejected, match="the order of its widgets"):
            api_format(workflow)
    text["widgets_values"] = values
    workflow["nodes"].append({"id": 905, "type": "SaveWEBM", "widgets_values": ["a", "vp9", 24, 32, True]})
    workflow["nodes"].append({"id": 906, "type": "StringContains", "widgets_values": ["a", "b", True, True]})
    with pytest.raises(WorkflowRejected) as refused:
        api_format(workflow)
    assert [error.node_id for error in refused.value.errors] == ["906"]
