"""Custom nodes that stand for nodes of ComfyUI ask the pool for the same as these: loaders, stacks of LoRAs, LoRAs in
texts, samplers, images; savers decide about the format of a file; tokens and links to everything are followed."""

from __future__ import annotations

from typing import Any

import pytest
from PIL import Image

from modelpool.actors.http.comfy.comfy_export import api_format
from modelpool.actors.http.comfy.comfy_graph import PoolNames
from modelpool.actors.http.comfy.comfy_workflow import outputs_of, requests_of
from modelpool.actors.http.comfy.node_errors import WorkflowRejected
from modelpool.actors.request.requests import GenerateRequest
from tests.actors.http.comfy.comfy_examples import Graph, basic, node

NAMES = PoolNames(
    {"shapes": "Stable Diffusion 1"}, ["light", "dark"], None, image_size=lambda name: (96, 64) if name else (64, 64)
)
MODEL, CLIP = ["model", 0], ["model", 1]


def photo(name: str) -> Image.Image:
    return Image.linear_gradient("L").resize((96, 64)).convert("RGBA")


def requests(graph: Graph) -> list[GenerateRequest]:
    return [one for output in outputs_of(graph, NAMES) for one in requests_of(output, NAMES, photo)]


def warnings(graph: Graph) -> str:
    return "; ".join(text for output in outputs_of(graph, NAMES) for text in output.warnings)


def with_loras(*links: list[Any], **nodes: Any) -> Graph:
    """A workflow of which the sampler reads a model, and the texts an encoder, of other nodes."""
    model, clip = links
    graph = {**basic(model=model), **nodes}
    for side in ("positive", "negative"):
        graph[side]["inputs"]["clip"] = clip
    return graph


def chained(*uses: tuple[str, float, float]) -> Graph:
    """The same with ComfyUI's own nodes."""
    nodes: Graph = {}
    model, clip = MODEL, CLIP
    for place, (name, strength, text_strength) in enumerate(uses):
        settings = {"lora_name": name, "strength_model": strength, "strength_clip": text_strength}
        nodes[f"l{place}"] = node("LoraLoader", model=model, clip=clip, **settings)
        model, clip = [f"l{place}", 0], [f"l{place}", 1]
    return with_loras(model, clip, **nodes)


WHOLE = {"model": MODEL, "clip": CLIP}
ROWS = [
    {"name": "light", "strength": 0.5, "clipStrength": 0.25, "active": True},
    {"name": "dark", "strength": "0.75", "active": True},
    {"name": "none", "strength": 1, "active": False},
]


def test_loras_of_stacks_rows_and_texts_are_those_of_a_chain() -> None:
    slots = {"switch_1": "On", "lora_name_1": "light.safetensors", "model_weight_1": 0.5, "clip_weight_1": 0.25}
    slots |= {"switch_2": "Off", "lora_name_2": "dark.safetensors", "switch_3": "On", "lora_name_3": "None"}
    second = {"input_mode": "simple", "lora_count": 1, "lora_name_1": "dark.safetensors", "lora_wt_1": 0.75}
    second["lora_stack"] = ["first", 0]
    stacks = {"first": node("CR LoRA Stack", **slots), "second": node("LoRA Stacker", **second)}
    stacks["used"] = node("CR Apply LoRA Stack", **WHOLE, lora_stack=["second", 0])
    one, two = ("light", 0.5, 0.25), ("dark", 0.75, 0.75)
    tags = "a fox <lora:light:0.5:0.25><lora:dark:0.75>"
    cases: list[tuple[Graph, Graph]] = [
        (stacks, chained(one, two)),
        ({"used": node("Lora Loader (LoraManager)", **WHOLE, loras={"__value__": ROWS})}, chained(one, two)),
        ({"used": node("LoraTagLoader", **WHOLE, text=tags)}, chained(one, two)),
        ({"used": node("CR Load LoRA", **WHOLE, switch="On", lora_name="light", strength_model=0.5,
                       strength_clip=0.25)}, chained(one)),
        ({"used": node("CR Load LoRA", **WHOLE, switch="Off", lora_name="light")}, chained()),
        ({"used": node("LoraLoader|pysssss", **WHOLE, lora_name="dark", strength_model=0.75, strength_clip=0.75)},
         chained(two)),
    ]  # fmt: skip
    for nodes, wanted in cases:
        assert requests(with_loras(["used", 0], ["used", 1], **nodes)) == requests(wanted), list(nodes)
    with pytest.raises(WorkflowRejected, match="expected numbers as strengths"):
        requests(with_loras(["used", 0], CLIP, used=node("Lora Loader (LoraManager)", **WHOLE, loras=[
            {"name": "light", "strength": "much"}])))  # fmt: skip
    with pytest.raises(WorkflowRejected, match="expected a number as strength"):
        requests(with_loras(["used", 0], CLIP, used=node("LoraTagLoader", **WHOLE, text="<lora:light:much>")))


