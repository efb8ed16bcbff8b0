"""What of a workflow is left out, with a warning: nodes that nothing needs, and outputs without their images. Empty
latents beside others are zeros, and texts have the padding that a node sets."""

from __future__ import annotations

from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, TiffImagePlugin

from modelpool.actors.http.comfy.comfy_export import api_format
from modelpool.actors.http.comfy.comfy_graph import PoolNames
from modelpool.actors.http.comfy.comfy_images import is_animation_of
from modelpool.actors.http.comfy.comfy_workflow import outputs_of, requests_of
from modelpool.actors.http.comfy.node_errors import WorkflowRejected
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.catalog.registry.listings import FileNames
from tests.actors.http.comfy.comfy_examples import Graph, basic, node
from tests.actors.http.comfy.test_comfy_api import GRAPH
from tests.actors.http.comfy.test_comfy_graph import NAMES as GRAPH_NAMES
from tests.actors.http.comfy.test_comfy_graph import exported, made

NAMES = PoolNames({"shapes": "Stable Diffusion 1", "chroma": "Chroma"}, ["style"], None, FileNames())


def requests(graph: Graph) -> list[GenerateRequest]:
    return [one for output in outputs_of(graph, NAMES) for one in requests_of(output, NAMES, lambda name: None)]  # type: ignore[arg-type,return-value]


def warnings_of(graph: Graph) -> set[str]:
    return {each for output in outputs_of(graph, NAMES) for each in output.warnings}


def nodes_of(request: GenerateRequest) -> dict[str, Any]:
    assert request.workflow is not None
    return request.workflow.nodes


def test_an_unknown_node_that_is_linked_to_nothing_is_left_out_with_a_warning() -> None:
    """Before: 161 published workflows were refused for a node beside the graph, which only holds a name of files."""
    alone = requests(basic())
    graph = basic()
    graph["note"] = node("Load Text File", file_path="prefix")
    assert requests(graph) == alone
    expected = "node note (Load Text File) is left out: a node that is unknown, and linked to no other one"
    assert {output.warnings for output in outputs_of(graph, NAMES)} == {(expected,)}
    editor = {"nodes": [{"id": 1, "type": "Load Text File", "widgets_values": ["prefix"],
                         "outputs": [{"name": "STRING", "links": None}]}], "links": []}  # fmt: skip
    assert api_format(editor) == {"1": {"class_type": "Load Text File", "inputs": {}}}
    for linked in ({"image": ["saved", 0]}, {}):
        graph["note"] = node("Load Text File", **linked)
        if not linked:
            graph["more"] = node("ShowText|pysssss", text=["note", 0])
        with pytest.raises(WorkflowRejected, match="does not have these nodes: Load Text File"):
            outputs_of(graph, NAMES)


def test_a_link_to_a_node_that_the_file_does_not_have_is_left_out_with_a_warning() -> None:
    """As in the editor. The API format, which ComfyUI's server reads, refuses such a link wherever it is."""
    workflow = exported(GRAPH)
    sampler = next(each for each in workflow["nodes"] if each["type"] == "KSampler")
    sampler["inputs"].append({"name": "seed", "type": "INT", "link": 800, "widget": {"name": "seed"}})
    workflow["links"].append([800, 700, 0, sampler["id"], len(sampler["inputs"]) - 1, "INT"])
    link = f"node {sampler['id']} (KSampler): the link of seed to node 700"
    lost = f"{link} is left out: the workflow does not have this node"
    found = api_format(workflow)
    assert made(found) == made(GRAPH)
    assert {output.warnings for output in outputs_of(found, GRAPH_NAMES)} == {(lost,)}
    sampler["inputs"][0]["link"] = 801
    workflow["links"].append([801, 700, 0, sampler["id"], 0, "MODEL"])
    with pytest.raises(WorkflowRejected) as refused:
        outputs_of(api_format(workflow), GRAPH_NAMES)
    assert [error.kind for error in refused.value.errors] == ["required_input_missing"]
    for name in ("seed", "model"):
        graph = {node_id: {**each, "inputs": dict(each["inputs"])} for node_id, each in GRAPH.items()}
        graph[str(sampler["id"])]["inputs"][name] = ["700", 0]
        with pytest.raises(WorkflowRejected) as refused:
            outputs_of(graph, GRAPH_NAMES)
        assert {error.kind for error in refused.value.errors} == {"bad_linked_input"}


