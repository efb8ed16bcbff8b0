"""ComfyUI nodes of videos: empty latents, images that a video begins or ends with, noise levels, and saving. Pure.

A video is one image of the pool with frames: batches of images that are put together are no video here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from modelpool.actors.http.comfy.comfy_made_nodes import MadeNodes
from modelpool.actors.http.comfy.comfy_node_types import (
    ANY,
    MAX_BATCH,
    MAX_SIDE,
    MODELS,
    VIDEOS,
    Builder,
    NodeInput,
    NodeUnsupported,
    combo,
    flag,
    is_one,
    link,
    node_row,
    number,
    only_in_workflows,
    shown_with,
    text,
    warn,
    warn_unread,
    whole,
)
from modelpool.actors.http.comfy.comfy_text_nodes import of_user, with_unread, with_video
from modelpool.actors.http.comfy.comfy_values import (
    AnyImage,
    BlankLatent,
    CameraValue,
    ClipValue,
    DecodedImage,
    DecodedSound,
    ModelValue,
    NodeImage,
    SavedAs,
    TextValue,
    VaeValue,
    VideoUse,
)
from modelpool.actors.request.control_video_fields import VideoFile
from modelpool.actors.request.video_output_fields import MAX_QUALITY, VIDEO_FORMATS
from modelpool.pool.values.core.sample_conditions import CAMERA_MOTIONS

_POSITIVE, _NEGATIVE, _VAE = link("positive", "CONDITIONING"), link("negative", "CONDITIONING"), link("vae", "VAE")
#: frames of a video that a node may ask for
_MOST_FRAMES = 4096
#: inputs of nodes that name a VAE, and images that were seen by a vision encoder: the model has its own
SEEN_BY_MODEL = ("vae", "clip_vision_output", "clip_vision_start_image", "clip_vision_end_image")
#: file formats of VHS_VideoCombine, by the pool's names
_COMBINED: Mapping[str, str] = MappingProxyType(
    {
        "image/gif": "gif",
        "image/webp": "webp",
        "video/webm": "webm",
        "video/h264-mp4": "mp4",
        "video/nvenc_h264-mp4": "mp4",
        **dict.fromkeys(("video/h265-mp4", "video/nvenc_hevc-mp4", "video/nvenc_av1-mp4"), "mp4"),
        "video/av1-webm": "webm",
    }
)
#: file formats with a codec that the pool does not write, and the codec of its file
_OTHER_CODECS = {"mp4": ("h265", "hevc", "av1"), "webm": ("av1",)}
_CODEC_NAMES = {"mp4": "H.264", "webm": "VP9"}


#: settings of nodes of videos
_BIT_DEPTHS, _CODECS, _NO_CODEC, _ENCODINGS = (
    ("auto", "8", "10"),
    ("auto", "h264", "av1"),
    "none",
    ("auto", "re-encode"),
)
#: colours of the images of the pool; and ComfyUI's rate factors of encoders where none is set
_COLOURS = "sRGB"
_USUAL_FACTORS: Mapping[str, float] = MappingProxyType({"h264": 23.0, "av1": 30.0})


def sizes(width: int, height: int, length: int, frames: str = "length") -> tuple[NodeInput, ...]:
    """Return the inputs of a node for the size and the frames of a video, with these defaults."""
    return (
        whole("width", width, 16, MAX_SIDE),
        whole("height", height, 16, MAX_SIDE),
        whole(frames, length, 1, _MOST_FRAMES),
        whole("batch_size", 1, 1, MAX_BATCH, is_required=False),
    )


def _blank(given: Mapping[str, Any], frames: str = "length", cell: int = 4, **more: Any) -> BlankLatent:
    """Return empty latents; of frames that fill no cell of latents, of `cell` frames after the first, none are made."""
    count = given[frames] if frames != "length" else 1 + (given[frames] - 1) // cell * cell
    return BlankLatent(given["width"], given["height"], given.get("batch_size") or 1, count, **more)


def _empty(cell: int) -> Builder:
    return lambda given: (_blank(given, cell=cell),)


def from_image(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return both texts with the images that condition them, and empty latents. Raises NodeUnsupported."""
    first, frames = _first_frames(given)
    use = VideoUse(first, of_user("end_image", given.get("end_image")), first_frames=frames)
    return *with_images(given, use), _blank(given)


