"""Workflows of videos become requests for videos, in the file that their last node saves; what no request says becomes
a workflow, or is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PIL import Image

from modelpool.actors.http.comfy.comfy_export import api_format
from modelpool.actors.http.comfy.comfy_graph import PoolNames
from modelpool.actors.http.comfy.comfy_workflow import outputs_of, requests_of
from modelpool.actors.http.comfy.node_errors import WorkflowRejected
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.request.workflow_fields import OperationNode, SampleNode
from tests.actors.http.comfy.comfy_examples import Graph, basic, node

NAMES = PoolNames({"wan": "Wan 2.2 image-to-video", "ltx": "LTX-Video", "svd": "Stable Video Diffusion"}, [])


def made(graph: Graph) -> GenerateRequest:
    (output,) = outputs_of(graph, NAMES)
    (request,) = requests_of(output, NAMES, lambda name: Image.new("RGB", (64, 48), "red"))
    return request


def video(model: str, save: str = "SaveWEBM", **settings: Any) -> Graph:
    """A video of a text."""
    graph = basic(model)
    graph["blank"] = node("EmptyHunyuanLatentVideo", width=64, height=32, length=9, batch_size=1)
    chosen: dict[str, dict[str, Any]] = {
        "SaveWEBM": {"codec": "vp9", "fps": 16.0, "crf": 32.0},
        "SaveAnimatedWEBP": {"fps": 16.0, "quality": 70},
    }
    inputs = {**chosen.get(save, {}), **settings}
    graph["saved"] = node(save, images=["decoded", 0], filename_prefix="video", **inputs)
    return graph


def from_image(graph: Graph, name: str, **inputs: Any) -> Graph:
    """A video that begins with an image, by a node that conditions both texts."""
    graph["loaded"] = node("LoadImage", image="a.png")
    texts = {"positive": ["positive", 0], "negative": ["negative", 0], "vae": ["model", 2]}
    size = {"width": 64, "height": 32, "length": 9, "batch_size": 1}
    graph["blank"] = node(name, **texts, **size, **inputs)
    sampler = graph["sampler"]["inputs"]
    sampler |= {"positive": ["blank", 0], "negative": ["blank", 1], "latent_image": ["blank", 2]}
    return graph


def test_a_video_has_the_frames_and_the_file_of_its_nodes() -> None:
    request = made(video("wan"))
    assert (request.model, request.width, request.height, request.frames) == ("wan", 64, 32, 9)
    assert (request.format, request.frame_rate, request.prompt) == ("webm", 16.0, "a red circle")
    request = made(video("wan", "SaveAnimatedWEBP", lossless=False))
    assert (request.format, request.quality) == ("webp", 70)
    assert made(video("wan", "SaveAnimatedWEBP", lossless=True)).quality == 100
    graph = video("wan", "VHS_VideoCombine", frame_rate=8, format="video/h264-mp4", loop_count=0, pingpong=False)
    assert (made(graph).format, made(graph).frame_rate) == ("mp4", 8.0)
    graph["saved"]["inputs"] |= {"pingpong": True, "save_image": True}
    back = made(graph)
    assert back.workflow is not None
    last = back.workflow.nodes[back.workflow.output]
    assert [last.name, back.workflow.nodes[last.inputs["image"]].name] == ["video_of_images", "image_there_and_back"]
    graph["saved"]["inputs"]["audio"] = ["sound", 0]
    graph["sound"] = node("EmptyAudio", duration=1.0, sample_rate=44100, channels=2)
    with pytest.raises(WorkflowRejected, match="pingpong: found true with audio"):
        made(graph)
    graph["saved"] = node("SaveVideo", video=["made", 0], filename_prefix="v", format="auto", codec="auto")
    graph["made"] = node("CreateVideo", images=["decoded", 0], fps=24.0)
    assert (made(graph).format, made(graph).frame_rate) == ("mp4", 24.0)
    graph["saved"] = node("VHS_VideoCombine", images=["decoded", 0], frame_rate=8, format="video/ProRes", loop_count=1)
    with pytest.raises(WorkflowRejected, match="format: found video/ProRes, expected one of image/gif"):
        made(graph)


def test_images_that_a_video_begins_and_ends_with() -> None:
    request = made(from_image(video("wan"), "WanImageToVideo", start_image=["loaded", 0]))
    assert request.image is not None
    assert np.array_equal(np.unique(request.image.pixels.reshape(-1, 3), axis=0), [[255, 0, 0]])
    assert (request.frames, request.last_image) == (9, None)
    images = {"start_image": ["loaded", 0], "end_image": ["loaded", 0]}
    assert made(from_image(video("wan"), "WanFirstLastFrameToVideo", **images)).last_image is not None
    graph = video("wan")
    graph["loaded"] = node("LoadImage", image="a.png")
    graph["blank"] = node(
        "Wan22ImageToVideoLatent", vae=["model", 2], width=64, height=32, length=9, start_image=["loaded", 0]
    )
    assert made(graph).image is not None
    graph = from_image(video("ltx"), "LTXVImgToVideo", image=["loaded", 0], strength=1.0)
    assert made(graph).image is not None
    graph["blank"]["inputs"]["strength"] = 0.5
    (run,) = made(graph).workflow.samplings
    assert [(guide.frame, guide.strength) for guide in run.guides] == [(0, 0.5)]


def test_stable_video_diffusion() -> None:
    graph = {
        "model": node("ImageOnlyCheckpointLoader", ckpt_name="svd.safetensors"),
        "loaded": node("LoadImage", image="a.png"),
        "guided": node("VideoLinearCFGGuidance", model=["model", 0], min_cfg=1.0),
        "video": node(
            "SVD_img2vid_Conditioning",
            clip_vision=["model", 1], init_image=["loaded", 0], vae=["model", 2], width=64, height=32, video_frames=14,
            motion_bucket_id=90, fps=6, augmentation_level=0.1,
        ),
        "sampler": node(
            "KSampler",
            model=["guided", 0], positive=["video", 0], negative=["video", 1], latent_image=["video", 2], seed=3,
            steps=4, cfg=2.5, sampler_name="euler", scheduler="karras", denoise=1.0,
        ),
        "decoded": node("VAEDecode", samples=["sampler", 0], vae=["model", 2]),
        "saved": node("SaveAnimatedWEBP", images=["decoded", 0], filename_prefix="svd", fps=6.0, lossless=False),
    }  # fmt: skip
    request = made(graph)
    assert (request.motion, request.image_noise, request.frames, request.frame_rate) == (90, 0.1, 14, 6.0)
    graph["saved"]["inputs"]["fps"] = 12.0
    request = made(graph)
    assert request.workflow is not None, "the model makes 6 frames per second, and the file shows 12"
    sampled, shown = request.workflow.nodes["sampler"], request.workflow.nodes["saved"]
    assert isinstance(sampled, SampleNode)
    assert isinstance(shown, OperationNode)
    assert (sampled.request.frame_rate, sampled.request.frames, sampled.request.motion) == (6.0, 14, 90)
    assert (shown.name, shown.settings, request.format) == ("video_of_images", {"rate": 12.0}, "webp")


def test_levels_of_ltx_are_shifted_by_the_patches_and_end_at_terminal() -> None:
    graph = video("ltx")
    graph["blank"] = node("EmptyLTXVLatentVideo", width=768, height=512, length=97, batch_size=1)
    graph["guider"] = node("CFGGuider", model=["model", 0], positive=["positive", 0], negative=["negative", 0], cfg=3.0)
    graph["noise"], graph["chosen"] = node("RandomNoise", noise_seed=1), node("KSamplerSelect", sampler_name="euler")
    graph["levels"] = node(
        "LTXVScheduler", steps=4, max_shift=2.05, base_shift=0.95, stretch=True, terminal=0.1, latent=["blank", 0]
    )
    parts = {"noise": "noise", "guider": "guider", "sampler": "chosen", "sigmas": "levels", "latent_image": "blank"}
    graph["sampler"] = node("SamplerCustomAdvanced", **{name: [source, 0] for name, source in parts.items()})
    request = made(graph)
    tokens = 13 * 24 * 16
    shift = np.exp(0.95 + (2.05 - 0.95) * (tokens - 1024) / (4096 - 1024))
    times = np.array([1.0, 0.75, 0.5, 0.25])
    plain = shift * times / (1 + (shift - 1) * times)
    wanted = 1 - (1 - plain) * 0.9 / (1 - plain[-1])
    assert request.sigmas == pytest.approx(wanted)
    assert request.sigmas[-1] == pytest.approx(0.1)


def in_editor(kind: str, values: list[Any], source: str) -> dict[str, Any]:
    """The inputs of a node that saves or makes a video, from its widgets in a file of the editor."""
    nodes = [
        {"id": 1, "type": source, "inputs": [], "outputs": [], "widgets_values": []},
        {"id": 2, "type": kind, "inputs": [{"name": "video", "link": 1}], "widgets_values": values},
    ]
    found = api_format({"nodes": nodes, "links": [[1, 1, 0, 2, 0, "*"]]})
    inputs: dict[str, Any] = found["2"]["inputs"]
    return {name: value for name, value in inputs.items() if name != "video"}


def test_widgets_of_nodes_that_save_are_read_in_files_of_every_age() -> None:
    """The editor shows a setting next to some values of another one alone; "the order of its widgets is not known"."""
    cases: list[tuple[str, list[Any], dict[str, Any]]] = [
        ("SaveVideo", ["v", "auto", "auto"], {"format": "auto", "format.codec": "auto"}),
        ("SaveVideo", ["v", "mp4", "h264"], {"format": "mp4", "format.codec": "h264"}),
        ("SaveVideo", ["v", "mp4", "auto", "auto"], {"format": "mp4", "format.codec": "auto", "codec": "auto"}),
        (
            "SaveVideo",
            ["v", "mp4", "h264", "re-encode", 30.0],
            {"format": "mp4", "format.codec": "h264", "format.codec.encoding": "re-encode", "format.codec.crf": 30.0},
        ),
        ("CreateVideo", [24], {"fps": 24}),
        ("CreateVideo", [24, 8], {"fps": 24, "bit_depth": 8}),
        ("CreateVideo", [24, "auto", "sRGB"], {"fps": 24, "bit_depth": "auto", "color_space": "sRGB"}),
        (
            "CreateVideo",
            [24, "auto", "sRGB", "none"],
            {"fps": 24, "bit_depth": "auto", "color_space": "sRGB", "codec": "none"},
        ),
        ("SaveAudioAdvanced", ["a", "flac"], {"format": "flac"}),
        ("SaveAudioAdvanced", ["a", "mp3", "V0"], {"format": "mp3", "format.quality": "V0"}),
        ("LoadVideo", ["a.mp4", "image"], {"file": "a.mp4"}),
    ]
    for kind, values, expected in cases:
        found = in_editor(kind, values, "GetVideoComponents")
        assert {name: value for name, value in found.items() if name != "filename_prefix"} == expected, (kind, values)
    with pytest.raises(WorkflowRejected) as refused:
        in_editor("CreateVideo", [24, "auto", "sRGB", "none", "new"], "GetVideoComponents")
    (error,) = refused.value.errors
    assert "found 1 value more ('new')" in error.details


def test_files_of_videos_have_the_format_and_the_quality_that_a_node_chooses() -> None:
    graph = video("wan")
    graph["made"] = node("CreateVideo", images=["decoded", 0], fps=24.0)

    def saved(**settings: Any) -> tuple[str | None, int | None, tuple[str, ...]]:
        graph["saved"] = node("SaveVideo", video=["made", 0], filename_prefix="v", **settings)
        (output,) = outputs_of(graph, NAMES)
        (request,) = requests_of(output, NAMES, lambda name: Image.new("RGB", (64, 48), "red"))
        return request.format, request.quality, tuple(warning.partition("): ")[2] for warning in output.warnings)

    assert saved(format="auto", codec="auto") == ("mp4", None, ())
    assert saved(**{"format": "webm", "format.codec": "auto"})[:2] == ("webm", None)
    assert saved(**{"format": "auto", "format.codec": "av1"})[0] == "webm"
    assert saved(format="mkv") == ("mp4", None, ("format: found mkv; the file is MP4",))
    encoded = {"format.codec": "h264", "format.codec.encoding": "re-encode", "format.codec.crf": 30.0}
    assert saved(format="mp4", **encoded)[:2] == ("mp4", 70)
    for settings, problem in (
        ({"format": "webm", "codec": "h264"}, "webm and h264"),
        ({"format": "mp4", "format.codec": "av1", "codec": "h264"}, "found av1 and h264, expected one codec"),
        ({"format": "mp4", "codec": "prores"}, "codec: found prores, expected one of auto, h264, av1"),
    ):
        with pytest.raises(WorkflowRejected, match=problem):
            saved(**settings)
    for name, value, problem in (
        ("color_space", "HDR PQ", "found HDR PQ, expected sRGB"),
        ("bit_depth", 12, "bit_depth: found 12, expected one of auto, 8, 10"),
        ("codec", "prores", "codec: found prores, expected one of none, auto, h264, av1"),
    ):
        graph["made"] = node("CreateVideo", images=["decoded", 0], fps=24.0, **{name: value})
        with pytest.raises(WorkflowRejected, match=problem):
            saved(format="auto")
    graph["made"] = node("CreateVideo", images=["decoded", 0], fps=24.0, bit_depth=10)
    assert saved(format="auto")[2] == ("bit_depth: found 10; videos of the pool have 8 bits per channel",)


def test_nodes_change_only_layers_that_a_model_has() -> None:
    """ComfyUI's nodes name layers: some are of UNets and of LTX alone, and single blocks of Flux and its relatives. The
    template of Wan's inpainting model was accepted, and failed in its run."""
    graph = basic("sd1")
    factors = {"self_structural": 1.2, "cross_structural": 0.5, "self_temporal": 1.0, "cross_temporal": 1.3}
    graph["scaled"] = node("UNetTemporalAttentionMultiply", model=["model", 0], **factors)
    graph["sampler"]["inputs"]["model"] = ["scaled", 0]
    names = PoolNames({"sd1": "Stable Diffusion 1", "wan": "Wan 2.1 image-to-video"}, [])

    def options() -> Any:
        (output,) = outputs_of(graph, names)
        (request,) = requests_of(output, names, lambda name: Image.new("RGB", (64, 48), "red"))
        return request.options

    chosen = options().attention_scale
    assert dict(chosen.image) == dict.fromkeys(("IN", "MID", "OUT"), 1.2)
    assert dict(chosen.text) == dict.fromkeys(("IN", "MID", "OUT"), 0.5)
    graph["model"]["inputs"]["ckpt_name"] = "wan.safetensors"
    graph["blank"] = node("EmptyHunyuanLatentVideo", width=64, height=64, length=5, batch_size=1)
    graph["saved"] = node("SaveAnimatedWEBP", images=["decoded", 0], filename_prefix="v", fps=8.0, lossless=False,
                          quality=80, method="default")  # fmt: skip
    skipped = {"double_layers": "9,10", "single_layers": "9,10", "scale": 3.0}
    graph["skipping"] = node("SkipLayerGuidanceDiT", model=["model", 0], **skipped)
    graph["scaled"]["inputs"]["model"] = ["skipping", 0]
    assert (options().slg.layers, options().slg.single) == ((9, 10), ()), "the model has no single blocks"
    assert getattr(options(), "attention_scale", None) is None
