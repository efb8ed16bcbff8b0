"""Videos of the user in ComfyUI workflows, and the nodes with which models follow videos: VACE, Fun control, and
animation. What a model follows is a value of the workflow: frames of a file, of a sampler, or of operations. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from modelpool.actors.http.comfy.comfy_made_nodes import MadeNodes
from modelpool.actors.http.comfy.comfy_node_types import Builder, NodeUnsupported, warn
from modelpool.actors.http.comfy.comfy_text_nodes import of_user, with_unread, with_video
from modelpool.actors.http.comfy.comfy_values import AnyImage, NodeImage, NodeLatent, NodeMask, VideoUse
from modelpool.actors.http.comfy.comfy_video_nodes import (
    SEEN_BY_MODEL,
    blank_video,
    from_image_with_camera,
    vace_texts_and_latent,
)
from modelpool.actors.request.audio_fields import AudioFile, audio_facts
from modelpool.actors.request.control_video_fields import VideoFile
from modelpool.pool.values.core.errors import UserError

#: of a video of a single image, which nothing reads
_RATE = 16.0


def _loaded(given: Mapping[str, Any]) -> tuple[Any, ...]:
    nodes: MadeNodes = given["nodes"]
    return (nodes.video_of_user(given["file"]),)


def _components(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """The frames of a video, its sound, and its rate, depth and colours."""
    video, nodes = given["video"], given["nodes"]
    if not isinstance(video, VideoFile):
        raise NodeUnsupported("video: found one that a node makes; its images are an output of that node")
    sound = None
    if video.has_sound and (audio := _sound_of(given, video)) is not None:
        sound = nodes.audio_of_file(f"{given['node_id']}/audio", audio)
    return nodes.frames_of_user(given["node_id"], video), sound, video.frame_rate, "8", "sRGB"


def _sound_of(given: Mapping[str, Any], video: VideoFile) -> AudioFile | None:
    """Return the facts of the sound of a video; None, with a warning, for sound that the pool cannot read."""
    try:
        return audio_facts("audio", video.path)
    except UserError as problem:
        shown = str(problem).replace(video.path, "the video")
        warn(given, f"the sound of the video is left out: {shown}")
        return None


def _frames(given: Mapping[str, Any], name: str) -> NodeImage | None:
    """Return the images of an input as frames of one value: also a single one, and a batch. None if it has none."""
    image: AnyImage | None = given.get(name)
    if image is None or (isinstance(image, NodeImage) and image.frames and image.count == 1):
        return image if isinstance(image, NodeImage) else None
    nodes: MadeNodes = given["nodes"]
    made = nodes.operate(f"{given['node_id']}/{name}", "video_of_images", NodeImage, {"image": image}, {"rate": _RATE})
    assert isinstance(made, NodeImage), "the result of an operation on images"
    return made


def _as_long(given: Mapping[str, Any], name: str, frames: NodeImage | None) -> NodeImage | None:
    """Return frames of which there are at least as many as the node makes. Raises NodeUnsupported."""
    if frames is not None and frames.frames < given["length"]:
        found = f"{frames.frames}, expected at least length, {given['length']}"
        raise NodeUnsupported(f"{name}: found {found}: what follows its last frame is another video in the pool")
    return frames


def _masks_of_frames(given: Mapping[str, Any], frames: int) -> NodeMask:
    """Return the masks of so many frames of a control video. Masks that are too few are followed by white ones: what
    they do not show is regenerated."""
    nodes, node_id, masks = given["nodes"], given["node_id"], given["control_masks"]
    count = max(1, getattr(masks, "frames", 0))
    if count >= frames and count > 1:
        return NodeMask(nodes.mask(masks), frames=count)
    shown = nodes.operate(f"{node_id}/masks/shown", "mask_to_image", NodeImage, {"mask": masks}, {})
    size = {"width": given["width"], "height": given["height"], "colour": 0xFFFFFF}
    white = nodes.operate(
        f"{node_id}/masks/white", "image_solid", NodeImage, {}, {**size, "count": max(1, frames - count)}
    )
    joined = nodes.operate(f"{node_id}/masks/all", "image_batch", NodeImage, {"first": shown, "second": white}, {})
    found = nodes.operate(f"{node_id}/masks", "mask_from_image", NodeMask, {"image": joined}, {"channel": "red"})
    assert isinstance(found, NodeMask), "the result of an operation on masks"
    return found


def _vace(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """A video after a control video, of which the mask regenerates the white parts, and after a reference image. A
    control video that is too short is followed by grey, which is regenerated."""
    positive, negative, latent, trimmed = vace_texts_and_latent(given)
    masks, control = given.get("control_masks"), _frames(given, "control_video")
    if masks is not None:
        if control is None:
            raise NodeUnsupported("control_masks: found masks, expected them with a control_video")
        masks = _masks_of_frames(given, min(control.frames, given["length"]))
    if control is None:
        return positive, negative, latent, trimmed
    use = VideoUse(video=control, video_mask=masks)
    return with_video(positive, use), with_video(negative, use), latent, trimmed


def _fun_control(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """A video that follows a control video and begins with an image."""
    return _following(given, "start_image")


def _fun_control_22(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """A video that follows a control video and shows the character of a reference image."""
    if given.get("control_video") is None:
        raise NodeUnsupported("control_video: found none, expected a video, which the model follows")
    return _following(given, "ref_image")


def _following(given: Mapping[str, Any], image: str) -> tuple[Any, ...]:
    """A video that follows a control video as long as that is; nothing follows its last frame."""
    control = _frames(given, "control_video")
    stops = control is not None and control.frames < given["length"]
    use = VideoUse(image=of_user(image, given.get(image)), video=control, video_stops=stops)
    texts = (with_unread(with_video(given[name], use), given, *SEEN_BY_MODEL) for name in ("positive", "negative"))
    return *texts, blank_video(given)


def _animated(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """A character with the poses and the face of videos. The character is cut to the shape of the video, and latents of
    the pool have no cell of it that is trimmed."""
    nodes, node_id = given["nodes"], given["node_id"]
    for name in ("background_video", "character_mask", "continue_motion"):
        if given.get(name) is not None:
            raise NodeUnsupported(f"{name}: found images, expected none: a character moves without a background, and "
                                  "in one piece")  # fmt: skip
    if given.get("video_frame_offset"):
        raise NodeUnsupported(f"video_frame_offset: found {given['video_frame_offset']}, expected 0")
    followed = {}
    for name in ("pose_video", "face_video"):
        frames = _as_long(given, name, _frames(given, name))
        if frames is not None and frames.frames > given["length"]:
            settings = {"start": 0, "length": given["length"]}
            values = {"image": frames}
            frames = nodes.operate(f"{node_id}/{name}/first", "image_from_batch", NodeImage, values, settings)
        followed[name] = frames
    use = VideoUse(video=followed["pose_video"], face_video=followed["face_video"])
    texts = [with_video(given[name], use) for name in ("positive", "negative")]
    if (character := of_user("reference_image", given.get("reference_image"))) is not None:
        settings = {"width": given["width"], "height": given["height"], "method": "area", "crop": True}
        shown = nodes.operate(f"{node_id}/character", "image_scale", NodeImage, {"image": character}, settings)
        texts = [replace(each, references=(*each.references, shown)) for each in texts]
    return (*texts, blank_video(given), 0, 0, given["length"])


def _kandinsky(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """A video of Kandinsky 5, and the latent of its first image, scaled to the size of the video."""
    nodes, node_id, image = given["nodes"], given["node_id"], of_user("start_image", given.get("start_image"))
    texts = [with_unread(given[name], given, "vae") for name in ("positive", "negative")]
    if image is None:
        return *texts, blank_video(given), None
    settings = {"width": given["width"], "height": given["height"], "method": "bilinear", "crop": True}
    shown = nodes.operate(f"{node_id}/image", "image_scale", NodeImage, {"image": image}, settings)
    encoded = nodes.encode(f"{node_id}/cond_latent", shown, given["vae"].name)
    use = VideoUse(image=shown)
    return *(with_video(each, use) for each in texts), blank_video(given), encoded


def _with_cells(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Latents of a video with other latents in the place of some of its own."""
    destination, source = given["destination"], given.get("source")
    if source is None:
        return (destination,)
    for name, latent in (("destination", destination), ("source", source)):
        if not isinstance(latent, NodeLatent):
            raise NodeUnsupported(f"{name}: found empty latents, expected those of a sampler or of an image")
    nodes: MadeNodes = given["nodes"]
    values, settings = {"destination": destination, "source": source}, {"index": given["index"]}
    made = nodes.operate(given["node_id"], "latent_replace_frames", NodeLatent, values, settings)
    assert isinstance(made, NodeLatent), "the result of an operation on latents"
    return (replace(made, mask=destination.mask),)


def _normalized(given: Mapping[str, Any]) -> tuple[Any, ...]:
    if not isinstance(given["latent"], NodeLatent):
        raise NodeUnsupported("latent: found empty latents, expected latents of a sampler")
    nodes: MadeNodes = given["nodes"]
    settings = {"start": given["start_frame_count"], "reference": given["reference_frame_count"]}
    values = {"samples": given["latent"]}
    return (nodes.operate(given["node_id"], "latent_normalize_start", NodeLatent, values, settings),)


#: what nodes become in workflows, by their kind
USER_VIDEO_BUILDERS: Mapping[str, Builder] = MappingProxyType(
    {
        "LoadVideo": _loaded,
        "GetVideoComponents": _components,
        "WanVaceToVideo": _vace,
        "WanFunControlToVideo": _fun_control,
        "Wan22FunControlToVideo": _fun_control_22,
        "WanAnimateToVideo": _animated,
        "WanCameraImageToVideo": from_image_with_camera,
        "Kandinsky5ImageToVideo": _kandinsky,
        "ReplaceVideoLatentFrames": _with_cells,
        "NormalizeVideoLatentStart": _normalized,
    }
)
