"""IP-Adapters of ComfyUI_IPAdapter_plus are image prompts of every run of their model; what the pool does not know of
them is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import save_file

from modelpool import PoolConfig
from modelpool.actors.http.comfy.comfy_adapter_nodes import ADAPTED_ATTENTIONS, PRESETS
from modelpool.actors.http.comfy.comfy_graph import PoolNames
from modelpool.actors.http.comfy.comfy_workflow import outputs_of, requests_of
from modelpool.actors.http.comfy.node_errors import WorkflowRejected
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.request.workflow_fields import SampleNode
from modelpool.pool.inference.operations.image_edits import IMAGE_EDITS, SQUARES, CropSquare
from modelpool.pool.inference.operations.operation import Size
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.core.image_prompt_blocks import block_factor
from modelpool.pool.values.core.stage_params import ImagePixels
from tests.actors.golden_steps import ATTENTIONS
from tests.actors.http.comfy.comfy_examples import Graph, basic, node
from tests.actors.loop_connection import open_real_pool
from tests.pool.inference.image_prompts.tiny_adapters import flat, ip_adapter, vision_encoder, write_encoder
from tests.pool.models.loading import layouts
from tests.pool.models.loading.tiny_checkpoint import write_tiny_checkpoint

CONFIG = Path(__file__).parents[4] / "configs" / "laptop.toml"
TITLES = {"shapes": "Stable Diffusion 1", "xl": "Stable Diffusion XL", "flux": "Flux dev"}
PHOTO = Image.effect_noise((96, 64), 60).convert("RGBA")
PHOTO.putalpha(Image.linear_gradient("L").resize((96, 64)))
KINDS = ("IPAdapter", "IPAdapterAdvanced", "IPAdapterApply")


def requests(graph: Graph, titles: dict[str, str] | None = None) -> list[GenerateRequest]:
    names = PoolNames(titles or TITLES, [], image_size=lambda name: PHOTO.size)
    return [one for output in outputs_of(graph, names) for one in requests_of(output, names, lambda name: PHOTO)]


def problem(graph: Graph) -> str:
    with pytest.raises(UserError) as found:
        requests(graph)
    return str(found.value.as_json()) if isinstance(found.value, WorkflowRejected) else str(found.value)


def adapted(kind: str, image: str = "loaded", model: str = "shapes", **inputs: Any) -> Graph:
    """A workflow with an adapter of a file, for an image of the user or for one that a node makes."""
    graph = basic(model=["adapted", 0], cfg=4.0)
    graph["model"]["inputs"]["ckpt_name"] = model
    graph["loaded"] = node("LoadImage", image="a.png")
    graph["turned"] = node("ImageFlip", image=["loaded", 0], flip_method="x-axis: vertically")
    graph["vision"] = node("CLIPVisionLoader", clip_name="vit-h.safetensors")
    graph["adapter"] = node("IPAdapterModelLoader", ipadapter_file="ip-adapter_sd15.safetensors")
    types = {"IPAdapter": "standard", "IPAdapterAdvanced": "linear", "IPAdapterApply": "original"}
    used: dict[str, Any] = {"model": ["model", 0], "ipadapter": ["adapter", 0], "image": [image, 0]}
    used |= {"weight": 0.75, "weight_type": types[kind], "start_at": 0.0, "end_at": 0.5}
    used |= {} if kind == "IPAdapter" else {"clip_vision": ["vision", 0]}
    graph["adapted"] = node(kind, **{**used, **inputs})
    return graph


def run_of(request: GenerateRequest) -> SampleNode:
    assert request.workflow is not None
    (run,) = [each for each in request.workflow.nodes.values() if isinstance(each, SampleNode)]
    return run


def test_each_node_is_an_image_prompt_of_its_model() -> None:
    for kind in KINDS:
        (request,) = requests(adapted(kind, attn_mask=["loaded", 1]))
        (prompt,) = request.image_prompts
        assert request.workflow is None, kind
        assert (prompt.model, prompt.strength, prompt.start, prompt.end) == ("ip-adapter_sd15", 0.75, 0.0, 0.5)
        assert prompt.shares_of == "noise", "as ComfyUI counts"
        assert prompt.image.pixels.shape == (64, 96, 3)
        assert prompt.mask is not None
        run = run_of(requests(adapted(kind, "turned", attn_mask=["loaded", 1]))[0])
        (made,) = run.request.image_prompts
        assert run.inputs["image_prompts.0"] == "turned", kind
        assert run.inputs["image_prompts.0.mask"], kind
        assert (made.model, made.strength, made.end, made.shares_of) == ("ip-adapter_sd15", 0.75, 0.5, "noise")
        (request,) = requests(adapted(kind, weight=0.0))
        assert not request.image_prompts, "an adapter of weight 0 is none"


def test_several_adapters_of_a_model_add_up() -> None:
    graph = adapted("IPAdapterAdvanced")
    inputs = {**graph["adapted"]["inputs"], "model": ["adapted", 0], "weight": 0.25, "end_at": 1.0}
    graph["second"] = node("IPAdapterAdvanced", **inputs)
    graph["sampler"]["inputs"]["model"] = ["second", 0]
    (request,) = requests(graph)
    assert [(each.strength, each.shares_of) for each in request.image_prompts] == [(0.75, "noise"), (0.25, "steps")]


def test_a_model_with_an_adapter_is_no_second_model_of_a_merge() -> None:
    graph = adapted("IPAdapter")
    inputs = {"model1": ["model", 0], "model2": ["adapted", 0], "ratio": 0.5}
    graph["merged"] = node("ModelMergeSimple", **inputs)
    graph["sampler"]["inputs"]["model"] = ["merged", 0]
    assert "model2: found a model that reads images" in problem(graph)


def test_an_adapter_next_to_an_image_that_the_model_reads_itself_is_refused() -> None:
    """The image of unCLIPConditioning took its place without a word."""
    for image in ("loaded", "turned"):
        graph = adapted("IPAdapterAdvanced", image, model="xl")
        graph["seen"] = node("CLIPVisionEncode", clip_vision=["vision", 0], image=["loaded", 0], crop="center")
        seen = {"conditioning": ["positive", 0], "clip_vision_output": ["seen", 0]}
        graph["varied"] = node("unCLIPConditioning", **seen, strength=1.0, noise_augmentation=0.0)
        graph["sampler"]["inputs"]["positive"] = ["varied", 0]
        assert "next to an IP-Adapter" in problem(graph), image


def test_presets_are_files_of_the_family() -> None:
    """A preset without a file for a family is refused."""
    wrong = []
    for preset, files in PRESETS.items():
        for model, expected in zip(("shapes", "xl", "flux"), (*files, ""), strict=True):
            graph = adapted("IPAdapter", model=model, ipadapter=["preset", 1])
            graph["adapted"]["inputs"]["model"] = ["preset", 0]
            graph["preset"] = node("IPAdapterUnifiedLoader", model=["model", 0], preset=preset)
            if not expected:
                wrong += [] if "preset: found one without a file" in problem(graph) else [(preset, model)]
                continue
            found = [each.model for each in requests(graph)[0].image_prompts]
            wrong += [] if found == [expected] else [(preset, model, found)]
    assert not wrong


def test_style_and_composition_are_the_blocks_of_instant_style() -> None:
    for kind, block in (("style transfer", "up.0.1"), ("composition", "down.2.1")):
        (request,) = requests(adapted("IPAdapterAdvanced", model="xl", weight_type=kind))
        assert request.image_prompts[0].blocks == ((block, 1.0),)
        assert f"found one of block {block}" in problem(adapted("IPAdapterAdvanced", weight_type=kind))


def test_a_ramp_of_weights_follows_the_order_of_the_attentions() -> None:
    """Each factor is 0.05 + 0.95 * ramp(place / count), over the 16 attentions of Stable Diffusion 1 in the order in
    which they run, or the 11 of XL."""
    for model, first, middle, last, count in (
        ("shapes", "down.0.0", "mid", "up.3.2", 16),
        ("xl", "down.1.0", "mid", "up.1.2", 11),
    ):
        place = 6 if count == 16 else 4
        for kind, at_first, at_middle, at_last in (
            ("ease in", 1.0, 1 - place / count, 1 / count),
            ("ease out", 0.0, place / count, 1 - 1 / count),
            ("ease in-out", 0.0, 1 - abs(2 * place / count - 1), 2 / count),
            ("reverse in-out", 1.0, abs(2 * place / count - 1), 1 - 2 / count),
        ):
            (request,) = requests(adapted("IPAdapterAdvanced", model=model, weight_type=kind))
            factors = dict(request.image_prompts[0].blocks)
            assert len(factors) == count
            wanted = [0.05 + 0.95 * share for share in (at_first, at_middle, at_last)]
            assert [factors[name] for name in (first, middle, last)] == pytest.approx(wanted), (model, kind)
    (request,) = requests(adapted("IPAdapterAdvanced", weight_type="strong middle"))
    factors = dict(request.image_prompts[0].blocks)
    assert (factors["down.2.1"], factors["mid"], factors["up.1.0"]) == (0.2, 1.0, 0.2)
    (request,) = requests(adapted("IPAdapterAdvanced", weight_type="weak input"))
    assert {name for name, factor in request.image_prompts[0].blocks if factor == 0.2} == {
        f"down.{block}.{place}" for block in range(3) for place in range(2)
    }


def test_the_attentions_of_a_ramp_are_the_ones_of_the_models() -> None:
    """The names, and their order, are the cross-attentions of diffusers' UNets as they run."""
    for is_xl, size in ((False, (True, True, True, False)), (True, (False, True, True))):
        down = [f"down_blocks.{block}.attentions.{place}.x" for block, has in enumerate(size) if has
                for place in range(2)]  # fmt: skip
        up = [f"up_blocks.{block}.attentions.{place}.x" for block, has in enumerate(reversed(size)) if has
              for place in range(3)]  # fmt: skip
        modules = [*down, "mid_block.attentions.0.x", *up]
        factors = [(name, float(place)) for place, name in enumerate(ADAPTED_ATTENTIONS[is_xl])]
        assert [block_factor(factors, module) for module in modules] == list(range(len(modules)))


