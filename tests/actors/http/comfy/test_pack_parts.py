"""Nodes of packs that stand for nodes of ComfyUI ask the pool for the same as these: ControlNets, videos, conditioning,
samplers of pipes, and edits of images. What they cannot do is refused by name, or told of."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from modelpool.actors.http.comfy.comfy_evaluation import evaluated
from modelpool.actors.http.comfy.comfy_export import api_format
from modelpool.actors.http.comfy.comfy_graph import KnownGraph, PoolNames, nodes_in_order
from modelpool.actors.http.comfy.comfy_utf8 import with_utf8
from modelpool.actors.http.comfy.comfy_workflow import outputs_of, requests_of
from modelpool.actors.http.comfy.node_errors import WorkflowRejected
from modelpool.actors.http.service.uploads import Uploads
from modelpool.actors.request.control_video_fields import VideoFile
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.catalog.registry.listings import FileNames
from tests.actors.http.comfy.comfy_examples import Graph, basic, node
from tests.actors.http.comfy.test_videos_of_users import FRAMES, HEIGHT, WIDTH, clip

CLIP = VideoFile("clip.mp4", 640, 480, 30, 30.0, True)
FILES = FileNames(controlnets=("canny", "depth"), upscalers=("4x",))
NAMES = PoolNames(
    {"shapes": "Stable Diffusion 1"}, [], None, FILES, image_size=lambda name: (96, 64), video_facts=lambda name: CLIP
)
TEXTS = {"positive": ["positive", 0], "negative": ["negative", 0]}


def photo(name: str) -> Image.Image:
    return Image.linear_gradient("L").resize((96, 64)).convert("RGBA")


def requests(graph: Graph, names: PoolNames = NAMES) -> list[GenerateRequest]:
    return [one for output in outputs_of(graph, names) for one in requests_of(output, names, photo)]


def warnings(graph: Graph) -> str:
    return "; ".join(text for output in outputs_of(graph, NAMES) for text in output.warnings)


def problem(graph: Graph) -> str:
    with pytest.raises(WorkflowRejected) as found:
        requests(graph)
    return str(found.value.as_json())


def controlled(*, kind: str = "", loader: str = "ControlNetLoader", **inputs: Any) -> Graph:
    """A workflow with a ControlNet, by ComfyUI's own nodes or others."""
    graph = basic(positive=["applied", 0], negative=["applied", 1])
    graph["image"] = node("LoadImage", image="a.png")
    graph["net"] = node(loader, control_net_name="canny.safetensors")
    how = {"strength": 0.5, "start_percent": 0.25, "end_percent": 0.75}
    used = {**TEXTS, "control_net": ["net", 0], "image": ["image", 0], **how, **inputs}
    graph["applied"] = node(kind or "ControlNetApplyAdvanced", **used)
    return graph


def test_advanced_controlnets_without_weights_are_plain_ones() -> None:
    wanted = requests(controlled())
    assert wanted[0].controls
    for kind in ("ACN_AdvancedControlNetApply", "ACN_AdvancedControlNetApply_v2"):
        assert requests(controlled(kind=kind, loader="ControlNetLoaderAdvanced")) == wanted
    graph = controlled(kind="ACN_AdvancedControlNetApply", model_optional=["model", 0])
    graph["sampler"]["inputs"]["model"] = ["applied", 2]
    assert requests(graph) == wanted
    masked = controlled(kind="ACN_AdvancedControlNetApply", mask_optional=["image", 1])
    assert "mask_optional: found a link" in problem(masked)


def stacked(**stack: Any) -> Graph:
    graph = controlled()
    graph["stack"] = node("CR Multi-ControlNet Stack", **stack)
    sides = {f"base_{side}": link for side, link in TEXTS.items()}
    graph["applied"] = node("CR Apply Multi-ControlNet", switch="On", controlnet_stack=["stack", 0], **sides)
    return graph


