"""Nodes with inputs that depend on a choice, or are as many as are linked: what they become, that sizes are known
before anything is made, and that what they cannot do is refused by its setting."""

from __future__ import annotations

from typing import Any

import pytest
from PIL import Image

from modelpool.actors.http.comfy.comfy_graph import PoolNames
from modelpool.actors.http.comfy.comfy_resize_nodes import RESIZE_TYPES
from modelpool.actors.http.comfy.comfy_sizes import SIZE_RULES
from modelpool.actors.http.comfy.comfy_workflow import outputs_of, requests_of
from modelpool.actors.http.comfy.node_errors import WorkflowRejected
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.request.workflow_fields import OperationNode
from modelpool.pool.inference.operations.operate import operation_named
from modelpool.pool.inference.operations.operation import Size
from tests.actors.http.comfy.comfy_examples import Graph, basic, node

NAMES = PoolNames({"shapes": "Stable Diffusion 1"}, [], image_size=lambda name: (96, 64))
#: the settings of each way to resize, and the operation that it is
SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "scale dimensions": ({"width": 40, "height": 30, "crop": "center"}, "image_scale"),
    "scale by multiplier": ({"multiplier": 1.5}, "image_scale_by"),
    "scale longer dimension": ({"longer_size": 50}, "image_scale_to_longest"),
    "scale shorter dimension": ({"shorter_size": 50}, "image_scale_to_shortest"),
    "scale width": ({"width": 40}, "image_scale"),
    "scale height": ({"height": 30}, "image_scale"),
    "scale total pixels": ({"megapixels": 0.01}, "image_scale_to_pixels"),
    "match size": ({"match": ["other", 0], "crop": "disabled"}, "image_scale_like"),
    "scale to multiple": ({"multiple": 24}, "image_scale_to_multiple"),
}


def requests(graph: Graph) -> list[GenerateRequest]:
    read = lambda name: Image.new("RGBA", (96, 64), (255, 0, 0, 128))  # noqa: E731
    return [one for output in outputs_of(graph, NAMES) for one in requests_of(output, NAMES, read)]


def resized(kind: str, source: str = "decoded", slot: int = 0) -> Graph:
    """A workflow that saves an image after a resize."""
    graph = basic()
    settings = {f"resize_type.{name}": value for name, value in SETTINGS[kind][0].items()}
    graph["loaded"] = node("LoadImage", image="a.png")
    graph["other"] = node("EmptyImage", width=24, height=56, batch_size=1, color=0)
    graph["subject"] = node(
        "ResizeImageMaskNode", input=[source, slot], resize_type=kind, scale_method="area", **settings
    )
    graph["saved"]["inputs"]["images"] = ["subject", 0]
    return graph


def test_every_way_to_resize_is_its_operation_with_a_size_that_is_known_before() -> None:
    assert set(SETTINGS) == set(RESIZE_TYPES)
    for kind, (settings, operation) in SETTINGS.items():
        (request,) = requests(resized(kind))
        assert request.workflow is not None
        made = request.workflow.nodes["subject"]
        assert isinstance(made, OperationNode)
        assert made.name == operation, kind
        found = operation_named(made.name)
        sizes = {"image": Size(96, 64), "like": Size(24, 56)}
        wanted = found.size_of(found.params_of(made.settings), {name: sizes[name] for name in found.inputs})
        written = {f"resize_type.{name}": value for name, value in settings.items()} | {"resize_type": kind}
        known = SIZE_RULES["ResizeImageMaskNode"](written, {"input": (96, 64), "resize_type.match": (24, 56)})
        assert known == (wanted.width, wanted.height), kind


def test_a_mask_is_resized_as_a_grey_image_and_stays_a_mask() -> None:
    for source, slot in (("loaded", 1), ("drawn", 0)):
        graph = resized("scale by multiplier", source, slot)
        graph["drawn"] = node("ImageToMask", image=["decoded", 0], channel="red")
        graph["saved"]["inputs"]["images"] = ["shown", 0]
        graph["shown"] = node("MaskToImage", mask=["subject", 0])
        (request,) = requests(graph)
        assert request.workflow is not None
        names = [each.name for each in request.workflow.nodes.values() if isinstance(each, OperationNode)]
        assert sorted(names)[-3:] == ["mask_from_image", "mask_to_image", "mask_to_image"], source
        assert "image_scale_by" in names
        graph["saved"]["inputs"]["images"] = ["subject", 0]
        with pytest.raises(WorkflowRejected) as found:
            outputs_of(graph, NAMES)
        assert "found MASK, expected IMAGE" in str(found.value.as_json()["node_errors"]["saved"]), source


