"""Batches, frames, parts of the steps, sizes and files of ComfyUI workflows: what each node becomes."""

from __future__ import annotations

from typing import Any

import pytest
from PIL import Image

from modelpool.actors.http.comfy.comfy_export import api_format
from modelpool.actors.http.comfy.comfy_graph import PoolNames
from modelpool.actors.http.comfy.comfy_workflow import outputs_of, requests_of
from modelpool.actors.http.comfy.node_errors import WorkflowRejected
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.request.workflow_fields import OperationNode
from modelpool.pool.catalog.registry.listings import FileNames
from tests.actors.http.comfy.comfy_examples import Graph, basic, node

NAMES = PoolNames(
    {"shapes": "Stable Diffusion 1", "xl": "Stable Diffusion XL", "flux": "Flux dev", "wan": "Wan text-to-video",
     "qwen": "Qwen-Image", "sound": "Stable Audio 1", "song": "ACE-Step 1.5"},
    ["style"], None, FileNames(), image_size=lambda name: (96, 64),
)  # fmt: skip


def photo(name: str) -> Image.Image:
    return Image.new("RGBA", (96, 64), (200, 30, 10, 128))


def requests(graph: Graph) -> list[GenerateRequest]:
    return [one for output in outputs_of(graph, NAMES) for one in requests_of(output, NAMES, photo)]


def warnings(graph: Graph) -> tuple[str, ...]:
    return tuple(dict.fromkeys(each for output in outputs_of(graph, NAMES) for each in output.warnings))


def seeds(request: GenerateRequest) -> list[int | None]:
    assert request.workflow is not None
    return [each.request.seed for each in request.workflow.samplings]


def nodes_of(request: GenerateRequest) -> dict[str, Any]:
    assert request.workflow is not None
    return request.workflow.nodes


def saving(graph: Graph, kind: str, source: str, **inputs: Any) -> Graph:
    graph["saved"] = node(kind, images=[source, 0], filename_prefix="a", **inputs)
    return graph


def video() -> Graph:
    graph = basic()
    graph["model"]["inputs"]["ckpt_name"] = "wan"
    graph["blank"] = node("EmptyHunyuanLatentVideo", width=64, height=64, length=7, batch_size=1)
    return graph


def test_one_latent_of_a_batch_has_the_seed_of_its_place_before_and_after_a_sampler() -> None:
    graph = basic()
    graph["blank"]["inputs"]["batch_size"] = 4
    graph["third"] = node("LatentFromBatch", samples=["sampler", 0], batch_index=2, length=1)
    graph["decoded"]["inputs"]["samples"] = ["third", 0]
    (request,) = requests(graph)
    assert seeds(request) == [7]
    again = basic(latent_image=["third", 0])
    again["third"] = node("LatentFromBatch", samples=["blank", 0], batch_index=2, length=2)
    again["blank"]["inputs"]["batch_size"] = 4
    assert [seeds(each) for each in requests(again)] == [[7], [8]], "the noise of a batch goes with its latents"
    again["same"] = node("LatentBatchSeedBehavior", samples=["third", 0], seed_behavior="fixed")
    again["sampler"]["inputs"]["latent_image"] = ["same", 0]
    assert [seeds(each) for each in requests(again)] == [[7], [7]]


def test_a_batch_of_two_images_is_an_output_for_each() -> None:
    graph = basic(latent_image=["both", 0], denoise=0.5)
    for name in ("a", "b"):
        graph[name] = node("LoadImage", image=f"{name}.png")
        graph[f"latent {name}"] = node("VAEEncode", pixels=[name, 0], vae=["model", 2])
    graph["both"] = node("LatentBatch", samples1=["latent a", 0], samples2=["latent b", 0])
    first, second = requests(graph)
    assert (seeds(first), seeds(second)) == ([5], [6])
    assert [set(nodes_of(each)) & {"latent a", "latent b"} for each in (first, second)] == [{"latent a"}, {"latent b"}]
    graph["put together"] = node("ImageBatch", image1=["a", 0], image2=["b", 0])
    graph["both"] = node("VAEEncode", pixels=["put together", 0], vae=["model", 2])
    taken = [next(n.settings for n in nodes_of(each).values() if getattr(n, "name", "") == "image_from_batch")
             for each in requests(graph)]  # fmt: skip
    assert taken == [{"start": 0, "length": 1}, {"start": 1, "length": 1}]