def test_a_stack_of_controlnets_is_one_after_the_other() -> None:
    place = {"switch_{}": "On", "controlnet_{}": "canny", "controlnet_strength_{}": 0.5, "start_percent_{}": 0.25,
             "end_percent_{}": 0.75, "image_{}": ["image", 0]}  # fmt: skip

    def at(number: int, **changed: Any) -> dict[str, Any]:
        return {name.format(number): changed.get(name[:-3], value) for name, value in place.items()}

    wanted = requests(controlled())
    assert requests(stacked(**at(1))) == wanted
    assert requests(stacked(**at(1), **at(2, switch="Off"), **at(3, controlnet="None"))) == wanted
    (both,) = requests(stacked(**at(1), **at(3, controlnet="depth")))
    assert [each.model for each in both.controls] == ["canny", "depth"]
    chained = stacked(**at(2, controlnet="depth"), controlnet_stack=["first", 0])
    chained["first"] = node("CR Multi-ControlNet Stack", **at(1))
    assert requests(chained)[0].controls == both.controls
    off = stacked(**at(1))
    off["applied"]["inputs"]["switch"] = "Off"
    assert requests(off) == requests(stacked(**at(1, controlnet_strength=0.0))) == requests(basic())


def test_a_sampler_of_a_pipe_and_batched_nodes_are_comfyuis() -> None:
    wanted = requests(basic())
    graph = basic()
    parts = {"model": ["model", 0], "clip": ["model", 1], "vae": ["model", 2], **TEXTS}
    graph["pipe"] = node("ToBasicPipe", **parts)
    run = {name: value for name, value in graph["sampler"]["inputs"].items() if not isinstance(value, list)}
    graph["run"] = node("ImpactKSamplerBasicPipe", basic_pipe=["pipe", 0], latent_image=["blank", 0], **run)
    graph["decoded"] = node("VAEDecodeBatched", samples=["run", 1], vae=["run", 2], per_batch=4)
    assert requests(graph) == wanted
    assert "per_batch: not read" in warnings(graph)


def test_conditioning_of_several_texts_is_pairs_of_them() -> None:
    def masked(end: list[Any], nodes: Graph) -> Graph:
        """The texts with masks, besides one for the whole image."""
        graph = basic(positive=["whole", 0])
        graph["image"] = node("LoadImageMask", image="a.png", channel="red")
        graph["whole"] = node("ConditioningCombine", conditioning_1=end, conditioning_2=["positive", 0])
        return {**graph, **nodes}

    how = {"strength": 0.5, "set_cond_area": "default"}
    single: Graph = {
        f"{side}{place}": node("ConditioningSetMask", conditioning=[text, 0], mask=["image", 0], **how)
        for side, texts in (("p", ("positive", "negative")), ("n", ("negative", "positive")))
        for place, text in enumerate(texts, start=1)
    }
    for side in "pn":
        both = {"conditioning_1": [f"{side}1", 0], "conditioning_2": [f"{side}2", 0]}
        single[f"all {side}"] = node("ConditioningCombine", **both)
    pairs = {"positive_1": ["positive", 0], "positive_2": ["negative", 0], "negative_1": ["negative", 0],
             "negative_2": ["positive", 0]}  # fmt: skip
    masks = {f"mask_{place}": ["image", 0] for place in (1, 2)} | {f"mask_{place}_strength": 0.5 for place in (1, 2)}
    combined = {"all": node("ConditioningSetMaskAndCombine", **pairs, **masks, set_cond_area="default")}
    for slot, end in enumerate(("all p", "all n")):
        assert requests(masked(["all", slot], combined)) == requests(masked([end, 0], single))
    links = {"conditioning_1": ["positive", 0], "conditioning_2": ["negative", 0]}
    plain = basic(positive=["all", 0]) | {"all": node("ConditioningCombine", **links)}
    for kind, more in (
        ("ConditioningCombineMultiple+", {}),
        ("ConditioningMultiCombine", {"inputcount": 2, "operation": "combine"}),
    ):
        assert requests(basic(positive=["all", 0]) | {"all": node(kind, **links, **more)}) == requests(plain)
    missing = basic(positive=["all", 0]) | {"all": node("ConditioningMultiCombine", **links, inputcount=3)}
    assert "conditioning_3: found nothing" in problem(missing)


def loaded(names: PoolNames = NAMES, **inputs: Any) -> tuple[Mapping[str, Any], list[Any]]:
    """The nodes that a loader of videos becomes, and its facts of both videos."""
    graph: Graph = {"video": node("VHS_LoadVideo", video="clip.mp4", **inputs)}
    graph["facts"] = node("VHS_VideoInfo", video_info=["video", 3])
    kinds = ("image", 0), ("count", 1), ("sound", 2)
    ends = {name: node("Any Switch (rgthree)", any_01=["video", slot]) for name, slot in kinds}
    ends |= {f"fact{slot}": node("Any Switch (rgthree)", any_01=["facts", slot]) for slot in range(10)}
    graph |= ends
    order = nodes_in_order(KnownGraph(graph, names), list(ends))
    nodes = evaluated(graph, order, video_facts=names.video_facts)
    return nodes, [nodes[name]["inputs"]["any_01"] for name in (*ends,)]


