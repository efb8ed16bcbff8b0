"""The ComfyUI nodes that work here: their inputs and outputs, and what each of them means for a request.

The names of nodes, inputs and outputs are those of ComfyUI's API. To support a node, add a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from modelpool.actors.http.comfy_values import (
    BlankLatent,
    ClipValue,
    ControlNetValue,
    ControlUse,
    DecodedImage,
    EncodedImage,
    ImageFile,
    LatentValue,
    LoraUse,
    MaskFile,
    ModelValue,
    SampledLatent,
    ScaledLatent,
    TextValue,
    VaeValue,
)
from modelpool.pool.core.errors import UserError
from modelpool.pool.sampling.names import MAX_STEPS

#: lists of names that the pool fills in
MODELS, LORAS, SAMPLER_NAMES, SCHEDULE_NAMES, IMAGES = "models", "loras", "samplers", "schedules", "images"
#: types of values that are written in a node, and not linked
WIDGET_TYPES = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")
MAX_SIDE, MAX_BATCH, MAX_SEED, MOST_GROWN = 16384, 64, 2**64 - 1, 64


class NodeUnsupported(UserError):
    """A node whose values ask for something that the pool does not do."""


@dataclass(frozen=True, slots=True)
class NodeInput:
    """An input of a node.

    type     of a link, or one of `WIDGET_TYPES`
    choices  the values of a COMBO: one of the lists that the pool fills in, or the values themselves; () for any
    """

    name: str
    type: str
    default: Any = None
    least: float = 0.0
    most: float = 0.0
    choices: str | tuple[str, ...] = ()
    is_required: bool = True


@dataclass(frozen=True, slots=True)
class NodeType:
    """A kind of node. `build` returns its outputs from its inputs; the one called "node_id" is the id of the node."""

    name: str
    category: str
    inputs: tuple[NodeInput, ...]
    outputs: tuple[str, ...]
    build: Callable[[Mapping[str, Any]], tuple[Any, ...]]
    is_output: bool = False


def _link(name: str, kind: str, is_required: bool = True) -> NodeInput:
    return NodeInput(name, kind, is_required=is_required)


def _whole(name: str, default: int, least: int, most: int) -> NodeInput:
    return NodeInput(name, "INT", default, least, most)


def _number(name: str, default: float, least: float, most: float) -> NodeInput:
    return NodeInput(name, "FLOAT", default, least, most)


def _text(name: str, default: str = "", is_required: bool = True) -> NodeInput:
    return NodeInput(name, "STRING", default, is_required=is_required)


def _combo(name: str, choices: str | tuple[str, ...] = (), is_required: bool = True) -> NodeInput:
    return NodeInput(name, "COMBO", choices=choices, is_required=is_required)


def file_stem(name: str) -> str:
    """Return the name of a model, LoRA or ControlNet from the name of its file."""
    stem = name.replace("\\", "/").rpartition("/")[2]
    for ending in (".safetensors", ".sft", ".gguf", ".ckpt", ".pt", ".pth", ".bin"):
        stem = stem.removesuffix(ending)
    return stem


def _checkpoint(given: Mapping[str, Any]) -> tuple[Any, ...]:
    name = given["ckpt_name"]
    return ModelValue(name), ClipValue(name), VaeValue(name)


def _lora(given: Mapping[str, Any]) -> tuple[Any, ...]:
    model, clip = given["model"], given["clip"]
    use = LoraUse(given["lora_name"], given["strength_model"], given["strength_clip"])
    return replace(model, loras=(*model.loras, use)), replace(clip, loras=(*clip.loras, use))


def _lora_of_model(given: Mapping[str, Any]) -> tuple[Any, ...]:
    model: ModelValue = given["model"]
    use = LoraUse(given["lora_name"], given["strength_model"], 0.0)
    return (replace(model, loras=(*model.loras, use)),)


def _last_layer(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (replace(given["clip"], last_layer=given["stop_at_clip_layer"]),)


def _control(given: Mapping[str, Any]) -> tuple[Any, ...]:
    use = ControlUse(given["control_net"], given["image"], given["strength"], 0.0, 1.0)
    return (_with_control(given["conditioning"], use),)


def _control_of_both(given: Mapping[str, Any]) -> tuple[Any, ...]:
    bounds = given["start_percent"], given["end_percent"]
    use = ControlUse(given["control_net"], given["image"], given["strength"], *bounds)
    return _with_control(given["positive"], use), _with_control(given["negative"], use)


def _with_control(text: TextValue, use: ControlUse) -> TextValue:
    return replace(text, controls=(*text.controls, use))


def _for_inpainting(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (EncodedImage(given["pixels"], replace(given["mask"], grown=given["grow_mask_by"])),)


def _with_noise_mask(given: Mapping[str, Any]) -> tuple[Any, ...]:
    latent = given["samples"]
    if not isinstance(latent, EncodedImage):
        raise NodeUnsupported("samples: expected the latents of an image, from VAEEncode")
    return (replace(latent, mask=given["mask"]),)


def _inpaint_conditioning(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return given["positive"], given["negative"], EncodedImage(given["pixels"], given["mask"])


def _scaled(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (ScaledLatent(_sampled_input(given), given["scale_by"]),)


def _scaled_to(given: Mapping[str, Any]) -> tuple[Any, ...]:
    latent = _sampled_input(given)
    if not isinstance(latent.start, BlankLatent):
        raise NodeUnsupported("samples: expected latents that began empty; use LatentUpscaleBy for others")
    scales = given["width"] / latent.start.width, given["height"] / latent.start.height
    if scales[0] != scales[1]:
        raise NodeUnsupported(f"width, height: found the factors {scales[0]:g} and {scales[1]:g}, expected equal ones")
    return (ScaledLatent(latent, scales[0]),)


def _sampled_input(given: Mapping[str, Any]) -> SampledLatent:
    latent = given["samples"]
    if not isinstance(latent, SampledLatent):
        raise NodeUnsupported("samples: expected the latents of a sampler")
    return latent


def _ksampler(given: Mapping[str, Any]) -> tuple[Any, ...]:
    steps, denoise = given["steps"], given["denoise"]
    # `steps` steps are run, at the end of a schedule that is longer the less is denoised
    whole_steps = steps if denoise > 0.9999 else int(steps / denoise)
    if whole_steps > MAX_STEPS:
        raise NodeUnsupported(
            f"denoise: {steps} steps at {denoise:g} need a schedule of {whole_steps}, over {MAX_STEPS}"
        )
    return (_sampled(given, given["seed"], whole_steps, steps, given["latent_image"]),)


def _ksampler_advanced(given: Mapping[str, Any]) -> tuple[Any, ...]:
    steps, start = given["steps"], given["start_at_step"]
    for name, expected in (("add_noise", "enable"), ("return_with_leftover_noise", "disable")):
        if given[name] != expected:
            raise NodeUnsupported(f"{name}: found {given[name]}, expected {expected}")
    if given["end_at_step"] < steps:
        raise NodeUnsupported(f"end_at_step: found {given['end_at_step']}, expected at least steps, {steps}")
    if start >= steps:
        raise NodeUnsupported(f"start_at_step: found {start}, expected less than steps, {steps}")
    return (_sampled(given, given["noise_seed"], steps, steps - start, given["latent_image"]),)


def _sampled(given: Mapping[str, Any], seed: int, steps: int, run_steps: int, start: LatentValue) -> SampledLatent:
    model, positive, negative = given["model"], given["positive"], given["negative"]
    if isinstance(start, SampledLatent):
        raise NodeUnsupported("latent_image: expected empty, encoded or scaled latents, found those of a sampler")
    if isinstance(start, BlankLatent) and run_steps < steps:
        raise NodeUnsupported("latent_image: empty latents are denoised completely; expected denoise 1")
    if positive.is_zero or (negative.is_zero and given["cfg"] != 1):
        raise NodeUnsupported("conditioning that is set to zero is only supported as negative with cfg 1")
    if positive.controls != negative.controls and negative.controls:
        raise NodeUnsupported("negative: its ControlNets must be those of positive")
    for name, text in (("positive", positive), ("negative", negative)):
        if text.clip.name not in ("", model.name):
            raise NodeUnsupported(f"{name}: its text encoder is of {text.clip.name}, expected that of {model.name}")
        if not set(text.clip.loras) <= set(model.loras):
            raise NodeUnsupported(f"{name}: its text encoder has LoRAs that the model does not have")
    if given["cfg"] != 1 and positive.clip.loras != negative.clip.loras:
        raise NodeUnsupported("negative: the LoRAs of its text encoder must be those of positive")
    if positive.guidance is not None and given["cfg"] != 1:
        raise NodeUnsupported(f"cfg: found {given['cfg']:g}, expected 1 with FluxGuidance")
    cfg = given["cfg"] if positive.guidance is None else positive.guidance
    return SampledLatent(
        model=model,
        positive=positive,
        negative=negative,
        seed=seed,
        steps=steps,
        run_steps=run_steps,
        cfg=cfg,
        sampler=given["sampler_name"],
        schedule=given["scheduler"],
        start=start,
        node_id=given["node_id"],
    )


def _decoded(given: Mapping[str, Any]) -> tuple[Any, ...]:
    latent = given["samples"]
    if not isinstance(latent, SampledLatent):
        raise NodeUnsupported("samples: expected the latents of a sampler")
    if given["vae"].name not in ("", latent.model.name):
        raise NodeUnsupported(f"vae: it is of {given['vae'].name}, expected that of {latent.model.name}")
    return (DecodedImage(latent),)


def _saved(given: Mapping[str, Any]) -> tuple[Any, ...]:
    if not isinstance(given["images"], DecodedImage):
        raise NodeUnsupported("images: expected images that are generated, from VAEDecode")
    return (given["images"],)


def _encoded(given: Mapping[str, Any]) -> tuple[Any, ...]:
    if not isinstance(given["pixels"], ImageFile):
        raise NodeUnsupported("pixels: expected an image of LoadImage")
    return (EncodedImage(given["pixels"]),)


def _loaded_mask(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (MaskFile(given["image"], given["channel"][0].upper()),)


def _mask_of_image(given: Mapping[str, Any]) -> tuple[Any, ...]:
    if not isinstance(given["image"], ImageFile):
        raise NodeUnsupported("image: expected an image of LoadImage")
    return (MaskFile(given["image"].name, given["channel"][0].upper()),)


_SAMPLING = (
    _whole("steps", 20, 1, MAX_STEPS),
    _number("cfg", 8.0, 1.0, 100.0),
    _combo("sampler_name", SAMPLER_NAMES),
    _combo("scheduler", SCHEDULE_NAMES),
    _link("positive", "CONDITIONING"),
    _link("negative", "CONDITIONING"),
    _link("latent_image", "LATENT"),
)
_SIZE = (_whole("width", 512, 16, MAX_SIDE), _whole("height", 512, 16, MAX_SIDE))
_UPSCALE = _combo("upscale_method", ("nearest-exact", "bilinear", "area", "bicubic", "bislerp"))
_ON_OFF = ("enable", "disable")
_CHANNELS = ("alpha", "red", "green", "blue")
_STRENGTH = ("strength", 1.0, 0.0, 10.0)
_BLANK = (*_SIZE, _whole("batch_size", 1, 1, MAX_BATCH))
_LORA_STRENGTH = (1.0, -100.0, 100.0)


def _blank(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (BlankLatent(given["width"], given["height"], given["batch_size"]),)


_ROWS = (
    NodeType(
        "CheckpointLoaderSimple",
        "loaders",
        (_combo("ckpt_name", MODELS),),
        ("MODEL", "CLIP", "VAE"),
        _checkpoint,
    ),
    NodeType(
        "UNETLoader",
        "loaders",
        (_combo("unet_name", MODELS), _combo("weight_dtype")),
        ("MODEL",),
        lambda given: (ModelValue(given["unet_name"]),),
    ),
    NodeType("CLIPLoader", "loaders", (_text("clip_name"), _combo("type")), ("CLIP",), lambda given: (ClipValue(""),)),
    NodeType(
        "DualCLIPLoader",
        "loaders",
        (_text("clip_name1"), _text("clip_name2"), _combo("type")),
        ("CLIP",),
        lambda given: (ClipValue(""),),
    ),
    NodeType(
        "TripleCLIPLoader",
        "loaders",
        (_text("clip_name1"), _text("clip_name2"), _text("clip_name3")),
        ("CLIP",),
        lambda given: (ClipValue(""),),
    ),
    NodeType("VAELoader", "loaders", (_text("vae_name"),), ("VAE",), lambda given: (VaeValue(""),)),
    NodeType(
        "LoraLoader",
        "loaders",
        (
            _link("model", "MODEL"),
            _link("clip", "CLIP"),
            _combo("lora_name", LORAS),
            _number("strength_model", *_LORA_STRENGTH),
            _number("strength_clip", *_LORA_STRENGTH),
        ),
        ("MODEL", "CLIP"),
        _lora,
    ),
    NodeType(
        "LoraLoaderModelOnly",
        "loaders",
        (_link("model", "MODEL"), _combo("lora_name", LORAS), _number("strength_model", *_LORA_STRENGTH)),
        ("MODEL",),
        _lora_of_model,
    ),
    NodeType(
        "CLIPSetLastLayer",
        "conditioning",
        (_link("clip", "CLIP"), _whole("stop_at_clip_layer", -1, -24, -1)),
        ("CLIP",),
        _last_layer,
    ),
    NodeType(
        "CLIPTextEncode",
        "conditioning",
        (_text("text"), _link("clip", "CLIP")),
        ("CONDITIONING",),
        lambda given: (TextValue(given["text"], given["clip"]),),
    ),
    NodeType(
        "FluxGuidance",
        "conditioning",
        (_link("conditioning", "CONDITIONING"), _number("guidance", 3.5, 1.0, 100.0)),
        ("CONDITIONING",),
        lambda given: (replace(given["conditioning"], guidance=given["guidance"]),),
    ),
    NodeType(
        "ConditioningZeroOut",
        "conditioning",
        (_link("conditioning", "CONDITIONING"),),
        ("CONDITIONING",),
        lambda given: (replace(given["conditioning"], is_zero=True),),
    ),
    NodeType(
        "ControlNetLoader",
        "loaders",
        (_text("control_net_name"),),
        ("CONTROL_NET",),
        lambda given: (ControlNetValue(file_stem(given["control_net_name"])),),
    ),
    NodeType(
        "SetUnionControlNetType",
        "conditioning",
        (_link("control_net", "CONTROL_NET"), _combo("type")),
        ("CONTROL_NET",),
        lambda given: (replace(given["control_net"], mode="" if given["type"] == "auto" else given["type"]),),
    ),
    NodeType(
        "ControlNetApply",
        "conditioning",
        (
            _link("conditioning", "CONDITIONING"),
            _link("control_net", "CONTROL_NET"),
            _link("image", "IMAGE"),
            _number(*_STRENGTH),
        ),
        ("CONDITIONING",),
        _control,
    ),
    NodeType(
        "ControlNetApplyAdvanced",
        "conditioning",
        (
            _link("positive", "CONDITIONING"),
            _link("negative", "CONDITIONING"),
            _link("control_net", "CONTROL_NET"),
            _link("image", "IMAGE"),
            _number(*_STRENGTH),
            _number("start_percent", 0.0, 0.0, 1.0),
            _number("end_percent", 1.0, 0.0, 1.0),
            _link("vae", "VAE", is_required=False),
        ),
        ("CONDITIONING", "CONDITIONING"),
        _control_of_both,
    ),
    NodeType("EmptyLatentImage", "latent", _BLANK, ("LATENT",), _blank),
    NodeType("EmptySD3LatentImage", "latent", _BLANK, ("LATENT",), _blank),
    NodeType("VAEEncode", "latent", (_link("pixels", "IMAGE"), _link("vae", "VAE")), ("LATENT",), _encoded),
    NodeType(
        "VAEEncodeForInpaint",
        "latent",
        (
            _link("pixels", "IMAGE"),
            _link("vae", "VAE"),
            _link("mask", "MASK"),
            _whole("grow_mask_by", 6, 0, MOST_GROWN),
        ),
        ("LATENT",),
        _for_inpainting,
    ),
    NodeType(
        "SetLatentNoiseMask",
        "latent",
        (_link("samples", "LATENT"), _link("mask", "MASK")),
        ("LATENT",),
        _with_noise_mask,
    ),
    NodeType(
        "InpaintModelConditioning",
        "conditioning",
        (
            _link("positive", "CONDITIONING"),
            _link("negative", "CONDITIONING"),
            _link("vae", "VAE"),
            _link("pixels", "IMAGE"),
            _link("mask", "MASK"),
            NodeInput("noise_mask", "BOOLEAN", True, is_required=False),
        ),
        ("CONDITIONING", "CONDITIONING", "LATENT"),
        _inpaint_conditioning,
    ),
    NodeType(
        "LatentUpscaleBy",
        "latent",
        (_link("samples", "LATENT"), _UPSCALE, _number("scale_by", 1.5, 1.0, 8.0)),
        ("LATENT",),
        _scaled,
    ),
    NodeType(
        "LatentUpscale",
        "latent",
        (_link("samples", "LATENT"), _UPSCALE, *_SIZE, _combo("crop", ("disabled", "center"))),
        ("LATENT",),
        _scaled_to,
    ),
    NodeType(
        "KSampler",
        "sampling",
        (
            _link("model", "MODEL"),
            _whole("seed", 0, 0, MAX_SEED),
            *_SAMPLING,
            _number("denoise", 1.0, 0.01, 1.0),
        ),
        ("LATENT",),
        _ksampler,
    ),
    NodeType(
        "KSamplerAdvanced",
        "sampling",
        (
            _link("model", "MODEL"),
            _combo("add_noise", _ON_OFF),
            _whole("noise_seed", 0, 0, MAX_SEED),
            *_SAMPLING,
            _whole("start_at_step", 0, 0, 10000),
            _whole("end_at_step", 10000, 0, 10000),
            _combo("return_with_leftover_noise", _ON_OFF),
        ),
        ("LATENT",),
        _ksampler_advanced,
    ),
    NodeType("VAEDecode", "latent", (_link("samples", "LATENT"), _link("vae", "VAE")), ("IMAGE",), _decoded),
    NodeType(
        "LoadImage",
        "image",
        (_combo("image", IMAGES),),
        ("IMAGE", "MASK"),
        lambda given: (ImageFile(given["image"]), MaskFile(given["image"], "A")),
    ),
    NodeType(
        "LoadImageMask",
        "mask",
        (_combo("image", IMAGES), _combo("channel", _CHANNELS)),
        ("MASK",),
        _loaded_mask,
    ),
    NodeType(
        "ImageToMask",
        "mask",
        (_link("image", "IMAGE"), _combo("channel", _CHANNELS)),
        ("MASK",),
        _mask_of_image,
    ),
    NodeType(
        "InvertMask",
        "mask",
        (_link("mask", "MASK"),),
        ("MASK",),
        lambda given: (replace(given["mask"], inverted=not given["mask"].inverted),),
    ),
    NodeType(
        "SaveImage",
        "image",
        (_link("images", "IMAGE"), _text("filename_prefix", "ComfyUI")),
        (),
        _saved,
        is_output=True,
    ),
    NodeType("PreviewImage", "image", (_link("images", "IMAGE"),), (), _saved, is_output=True),
)

#: nodes by name
NODE_TYPES: Mapping[str, NodeType] = MappingProxyType({row.name: row for row in _ROWS})