def test_each_frame_of_a_video_is_an_image_of_its_own_and_frames_fill_cells_of_latents() -> None:
    found = requests(video())
    assert len(found) == 5, "of 7 frames, 1 + 4 fill cells"
    assert all(each.format is None for each in found)
    ends = [nodes_of(each)[each.workflow.output].settings["start"] for each in found if each.workflow]
    assert ends == [0, 1, 2, 3, 4]
    (film,) = requests(saving(video(), "SaveAnimatedWEBP", "decoded", fps=8.0, lossless=False, quality=80))
    assert (film.format, film.workflow, film.frames) == ("webp", None, 5)


def test_texts_for_parts_of_the_steps_are_runs_behind_one_another() -> None:
    graph = basic(positive=["texts", 0])
    graph["early"] = node("ConditioningSetTimestepRange", conditioning=["positive", 0], start=0.0, end=0.3)
    graph["late"] = node("ConditioningSetTimestepRange", conditioning=["negative", 0], start=0.3, end=1.0)
    graph["texts"] = node("ConditioningCombine", conditioning_1=["early", 0], conditioning_2=["late", 0])
    (request,) = requests(graph)
    first, second = nodes_of(request)["sampler/0"], nodes_of(request)["sampler"]
    assert (first.first_step, first.last_step, first.keeps_noise, first.adds_noise) == (0, 3, True, True)
    assert (second.first_step, second.last_step, second.adds_noise) == (3, 0, False), (
        "8 steps: 0.3 of them begin 0 to 2"
    )
    assert [each.request.prompt for each in (first, second)] == [
        basic()["positive"]["inputs"]["text"], basic()["negative"]["inputs"]["text"],
    ]  # fmt: skip
    graph["late"]["inputs"]["start"] = 0.6
    with pytest.raises(WorkflowRejected) as rejected:
        requests(graph)
    assert [error.node_id for error in rejected.value.errors] == ["sampler"]
    assert "found no text that acts in step 3" in rejected.value.errors[0].details


def test_nodes_of_a_size_return_the_size_that_the_image_will_have() -> None:
    cases: dict[str, tuple[Graph, tuple[int, int]]] = {
        "loaded": ({}, (96, 64)),
        "scaled": ({"scaled": node("ImageScale", image=["loaded", 0], upscale_method="area", width=48, height=0,
                                   crop="disabled")}, (48, 32)),
        "padded": ({"padded": node("ImagePadForOutpaint", image=["loaded", 0], left=8, top=0, right=24, bottom=8,
                                   feathering=0)}, (128, 72)),
        "stitched": ({"stitched": node("ImageStitch", image1=["loaded", 0], image2=["loaded", 0], direction="down",
                                       match_image_size=True, spacing_width=7, spacing_color="red")}, (96, 136)),
        "decoded": ({}, (64, 64)),
    }  # fmt: skip
    for source, (more, size) in cases.items():
        graph = basic() | more
        graph["loaded"] = node("LoadImage", image="a.png")
        graph["size"] = node("GetImageSize", image=[source, 0])
        graph["new"] = node("EmptyLatentImage", width=["size", 0], height=["size", 1], batch_size=1)
        graph["run"] = {"class_type": "KSampler", "inputs": {**graph["sampler"]["inputs"], "latent_image": ["new", 0]}}
        graph["seen"] = node("VAEDecode", samples=["run", 0], vae=["model", 2])
        (request,) = requests(saving(graph, "SaveImage", "seen"))
        assert (request.width, request.height) == size, source


def test_a_text_for_each_text_encoder_is_an_operation_and_one_text_is_none() -> None:
    graph = basic()
    graph["model"]["inputs"]["ckpt_name"] = "xl"
    sizes = dict.fromkeys(("width", "height", "target_width", "target_height"), 64) | {"crop_w": 0, "crop_h": 0}
    graph["positive"] = node("CLIPTextEncodeSDXL", clip=["model", 1], text_g="a fox", text_l="a fox", **sizes)
    (request,) = requests(graph)
    assert (request.workflow, request.prompt) == (None, "a fox")
    graph["positive"]["inputs"]["text_l"] = "photo"
    (request,) = requests(graph)
    nodes = nodes_of(request)
    made = nodes[nodes["sampler"].inputs["positive"]]
    assert (made.name, [nodes[made.inputs[name]].prompt for name in ("first", "second")]) == (
        "encoded_of_two", ["photo", "a fox"],
    )  # fmt: skip


