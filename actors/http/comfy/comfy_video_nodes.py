"""ComfyUI nodes of videos: empty latents, images that a video begins or ends with, noise levels, and saving. Pure.

A video is one image of the pool with frames: batches of images that are put together are no video here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from modelpool.actors.http.comfy.comfy_made_nodes import MadeNodes
from modelpool.actors.http.comfy.comfy_node_types import (
    MAX_BATCH,
    MAX_SIDE,
    MODELS,
    NodeInput,
    NodeType,
    NodeUnsupported,
    combo,
    link,
    number,
    text,
    whole,
)
from modelpool.actors.http.comfy.comfy_values import (
    BlankLatent,
    ClipValue,
    DecodedImage,
    ImageFile,
    ModelValue,
    NodeImage,
    NoiseLevels,
    SavedAs,
    TextValue,
    VaeValue,
    VideoUse,
)
from modelpool.pool.inference.sampling.sampler_names import MAX_STEPS

_POSITIVE, _NEGATIVE, _VAE = link("positive", "CONDITIONING"), link("negative", "CONDITIONING"), link("vae", "VAE")
#: frames of a video that a node may ask for
_MOST_FRAMES = 4096
#: patches of LTX: pixels of a side, and frames; and the numbers of patches between which its shift is interpolated
_LTX_SIDE, _LTX_FRAMES, _LTX_TOKENS = 32, 8, (1024, 4096)
#: file formats of VHS_VideoCombine, by the pool's names
_COMBINED: Mapping[str, str] = MappingProxyType(
    {"image/gif": "gif", "image/webp": "webp", "video/webm": "webm", "video/h264-mp4": "mp4"}
)


def _sizes(width: int, height: int, length: int, frames: str = "length") -> tuple[NodeInput, ...]:
    return (
        whole("width", width, 16, MAX_SIDE),
        whole("height", height, 16, MAX_SIDE),
        whole(frames, length, 1, _MOST_FRAMES),
        whole("batch_size", 1, 1, MAX_BATCH, is_required=False),
    )


def _blank(given: Mapping[str, Any], frames: str = "length", **more: Any) -> BlankLatent:
    return BlankLatent(given["width"], given["height"], given.get("batch_size") or 1, given[frames], **more)


def _empty(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (_blank(given),)


def _from_image(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Images and empty latents; the images condition both texts."""
    use = VideoUse(given.get("start_image"), given.get("end_image"))
    return _with(given["positive"], use), _with(given["negative"], use), _blank(given)


def _with(text_value: TextValue, use: VideoUse) -> TextValue:
    """Return a text with what else conditions a video. What was set before is kept where this says nothing."""
    before = text_value.video or VideoUse()
    names = ("image", "last_image", "frame_rate", "motion", "image_noise")
    return replace(
        text_value,
        video=VideoUse(*(getattr(before if getattr(use, name) is None else use, name) for name in names)),
    )


def _with_frame_rate(given: Mapping[str, Any]) -> tuple[Any, ...]:
    use = VideoUse(frame_rate=given["frame_rate"])
    return _with(given["positive"], use), _with(given["negative"], use)


def _ltx_from_image(given: Mapping[str, Any]) -> tuple[Any, ...]:
    if given["strength"] != 1:
        raise NodeUnsupported(f"strength: found {given['strength']:g}, expected 1: the image is the first frame")
    use = VideoUse(given["image"])
    return _with(given["positive"], use), _with(given["negative"], use), _blank(given)


