"""Custom nodes that are several nodes of ComfyUI, or one under another name: ControlNets with advanced settings, stacks
of ControlNets, videos of users, samplers of a basic pipe. Each becomes these nodes before a workflow is compiled. Pure.

They are here under their own names, with what their public descriptions say.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from modelpool.actors.http.comfy.comfy_node_types import (
    AUDIOS,
    CONTROLNETS,
    EDITOR_INPUTS,
    MAX_SEED,
    MAX_SIDE,
    SAMPLER_NAMES,
    SCHEDULE_NAMES,
    UPSCALERS,
    VIDEOS,
    NodeInput,
    NodeType,
    NodeUnsupported,
    any_of,
    combo,
    link,
    number,
    text,
    whole,
)
from modelpool.actors.http.comfy.comfy_pack_pipes import PIPE_NODES, PartMaker, PipeNode, PipeParts, Split
from modelpool.actors.http.comfy.comfy_pack_switches import Bundle, unknown_route
from modelpool.actors.request.control_video_fields import VideoFile
from modelpool.pool.inference.sampling.sampler_names import MAX_STEPS
from modelpool.pool.values.core.errors import UserError, counted

_NONE = "None"
_CONTROL_STACK, _VIDEO_INFO, _BASIC_PIPE = "CONTROL_NET_STACK", "VHS_VIDEOINFO", "BASIC_PIPE"
#: pipes that a node needs before it becomes others
_PIPES = ("PIPE_LINE", _BASIC_PIPE, _CONTROL_STACK)
_STACKED = (1, 2, 3)
#: formats of a loaded video: multiples of its sides, and its frames are a multiple of the first number and the second
_FORMATS: Mapping[str, tuple[int, int, int]] = MappingProxyType(
    {"None": (1, 1, 0), "AnimateDiff": (8, 1, 0), "Mochi": (16, 6, 1), "LTXV": (32, 8, 1), "Hunyuan": (16, 4, 1),
     "Cosmos": (16, 8, 1), "Wan": (8, 4, 1)}
)  # fmt: skip
#: a size by name, of which one side may be in proportion, and the step of that side
_NAMED_SIZE, _STEP_OF_NAMED = re.compile(r"(\d{1,5}|\?)x(\d{1,5}|\?)"), 8
#: seconds of audio that are all that follows
_REST = 3600.0
#: times of a video this near to a frame's time mean the frame
_NEAR = 1e-6


def parts_of(
    node_id: str,
    kind: NodeType,
    given: Mapping[str, Any],
    video_facts: Callable[[str], VideoFile] | None = None,
) -> PipeParts | None:
    """Return the nodes that a node stands for; None for other kinds, and if a pipe is not known. Raises
    NodeUnsupported."""
    split = _SPLITS.get(kind.name)
    pipes = [given.get(each.name) for each in kind.inputs if each.type in _PIPES
             and (each.is_required or each.name in given)]  # fmt: skip
    if split is None or not all(isinstance(each, Bundle) for each in pipes):
        return None
    maker = PartMaker(node_id, video_facts)
    known = {each.name for each in kind.inputs} | EDITOR_INPUTS
    if unread := sorted(name for name in given if name not in known and given[name] not in ("", None)):
        maker.warnings.append(f"{', '.join(unread)[:1000]}: not read: the node has no such input here")
    return split(maker, given)


def _need_none(given: Mapping[str, Any], reason: str, *names: str) -> None:
    """Raise NodeUnsupported if an input is linked."""
    if found := [name for name in names if given.get(name) is not None]:
        raise NodeUnsupported(f"{', '.join(found)}: found a link, expected none: {reason}")


def _one(kind: str, names: Mapping[str, str], *more: str) -> Split:
    """Return what makes one node of ComfyUI of a node, from its inputs by their names; `more` are settings that are
    further outputs."""

    def split(make: PartMaker, given: Mapping[str, Any]) -> PipeParts:
        made = make.add("one", kind, **{name: given.get(source) for name, source in names.items()})
        return make.made([made, 0], *(given[name] for name in more))

    return split


def _in_batches(kind: str, names: Mapping[str, str]) -> Split:
    """Return what makes one node of ComfyUI that does the same for all images at once."""

    def split(make: PartMaker, given: Mapping[str, Any]) -> PipeParts:
        make.warnings.append("per_batch: not read: the pool decides how many images fit into a batch")
        return _one(kind, names)(make, given)

    return split


def _control_loaded(make: PartMaker, given: Mapping[str, Any]) -> PipeParts:
    _need_none(given, "a ControlNet has one strength, from start_percent to end_percent", *_KEYFRAMES)
    loader = "DiffControlNetLoader" if given.get("model") is not None else "ControlNetLoader"
    name = make.add("one", loader, control_net_name=given["control_net_name"], model=given.get("model"))
    return make.made([name, 0])


def _controlled(make: PartMaker, given: Mapping[str, Any]) -> PipeParts:
    """Both texts with a ControlNet, and the model as it is."""
    _need_none(given, "a ControlNet has one strength, from start_percent to end_percent, for the whole image",
               *("mask_optional", "timestep_kf", "latent_kf_override", "weights_override"))  # fmt: skip
    names = ("positive", "negative", "control_net", "image", "strength", "start_percent", "end_percent")
    used = make.add("one", "ControlNetApplyAdvanced", **{name: given.get(name) for name in names},
                    vae=given.get("vae_optional"))  # fmt: skip
    return make.made([used, 0], [used, 1], given.get("model_optional"))


def _stacked(make: PartMaker, given: Mapping[str, Any]) -> PipeParts:
    """A stack of ControlNets: the ones of another stack, and its own that are on and have an image."""
    before = given.get("controlnet_stack")
    found: dict[str, Any] = {} if before is None else dict(before.values)
    for place in _STACKED:
        name, image = given[f"controlnet_{place}"], given.get(f"image_{place}")
        if given[f"switch_{place}"] != "On" or name == _NONE or image is None:
            continue
        start, end = (given[f"{end}_percent_{place}"] for end in ("start", "end"))
        loaded = [make.add(f"net{place}", "ControlNetLoader", control_net_name=name), 0]
        settings = ("net", loaded), ("image", image), ("strength", given[f"controlnet_strength_{place}"]), (
            "start_percent", start), ("end_percent", end)  # fmt: skip
        number_of = len({each.partition(" ")[0] for each in found})
        found |= {f"{number_of} {part}": value for part, value in settings}
    return make.made(Bundle(found), "")


def _stack_applied(make: PartMaker, given: Mapping[str, Any]) -> PipeParts:
    """Both texts with the ControlNets of a stack that have a strength."""
    texts = [given.get("base_positive"), given.get("base_negative")]
    values: Mapping[str, Any] = given["controlnet_stack"].values
    places = sorted({int(each.partition(" ")[0]) for each in values}) if given["switch"] == "On" else []
    for place in places:
        if values[f"{place} strength"] == 0:
            continue
        how = {name: values[f"{place} {name}"] for name in ("image", "strength", "start_percent", "end_percent")}
        sides = {"positive": texts[0], "negative": texts[1], "control_net": values[f"{place} net"]}
        used = make.add(f"applied{place}", "ControlNetApplyAdvanced", **sides, **how)
        texts = [[used, 0], [used, 1]]
    return make.made(*texts, "")


def _sampled_by_pipe(make: PartMaker, given: Mapping[str, Any]) -> PipeParts:
    """A pipe as it is, the latents of its sampler, and its VAE."""
    pipe: Mapping[str, Any] = given["basic_pipe"].values
    _need_none(given, "the schedule has a name", "scheduler_func_opt")
    names = ("seed", "steps", "cfg", "sampler_name", "scheduler", "denoise")
    links = {name: pipe.get(name) for name in ("model", "positive", "negative")}
    settings = {name: given[name] for name in names}
    latent = make.add("latent", "KSampler", **links, latent_image=given.get("latent_image"), **settings)
    return make.made(given["basic_pipe"], [latent, 0], pipe.get("vae"))


def _joined(make: PartMaker, kind: str, names: tuple[str, str], texts: list[Any], part: str = "joined") -> Any:
    """Return several texts together, one after the other, by a node for two of them."""
    found = texts[0]
    for place, each in enumerate(texts[1:], start=1):
        found = [make.add(f"{part}{place}", kind, **dict(zip(names, (found, each), strict=True))), 0]
    return found


def _combined(make: PartMaker, given: Mapping[str, Any]) -> PipeParts:
    """The texts that are linked, all together."""
    texts = [given[name] for name in _FIVE_TEXTS if given.get(name) is not None]
    return make.made(_joined(make, "ConditioningCombine", _COMBINED, texts))


def _counted_texts(make: PartMaker, given: Mapping[str, Any]) -> PipeParts:
    """As many texts as the node counts, together or one behind the other. Raises NodeUnsupported for missing ones."""
    names = [f"conditioning_{place}" for place in range(1, given["inputcount"] + 1)]
    if missing := [name for name in names if given.get(name) is None]:
        raise NodeUnsupported(f"{missing[0]}: found nothing, expected {counted(given['inputcount'], 'text')}")
    kinds = {"combine": ("ConditioningCombine", _COMBINED), "concat": ("ConditioningConcat", _BEHIND)}
    if given["operation"] not in kinds:
        raise NodeUnsupported(f"operation: found {given['operation'][:40]!r}, expected combine or concat")
    kind, pair = kinds[given["operation"]]
    return make.made(_joined(make, kind, pair, [given[name] for name in names]), given["inputcount"])


def _masked(count: int) -> Split:
    """Return what gives each of so many pairs of texts its mask, and puts all of them together."""

    def split(make: PartMaker, given: Mapping[str, Any]) -> PipeParts:
        sides: list[Any] = []
        for side in ("positive", "negative"):
            texts: list[Any] = []
            for place in range(1, count + 1):
                how = {"strength": given[f"mask_{place}_strength"], "set_cond_area": given["set_cond_area"]}
                texts.append([make.add(f"{side}{place}", "ConditioningSetMask", mask=given.get(f"mask_{place}"),
                                       conditioning=given.get(f"{side}_{place}"), **how), 0])  # fmt: skip
            sides.append(_joined(make, "ConditioningCombine", _COMBINED, texts, f"{side}-joined"))
        return make.made(*sides)

    return split


def _places(given: Mapping[str, Any], video: VideoFile) -> list[int]:
    """Return the frames of a video that are loaded: at another rate, each is the first one at or after its time; some
    are skipped, every so many are taken, up to a number. Raises NodeUnsupported for none."""
    ratio = video.frame_rate / given["force_rate"] if given["force_rate"] else 1.0
    first, step = given["skip_first_frames"], given["select_every_nth"]
    count = int((video.frames - 1) / ratio + _NEAR) + 1
    found = [min(video.frames - 1, math.ceil(place * ratio - _NEAR)) for place in range(first, count, step)]
    if given["frame_load_cap"]:
        found = found[: given["frame_load_cap"]]
    _, multiple, rest = _FORMATS[given["format"]]
    if multiple > 1:
        found = found[: (len(found) - rest) // multiple * multiple + rest]
    if not found:
        names = "skip_first_frames, select_every_nth, frame_load_cap, format"
        raise NodeUnsupported(f"{names}: found none of {video.frames} frames with these, expected at least one")
    return found


def _wanted_size(given: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the width and the height that a node asks for, 0 for none, and the step of sides. A node of files of 2023
    and 2024 names the size: "512x?" is a width, and sides in proportion are multiples of 8. Raises NodeUnsupported."""
    wide, high, named = given["custom_width"], given["custom_height"], given["force_size"]
    if named == "":
        return wide, high, _FORMATS[given["format"]][0]
    sizes = {"Disabled": (0, 0), "Custom": (wide, high), "Custom Width": (wide, 0), "Custom Height": (0, high)}
    if (match := _NAMED_SIZE.fullmatch(named)) is not None:
        sizes[named] = (int(match[1].replace("?", "0")), int(match[2].replace("?", "0")))
    if named not in sizes:
        raise NodeUnsupported(f"force_size: found {named[:40]!r}, expected one of {', '.join(sizes)}, or as in 512x?")
    return *sizes[named], 1 if all(sizes[named]) or not any(sizes[named]) else _STEP_OF_NAMED