def _first_frames(given: Mapping[str, Any]) -> tuple[AnyImage | None, NodeImage | None]:
    """Return the image that a video begins with; of several frames the first one, and those that the node reads. Raises
    NodeUnsupported."""
    image, nodes = given.get("start_image"), given.get("nodes")
    if nodes is None or not isinstance(image, NodeImage) or not image.frames or image.count > 1:
        return of_user("start_image", image), None
    node_id, values = given["node_id"], {"image": image}
    first = nodes.operate(f"{node_id}/first", "image_from_batch", NodeImage, values, {"start": 0, "length": 1})
    assert isinstance(first, NodeImage), "the result of an operation on images"
    count = min(image.frames, given["length"])
    if count == 1:
        return first, None
    if count < image.frames:
        settings = {"start": 0, "length": count}
        image = nodes.operate(f"{node_id}/begins", "image_from_batch", NodeImage, values, settings)
    return first, image


def _kandinsky(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Images, empty latents, and the latent of the first image, which only a workflow has."""
    return *from_image(given), None


def _camera(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """The path of a camera, and the size and the length of its video."""
    focal, centre = (given["fx"], given["fy"]), (given["cx"], given["cy"])
    if not all(focal):
        raise NodeUnsupported(f"fx, fy: found {focal[0]:g} and {focal[1]:g}, expected more than 0")
    video = given["width"], given["height"], given["length"]
    return CameraValue(given["camera_pose"], given["speed"], focal, centre, video), *video


def from_image_with_camera(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Images and empty latents of a video, with the path of its camera."""
    positive, negative, latent = from_image(given)
    camera: CameraValue | None = given.get("camera_conditions")
    if camera is None:
        return positive, negative, latent
    video = given["width"], given["height"], given["length"]
    if camera.video != video:
        found = "x".join(map(str, camera.video))
        raise NodeUnsupported(f"camera_conditions: found one for {found}, expected {'x'.join(map(str, video))}")
    use = VideoUse(camera=camera)
    return with_video(positive, use), with_video(negative, use), latent


def with_images(given: Mapping[str, Any], use: VideoUse) -> tuple[TextValue, TextValue]:
    """Return both texts with the images that condition a video."""
    positive, negative = (
        with_unread(with_video(given[name], use), given, *SEEN_BY_MODEL) for name in ("positive", "negative")
    )
    return positive, negative


def _latent_from_image(cell: int) -> Builder:
    def build(given: Mapping[str, Any]) -> tuple[Any, ...]:
        if given.get("end_image") is not None:
            raise NodeUnsupported("end_image: found an image, expected none: the model has no last frame")
        if given["vae"].name:
            _warn_of_own_vae(given)
        return (_blank(given, cell=cell, image=of_user("start_image", given.get("start_image"))),)

    return build


def _warn_of_own_vae(given: Mapping[str, Any]) -> None:
    warn(
        given, f"vae: found the one of {given['vae'].name!r}; the image is encoded by the VAE of the model that samples"
    )


def _hunyuan_from_image(given: Mapping[str, Any]) -> tuple[Any, ...]:
    warn_unread(given, "guidance_type", "the model's file says how it reads the image", own="v1 (concat)")
    use = VideoUse(of_user("start_image", given.get("start_image")))
    return with_unread(with_video(given["positive"], use), given, *SEEN_BY_MODEL), _blank(given)


def _hunyuan_text(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """The text; the model of the pool reads the image that the video begins with, too."""
    warn_unread(given, "image_interleave", "the model reads the image as it was published", own=2)
    return (with_unread(TextValue(given["prompt"], given["clip"]), given, *SEEN_BY_MODEL),)


def _svd(given: Mapping[str, Any]) -> tuple[Any, ...]:
    numbers = {
        "frame_rate": float(given["fps"]),
        "motion": given["motion_bucket_id"],
        "image_noise": given["augmentation_level"],
    }
    use = VideoUse(of_user("init_image", given["init_image"]), None, tuple(numbers.items()))
    value = with_unread(TextValue("", ClipValue(""), video=use), given, "vae")
    return value, value, _blank(given, "video_frames")


def _image_checkpoint(given: Mapping[str, Any]) -> tuple[Any, ...]:
    name = given["ckpt_name"]
    return ModelValue(name, has_vae=True), name, VaeValue(name)


def _linear_guidance(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """The guidance of the pool for these models rises from 1 to cfg over the frames."""
    if not is_one(given["min_cfg"]):
        raise NodeUnsupported(f"min_cfg: found {given['min_cfg']:g}, expected 1")
    return (given["model"],)


def _orbit(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """An orbit around an object."""
    use = VideoUse(of_user("init_image", given["init_image"]), None, (("elevation", given["elevation"]),))
    value = with_unread(TextValue("", ClipValue(""), video=use), given, "vae")
    return value, value, _blank(given, "video_frames")


def _view(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Another view of an object, of which the image is from the height of the object."""
    numbers = (("elevation", given["elevation"]), ("azimuth", given["azimuth"]), ("image_elevation", 0.0))
    use = VideoUse(of_user("init_image", given["init_image"]), None, numbers)
    value = with_unread(TextValue("", ClipValue(""), video=use), given, "vae")
    return value, value, BlankLatent(given["width"], given["height"], given["batch_size"])


def vace_texts_and_latent(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return texts with a reference image, empty latents, and the frames that are trimmed: latents of the pool have
    none of the image. Raises NodeUnsupported."""
    if not is_one(given["strength"]):
        raise NodeUnsupported(f"strength: found {given['strength']:g}, expected 1")
    reference = of_user("reference_image", given.get("reference_image"))
    texts = [with_unread(given[name], given, "vae") for name in ("positive", "negative")]
    if reference is not None:
        texts = [replace(each, references=(*each.references, reference)) for each in texts]
    return (*texts, _blank(given), 0)


def blank_video(given: Mapping[str, Any], cell: int = 4) -> BlankLatent:
    """Return empty latents of the size and the frames of a node, with `cell` frames in a cell after the first."""
    return _blank(given, cell=cell)


def _vace(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """A video after a reference image."""
    for name in ("control_video", "control_masks"):
        if given.get(name) is not None:
            raise NodeUnsupported(f"{name}: it is a part of a workflow of several steps")
    return vace_texts_and_latent(given)


def _trimmed(given: Mapping[str, Any]) -> tuple[Any, ...]:
    if given["trim_amount"]:
        raise NodeUnsupported(f"trim_amount: found {given['trim_amount']}, expected that of WanVaceToVideo, or 0")
    return (given["samples"],)


def _saved_as(given: Mapping[str, Any], images: str, saved: SavedAs) -> tuple[Any, ...]:
    """Return images that are saved as a video: as they were decoded, or of a node of a workflow."""
    image = given[images]
    nodes: MadeNodes | None = given.get("nodes")
    if nodes is None:
        _check_sound(image, given.get("audio"), saved)
        if not isinstance(image, DecodedImage) or image.scale != 1 or image.upscaler:
            raise NodeUnsupported(f"{images}: expected images as they were decoded")
        if (count := getattr(image.latent.start, "count", 1)) > 1:
            raise NodeUnsupported(f"{images}: found a batch of {count}, which are as many files; expected one")
        return (replace(image, saved=saved),)
    audio = given.get("audio")
    values = {"image": image} | ({} if audio is None else {"sound": audio})
    made = nodes.operate(given["node_id"], "video_of_images", NodeImage, values, {"rate": saved.frame_rate})
    assert isinstance(made, NodeImage), "the result of an operation on images"
    return (replace(made, saved=saved),)


def _check_sound(image: Any, audio: Any, saved: SavedAs) -> None:
    """Raise NodeUnsupported for a file with other audio than its frames have, which a request makes with them."""
    latent = getattr(image, "latent", None)
    if audio is not None and not (isinstance(audio, DecodedSound) and audio.latent is latent):
        raise NodeUnsupported("audio: a video with the audio of a node is a part of a workflow of several steps")
    has_sound = getattr(getattr(latent, "start", None), "sound", None) is not None
    if audio is None and has_sound and saved.format in VIDEO_FORMATS:
        raise NodeUnsupported("audio: frames without their audio are a part of a workflow of several steps")


def _webp(given: Mapping[str, Any]) -> tuple[Any, ...]:
    warn_unread(given, "method", "the pool chooses how hard the file is compressed", own="default")
    quality = 100 if given["lossless"] else max(1, given["quality"])
    return _saved_as(given, "images", SavedAs("webp", given["fps"], quality))


def _webm(given: Mapping[str, Any]) -> tuple[Any, ...]:
    if given["codec"] != "vp9":
        warn(given, f"codec: found {given['codec']}; WebM files of the pool have VP9")
    return _saved_as(given, "images", SavedAs("webm", given["fps"], quality_of_factor(given["crf"])))


def quality_of_factor(factor: float) -> int:
    """Return the quality of a video file for a constant rate factor (crf) of its encoder."""
    return MAX_QUALITY - round(factor)


def _animated_png(given: Mapping[str, Any]) -> tuple[Any, ...]:
    warn(given, "the pool writes no animated PNG; the file is WebP without loss, with equal pixels")
    return _saved_as(given, "images", SavedAs("webp", given["fps"], 100))


def _created(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """A video of images. Files of the pool have 8 bits per channel, in the colours of the images."""
    bits, colours, codec = str(given["bit_depth"]), given["color_space"], given["codec"]
    _check_one_of("bit_depth", bits, _BIT_DEPTHS)
    _check_one_of("codec", codec, (_NO_CODEC, *_CODECS))
    if colours != _COLOURS:
        raise NodeUnsupported(f"color_space: found {colours[:100]}, expected {_COLOURS}: the pool makes no HDR videos")
    if bits == "10":
        warn(given, "bit_depth: found 10; videos of the pool have 8 bits per channel")
    is_av1 = codec == "av1"
    if is_av1:
        warn(given, "codec: found av1; the file is WebM with VP9")
    return _saved_as(given, "images", SavedAs("webm" if is_av1 else "mp4", given["fps"]))


def _check_one_of(name: str, found: str, expected: tuple[str, ...]) -> None:
    if found not in expected:
        raise NodeUnsupported(f"{name}: found {found[:100]}, expected one of {', '.join(expected)}")


def _video_saved(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """A file of a video. Newer files of the editor name the codec as a part of the format, and keep the old name."""
    container, codecs = given["format"], {given["format.codec"], given["codec"]} - {"auto"}
    for codec in sorted(codecs):
        _check_one_of("codec", codec, _CODECS)
    if len(codecs) > 1:
        raise NodeUnsupported(f"format.codec, codec: found {' and '.join(sorted(codecs))}, expected one codec")
    codec = next(iter(codecs), "auto")
    if (container, codec) == ("webm", "h264"):
        raise NodeUnsupported("format, codec: found webm and h264; WebM files have another codec")
    video = given["video"]
    if isinstance(video, VideoFile):
        raise NodeUnsupported("video: found one of the user, which the pool does not write again")
    kept = video.saved.format if container == "auto" else "mp4"
    file_format = "webm" if container == "webm" or (codec == "av1" and container == "auto") else kept
    if container == "mkv":
        warn(given, "format: found mkv; the file is MP4")
    if codec == "av1":
        warn(given, f"codec: found av1; the file has {'VP9' if file_format == 'webm' else 'H.264'}")
    encoding, quality = given["format.codec.encoding"], video.saved.quality
    _check_one_of("format.codec.encoding", encoding, _ENCODINGS)
    if encoding == "re-encode" and codec != "auto":
        quality = quality_of_factor(given["format.codec.crf"] or _USUAL_FACTORS[codec])
    return (replace(video, saved=replace(video.saved, format=file_format, quality=quality)),)


def _combined(given: Mapping[str, Any]) -> tuple[Any, ...]:
    file_format = _COMBINED.get(given["format"])
    if file_format is None:
        raise NodeUnsupported(f"format: found {given['format'][:100]}, expected one of {', '.join(_COMBINED)}")
    if any(codec in given["format"] for codec in _OTHER_CODECS.get(file_format, ())):
        warn(given, f"format: found {given['format']}; the file has {_CODEC_NAMES[file_format]}")
    if given["pingpong"]:
        if given.get("audio") is not None:
            raise NodeUnsupported("pingpong: found true with audio, expected false: audio does not play backwards")
        if given.get("nodes") is None:
            return only_in_workflows(given)
        made: MadeNodes = given["nodes"]
        values = {"image": given["images"]}
        image = made.operate(f"{given['node_id']}/frames", "image_there_and_back", NodeImage, values, {})
        given = {**given, "images": image}
    if given["loop_count"]:
        warn(given, f"loop_count: found {given['loop_count']}; files of the pool repeat without end, or not at all")
    for name in ("save_output", "save_image"):
        if not given[name]:
            warn(given, f"{name}: found false; the file is an output all the same")
    factor = given.get("crf")
    quality = quality_of_factor(factor) if factor is not None and file_format in ("mp4", "webm") else 0
    return _saved_as(given, "images", SavedAs(file_format, given["frame_rate"], quality))


_row = partial(node_row, category="video")


def _image(name: str, is_required: bool = False) -> NodeInput:
    return link(name, "IMAGE", is_required)


_TEXTS_AND_LATENT = ("CONDITIONING", "CONDITIONING", "LATENT")
_SEEN = link("clip_vision_output", "CLIP_VISION_OUTPUT", is_required=False)
_AUDIO = link("audio", "AUDIO", is_required=False)
_IMAGES, _PREFIX = link("images", "IMAGE"), text("filename_prefix", "ComfyUI")
VIDEO_NODES = (
    _row("EmptyHunyuanLatentVideo", sizes(848, 480, 25), _empty(4), "LATENT"),
    _row("EmptyMochiLatentVideo", sizes(848, 480, 25), _empty(6), "LATENT"),
    _row("EmptyCosmosLatentVideo", sizes(1280, 704, 121), _empty(8), "LATENT"),
    _row("EmptyHunyuanVideo15Latent", sizes(848, 480, 25), _empty(4), "LATENT"),
    *(
        _row(
            name,
            (_VAE, *sizes(*size), _image("start_image"), _image("end_image")),
            _latent_from_image(cell),
            "LATENT",
        )
        for name, size, cell in (
            ("CosmosImageToVideoLatent", (1280, 704, 121), 8),
            ("CosmosPredict2ImageToVideoLatent", (848, 480, 93), 4),
        )
    ),
    _row(
        "WanFunInpaintToVideo",
        (_POSITIVE, _NEGATIVE, _VAE, *sizes(832, 480, 81), _SEEN, _image("start_image"), _image("end_image")),
        from_image,
        *_TEXTS_AND_LATENT,
    ),
    _row(
        "HunyuanVideo15ImageToVideo",
        (_POSITIVE, _NEGATIVE, _VAE, *sizes(848, 480, 33), _image("start_image"), _SEEN),
        from_image,
        *_TEXTS_AND_LATENT,
    ),
    _row(
        "WanVaceToVideo",
        (
            _POSITIVE,
            _NEGATIVE,
            _VAE,
            *sizes(832, 480, 81),
            number("strength", 1.0, 0.0, 1000.0),
            _image("control_video"),
            link("control_masks", "MASK", is_required=False),
            _image("reference_image"),
        ),
        _vace,
        *_TEXTS_AND_LATENT,
        "INT",
    ),
    _row("TrimVideoLatent", (link("samples", "LATENT"), whole("trim_amount", 0, 0, 99999)), _trimmed, "LATENT"),
    _row(
        "SV3D_Conditioning",
        (
            link("clip_vision", "CLIP_VISION"),
            _image("init_image", is_required=True),
            _VAE,
            *sizes(576, 576, 21, "video_frames")[:3],
            number("elevation", 0.0, -90.0, 90.0),
        ),
        _orbit,
        *_TEXTS_AND_LATENT,
    ),
    _row(
        "StableZero123_Conditioning",
        (
            link("clip_vision", "CLIP_VISION"),
            _image("init_image", is_required=True),
            _VAE,
            *sizes(256, 256, 1)[:2],
            whole("batch_size", 1, 1, MAX_BATCH),
            number("elevation", 0.0, -180.0, 180.0),
            number("azimuth", 0.0, -180.0, 180.0),
        ),
        _view,
        *_TEXTS_AND_LATENT,
    ),
    _row(
        "Kandinsky5ImageToVideo",
        (_POSITIVE, _NEGATIVE, _VAE, *sizes(768, 512, 121), _image("start_image")),
        _kandinsky,
        *_TEXTS_AND_LATENT,
        "LATENT",
    ),
    _row(
        "ReplaceVideoLatentFrames",
        (
            link("destination", "LATENT"),
            link("source", "LATENT", is_required=False),
            whole("index", 0, -MAX_SIDE, MAX_SIDE),
        ),
        only_in_workflows,
        "LATENT",
    ),
    _row(
        "NormalizeVideoLatentStart",
        (
            link("latent", "LATENT"),
            whole("start_frame_count", 4, 1, MAX_SIDE),
            whole("reference_frame_count", 5, 1, MAX_SIDE),
        ),
        only_in_workflows,
        "LATENT",
    ),
    _row("LoadVideo", (text("file", choices=VIDEOS),), only_in_workflows, "VIDEO"),
    _row("GetVideoComponents", (link("video", "VIDEO"),), only_in_workflows, "IMAGE", "AUDIO", "FLOAT", ANY, ANY),
    _row(
        "WanFunControlToVideo",
        (
            _POSITIVE,
            _NEGATIVE,
            _VAE,
            *sizes(832, 480, 81),
            _SEEN,
            _image("start_image"),
            _image("control_video"),
        ),
        only_in_workflows,
        *_TEXTS_AND_LATENT,
    ),
    _row(
        "Wan22FunControlToVideo",
        (
            _POSITIVE,
            _NEGATIVE,
            _VAE,
            *sizes(832, 480, 81),
            _image("ref_image"),
            _image("control_video"),
        ),
        only_in_workflows,
        *_TEXTS_AND_LATENT,
    ),
    _row(
        "WanCameraEmbedding",
        (
            combo("camera_pose", CAMERA_MOTIONS),
            *sizes(832, 480, 81)[:3],
            number("speed", 1.0, 0.0, 10.0, is_required=False),
            *(number(name, 0.5, 0.0, 1.0, is_required=False) for name in ("fx", "fy", "cx", "cy")),
        ),
        _camera,
        "WAN_CAMERA_EMBEDDING",
        "INT",
        "INT",
        "INT",
    ),
    _row(
        "WanCameraImageToVideo",
        (
            _POSITIVE,
            _NEGATIVE,
            _VAE,
            *sizes(832, 480, 81),
            _SEEN,
            _image("start_image"),
            link("camera_conditions", "WAN_CAMERA_EMBEDDING", is_required=False),
        ),
        only_in_workflows,
        *_TEXTS_AND_LATENT,
    ),
    _row(
        "WanAnimateToVideo",
        (
            _POSITIVE,
            _NEGATIVE,
            _VAE,
            *sizes(832, 480, 77),
            _SEEN,
            _image("reference_image"),
            _image("face_video"),
            _image("pose_video"),
            whole("continue_motion_max_frames", 5, 1, _MOST_FRAMES, is_required=False),
            _image("background_video"),
            link("character_mask", "MASK", is_required=False),
            _image("continue_motion"),
            whole("video_frame_offset", 0, 0, _MOST_FRAMES, is_required=False),
        ),
        only_in_workflows,
        *_TEXTS_AND_LATENT,
        "INT",
        "INT",
        "INT",
    ),
    _row(
        "WanImageToVideo",
        (_POSITIVE, _NEGATIVE, _VAE, *sizes(832, 480, 81), _SEEN, _image("start_image")),
        from_image,
        *_TEXTS_AND_LATENT,
    ),
    _row(
        "WanFirstLastFrameToVideo",
        (
            _POSITIVE,
            _NEGATIVE,
            _VAE,
            *sizes(832, 480, 81),
            *(link(f"clip_vision_{one}_image", "CLIP_VISION_OUTPUT", is_required=False) for one in ("start", "end")),
            _image("start_image"),
            _image("end_image"),
        ),
        from_image,
        *_TEXTS_AND_LATENT,
    ),
    _row(
        "Wan22ImageToVideoLatent",
        (_VAE, *sizes(1280, 704, 49), _image("start_image")),
        _latent_from_image(4),
        "LATENT",
    ),
    _row(
        "HunyuanImageToVideo",
        (
            _POSITIVE,
            _VAE,
            *sizes(848, 480, 53),
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
            *sizes(1024, 576, 14, "video_frames")[:3],
            whole("motion_bucket_id", 127, 1, 1023),
            whole("fps", 6, 1, 1024),
            number("augmentation_level", 0.0, 0.0, 10.0),
        ),
        _svd,
        *_TEXTS_AND_LATENT,
    ),
    _row("ImageOnlyCheckpointLoader", (combo("ckpt_name", MODELS),), _image_checkpoint, "MODEL", "CLIP_VISION", "VAE"),
    *(
        _row(name, (link("model", "MODEL"), number("min_cfg", 1.0, 0.0, 100.0)), _linear_guidance, "MODEL")
        for name in ("VideoLinearCFGGuidance", "VideoTriangleCFGGuidance")
    ),
    _row(
        "SaveAnimatedWEBP",
        (
            _IMAGES,
            _PREFIX,
            number("fps", 6.0, 0.01, 1000.0),
            flag("lossless", True),
            whole("quality", 80, 0, 100),
            text("method", "default", choices=("default", "fastest", "slowest")),
        ),
        _webp,
        is_output=True,
    ),
    _row(
        "SaveAnimatedPNG",
        (_IMAGES, _PREFIX, number("fps", 6.0, 0.01, 1000.0), whole("compress_level", 4, 0, 9)),
        _animated_png,
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
        (
            _IMAGES,
            number("fps", 30.0, 1.0, 120.0),
            text("bit_depth", "auto", is_required=False, choices=_BIT_DEPTHS),
            text("color_space", _COLOURS, is_required=False, choices=(_COLOURS, "HDR", "HDR PQ")),
            text("codec", _NO_CODEC, is_required=False, choices=(_NO_CODEC, *_CODECS)),
            _AUDIO,
        ),
        _created,
        "VIDEO",
    ),
    _row(
        "SaveVideo",
        (
            link("video", "VIDEO"),
            _PREFIX,
            combo("format", ("auto", "mp4", "mkv", "webm"), is_required=False),
            text("format.codec", "auto", is_required=False, choices=_CODECS),
            shown_with(
                "format.codec", ("h264", "av1"), text("format.codec.encoding", "auto", False, choices=_ENCODINGS)
            ),
            shown_with("format.codec.encoding", ("re-encode",), number("format.codec.crf", 0.0, 0.0, 63.0, False)),
            text("codec", "auto", is_required=False, choices=_CODECS),
        ),
        _video_saved,
        "VIDEO",
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
            flag("pingpong"),
            flag("save_output", True, is_required=False),
            number("crf", 19.0, 0.0, 49.0, is_required=False),
            flag("save_image", True, is_required=False),  # of files of 2023, for save_output
            _AUDIO,
        ),
        _combined,
        is_output=True,
    ),
)
