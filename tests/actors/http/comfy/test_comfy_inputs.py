"""Inputs of ComfyUI's nodes: how written values are converted, which may be missing, and that every refusal names its
node. The tests go over all nodes and collect all problems."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Iterable, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image, ImageFilter

from modelpool.actors.config.serve_section import ServeSection
from modelpool.actors.http.application import application
from modelpool.actors.http.comfy.comfy_export import api_format
from modelpool.actors.http.comfy.comfy_graph import PoolNames
from modelpool.actors.http.comfy.comfy_images import WorkflowImages, read_mask
from modelpool.actors.http.comfy.comfy_node_types import (
    ANY,
    CONTROLNETS,
    IMAGES,
    LORAS,
    MODELS,
    SAMPLER_NAMES,
    SCHEDULE_NAMES,
    STYLES,
    UPSCALERS,
    WIDGET_TYPES,
    NodeInput,
    NodeType,
    converted,
)
from modelpool.actors.http.comfy.comfy_nodes import NODE_TYPES
from modelpool.actors.http.comfy.comfy_problems import rejection
from modelpool.actors.http.comfy.comfy_values import ImageFile, MaskFile
from modelpool.actors.http.comfy.comfy_workflow import outputs_of, requests_of
from modelpool.actors.http.comfy.node_errors import WorkflowRejected
from modelpool.actors.request.control_video_fields import VideoFile
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.catalog.registry.listings import FileNames
from modelpool.pool.inference.controlnets.controlnet_kinds import UNION_MODES
from modelpool.pool.values.core.errors import UnusableField, UserError, unknown_name, unusable_field
from tests.actors.http.asgi import RefusingPool, call
from tests.actors.http.comfy import comfy_examples as examples
from tests.tiers import InRotation

FILES = FileNames(controlnets=("canny",), upscalers=("4x",), image_prompts=("redux",), embeddings=("style",))
CLIP = VideoFile("a.mp4", 64, 64, 9, 8.0, False)
NAMES = PoolNames(
    {"shapes": "Stable Diffusion 1", "flux": "Flux dev"}, ["light"], ("a.png", "clear.png"), FILES,
    video_facts=lambda name: CLIP,
)  # fmt: skip
#: names that exist, by the list of an input
KNOWN = {
    MODELS: "shapes", LORAS: "light", IMAGES: "a.png", SAMPLER_NAMES: "euler", SCHEDULE_NAMES: "normal",
    CONTROLNETS: "canny", UPSCALERS: "4x", STYLES: "redux",
}  # fmt: skip
#: a node and its output for each type of link, so that any node gets its inputs
PROVIDERS = {
    "MODEL": ("CheckpointLoaderSimple", 0), "CLIP": ("CheckpointLoaderSimple", 1), "VAE": ("CheckpointLoaderSimple", 2),
    "CONDITIONING": ("CLIPTextEncode", 0), "LATENT": ("EmptyLatentImage", 0), "IMAGE": ("LoadImage", 0),
    "MASK": ("LoadImage", 1), "CONTROL_NET": ("ControlNetLoader", 0), "UPSCALE_MODEL": ("UpscaleModelLoader", 0),
    "GLIGEN": ("GLIGENLoader", 0), "STYLE_MODEL": ("StyleModelLoader", 0), "CLIP_VISION": ("CLIPVisionLoader", 0),
    "CLIP_VISION_OUTPUT": ("CLIPVisionEncode", 0), "NOISE": ("RandomNoise", 0), "GUIDER": ("BasicGuider", 0),
    "SAMPLER": ("KSamplerSelect", 0), "SIGMAS": ("BasicScheduler", 0), ANY: ("PrimitiveFloat", 0),
    "VIDEO": ("CreateVideo", 0), "AUDIO": ("VAEDecodeAudio", 0),
    "LATENT_OPERATION": ("LatentOperationTonemapReinhard", 0), "MODEL_PATCH": ("ModelPatchLoader", 0),
    "IC_LORA_PARAMETERS": ("GetICLoRAParameters", 0),
    "LORA_STACK": ("CR LoRA Stack", 0), "IPADAPTER": ("IPAdapterModelLoader", 0), "BASIC_PIPE": ("ToBasicPipe", 0),
    "PIPE_LINE": ("any PIPE_LINE", 0), "RGTHREE_CONTEXT": ("any RGTHREE_CONTEXT", 0),
    "WAN_CAMERA_EMBEDDING": ("WanCameraEmbedding", 0), "TIMESTEPS_RANGE": ("ConditioningTimestepsRange", 0),
    "LATENT_UPSCALE_MODEL": ("LatentUpscaleModelLoader", 0), "TRACKS": ("GenerateTracks", 0),
    "CONTROL_NET_STACK": ("any CONTROL_NET_STACK", 0),
    "BUS": ("any BUS", 0), "VHS_VIDEOINFO": ("any VHS_VIDEOINFO", 3),
}  # fmt: skip
#: a node and its input that lead from a type of link to an image
CONSUMERS = {
    "MODEL": ("KSampler", "model"), "CLIP": ("CLIPTextEncode", "clip"), "VAE": ("VAEDecode", "vae"),
    "CONDITIONING": ("KSampler", "positive"), "LATENT": ("KSampler", "latent_image"), "IMAGE": ("VAEEncode", "pixels"),
    "MASK": ("SetLatentNoiseMask", "mask"), "CONTROL_NET": ("ControlNetApply", "control_net"),
    "UPSCALE_MODEL": ("ImageUpscaleWithModel", "upscale_model"), "STYLE_MODEL": ("StyleModelApply", "style_model"),
    "GLIGEN": ("GLIGENTextBoxApply", "gligen_textbox_model"),
    "CLIP_VISION": ("CLIPVisionEncode", "clip_vision"), "CLIP_VISION_OUTPUT": ("StyleModelApply", "clip_vision_output"),
    "NOISE": ("SamplerCustomAdvanced", "noise"), "GUIDER": ("SamplerCustomAdvanced", "guider"),
    "SAMPLER": ("SamplerCustomAdvanced", "sampler"), "SIGMAS": ("SamplerCustomAdvanced", "sigmas"),
    "INT": ("KSampler", "steps"), "FLOAT": ("KSampler", "cfg"), "STRING": ("CLIPTextEncode", "text"),
    "BOOLEAN": ("SamplerCustom", "add_noise"), ANY: ("KSampler", "cfg"), "VIDEO": ("SaveVideo", "video"),
    "AUDIO": ("SaveAudio", "audio"), "LATENT_OPERATION": ("LatentApplyOperationCFG", "operation"),
    "MODEL_PATCH": ("ZImageFunControlnet", "model_patch"), "LORA_STACK": ("CR Apply LoRA Stack", "lora_stack"),
    "IPADAPTER": ("IPAdapter", "ipadapter"), "METADATA": ("Image Saver Simple", "metadata"),
    "BASIC_PIPE": ("FromBasicPipe", "basic_pipe"), "PIPE_LINE": ("easy pipeOut", "pipe"),
    "TIMESTEPS_RANGE": ("ConditioningSetProperties", "timesteps"),
    "WAN_CAMERA_EMBEDDING": ("WanCameraImageToVideo", "camera_conditions"),
    "LATENT_UPSCALE_MODEL": ("LTXVLatentUpsampler", "upscale_model"), "TRACKS": ("WanMoveTrackToVideo", "tracks"),
    "IC_LORA_PARAMETERS": ("LTXVAddGuide", "iclora_parameters"), "BUS": ("Bus Node", "bus"),
    "CONTROL_NET_STACK": ("CR Apply Multi-ControlNet", "controlnet_stack"),
    "VHS_VIDEOINFO": ("VHS_VideoInfo", "video_info"),
}  # fmt: skip
EMPTY_PIPES = {
    "any PIPE_LINE": "easy pipeIn", "any RGTHREE_CONTEXT": "Context (rgthree)", "any BUS": "Bus Node",
    "any CONTROL_NET_STACK": "CR Multi-ControlNet Stack", "any VHS_VIDEOINFO": "VHS_LoadVideo",
}  # fmt: skip
#: types of which a node gives one, and what it carries behind it
PIPES = ("BASIC_PIPE", "PIPE_LINE", "RGTHREE_CONTEXT", "BUS", "CONTROL_NET_STACK", "VHS_VIDEOINFO")
#: nodes that make something: others show it in the editor, and are not read
MAKING = [kind for kind in NODE_TYPES.values() if kind.outputs or kind.is_output]
#: the node under test
SUBJECT = "subject"
NAME = attrgetter("name")


def value_of(given: NodeInput) -> Any:
    """A value that an input accepts."""
    if isinstance(given.choices, str) and given.choices in KNOWN:
        return KNOWN[given.choices]
    return given.default if given.default is not None else "a text"


def filled(graph: dict[str, Any], node_id: str, kind: NodeType, **links: Any) -> None:
    """Add a node with all its inputs, and what provides them."""
    graph[node_id] = examples.node(kind.name)
    inputs = graph[node_id]["inputs"]
    for given in kind.inputs:
        if given.name in links:
            inputs[given.name] = links[given.name]
        elif given.type in WIDGET_TYPES:
            inputs[given.name] = value_of(given)
        else:
            name, slot = PROVIDERS[given.type]
            provider = f"any {name}"
            if provider == node_id:  # a stack may be made of another one
                continue
            if name in EMPTY_PIPES:  # a pipe may be made of another one
                graph[provider] = examples.node(EMPTY_PIPES[name])
            elif provider not in graph:
                filled(graph, provider, NODE_TYPES[name])
            inputs[given.name] = [provider, slot]


def graph_with(kind: NodeType) -> dict[str, Any]:
    """A workflow in which a node leads to an output; it need not be valid otherwise."""
    graph: dict[str, Any] = {}
    filled(graph, SUBJECT, kind)
    source, outputs, used = SUBJECT, kind.outputs, 0
    while outputs:
        slot = 1 if outputs[0] in PIPES and len(outputs) > 1 else 0
        name, given = ("SaveImage", "images") if outputs[slot] == "IMAGE" and used else CONSUMERS[outputs[slot]]
        if (name, outputs[slot]) == ("KSampler", "LATENT") and used:
            name, given = "VAEDecode", "samples"
        used += 1
        filled(graph, f"after {used}", NODE_TYPES[name], **{given: [source, slot]})
        source, outputs = f"after {used}", () if NODE_TYPES[name].is_output else NODE_TYPES[name].outputs
        if name == "KSampler":
            filled(graph, "decoded", NODE_TYPES["VAEDecode"], samples=[source, 0])
            filled(graph, "saved", NODE_TYPES["SaveImage"], images=["decoded", 0])
            break
    return graph


def with_subject(graph: dict[str, Any], inputs: dict[str, Any]) -> dict[str, Any]:
    """The workflow with other inputs of the node under test."""
    return {**graph, SUBJECT: {**graph[SUBJECT], "inputs": inputs}}


def broken_values(given: NodeInput, valid: Any) -> Iterable[Any]:
    """Values that an input does not accept, from one that it does."""
    if given.type == ANY:
        return (["nowhere", 0], [valid[0], 99])
    if given.type not in WIDGET_TYPES:
        return ("a text", ["nowhere", 0], [valid[0], 99])
    odd: list[Any] = [{"a": 1}, []]
    match given.type:
        case "INT":
            odd += ["many", given.most + 1, str(given.least - 1), 1e400, float("nan")]
        case "FLOAT":
            odd += ["much", given.most * 2 + 1, "nan", "inf", str(given.least - 1e19)]
        case "BOOLEAN":
            odd += ["false", "no"]
        case "COMBO":
            odd += ["nothing like it", 3]
    return odd


def nodes_of(graph: Any) -> Mapping[str, Any]:
    """The nodes of the workflow of the pool that a graph becomes."""
    (output,) = outputs_of(graph, NAMES)
    (request,) = requests_of(output, NAMES, lambda name: Image.new("RGB", (64, 64)))
    assert request.workflow is not None
    return dict(request.workflow.nodes)


def errors_of(graph: Any, names: PoolNames = NAMES) -> Mapping[str, Any]:
    """The `node_errors` of a workflow that is refused; {} for one that is not."""
    try:
        outputs = outputs_of(graph, names)
        for output in outputs:
            try:
                requests_of(output, names, lambda name: Image.new("RGBA", (64, 64)))
            except UserError as problem:
                raise rejection(graph, [output], problem) from None
    except WorkflowRejected as refused:
        return refused.as_json()["node_errors"]
    return {}


def test_every_broken_input_of_every_node_is_refused_by_the_id_and_the_class_of_its_node(
    in_rotation: InRotation,
) -> None:
    wrong = []
    for kind in in_rotation(MAKING, NAME):
        graph = graph_with(kind)
        for given in kind.inputs:
            for value in broken_values(given, graph[SUBJECT]["inputs"][given.name]):
                changed = with_subject(graph, {**graph[SUBJECT]["inputs"], given.name: value})
                found = errors_of(changed).get(SUBJECT, {"class_type": "", "errors": []})
                named = [error["extra_info"].get("input_name") for error in found["errors"]]
                if found["class_type"] != kind.name or given.name not in named:
                    wrong.append((kind.name, given.name, value, found))
    assert not wrong, wrong[:5]


def test_a_missing_input_has_its_default_or_is_refused_by_its_node(in_rotation: InRotation) -> None:
    """Next to a name that the node does not have, a missing setting is refused: it may be misspelt."""
    wrong = []
    for kind in in_rotation(MAKING, NAME):
        graph = graph_with(kind)
        known = errors_of(graph)
        for given in kind.inputs:
            others = {name: value for name, value in graph[SUBJECT]["inputs"].items() if name != given.name}
            for more in ({"control_after_generate": "randomize"}, {"misspelt": 3}):
                changed = with_subject(graph, {**others, **more})
                errors = errors_of(changed).get(SUBJECT, {"errors": []})["errors"]
                kinds = [each["type"] for each in errors if each["extra_info"].get("input_name") == given.name]
                is_refused = not given.may_be_missing or (given.is_required and "misspelt" in more)
                same = kinds == ["required_input_missing"] if is_refused else (SUBJECT in known or not kinds)
                if not same:
                    wrong.append((kind.name, given.name, more, kinds))
    assert not wrong, wrong[:5]
    needed = {given.name for kind in NODE_TYPES.values() for given in kind.inputs if given.type in WIDGET_TYPES}
    needed &= {given.name for kind in NODE_TYPES.values() for given in kind.inputs if not given.may_be_missing}
    assert {"seed", "noise_seed", "text", "ckpt_name", "sampler_name", "scheduler"} <= needed
    assert not {"weight_dtype", "type", "device", "strength_type", "crop", "steps", "denoise"} & needed


def test_null_inputs_are_missing(in_rotation: InRotation) -> None:
    wrong = []
    for kind in in_rotation(NODE_TYPES.values(), NAME):
        graph = graph_with(kind)
        for given in kind.inputs:
            others = {name: value for name, value in graph[SUBJECT]["inputs"].items() if name != given.name}
            null, gone = ({**others, given.name: None}, others)
            if errors_of(with_subject(graph, null)) != errors_of(with_subject(graph, gone)):
                wrong.append((kind.name, given.name))
    assert not wrong
    graph = examples.basic()
    graph["saved"]["inputs"] = None
    assert set(errors_of(graph)) == {"saved"}


def test_written_values_are_converted_as_in_comfyui() -> None:
    whole, number = NodeInput("x", "INT", 0, -100, 100), NodeInput("x", "FLOAT", 0.0, -100.0, 100.0)
    truth, text = NodeInput("x", "BOOLEAN", False), NodeInput("x", "STRING", "")
    for given, value, expected in (
        (whole, "5", 5), (whole, " 5 ", 5), (whole, 3.0, 3), (whole, 3.7, 3), (whole, True, 1), (whole, "-7", -7),
        (number, "5.5", 5.5), (number, 5, 5.0), (number, "1e1", 10.0), (number, True, 1.0),
        (truth, "true", True), (truth, "True", True), (truth, 1, True), (truth, 0, False), (truth, 0.0, False),
        (text, 5, "5"), (text, 5.5, "5.5"), (text, True, "True"),
    ):  # fmt: skip
        found = converted(given, value)
        assert (found, type(found)) == (expected, type(expected)), (given.type, value)
    for given, value in (
        (whole, "5.5"), (whole, ""), (whole, "five"), (whole, float("inf")), (whole, {}), (whole, "9" * 5000),
        (number, "x"), (number, "nan"), (number, 10**400), (truth, "false"), (truth, "0"), (truth, []), (text, {}),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"\w"):
            converted(given, value)


def made(graph: Any, names: PoolNames = NAMES) -> list[GenerateRequest]:
    found = outputs_of(graph, names)
    return [one for output in found for one in requests_of(output, names, lambda name: Image.new("RGBA", (64, 64)))]


def test_a_workflow_with_texts_for_its_numbers_means_the_same() -> None:
    """Every number of every example as a text, and as a float if it is whole; also behind a primitive node."""
    graphs = (
        examples.basic(), examples.flux(), examples.areas(), examples.outpainting(), examples.two_samplers("shapes"),
        examples.upscaled(), examples.with_image(denoise=0.5),
    )  # fmt: skip
    names = PoolNames(dict.fromkeys(("shapes", "xl"), "Stable Diffusion 1") | {"flux": "Flux dev"}, [], None)
    wrong = []
    for graph in graphs:
        for node in graph.values():  # two_samplers has models of its own
            if node["class_type"] == "CheckpointLoaderSimple":
                node["inputs"]["ckpt_name"] = "shapes"
        expected = made(graph, names)
        for write in (str, lambda value: float(value) if float(value) == value else value):
            changed = copy.deepcopy(graph)
            for node in changed.values():
                for name, value in node["inputs"].items():
                    if isinstance(value, int | float) and not isinstance(value, bool):
                        node["inputs"][name] = write(value)
            if made(changed, names) != expected:
                wrong.append(changed)
    assert not wrong
    graph = examples.basic(steps=["many", 0])
    graph["many"] = examples.node("PrimitiveInt", value="6")
    assert made(graph)[0].steps == 6


def test_object_info_lists_the_choices_of_every_input_with_choices(tmp_path: Path) -> None:
    """Clients take the list for the names of files, also if there are none; a default is one of them."""

    class EmptyPool(RefusingPool):
        def models(self) -> Any:
            return ()

        def loras(self) -> Any:
            return ()

        def file_names(self) -> FileNames:
            return FileNames()

    async def described(pool: RefusingPool) -> Any:
        return (await call(application(pool, ServeSection(), tmp_path), "GET", "/object_info")).json

    for pool in (RefusingPool(), EmptyPool()):
        info = asyncio.run(described(pool))
        wrong = []
        for name, kind in NODE_TYPES.items():
            shown = info[name]["input"]["required"] | info[name]["input"]["optional"]
            for given in kind.inputs:
                form, *settings = shown[given.name]
                is_list = isinstance(form, list) and all(isinstance(each, str) for each in form)
                chosen = (
                    given.type == "COMBO"
                    or given.choices
                    or (given.name.endswith("_name") and given.name != "token_name" and given.type != ANY)
                )
                default = settings[0].get("default") if settings else None
                if bool(chosen) != is_list or (is_list and default is not None and default not in form):
                    wrong.append((name, given.name, form))
        assert not wrong
        assert info["VAELoader"]["input"]["required"]["vae_name"] == [[], {}]
        assert info["UNETLoader"]["input"]["required"]["weight_dtype"][1] == {"default": "default"}
    assert info["CheckpointLoaderSimple"]["input"]["required"]["ckpt_name"][0] == []


class Refusing(RefusingPool):
    """Refuses every request with one error."""

    def __init__(self, problem: UserError) -> None:
        self.problem = problem

    def submit(self, requests: Iterable[GenerateRequest], **_: Any) -> Any:
        assert all(isinstance(request, GenerateRequest) for request in requests)
        raise self.problem


def everything() -> dict[str, Any]:
    """A workflow with the node of every field of a request that nodes set."""
    graph = examples.basic(model=["rescaled", 0], positive=["controlled", 0], latent_image=["masked", 0], denoise=0.5)
    node = examples.node
    graph["lora"] = node("LoraLoaderModelOnly", model=["model", 0], lora_name="light", strength_model=1.0)
    graph["free"] = node("FreeU", model=["lora", 0])
    graph["shifted"] = node("ModelSamplingSD3", model=["free", 0], shift=2.0)
    graph["rescaled"] = node("RescaleCFG", model=["shifted", 0])
    graph["skipped"] = node("CLIPSetLastLayer", clip=["model", 1], stop_at_clip_layer=-2)
    graph["positive"]["inputs"] |= {"clip": ["skipped", 0], "text": "a red circle, embedding:lost"}
    graph["net"] = node("ControlNetLoader", control_net_name="lost_net.safetensors")
    graph["typed"] = node("SetUnionControlNetType", control_net=["net", 0], type="tile")
    graph["photo"] = node("LoadImage", image="a.png")
    graph["controlled"] = node(
        "ControlNetApply", conditioning=["positive", 0], control_net=["typed", 0], image=["photo", 0], strength=1.0
    )
    graph["encoded"] = node("VAEEncode", pixels=["photo", 0], vae=["model", 2])
    graph["masked"] = node("SetLatentNoiseMask", samples=["encoded", 0], mask=["photo", 1])
    graph["upscaler"] = node("UpscaleModelLoader", model_name="4x_lost.pth")
    graph["bigger"] = node("ImageUpscaleWithModel", upscale_model=["upscaler", 0], image=["decoded", 0])
    graph["saved"]["inputs"]["images"] = ["bigger", 0]
    return graph


def test_what_the_pool_refuses_names_the_node_that_it_is_about(tmp_path: Path) -> None:
    """Names and fields of its errors lead to nodes; every other error to the sampler."""
    cases: dict[UserError, str] = {
        unknown_name("upscaler", "4x_lost", ()): "upscaler",
        unusable_field("upscale", "4x_lost", "one that fits"): "upscaler",
        unknown_name("ControlNet", "lost_net", ("canny",)): "net",
        unusable_field("controls", "ControlNet 'lost_net' (SDXL)", "one for SD 1.5"): "net",
        unusable_field("controls.mode", "tile", "none: it has a single mode"): "typed",
        unknown_name("LoRA", "light", ()): "lora",
        unusable_field("loras", "light", "one for SD 1.5"): "lora",
        unknown_name("model", "shapes", ()): "model",
        unknown_name("embedding", "lost", ()): "positive",
        UnusableField("options.freeu: not supported by model 'shapes' of the family X"): "free",
        UnusableField("options.rescale_cfg: found cfg 1"): "rescaled",
        unusable_field("shift", 2.0, "none: the levels have no shift"): "shifted",
        unusable_field("clip_skip", 1, "0"): "skipped",
        unusable_field("strength", 0.5, "none"): "sampler",
        unusable_field("steps", 8, "4"): "sampler",
        unusable_field("sampler", "euler", "another"): "sampler",
        unusable_field("schedule", "normal", "another"): "sampler",
        unusable_field("image", "none", "an image"): "photo",
        UserError("a.png: the image cannot be read (truncated)"): "photo",
        unusable_field("mask", "one", "none"): "masked",
        UserError("it needs at least 3 GiB of device memory, the budget is 1 GiB"): "sampler",
    }

    async def answers() -> list[Any]:
        pool = Refusing(UserError("none yet"))
        app = application(pool, ServeSection(), tmp_path)
        image = b"".join(
            (b'--b\r\nContent-Disposition: form-data; name="image"; filename="a.png"\r\n\r\n', png(), b"\r\n--b--\r\n")
        )
        await call(app, "POST", "/upload/image", image, {"content-type": "multipart/form-data; boundary=b"})
        body, found = json.dumps({"prompt": everything()}).encode(), []
        for pool.problem in cases:
            found.append(await call(app, "POST", "/prompt", body))
        return found

    wrong = []
    for (problem, expected), found in zip(cases.items(), asyncio.run(answers()), strict=True):
        errors = found.json["node_errors"]
        classes = {node_id: each["class_type"] for node_id, each in errors.items()}
        details = [error["details"] for each in errors.values() for error in each["errors"]]
        expected_classes = {expected: everything()[expected]["class_type"]}
        if (found.status, classes, details) != (400, expected_classes, [str(problem)]):
            wrong.append((str(problem), found.json))
    assert not wrong, wrong


def png() -> bytes:
    from io import BytesIO

    content = BytesIO()
    Image.new("RGBA", (64, 64), (255, 0, 0, 128)).save(content, "PNG")
    return content.getvalue()


def test_an_image_is_named_in_either_form_of_unicode() -> None:
    """Uploads have one form; files next to a workflow have theirs."""
    composed, parts = "\u00e9.png", "e\u0301.png"
    graph = examples.with_image(denoise=0.5)
    for images, name, expected in (
        ((composed,), parts, composed),
        ((composed,), f"{parts} [input]", composed),
        (None, parts, parts),
        (None, composed, composed),
    ):
        graph["loaded"]["inputs"]["image"] = name
        names, read = PoolNames({"shapes": "Stable Diffusion 1"}, [], images), []

        def loaded(found: str, read: list[str] = read) -> Image.Image:
            read.append(found)
            return Image.new("RGB", (64, 64))

        requests_of(outputs_of(graph, names)[0], names, loaded)
        assert read == [expected]


def test_the_types_that_a_union_controlnet_shows_are_its_modes() -> None:
    (given,) = [each for each in NODE_TYPES["SetUnionControlNetType"].inputs if each.name == "type"]
    graph, modes = examples.basic(positive=["controlled", 0]), []
    graph["photo"] = examples.node("LoadImage", image="a.png")
    graph["net"] = examples.node("ControlNetLoader", control_net_name="canny")
    graph["controlled"] = examples.node(
        "ControlNetApply", conditioning=["positive", 0], control_net=["typed", 0], image=["photo", 0], strength=1.0
    )
    for shown in (*given.choices, "gray"):
        graph["typed"] = examples.node("SetUnionControlNetType", control_net=["net", 0], type=shown)
        modes.append(made(graph)[0].controls[0].mode)
    assert modes[0] is None, "auto"
    assert set(modes[1:-1]) == set(UNION_MODES)
    assert modes[-1] == "gray", "a mode that only the pool has"


def test_damaged_nodes_are_named() -> None:
    for node in (3, {"class_type": 3}, {"inputs": {}}, {"class_type": "KSampler", "inputs": 3}):
        assert set(errors_of({**examples.basic(), "odd": node})) == {"odd"}


def test_a_size_or_a_setting_that_requests_refuse_is_named() -> None:
    """They pass the bounds of the nodes."""
    graph = examples.basic()
    graph["blank"]["inputs"]["width"] = 65
    assert made(graph)[0].width == 64, "parts of a cell are cut off, as in ComfyUI"
    graph = examples.basic()
    graph["positive"]["inputs"]["clip"] = ["short", 0]
    graph["short"] = examples.node("CLIPSetLastLayer", clip=["model", 1], stop_at_clip_layer=-1)
    names = PoolNames({"shapes": "Stable Diffusion XL"}, [])
    assert set(errors_of(graph, names)) == {"short"}


@pytest.mark.parametrize("control", ["randomize", "fixed", "increment", "decrement", True, False])
def test_seed_controls_of_the_editor_are_no_settings(control: Any) -> None:
    """Files of early 2023 have a truth value there."""
    inputs = [
        {"name": name, "type": kind, "link": link}
        for name, kind, link in (
            ("model", "MODEL", 1), ("positive", "CONDITIONING", 2), ("negative", "CONDITIONING", 3),
            ("latent_image", "LATENT", 4),
        )
    ]  # fmt: skip
    advanced = ["enable", 7, control, 9, 4.5, "euler", "normal", 0, 10000, "disable"]
    for kind, values in (("KSampler", [7, control, 9, 4.5, "euler", "normal", 1]), ("KSamplerAdvanced", advanced)):
        clip = {"name": "clip", "type": "CLIP"}
        workflow = {
            "nodes": [
                {"id": 1, "type": "CheckpointLoaderSimple", "widgets_values": ["shapes.ckpt"]},
                {"id": 2, "type": "CLIPTextEncode", "inputs": [{**clip, "link": 5}], "widgets_values": ["a"]},
                {"id": 3, "type": "CLIPTextEncode", "inputs": [{**clip, "link": 6}], "widgets_values": ["b"]},
                {"id": 4, "type": "EmptyLatentImage", "widgets_values": [64, 64, 1]},
                {"id": 5, "type": kind, "inputs": inputs, "widgets_values": values},
                {"id": 6, "type": "VAEDecode", "inputs": [{"name": "samples", "link": 7}, {"name": "vae", "link": 8}]},
                {"id": 7, "type": "SaveImage", "inputs": [{"name": "images", "link": 9}], "widgets_values": ["x"]},
            ],
            "links": [
                [1, 1, 0, 5, 0, "MODEL"], [2, 2, 0, 5, 1, "CONDITIONING"], [3, 3, 0, 5, 2, "CONDITIONING"],
                [4, 4, 0, 5, 3, "LATENT"], [5, 1, 1, 2, 0, "CLIP"], [6, 1, 1, 3, 0, "CLIP"],
                [7, 5, 0, 6, 0, "LATENT"], [8, 1, 2, 6, 1, "VAE"], [9, 6, 0, 7, 0, "IMAGE"],
            ],
        }  # fmt: skip
        (request,) = made(api_format(workflow))
        assert (request.seed, request.steps, request.cfg, request.sampler) == (7, 9, 4.5, "euler"), kind


def test_newer_files_of_the_editor_name_their_widgets() -> None:
    """Also those that the pool does not have, wherever they are."""
    widgets = ("image", "upload", "extra")
    node = {
        "id": 1, "type": "LoadImageMask", "widgets_values": ["mask.png", "image", "?", "red"],
        "inputs": [
            {"name": name, "type": "STRING", "link": None, "widget": {"name": name}} for name in (*widgets, "channel")
        ],
    }  # fmt: skip
    converted_node = api_format({"nodes": [node], "links": []})["1"]
    assert converted_node["inputs"] == {"image": "mask.png", "upload": "image", "extra": "?", "channel": "red"}


def unsampled(graph: Any) -> GenerateRequest:
    (request,) = made(graph)
    assert request.first_step() == request.steps, "no step is run"
    return request


def test_denoise_0_runs_no_step() -> None:
    assert unsampled(examples.basic(denoise=0)).image is None
    assert unsampled(examples.with_image(denoise="0")).image is not None
    graph = examples.with_image(denoise=0)
    graph["sampler"]["inputs"]["latent_image"] = ["part", 0]
    graph["part"] = examples.node("SetLatentNoiseMask", samples=["encoded", 0], mask=["loaded", 1])
    assert unsampled(graph).mask is None, "nothing is regenerated, and nothing pasted"
    sampler = examples.node("KSamplerSelect", sampler_name="euler")
    for levels in (
        examples.node("BasicScheduler", model=["model", 0], scheduler="karras", steps=4, denoise=0.0),
        examples.node("SDTurboScheduler", model=["model", 0], steps=1, denoise=0.0),
        examples.node("AlignYourStepsScheduler", model_type="SD1", steps=10, denoise=0.0),
        examples.node("GITSScheduler", coeff=1.2, steps=7, denoise=0.0),
    ):
        unsampled(examples.with_parts(sampler, levels))
    inputs = {**examples.basic()["sampler"]["inputs"], "noise_seed": 1, "start_at_step": 8}
    del inputs["seed"], inputs["denoise"]
    unsampled({**examples.basic(), "sampler": examples.node("KSamplerAdvanced", **inputs)})
    graph = examples.upscaled()
    graph["sampler_2"]["inputs"]["denoise"] = 0
    assert "sampler_2" not in nodes_of(graph), "its latents are those that it starts from"
    graph = examples.outpainting()
    graph["sampler"]["inputs"]["denoise"] = 0
    assert "sampler" not in nodes_of(graph), "the image that was encoded with a hole is decoded"


def test_masks_grow_to_the_largest_pixel_of_a_square_whatever_its_size() -> None:
    """Before: the pixels of each square were sorted, and 40 pixels of growth of 512x512 took 8 seconds."""
    drawn = np.random.default_rng(3)

    def grown(mask: npt.NDArray[np.uint8], pixels: int) -> Image.Image:
        image = Image.fromarray(np.stack([mask] * 3, -1))
        found = MaskFile(ImageFile("a.png"), "R", grown=pixels)
        return read_mask(found, WorkflowImages(lambda name: image))

    for height, width, pixels in ((40, 30, 1), (30, 41, 7), (5, 60, 30), (1, 1, 64), (3, 50, 64), (32, 32, 40)):
        mask = (drawn.random((height, width)) ** 8 * 255).astype(np.uint8)
        expected = Image.fromarray(mask).filter(ImageFilter.MaxFilter(2 * pixels + 1))
        assert np.array_equal(np.asarray(grown(mask, pixels)), np.asarray(expected)), (height, width, pixels)
    mask = np.zeros((2048, 2048), np.uint8)
    mask[1000, 20] = 255
    assert grown(mask, 64).getbbox() == (0, 936, 85, 1065)


def test_a_list_of_choices_that_is_empty_is_told_in_words() -> None:
    """The message was "expected one of none"."""
    with pytest.raises(WorkflowRejected) as refused:
        outputs_of(examples.with_image(), PoolNames({"shapes": "Stable Diffusion 1"}, [], ()))
    assert "expected an image; none was uploaded" in str(refused.value)
