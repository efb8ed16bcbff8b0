"""Custom nodes that load, set and sample by one pipe: easy-use and tinyterra. Each becomes several nodes of ComfyUI
before a workflow is compiled. Pure.

They are here under their own names, with what their public descriptions say. A pipe is a `Bundle` of links and values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

from modelpool.actors.http.comfy.comfy_node_types import (
    LORAS,
    MAX_BATCH,
    MAX_SEED,
    MAX_SIDE,
    MODELS,
    PART,
    SAMPLER_NAMES,
    SCHEDULE_NAMES,
    VAES,
    NodeInput,
    NodeType,
    NodeUnsupported,
    any_of,
    combo,
    flag,
    link,
    number,
    text,
    whole,
)
from modelpool.actors.http.comfy.comfy_pack_switches import Bundle, unknown_route
from modelpool.actors.http.comfy.comfy_pack_texts import has_choices
from modelpool.actors.request.control_video_fields import VideoFile
from modelpool.pool.inference.sampling.sampler_names import MAX_STEPS

_NONE, _BAKED = "None", "Baked VAE"
#: the resolutions of loaders with a width and a height of their own
_OWN_SIZE = ("\u81ea\u5b9a\u4e49 x \u81ea\u5b9a\u4e49", "width x height (custom)")
_SIZE = re.compile(r"(\d{2,5}) x (\d{2,5})\b")
#: a LoRA in a text, and a weight of a part of it
_LORA_TAG, _WEIGHT = re.compile(r"<lora:[^<>]*>"), re.compile(r"(?<!\\)[()\[\]]")
#: what nodes with image_output do with their images: a node that saves or previews them, "" for none
_SHOWN: Mapping[str, str] = MappingProxyType(
    {"Hide": "", "Preview": "PreviewImage", "Save": "SaveImage", "Hide/Save": "SaveImage"}
)
_SETTINGS = ("steps", "cfg", "sampler_name", "scheduler", "denoise", "seed")
_LORA_PLACES = (1, 2, 3)


@dataclass(frozen=True, slots=True)
class PipeParts:
    """The nodes that replace a node, each behind its sources, with its outputs and warnings. Without a part of its own
    id, the node is no output."""

    nodes: Mapping[str, Mapping[str, Any]]
    outputs: tuple[Any, ...]
    warnings: tuple[str, ...] = ()


class PartMaker:
    """Collects the parts of a node. `video_facts`: facts of a video of the user, by its name; raises UserError."""

    def __init__(self, node_id: str, video_facts: Callable[[str], VideoFile] | None = None) -> None:
        self.node_id = node_id
        self.video_facts = video_facts
        self.nodes: dict[str, Mapping[str, Any]] = {}
        self.warnings: list[str] = []

    def add(self, part: str, kind: str, **inputs: Any) -> str:
        """Add a node, without the inputs that are None, and return its id."""
        name = f"{self.node_id}{PART}{part}" if part else self.node_id
        self.nodes[name] = {
            "class_type": kind,
            "inputs": {key: each for key, each in inputs.items() if each is not None},
        }
        return name

    def made(self, *outputs: Any) -> PipeParts:
        """Return the parts, with the outputs of the node."""
        return PipeParts(self.nodes, outputs, tuple(self.warnings))


#: makes the parts of a node from its settings and the links and values of its other inputs; raises
#: NodeUnsupported
Split: TypeAlias = Callable[[PartMaker, Mapping[str, Any]], PipeParts]


@dataclass(frozen=True, slots=True)
class PipeNode:
    """A kind of node, and what makes its parts."""

    kind: NodeType
    split: Split


def _size(given: Mapping[str, Any]) -> tuple[int, int]:
    """Return the sides of a resolution, or the node's own. Raises NodeUnsupported."""
    if given["resolution"] in _OWN_SIZE:
        return given["empty_latent_width"], given["empty_latent_height"]
    match = _SIZE.match(given["resolution"])
    if match is None:
        raise NodeUnsupported(f"resolution: found {given['resolution'][:100]!r}, expected WIDTH x HEIGHT")
    return int(match[1]), int(match[2])