def test_stacks_of_easy_use_have_as_many_loras_as_they_count_and_none_when_switched_off() -> None:
    stack: dict[str, Any] = {"toggle": True, "mode": "advanced", "num_loras": 1, "lora_1_name": "light.safetensors"}
    stack |= {"lora_1_strength": 3.0, "lora_1_model_strength": 0.5, "lora_1_clip_strength": 0.25}
    stack |= {"lora_2_name": "dark.safetensors", "lora_2_strength": 0.75, "optional_lora_stack": None}

    def used(**changes: Any) -> Graph:
        inputs = {name: value for name, value in {**stack, **changes}.items() if value is not None}
        nodes = {"stack": node("easy loraStack", **inputs)}
        nodes["before"] = node("CR LoRA Stack", switch_1="On", lora_name_1="dark", model_weight_1=1.0)
        nodes["used"] = node("CR Apply LoRA Stack", **WHOLE, lora_stack=["stack", 0])
        return with_loras(["used", 0], ["used", 1], **nodes)

    cases: list[tuple[dict[str, Any], tuple[tuple[str, float, float], ...]]] = [
        ({}, (("light", 0.5, 0.25),)),
        ({"mode": "simple", "num_loras": 2}, (("light", 3.0, 3.0), ("dark", 0.75, 0.75))),
        ({"num_loras": 0}, ()),
        ({"toggle": False}, ()),
        ({"optional_lora_stack": ["before", 0]}, (("dark", 1.0, 1.0), ("light", 0.5, 0.25))),
    ]
    for changes, wanted in cases:
        assert requests(used(**changes)) == requests(chained(*wanted)), changes
    off = used(toggle=False, optional_lora_stack=["before", 0])
    assert requests(off) == requests(chained())
    assert "optional_lora_stack: not used: toggle is false" in warnings(off)


def test_prompts_use_the_loras_in_them() -> None:
    power = node("Power Prompt (rgthree)", prompt="a fox <lora:light:0.5>", opt_model=MODEL, opt_clip=CLIP)
    graph: Graph = {**basic(model=["power", 1], positive=["power", 0]), "power": power}
    graph["negative"]["inputs"]["clip"] = ["power", 2]
    wanted = chained(("light", 0.5, 0.5))
    wanted["positive"]["inputs"]["text"] = "a fox "
    assert requests(graph) == requests(wanted)
    text: Graph = {**basic(), "power": {**power, "inputs": {"prompt": "a fox <lora:light:0.5>"}}}
    text["positive"]["inputs"]["text"] = ["power", 3]
    (request,) = requests(text)
    assert request.prompt == "a fox ", "the text alone needs no model"
    graph["power"] = node("Power Prompt (rgthree)", prompt="a <lora:light:0.5>", opt_clip=CLIP)
    graph["sampler"]["inputs"]["model"] = MODEL
    with pytest.raises(WorkflowRejected, match="prompt: found LoRAs, expected links of opt_model and opt_clip"):
        requests(graph)
    plain: Graph = {**basic(positive=["power", 0])}
    plain["power"] = node("Power Prompt - Simple (rgthree)", prompt="a <lora:light:1>fox", opt_clip=CLIP)
    (request,) = requests(plain)
    assert (request.prompt, request.loras) == ("a fox", ())
    assert "LoRAs in it are taken out, and not used" in warnings(plain)