def picked(nodes: Mapping[str, Any]) -> list[int] | None:
    """The frames of the video that are loaded; None for all."""
    found = [each["inputs"]["indexes"] for each in nodes.values() if each["class_type"] == "GetImagesFromBatchIndexed"]
    return [int(place) for place in found[0].split(",")] if found else None


def test_a_loader_of_videos_takes_the_frames_that_it_names() -> None:
    nodes, (image, count, sound, *facts) = loaded()
    assert picked(nodes) is None
    assert image == [image[0], 0]
    assert sound == [image[0], 1]
    assert (count, facts) == (30, [30.0, 30, 1.0, 640, 480] * 2)
    cases: tuple[tuple[dict[str, Any], list[int]], ...] = (
        ({"frame_load_cap": 4, "skip_first_frames": 3, "select_every_nth": 5}, [3, 8, 13, 18]),
        ({"force_rate": 15}, [*range(0, 30, 2)]),
        ({"force_rate": 20, "frame_load_cap": 5}, [0, 2, 3, 5, 6]),
        ({"force_rate": 60, "frame_load_cap": 5}, [0, 1, 1, 2, 2]),
        ({"force_rate": 15, "skip_first_frames": 10, "select_every_nth": 2}, [20, 24, 28]),
        ({"format": "Wan"}, [*range(29)]),
        ({"format": "Wan", "frame_load_cap": 8}, [*range(5)]),
    )
    for inputs, wanted in cases:
        nodes, (_, count, *_) = loaded(**inputs)
        assert picked(nodes) == wanted, inputs
        assert count == len(wanted)
    with pytest.raises(WorkflowRejected, match="found none of 30 frames"):
        loaded(skip_first_frames=30)
    with pytest.raises(WorkflowRejected, match="meta_batch"):
        loaded(meta_batch=7)


def test_a_loader_of_videos_scales_to_the_size_that_it_names() -> None:
    for inputs, size in (
        ({"custom_width": 320}, (320, 240)),
        ({"custom_height": 100}, (133, 100)),
        ({"custom_width": 300, "custom_height": 200}, (300, 200)),
        ({"custom_height": 100, "format": "Wan"}, (136, 104)),
        ({"custom_width": 512, "custom_height": 512, "force_size": "Disabled"}, None),
        ({"custom_width": 320, "custom_height": 512, "force_size": "Custom Width"}, (320, 240)),
        ({"custom_width": 512, "custom_height": 100, "force_size": "Custom Height"}, (136, 104)),
        ({"force_size": "?x256"}, (344, 256)),
        ({"force_size": "256x256"}, (256, 256)),
    ):
        nodes, (*_, width, height) = loaded(**inputs)
        scaled = [each["inputs"] for each in nodes.values() if each["class_type"] == "ImageScale"]
        found = (scaled[0]["width"], scaled[0]["height"]) if scaled else None
        assert found == size, inputs
        assert (width, height) == (size or (640, 480))


def test_the_sound_of_a_loaded_video_is_of_its_frames() -> None:
    for inputs, span in (
        ({}, None),
        ({"select_every_nth": 2}, None),
        ({"skip_first_frames": 15}, (0.5, 0.5)),
        ({"skip_first_frames": 6, "frame_load_cap": 3, "select_every_nth": 4}, (0.2, 0.4)),
    ):
        trimmed = [each["inputs"] for each in loaded(**inputs)[0].values() if each["class_type"] == "TrimAudioDuration"]
        found = (trimmed[0]["start_index"], trimmed[0]["duration"]) if trimmed else None
        assert found == (None if span is None else pytest.approx(span)), inputs