def _loaded_size(given: Mapping[str, Any], video: VideoFile) -> tuple[int, int]:
    """Return the size of a loaded video: a side that is 0 is in proportion, and both are rounded to multiples."""
    wide, high, step = _wanted_size(given)
    sides = (
        (wide or (video.width * high / video.height if high else video.width)),
        (high or (video.height * wide / video.width if wide else video.height)),
    )
    width, height = (int(side / step + 0.5) * step for side in sides)
    if not width or not height:
        raise NodeUnsupported(f"custom_width, custom_height: found {wide} and {high} with sides of multiples of {step}")
    return width, height


def _video(make: PartMaker, given: Mapping[str, Any]) -> PipeParts:
    """Frames of a video of the user, their number, the sound of the time that they take, and facts of both."""
    _need_none(given, "a video is loaded as a whole, as images", "meta_batch", "vae")
    if given["format"] not in _FORMATS:
        raise NodeUnsupported(f"format: found {given['format'][:40]}, expected one of {', '.join(_FORMATS)}")
    if make.video_facts is None:
        raise NodeUnsupported("video: the pool reads videos of users in workflows over HTTP and in files alone")
    try:
        video = make.video_facts(given["video"])
    except UserError as problem:
        raise NodeUnsupported(f"video: {problem}") from None
    parts = make.add("video", "GetVideoComponents", video=[make.add("file", "LoadVideo", file=given["video"]), 0])
    places, (width, height) = _places(given, video), _loaded_size(given, video)
    if given["force_rate"] and given["force_rate"] != video.frame_rate:
        make.warnings.append(
            f"force_rate: found {given['force_rate']:g} for a video of {video.frame_rate:g} frames per second: each "
            "frame is the first one at or after its time; another program may take a neighbour"
        )
    image, sound = [parts, 0], [parts, 1]
    if places != list(range(video.frames)):
        image = [make.add("frames", "GetImagesFromBatchIndexed", images=image, indexes=",".join(map(str, places))), 0]
    if (width, height) != (video.width, video.height):
        how = {"upscale_method": "lanczos", "width": width, "height": height, "crop": "center"}
        image = [make.add("scaled", "ImageScale", image=image, **how), 0]
    rate = (given["force_rate"] or video.frame_rate) / given["select_every_nth"]
    first = given["skip_first_frames"] / (given["force_rate"] or video.frame_rate)
    if video.has_sound and (first or given["frame_load_cap"]):
        seconds = len(places) / rate if given["frame_load_cap"] else max(0.0, video.frames / video.frame_rate - first)
        sound = [make.add("sound", "TrimAudioDuration", audio=sound, start_index=first, duration=seconds), 0]
    facts = {
        **_facts("source", video.frame_rate, video.frames, video.width, video.height),
        **_facts("loaded", rate, len(places), width, height),
    }
    return make.made(image, len(places), sound, Bundle(facts))