def test_tiles_of_the_vae_are_those_of_the_node_where_the_image_is_larger() -> None:
    graph = basic()
    graph["blank"]["inputs"] |= {"width": 1024, "height": 512}
    graph["decoded"] = node("VAEDecodeTiled", samples=["sampler", 0], vae=["model", 2], tile_size=512, overlap=64)
    (request,) = requests(graph)
    assert (request.vae_tile, request.vae_frames) == (512, None)
    assert "overlap: found 64" in warnings(graph)[0]
    graph["blank"]["inputs"]["width"] = 512
    assert requests(graph)[0].vae_tile is None
    graph = video()
    graph["blank"]["inputs"]["length"] = 33
    graph["decoded"] = node(
        "VAEDecodeTiled", samples=["sampler", 0], vae=["model", 2], tile_size=512, overlap=128, temporal_size=16,
        temporal_overlap=4,
    )  # fmt: skip
    (request,) = requests(saving(graph, "SaveWEBM", "decoded", codec="vp9", fps=8.0, crf=40.0))
    assert (request.vae_tile, request.vae_frames) == (None, 16)
    assert (request.format, request.quality) == ("webm", 60), "100 less the constant rate factor"


def test_guidance_as_an_input_is_told_of_where_a_model_has_none() -> None:
    graph = basic()
    graph["guided"] = node("FluxGuidance", conditioning=["positive", 0], guidance=30.0)
    graph["sampler"]["inputs"] |= {"positive": ["guided", 0], "cfg": 7.0}
    assert requests(graph)[0].cfg == 7.0
    assert warnings(graph) == ("node sampler: the guidance 30 is not read: model 'shapes' has no guidance as an input",)
    graph["model"]["inputs"]["ckpt_name"] = "flux"
    graph["sampler"]["inputs"]["cfg"] = 1.0
    assert (requests(graph)[0].cfg, warnings(graph)) == (30.0, ())


def test_options_of_guidance_are_left_out_where_they_do_nothing() -> None:
    graph = basic()
    graph["normed"] = node("CFGNorm", model=["model", 0], strength=0.9)
    graph["soft"] = node("DifferentialDiffusion", model=["normed", 0])
    graph["sampler"]["inputs"]["model"] = ["soft", 0]
    found = requests(graph)[0].options
    assert found is not None
    assert found.settings() == {"cfg_norm": {"strength": 0.9}, "differential": {"strength": 1.0}}
    graph["sampler"]["inputs"]["cfg"] = 1.0
    found = requests(graph)[0].options
    assert found is not None
    assert found.names == ("differential",)


def test_audio_is_a_request_with_its_length_and_its_format() -> None:
    graph = basic()
    graph["model"]["inputs"]["ckpt_name"] = "sound"
    graph["blank"] = node("EmptyLatentAudio", seconds=2.5, batch_size=1)
    graph["decoded"] = node("VAEDecodeAudio", samples=["sampler", 0], vae=["model", 2])
    graph["saved"] = node("SaveAudioMP3", audio=["decoded", 0], filename_prefix="a", quality="V0")
    (request,) = requests(graph)
    assert (request.seconds, request.format, request.width, request.workflow) == (2.5, "mp3", None, None)
    graph["short"] = node("TrimAudioDuration", audio=["decoded", 0], start_index=0.5, duration=1.0)
    graph["saved"] = node("SaveAudio", audio=["short", 0], filename_prefix="a")
    (request,) = requests(graph)
    assert (request.format, nodes_of(request)["short"].settings) == ("flac", {"start": 0.5, "seconds": 1.0})
    graph["positive"] = node("TextEncodeAceStepAudio", clip=["model", 1], tags="pop", lyrics="la", lyrics_strength=1.0)
    graph["model"]["inputs"]["ckpt_name"] = "song"
    graph["saved"]["inputs"]["audio"] = ["decoded", 0]
    (request,) = requests(graph)
    assert (request.prompt, request.lyrics) == ("pop", "la")