def test_audio_of_the_user_is_trimmed_as_its_node_says() -> None:
    for inputs, span in (({}, None), ({"start_time": 2.0}, (2.0, 3600.0)), ({"duration": 5.0}, (0.0, 5.0))):
        graph = {"heard": node("VHS_LoadAudioUpload", audio="a.wav", **inputs)}
        graph["end"] = node("Any Switch (rgthree)", any_01=["heard", 0])
        graph["long"] = node("Any Switch (rgthree)", any_01=["heard", 1])
        nodes = evaluated(graph, nodes_in_order(KnownGraph(graph, NAMES), ["end", "long"]))
        trimmed = [each["inputs"] for each in nodes.values() if each["class_type"] == "TrimAudioDuration"]
        assert ((trimmed[0]["start_index"], trimmed[0]["duration"]) if trimmed else None) == span
        assert nodes["long"]["inputs"]["any_01"] == inputs.get("duration", ["heard", 1])


def test_a_video_at_another_rate_warns_which_frames_it_takes() -> None:
    def warnings(**inputs: Any) -> list[str]:
        graph: Graph = {"video": node("VHS_LoadVideo", video="clip.mp4", **inputs)}
        found: dict[str, None] = {}
        evaluated(graph, ["video"], video_facts=NAMES.video_facts, warnings=found)
        return list(found)

    assert not warnings()
    assert NAMES.video_facts is not None
    assert not warnings(force_rate=NAMES.video_facts("clip.mp4").frame_rate)
    (warning,) = warnings(force_rate=3.0)
    assert warning.startswith("node video (VHS_LoadVideo): force_rate: found 3 ")


def test_a_loaded_video_is_the_one_of_an_upload(tmp_path: Path) -> None:
    uploads = Uploads(tmp_path)
    uploads.add("", "clip.mp4", clip())
    names = PoolNames({}, [], video_facts=lambda name: uploads.video("", name))
    graph: Graph = {"video": node("VHS_LoadVideo", video="clip.mp4", frame_load_cap=2, skip_first_frames=1)}
    graph["saved"] = node("SaveImage", images=["video", 0], filename_prefix="x")
    assert requests(graph, names)
    graph["video"]["inputs"]["video"] = "other.mp4"
    with pytest.raises(WorkflowRejected, match="video: "):
        requests(graph, names)
    facts = uploads.video("", "clip.mp4")
    assert (facts.width, facts.height, facts.frames) == (WIDTH, HEIGHT, FRAMES)


def test_a_loader_of_upscalers_gives_the_name_too() -> None:
    graph = basic()
    graph["loader"] = node("Upscale Model Loader", model_name="4x.pth")
    graph["larger"] = node("ImageUpscaleWithModel", upscale_model=["loader", 0], image=["decoded", 0])
    graph["saved"] = node("SaveImage", images=["larger", 0], filename_prefix="x")
    plain = {**graph, "loader": node("UpscaleModelLoader", model_name="4x.pth")}
    assert requests(graph) == requests(plain)
    graph["end"] = node("Any Switch (rgthree)", any_01=["loader", 1])
    assert evaluated(graph, nodes_in_order(KnownGraph(graph, NAMES), ["end"]))["end"]["inputs"]["any_01"] == "4x.pth"


def test_nodes_that_crop_and_measure_know_sizes_before_anything_is_made() -> None:
    graph: Graph = {"image": node("LoadImage", image="a.png")}
    graph["cut"] = node("ImageCrop+", image=["image", 0], width=40, height=30, position="bottom-right", x_offset=-2)
    graph["fit"] = node("ImageResize+", image=["cut", 0], width=100, height=100, method="pad", multiple_of=16,
                        condition="upscale if smaller", interpolation="nearest")  # fmt: skip
    graph["nearest"] = node("CM_NearestSDXLResolution", image=["cut", 0])
    wanted = {("cut", 1): 54, ("cut", 2): 34, ("fit", 1): 96, ("fit", 2): 96, ("nearest", 0): 1152, ("nearest", 1): 896}
    ends = {f"{name} {slot}": node("Any Switch (rgthree)", any_01=[name, slot]) for name, slot in wanted}
    order = nodes_in_order(KnownGraph({**graph, **ends}, NAMES), list(ends))
    nodes = evaluated({**graph, **ends}, order, image_size=lambda name: (96, 64))
    assert {each: nodes[f"{each[0]} {each[1]}"]["inputs"]["any_01"] for each in wanted} == wanted


def exported(kind: str, values: list[Any], **more: Any) -> Any:
    nodes = [{"id": 1, "type": kind, "widgets_values": values, "inputs": [], "outputs": [], **more}]
    return {"nodes": nodes, "links": []}


