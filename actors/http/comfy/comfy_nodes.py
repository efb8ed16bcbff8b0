"""The ComfyUI nodes that work here: their inputs and outputs, and what each of them means for a request.

Nodes, inputs and outputs have the names of ComfyUI's API. To support a node, add a row to a table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from modelpool.actors.http.comfy.comfy_adapter_nodes import ADAPTER_NODES
from modelpool.actors.http.comfy.comfy_audio_nodes import AUDIO_NODES
from modelpool.actors.http.comfy.comfy_cascade_nodes import CASCADE_NODES
from modelpool.actors.http.comfy.comfy_custom_nodes import CUSTOM_NODES, clip_of_files
from modelpool.actors.http.comfy.comfy_encoder_nodes import ENCODER_NODES
from modelpool.actors.http.comfy.comfy_image_nodes import IMAGE_NODES
from modelpool.actors.http.comfy.comfy_ltx_nodes import LTX_NODES
from modelpool.actors.http.comfy.comfy_merge_nodes import MERGE_NODES
from modelpool.actors.http.comfy.comfy_node_types import (
    CONTROLNETS,
    LORAS,
    MODELS,
    TEXT_ENCODERS,
    VAES,
    NodeInput,
    NodeType,
    combo,
    file_stem,
    link,
    node_row,
    number,
    text,
    warn_unread,
    whole,
)
from modelpool.actors.http.comfy.comfy_noise_level_nodes import SAMPLER_NODES
from modelpool.actors.http.comfy.comfy_operation_nodes import OPERATION_NODES
from modelpool.actors.http.comfy.comfy_option_nodes import OPTION_NODES
from modelpool.actors.http.comfy.comfy_pack_edits import PACK_EDIT_NODES
from modelpool.actors.http.comfy.comfy_pack_images import PACK_IMAGES
from modelpool.actors.http.comfy.comfy_pack_loaders import LOADING_NODES
from modelpool.actors.http.comfy.comfy_pack_parts import PACK_PARTS
from modelpool.actors.http.comfy.comfy_pack_pipes import PACK_PIPES
from modelpool.actors.http.comfy.comfy_pack_saves import SAVING_NODES
from modelpool.actors.http.comfy.comfy_pair_nodes import PAIR_NODES
from modelpool.actors.http.comfy.comfy_patch_nodes import PATCH_NODES
from modelpool.actors.http.comfy.comfy_resize_nodes import RESIZE_NODES
from modelpool.actors.http.comfy.comfy_sampling_nodes import SAMPLING_NODES
from modelpool.actors.http.comfy.comfy_text_nodes import TEXT_NODES
from modelpool.actors.http.comfy.comfy_tiled_nodes import TILED_NODES
from modelpool.actors.http.comfy.comfy_track_nodes import TRACK_NODES
from modelpool.actors.http.comfy.comfy_value_nodes import VALUE_NODES
from modelpool.actors.http.comfy.comfy_values import ClipValue, ControlNetValue, LoraUse, ModelValue, VaeValue
from modelpool.actors.http.comfy.comfy_video_nodes import VIDEO_NODES

_LORA_STRENGTH = (1.0, -100.0, 100.0)
_CONFIG = "anything_v3.yaml"
#: settings of ComfyUI's loaders that are not read: the pool detects kinds, and decides about dtypes and devices
_WEIGHT_DTYPE = text("weight_dtype", "default", choices=("default", "fp8_e4m3fn", "fp8_e4m3fn_fast", "fp8_e5m2"))
_DEVICE = text("device", "default", is_required=False, choices=("default", "cpu"))
_CLIP_TYPES = (
    "stable_diffusion", "stable_cascade", "sd3", "stable_audio", "mochi", "ltxv", "pixart", "cosmos", "lumina2", "wan",
    "hidream", "chroma", "ace", "omnigen2", "qwen_image", "hunyuan_image", "flux2", "ovis",
)  # fmt: skip
_TWO_CLIPS_TYPES = (
    "sdxl", "sd3", "flux", "hunyuan_video", "hidream", "hunyuan_image", "hunyuan_video_15", "kandinsky5",
    "kandinsky5_image", "newbie",
)  # fmt: skip


def _checkpoint(given: Mapping[str, Any]) -> tuple[Any, ...]:
    warn_unread(given, "config_name", "the pool detects the kind of a model", own=_CONFIG)
    name = given["ckpt_name"]
    return ModelValue(name, has_vae=True), ClipValue(name), VaeValue(name)


def _checkpoint_with_vision(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (*_checkpoint(given), file_stem(given["ckpt_name"]))


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


def _padded(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (replace(given["clip"], padding=(given["min_padding"], given["min_length"])),)


def _vae_of_file(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (VaeValue("", given["vae_name"]),)


def _model_of_file(given: Mapping[str, Any]) -> tuple[Any, ...]:
    warn_unread(given, "weight_dtype", "the pool decides about dtypes itself", own="default")
    return (ModelValue(given["unet_name"]),)


def _controlnet(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (ControlNetValue(given["control_net_name"]),)


_row = partial(node_row, category="loaders")


def _clip_name(place: int = 0) -> NodeInput:
    return text(f"clip_name{place or ''}", choices=TEXT_ENCODERS)


_LOADERS = (
    _row("CheckpointLoaderSimple", (combo("ckpt_name", MODELS),), _checkpoint, "MODEL", "CLIP", "VAE"),
    _row(
        "CheckpointLoader",
        (text("config_name", _CONFIG, choices=(_CONFIG,)), combo("ckpt_name", MODELS)),
        _checkpoint,
        "MODEL",
        "CLIP",
        "VAE",
    ),
    _row(
        "unCLIPCheckpointLoader",
        (combo("ckpt_name", MODELS),),
        _checkpoint_with_vision,
        "MODEL",
        "CLIP",
        "VAE",
        "CLIP_VISION",
    ),
    _row("UNETLoader", (combo("unet_name", MODELS), _WEIGHT_DTYPE), _model_of_file, "MODEL"),
    _row(
        "CLIPLoader",
        (_clip_name(), text("type", _CLIP_TYPES[0], choices=_CLIP_TYPES), _DEVICE),
        clip_of_files,
        "CLIP",
    ),
    _row(
        "DualCLIPLoader",
        (_clip_name(1), _clip_name(2), text("type", _TWO_CLIPS_TYPES[0], choices=_TWO_CLIPS_TYPES), _DEVICE),
        clip_of_files,
        "CLIP",
    ),
    *(
        _row(name, tuple(map(_clip_name, range(1, count + 1))), clip_of_files, "CLIP")
        for name, count in (("TripleCLIPLoader", 3), ("QuadrupleCLIPLoader", 4))
    ),
    _row("VAELoader", (text("vae_name", choices=VAES),), _vae_of_file, "VAE"),
    _row(
        "LoraLoader",
        (
            link("model", "MODEL"),
            link("clip", "CLIP"),
            combo("lora_name", LORAS),
            number("strength_model", *_LORA_STRENGTH),
            number("strength_clip", *_LORA_STRENGTH),
        ),
        _lora,
        "MODEL",
        "CLIP",
    ),
    _row(
        "LoraLoaderModelOnly",
        (link("model", "MODEL"), combo("lora_name", LORAS), number("strength_model", *_LORA_STRENGTH)),
        _lora_of_model,
        "MODEL",
    ),
    _row(
        "CLIPSetLastLayer",
        (link("clip", "CLIP"), whole("stop_at_clip_layer", -1, -24, -1)),
        _last_layer,
        "CLIP",
        category="conditioning",
    ),
    _row(
        "T5TokenizerOptions",
        (link("clip", "CLIP"), whole("min_padding", 0, 0, 10000), whole("min_length", 0, 0, 10000)),
        _padded,
        "CLIP",
        category="conditioning",
    ),
    _row("ControlNetLoader", (text("control_net_name", choices=CONTROLNETS),), _controlnet, "CONTROL_NET"),
    _row(
        "DiffControlNetLoader",
        (link("model", "MODEL"), text("control_net_name", choices=CONTROLNETS)),
        _controlnet,
        "CONTROL_NET",
    ),
)
_ROWS = (
    *_LOADERS,
    *MERGE_NODES,
    *VALUE_NODES,
    *OPTION_NODES,
    *TEXT_NODES,
    *ENCODER_NODES,
    *SAMPLING_NODES,
    *SAMPLER_NODES,
    *CASCADE_NODES,
    *IMAGE_NODES,
    *OPERATION_NODES,
    *RESIZE_NODES,
    *PAIR_NODES,
    *PATCH_NODES,
    *ADAPTER_NODES,
    *VIDEO_NODES,
    *TRACK_NODES,
    *LTX_NODES,
    *AUDIO_NODES,
    *CUSTOM_NODES,
    *LOADING_NODES,
    *SAVING_NODES,
    *PACK_IMAGES,
    *TILED_NODES,
    *PACK_PIPES,
    *PACK_PARTS,
    *PACK_EDIT_NODES,
)
#: nodes by name
NODE_TYPES: Mapping[str, NodeType] = MappingProxyType({row.name: row for row in _ROWS})
