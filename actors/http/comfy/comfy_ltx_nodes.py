"""ComfyUI nodes of LTX-Video and LTX-2: latents of frames and of audio, images that guide a video, and noise levels.
Pure.

Frames and audio of LTX-2 are one latent while they are sampled, here as in ComfyUI: a run starts from both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from modelpool.actors.http.comfy.comfy_made_nodes import MadeNodes
from modelpool.actors.http.comfy.comfy_node_types import (
    MAX_BATCH,
    MODELS,
    TEXT_ENCODERS,
    UPSCALERS,
    Builder,
    NodeUnsupported,
    check_parts,
    combo,
    flag,
    is_one,
    link,
    node_row,
    number,
    only_in_workflows,
    sound_latent,
    text,
    warn,
    whole,
)
from modelpool.actors.http.comfy.comfy_request_fields import encoder_warning
from modelpool.actors.http.comfy.comfy_text_nodes import of_user, with_unread, with_video
from modelpool.actors.http.comfy.comfy_values import (
    FRAMES,
    WITH_SOUND,
    BlankLatent,
    BlankSound,
    ClipValue,
    DecodedSound,
    GivenSound,
    GuiderValue,
    GuideUse,
    LoraParameters,
    ModelSampling,
    NodeImage,
    NodeLatent,
    NodeSound,
    NoiseLevels,
    SampledLatent,
    SampledSound,
    VaeValue,
    VideoUse,
)
from modelpool.actors.http.comfy.comfy_video_nodes import blank_video, sizes, with_images
from modelpool.actors.request.image_fields import MAX_PARTS
from modelpool.pool.inference.sampling.sampler_names import MAX_STEPS

_POSITIVE, _NEGATIVE, _VAE = link("positive", "CONDITIONING"), link("negative", "CONDITIONING"), link("vae", "VAE")
_LATENT, _IMAGE = link("latent", "LATENT"), link("image", "IMAGE")
_TEXTS_AND_LATENT = ("CONDITIONING", "CONDITIONING", "LATENT")
#: patches of LTX: pixels of a side, and frames; and the numbers of patches between which its shift is interpolated
_SIDE, _CELL_FRAMES, _TOKENS = 32, 8, (1024, 4096)
#: frames of a video that a node may ask for
_MOST_FRAMES = 4096


def _blank(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (blank_video(given, _CELL_FRAMES),)


def _with_frame_rate(given: Mapping[str, Any]) -> tuple[Any, ...]:
    use = VideoUse(others=(("frame_rate", given["frame_rate"]),))
    return with_video(given["positive"], use), with_video(given["negative"], use)


def _from_image(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Texts and empty latents of a video that begins with an image: a part of it, with a strength below 1."""
    if not is_one(given["strength"]):
        texts = (with_unread(given[name], given, "vae") for name in ("positive", "negative"))
        return *texts, *_with_first_frame({**given, "latent": blank_video(given, _CELL_FRAMES)})
    use = VideoUse(of_user("image", given["image"]))
    return *with_images(given, use), blank_video(given, _CELL_FRAMES)