def test_words_of_managed_loras_are_those_of_the_editor() -> None:
    graph: Graph = {**basic(positive=["prompt", 0]), "prompt": node(
        "Prompt (LoraManager)", clip=CLIP, text="a fox", trigger_words1=["words", 0])}  # fmt: skip
    graph["words"] = node("TriggerWord Toggle (LoraManager)", trigger_words="red, old", toggle_trigger_words=[
        {"text": "red", "active": True}, {"text": "old", "active": False}])  # fmt: skip
    (request,) = requests(graph)
    assert request.prompt == "red, a fox"
    graph["words"]["inputs"].pop("toggle_trigger_words")
    (request,) = requests(graph)
    assert request.prompt == "red, old, a fox"
    graph["words"]["inputs"]["trigger_words"] = ["managed", 2]
    graph["managed"] = node("Lora Loader (LoraManager)", **WHOLE, loras=ROWS)
    graph["sampler"]["inputs"]["model"] = ["managed", 0]
    (request,) = requests(graph)
    assert request.prompt == "a fox"
    assert "the pool does not know the words of a LoRA" in warnings(graph)
    graph["prompt"]["inputs"]["text"] = "a {fox|hare}"
    with pytest.raises(WorkflowRejected, match="text: found choices"):
        requests(graph)


def test_samplers_and_loaders_are_those_of_comfyui() -> None:
    wanted = requests(basic(seed=7))
    graph: Graph = {**basic(), "seed": node("Seed", seed=7)}
    inputs = {**graph["sampler"]["inputs"], "seed": ["seed", 0]}
    graph["sampler"] = node("KSampler (WAS)", **inputs)
    assert requests(graph) == wanted
    again: Graph = {**graph, "saved": node("Image Save", images=["pixels", 0])}
    again["pixels"] = node("ImageFlip", image=["decoded", 0], flip_method="y-axis: horizontally")
    assert requests(again)[0].workflow is not None
    graph["sampler"]["inputs"]["seed"] = ["text", 0]
    graph["text"] = node("PrimitiveString", value="x")
    with pytest.raises(WorkflowRejected, match="seed: found 'x', expected a link to the node Seed"):
        requests(graph)
    loaders = (
        node("Checkpoint Loader (Simple)", ckpt_name="shapes"),
        node("CheckpointLoader|pysssss", ckpt_name="shapes"),
    )
    for loader in loaders:
        assert requests({**basic(seed=7), "model": loader}) == wanted
    for kind in ("DiffusionModelLoaderKJ", "GGUFLoaderKJ"):
        graph = {**basic(seed=7, model=["unet", 0]), "unet": node(kind, model_name="shapes")}
        assert requests(graph) == wanted
        assert "dtypes" not in warnings(graph)
    graph["unet"]["inputs"]["extra_model_name"] = "other.gguf"
    with pytest.raises(WorkflowRejected, match="extra_model_name, extra_state_dict: expected none"):
        requests(graph)
    weighted: Graph = {**basic(seed=7)}
    encoder = {"text": weighted["positive"]["inputs"]["text"], "clip": CLIP}
    weighted["positive"] = node("BNK_CLIPTextEncodeAdvanced", **encoder, token_normalization="none",
                                weight_interpretation="comfy")  # fmt: skip
    assert requests(weighted) == wanted
    weighted["positive"]["inputs"]["weight_interpretation"] = "comfy++"
    with pytest.raises(WorkflowRejected, match=r"weight_interpretation: found none and comfy\+\+"):
        requests(weighted)