def test_an_image_of_the_user_stays_in_a_request_without_a_workflow() -> None:
    graph = resized("scale dimensions", "loaded")
    graph["encoded"] = node("VAEEncode", pixels=["subject", 0], vae=["model", 2])
    graph["sampler"]["inputs"] |= {"latent_image": ["encoded", 0], "denoise": 0.5}
    graph["saved"]["inputs"]["images"] = ["decoded", 0]
    (request,) = requests(graph)
    assert request.workflow is None
    assert request.image.pixels.shape == (24, 40, 3), "30 pixels are no whole cells"


def test_a_latent_is_no_image() -> None:
    with pytest.raises(WorkflowRejected) as found:
        outputs_of(resized("scale width", "sampler"), NAMES)
    assert "input: expected an image or a mask" in str(found.value.as_json()["node_errors"]["subject"])


def test_batches_of_as_many_images_masks_and_latents_as_are_linked() -> None:
    graph = basic()
    graph["other"] = node("EmptyImage", width=24, height=56, batch_size=1, color=0)
    inputs = {"images.image0": ["decoded", 0], "images.image2": ["other", 0], "images.image5": ["other", 0]}
    graph["subject"] = node("BatchImagesNode", **inputs)
    graph["saved"]["inputs"]["images"] = ["subject", 0]
    assert len(requests(graph)) == 3
    masks = {f"mask{place}": node("SolidMask", value=place / 3, width=8, height=8) for place in range(3)}
    graph |= masks
    graph["subject"] = node("BatchMasksNode", **{f"masks.{name}": [name, 0] for name in masks})
    graph["shown"] = node("MaskToImage", mask=["subject", 0])
    graph["saved"]["inputs"]["images"] = ["shown", 0]
    each = requests(graph)
    assert len(each) == 3
    graph["again"] = node("LatentFlip", samples=["sampler", 0], flip_method="y-axis: horizontally")
    graph["subject"] = node("BatchLatentsNode", **{"latents.latent0": ["sampler", 0], "latents.latent1": ["again", 0]})
    graph["decoded"]["inputs"]["samples"] = ["subject", 0]
    graph["saved"]["inputs"]["images"] = ["decoded", 0]
    assert len(requests(graph)) == 2
    graph["subject"] = node("BatchLatentsNode")
    with pytest.raises(WorkflowRejected, match="not valid"):
        outputs_of(graph, NAMES)


def test_files_of_an_image_are_those_that_the_pool_writes() -> None:
    graph = basic()
    png = {"format": "png", "format.bit_depth": "8-bit", "format.input_color_space": "sRGB"}
    graph["saved"] = node("SaveImageAdvanced", images=["decoded", 0], filename_prefix="a", **png)
    (request,) = requests(graph)
    assert request == requests(basic())[0], "the usual file"
    avif = {"format": "avif", "format.bit_depth": "auto", "format.input_color_space": "sRGB", "format.crf": 20}
    graph["saved"]["inputs"] |= {**avif, "format.save_mode": "still images"}
    (output,) = outputs_of(graph, NAMES)
    assert "crf" in output.warnings[0]
    (request,) = requests(graph)
    assert (request.workflow, request.format) == (None, "avif")
    for name, value in (("format.bit_depth", "10-bit YUV420"), ("format.save_mode", "animated"), ("format", "exr")):
        changed = {**graph, "saved": node("SaveImageAdvanced", **{**graph["saved"]["inputs"], name: value})}
        with pytest.raises(WorkflowRejected) as found:
            outputs_of(changed, NAMES)
        assert "images of the pool have 8 bits" in str(found.value.as_json()["node_errors"]["saved"]), name


def test_sides_of_a_length_are_their_operations() -> None:
    for side in ("longer", "shorter"):
        graph = basic()
        name = f"ResizeImagesBy{side.capitalize()}Edge"
        graph["subject"] = node(name, images=["decoded", 0], **{f"{side}_edge": 50})
        graph["saved"]["inputs"]["images"] = ["subject", 0]
        (request,) = requests(graph)
        assert request.workflow is not None
        made = request.workflow.nodes["subject"]
        assert isinstance(made, OperationNode)
        length = {"longer": "longest", "shorter": "shortest"}[side]
        assert (made.name, made.settings[length]) == (f"image_scale_to_{length}", 50)