def test_widgets_of_other_versions_are_read_as_the_editor_wrote_them() -> None:
    run = api_format(exported("KSampler (Efficient)", [7, 99, 8, 4, "lcm", "karras", 0.75, "auto", "true"]))
    assert run["1"]["inputs"] == {
        "seed": 7, "steps": 8, "cfg": 4, "sampler_name": "lcm", "scheduler": "karras", "denoise": 0.75,
        "preview_method": "auto", "vae_decode": "true",
    }  # fmt: skip
    resized = api_format(exported("ImageResizeKJ", [768, 512, "area", True, 16, 0, 0, "center"]))["1"]["inputs"]
    assert (resized["width"], resized["divisible_by"], resized["crop"]) == (768, 16, "center")
    assert "width_input" not in resized
    with pytest.raises(WorkflowRejected, match="cannot be converted"):
        api_format(exported("ImageResizeKJ", [768, 512, "area", True, 16, 640, 0, "center"]))
    shown = api_format(exported("StringFunction|pysssss", ["append", "no", "a", "b", "c", "abc"]))
    assert shown["1"]["inputs"]["text_c"] == "c"


def test_a_link_from_a_node_that_the_file_does_not_have_is_left_out() -> None:
    """Such links stay in subgraphs after nodes were deleted; the whole file was called damaged."""
    flow = exported("SaveImage", ["x"], inputs=[{"name": "images", "type": "IMAGE", "link": 5}])
    flow["links"] = [[5, 744, 0, 1, 0, "IMAGE"]]
    assert api_format(flow)["1"]["inputs"] == {"filename_prefix": "x"}


def test_texts_that_were_read_as_latin_1_are_repaired_if_all_are_such() -> None:
    name, words = "String-\U0001f52c", "h\u00fctte \u6821"
    broken = exported(name, [words]).copy()
    broken = {**broken, "nodes": [{**broken["nodes"][0], "type": name.encode().decode("latin-1"),
                                   "widgets_values": [words.encode().decode("latin-1")]}]}  # fmt: skip
    assert api_format(broken)["1"] == {"class_type": name, "inputs": {"String": words}}
    for untouched in ({"a": "caf\u00e9"}, {"a": "\u00c3\u00a9", "b": "caf\u00e9"}, {"a": words}, {"a": 1}):
        assert with_utf8(untouched) == untouched


def test_edits_of_batches_pick_frames() -> None:
    """The frames of these nodes, counted from the first image of a batch of four."""
    graph = basic()
    graph["image"] = node("LoadImage", image="a.png")
    graph["four"] = node("RepeatImageBatch", image=["image", 0], amount=4)

    def places(kind: str, slot: int = 0, source: str = "images", **inputs: Any) -> Any:
        made = {**graph, "end": node(kind, **{source: ["four", 0]}, **inputs)}
        made["saved"] = node("SaveImage", images=["end", slot], filename_prefix="x")
        request = requests(made)[0]
        assert request.workflow is not None
        nodes = [each for each in request.workflow.nodes.values() if getattr(each, "name", "") == "image_pick"]
        return [*nodes[0].settings["indices"]] if nodes else None

    assert places("ReverseImageBatch") == [3, 2, 1, 0]
    assert places("GetImagesFromBatchIndexed", indexes="3, 0") == [3, 0]
    assert places("ImageSelector", selected_indexes="1,4") == [0, 3]
    assert places("ImageBatchRepeatInterleaving", repeats=2) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [places("VHS_SplitImages", slot, split_index=1) for slot in (0, 2)] == [[0], [1, 2, 3]]
    assert places("VHS_SelectEveryNthImage", select_every_nth=2, skip_first_images=1) == [1, 3]
    assert places("VHS_DuplicateImages", multiply_by=2) == [0, 1, 2, 3] * 2
    for how, wanted in (
        ("expand", [0, 1, 1, 2, 3, 3]), ("repeat all", [0, 1, 2, 3, 0, 1]), ("repeat first", [0, 0, 0, 1, 2, 3]),
        ("repeat last", [0, 1, 2, 3, 3, 3]),
    ):  # fmt: skip
        assert places("ImageExpandBatch+", source="image", size=6, method=how) == wanted
    assert places("ImageExpandBatch+", source="image", size=3, method="expand") == [0, 2, 3]
    wrong = {**graph, "end": node("VHS_SplitImages", images=["four", 0], split_index=4)}
    wrong["saved"] = node("SaveImage", images=["end", 0], filename_prefix="x")
    assert "split_index: found 4 for 4 images" in problem(wrong)
