"""Nodes of pipes ask the pool for the same as the nodes of ComfyUI that they stand for: loaders, settings and samplers
of easy-use and tinyterra. What they cannot do is refused by name, at the node of the user."""

from __future__ import annotations

from typing import Any

import pytest
from PIL import Image

from modelpool.actors.http.comfy.comfy_export import api_format
from modelpool.actors.http.comfy.comfy_graph import OutputNode, PoolNames
from modelpool.actors.http.comfy.comfy_problems import rejection
from modelpool.actors.http.comfy.comfy_progress import PromptNodes
from modelpool.actors.http.comfy.comfy_workflow import outputs_of, requests_of
from modelpool.actors.http.comfy.node_errors import WorkflowRejected
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.errors import UserError
from tests.actors.http.comfy.comfy_examples import Graph, node

NAMES = PoolNames({"shapes": "Stable Diffusion 1"}, ["light", "dark"], None, image_size=lambda name: (96, 64))
LOADER: dict[str, Any] = {"ckpt_name": "shapes", "clip_skip": -2, "positive": "a fox", "negative": "blurry"}
RUN: dict[str, Any] = {
    "steps": 4,
    "cfg": 3.0,
    "sampler_name": "euler",
    "scheduler": "karras",
    "denoise": 1.0,
    "seed": 7,
}


def photo(name: str) -> Image.Image:
    return Image.linear_gradient("L").resize((96, 64)).convert("RGBA")


def outputs(graph: Graph) -> tuple[OutputNode, ...]:
    return outputs_of(graph, NAMES)


def requests(graph: Graph) -> list[GenerateRequest]:
    return [one for output in outputs(graph) for one in requests_of(output, NAMES, photo)]


def warnings(graph: Graph) -> str:
    return "; ".join(text for output in outputs(graph) for text in output.warnings)


def plain(**run: Any) -> Graph:
    """The nodes of ComfyUI that the loader and the samplers stand for."""
    graph: Graph = {"model": node("CheckpointLoaderSimple", ckpt_name="shapes")}
    graph["clip"] = node("CLIPSetLastLayer", clip=["model", 1], stop_at_clip_layer=-2)
    for side, words in (("positive", "a fox"), ("negative", "blurry")):
        graph[side] = node("CLIPTextEncode", clip=["clip", 0], text=words)
    graph["blank"] = node("EmptyLatentImage", width=96, height=64, batch_size=1)
    links = {"model": ["model", 0], "latent_image": ["blank", 0]} | {
        side: [side, 0] for side in ("positive", "negative")
    }
    graph["sampler"] = node("KSampler", **{**links, **RUN, **run})
    graph["decoded"] = node("VAEDecode", samples=["sampler", 0], vae=["model", 2])
    graph["saved"] = node("PreviewImage", images=["decoded", 0])
    return graph


def easy(kind: str = "easy comfyLoader", loader: Any = None, **settings: Any) -> Graph:
    """A loader, the settings of a sampler, and the sampler, of easy-use."""
    graph: Graph = {"loader": node(kind, **{**LOADER, "resolution": "96 x 64", **(loader or {})})}
    graph["set"] = node("easy preSampling", pipe=["loader", 0], **{**RUN, **settings})
    graph["run"] = node("easy kSampler", pipe=["set", 0], image_output="Preview")
    return graph


def test_a_loader_settings_and_a_sampler_are_those_of_comfyui() -> None:
    wanted = requests(plain())
    own = {"resolution": "width x height (custom)", "empty_latent_width": 96, "empty_latent_height": 64}
    for kind in ("easy comfyLoader", "easy a1111Loader", "easy fullLoader"):
        assert requests(easy(kind)) == wanted, kind
        assert requests(easy(kind, own)) == wanted, kind
    for pipe in (["loader", 0], ["set", 0]):
        full = easy()
        full["run"] = node("easy fullkSampler", pipe=pipe, **RUN)
        assert requests(full) == wanted
    full["run"] = node("easy fullkSampler", pipe=["loader", 0], **RUN)
    assert requests(full) == wanted
    tinyterra: Graph = {
        "loader": node("ttN pipeLoader", **LOADER, seed=1, empty_latent_width=96, empty_latent_height=64)
    }
    tinyterra["run"] = node("ttN pipeKSampler", pipe=["loader", 0], **RUN)
    assert requests(tinyterra) == wanted
    assert not warnings(tinyterra)


