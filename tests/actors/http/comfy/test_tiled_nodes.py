"""Nodes that redraw an image tile by tile: what they become, what they refuse, and what they render."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import save_file

from modelpool import ModelPool, PoolConfig
from modelpool.actors.http.comfy.comfy_graph import PoolNames
from modelpool.actors.http.comfy.comfy_progress import PromptNodes
from modelpool.actors.http.comfy.comfy_tiled_nodes import MOST_TILES
from modelpool.actors.http.comfy.comfy_tiles import Box, Grid, Tile, region_of
from modelpool.actors.http.comfy.comfy_workflow import outputs_of, requests_of
from modelpool.actors.http.comfy.node_errors import WorkflowRejected
from modelpool.actors.request.workflow_fields import OperationNode, Workflow
from modelpool.pool.catalog.registry.listings import FileNames
from tests.actors.http.comfy.comfy_examples import Graph, basic, node
from tests.actors.loop_connection import open_real_pool
from tests.each_case import each_case
from tests.pool.inference.upscalers.tiny_upscalers import tiny_state
from tests.pool.models.loading import layouts
from tests.pool.models.loading.tiny_checkpoint import write_tiny_checkpoint

CONFIG = Path(__file__).parents[4] / "configs" / "laptop.toml"
NAMES = PoolNames(
    {"shapes": "Stable Diffusion 1"},
    [],
    ("a.png",),
    FileNames(upscalers=("up",), controlnets=("edges",)),
    image_size=lambda name: (64, 48),
)
SAMPLING = {"seed": 3, "steps": 1, "cfg": 5.0, "sampler_name": "euler", "scheduler": "normal"}
TILES = {
    "denoise": 0.5, "mode_type": "Linear", "tile_width": 64, "tile_height": 64, "mask_blur": 4, "tile_padding": 8,
    "seam_fix_mode": "None", "seam_fix_denoise": 0.5, "seam_fix_width": 32, "seam_fix_mask_blur": 4,
    "seam_fix_padding": 16, "force_uniform_tiles": True, "tiled_decode": False,
}  # fmt: skip
LINKS = {"model": ["model", 0], "positive": ["positive", 0], "negative": ["negative", 0], "vae": ["model", 2]}


def enlarging(image: tuple[int, int] = (64, 64), kind: str = "UltimateSDUpscale", **inputs: Any) -> Graph:
    """A generated image that is enlarged and redrawn."""
    graph = basic(steps=1)
    graph["blank"]["inputs"] |= {"width": image[0], "height": image[1]}
    graph["up"] = node("UpscaleModelLoader", model_name="up.safetensors")
    given = {**LINKS, **SAMPLING, **TILES, "image": ["decoded", 0], "upscale_model": ["up", 0], "upscale_by": 2.0}
    if kind == "UltimateSDUpscaleNoUpscale":
        given = {"upscaled_image": given.pop("image"), **given}
        del given["upscale_model"], given["upscale_by"]
    graph["big"] = node(kind, **{name: value for name, value in {**given, **inputs}.items() if value is not None})
    graph["saved"]["inputs"]["images"] = ["big", 0]
    return graph


def workflow_of(graph: Graph) -> Workflow:
    (output,) = outputs_of(graph, NAMES)
    (request,) = requests_of(output, NAMES, lambda name: Image.new("RGBA", (64, 48), (9, 99, 200, 255)))
    assert request.workflow is not None
    return request.workflow


def refusal_of(graph: Graph) -> str:
    with pytest.raises(WorkflowRejected) as caught:
        outputs_of(graph, NAMES)
    return " ".join(each.details for each in caught.value.errors)


def warnings_of(graph: Graph) -> tuple[str, ...]:
    return outputs_of(graph, NAMES)[0].warnings


def kinds_of(workflow: Workflow) -> Counter[str]:
    return Counter(each.name if isinstance(each, OperationNode) else each.kind for each in workflow.nodes.values())


def test_tiles_cover_the_image_once_in_their_order() -> None:
    grid = Grid((150, 100), (64, 64))
    boxes = [tile.box for tile in grid.tiles(is_chess=False)]
    assert boxes == [
        Box(0, 0, 64, 64), Box(64, 0, 64, 64), Box(128, 0, 22, 64),
        Box(0, 64, 64, 36), Box(64, 64, 64, 36), Box(128, 64, 22, 36),
    ]  # fmt: skip
    chess = [tile.box for tile in grid.tiles(is_chess=True)]
    assert chess == [boxes[place] for place in (0, 2, 4, 1, 3, 5)]


def test_tiles_of_seams_have_their_peaks_at_the_seams() -> None:
    grid = Grid((150, 100), (64, 64))
    rows, columns = grid.half_tiles()
    assert rows == [Tile(Box(x, 32, min(64, 150 - x), 64), (0, 32)) for x in (0, 64, 128)]
    assert columns == [Tile(Box(x, y, min(64, 150 - x), (64, 36)[y > 0]), (32, 0)) for y in (0, 64) for x in (32, 96)]
    assert grid.intersections() == [Tile(Box(x, 32, min(64, 150 - x), 64), (32, 32)) for x in (32, 96)]
    assert grid.bands(20) == [
        [Tile(Box(0, 54, 150, 20), (0, 10))],
        [Tile(Box(x, 0, 20, 100), (10, 0)) for x in (54, 118)],
    ]
    assert Grid((64, 64), (64, 64)).half_tiles() == [[], []]


@each_case(
    ("box", "padding", "least", "expected"),
    [
        (Box(64, 64, 64, 64), 8, (64, 64), Box(56, 56, 80, 80)),  # inside
        (Box(0, 0, 64, 64), 8, (64, 64), Box(0, 0, 80, 80)),  # moved into the image
        (Box(192, 64, 8, 64), 8, (64, 64), Box(120, 56, 80, 80)),  # cut off: missing padding is added at the other side
        (Box(192, 64, 8, 64), 8, (0, 0), Box(184, 56, 16, 80)),  # as small as it can be
        (Box(0, 0, 64, 64), 8, (0, 0), Box(0, 0, 80, 80)),  # 72, rounded up
        (Box(0, 0, 200, 200), 500, (200, 200), Box(0, 0, 200, 200)),  # the whole image
    ],
)
def test_the_region_of_a_tile_is_in_the_image(box: Box, padding: int, least: tuple[int, int], expected: Box) -> None:
    assert region_of(box, padding, (200, 200), least) == expected


def test_every_tile_is_steps_of_its_own() -> None:
    found = kinds_of(workflow_of(enlarging()))
    assert (found["encode"], found["sample"], found["decode"], found["image_crop"]) == (4, 5, 5, 4)
    # each tile is pasted once, and into the tiles behind it that it touches: 1 + 2 + 3
    assert found["image_composite"] == 4 + 6
    assert found["upscale"] == 1


def test_tiles_that_do_not_touch_do_not_wait_for_one_another() -> None:
    """In chess order, tiles of one colour touch at corners alone; a row of tiles waits for its neighbours."""
    needs = samples_behind(workflow_of(enlarging((128, 64), mode_type="Chess", mask_blur=2)))
    assert not needs[1] | needs[2]
    whole_row = samples_behind(workflow_of(enlarging((128, 32), tile_padding=8)))
    assert whole_row == {1: set(), 2: {1}, 3: {1, 2}, 4: {1, 2, 3}}
    apart = samples_behind(workflow_of(enlarging((128, 32), tile_padding=0, mask_blur=0)))
    assert apart == {place: set() for place in range(1, 5)}


def samples_behind(workflow: Workflow) -> dict[int, set[int]]:
    """The tiles that each tile waits for."""
    found: dict[str, set[int]] = {}
    for node_id, each in workflow.in_order:
        own = {int(node_id.split()[1].split("/")[0])} if node_id.endswith("/sample") else set()
        found[node_id] = own.union(*(found[source] for source in each.inputs.values()))
    names = {name: int(name.split()[1].split("/")[0]) for name in found if name.endswith("/sample")}
    return {place: found[name] - {place} for name, place in names.items()}


@each_case(
    ("inputs", "samples"),
    [
        ({"mode_type": "None"}, 0),
        ({"denoise": 0.0}, 0),
        ({"mode_type": "None", "seam_fix_mode": "Band Pass"}, 2),
        ({"mode_type": "None", "seam_fix_mode": "Half Tile"}, 4),
        ({"seam_fix_mode": "Half Tile + Intersections"}, 9),
        ({"seam_fix_mode": "Half Tile", "seam_fix_denoise": 0.0}, 4),
    ],
)
def test_modes_decide_what_is_redrawn(inputs: dict[str, Any], samples: int) -> None:
    assert kinds_of(workflow_of(enlarging(**inputs)))["sample"] == 1 + samples


@each_case(
    ("inputs", "message"),
    [
        (
            {"tile_width": 64, "upscale_by": 4.0, "image": (512, 512)},
            f"1024 tiles of 64x64 in 2048x2048, expected up to {MOST_TILES}",
        ),
        ({"batch_size": 4}, "batch_size: found 4, expected 1"),
        ({"upscale_by": 4.0, "image": (8192, 64)}, "upscale_by: found 32768x256 pixels"),
        ({"force_uniform_tiles": "disable"}, "force_uniform_tiles: found 'disable'"),
        ({"mode_type": "Spiral"}, "mode_type: found 'Spiral'"),
    ],
)
def test_what_it_cannot_do_is_refused_by_value(inputs: dict[str, Any], message: str) -> None:
    assert message in refusal_of(enlarging(**inputs))


def test_the_size_of_the_image_must_be_known() -> None:
    graph = enlarging()
    graph["larger"] = node("ImageUpscaleWithModel", upscale_model=["up", 0], image=["decoded", 0])
    graph["big"]["inputs"]["image"] = ["larger", 0]
    assert "image: found an image of a size that is known when it is made" in refusal_of(graph)
    graph["set"] = node("ImageScale", image=["larger", 0], width=128, height=64, upscale_method="area", crop="center")
    graph["big"]["inputs"]["image"] = ["set", 0]
    assert kinds_of(workflow_of(graph))["sample"] == 1 + 8


def test_the_size_of_latents_is_whole_cells() -> None:
    """Latents of 93x61 pixels are an image of 88x56, which nodes of a size tell, too."""
    graph = enlarging((93, 61), mode_type="None", upscale_by=1.0)
    enlarged: Any = workflow_of(graph).nodes["big/enlarged"]
    assert (enlarged.settings["width"], enlarged.settings["height"]) == (88, 56)
    graph["encoded"] = node("VAEEncode", pixels=["odd", 0], vae=["model", 2])
    graph["odd"] = node("EmptyImage", width=93, height=61, batch_size=1, color=77)
    graph["sampler"]["inputs"]["latent_image"] = ["encoded", 0]
    assert workflow_of(graph).nodes["big/enlarged"] == enlarged


def test_values_of_earlier_versions_are_read() -> None:
    """Published files have "enable" for true, and lack what was added later."""
    assert workflow_of(enlarging(force_uniform_tiles="enable", tiled_decode=None)) == workflow_of(enlarging())


def test_uniform_tiles_are_sampled_in_one_size() -> None:
    def sizes(is_uniform: bool) -> set[tuple[Any, Any]]:
        workflow = workflow_of(enlarging((72, 56), force_uniform_tiles=is_uniform))
        crops = [each for each in workflow.nodes.values() if getattr(each, "name", "") == "image_crop"]
        return {(each.settings["width"], each.settings["height"]) for each in crops}  # type: ignore[union-attr]

    assert sizes(True) == {(80, 80)}
    assert len(sizes(False)) > 1


def _controlled(**apply: Any) -> Graph:
    graph = enlarging()
    graph["hint"] = node("LoadImage", image="a.png")
    graph["net"] = node("ControlNetLoader", control_net_name="edges.safetensors")
    used = {"strength": 1.0, "start_percent": 0.0, "end_percent": 1.0, "control_net": ["net", 0], "image": ["hint", 0]}
    texts = {"positive": ["positive", 0], "negative": ["negative", 0]}
    graph["controlled"] = node("ControlNetApplyAdvanced", **texts, **used, **apply)
    graph["big"]["inputs"] |= {"positive": ["controlled", 0], "negative": ["controlled", 1]}
    return graph


def test_the_image_of_a_controlnet_is_cut_as_the_tile_is() -> None:
    workflow = workflow_of(_controlled())
    for place, (x, y) in enumerate(((0, 0), (48, 0), (0, 48), (48, 48)), start=1):
        hint: Any = workflow.nodes[workflow.nodes[f"big/tile {place}/sample"].inputs["controls.0"]]
        assert hint.settings == {"x": x, "y": y, "width": 80, "height": 80}
        whole: Any = workflow.nodes[hint.inputs["image"]]
        assert (whole.name, whole.settings["width"], whole.settings["height"]) == ("image_scale", 128, 128)
    assert kinds_of(workflow)["image_scale"] == 2, "the image of the ControlNet is enlarged once"


def test_the_image_of_a_controlnet_of_the_model_is_cut_too() -> None:
    graph = enlarging(cfg=1.0)
    graph["hint"] = node("LoadImage", image="a.png")
    graph["patch"] = node("ModelPatchLoader", name="edges.safetensors")
    patched = {"model": ["model", 0], "vae": ["model", 2], "strength": 1.0, "image": ["hint", 0]}
    graph["patched"] = node("ZImageFunControlnet", model_patch=["patch", 0], **patched)
    graph["big"]["inputs"]["model"] = ["patched", 0]
    (output,) = outputs_of(graph, replace(NAMES, models={"shapes": "Z-Image"}))
    (request,) = requests_of(output, NAMES, lambda name: Image.new("RGBA", (64, 48)))
    assert request.workflow is not None
    nodes: Any = request.workflow.nodes
    corners = {(hint.settings["x"], hint.settings["y"]) for name, each in nodes.items() if name.endswith("/sample")
               for hint in [nodes[each.inputs["controls.0"]]]}  # fmt: skip
    assert corners == {(0, 0), (48, 0), (0, 48), (48, 48)}


def test_conditions_of_places_are_refused_by_name() -> None:
    graph = enlarging()
    area = {"width": 32, "height": 32, "x": 0, "y": 0, "strength": 1.0}
    graph["area"] = node("ConditioningSetArea", conditioning=["positive", 0], **area)
    graph["both"] = node("ConditioningCombine", conditioning_1=["positive", 0], conditioning_2=["area", 0])
    graph["big"]["inputs"]["positive"] = ["both", 0]
    assert "positive: found texts for parts of the image" in refusal_of(graph)


def test_a_sampler_of_parts_takes_the_place_of_the_widgets() -> None:
    graph = enlarging(kind="UltimateSDUpscaleCustomSample", custom_sampler=["chosen", 0], custom_sigmas=["levels", 0])
    graph["chosen"] = node("KSamplerSelect", sampler_name="heun")
    graph["levels"] = node("BasicScheduler", model=["model", 0], scheduler="karras", steps=3, denoise=0.4)
    tile: Any = workflow_of(graph).nodes["big/tile 1/sample"]
    assert (tile.request.sampler, tile.request.steps, tile.first_step) == ("heun", 7, 4)
    assert any("steps, sampler_name, scheduler, denoise: not read" in each for each in warnings_of(graph))
    del graph["big"]["inputs"]["custom_sigmas"]
    assert "found one of them, expected both, or none" in refusal_of(graph)
    plain = enlarging(kind="UltimateSDUpscaleCustomSample")
    assert workflow_of(plain).nodes == workflow_of(enlarging()).nodes


def test_warnings_of_tiles_are_of_the_node_and_told_once() -> None:
    graph = enlarging(tiled_decode=True)
    graph["guided"] = node("FluxGuidance", conditioning=["positive", 0], guidance=3.0)
    graph["big"]["inputs"]["positive"] = ["guided", 0]
    found = warnings_of(graph)
    assert sum("guidance" in each for each in found) == 1
    assert not [each for each in found if "/tile" in each]
    assert any("tiled_decode" in each for each in found)


def test_every_step_is_progress_of_the_node() -> None:
    graph = enlarging()
    (output,) = outputs_of(graph, NAMES)
    nodes = PromptNodes.of(graph)
    stages = {"encode": "encode", "sample": "sample", "decode": "decode"}
    for part, each in workflow_of(graph).nodes.items():
        if part.startswith("big"):
            assert nodes.of_part(output, part, stages.get(each.kind, "decode")) == ("big",), part
    assert output.sampler_id == "big"


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelPool]:
    folder = tmp_path_factory.mktemp("models")
    write_tiny_checkpoint(folder / "shapes.safetensors", 3, layout=layouts.tiny_sd1())
    (folder / "upscalers").mkdir()
    save_file(tiny_state("realesrgan_2x"), folder / "upscalers" / "up.safetensors")
    with open_real_pool(PoolConfig.load(CONFIG).override(device="cpu", models=[folder], workers=1)) as opened:
        yield opened


def rendered(pool: ModelPool, *graphs: Graph) -> list[Any]:
    """The pixels of the images of each workflow, in order."""
    made = [request for graph in graphs for each in outputs_of(graph, NAMES)
            for request in requests_of(each, NAMES, lambda name: Image.new("RGB", (64, 48), "red"))]  # fmt: skip
    results: list[Any] = sorted(pool.submit(made).results(), key=lambda each: each.index)
    return [each.pixels for each in results]


def by_hand(graph: Graph, tiles: list[Tile], padding: int, blur: int, denoise: float, inputs: dict[str, Any]) -> Graph:
    """The same with the nodes of ComfyUI for one thing each: the whole image is pasted to, tile by tile."""
    graph = dict(graph)
    del graph["big"]
    size: Any = inputs["size"]
    graph["larger"] = node("ImageUpscaleWithModel", upscale_model=["up", 0], image=["decoded", 0])
    sides = {"width": size[0], "height": size[1]}
    graph["now"] = node("ImageScale", image=["larger", 0], upscale_method="lanczos", crop="disabled", **sides)
    last = "now"
    for place, tile in enumerate(tiles):
        part = region_of(tile.box, padding, size, inputs["least"])
        where = {"x": part.left, "y": part.top}
        graph[f"cut{place}"] = node("ImageCrop", image=[last, 0], width=part.width, height=part.height, **where)
        graph[f"in{place}"] = node("VAEEncode", pixels=[f"cut{place}", 0], vae=["model", 2])
        run = {**SAMPLING, "model": ["model", 0], "positive": ["positive", 0], "negative": ["negative", 0]}
        graph[f"run{place}"] = node("KSampler", **run, latent_image=[f"in{place}", 0], denoise=denoise)
        graph[f"out{place}"] = node("VAEDecode", samples=[f"run{place}", 0], vae=["model", 2])
        # the mask of the tile in the whole image, blurred, and cut as the tile is
        graph[f"black{place}"] = node("SolidMask", value=0.0, **sides)
        own = {"width": tile.box.width, "height": tile.box.height}
        graph[f"white{place}"] = node("SolidMask", value=1.0, **own)
        graph[f"mask{place}"] = node("MaskComposite", destination=[f"black{place}", 0], source=[f"white{place}", 0],
                                     x=tile.box.left, y=tile.box.top, operation="add")  # fmt: skip
        grow = {"expand": 0, "incremental_expandrate": 0.0, "tapered_corners": True, "flip_input": False}
        graph[f"soft{place}"] = node("GrowMaskWithBlur", mask=[f"mask{place}", 0], blur_radius=float(blur), **grow,
                                     lerp_alpha=1.0, decay_factor=1.0)  # fmt: skip
        graph[f"share{place}"] = node("CropMask", mask=[f"soft{place}", 0], width=part.width, height=part.height,
                                      **where)  # fmt: skip
        graph[f"new{place}"] = node("ImageCompositeMasked", destination=[last, 0], source=[f"out{place}", 0],
                                    mask=[f"share{place}", 0], resize_source=False, **where)  # fmt: skip
        last = f"new{place}"
    graph["saved"] = node("SaveImage", images=[last, 0], filename_prefix="x")
    return graph


def test_it_renders_what_single_nodes_render(pool: ModelPool) -> None:
    """Byte for byte: on a grid that does not fit, in both orders, with tiles of one size and small ones, with and
    without space around them."""
    cases = [("Linear", True, 8, 4), ("Chess", False, 0, 3)]
    graphs = []
    for mode, uniform, padding, blur in cases:
        given = {"mode_type": mode, "force_uniform_tiles": uniform, "tile_padding": padding, "mask_blur": blur}
        graph = enlarging((56, 48), **given)
        tiles = Grid((112, 96), (64, 64)).tiles(mode == "Chess")
        size = {"size": (112, 96), "least": (64, 64) if uniform else (0, 0)}
        graphs += [graph, by_hand(graph, tiles, padding, blur, 0.5, size)]
    images = rendered(pool, *graphs)
    for case, found, expected in zip(cases, images[::2], images[1::2], strict=True):
        assert found.shape == (96, 112, 3), case
        assert np.array_equal(found, expected), case
    assert not np.array_equal(images[0], images[2])


def test_without_noise_it_is_the_enlarged_image(pool: ModelPool) -> None:
    plain = by_hand(enlarging(), [], 0, 0, 0.0, {"size": (128, 128), "least": (0, 0)})
    images = rendered(pool, enlarging(denoise=0.0), enlarging(mode_type="None"), plain, enlarging())
    assert np.array_equal(images[0], images[2])
    assert np.array_equal(images[1], images[2])
    assert not np.array_equal(images[3], images[2])


def test_seams_are_redrawn_where_they_are(pool: ModelPool) -> None:
    """Pixels beyond the reach of the mask and its blur around a seam stay as it is."""
    inputs = {"mode_type": "None", "seam_fix_mask_blur": 2, "seam_fix_width": 16, "seam_fix_denoise": 1.0}
    modes = ("None", "Band Pass", "Half Tile", "Half Tile + Intersections")
    plain, band, half, corners = rendered(pool, *(enlarging(**inputs, seam_fix_mode=mode) for mode in modes))
    changed = (band != plain).any(axis=-1)
    reach = 8 + 6
    assert changed[:, 64 - reach : 64 + reach].any(axis=1).all()
    assert not changed[: 64 - reach, : 64 - reach].any()
    changed = (half != plain).any(axis=-1)
    assert changed[60:68].mean() > 0.9
    assert not changed[:20, :20].any(), "beyond the half tiles and their blur"
    changed = (half != corners).any(axis=-1)
    assert changed[56:72, 56:72].mean() > 0.9
    assert not changed[:24].any()


def test_sides_that_are_no_whole_cells_are_sampled_larger(pool: ModelPool) -> None:
    """The image is not as wide as a tile: all of it is sampled, as 128 pixels instead of 116."""
    graph = enlarging((56, 56), tile_width=512, mask_blur=0, upscale_by=116 / 56)
    workflow = workflow_of(graph)
    assert kinds_of(workflow)["sample"] == 1 + 2
    sizes = [each.settings["width"] for name, each in workflow.nodes.items()
             if name.endswith(("/larger", "/smaller")) and isinstance(each, OperationNode)]  # fmt: skip
    assert sorted(sizes) == [116, 116, 128, 128]
    (image,) = rendered(pool, graph)
    assert image.shape == (116, 116, 3)


def test_a_batch_is_redrawn_image_by_image(pool: ModelPool) -> None:
    graph = enlarging()
    graph["blank"]["inputs"]["batch_size"] = 2
    first, second = rendered(pool, graph)
    (alone,) = rendered(pool, enlarging())
    assert np.array_equal(first, alone)
    assert not np.array_equal(first, second)


def test_an_image_without_an_upscaler_is_redrawn_in_its_size(pool: ModelPool) -> None:
    (image,) = rendered(pool, enlarging((128, 64), kind="UltimateSDUpscaleNoUpscale"))
    assert image.shape == (64, 128, 3)