def test_what_is_not_known_is_refused_by_its_name() -> None:
    wrong = []
    cases: dict[str, tuple[str, dict[str, Any]]] = {
        "weight_type": ("IPAdapterAdvanced", {"weight_type": "prompt is more important"}),
        "embeds_scaling": ("IPAdapterAdvanced", {"embeds_scaling": "K+V"}),
        "image_negative": ("IPAdapterAdvanced", {"image_negative": ["loaded", 0]}),
        "noise": ("IPAdapterApply", {"noise": 0.3}),
        "unfold_batch": ("IPAdapterApply", {"unfold_batch": True}),
        "start_at": ("IPAdapter", {"start_at": 0.5}),
        "weight:": ("IPAdapter", {"weight": -0.5}),
        "expected original": ("IPAdapterApply", {"weight_type": "linear"}),
        "weight_type:": ("IPAdapter", {"weight_type": "prompt is more important"}),
    }
    for expected, (kind, inputs) in cases.items():
        graph = adapted(kind, **inputs)
        wrong += [] if expected in (found := problem(graph)) else [(expected, found)]
    assert not wrong


def test_an_image_is_prepared_as_a_square_from_one_side() -> None:
    wide, high = np.arange(6 * 4 * 3, dtype=np.uint8).reshape(4, 6, 3), np.zeros((6, 4, 3), dtype=np.uint8)
    high[:] = np.arange(6, dtype=np.uint8)[:, None, None]
    (operation,) = [each for each in IMAGE_EDITS if each.name == "image_crop_square"]
    boxes = {"center": (1, 1), "top": (1, 0), "bottom": (1, 2), "left": (0, 1), "right": (2, 1)}
    assert set(boxes) == set(SQUARES)
    for position, (left, top) in boxes.items():
        params = CropSquare(position)
        found = operation.run(params, {"image": ImagePixels(wide)})
        assert np.array_equal(found.pixels_HWC, wide[:, left : left + 4]), position
        found = operation.run(params, {"image": ImagePixels(high)})
        assert np.array_equal(found.pixels_HWC, high[top : top + 4]), position
        assert operation.size(params, {"image": Size(6, 4)}) == Size(4, 4)
    graph = adapted("IPAdapter", "prepared")
    inputs = {"image": ["loaded", 0], "interpolation": "LANCZOS", "sharpening": 0.0}
    graph["prepared"] = node("PrepImageForClipVision", **inputs, crop_position="center")
    assert requests(graph)[0].image_prompts[0].image.pixels.shape == (224, 224, 3)
    graph["prepared"]["inputs"]["crop_position"] = "left"
    assert run_of(requests(graph)[0]).inputs["image_prompts.0"] == "prepared"
    graph["prepared"]["inputs"]["crop_position"] = "pad"
    assert "crop_position: found 'pad'" in problem(graph)


