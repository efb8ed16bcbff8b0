"""The VAE encodes the centre of an image in whole cells of 8 pixels, as ComfyUI does: a graph equals the one that cuts
this part out itself, as one request and as a workflow.

Before: the image was scaled until it covered these cells, so that all of it was shifted and enlarged a little.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image

from modelpool.actors.http.comfy.comfy_graph import PoolNames
from modelpool.actors.http.comfy.comfy_images import in_whole_cells
from modelpool.actors.http.comfy.comfy_values import ImageCrop, crop_to_cells
from modelpool.actors.http.comfy.comfy_workflow import outputs_of, requests_of
from modelpool.actors.request.image_fields import Pixels
from modelpool.actors.request.requests import GenerateRequest
from tests.actors.http.comfy.comfy_examples import Graph, basic, node

WIDTH, HEIGHT = 77, 61
PHOTO = Image.fromarray(np.random.default_rng(1).integers(0, 256, (HEIGHT, WIDTH, 4), np.uint8), "RGBA")
NAMES = PoolNames({"shapes": "Stable Diffusion 1"}, [], image_size=lambda name: PHOTO.size)
PART = {"x": 2, "y": 2, "width": 72, "height": 56}


def request(graph: Graph) -> GenerateRequest:
    (found,) = [one for output in outputs_of(graph, NAMES) for one in requests_of(output, NAMES, lambda name: PHOTO)]
    return found


def graph_of(encoder: str, is_cut: bool, is_workflow: bool, made: bool = False, **inputs: Any) -> Graph:
    """Image to image. As a workflow, another sampler follows; `made`: a node of the workflow makes the image."""
    graph = basic(latent_image=["encoded", 0], denoise=0.5)
    graph["loaded"] = node("LoadImage", image="photo.png")
    graph["blurred"] = node("ImageBlur", image=["loaded", 0], blur_radius=1, sigma=1.0)
    image = ["blurred" if made else "loaded", 0]
    graph["cut"] = node("ImageCrop", image=image, **PART)
    pixels = ["cut", 0] if is_cut else image
    graph["encoded"] = node(encoder, pixels=pixels, vae=["model", 2], **inputs)
    if is_workflow:
        graph["second"] = node(
            "KSampler", **{**graph["sampler"]["inputs"], "latent_image": ["sampler", 0], "sampler_name": "heun"}
        )
        graph["decoded"]["inputs"]["samples"] = ["second", 0]
    return graph


def test_the_part_of_an_image_in_whole_cells() -> None:
    for size, expected in {
        (77, 61): ImageCrop(2, 2, 72, 56),
        (79, 64): ImageCrop(3, 0, 72, 64),
        (72, 56): None,
        (7, 64): None,
    }.items():
        assert crop_to_cells(*size) == expected, size
    assert in_whole_cells(PHOTO).size == (72, 56)
    assert in_whole_cells(PHOTO).getpixel((0, 0)) == PHOTO.getpixel((2, 2))


def test_a_graph_equals_the_one_that_cuts_the_image() -> None:
    for is_workflow in (False, True):
        found, cut = (request(graph_of("VAEEncode", is_cut, is_workflow)) for is_cut in (False, True))
        assert (found.workflow is not None) == is_workflow
        assert found == cut, is_workflow
    masked = {"mask": ["loaded", 1], "grow_mask_by": 0}
    found = request(graph_of("VAEEncodeForInpaint", False, False, **masked))
    mask_HW = 255 - np.asarray(PHOTO)[2:58, 2:74, 3]
    for read, expected in ((found.image, np.asarray(PHOTO)[2:58, 2:74, :3]), (found.mask, mask_HW)):
        assert isinstance(read, Pixels)
        assert np.array_equal(read.pixels, expected)


def test_an_image_that_a_node_makes_is_cut_by_a_node() -> None:
    found, cut = (request(graph_of("VAEEncode", is_cut, True, made=True)) for is_cut in (False, True))
    assert found.workflow is not None
    assert cut.workflow is not None
    renamed = {name.replace("encoded/cells", "cut"): each for name, each in found.workflow.nodes.items()}
    encoded = renamed["encoded"]
    renamed["encoded"] = encoded.model_copy(update={"inputs": {"image": "cut"}})
    assert renamed == dict(cut.workflow.nodes)