def _latent_from_image(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (_blank(given, image=given.get("start_image")),)


def _hunyuan_from_image(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return _with(given["positive"], VideoUse(given.get("start_image"))), _blank(given)


def _hunyuan_text(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """The text; the model of the pool reads the image that the video begins with, too."""
    return (TextValue(given["prompt"], given["clip"]),)


def _svd(given: Mapping[str, Any]) -> tuple[Any, ...]:
    use = VideoUse(
        given["init_image"],
        frame_rate=float(given["fps"]),
        motion=given["motion_bucket_id"],
        image_noise=given["augmentation_level"],
    )
    value = TextValue("", ClipValue(""), video=use)
    return value, value, _blank(given, "video_frames")


def _image_checkpoint(given: Mapping[str, Any]) -> tuple[Any, ...]:
    name = given["ckpt_name"]
    return ModelValue(name), name, VaeValue(name)


def _linear_guidance(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """The guidance of the pool for these models rises from 1 to cfg over the frames."""
    if given["min_cfg"] != 1:
        raise NodeUnsupported(f"min_cfg: found {given['min_cfg']:g}, expected 1")
    return (given["model"],)


def _ltx_levels(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return levels that are shifted by the number of patches, and stretched so that the last one is `terminal`."""
    latent = given.get("latent")
    tokens = _LTX_TOKENS[1]
    if isinstance(latent, BlankLatent):
        cells = (1 + (latent.frames - 1) // _LTX_FRAMES) if latent.frames else 1
        tokens = cells * (latent.width // _LTX_SIDE) * (latent.height // _LTX_SIDE)
    elif latent is not None:
        raise NodeUnsupported("latent: expected empty latents")
    few, many = _LTX_TOKENS
    slope = (given["max_shift"] - given["base_shift"]) / (many - few)
    shift = math.exp(tokens * slope + given["base_shift"] - slope * few)
    steps = given["steps"]
    levels = [shift / (shift + 1 / (1 - place / steps) - 1) for place in range(steps)]
    if given["stretch"] and levels[-1] < 1:
        scale = (1 - levels[-1]) / (1 - given["terminal"])
        levels = [1 - (1 - level) / scale for level in levels]
    return (NoiseLevels("", steps, steps, tuple(levels)),)


def _saved_as(given: Mapping[str, Any], images: str, saved: SavedAs) -> tuple[Any, ...]:
    """Return images that are saved as a video: as they were decoded, or of a node of a workflow."""
    image = given[images]
    nodes: MadeNodes | None = given.get("nodes")
    if nodes is None:
        if not isinstance(image, DecodedImage) or image.scale != 1 or image.upscaler:
            raise NodeUnsupported(f"{images}: expected images as they were decoded")
        if (count := getattr(image.latent.start, "count", 1)) > 1:
            raise NodeUnsupported(f"{images}: found a batch of {count}, which are as many files; expected one")
        return (replace(image, saved=saved),)
    if isinstance(image, ImageFile):
        raise NodeUnsupported(f"{images}: expected images that are generated or changed, found those of LoadImage")
    made = nodes.operate(given["node_id"], "video_of_images", NodeImage, {"image": image}, {"rate": saved.frame_rate})
    assert isinstance(made, NodeImage), "the result of an operation on images"
    return (replace(made, saved=saved),)


def _webp(given: Mapping[str, Any]) -> tuple[Any, ...]:
    quality = 100 if given["lossless"] else max(1, given["quality"])
    return _saved_as(given, "images", SavedAs("webp", given["fps"], quality))


def _webm(given: Mapping[str, Any]) -> tuple[Any, ...]:
    if given["codec"] != "vp9":
        raise NodeUnsupported(f"codec: found {given['codec']}, expected vp9")
    return _saved_as(given, "images", SavedAs("webm", given["fps"]))


def _created(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return _saved_as(given, "images", SavedAs("mp4", given["fps"]))


def _video_saved(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (given["video"],)


def _combined(given: Mapping[str, Any]) -> tuple[Any, ...]:
    file_format = _COMBINED.get(given["format"])
    if file_format is None:
        raise NodeUnsupported(f"format: found {given['format'][:100]}, expected one of {', '.join(_COMBINED)}")
    if given["pingpong"] or given["loop_count"]:
        raise NodeUnsupported("pingpong, loop_count: expected false, and 0")
    return _saved_as(given, "images", SavedAs(file_format, given["frame_rate"]))


def _row(
    name: str,
    inputs: tuple[NodeInput, ...],
    build: Callable[[Mapping[str, Any]], tuple[Any, ...]],
    *outputs: str,
    is_output: bool = False,
) -> NodeType:
    return NodeType(name, "video", inputs, outputs, build, is_output)


def _image(name: str, is_required: bool = False) -> NodeInput:
    return link(name, "IMAGE", is_required)


_TEXTS_AND_LATENT = ("CONDITIONING", "CONDITIONING", "LATENT")
_SEEN = link("clip_vision_output", "CLIP_VISION_OUTPUT", is_required=False)
_IMAGES, _PREFIX = link("images", "IMAGE"), text("filename_prefix", "ComfyUI")
VIDEO_NODES = (
    _row("EmptyHunyuanLatentVideo", _sizes(848, 480, 25), _empty, "LATENT"),
    _row("EmptyLTXVLatentVideo", _sizes(768, 512, 97), _empty, "LATENT"),
    _row("EmptyMochiLatentVideo", _sizes(848, 480, 25), _empty, "LATENT"),
    _row("EmptyCosmosLatentVideo", _sizes(1280, 704, 121), _empty, "LATENT"),
    _row(
        "LTXVConditioning",
        (_POSITIVE, _NEGATIVE, number("frame_rate", 25.0, 0.1, 1000.0)),
        _with_frame_rate,
        "CONDITIONING",
        "CONDITIONING",
    ),
    _row(
        "LTXVImgToVideo",
        (
            _POSITIVE,
            _NEGATIVE,
            _VAE,
            _image("image", is_required=True),
            *_sizes(768, 512, 97),
            number("strength", 1.0, 0.0, 1.0, is_required=False),
        ),
        _ltx_from_image,
        *_TEXTS_AND_LATENT,
    ),
    _row(
        "LTXVScheduler",
        (
            whole("steps", 20, 1, MAX_STEPS),
            number("max_shift", 2.05, 0.0, 100.0),
            number("base_shift", 0.95, 0.0, 100.0),
            NodeInput("stretch", "BOOLEAN", True),
            number("terminal", 0.1, 0.0, 0.99),
            link("latent", "LATENT", is_required=False),
        ),
        _ltx_levels,
        "SIGMAS",
    ),
    _row(
        "WanImageToVideo",
        (_POSITIVE, _NEGATIVE, _VAE, *_sizes(832, 480, 81), _SEEN, _image("start_image")),
        _from_image,
        *_TEXTS_AND_LATENT,
    ),
    _row(
        "WanFirstLastFrameToVideo",
        (
            _POSITIVE,
            _NEGATIVE,
            _VAE,
            *_sizes(832, 480, 81),
            *(link(f"clip_vision_{one}_image", "CLIP_VISION_OUTPUT", is_required=False) for one in ("start", "end")),
            _image("start_image"),
            _image("end_image"),
        ),
        _from_image,
        *_TEXTS_AND_LATENT,
    ),
    _row(
        "Wan22ImageToVideoLatent",
        (_VAE, *_sizes(1280, 704, 49), _image("start_image")),
        _latent_from_image,
        "LATENT",
    ),
    _row(
        "HunyuanImageToVideo",
        (
            _POSITIVE,
            _VAE,
            *_sizes(848, 480, 53),
            text("guidance_type", "v1 (concat)", choices=("v1 (concat)", "v2 (replace)", "custom")),
            _image("start_image"),
        ),
        _hunyuan_from_image,
        "CONDITIONING",
        "LATENT",
    ),
    _row(
        "TextEncodeHunyuanVideo_ImageToVideo",
        (
            link("clip", "CLIP"),
            link("clip_vision_output", "CLIP_VISION_OUTPUT"),
            text("prompt"),
            whole("image_interleave", 2, 1, 512),
        ),
        _hunyuan_text,
        "CONDITIONING",
    ),
    _row(
        "SVD_img2vid_Conditioning",
        (
            link("clip_vision", "CLIP_VISION"),
            _image("init_image", is_required=True),
            _VAE,
            *_sizes(1024, 576, 14, "video_frames")[:3],
            whole("motion_bucket_id", 127, 1, 255),
            whole("fps", 6, 1, 1024),
            number("augmentation_level", 0.0, 0.0, 10.0),
        ),
        _svd,
        *_TEXTS_AND_LATENT,
    ),
    _row("ImageOnlyCheckpointLoader", (combo("ckpt_name", MODELS),), _image_checkpoint, "MODEL", "CLIP_VISION", "VAE"),
    _row(
        "VideoLinearCFGGuidance",
        (link("model", "MODEL"), number("min_cfg", 1.0, 0.0, 100.0)),
        _linear_guidance,
        "MODEL",
    ),
    _row(
        "SaveAnimatedWEBP",
        (
            _IMAGES,
            _PREFIX,
            number("fps", 6.0, 0.01, 1000.0),
            NodeInput("lossless", "BOOLEAN", True),
            whole("quality", 80, 0, 100),
            text("method", "default", choices=("default", "fastest", "slowest")),
        ),
        _webp,
        is_output=True,
    ),
    _row(
        "SaveWEBM",
        (
            _IMAGES,
            _PREFIX,
            combo("codec", ("vp9", "av1")),
            number("fps", 24.0, 0.01, 1000.0),
            number("crf", 32.0, 0.0, 63.0),
        ),
        _webm,
        is_output=True,
    ),
    _row(
        "CreateVideo",
        (_IMAGES, number("fps", 30.0, 1.0, 120.0)),
        _created,
        "VIDEO",
    ),
    _row(
        "SaveVideo",
        (
            link("video", "VIDEO"),
            _PREFIX,
            combo("format", ("auto", "mp4")),
            combo("codec", ("auto", "h264")),
        ),
        _video_saved,
        is_output=True,
    ),
    _row(
        "VHS_VideoCombine",
        (
            _IMAGES,
            number("frame_rate", 8.0, 1.0, 1000.0),
            whole("loop_count", 0, 0, 100),
            _PREFIX,
            text("format", "image/gif", choices=tuple(_COMBINED)),
            NodeInput("pingpong", "BOOLEAN", False),
            NodeInput("save_output", "BOOLEAN", True),
        ),
        _combined,
        is_output=True,
    ),
)
