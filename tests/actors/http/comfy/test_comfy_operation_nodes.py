"""Every node that is an operation becomes a workflow with the operation that it names, with valid settings, of images,
masks and latents that are generated; and of images of the user, where requests without a workflow read these."""

from __future__ import annotations

from typing import Any

import pytest
from PIL import Image

from modelpool.actors.http.comfy.comfy_graph import PoolNames
from modelpool.actors.http.comfy.comfy_node_types import WIDGET_TYPES
from modelpool.actors.http.comfy.comfy_nodes import NODE_TYPES
from modelpool.actors.http.comfy.comfy_operation_nodes import OPERATION_BUILDERS
from modelpool.actors.http.comfy.comfy_workflow import outputs_of, requests_of
from modelpool.actors.http.comfy.node_errors import WorkflowRejected
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.request.workflow_fields import OperationNode
from modelpool.pool.inference.operations.operate import operation_named
from modelpool.pool.inference.operations.operation import IMAGE, LATENT, MASK, Size
from tests.actors.http.comfy.comfy_examples import Graph, basic, node
from tests.each_case import each_case

NAMES = PoolNames({"shapes": "Stable Diffusion 1"}, [])
#: settings that differ from the defaults of a node, where these are refused
SETTINGS: dict[str, dict[str, Any]] = {
    "ImageResize+": {"interpolation": "lanczos", "method": "keep proportion", "width": 32, "height": 0},
    "Image Resize": {"supersample": "false", "mode": "resize"},
    "EmptyImage": {"color": 0x102030},
    "Latent Upscale by Factor (WAS)": {"align": "false", "mode": "bislerp"},
}
#: nodes with the sizes of latents and images here, so that settings fit
SIDE = 64


def requests(graph: Graph) -> list[GenerateRequest]:
    read = lambda name: Image.new("RGBA", (SIDE, SIDE), (255, 0, 0, 128))  # noqa: E731
    return [one for output in outputs_of(graph, NAMES) for one in requests_of(output, NAMES, read)]


def graph_of(name: str) -> Graph:
    """A workflow in which a node reads what a sampler made, and leads to an image."""
    graph = basic()
    graph["again"] = node("LatentFlip", samples=["sampler", 0], flip_method="y-axis: horizontally")
    graph["pixels"] = node("ImageFlip", image=["decoded", 0], flip_method="x-axis: vertically")
    graph["mask"] = node("ImageToMask", image=["decoded", 0], channel="red")
    graph["other"] = node("InvertMask", mask=["mask", 0])
    known = {"IMAGE": [["decoded", 0], ["pixels", 0], ["decoded", 0]], "MASK": [["mask", 0], ["other", 0]]}
    known["LATENT"] = [["sampler", 0], ["again", 0]]
    kind, inputs = NODE_TYPES[name], dict[str, Any]()
    for given in kind.inputs:
        if given.type in WIDGET_TYPES:
            inputs[given.name] = SETTINGS.get(name, {}).get(given.name, given.default)
        else:
            inputs[given.name] = known[given.type].pop(0)
    graph["subject"] = node(name, **inputs)
    ends = {
        "IMAGE": node("ImageInvert", image=["subject", 0]),
        "MASK": node("MaskToImage", mask=["subject", 0]),
        "LATENT": node("VAEDecode", samples=["subject", 0], vae=["model", 2]),
    }
    if kind.is_output:
        graph["subject"]["inputs"]["mask"] = ["mask", 0]
        del graph["saved"]
        return graph
    graph["end"] = ends[kind.outputs[0]]
    if "Batch" in name and name != "ImageFromBatch":
        graph["saved"] = node("SaveAnimatedWEBP", images=["end", 0], filename_prefix="a", fps=4.0, lossless=True)
        return graph
    # what has no model before it is put on an image that has one
    graph["together"] = node(
        "ImageBlend", image1=["decoded", 0], image2=["end", 0], blend_factor=0.5, blend_mode="screen"
    )
    graph["saved"]["inputs"]["images"] = ["together", 0]
    return graph


def test_every_node_is_an_operation_with_valid_settings() -> None:
    wrong: list[Any] = []
    for name in OPERATION_BUILDERS:
        (request,) = requests(graph_of(name))
        assert request.workflow is not None
        nodes = request.workflow.nodes
        made = [each for key, each in nodes.items() if key.partition("/")[0] == "subject"]
        if not made or not all(isinstance(each, OperationNode) for each in made):
            wrong.append((name, made))
        for each in nodes.values():
            if isinstance(each, OperationNode):
                operation = operation_named(each.name)
                params = operation.params_of(each.settings)
                sides = {LATENT: Size(8, 8), IMAGE: Size(SIDE, SIDE), MASK: Size(SIDE, SIDE)}
                sizes = {one: sides[kind] for one, kind in operation.inputs.items() if one in each.inputs}
                operation.size_of(params, sizes)
                missing = set(operation.inputs) - set(each.inputs) - operation.optional
                if missing or set(each.inputs) - set(operation.inputs):
                    wrong.append((name, each.name, sorted(each.inputs)))
    assert not wrong


def test_settings_reach_the_operation() -> None:
    graph = graph_of("ImageCrop")
    graph["subject"]["inputs"] |= {"x": 3, "y": 5, "width": 20, "height": 10}
    (request,) = requests(graph)
    assert request.workflow is not None
    crop = request.workflow.nodes["subject"]
    assert isinstance(crop, OperationNode)
    assert (crop.name, crop.settings) == ("image_crop", {"x": 3, "y": 5, "width": 20, "height": 10})