def test_a_sampler_of_a_part_of_the_steps_decodes_as_well() -> None:
    graph: Graph = basic()
    settings = {name: value for name, value in graph["sampler"]["inputs"].items() if name not in ("seed", "denoise")}
    settings |= {"noise_seed": 7, "steps": 6, "start_at_step": 0, "end_at_step": 4, "add_noise": "enable"}
    settings |= {"return_with_leftover_noise": "disable"}
    wanted: Graph = {**basic(), "sampler": node("KSamplerAdvanced", **settings)}
    part = node("KSampler Adv. (Efficient)", **settings, optional_vae=["model", 2])
    graph = {**basic(), "sampler": part, "saved": node("SaveImage", images=["sampler", 5])}
    (found,), (plain,) = requests(graph), requests({**wanted, "saved": node("SaveImage", images=["decoded", 0])})
    assert found.workflow is not None
    assert plain.workflow is not None
    (part_run,), (plain_run,) = found.workflow.samplings, plain.workflow.samplings
    assert part_run.request == plain_run.request
    graph["sampler"]["inputs"]["script"] = ["model", 0]
    with pytest.raises(WorkflowRejected, match="script: found a link, expected none"):
        requests(graph)


def test_loaders_of_several_gpus_are_the_usual_ones() -> None:
    graph: Graph = {**basic(model=["unet", 0]), "unet": node("UNETLoader", unet_name="shapes")}
    wanted = requests(graph)
    graph["unet"] = node("UNETLoaderMultiGPU", unet_name="shapes", weight_dtype="default", device="cuda:2")
    assert requests(graph) == wanted
    loader = node("CheckpointLoaderSimpleMultiGPU", ckpt_name="shapes", device="cuda:1")
    assert requests({**basic(), "model": loader}) == requests(basic())


def test_savers_decide_about_formats() -> None:
    cases: list[tuple[str, dict[str, Any], tuple[Any, Any], str]] = [
        ("Image Save", {"extension": "jpeg", "quality": 70}, ("jpg", 70), ""),
        ("Image Save", {"extension": "webp", "quality": 100, "lossless_webp": "false"}, ("webp", 99), ""),
        ("Image Save", {"extension": "webp", "lossless_webp": "true"}, ("webp", 100), ""),
        ("Image Save", {"output_path": "there"}, (None, None), "output_path: not written"),
        ("Save Image (LoraManager)", {"file_format": "png", "embed_workflow": False}, (None, None), ""),
        ("Save Image (LoraManager)", {"file_format": "webp", "quality": 50}, ("webp", 50), ""),
        ("Image Saver", {"extension": "webp", "positive": "a"}, ("webp", 100), "positive: not written"),
        ("Image Saver Simple", {"extension": "jpeg", "embed_workflow": False}, ("jpg", 100), "embed_workflow: not"),
        ("Save_as_webp", {"mode": "lossy", "compression": 60}, ("webp", 60), ""),
        ("Save_as_webp", {"mode": "lossless", "compression": 60}, ("webp", 100), ""),
        ("LayerUtility: SaveImagePlus", {"format": "jpg"}, ("jpg", 80), ""),
    ]
    for kind, settings, wanted, told in cases:
        graph: Graph = {**basic(), "saved": node(kind, images=["decoded", 0], **settings)}
        (request,) = requests(graph)
        assert (request.format, request.quality) == wanted, (kind, settings)
        assert told in warnings(graph)
        graph["decoded"] = node("VAEDecode", samples=["twice", 0], vae=["model", 2])
        graph["twice"] = node("LatentFlip", samples=["sampler", 0], flip_method="y-axis: horizontally")
        (request,) = requests(graph)
        assert request.workflow is not None
        assert (request.format, request.quality) == wanted, (kind, settings, "in a workflow")
    graph["saved"] = node("Image Save", images=["decoded", 0], extension="tiff")
    with pytest.raises(WorkflowRejected, match="extension: found tiff, expected one of png, jpg, jpeg, webp"):
        requests(graph)


