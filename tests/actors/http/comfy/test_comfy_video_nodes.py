"""Workflows of videos become requests for videos, in the file that their last node saves; what no request says becomes
a workflow, or is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PIL import Image

from modelpool.actors.http.comfy.comfy_graph import PoolNames
from modelpool.actors.http.comfy.comfy_workflow import outputs_of, requests_of
from modelpool.actors.http.comfy.node_errors import WorkflowRejected
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.request.workflow_fields import OperationNode, SampleNode
from tests.actors.http.comfy.comfy_examples import Graph, basic, node

NAMES = PoolNames({"wan": "Wan 2.1", "ltx": "LTX Video", "svd": "Stable Video Diffusion"}, [])


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
    with pytest.raises(WorkflowRejected, match=r"strength: found 0\.5, expected 1"):
        made(graph)


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