def test_loras_and_vaes_of_a_loader_are_those_of_a_chain() -> None:
    graph = plain()
    graph["lora"] = node("LoraLoader", model=["model", 0], clip=["model", 1], lora_name="dark", strength_model=0.5,
                         strength_clip=0.25)  # fmt: skip
    graph["next"] = node("LoraLoader", model=["lora", 0], clip=["lora", 1], lora_name="light", strength_model=0.75,
                         strength_clip=1.0)  # fmt: skip
    graph["clip"]["inputs"]["clip"], graph["sampler"]["inputs"]["model"] = ["next", 1], ["next", 0]
    second = {"lora_name": "light", "lora_model_strength": 0.75, "lora_clip_strength": 1.0}
    stacked = easy(loader={**second, "optional_lora_stack": ["stack", 0]})
    stack = {"mode": "advanced", "num_loras": 1, "lora_1_name": "dark", "lora_1_strength": 1.0}
    stacked["stack"] = node(
        "easy loraStack", toggle=True, **stack, lora_1_model_strength=0.5, lora_1_clip_strength=0.25
    )
    assert requests(stacked) == requests(graph)
    vae = plain()
    vae["vae"] = node("VAELoader", vae_name="other.pt")
    vae["decoded"]["inputs"]["vae"] = ["vae", 0]
    assert warnings(easy(loader={"vae_name": "other.pt"})) == warnings(vae).replace("node decoded", "node run/+image")


def test_what_a_pipe_carries_is_replaced_and_given_out() -> None:
    graph = easy()
    graph["text"] = node("CLIPTextEncode", clip=["parts", 6], text="a hare")
    graph["parts"] = node("easy pipeOut", pipe=["loader", 0])
    graph["in"] = node("easy pipeIn", pipe=["loader", 0], pos=["text", 0])
    graph["set"]["inputs"]["pipe"] = ["in", 0]
    wanted = plain()
    wanted["positive"]["inputs"]["text"] = "a hare"
    assert requests(graph) == requests(wanted)
    encoded = easy(denoise=0.5, image_to_latent=["photo", 0])
    encoded["photo"] = node("LoadImage", image="photo")
    wanted = plain(denoise=0.5)
    wanted |= {"photo": node("LoadImage", image="photo")}
    wanted["blank"] = node("VAEEncode", pixels=["photo", 0], vae=["model", 2])
    assert requests(encoded) == requests(wanted)
    twice = easy()
    twice["again"] = node("easy preSampling", pipe=["run", 0], **{**RUN, "denoise": 0.5, "seed": 8})
    twice["last"] = node("easy kSampler", pipe=["again", 0], image_output="Save")
    wanted = plain()
    inputs = {**wanted["sampler"]["inputs"], "latent_image": ["sampler", 0], "denoise": 0.5, "seed": 8}
    wanted["second"] = node("KSampler", **inputs)
    wanted["pixels"] = node("VAEDecode", samples=["second", 0], vae=["model", 2])
    wanted["last"] = node("SaveImage", images=["pixels", 0])
    ends = [each.workflow is not None for each in requests(wanted)]
    assert [each.workflow is not None for each in requests(twice)] == ends


def test_images_are_shown_saved_or_hidden_as_the_sampler_says() -> None:
    shown = easy()
    assert [(each.node_id, each.is_preview) for each in outputs(shown)] == [("run", True)]
    for how in ("Save", "Hide/Save"):
        shown["run"]["inputs"]["image_output"] = how
        assert [(each.node_id, each.is_preview) for each in outputs(shown)] == [("run", False)]
    shown["run"]["inputs"]["image_output"] = "Hide"
    with pytest.raises(WorkflowRejected, match="the workflow hides all its images"):
        outputs(shown)
    shown["saved"] = node("SaveImage", images=["run", 1])
    assert [each.node_id for each in outputs(shown)] == ["saved"]
    assert requests(shown) == requests(plain())