def _with_first_frame(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Latents of a video of which the first frame is an image, as far as its strength says."""
    latent, strength = given["latent"], given["strength"]
    if given.get("bypass"):
        return (latent,)
    known = _guides_of(latent)
    if not strength:
        if not isinstance(latent, BlankLatent):
            raise NodeUnsupported("strength: found 0, expected a number above 0: the first frame is regenerated")
        warn(given, "strength: found 0: the image does not act")
        return (latent,)
    # the image of LTXVAddGuide at frame 0 is next to this one
    others = [replace(guide, cells=1) if guide.is_first else guide
              for guide in known if guide.is_added or not guide.is_first]  # fmt: skip
    return (_guided(latent, given, GuideUse(of_user("image", given["image"]), 0, strength), others),)


def _guide(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Latents of a video that an image, or frames, guide at a frame; a negative number counts from the end."""
    latent, strength = given["latent"], given["strength"]
    if given.get("attention_mask") is not None:
        raise NodeUnsupported("attention_mask: expected none: images guide the whole frame")
    known, count = _guides_of(latent), latent.frames
    frame = given["frame_idx"] if given["frame_idx"] >= 0 else max(0, count + given["frame_idx"])
    if frame >= count:
        raise NodeUnsupported(f"frame_idx: found {frame}, expected up to {count - 1}, the last one of the video")
    if not strength:
        raise NodeUnsupported("strength: found 0, expected a number above 0: the image does not act")
    texts = [with_unread(given[name], given, "vae") for name in ("positive", "negative")]
    lora = "" if given.get("iclora_parameters") is None else given["iclora_parameters"].name
    image = given["image"]
    if isinstance(image, NodeImage) and image.frames:
        cells, frame = _place_of_frames(given, image.frames, frame, count)
    else:
        image = of_user("image", image)
        is_next_to_first = not frame and any(guide.is_first and not guide.is_kept for guide in known)
        cells = int(is_next_to_first or bool(lora))
    use = GuideUse(image, frame, strength, is_added=True, cells=cells, lora=lora)
    return *texts, _guided(latent, given, use, known)


def _place_of_frames(given: Mapping[str, Any], frames: int, frame: int, count: int) -> tuple[int, int]:
    """Return the cells of frames that guide a video of `count`, and the frame at which they begin: frames that fill no
    cell are left out, as in ComfyUI. Raises NodeUnsupported for frames behind its end."""
    cells = 1 + (frames - 1) // _CELL_FRAMES
    if cells > 1 and frame and (frame - 1) % _CELL_FRAMES:
        begin = 1 + (frame - 1) // _CELL_FRAMES * _CELL_FRAMES
        warn(given, f"frame_idx: found {frame}: the {frames} frames guide from frame {begin} on, where a cell of "
             f"{_CELL_FRAMES} frames begins")  # fmt: skip
        frame = begin
    used = 1 + (cells - 1) * _CELL_FRAMES
    first = 1 + (frame - 1) // _CELL_FRAMES if frame else 0
    if first + cells > 1 + (count - 1) // _CELL_FRAMES:
        raise NodeUnsupported(f"image: found {used} frames from frame {frame} on, expected frames within the "
                              f"{count} of the video")  # fmt: skip
    return cells, frame


def _parameters(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """What the file of the LoRA that was loaded last says of its guides."""
    loras = given["iclora_model"].loras
    if not loras:
        warn(given, "iclora_model: found no LoRA: guides have the size of the video")
    return (LoraParameters(loras[-1].name if loras else ""),)


def _guides_of(latent: Any) -> tuple[GuideUse, ...]:
    """Return the images that guide a video. Raises NodeUnsupported for latents of no video, and with audio."""
    is_video = isinstance(latent, BlankLatent | NodeLatent) and latent.frames
    if not is_video or getattr(latent, "track", "") == WITH_SOUND or getattr(latent, "sound", None) is not None:
        raise NodeUnsupported("latent: expected the frames of a video, empty or of a sampler, without audio")
    found: tuple[GuideUse, ...] = latent.guides
    return found


def _guided(latent: Any, given: Mapping[str, Any], use: GuideUse, others: Iterable[GuideUse]) -> Any:
    """Return latents with one more image that guides their run. Raises NodeUnsupported for too many."""
    kept = tuple(guide for guide in others if not (use.is_first and guide.is_kept))
    check_parts("latent", "images that guide it", len(kept) + 1, MAX_PARTS)
    strength = 1.0 if is_one(use.strength) else use.strength
    return replace(latent, guides=(*kept, replace(use, strength=strength, vae=given["vae"].name)))


def _cropped(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Latents of the pool have no frames of guides."""
    latent = given["latent"]
    if isinstance(latent, BlankLatent | NodeLatent):
        latent = replace(latent, guides=tuple(guide for guide in latent.guides if not guide.is_added))
    if isinstance(latent, NodeLatent):
        latent = replace(latent, uncropped=False)
    return given["positive"], given["negative"], latent


def _compressed(given: Mapping[str, Any]) -> tuple[Any, ...]:
    if given["img_compression"]:
        warn(given, f"img_compression: found {given['img_compression']}, which is not done: the image is as it is")
    return (given["image"],)


def _shift(given: Mapping[str, Any]) -> float:
    """Return the shift for the patches of a video, between the shifts for few and for many. Raises NodeUnsupported."""
    latent = given.get("latent")
    tokens = _TOKENS[1]
    if latent is not None:
        size = (latent.width, latent.height) if isinstance(latent, BlankLatent) else getattr(latent, "size", (0, 0))
        if not all(size):
            raise NodeUnsupported("latent: expected empty latents, or latents of a known size")
        cells = (1 + (latent.frames - 1) // _CELL_FRAMES) if latent.frames else 1
        cells += sum(max(1, guide.cells) for guide in getattr(latent, "guides", ()) if guide.is_added)
        tokens = cells * (size[0] // _SIDE) * (size[1] // _SIDE)
    few, many = _TOKENS
    slope = (given["max_shift"] - given["base_shift"]) / (many - few)
    return math.exp(tokens * slope + given["base_shift"] - slope * few)


def _levels(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return levels that are shifted by the number of patches, and stretched so that the last one is `terminal`."""
    shift = _shift(given)
    steps = given["steps"]
    levels = [shift / (shift + 1 / (1 - place / steps) - 1) for place in range(steps)]
    if given["stretch"] and levels[-1] < 1:
        scale = (1 - levels[-1]) / (1 - given["terminal"])
        levels = [1 - (1 - level) / scale for level in levels]
    return (NoiseLevels("", steps, steps, tuple(levels)),)


def _shifted(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (replace(given["model"], sampling=ModelSampling(_shift(given))),)


def _text_encoder(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """The text encoder of a checkpoint, which has what joins the states of the file of the text encoder."""
    return (ClipValue(given["ckpt_name"]),)


def _sound_vae(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """The VAE of a checkpoint; the part for audio belongs to it."""
    return (VaeValue(given["ckpt_name"]),)


def _blank_sound(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (BlankSound(given["frames_number"], float(given["frame_rate"]), given.get("batch_size") or 1),)


def _joined(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Empty latents of frames and of audio. Raises NodeUnsupported for others."""
    video, sound = given["video_latent"], given["audio_latent"]
    if not isinstance(video, BlankLatent) or not isinstance(sound, BlankSound):
        raise NodeUnsupported("video_latent, audio_latent: expected empty latents of a video, and of its audio")
    if not video.frames or video.sound is not None:
        raise NodeUnsupported("video_latent: expected the frames of a video alone")
    if video.count != sound.count:
        raise NodeUnsupported(f"audio_latent: found a batch of {sound.count}, expected {video.count} like the video")
    cells = 1 + (sound.frames - 1) // _CELL_FRAMES * _CELL_FRAMES
    if video.frames not in (sound.frames, cells):
        found = f"the audio of {sound.frames} frames for a video of {video.frames}"
        raise NodeUnsupported(
            f"audio_latent: found {found}, expected that of the video: the pool samples both together"
        )
    if sound.frames != video.frames:
        warn(given, f"audio_latent: found the audio of {sound.frames} frames; it is as long as the {video.frames} "
             "frames of the video")  # fmt: skip
    return (replace(video, sound=sound),)


def _joined_nodes(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Frames and audio, of samplers or empty, or audio of the user."""
    video, sound, nodes = given["video_latent"], given["audio_latent"], given["nodes"]
    if isinstance(video, BlankLatent) and isinstance(sound, GivenSound | NodeSound):
        return (_blank_with_sound(video, sound),)
    if isinstance(video, BlankLatent) and isinstance(sound, BlankSound):
        return _joined(given)
    if not isinstance(video, NodeLatent) or video.track == WITH_SOUND or not video.frames:
        raise NodeUnsupported(
            "video_latent: expected the frames of a video of a sampler, or empty ones with empty audio"
        )
    if not isinstance(sound, NodeSound | BlankSound | GivenSound):
        raise NodeUnsupported("audio_latent: expected the audio of LTXVSeparateAVLatent, LTXVEmptyLatentAudio or "
                              "LTXVAudioVAEEncode")  # fmt: skip
    kept = sound if isinstance(sound, GivenSound) or (isinstance(sound, NodeSound) and sound.is_kept) else None
    if isinstance(sound, NodeSound) and sound.node == video.node:
        return (replace(video, track=WITH_SOUND, sound=kept),)
    values: dict[str, Any] = {"samples": video}
    if isinstance(sound, NodeSound):
        values["sound"] = sound
    elif isinstance(sound, BlankSound) and sound.frames != video.frames:
        found = f"the empty audio of {sound.frames} frames for a video of {video.frames}"
        raise NodeUnsupported(f"audio_latent: found {found}, expected that of the video")
    made = nodes.operate(given["node_id"], "latent_sound_track", NodeLatent, values, {})
    assert isinstance(made, NodeLatent), "the result of an operation on latents"
    return (replace(made, track=WITH_SOUND, image=None, sound=kept),)


def _blank_with_sound(video: BlankLatent, sound: GivenSound | NodeSound) -> BlankLatent:
    """Return empty latents of frames that are sampled with audio which is there. Raises NodeUnsupported."""
    if not video.frames or video.sound is not None:
        raise NodeUnsupported("video_latent: expected the frames of a video alone")
    if isinstance(sound, NodeSound) and not sound.is_kept:
        raise NodeUnsupported("audio_latent: found audio of a sampler, next to empty frames: expected empty audio, or "
                              "SetLatentNoiseMask with a mask of 0, which keeps it")  # fmt: skip
    if sound.count not in (1, video.count):
        raise NodeUnsupported(f"audio_latent: found a batch of {sound.count}, expected {video.count} like the video")
    return replace(video, sound=sound)


def _parted(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Frames and audio apart: each is a part of the same latent."""
    latent = given["av_latent"]
    if isinstance(latent, BlankLatent) and latent.sound is not None:
        return replace(latent, sound=None), latent.sound
    if isinstance(latent, SampledLatent) and getattr(latent.start, "sound", None) is not None:
        return latent, SampledSound(latent)
    if isinstance(latent, NodeLatent) and latent.track == WITH_SOUND:
        sound = NodeSound(latent.node, latent.model, latent.count, latent.sampler, is_kept=latent.sound is not None)
        return replace(latent, track=FRAMES, sound=None), sound
    raise NodeUnsupported("av_latent: expected frames with their audio, of a run that LTXVConcatAVLatent begins")


def _sound_encoded(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Latents of audio of the user; it is encoded when the length of the video is known."""
    return (GivenSound(given["audio"], given["audio_vae"]),)


def _referred(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """A model and texts that give the audio the voice of other audio."""
    model, span = given["model"], (given["start_percent"], given["end_percent"])
    if span != (0.0, 1.0) and given["identity_guidance_scale"]:
        raise NodeUnsupported(f"start_percent, end_percent: found {span[0]:g} and {span[1]:g}, expected 0 and 1: the "
                              "guidance acts in all steps")  # fmt: skip
    if warning := encoder_warning(given["audio_vae"], model):
        warn(given, warning)
    use = VideoUse(voice=given["reference_audio"])
    texts = (with_video(given[name], use) for name in ("positive", "negative"))
    return replace(model, voice_scale=given["identity_guidance_scale"]), *texts


def _frozen(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Audio that the next run keeps. Raises NodeUnsupported for frames, and for empty audio."""
    latent = given["latent"]
    if not isinstance(latent, GivenSound | NodeSound):
        raise NodeUnsupported("latent: expected audio of LTXVAudioVAEEncode or LTXVSeparateAVLatent: the pool keeps "
                              "audio, and frames by guides alone")  # fmt: skip
    return (replace(latent, is_kept=True),)


def _sound_decoded(given: Mapping[str, Any]) -> tuple[Any, ...]:
    sound, vae = given["samples"], given["audio_vae"]
    if not isinstance(sound, SampledSound):
        raise NodeUnsupported("samples: expected the audio of a sampler, of LTXVSeparateAVLatent")
    if vae.name not in ("", sound.latent.model.name):
        raise NodeUnsupported(f"audio_vae: it is of {vae.name}, expected that of {sound.latent.model.name}")
    _warn_of_file(given, sound.latent.model.name)
    return (DecodedSound(sound.latent),)


def _sound_decoded_node(given: Mapping[str, Any]) -> tuple[Any, ...]:
    sound, nodes = given["samples"], given["nodes"]
    assert isinstance(nodes, MadeNodes), "the nodes of a workflow"
    if not isinstance(sound, NodeSound):
        raise NodeUnsupported("samples: expected the audio of a sampler, of LTXVSeparateAVLatent")
    if sound.model in nodes.with_vae:
        _warn_of_file(given, sound.model)
    return (nodes.decode_sound(given["node_id"], sound, given["audio_vae"].name),)


def _warn_of_file(given: Mapping[str, Any], model: str) -> None:
    if given["audio_vae"].file:
        name = given["audio_vae"].file[:100]
        warn(given, f"audio_vae: found vae_name {name}, which is not read: the VAE of model {model!r} is")


def _upscaler(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (given["model_name"],)


def _upscaled(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Frames of a sampler with larger sides; the VAE of their model has the statistics of the latents."""
    latent, vae, nodes = given["samples"], given["vae"], given["nodes"]
    if not isinstance(latent, NodeLatent) or latent.track == WITH_SOUND or not latent.frames:
        raise NodeUnsupported("samples: expected the frames of a video of a sampler, without audio")
    if vae.name not in ("", latent.model):
        raise NodeUnsupported(f"vae: it is of {vae.name}, expected that of {latent.model}, of which the latents are")
    if vae.file and latent.model in nodes.with_vae:
        warn(given, f"vae: found vae_name {vae.file[:100]}, which is not read: the VAE of model {latent.model!r} is")
    return (nodes.upscale_latent(given["node_id"], latent, given["upscale_model"]),)


def _guider(given: Mapping[str, Any]) -> tuple[Any, ...]:
    scales = given["video_cfg"], given["audio_cfg"]
    return (GuiderValue(given["model"], given["positive"], given["negative"], *scales),)


_row = partial(node_row, category="video")


_SHIFTS = (number("max_shift", 2.05, 0.0, 100.0), number("base_shift", 0.95, 0.0, 100.0))
_ANY_LATENT = link("latent", "LATENT", is_required=False)
LTX_NODES = (
    _row("EmptyLTXVLatentVideo", sizes(768, 512, 97), _blank, "LATENT"),
    _row(
        "LTXVEmptyLatentAudio",
        (
            link("audio_vae", "VAE"),
            whole("frames_number", 97, 1, _MOST_FRAMES),
            replace(number("frame_rate", 25.0, 0.1, 1000.0), also="INT"),
            whole("batch_size", 1, 1, MAX_BATCH, is_required=False),
        ),
        _blank_sound,
        "LATENT",
    ),
    _row("LTXVConcatAVLatent", (link("video_latent", "LATENT"), sound_latent("audio_latent")), _joined, "LATENT"),
    _row("LTXVSeparateAVLatent", (link("av_latent", "LATENT"),), _parted, "LATENT", "LATENT"),
    _row("LTXVAudioVAEDecode", (sound_latent("samples"), link("audio_vae", "VAE")), _sound_decoded, "AUDIO"),
    _row("LTXVAudioVAEEncode", (link("audio", "AUDIO"), link("audio_vae", "VAE")), only_in_workflows, "LATENT"),
    _row(
        "LTXVReferenceAudio",
        (
            link("model", "MODEL"),
            _POSITIVE,
            _NEGATIVE,
            link("reference_audio", "AUDIO"),
            link("audio_vae", "VAE"),
            number("identity_guidance_scale", 3.0, 0.0, 100.0, is_required=False),
            number("start_percent", 0.0, 0.0, 1.0, is_required=False),
            number("end_percent", 1.0, 0.0, 1.0, is_required=False),
        ),
        only_in_workflows,
        "MODEL",
        "CONDITIONING",
        "CONDITIONING",
    ),
    _row("LTXVFreezeLatent", (sound_latent("latent"),), only_in_workflows, "LATENT"),
    _row("LTXVAudioVAELoader", (combo("ckpt_name", MODELS),), _sound_vae, "VAE", category="loaders"),
    _row(
        "LTXAVTextEncoderLoader",
        (
            text("text_encoder", choices=TEXT_ENCODERS),
            combo("ckpt_name", MODELS),
            combo("device", ("default", "cpu"), is_required=False),
        ),
        _text_encoder,
        "CLIP",
        category="loaders",
    ),
    _row(
        "LatentUpscaleModelLoader",
        (text("model_name", choices=UPSCALERS),),
        _upscaler,
        "LATENT_UPSCALE_MODEL",
        category="loaders",
    ),
    _row(
        "LTXVLatentUpsampler",
        (link("samples", "LATENT"), link("upscale_model", "LATENT_UPSCALE_MODEL"), _VAE),
        only_in_workflows,
        "LATENT",
    ),
    _row(
        "LTXVDualCFGGuider",
        (
            link("model", "MODEL"),
            _POSITIVE,
            _NEGATIVE,
            number("video_cfg", 3.0, 0.0, 100.0),
            number("audio_cfg", 7.0, 0.0, 100.0),
        ),
        _guider,
        "GUIDER",
        category="sampling",
    ),
    _row(
        "LTXVAddGuide",
        (
            _POSITIVE,
            _NEGATIVE,
            _VAE,
            _LATENT,
            _IMAGE,
            whole("frame_idx", 0, -9999, 9999),
            number("strength", 1.0, 0.0, 1.0),
            link("attention_mask", "MASK", is_required=False),
            link("iclora_parameters", "IC_LORA_PARAMETERS", is_required=False),
        ),
        _guide,
        *_TEXTS_AND_LATENT,
    ),
    _row(
        "LTXVImgToVideoInplace",
        (
            _VAE,
            _IMAGE,
            _LATENT,
            number("strength", 1.0, 0.0, 1.0, is_required=False),
            flag("bypass", False, is_required=False),
        ),
        _with_first_frame,
        "LATENT",
    ),
    _row(
        "GetICLoRAParameters", (link("iclora_model", "MODEL"),), _parameters, "IC_LORA_PARAMETERS", category="loaders"
    ),
    _row("LTXVCropGuides", (_POSITIVE, _NEGATIVE, _LATENT), _cropped, *_TEXTS_AND_LATENT),
    _row("LTXVPreprocess", (_IMAGE, whole("img_compression", 35, 0, 100)), _compressed, "IMAGE"),
    _row("ModelSamplingLTXV", (link("model", "MODEL"), *_SHIFTS, _ANY_LATENT), _shifted, "MODEL"),
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
            _IMAGE,
            *sizes(768, 512, 97),
            number("strength", 1.0, 0.0, 1.0, is_required=False),
        ),
        _from_image,
        *_TEXTS_AND_LATENT,
    ),
    _row(
        "LTXVScheduler",
        (
            whole("steps", 20, 1, MAX_STEPS),
            *_SHIFTS,
            flag("stretch", True),
            number("terminal", 0.1, 0.0, 0.99),
            _ANY_LATENT,
        ),
        _levels,
        "SIGMAS",
    ),
)
#: what they become in workflows
LTX_BUILDERS: Mapping[str, Builder] = MappingProxyType(
    {
        "LTXVConcatAVLatent": _joined_nodes,
        "LTXVAudioVAEDecode": _sound_decoded_node,
        "LTXVAudioVAEEncode": _sound_encoded,
        "LTXVFreezeLatent": _frozen,
        "LTXVReferenceAudio": _referred,
        "LTXVLatentUpsampler": _upscaled,
    }
)