def _heard(make: PartMaker, given: Mapping[str, Any]) -> PipeParts:
    """Audio of the user from a time on, and its duration if the node names it: 0 is all that follows."""
    start, seconds = given["start_time"], given["duration"]
    sound = [make.add("file", "LoadAudio", audio=given["audio"]), 0]
    if start or seconds:
        sound = [make.add("part", "TrimAudioDuration", audio=sound, start_index=start, duration=seconds or _REST), 0]
    return make.made(sound, seconds or None)


def _facts(prefix: str, rate: float, frames: int, width: int, height: int) -> dict[str, Any]:
    values = (float(rate), frames, frames / rate, width, height)
    names = ("fps", "frame_count", "duration", "width", "height")
    return {f"{prefix}_{name}": value for name, value in zip(names, values, strict=True)}


def _row(name: str, inputs: tuple[NodeInput, ...], *outputs: str) -> NodeType:
    return NodeType(name, "values", inputs, outputs, unknown_route)


def _optional(**kinds: str) -> tuple[NodeInput, ...]:
    return tuple(link(name, kind, is_required=False) for name, kind in kinds.items())


_KEYFRAMES = ("timestep_keyframe", "tk_optional")
_NET = text("control_net_name", choices=CONTROLNETS)
_STRENGTH = number("strength", 1.0, 0.0, 10.0)
_ADVANCED = (
    link("positive", "CONDITIONING"), link("negative", "CONDITIONING"), link("control_net", "CONTROL_NET"),
    link("image", "IMAGE"), _STRENGTH, number("start_percent", 0.0, 0.0, 1.0), number("end_percent", 1.0, 0.0, 1.0),
    *any_of("mask_optional", "timestep_kf", "latent_kf_override", "weights_override"),
    *_optional(model_optional="MODEL", vae_optional="VAE"),
)  # fmt: skip
_SAMPLING = (
    link("basic_pipe", _BASIC_PIPE), whole("seed", 0, 0, MAX_SEED), whole("steps", 20, 1, MAX_STEPS),
    number("cfg", 8.0, 0.0, 100.0), text("sampler_name", "euler", choices=SAMPLER_NAMES),
    text("scheduler", "normal", choices=SCHEDULE_NAMES), link("latent_image", "LATENT"),
    number("denoise", 1.0, 0.0, 1.0), *any_of("scheduler_func_opt"),
)  # fmt: skip
_LOADED_VIDEO = (
    text("video", choices=VIDEOS), number("force_rate", 0.0, 0.0, 60.0),
    *(whole(f"custom_{side}", 0, 0, MAX_SIDE) for side in ("width", "height")),
    *(whole(name, 0, 0, 2**31) for name in ("frame_load_cap", "skip_first_frames")),
    whole("select_every_nth", 1, 1, 2**31),
    text("format", _NONE, False, choices=tuple(_FORMATS)),
    text("force_size", "", False), *any_of("meta_batch"), *_optional(vae="VAE"),
)  # fmt: skip
_COMBINED, _BEHIND = ("conditioning_1", "conditioning_2"), ("conditioning_to", "conditioning_from")
_FIVE_TEXTS = tuple(f"conditioning_{place}" for place in range(1, 6))
_MOST_TEXTS = 20