def test_tokens_are_those_of_the_workflow() -> None:
    graph: Graph = {**basic(), "parsed": node("Text Parse Tokens", text=["made", 0])}
    graph["made"] = node("PrimitiveString", value="a [colour] [animal], [what]")
    graph["colour"] = node("Text Add Token by Input", token_name="colour", token_value=["red", 0])
    graph["red"] = node("PrimitiveString", value="red")
    graph["lines"] = node("Text Add Tokens", tokens="[animal]: fox\n\nno token")
    graph["own"] = node("Text Add Token by Input", token_name="what", token_value=["parsed", 0])
    graph["positive"]["inputs"]["text"] = ["parsed", 0]
    (request,) = requests(graph)
    assert request.prompt == "a red fox, [what]", "no token depends on itself"
    graph["made"]["inputs"]["value"] = "a [time(%Y)]"
    with pytest.raises(WorkflowRejected, match=r"text: found \[time\(%Y\)\], which depends on a server"):
        requests(graph)


def test_images_are_joined_cut_and_resized_as_by_comfyui() -> None:
    def made(*nodes: Graph) -> Any:
        graph: Graph = {"a": node("LoadImage", image="a"), "b": node("LoadImage", image="b")}
        for each in nodes:
            graph |= each
        graph["saved"] = node("SaveImage", images=["end", 0])
        workflow = requests(graph)[-1].workflow  # of a batch, each image is a file
        assert workflow is not None
        return {name: each for name, each in workflow.nodes.items() if not name.startswith("saved")}

    one, two = ["a", 0], ["b", 0]
    stitch = {"direction": "down", "match_image_size": True}
    wanted = made(
        {"end": node("ImageStitch", image1=one, image2=two, spacing_width=0, spacing_color="white", **stitch)}
    )
    assert made({"end": node("ImageConcanate", image1=one, image2=two, **stitch)}) == wanted
    assert made({"end": node("ImageConcatMulti", inputcount=2, image_1=one, image_2=two, **stitch)}) == wanted
    batch = made({"end": node("ImageBatch", image1=one, image2=two)})
    assert made({"end": node("ImageBatchMulti", inputcount=2, image_1=one, image_2=two)}) == batch
    with pytest.raises(WorkflowRejected, match="image_3: found nothing, expected 3 images"):
        made({"end": node("ImageBatchMulti", inputcount=3, image_1=one, image_2=two)})
    both = {"batch": node("ImageBatch", image1=one, image2=two)}
    taken = made(both, {"end": node("ImageFromBatch", image=["batch", 0], batch_index=1, length=1)})
    assert made(both, {"end": node("ImageFromBatch+", image=["batch", 0], start=1, length=-1)}) == taken
    last = node("GetImageRangeFromBatch", images=["batch", 0], start_index=-1, num_frames=1)
    assert made(both, {"end": last}) == taken
    flip = made({"end": node("ImageFlip", image=one, flip_method="y-axis: horizontally")})
    assert made({"end": node("ImageFlip+", image=one, axis="x")}) == flip
    assert made({"end": node("Image Flip", images=one, mode="horizontal")}) == flip
    longest = made({"end": node("ImageScaleToMaxDimension", image=one, upscale_method="bicubic", largest_size=48)})
    assert made({"end": node("JWImageResizeByLongerSide", image=one, size=48)}) == longest
    both_sides = made(both, {"end": node("ImageScaleBy", image=["batch", 0], upscale_method="bicubic", scale_by=0.5)})
    assert made(both, {"end": node("JWImageResizeByFactor", image=["batch", 0], factor=0.5)}) == both_sides
    turned = made({"end": node("ImageRotate", image=one, rotation="180 degrees")})
    assert len(made({"end": node("ImageFlip+", image=one, axis="xy")})) == len(turned) + 1