def test_progress_and_errors_are_of_the_nodes_of_the_user() -> None:
    graph = easy()
    (output,) = outputs(graph)
    assert output.sampler_id == "run"
    assert PromptNodes.of(graph).of_part(output, "sample", "sample") == ("run",)
    (error,) = rejection(graph, [output], UserError("steps: too many")).errors
    assert error.node_id in graph
    graph["loader"]["inputs"]["ckpt_name"] = "missing"
    with pytest.raises(WorkflowRejected, match=r"node loader \(easy comfyLoader\): .*: ckpt_name: found 'missing'"):
        outputs(graph)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("loader", {"positive": "a {red|blue} fox"}), "positive: found choices"),
        (("loader", {"negative": "__animals__"}), "negative: found choices"),
        (("loader", {"positive": "a <lora:light:1>"}), "positive: found '<lora:light:1>'"),
        (("loader", {"resolution": "large"}), "resolution: found 'large', expected WIDTH x HEIGHT"),
        (("loader", {"optional_controlnet_stack": ["photo", 0]}), "optional_controlnet_stack: found a link"),
        (("run", {"image_output": "Sender"}), "image_output: found 'Sender', expected one of Hide, Preview"),
        (("run", {"pipe": ["loader", 0]}), "pipe: found none of steps, cfg"),
        (("set", {"image_to_latent": ["photo", 0], "latent": ["blank", 0]}), "image_to_latent, latent: found both"),
        (("run", {"model": ["photo", 0]}), r"node run \(easy kSampler\): linked types differ: model: found IMAGE"),
        (("set", {"scheduler": "align_your_steps"}), "KSampler of it.*scheduler: found 'align_your_steps'"),
    ],
)  # fmt: skip
def test_what_pipes_cannot_do_is_refused_by_name(change: tuple[str, dict[str, Any]], message: str) -> None:
    graph = {**easy(), "photo": node("LoadImage", image="photo"), "blank": plain()["blank"]}
    graph[change[0]]["inputs"] |= change[1]
    with pytest.raises(WorkflowRejected, match=message):
        outputs(graph)


def test_ids_of_parts_are_no_ids_of_nodes() -> None:
    graph = easy()
    graph["run/+latent"] = graph["loader"]
    with pytest.raises(WorkflowRejected, match=r"a node with the id 'run/\+latent', expected ids without '/\+'"):
        outputs(graph)


def test_texts_of_a_loader_of_another_program_are_read_as_by_comfyui() -> None:
    graph = easy("easy a1111Loader", {"positive": "a (red:1.2) fox"})
    assert "positive: weights in it are read as by ComfyUI, and not as by A1111" in warnings(graph)
    graph["loader"]["inputs"]["a1111_prompt_style"] = True
    with pytest.raises(WorkflowRejected, match="a1111_prompt_style: found true, expected false"):
        outputs(graph)
    full = easy("easy fullLoader", {"positive_weight_interpretation": "compel"})
    with pytest.raises(WorkflowRejected, match="weight_interpretation: found none and compel"):
        outputs(full)


def test_widgets_of_earlier_and_later_loaders() -> None:
    later = ["shapes.safetensors", "Default", "Baked VAE", -1, *("None", 1, 1) * 3, "a fox", "none", "comfy", "blurry",
             "none", "comfy", 96, 64, 1, 0, "fixed"]  # fmt: skip
    for values in (later, [later[0], *later[2:]]):
        flow = {"nodes": [{"id": 1, "type": "ttN pipeLoader", "widgets_values": values}], "links": []}
        found = api_format(flow)["1"]["inputs"]
        assert (found["vae_name"], found["positive"], found["empty_latent_height"]) == ("Baked VAE", "a fox", 64)