def test_a_loaded_image_with_several_frames_is_told_of(tmp_path: Path) -> None:
    """Before: the first frame of an animation was read without a word; ComfyUI makes a batch of all frames."""
    frames = [Image.new("RGB", (64, 64), colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / "still.png")
    for name in ("moving.gif", "moving.webp", "moving.png", "pages.tiff"):
        frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:])
    names = replace(NAMES, is_animation=is_animation_of(lambda name: Image.open(tmp_path / name)))
    graph = basic()
    graph["encoded"] = node("VAEEncode", pixels=["photo", 0], vae=["model", 2])
    graph["sampler"]["inputs"]["latent_image"] = ["encoded", 0]
    for path in sorted(tmp_path.iterdir()):
        graph["photo"] = node("LoadImage", image=path.name)
        told = f"node photo (LoadImage): image {path.name!r} has several frames: only the first is used"
        expected = () if path.name == "still.png" else (told,)
        assert [output.warnings for output in outputs_of(graph, names)] == [expected]


def test_a_thumbnail_in_a_tiff_is_no_frame(tmp_path: Path) -> None:
    """Found in a review: a photograph with a thumbnail had the warning of animations. ComfyUI leaves out pages of other
    sizes than the first one."""
    whole, other, small = (Image.new("RGB", size, "red") for size in ((64, 64), (64, 64), (16, 16)))
    copies = TiffImagePlugin.ImageFileDirectory_v2()
    copies[254] = 1
    reduced = other.copy()
    reduced.encoderinfo = {"tiffinfo": copies}
    whole.save(tmp_path / "photo.tiff", save_all=True, append_images=[small])
    whole.save(tmp_path / "copy.tiff", save_all=True, append_images=[reduced])
    whole.save(tmp_path / "pages.tiff", save_all=True, append_images=[small, other])
    is_animation = is_animation_of(lambda name: Image.open(tmp_path / f"{name}.tiff"))
    assert [is_animation(name) for name in ("photo", "copy", "pages")] == [False, False, True]


def test_a_mask_of_an_image_with_several_frames_is_the_one_that_comfyui_reads() -> None:
    """Found in a review: it had the warning of loaded images, though ComfyUI, too, reads the first frame of a mask."""
    names = replace(NAMES, is_animation=lambda name: True)
    graph = basic()
    graph["encoded"] = node("VAEEncode", pixels=["photo", 0], vae=["model", 2])
    graph["photo"] = node("LoadImage", image="moving.gif")
    graph["masked"] = node("SetLatentNoiseMask", samples=["encoded", 0], mask=["mask", 0])
    graph["mask"] = node("LoadImageMask", image="moving.gif", channel="red")
    graph["sampler"]["inputs"]["latent_image"] = ["masked", 0]
    told = "node photo (LoadImage): image 'moving.gif' has several frames: only the first is used"
    assert [output.warnings for output in outputs_of(graph, names)] == [(told,)]