def test_embeddings_that_the_pool_does_not_have_are_left_out_and_told_of() -> None:
    graph = basic()
    graph["negative"]["inputs"]["text"] = "bad, embedding:easynegative, (embedding:other.pt:1.2)"
    (request,) = requests(graph)
    assert "embedding" not in request.negative
    assert [each.partition("the pool has")[2] for each in warnings(graph)] == [
        " no embedding 'easynegative': it is left out",
        " no embedding 'other.pt:1.2': it is left out",
    ]


def test_a_pattern_that_could_take_without_end_is_refused_at_once() -> None:
    for pattern, text in (("(a|a)*b", "a" * 40), ("a*a*a*b", "a" * 4000), ("(a+)+$", "a" * 40), ("a?" * 30, "a" * 30)):
        graph = basic()
        graph["found"] = node("RegexReplace", string=text, regex_pattern=pattern, replace="x", count=0)
        graph["positive"]["inputs"]["text"] = ["found", 0]
        with pytest.raises(WorkflowRejected) as rejected:
            requests(graph)
        assert {error.node_id for error in rejected.value.errors} == {"found"}, pattern


def test_patterns_that_hide_their_repetitions_are_refused_too() -> None:
    for pattern in ("(?x)(a+) +b", "(|)" * 60 + "b", "(?ix)a", "a(?i)", "(a|b)" * 30):
        graph = basic()
        graph["found"] = node("RegexReplace", string="a" * 56, regex_pattern=pattern, replace="x", count=0)
        graph["positive"]["inputs"]["text"] = ["found", 0]
        with pytest.raises(WorkflowRejected):
            requests(graph)


def test_a_mask_is_resized_with_its_image_and_sizes_are_those_of_what_a_node_makes() -> None:
    graph = basic()
    graph["photo"] = node("LoadImage", image="a.png")
    graph["small"] = node("ImageResize+", image=["photo", 0], width=48, height=48, method="keep proportion")
    graph["blank"]["inputs"] |= {"width": ["small", 1], "height": ["small", 2]}
    (request,) = requests(graph)
    assert (request.width, request.height) == (48, 32), "of 96x64"
    saved = saving(basic(), "SaveImage", "big")
    saved["photo"] = node("LoadImage", image="a.png")
    saved["big"] = node(
        "ImageResizeKJv2", image=["photo", 0], mask=["photo", 1], width=64, height=64, upscale_method="area",
        keep_proportion="stretch", pad_color="0, 0, 0", crop_position="center", divisible_by=2,
    )  # fmt: skip
    saved["seen"] = node("MaskToImage", mask=["big", 3])
    saved["more"] = node("SaveImage", images=["seen", 0], filename_prefix="mask")
    image, mask = (request.workflow for request in requests(saved))
    assert image is not None
    assert mask is not None
    scaled = (image.nodes["big"], mask.nodes["big/mask/scaled"])
    settings = [node.settings for node in scaled if isinstance(node, OperationNode)]
    assert len(settings) == 2
    assert settings[0] == settings[1]


def test_the_rows_of_a_loader_of_loras_are_read_from_files_of_the_editor() -> None:
    """None of its values has a name there: all LoRAs were left out without a word."""
    rows = [{}, {"type": "PowerLoraLoaderHeaderWidget"}, {"on": True, "lora": "x.safetensors", "strength": 0.5}, {}, ""]
    saved = {"id": 1, "type": "Power Lora Loader (rgthree)", "inputs": [], "widgets_values": rows}
    assert api_format({"nodes": [saved], "links": []})["1"]["inputs"] == {"lora_1": rows[2]}


def test_the_sides_of_the_texts_are_those_of_the_latents_times_the_scale() -> None:
    graph = basic()
    graph["sized"] = node(
        "SDXL Empty Latent Image (rgthree)", dimensions="96 x 64  (landscape)", clip_scale=2.0, batch_size=1
    )
    graph["blank"]["inputs"] |= {"width": ["sized", 1], "height": ["sized", 2]}
    assert [(each.width, each.height) for each in requests(graph)] == [(192, 128)]