def test_images_that_are_put_together_are_saved_as_an_animation_or_one_by_one() -> None:
    graph = graph_of("ImageBatch")
    (request,) = requests(graph)
    assert (request.format, request.quality) == ("webp", 100)
    graph["saved"] = node("SaveImage", images=["end", 0], filename_prefix="a")
    each = requests(graph)
    assert [request.format for request in each] == [None, None]
    taken = [request.workflow.nodes[request.workflow.output].settings for request in each if request.workflow]
    assert taken == [{"start": 0, "length": 1}, {"start": 1, "length": 1}], "each frame is a file"
    graph["one"] = node("ImageFromBatch", image=["end", 0], batch_index=1, length=1)
    graph["saved"]["inputs"]["images"] = ["one", 0]
    (request,) = requests(graph)
    assert request.format is None
    (preview,) = outputs_of(graph_of("MaskPreview"), NAMES)
    assert preview.is_preview


def test_images_of_the_user_stay_in_requests_without_a_workflow() -> None:
    graph = basic(latent_image=["encoded", 0], denoise=0.5)
    graph["loaded"] = node("LoadImage", image="a.png")
    graph["cropped"] = node("ImageCrop", image=["loaded", 0], x=0, y=0, width=64, height=32)
    graph["encoded"] = node("VAEEncode", pixels=["cropped", 0], vae=["model", 2])
    (request,) = requests(graph)
    assert request.workflow is None
    assert request.image.pixels.shape == (32, 64, 3)
    graph["cropped"] = node("ImageFlip", image=["loaded", 0], flip_method="x-axis: vertically")
    (request,) = requests(graph)
    assert request.workflow is not None, "no request says that an image is flipped"


def test_what_a_node_cannot_do_is_refused_by_its_setting() -> None:
    cases = {
        "GrowMaskWithBlur": ({"lerp_alpha": 0.5}, "lerp_alpha: expected 1.0"),
    }
    for name, (settings, message) in cases.items():
        graph = graph_of(name)
        graph["subject"]["inputs"] |= settings
        with pytest.raises(WorkflowRejected) as found:
            outputs_of(graph, NAMES)
        (error,) = found.value.as_json()["node_errors"]["subject"]["errors"]
        assert message in error["details"], name


def batch_of(count: int, kind: str, **inputs: Any) -> Graph:
    """A node that reads the images of a sampler with a batch."""
    graph = basic()
    graph["blank"]["inputs"]["batch_size"] = count
    graph["subject"] = node(kind, **inputs)
    if kind not in ("SaveAnimatedWEBP", "SaveWEBM"):
        graph["saved"]["inputs"]["images"] = ["subject", 0]
    else:
        del graph["saved"]
    return graph


BATCH = ["decoded", 0]


@each_case(
    ("kind", "inputs"),
    [
        ("ImageFromBatch", {"image": BATCH, "batch_index": 1, "length": 1}),
        ("RepeatImageBatch", {"image": BATCH, "amount": 2}),
        ("ImageBatch", {"image1": BATCH, "image2": BATCH}),
        ("SaveAnimatedWEBP", {"images": BATCH, "filename_prefix": "a", "fps": 6.0, "lossless": True, "quality": 80,
                              "method": "default"}),
        ("SaveWEBM", {"images": BATCH, "filename_prefix": "a", "codec": "vp9", "fps": 24.0, "crf": 32.0}),
    ],
)  # fmt: skip
def test_what_reads_a_whole_batch_of_a_sampler_reads_an_image_of_each_seed(kind: str, inputs: dict[str, Any]) -> None:
    """A batch is as many workflows, but for nodes that read all of it: they have both runs in one."""
    each = requests(batch_of(2, kind, **inputs))
    saved = {"ImageFromBatch": 1, "RepeatImageBatch": 4, "ImageBatch": 4}.get(kind, 1)
    assert len(each) == saved
    for request in each:
        assert request.workflow is not None
        assert sorted(node.request.seed for node in request.workflow.samplings) == [5, 6], kind


def test_masks_of_a_batch_are_a_batch() -> None:
    graph = batch_of(3, "MaskToImage", mask=["mask", 0])
    graph["mask"] = node("ImageToMask", image=BATCH, channel="red")
    assert len(requests(graph)) == 3


@each_case("part", ["ConditioningCombine", "ConditioningSetAreaPercentage"])
def test_a_text_that_is_made_of_others_is_no_empty_text_for_a_part(part: str) -> None:
    """Texts for parts of the image are encoded by themselves: an average would have been an empty text."""
    graph = basic()
    texts = {"conditioning_to": ["positive", 0], "conditioning_from": ["negative", 0]}
    graph["average"] = node("ConditioningAverage", **texts, conditioning_to_strength=0.5)
    if part == "ConditioningCombine":
        graph["part"] = node(part, conditioning_1=["positive", 0], conditioning_2=["average", 0])
    else:
        graph["area"] = node(part, conditioning=["average", 0], width=0.5, height=1.0, x=0.0, y=0.0, strength=1.0)
        graph["part"] = node("ConditioningCombine", conditioning_1=["positive", 0], conditioning_2=["area", 0])
    graph["sampler"]["inputs"]["positive"] = ["part", 0]
    with pytest.raises(WorkflowRejected) as found:
        requests(graph)
    assert [error.node_id for error in found.value.errors] == ["part" if part == "ConditioningCombine" else "area"]