def test_images_are_resized_in_proportion_where_their_size_is_known() -> None:
    """The image has 96 x 64 pixels."""

    def scaled(kind: str, **settings: Any) -> tuple[Any, ...]:
        graph: Graph = {**basic(latent_image=["encoded", 0], denoise=0.5), "a": node("LoadImage", image="a")}
        graph["resized"] = node(kind, image=["a", 0], upscale_method="lanczos", **settings)
        graph["blank"] = node("EmptyLatentImage", width=["resized", 1], height=["resized", 2], batch_size=1)
        graph["sampler"]["inputs"]["latent_image"] = ["blank", 0]
        graph["end"] = node("SaveImage", images=["resized", 0])
        *_, (saved,) = (requests_of(output, NAMES, photo) for output in outputs_of(graph, NAMES))
        assert saved.workflow is not None
        scale = saved.workflow.nodes["resized"].settings
        return scale["width"], scale["height"]

    fit: dict[str, Any] = {"width": 50, "height": 50, "divisible_by": 1}
    assert scaled("ImageResizeKJv2", keep_proportion="resize", **fit) == (50, 33)
    assert scaled("ImageResizeKJv2", keep_proportion="resize", **{**fit, "divisible_by": 8}) == (48, 32)
    assert scaled("ImageResizeKJv2", keep_proportion="resize", **{**fit, "height": 0}) == (50, 33)
    assert scaled("ImageResizeKJv2", keep_proportion="stretch", **{**fit, "height": 0}) == (50, 64)
    assert scaled("ImageResizeKJ", keep_proportion=True, **fit) == (50, 33)
    assert scaled("ImageResizeKJ", keep_proportion=False, width_input=40, **fit) == (40, 50)
    with pytest.raises(WorkflowRejected, match="keep_proportion, crop_position"):
        scaled("ImageResizeKJv2", keep_proportion="pad", **fit)


def editor_file(**extra: Any) -> dict[str, Any]:
    """A workflow of the editor of which the VAE is linked to everything."""
    inputs = lambda *names: [{"name": name, "type": kind, "link": link} for name, kind, link in names]  # noqa: E731
    nodes = [
        {"id": 1, "type": "CheckpointLoaderSimple", "widgets_values": ["shapes"],
         "outputs": [{"type": kind} for kind in ("MODEL", "CLIP", "VAE")]},
        {"id": 2, "type": "EmptyLatentImage", "widgets_values": [64, 64, 1], "outputs": [{"type": "LATENT"}]},
        {"id": 3, "type": "CLIPTextEncode", "widgets_values": ["a fox"], "inputs": inputs(("clip", "CLIP", 1)),
         "outputs": [{"type": "CONDITIONING"}]},
        {"id": 4, "type": "KSampler", "widgets_values": [7, "fixed", 4, 3.0, "euler", "normal", 1.0],
         "inputs": inputs(("model", "MODEL", 2), ("positive", "CONDITIONING", 3), ("negative", "CONDITIONING", 4),
                          ("latent_image", "LATENT", 5)), "outputs": [{"type": "LATENT"}]},
        {"id": 5, "type": "VAEDecode", "inputs": inputs(("samples", "LATENT", 6), ("vae", "VAE", None)),
         "outputs": [{"type": "IMAGE"}]},
        {"id": 6, "type": "SaveImage", "widgets_values": ["x"], "inputs": inputs(("images", "IMAGE", 7))},
        {"id": 7, "type": "Anything Everywhere", "inputs": inputs(("anything", "*", 8)), "properties": {}},
    ]  # fmt: skip
    ends = (
        (1, 1, 3, 0),
        (1, 0, 4, 0),
        (3, 0, 4, 1),
        (3, 0, 4, 2),
        (2, 0, 4, 3),
        (4, 0, 5, 0),
        (5, 0, 6, 0),
        (1, 2, 7, 0),
    )
    links = [[place, *end, "*"] for place, end in enumerate(ends, start=1)]
    return {"nodes": nodes, "links": links, "extra": extra}


