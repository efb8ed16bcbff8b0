"""Custom nodes of ComfyUI that stand for several of its own: loaders, samplers and stacks of LoRAs. Pure.

They are here under their own names, with what their public descriptions say.
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
    LORAS,
    MAX_BATCH,
    MAX_SEED,
    MAX_SIDE,
    MODELS,
    SAMPLER_NAMES,
    SCHEDULE_NAMES,
    TEXT_ENCODERS,
    VAES,
    Builder,
    NodeInput,
    NodeUnsupported,
    check_parts,
    combo,
    file_stem,
    link,
    node_row,
    number,
    only_in_workflows,
    text,
    warn,
    whole,
)
from modelpool.actors.http.comfy.comfy_sampling_nodes import SAMPLING_NODES
from modelpool.actors.http.comfy.comfy_values import (
    BlankLatent,
    ClipValue,
    DecodedImage,
    LoraUse,
    ModelValue,
    NodeImage,
    NodeLatent,
    NodeMask,
    SampledLatent,
    TextValue,
    VaeValue,
)
from modelpool.actors.http.comfy.comfy_workflow_nodes import WORKFLOW_NODES
from modelpool.actors.request.bounds import MAX_LORAS
from modelpool.pool.inference.sampling.sampler_names import MAX_STEPS

#: how a loader names no LoRA, and the VAE of the checkpoint
_NONE, _BAKED = "None", "Baked VAE"
_LORA_SLOTS, _STACKED = 99, 4
_KSAMPLER, _KSAMPLER_ADVANCED = (
    next(row.build for row in SAMPLING_NODES if row.name == name) for name in ("KSampler", "KSamplerAdvanced")
)


def _loaded(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """A checkpoint with a LoRA, both texts, and empty latents."""
    name = given["ckpt_name"]
    uses: tuple[LoraUse, ...] = ()
    if given["lora_name"] != _NONE:
        uses = (LoraUse(file_stem(given["lora_name"]), given["lora_model_strength"], given["lora_clip_strength"]),)
    uses = (*(given.get("lora_stack") or ()), *uses)
    check_weights(given)
    check_parts("loras", "LoRAs", len(uses), MAX_LORAS)
    clip = ClipValue(name, uses, given["clip_skip"])
    latent = BlankLatent(given["empty_latent_width"], given["empty_latent_height"], given["batch_size"])
    is_own = given["vae_name"] == _BAKED
    vae = VaeValue(name if is_own else "", "" if is_own else given["vae_name"])
    texts = (TextValue(given[side], clip) for side in ("positive", "negative"))
    return (ModelValue(name, uses, has_vae=True), *texts, latent, vae, clip, None)


def check_weights(given: Mapping[str, Any]) -> None:
    """Raise NodeUnsupported if the weights of a text are not read as ComfyUI itself does."""
    found = (given["token_normalization"], given["weight_interpretation"])
    if found != ("none", "comfy"):
        shown = " and ".join(each[:40] for each in found)
        raise NodeUnsupported(f"token_normalization, weight_interpretation: found {shown}, expected none, and comfy")


def _sampled(given: Mapping[str, Any]) -> tuple[Any, ...]:
    if given.get("sampler_state") not in (None, "", "Sample"):
        raise NodeUnsupported(f"sampler_state: found {str(given['sampler_state'])[:40]}, expected Sample")
    (latent,) = _KSAMPLER(given)
    return _outputs(given, latent, DecodedImage(latent) if isinstance(latent, SampledLatent) else None)


def _sampled_node(given: Mapping[str, Any]) -> tuple[Any, ...]:
    if given.get("sampler_state") not in (None, "", "Sample"):
        raise NodeUnsupported(f"sampler_state: found {str(given['sampler_state'])[:40]}, expected Sample")
    (latent,) = WORKFLOW_NODES["KSampler"]({**given, "node_id": f"{given['node_id']}/latent"})
    latent = replace(latent, sampler=given["node_id"])  # progress and errors are of the node of the user
    nodes: MadeNodes = given["nodes"]
    vae = given.get("optional_vae")
    return _outputs(given, latent, nodes.decode(given["node_id"], latent, "" if vae is None else vae.name))


def _sampled_in_part(given: Mapping[str, Any]) -> tuple[Any, ...]:
    _check_script(given)
    (latent,) = _KSAMPLER_ADVANCED(given)
    return _outputs(given, latent, DecodedImage(latent) if isinstance(latent, SampledLatent) else None)


def _sampled_node_in_part(given: Mapping[str, Any]) -> tuple[Any, ...]:
    _check_script(given)
    (latent,) = WORKFLOW_NODES["KSamplerAdvanced"]({**given, "node_id": f"{given['node_id']}/latent"})
    if isinstance(latent, NodeLatent):
        latent = replace(latent, sampler=given["node_id"])
    nodes: MadeNodes = given["nodes"]
    vae = given.get("optional_vae")
    return _outputs(given, latent, nodes.decode(given["node_id"], latent, "" if vae is None else vae.name))


def _check_script(given: Mapping[str, Any]) -> None:
    if given.get("script") is not None:
        raise NodeUnsupported("script: found a link, expected none: the pool runs no scripts of samplers")


def _check_noise(given: Mapping[str, Any]) -> None:
    """Warn of noise that is not drawn as a node says. Raises NodeUnsupported for variations of the noise."""
    if given["variation_strength"]:
        raise NodeUnsupported(f"variation_strength: found {given['variation_strength']:g}, expected 0")
    if given["batch_seed_mode"] not in ("incremental", "comfy"):
        raise NodeUnsupported(f"batch_seed_mode: found {given['batch_seed_mode'][:100]}, expected incremental or comfy")
    if not given["noise_mode"].startswith("CPU"):
        warn(given, f"noise_mode: found {given['noise_mode'][:100]}, which is not read: the noise of a seed is the "
                    "same on every device")  # fmt: skip


def _sampled_with_noise(given: Mapping[str, Any]) -> tuple[Any, ...]:
    _check_noise(given)
    return _KSAMPLER(given)


def _sampled_node_with_noise(given: Mapping[str, Any]) -> tuple[Any, ...]:
    _check_noise(given)
    return WORKFLOW_NODES["KSampler"](given)


def _outputs(given: Mapping[str, Any], latent: Any, image: Any) -> tuple[Any, ...]:
    if given["vae_decode"] == "true (tiled)":
        warn(given, "vae_decode: found true (tiled); images are decoded in one piece, or in tiles where they need it")
    return (*(given[name] for name in ("model", "positive", "negative")), latent, given.get("optional_vae"), image)


def with_loras(model: ModelValue, clip: ClipValue | None, uses: tuple[LoraUse, ...]) -> tuple[Any, ...]:
    """Return a model, and its text encoder if there is one, with LoRAs. Raises NodeUnsupported for too many."""
    check_parts("loras", "LoRAs", len(model.loras) + len(uses), MAX_LORAS)
    clip_after = None if clip is None else replace(clip, loras=(*clip.loras, *uses))
    return replace(model, loras=(*model.loras, *uses)), clip_after


def _power_loras(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """LoRAs that are tables of a name, a strength, and whether they are on."""
    uses = []
    for place in range(1, _LORA_SLOTS + 1):
        row = given.get(f"lora_{place}")
        if row is not None and not isinstance(row, dict):
            raise NodeUnsupported(f"lora_{place}: found {str(row)[:100]!r}, expected a table")
        if row is None or not row.get("on") or row.get("lora") in (None, "", _NONE):
            continue
        strength, text_strength = row.get("strength", 1), row.get("strengthTwo")
        text_strength = strength if text_strength is None else text_strength
        if not isinstance(row["lora"], str) or not all(
            isinstance(one, int | float) for one in (strength, text_strength)
        ):
            raise NodeUnsupported(f"lora_{place}: expected a name and a strength")
        uses.append(LoraUse(file_stem(row["lora"]), float(strength), float(text_strength)))
    return with_loras(given["model"], given.get("clip"), tuple(uses))


def _stacked_loras(given: Mapping[str, Any]) -> tuple[Any, ...]:
    places = [f"{place:02}" for place in range(1, _STACKED + 1)]
    names = {place: given[f"lora_{place}"] for place in places}
    uses = [
        LoraUse(file_stem(name), given[f"strength_{place}"], given[f"strength_{place}"])
        for place, name in names.items()
        if name != _NONE
    ]
    return with_loras(given["model"], given["clip"], tuple(uses))


def _model(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (ModelValue(given["unet_name"]),)


def _model_of_gguf(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (ModelValue(given["gguf_name"]),)


def clip_of_files(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Text encoders by their files, which the pool does not read: a model has its own."""
    return (ClipValue(""),)