def _masking(count: int) -> tuple[NodeInput, ...]:
    places = range(1, count + 1)
    return (
        *(link(f"{side}_{place}", "CONDITIONING") for place in places for side in ("positive", "negative")),
        *(link(f"mask_{place}", "MASK") for place in places),
        *(number(f"mask_{place}_strength", 1.0, 0.0, 10.0) for place in places),
        combo("set_cond_area", ("default", "mask bounds")),
    )


_ROWS = (
    PipeNode(_row("ConditioningCombineMultiple+", tuple(link(name, "CONDITIONING", is_required=place < 2)
                                                        for place, name in enumerate(_FIVE_TEXTS)), "CONDITIONING"),
             _combined),
    PipeNode(
        _row(
            "ConditioningMultiCombine",
            (whole("inputcount", 2, 2, _MOST_TEXTS), text("operation", "combine", choices=("combine", "concat")),
             *(link(f"conditioning_{place}", "CONDITIONING", is_required=False)
               for place in range(1, _MOST_TEXTS + 1))),
            *("CONDITIONING", "INT"),
        ),
        _counted_texts,
    ),
    *(
        PipeNode(_row(f"ConditioningSetMaskAndCombine{'' if count == 2 else count}", _masking(count),
                      *("CONDITIONING", "CONDITIONING")), _masked(count))
        for count in (2, 3, 4, 5)
    ),
    PipeNode(_row("easy imageToMask", (link("image", "IMAGE"), combo("channel", ("red", "green", "blue"))), "MASK"),
             _one("ImageToMask", {"image": "image", "channel": "channel"})),
    PipeNode(_row("Upscale Model Loader", (text("model_name", choices=UPSCALERS),), "UPSCALE_MODEL", "STRING"),
             _one("UpscaleModelLoader", {"model_name": "model_name"}, "model_name")),
    PipeNode(_row("ControlNetLoaderAdvanced", (_NET, *any_of(*_KEYFRAMES)), "CONTROL_NET"), _control_loaded),
    PipeNode(_row("DiffControlNetLoaderAdvanced", (link("model", "MODEL"), _NET, *any_of(*_KEYFRAMES)), "CONTROL_NET"),
             _control_loaded),
    *(
        PipeNode(_row(name, _ADVANCED, *("CONDITIONING", "CONDITIONING", "MODEL")), _controlled)
        for name in ("ACN_AdvancedControlNetApply", "ACN_AdvancedControlNetApply_v2")
    ),
    PipeNode(
        _row(
            "CR Multi-ControlNet Stack",
            (
                *(
                    each
                    for place in _STACKED
                    for each in (
                        combo(f"switch_{place}", ("Off", "On")),
                        text(f"controlnet_{place}", _NONE, choices=CONTROLNETS),
                        number(f"controlnet_strength_{place}", 1.0, -10.0, 10.0),
                        number(f"start_percent_{place}", 0.0, 0.0, 1.0), number(f"end_percent_{place}", 1.0, 0.0, 1.0),
                    )
                ),
                *_optional(**{f"image_{place}": "IMAGE" for place in _STACKED}, controlnet_stack=_CONTROL_STACK),
            ),
            *(_CONTROL_STACK, "STRING"),
        ),
        _stacked,
    ),
    PipeNode(
        _row(
            "CR Apply Multi-ControlNet",
            (link("base_positive", "CONDITIONING"), link("base_negative", "CONDITIONING"),
             combo("switch", ("Off", "On")), link("controlnet_stack", _CONTROL_STACK)),
            *("CONDITIONING", "CONDITIONING", "STRING"),
        ),
        _stack_applied,
    ),
    PipeNode(_row("ImpactKSamplerBasicPipe", _SAMPLING, *(_BASIC_PIPE, "LATENT", "VAE")), _sampled_by_pipe),
    PipeNode(_row("VAEDecodeBatched", (link("samples", "LATENT"), link("vae", "VAE"), whole("per_batch", 16, 1, 2**31)),
                  "IMAGE"), _in_batches("VAEDecode", {"samples": "samples", "vae": "vae"})),
    PipeNode(_row("VAEEncodeBatched", (link("pixels", "IMAGE"), link("vae", "VAE"), whole("per_batch", 16, 1, 2**31)),
                  "LATENT"), _in_batches("VAEEncode", {"pixels": "pixels", "vae": "vae"})),
    PipeNode(_row("ImageUpscaleWithModelBatched", (link("upscale_model", "UPSCALE_MODEL"), link("images", "IMAGE"),
                                                   whole("per_batch", 16, 1, 4096)), "IMAGE"),
             _in_batches("ImageUpscaleWithModel", {"upscale_model": "upscale_model", "image": "images"})),
    PipeNode(_row("VHS_LoadAudioUpload", (text("audio", choices=AUDIOS), number("start_time", 0.0, 0.0, _REST),
                                          number("duration", 0.0, 0.0, _REST)), *("AUDIO", "FLOAT")), _heard),
    PipeNode(_row("VHS_LoadVideo", _LOADED_VIDEO, *("IMAGE", "INT", "AUDIO", _VIDEO_INFO)), _video),
)  # fmt: skip
#: kinds of nodes
PACK_PARTS = tuple(each.kind for each in _ROWS)
_SPLITS: Mapping[str, Split] = MappingProxyType({each.kind.name: each.split for each in (*PIPE_NODES, *_ROWS)})
#: names of all kinds that become several nodes
PART_KINDS = frozenset(_SPLITS)
