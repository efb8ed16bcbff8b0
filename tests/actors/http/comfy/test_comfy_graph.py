"""Workflows become requests: which fields follow from which nodes, and refusals."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from PIL import Image

from modelpool.actors.http.comfy.comfy_export import api_format
from modelpool.actors.http.comfy.comfy_graph import PoolNames
from modelpool.actors.http.comfy.comfy_images import WorkflowImages
from modelpool.actors.http.comfy.comfy_node_types import NodeUnsupported
from modelpool.actors.http.comfy.comfy_nodes import NODE_TYPES
from modelpool.actors.http.comfy.comfy_workflow import outputs_of, requests_of
from modelpool.actors.http.comfy.node_errors import WorkflowRejected
from modelpool.actors.request.requests import GenerateRequest
from tests.actors.http.comfy.test_comfy_api import GRAPH, changed

NAMES = PoolNames({"shapes": "Stable Diffusion 1", "flux": "Flux dev", "xl": "Stable Diffusion XL"}, ["light"])


def read_image(name: str) -> Image.Image:
    return Image.new("RGBA", (64, 64), (255, 0, 0, 0 if name == "clear.png" else 255))


def made(graph: Any) -> list[GenerateRequest]:
    return [one for output in outputs_of(graph, NAMES) for one in requests_of(output, NAMES, read_image)]


def rejected(graph: Any) -> WorkflowRejected:
    with pytest.raises(WorkflowRejected) as found:
        outputs_of(graph, NAMES)
    return found.value


def test_a_batch_is_one_request_for_each_image() -> None:
    first, second = made(GRAPH)
    assert (first.model, first.prompt, first.steps, first.cfg, first.seed) == ("shapes", "a red circle", 8, 5.0, 11)
    assert (first.sampler, first.schedule, first.width, second.seed) == ("euler", "normal", 64, 12)
    assert [(lora.name, lora.strength) for lora in first.loras] == [("light", 0.0)]


def with_start(**inputs: Any) -> dict[str, Any]:
    graph = changed(latent_image=["10", 0], **inputs)
    graph["9"] = {"class_type": "LoadImage", "inputs": {"image": "clear.png"}}
    graph["10"] = {"class_type": "VAEEncode", "inputs": {"pixels": ["9", 0], "vae": ["1", 2]}}
    return graph


@pytest.mark.parametrize(("steps", "denoise"), [(20, 0.5), (20, 0.87), (7, 0.33), (30, 0.1), (20, 1.0), (3, 0.9)])
def test_a_start_image_runs_exactly_the_steps_of_the_node(steps: int, denoise: float) -> None:
    """ComfyUI runs `steps` steps at the end of a longer schedule; a request names the schedule and a share of it."""
    (request,) = made(with_start(steps=steps, denoise=denoise))
    assert request.steps - request.first_step() == steps
    assert request.image is not None


def test_an_advanced_sampler_starts_at_its_step() -> None:
    graph = with_start()
    inputs = graph["6"]["inputs"]
    del inputs["denoise"], inputs["seed"]
    inputs |= {"add_noise": "enable", "noise_seed": 3, "start_at_step": 5, "end_at_step": 10000}
    inputs |= {"return_with_leftover_noise": "disable"}
    graph["6"]["class_type"] = "KSamplerAdvanced"
    (request,) = made(graph)
    assert (request.seed, request.first_step(), request.steps) == (3, 5, 8)
    inputs["end_at_step"] = 6
    for leaves_noise in ("disable", "enable"):
        inputs["return_with_leftover_noise"] = leaves_noise
        node = made(graph)[0].workflow.nodes["6"]
        assert (node.first_step, node.last_step, node.keeps_noise) == (5, 6, leaves_noise == "enable")


def test_masks_mark_what_is_transparent() -> None:
    graph = with_start()
    graph["10"] = {
        "class_type": "VAEEncodeForInpaint",
        "inputs": {"pixels": ["9", 0], "vae": ["1", 2], "mask": ["9", 1], "grow_mask_by": 2},
    }
    (request,) = made(graph)
    assert int(request.mask.pixels.min()) == 255
    graph["11"] = {"class_type": "InvertMask", "inputs": {"mask": ["9", 1]}}
    graph["10"]["inputs"]["mask"] = ["11", 0]
    (request,) = made(graph)
    assert request.workflow is not None, "a request refuses a black mask; a workflow regenerates nothing"
    black = [node for node in request.workflow.nodes.values() if node.kind == "operation"]
    assert ("mask_solid", 0.0) in [(node.name, node.settings.get("level")) for node in black]


def test_a_second_sampler_on_scaled_latents_is_a_second_pass() -> None:
    graph = copy.deepcopy(GRAPH)
    graph["5"]["inputs"]["batch_size"] = 1
    graph["12"] = {
        "class_type": "LatentUpscaleBy",
        "inputs": {"samples": ["6", 0], "upscale_method": "bilinear", "scale_by": 2.0},
    }
    again = changed(latent_image=["12", 0], denoise=0.5, seed=9)["6"]
    graph["13"] = again
    graph["7"]["inputs"]["samples"] = ["13", 0]
    (request,) = made(graph)
    assert request.hires is not None
    assert (request.hires.scale, request.hires.steps, request.seed) == (2.0, 16, 11)
    again["inputs"]["cfg"] = 2.0
    (request,) = made(graph)
    nodes = request.workflow.nodes
    assert [nodes[name].request.cfg for name in ("6", "13")] == [5.0, 2.0]
    assert (nodes["13"].inputs["latent"], nodes["12"].inputs["samples"]) == ("12", "6")
    assert [nodes[name].request.seed for name in ("6", "13")] == [11, 9]


def test_all_uses_of_images_have_a_bound_in_pixels() -> None:
    """Each ControlNet reads and scales its image: a workflow of some KB took many GB."""
    graph = changed(positive=["13", 0])
    graph["9"] = {"class_type": "LoadImage", "inputs": {"image": "edges.png"}}
    scale = {"image": ["9", 0], "upscale_method": "nearest-exact", "width": 512, "height": 512, "crop": "disabled"}
    graph["10"] = {"class_type": "ImageScale", "inputs": scale}
    graph["11"] = {"class_type": "ControlNetLoader", "inputs": {"control_net_name": "canny.safetensors"}}
    apply = {"conditioning": ["3", 0], "control_net": ["11", 0], "image": ["10", 0], "strength": 1.0}
    graph["12"] = {"class_type": "ControlNetApply", "inputs": apply}
    graph["13"] = {"class_type": "ControlNetApply", "inputs": {**apply, "conditioning": ["12", 0]}}
    (output,) = outputs_of(graph, NAMES)
    one_use = 64 * 64 + 512 * 512
    assert requests_of(output, NAMES, WorkflowImages(read_image, 2 * one_use))
    with pytest.raises(NodeUnsupported, match="pixels in all uses"):
        requests_of(output, NAMES, WorkflowImages(read_image, 2 * one_use - 1))


def test_images_are_cropped_and_inverted_before_they_are_encoded() -> None:
    """A crop beyond the border has the part inside of it, as in ComfyUI."""
    graph = changed(latent_image=["10", 0], denoise=0.5)
    graph["9"] = {"class_type": "LoadImage", "inputs": {"image": "edges.png"}}
    crop = {"image": ["9", 0], "width": 48, "height": 32, "x": 32, "y": 16}
    graph["11"] = {"class_type": "ImageCrop", "inputs": crop}
    graph["12"] = {"class_type": "ImageInvert", "inputs": {"image": ["11", 0]}}
    graph["10"] = {"class_type": "VAEEncode", "inputs": {"pixels": ["12", 0], "vae": ["1", 2]}}
    pixels = made(graph)[0].image.pixels
    assert pixels.shape[:2] == (32, 32)
    assert tuple(pixels[0, 0, :3]) == (0, 255, 255)


def test_controlnets_guidance_and_layers_become_fields() -> None:
    graph = changed(cfg=1.0, positive=["16", 0], negative=["17", 0])
    graph["14"] = {"class_type": "ControlNetLoader", "inputs": {"control_net_name": "canny.safetensors"}}
    graph["9"] = {"class_type": "LoadImage", "inputs": {"image": "edges.png"}}
    graph["15"] = {
        "class_type": "ControlNetApplyAdvanced",
        "inputs": {
            "positive": ["3", 0], "negative": ["4", 0], "control_net": ["14", 0], "image": ["9", 0], "strength": 0.7,
            "start_percent": 0.0, "end_percent": 0.5,
        },
    }  # fmt: skip
    graph["16"] = {"class_type": "FluxGuidance", "inputs": {"conditioning": ["15", 0], "guidance": 3.5}}
    graph["17"] = {"class_type": "ConditioningZeroOut", "inputs": {"conditioning": ["4", 0]}}
    graph["18"] = {"class_type": "CLIPSetLastLayer", "inputs": {"clip": ["2", 1], "stop_at_clip_layer": -2}}
    graph["3"]["inputs"]["clip"] = ["18", 0]
    request = made(graph)[0]
    (control,) = request.controls
    assert (control.model, control.strength, control.end) == ("canny", 0.7, 0.5)
    assert (request.cfg, request.clip_skip) == (1.0, 1), "this model has no guidance as an input"
    (output,) = outputs_of(graph, NAMES)
    assert output.warnings == ("node 6: the guidance 3.5 is not read: model 'shapes' has no guidance as an input",)


@pytest.mark.parametrize(
    ("inputs", "kind"),
    [
        ({"model": ["99", 0]}, "bad_linked_input"),
        ({"model": ["1", 9]}, "bad_linked_input"),
        ({"model": ["1", 1]}, "return_type_mismatch"),
        ({"model": "shapes"}, "bad_linked_input"),
        ({"steps": "eight"}, "invalid_input_type"),
        ({"steps": [8]}, "invalid_input_type"),
        ({"steps": "0"}, "value_smaller_than_min"),
        ({"cfg": 500.0}, "value_bigger_than_max"),
        ({"denoise": 0.00001}, "unsupported_value"),
    ],
)
def test_wrong_inputs_are_named(inputs: dict[str, Any], kind: str) -> None:
    (error,) = rejected(changed(**inputs)).errors
    assert (error.node_id, error.kind) == ("6", kind)


def test_missing_inputs_cycles_and_empty_workflows_are_refused() -> None:
    graph = copy.deepcopy(GRAPH)
    del graph["6"]["inputs"]["seed"]
    assert rejected(graph).errors[0].kind == "required_input_missing"
    assert rejected(changed(latent_image=["13", 0]) | {"13": changed(latent_image=["6", 0])["6"]}).kind == (
        "dependency_cycle"
    )
    assert rejected({"1": GRAPH["1"]}).kind == "prompt_no_outputs"
    for wrong in (None, {}, [], {"1": 3}, {"1": {"class_type": 3}}, {"1": {"class_type": "KSampler", "inputs": 3}}):
        assert rejected(wrong).kind in ("no_prompt", "invalid_prompt")


def test_a_long_chain_of_nodes_needs_no_recursion() -> None:
    graph = copy.deepcopy(GRAPH)
    del graph["2"]
    source = "1"
    for place in range(900):
        node_id = f"lora{place}"
        inputs = {"model": [source, 0], "clip": [source, 1], "lora_name": "light"}
        graph[node_id] = {
            "class_type": "LoraLoader",
            "inputs": {**inputs, "strength_model": 1.0, "strength_clip": 1.0},
        }
        source = node_id
    for node_id, name, slot in (("3", "clip", 1), ("4", "clip", 1), ("6", "model", 0)):
        graph[node_id]["inputs"][name] = [source, slot]
    assert len(outputs_of(graph, NAMES)[0].latent.model.loras) == 900


def exported(graph: dict[str, Any]) -> dict[str, Any]:
    """The workflow as the editor exports it: values by position, links in a list, a note, a reroute."""
    nodes: list[dict[str, Any]] = [{"id": 900, "type": "Note", "widgets_values": ["a note"]}]
    links: list[list[Any]] = []
    for node_id, node in graph.items():
        kind = NODE_TYPES[node["class_type"]]
        values: list[Any] = []
        inputs: list[dict[str, Any]] = []
        for given in kind.inputs:
            value = node["inputs"].get(given.name)
            if isinstance(value, list):
                links.append([len(links), int(value[0]), value[1], int(node_id), len(inputs), given.type])
                inputs.append({"name": given.name, "type": given.type, "link": len(links) - 1})
            elif value is not None:
                values.append(value)
                if given.name == "seed":
                    values.append("randomize")
        nodes.append({"id": int(node_id), "type": kind.name, "inputs": inputs, "widgets_values": values})
    first = links[0]
    nodes.append({"id": 901, "type": "Reroute", "inputs": [{"name": "", "link": len(links)}]})
    links.append([len(links), first[1], first[2], 901, 0, first[5]])
    first[1], first[2] = 901, 0
    return {"nodes": nodes, "links": links}


def test_an_exported_workflow_means_the_same() -> None:
    assert made(api_format(exported(GRAPH))) == made(GRAPH)
    assert api_format(GRAPH) is GRAPH
    damaged = exported(GRAPH)
    damaged["links"] = []
    with pytest.raises(WorkflowRejected, match="damaged"):
        api_format(damaged)


def test_a_lora_has_the_strengths_of_its_node_on_model_and_clip() -> None:
    graph = changed()
    link = {"model": ["1", 0], "clip": ["1", 1], "lora_name": "light", "strength_model": 0.75, "strength_clip": 0.25}
    graph["20"] = {"class_type": "LoraLoader", "inputs": link}
    graph["21"] = {
        "class_type": "LoraLoaderModelOnly",
        "inputs": {"model": ["20", 0], "lora_name": "light", "strength_model": 0.5},
    }
    graph["6"]["inputs"]["model"] = ["21", 0]
    for node in ("3", "4"):
        graph[node]["inputs"]["clip"] = ["20", 1]
    strengths = [(lora.strength, lora.text_strength) for lora in made(graph)[0].loras]
    assert strengths == [(0.75, 0.25), (0.5, 0.0)]
    graph["4"]["inputs"]["clip"] = ["1", 1]
    nodes = made(graph)[0].workflow.nodes
    loras = [nodes[nodes["6"].inputs[name]].loras for name in ("positive", "negative")]
    assert [[lora.strength for lora in each] for each in loras] == [[0.25], []]