def _resized(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return an image of a size, stretched, in proportion, or cut at the centre; its width and height; and a mask."""
    nodes: MadeNodes = given["nodes"]
    sides = {name: given[name] for name in ("width", "height")}
    step = max(1, given["divisible_by"])
    how = given["keep_proportion"]
    if not all(sides.values()) or how not in ("stretch", "crop") or given["crop_position"] != "center":
        found = f"{how}, {given['crop_position']}, and {sides['width']}x{sides['height']}"
        raise NodeUnsupported(
            f"keep_proportion, crop_position, width, height: found {found}; expected stretch or crop, center, and a "
            "size"
        )
    wide, high = (side // step * step for side in sides.values())
    settings = {"width": wide, "height": high, "method": given["upscale_method"], "crop": how == "crop"}
    image = nodes.operate(given["node_id"], "image_scale", NodeImage, {"image": given["image"]}, settings)
    node_id = given["node_id"]
    if given.get("mask") is None:
        mask = nodes.operate(f"{node_id}/mask", "image_alpha_mask", NodeMask, {"image": image}, {})
    else:
        shown = nodes.operate(f"{node_id}/mask/shown", "mask_to_image", NodeImage, {"mask": given["mask"]}, {})
        shown = nodes.operate(f"{node_id}/mask/scaled", "image_scale", NodeImage, {"image": shown}, settings)
        mask = nodes.operate(f"{node_id}/mask", "mask_from_image", NodeMask, {"image": shown}, {"channel": "red"})
    return image, wide, high, mask


_row = partial(node_row, category="custom")


def _clip_names(count: int) -> tuple[NodeInput, ...]:
    names = ["clip_name"] if count == 1 else [f"clip_name{place}" for place in range(1, count + 1)]
    return tuple(text(name, choices=TEXT_ENCODERS) for name in names)


_TYPE = text("type", "stable_diffusion", is_required=False)
CUSTOM_NODES = (
    _row(
        "Efficient Loader",
        (
            combo("ckpt_name", MODELS),
            text("vae_name", _BAKED, choices=VAES),
            whole("clip_skip", -1, -24, -1),
            text("lora_name", _NONE, choices=LORAS),
            number("lora_model_strength", 1.0, -10.0, 10.0),
            number("lora_clip_strength", 1.0, -10.0, 10.0),
            text("positive", "CLIP_POSITIVE"),
            text("negative", "CLIP_NEGATIVE"),
            text("token_normalization", "none", choices=("none", "mean", "length", "length+mean")),
            text("weight_interpretation", "comfy", choices=("comfy", "A1111", "compel", "comfy++", "down_weight")),
            whole("empty_latent_width", 512, 64, MAX_SIDE),
            whole("empty_latent_height", 512, 64, MAX_SIDE),
            whole("batch_size", 1, 1, MAX_BATCH),
            link("lora_stack", "LORA_STACK", is_required=False),
        ),
        _loaded,
        *("MODEL", "CONDITIONING", "CONDITIONING", "LATENT", "VAE", "CLIP", "DEPENDENCIES"),
    ),
    _row(
        "KSampler (Efficient)",
        (
            link("model", "MODEL"),
            whole("seed", 0, 0, MAX_SEED),
            whole("steps", 20, 1, MAX_STEPS),
            number("cfg", 7.0, 1.0, 100.0),
            combo("sampler_name", SAMPLER_NAMES),
            combo("scheduler", SCHEDULE_NAMES),
            link("positive", "CONDITIONING"),
            link("negative", "CONDITIONING"),
            link("latent_image", "LATENT"),
            number("denoise", 1.0, 0.0, 1.0),
            text("preview_method", "auto"),
            text("vae_decode", "true", choices=("true", "true (tiled)", "false")),
            link("optional_vae", "VAE", is_required=False),
            link("sampler_state", ANY, is_required=False),  # a widget of files of 2023
        ),
        _sampled,
        *("MODEL", "CONDITIONING", "CONDITIONING", "LATENT", "VAE", "IMAGE"),
    ),
    _row(
        "KSampler Adv. (Efficient)",
        (
            *next(row.inputs for row in SAMPLING_NODES if row.name == "KSamplerAdvanced"),
            text("preview_method", "auto"),
            text("vae_decode", "true", choices=("true", "true (tiled)", "false")),
            link("optional_vae", "VAE", is_required=False),
            link("script", ANY, is_required=False),
        ),
        _sampled_in_part,
        *("MODEL", "CONDITIONING", "CONDITIONING", "LATENT", "VAE", "IMAGE"),
    ),
    _row(
        "KSampler //Inspire",
        (
            *next(row.inputs for row in SAMPLING_NODES if row.name == "KSampler"),
            text("noise_mode", "GPU(=A1111)", choices=("GPU(=A1111)", "CPU")),
            text("batch_seed_mode", "incremental"),
            whole("variation_seed", 0, 0, MAX_SEED),
            number("variation_strength", 0.0, 0.0, 1.0),
            text("variation_method", "linear", is_required=False),
        ),
        _sampled_with_noise,
        "LATENT",
    ),
    _row(
        "Power Lora Loader (rgthree)",
        (
            link("model", "MODEL"),
            link("clip", "CLIP", is_required=False),
            *(link(f"lora_{place}", ANY, is_required=False) for place in range(1, _LORA_SLOTS + 1)),
        ),
        _power_loras,
        "MODEL",
        "CLIP",
    ),
    _row(
        "Lora Loader Stack (rgthree)",
        (
            link("model", "MODEL"),
            link("clip", "CLIP"),
            *(
                each
                for place in range(1, _STACKED + 1)
                for each in (
                    text(f"lora_{place:02}", _NONE, choices=LORAS),
                    number(f"strength_{place:02}", 1.0, -10.0, 10.0),
                )
            ),
        ),
        _stacked_loras,
        "MODEL",
        "CLIP",
    ),
    _row("UnetLoaderGGUF", (combo("unet_name", MODELS),), _model, "MODEL"),
    _row("LoaderGGUF", (combo("gguf_name", MODELS),), _model_of_gguf, "MODEL"),
    _row(
        "ClipLoaderGGUF", (*_clip_names(1), _TYPE, text("device", "default", is_required=False)), clip_of_files, "CLIP"
    ),
    _row("CLIPLoaderGGUF", (*_clip_names(1), _TYPE), clip_of_files, "CLIP"),
    _row("DualCLIPLoaderGGUF", (*_clip_names(2), _TYPE), clip_of_files, "CLIP"),
    _row("TripleCLIPLoaderGGUF", _clip_names(3), clip_of_files, "CLIP"),
    _row("QuadrupleCLIPLoaderGGUF", _clip_names(4), clip_of_files, "CLIP"),
    _row(
        "ImageResizeKJv2",
        (
            link("image", "IMAGE"),
            whole("width", 512, 0, MAX_SIDE),
            whole("height", 512, 0, MAX_SIDE),
            combo("upscale_method", ("nearest-exact", "bilinear", "area", "bicubic", "lanczos")),
            text("keep_proportion", "stretch"),
            text("pad_color", "0, 0, 0"),
            text("crop_position", "center"),
            whole("divisible_by", 2, 0, 512),
            text("device", "cpu", is_required=False),
            link("mask", "MASK", is_required=False),
        ),
        only_in_workflows,
        *("IMAGE", "INT", "INT", "MASK"),
    ),
)
#: what they become in workflows
CUSTOM_BUILDERS: Mapping[str, Builder] = MappingProxyType(
    {
        "KSampler (Efficient)": _sampled_node,
        "KSampler //Inspire": _sampled_node_with_noise,
        "KSampler Adv. (Efficient)": _sampled_node_in_part,
        "ImageResizeKJv2": _resized,
    }
)