def test_links_to_everything_are_those_of_the_file_else_those_of_the_type() -> None:
    listed = {
        "downstream": 5,
        "downstream_slot": 1,
        "upstream": "1",
        "upstream_slot": 2,
        "controller": 7,
        "type": "VAE",
    }
    for flow in (editor_file(ue_links=[listed]), editor_file()):
        prompt = api_format(flow)
        assert prompt["5"]["inputs"]["vae"] == ["1", 2]
        assert len(requests(prompt)) == 1
    flow = editor_file(ue_links=[])
    assert "vae" not in api_format(flow)["5"]["inputs"], "the file lists none"
    flow = editor_file()
    flow["nodes"][-1]["mode"] = 4
    assert "vae" not in api_format(flow)["5"]["inputs"], "it is switched off"
    flow = editor_file()
    flow["nodes"][-1] |= {"type": "Anything Everywhere?", "widgets_values": [".*", "samples", ".*"]}
    with pytest.raises(WorkflowRejected, match=r"node 7 \(Anything Everywhere\?\): .*chooses inputs by patterns"):
        api_format(flow)
    flow = editor_file()
    flow["nodes"].append({**flow["nodes"][-1], "id": 8})
    with pytest.raises(WorkflowRejected, match="a second node is linked to each input of type VAE"):
        api_format(flow)
    with pytest.raises(WorkflowRejected, match="found more than 2000 links"):
        api_format(editor_file(ue_links=[listed] * 2001))


def test_early_and_later_widgets_of_the_editor() -> None:
    flow = editor_file(ue_links=[])
    sampler = flow["nodes"][3]
    sampler |= {"type": "KSampler (Efficient)",
                "widgets_values": ["Sample", 13, 7, True, 4, 3.0, "euler", "normal", 1.0, "Disabled"]}  # fmt: skip
    found = api_format(flow)["4"]["inputs"]
    assert (found["seed"], found["steps"], found["scheduler"], found["denoise"]) == (7, 4, "normal", 1.0)
    sampler["widgets_values"][0] = "Hold"
    flow["nodes"][4]["inputs"][1]["link"] = 8
    with pytest.raises(WorkflowRejected, match="sampler_state: found Hold, expected Sample"):
        requests(api_format(flow))
    flow["nodes"][5] = {"id": 6, "type": "ImageCropV2", "inputs": flow["nodes"][5]["inputs"],
                        "widgets_values": [{"x": 1, "y": 2, "width": 3, "height": 4}, 1, 2, 3, 4]}  # fmt: skip
    assert api_format(flow)["6"]["inputs"]["crop_region"] == {"x": 1, "y": 2, "width": 3, "height": 4}
    flow["nodes"][5] |= {"type": "Lora Loader (LoraManager)", "widgets_values": [{"textWidgetName": "text"}, "", ROWS]}
    assert api_format(flow)["6"]["inputs"]["loras"] == ROWS
    for keeps, method in ((True, "keep proportion"), (False, "stretch")):
        flow["nodes"][5] |= {"type": "ImageResize+", "widgets_values": [64, 32, "nearest", keeps, "always"]}
        found = api_format(flow)["6"]["inputs"]
        assert (found["method"], found["condition"]) == (method, "always"), "it was keep_proportion"
    shown = "<tr><td>Output: </td><td><b>1</b> x <b>64</b></td></tr>"
    flow["nodes"][5] |= {"type": "ImageResizeKJv2", "widgets_values": [
        64, 32, "lanczos", "crop", "0, 0, 0", "center", 2, "cpu", shown]}  # fmt: skip
    assert api_format(flow)["6"]["inputs"]["device"] == "cpu", "what shows the size of a result is no setting"
    flow["nodes"][5] |= {"type": "KSampler Adv. (Efficient)", "widgets_values": [
        "enable", 7, None, 8, 2, "dpmpp_sde", "karras", 0, 10000, "disable", "auto", "true"]}  # fmt: skip
    found = api_format(flow)["6"]["inputs"]
    assert (found["noise_seed"], found["steps"], found["vae_decode"]) == (7, 8, "true"), "a button has no value"
    flow["nodes"][5] |= {"type": "Fast Muter (rgthree)", "widgets_values": None}
    assert "6" not in api_format(flow)