def test_an_image_that_ends_in_its_second_frame_has_one_that_can_be_read() -> None:
    """Found in a review: Pillow raises an IndexError for such a GIF, though its first frame can be read."""
    frames = [Image.effect_noise((32, 32), spread).convert("RGB") for spread in (10, 20)]
    frames[0].save(file := BytesIO(), "GIF", save_all=True, append_images=frames[1:])
    whole = file.getvalue()
    is_animation = is_animation_of(lambda name: Image.open(BytesIO(whole[: int(name)])))
    assert is_animation(str(len(whole)))
    assert {is_animation(str(end)) for end in range(len(whole) // 4, len(whole))} == {False, True}


def test_unknown_nodes_of_a_workflow_without_an_output_are_named() -> None:
    with pytest.raises(WorkflowRejected, match="does not have these nodes: Fancy Save"):
        outputs_of({"1": node("Fancy Save", text="a")}, NAMES)


def test_an_output_without_its_image_is_left_out_with_a_warning_as_in_comfyui() -> None:
    alone = requests(basic())
    graph = basic()
    graph["more"] = node("ImageUpscaleWithModel", upscale_model=["up", 0])
    graph["up"] = node("UpscaleModelLoader", model_name="4x.pth")
    graph["large"] = node("SaveImage", images=["more", 0], filename_prefix="large")
    assert requests(graph) == alone
    (output,) = outputs_of(graph, NAMES)
    assert output.warnings == (
        "node large (SaveImage) is left out: node more (ImageUpscaleWithModel) has no link to image",
    )
    graph["more"]["inputs"]["picture"] = ["decoded", 0]  # a name that is misspelt
    with pytest.raises(WorkflowRejected) as refused:
        outputs_of(graph, NAMES)
    assert {error.node_id for error in refused.value.errors} == {"more"}
    only = {name: each for name, each in graph.items() if name in ("more", "up")}
    only["large"] = node("SaveImage", images=["more", 0], filename_prefix="large")
    with pytest.raises(WorkflowRejected) as refused:
        outputs_of(only, NAMES)
    assert [error.node_id for error in refused.value.errors] == ["more"]


def test_texts_that_only_an_output_without_its_image_needs_are_not_computed() -> None:
    """Before: the bound on computed texts also counted them, and refused the whole workflow."""
    alone = requests(basic())
    graph = basic()
    graph["t0"] = node("PrimitiveString", value="x" * 120_000)
    for place in range(40):
        graph[f"t{place + 1}"] = node("TextToUppercase", text=[f"t{place}", 0])
    graph["long"] = node("CLIPTextEncode", text=["t40", 0], clip=["model", 1])
    graph["other"] = node("KSampler", **graph["sampler"]["inputs"] | {"positive": ["long", 0]})
    graph["seen"] = node("VAEDecode", samples=["other", 0], vae=["model", 2])
    graph["large"] = node("SaveImage", images=["seen", 0], filename_prefix="large")
    with pytest.raises(WorkflowRejected, match="characters in the texts that nodes compute"):
        outputs_of(graph, NAMES)
    del graph["other"]["inputs"]["latent_image"]
    assert requests(graph) == alone
    assert warnings_of(graph) == {
        "node large (SaveImage) is left out: node other (KSampler) has no link to latent_image"
    }


def test_empty_latents_beside_others_are_zeros_of_their_size() -> None:
    """A part of empty latents is empty; beside latents of a sampler it is those times 0, in its own size."""
    graph = basic()
    blank = next(name for name, each in graph.items() if each["class_type"] == "EmptyLatentImage")
    sampler = next(name for name, each in graph.items() if each["class_type"] == "KSampler")
    decode = next(each for each in graph.values() if each["class_type"] == "VAEDecode")
    graph[blank]["inputs"] |= {"width": 128, "height": 256}
    graph["part"] = node("LatentCrop", samples=[blank, 0], width=80, height=96, x=64, y=0)
    graph["both"] = node("LatentComposite", samples_to=[sampler, 0], samples_from=["part", 0], x=8, y=8, feather=0)
    decode["inputs"]["samples"] = ["both", 0]
    (request,) = requests(graph)
    nodes = nodes_of(request)
    zeros = nodes[nodes["both"].inputs["source"]]
    assert (zeros.name, zeros.settings) == ("latent_multiply", {"factor": 0})
    sized = nodes[zeros.inputs["samples"]]
    # 128 pixels are 16 cells, of which a part that begins at the eighth has eight
    assert sized.settings == {"width": 64, "height": 96, "method": "nearest", "crop": False}
    assert sized.inputs == {"samples": sampler}
    graph[blank]["inputs"]["batch_size"] = 2
    graph["part"]["inputs"]["samples"] = ["other", 0]
    graph["other"] = node("EmptyLatentImage", width=128, height=128, batch_size=1)
    with pytest.raises(WorkflowRejected, match="not valid") as refused:
        requests(graph)
    assert "as many empty ones" in refused.value.errors[0].details


def test_padding_of_t5_is_the_one_that_a_node_sets() -> None:
    """Before: all but the model's own padding was refused. One word and least 3 tokens: see `encoded_padding`."""
    graph = basic()
    graph["model"]["inputs"]["ckpt_name"] = "chroma"
    texts = [name for name, each in graph.items() if each["class_type"] == "CLIPTextEncode"]
    graph["padding"] = node("T5TokenizerOptions", clip=["model", 1], min_padding=0, min_length=3)
    for name in texts:
        graph[name]["inputs"]["clip"] = ["padding", 0]
    (request,) = requests(graph)
    nodes = nodes_of(request)
    (sampling,) = (each for each in nodes.values() if each.kind == "sample")
    for side in ("positive", "negative"):
        padded = nodes[sampling.inputs[side]]
        assert (padded.name, padded.settings) == ("encoded_padding", {"least_padding": 0, "least_tokens": 3})
        assert nodes[padded.inputs["text"]].kind == "text"
    graph["padding"]["inputs"] |= {"min_padding": 1, "min_length": 0}  # as the pool reads texts of this family
    (request,) = requests(graph)
    assert request.workflow is None
    graph["model"]["inputs"]["ckpt_name"] = "shapes"
    with pytest.raises(Exception, match="expected a model of Chroma"):
        requests(graph)