def test_its_image_is_that_of_a_request_with_an_image_prompt(tmp_path: Path) -> None:
    """The same bytes: with an image of the user, and with one that a node makes of it."""
    write_tiny_checkpoint(tmp_path / "shapes.safetensors", seed=1, layout=layouts.tiny_sd1())
    (tmp_path / "ipadapter").mkdir()
    save_file(flat(ip_adapter("base", ATTENTIONS)), tmp_path / "ipadapter" / "ip-adapter_sd15.safetensors")
    write_encoder(tmp_path / "clip_vision" / "image_encoder", vision_encoder())
    config = PoolConfig.load(CONFIG).override(device="cpu", models=[tmp_path], workers=1, vram="256 MiB")
    graphs = [adapted("IPAdapterAdvanced", image, end_at=1.0) for image in ("loaded", "turned")]
    for graph in graphs:
        graph["sampler"]["inputs"]["steps"] = 2
    turned = PHOTO.convert("RGB").transpose(Image.Transpose.FLIP_TOP_BOTTOM)
    with open_real_pool(config) as pool:
        families = {listing.name: listing.family for listing in pool.models()}
        made = [one for graph in graphs for one in requests(graph, families)]
        plain = made[0]
        prompts = [
            {"model": "ip-adapter_sd15", "image": each, "strength": 0.75} for each in (PHOTO.convert("RGB"), turned)
        ]
        own = [plain.model_copy(update={"image_prompts": ()}).model_dump(exclude_unset=True) for _ in prompts]
        expected = [
            GenerateRequest(**{**each, "image_prompts": [prompt]}) for each, prompt in zip(own, prompts, strict=True)
        ]
        results = list(pool.submit([*made, *expected], output=tmp_path / "out").results())
    pictures = [np.asarray(Image.open(result.path)) for result in sorted(results, key=lambda each: each.index)]
    assert len(pictures) == 4
    assert np.array_equal(pictures[0], pictures[2])
    assert np.array_equal(pictures[1], pictures[3])
    assert not np.array_equal(pictures[0], pictures[1])