def _check_text(given: Mapping[str, Any], name: str) -> None:
    if has_choices(given[name]):
        raise NodeUnsupported(f"{name}: found choices, expected the text that was chosen: a seed chooses another one")
    if tag := _LORA_TAG.search(given[name]):
        raise NodeUnsupported(f"{name}: found {tag[0][:100]!r}, expected LoRAs in a stack that is linked")


def _loaded(
    make: PartMaker, given: Mapping[str, Any], size: tuple[int, int], loras: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what a pipe has of a checkpoint: its parts, with LoRAs, texts and empty latents. `loras` have a name, and
    two strengths."""
    if given.get("config_name", "Default") != "Default":
        found = str(given["config_name"])[:100]
        make.warnings.append(f"config_name: found {found}, which is not read: the pool detects the kind of a model")
    if all(given.get(f"{name}_override") is not None for name in ("model", "clip", "vae")):
        make.warnings.append("ckpt_name: not read: links replace all of its parts")
    loader = make.add("model", "CheckpointLoaderSimple", ckpt_name=given["ckpt_name"])
    model, clip, vae = (given.get(f"{name}_override") or [loader, slot]
                        for slot, name in enumerate(("model", "clip", "vae")))  # fmt: skip
    if given["vae_name"] != _BAKED and not given.get("vae_override"):
        vae = [make.add("vae", "VAELoader", vae_name=given["vae_name"]), 0]
    if given.get("optional_lora_stack") is not None:
        used = make.add("stack", "CR Apply LoRA Stack", model=model, clip=clip, lora_stack=given["optional_lora_stack"])
        model, clip = [used, 0], [used, 1]
    for part, (name, strength, text_strength) in loras.items():
        if name != _NONE:
            how = {"strength_model": strength, "strength_clip": text_strength}
            used = make.add(part, "LoraLoader", model=model, clip=clip, lora_name=name, **how)
            model, clip = [used, 0], [used, 1]
    clip = [make.add("clip", "CLIPSetLastLayer", clip=clip, stop_at_clip_layer=given["clip_skip"]), 0]
    pipe = {"model": model, "clip": clip, "vae": vae}
    for side, name in (("positive", "pos"), ("negative", "neg")):
        _check_text(given, side)
        weights = {
            each: given[f"{side}_{each}"]
            for each in ("token_normalization", "weight_interpretation")
            if f"{side}_{each}" in given
        }
        kind = "BNK_CLIPTextEncodeAdvanced" if weights else "CLIPTextEncode"
        pipe[name] = [make.add(side, kind, text=given[side], clip=clip, **weights), 0]
    width, height = size
    latent = make.add("blank", "EmptyLatentImage", width=width, height=height, batch_size=given["batch_size"])
    return {**pipe, "latent": [latent, 0], "batch_size": given["batch_size"]}


def _one_lora(given: Mapping[str, Any]) -> dict[str, Any]:
    return {"lora": tuple(given[name] for name in ("lora_name", "lora_model_strength", "lora_clip_strength"))}


def _easily_loaded(make: PartMaker, given: Mapping[str, Any]) -> PipeParts:
    """A pipe, its model and its VAE; and what else a full loader gives."""
    if given.get("optional_controlnet_stack") is not None:
        raise NodeUnsupported("optional_controlnet_stack: found a link, expected none: ControlNets are applied one by "
                              "one, by ControlNetApplyAdvanced")  # fmt: skip
    if given.get("a1111_prompt_style"):
        raise NodeUnsupported("a1111_prompt_style: found true, expected false: texts are read as by ComfyUI")
    pipe = _loaded(make, given, _size(given), _one_lora(given))
    return make.made(Bundle(pipe), *(pipe[name] for name in ("model", "vae", "clip", "pos", "neg", "latent")))


def _loaded_as_webui(make: PartMaker, given: Mapping[str, Any]) -> PipeParts:
    """The same, with a warning for weights in a text: of this loader, they may be another program's."""
    if weighted := [side for side in ("positive", "negative") if _WEIGHT.search(given[side])]:
        make.warnings.append(f"{', '.join(weighted)}: weights in it are read as by ComfyUI, and not as by A1111")
    parts = _easily_loaded(make, given)
    return PipeParts(parts.nodes, parts.outputs[:3], parts.warnings)


def _easily_loaded_alone(make: PartMaker, given: Mapping[str, Any]) -> PipeParts:
    parts = _easily_loaded(make, given)
    return PipeParts(parts.nodes, parts.outputs[:3], parts.warnings)


def _set(make: PartMaker, given: Mapping[str, Any]) -> PipeParts:
    """A pipe with the settings of a sampler, and the latents, or the image, that it begins with."""
    before: Mapping[str, Any] = given["pipe"].values
    pipe = {**before, **{name: given[name] for name in _SETTINGS}}
    if given.get("latent") is not None:
        pipe["latent"] = given["latent"]
    if (image := given.get("image_to_latent")) is not None:
        if given.get("latent") is not None:
            raise NodeUnsupported("image_to_latent, latent: found both, expected one of them")
        if before.get("batch_size", 1) != 1:
            found = before["batch_size"]
            raise NodeUnsupported(f"image_to_latent: found a batch_size of {found} in the loader, expected 1")
        pipe["latent"] = [make.add("encoded", "VAEEncode", pixels=image, vae=before.get("vae")), 0]
    return make.made(Bundle(pipe))


def _run(make: PartMaker, given: Mapping[str, Any], pipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return a pipe after its sampler; its images are decoded, and shown or saved as the node says."""
    if missing := [name for name in _SETTINGS if name not in pipe]:
        raise NodeUnsupported(f"pipe: found none of {', '.join(missing)}, expected easy preSampling before")
    how = given["image_output"]
    if how not in _SHOWN:
        raise NodeUnsupported(f"image_output: found {how[:100]!r}, expected one of {', '.join(_SHOWN)}")
    if given.get("xyPlot") is not None:
        raise NodeUnsupported("xyPlot: found a link, expected none: the pool plots nothing; `modelpool batch` varies "
                              "fields of a workflow")  # fmt: skip
    sources = {"positive": pipe.get("pos"), "negative": pipe.get("neg"), "latent_image": pipe.get("latent")}
    settings = {name: pipe[name] for name in _SETTINGS}
    run = [make.add("latent", "KSampler", model=pipe.get("model"), **sources, **settings), 0]
    image = [make.add("image", "VAEDecode", samples=run, vae=pipe.get("vae")), 0]
    if kind := _SHOWN[how]:
        prefix = given["save_prefix"] if kind == "SaveImage" else None
        make.add("", kind, images=image, filename_prefix=prefix)
    return {**pipe, "latent": run, "image": image}


def _replaced(given: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the parts of a pipe that the links of a node replace."""
    names = {"model": "model", "positive": "pos", "negative": "neg", "latent": "latent", "vae": "vae", "clip": "clip"}
    links = {part: given.get(f"{prefix}{name}") for name, part in names.items()}
    return {part: each for part, each in links.items() if each is not None}


def _outputs(pipe: Mapping[str, Any]) -> tuple[Any, ...]:
    names = ("model", "pos", "neg", "latent", "vae", "clip")
    return tuple(pipe.get(name) for name in names)


def _sampled(make: PartMaker, given: Mapping[str, Any]) -> PipeParts:
    pipe = _run(make, given, {**given["pipe"].values, **_replaced(given)})
    return make.made(Bundle(pipe), pipe["image"])


def _sampled_with_settings(make: PartMaker, given: Mapping[str, Any]) -> PipeParts:
    if given.get("image") is not None:
        raise NodeUnsupported("image: found a link, expected none: easy preSampling begins with an image")
    own = {name: given[name] for name in _SETTINGS}
    pipe = _run(make, given, {**given["pipe"].values, **_replaced(given), **own})
    return make.made(Bundle(pipe), pipe["image"], *_outputs(pipe), pipe["seed"])


def _loaded_by_tinyterra(make: PartMaker, given: Mapping[str, Any]) -> PipeParts:
    loras = {
        f"lora{place}": tuple(given[f"lora{place}_{name}"] for name in ("name", "model_strength", "clip_strength"))
        for place in _LORA_PLACES
    }
    size = given["empty_latent_width"], given["empty_latent_height"]
    pipe = {**_loaded(make, given, size, loras), "seed": given["seed"]}
    return make.made(Bundle(pipe), *_outputs(pipe), pipe["seed"])


def _sampled_by_tinyterra(make: PartMaker, given: Mapping[str, Any]) -> PipeParts:
    """A pipe with one LoRA more and scaled latents, after its sampler."""
    if given["sampler_state"] != "Sample":
        raise NodeUnsupported(f"sampler_state: found {given['sampler_state'][:100]}, expected Sample")
    pipe = {**given["pipe"].values, **_replaced(given, "optional_")}
    ((name, strength, text_strength),) = _one_lora(given).values()
    if name != _NONE:
        if given.get("optional_positive") is None or given.get("optional_negative") is None:
            raise NodeUnsupported(f"lora_name: found {name[:100]}, expected None: the texts of the pipe are encoded "
                                  "before it; easy loraStack, or the loader, has LoRAs")  # fmt: skip
        how = {"lora_name": name, "strength_model": strength, "strength_clip": text_strength}
        used = make.add("lora", "LoraLoader", model=pipe.get("model"), clip=pipe.get("clip"), **how)
        pipe |= {"model": [used, 0], "clip": [used, 1]}
    if given["upscale_method"] != _NONE:
        how = {"upscale_method": given["upscale_method"], "scale_by": given["factor"]}
        pipe["latent"] = [make.add("scaled", "LatentUpscaleBy", samples=pipe.get("latent"), **how), 0]
        if given["crop"] != "disabled":
            make.warnings.append(f"crop: found {given['crop'][:100]}, which is not read: both sides have one factor")
    after = _run(make, given, {**pipe, **{each: given[each] for each in _SETTINGS}})
    return make.made(Bundle(after), *_outputs(after), after["image"], after["seed"])


PIPE_LINE = "PIPE_LINE"


def _row(name: str, inputs: tuple[NodeInput, ...], *outputs: str, is_output: bool = False) -> NodeType:
    return NodeType(name, "values", inputs, outputs, unknown_route, is_output)


def _optional(*names: tuple[str, str]) -> tuple[NodeInput, ...]:
    return tuple(link(name, kind, is_required=False) for name, kind in names)


_PIPE = link("pipe", PIPE_LINE)
_STACK = link("optional_lora_stack", "LORA_STACK", is_required=False)
_OVERRIDES = _optional(("model_override", "MODEL"), ("clip_override", "CLIP"), ("vae_override", "VAE"))
_TEXT_KINDS = (("model", "MODEL"), ("positive", "CONDITIONING"), ("negative", "CONDITIONING"), ("latent", "LATENT"),
               ("vae", "VAE"), ("clip", "CLIP"))  # fmt: skip
_STRENGTHS = (-10.0, 10.0)
_CHECKPOINT = (text("vae_name", _BAKED, choices=VAES), whole("clip_skip", -2, -24, -1))
_LORA = (
    text("lora_name", _NONE, choices=LORAS),
    *(number(f"lora_{part}_strength", 1.0, *_STRENGTHS) for part in ("model", "clip")),
)
_SIDES = tuple(whole(f"empty_latent_{side}", 512, 64, MAX_SIDE) for side in ("width", "height"))
_BATCH = whole("batch_size", 1, 1, MAX_BATCH)
_NORMALIZATIONS = ("none", "mean", "length", "length+mean")
_INTERPRETATIONS = ("comfy", "A1111", "comfy++", "compel", "down_weight", "fixed attention")


def _weighted(side: str) -> tuple[NodeInput, ...]:
    return (
        text(side),
        text(f"{side}_token_normalization", "none", choices=_NORMALIZATIONS),
        text(f"{side}_weight_interpretation", "comfy", choices=_INTERPRETATIONS),
    )


_PLAIN_TEXTS = (text("positive"), text("negative"))
_WEIGHTED_TEXTS = (*_weighted("positive"), *_weighted("negative"))
_SIZED = (text("resolution", "512 x 512"), *_SIDES)
_CONTROLS = (*any_of("optional_controlnet_stack"),)
_WEBUI = flag("a1111_prompt_style", is_required=False)
_STEPS, _CFG = whole("steps", 20, 1, MAX_STEPS), number("cfg", 8.0, 0.0, 100.0)
_NAMES = (text("sampler_name", "euler", choices=SAMPLER_NAMES), text("scheduler", "normal", choices=SCHEDULE_NAMES))
_DENOISE, _SEED = number("denoise", 1.0, 0.0, 1.0), whole("seed", 0, 0, MAX_SEED)
_RUN = (_STEPS, _CFG, *_NAMES, _DENOISE)
_SAVED = (text("image_output", "Preview", choices=tuple(_SHOWN)), whole("link_id", 0, 0, 2**53, False),
          text("save_prefix", "ComfyUI", False))  # fmt: skip
_ALL = tuple(kind for _, kind in _TEXT_KINDS)
_CONFIG = text("config_name", "Default", False, choices=("Default",))
_FIRST = combo("ckpt_name", MODELS)
_ROWS = (
    PipeNode(_row("easy a1111Loader", (_FIRST, *_CHECKPOINT, *_LORA, *_SIZED, *_PLAIN_TEXTS, _BATCH, _WEBUI, _STACK,
                                      *_CONTROLS), *(PIPE_LINE, "MODEL", "VAE")), _loaded_as_webui),
    PipeNode(_row("easy comfyLoader", (_FIRST, *_CHECKPOINT, *_LORA, *_SIZED, *_PLAIN_TEXTS, _BATCH, _STACK,
                                        *_CONTROLS), *(PIPE_LINE, "MODEL", "VAE")), _easily_loaded_alone),
    PipeNode(_row("easy fullLoader", (_FIRST, _CONFIG, *_CHECKPOINT, *_LORA, *_SIZED,
                                     *_WEIGHTED_TEXTS, _BATCH, _WEBUI, *_OVERRIDES, _STACK, *_CONTROLS),
                 *(PIPE_LINE, "MODEL", "VAE", "CLIP", "CONDITIONING", "CONDITIONING", "LATENT")), _easily_loaded),
    PipeNode(_row("easy preSampling", (_PIPE, *_RUN, _SEED, *_optional(("image_to_latent", "IMAGE"),
                                                                      ("latent", "LATENT"))), PIPE_LINE), _set),
    PipeNode(_row("easy kSampler", (_PIPE, *_SAVED, *_optional(("model", "MODEL"))), *(PIPE_LINE, "IMAGE"),
                 is_output=True), _sampled),
    PipeNode(_row("easy fullkSampler", (_PIPE, *_RUN, *_SAVED, _SEED, *_optional(*_TEXT_KINDS),
                                       *any_of("xyPlot"), link("image", "IMAGE", is_required=False)),
                 *(PIPE_LINE, "IMAGE", *_ALL, "INT"), is_output=True), _sampled_with_settings),
    PipeNode(
        _row(
            "ttN pipeLoader",
            (
                _FIRST, _CONFIG, _CHECKPOINT[0], whole("clip_skip", -1, -24, -1),
                *(
                    each
                    for place in _LORA_PLACES
                    for each in (
                        text(f"lora{place}_name", _NONE, choices=LORAS),
                        *(number(f"lora{place}_{part}_strength", 1.0, *_STRENGTHS) for part in ("model", "clip")),
                    )
                ),
                *_WEIGHTED_TEXTS, *_SIDES, _BATCH, _SEED, *_OVERRIDES[:2], _STACK,
            ),
            *(PIPE_LINE, *_ALL, "INT"),
        ),
        _loaded_by_tinyterra,
    ),
    PipeNode(
        _row(
            "ttN pipeKSampler",
            (
                _PIPE, *_LORA, text("upscale_method", _NONE), number("factor", 2.0, 0.0, 10.0),
                text("crop", "disabled", choices=("disabled", "center")), text("sampler_state", "Sample"), *_RUN,
                _SAVED[0], _SAVED[2], _SEED, *_optional(*((f"optional_{name}", kind) for name, kind in _TEXT_KINDS)),
                *any_of("xyPlot"),
            ),
            *(PIPE_LINE, *_ALL, "IMAGE", "INT"),
            is_output=True,
        ),
        _sampled_by_tinyterra,
    ),
)  # fmt: skip
#: nodes of pipes
PIPE_NODES = _ROWS
PACK_PIPES = tuple(each.kind for each in _ROWS)
