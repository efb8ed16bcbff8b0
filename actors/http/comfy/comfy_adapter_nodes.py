"""Nodes of IP-Adapters, under the names of the pack ComfyUI_IPAdapter_plus: image prompts of a model. Pure.

An IP-Adapter acts on every run of its model: it is an image prompt of the model's value. What its settings mean is
known from public descriptions of the pack; the ones of which only the code tells are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from modelpool.actors.http.comfy.comfy_image_nodes import with_step
from modelpool.actors.http.comfy.comfy_made_nodes import MadeNodes
from modelpool.actors.http.comfy.comfy_node_types import (
    STYLES,
    Builder,
    NodeUnsupported,
    check_parts,
    combo,
    flag,
    link,
    node_row,
    number,
    only_in_workflows,
    text,
    warn_unread,
)
from modelpool.actors.http.comfy.comfy_values import (
    AdapterValue,
    ImageFile,
    ImagePromptUse,
    ImageScale,
    MaskFile,
    ModelValue,
    NodeImage,
)
from modelpool.actors.request.image_fields import MAX_PARTS

#: files of the presets, for Stable Diffusion 1 and XL. Source: the table of files in the pack's description
PRESETS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "LIGHT - SD1.5 only (low strength)": ("ip-adapter_sd15_light_v11", ""),
        "STANDARD (medium strength)": ("ip-adapter_sd15", "ip-adapter_sdxl_vit-h"),
        "VIT-G (medium strength)": ("ip-adapter_sd15_vit-G", "ip-adapter_sdxl"),
        "PLUS (high strength)": ("ip-adapter-plus_sd15", "ip-adapter-plus_sdxl_vit-h"),
        "PLUS FACE (portraits)": ("ip-adapter-plus-face_sd15", "ip-adapter-plus-face_sdxl_vit-h"),
        "FULL FACE - SD1.5 only (portraits stronger)": ("ip-adapter-full-face_sd15", ""),
    }
)
#: weight types of all blocks alike, and of blocks of Stable Diffusion XL. Source: InstantStyle (arXiv 2404.02733)
_ALIKE = ("linear", "standard", "original")
_OF_BLOCKS: Mapping[str, tuple[tuple[str, float], ...]] = MappingProxyType(
    {
        "style transfer": (("up.0.1", 1.0),),
        "style transfer (SDXL)": (("up.0.1", 1.0),),
        "composition": (("down.2.1", 1.0),),
        "composition (SDXL)": (("down.2.1", 1.0),),
    }
)
#: attentions of Stable Diffusion 1 and XL, in the order in which they run
ADAPTED_ATTENTIONS: Mapping[bool, tuple[str, ...]] = MappingProxyType(
    {
        False: (
            *(f"down.{block}.{place}" for block in range(3) for place in range(2)), "mid",
            *(f"up.{block}.{place}" for block in range(1, 4) for place in range(3)),
        ),
        True: (
            *(f"down.{block}.{place}" for block in (1, 2) for place in range(2)), "mid",
            *(f"up.{block}.{place}" for block in range(2) for place in range(3)),
        ),
    }
)  # fmt: skip
#: of an attention's share of all before it, 0 to 1, the share that its factor has of the weight, above the least one.
#: Source: "Weight Scheduling" of ComfyUI_IPAdapter_plus in DeepWiki
_RAMPS: Mapping[str, Callable[[float], float]] = MappingProxyType(
    {
        "ease in": lambda at: 1 - at,
        "ease out": lambda at: at,
        "ease in-out": lambda at: 1 - abs(2 * at - 1),
        "reverse in-out": lambda at: abs(2 * at - 1),
    }
)
_LEAST_OF_RAMP = 0.05
#: parts of a model with a fifth of the weight
_WEAK: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"weak input": ("down",), "weak middle": ("mid",), "weak output": ("up",), "strong middle": ("down", "up")}
)
_WEAK_FACTOR = 0.2
#: of how several images of one prompt are put together, the one that the pool has
_TOGETHER = "concat"
#: what the weight scales: keys and values are the same as values alone for weight 1
_VALUES_ALONE, _BOTH = "V only", "K+V"
#: the side of the square that vision encoders read, and the methods of scaling to it
_SEEN_SIDE = 224
_METHODS: Mapping[str, str] = MappingProxyType(
    {"LANCZOS": "lanczos", "BICUBIC": "bicubic", "BILINEAR": "bilinear", "NEAREST": "nearest-exact"}
)
_POSITIONS = ("center", "top", "bottom", "left", "right")


def _loaded(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (AdapterValue(given["ipadapter_file"]),)


def _preset(given: Mapping[str, Any]) -> tuple[Any, ...]:
    if given["preset"] not in PRESETS:
        expected = f"one of {', '.join(PRESETS)}"
        raise NodeUnsupported(f"preset: found {given['preset']!r}, expected {expected}")
    return given["model"], AdapterValue(*PRESETS[given["preset"]])


def _blocks(kind: str) -> tuple[tuple[tuple[str, float], ...], tuple[tuple[str, float], ...]]:
    """Return the factors of blocks that a weight type means, for Stable Diffusion 1 or any model, and for XL; () for
    all alike. Raises NodeUnsupported."""
    if kind in _ALIKE:
        return (), ()
    if kind in _OF_BLOCKS:
        return _OF_BLOCKS[kind], ()
    if kind in _RAMPS or kind in _WEAK:
        return _shaped(kind, ADAPTED_ATTENTIONS[False]), _shaped(kind, ADAPTED_ATTENTIONS[True])
    expected = ", ".join((*_ALIKE, *_OF_BLOCKS, *_RAMPS, *_WEAK))
    raise NodeUnsupported(f"weight_type: found {kind!r}, expected one of {expected}; the pool's own requests have "
                          "blocks of image_prompts")  # fmt: skip


def _shaped(kind: str, attentions: tuple[str, ...]) -> tuple[tuple[str, float], ...]:
    """Return the factor of each attention: a ramp over their order, or less in parts of the model."""
    if kind in _WEAK:
        return tuple((name, _WEAK_FACTOR if name.partition(".")[0] in _WEAK[kind] else 1.0) for name in attentions)
    share, count = _RAMPS[kind], len(attentions)
    return tuple(
        (name, _LEAST_OF_RAMP + (1 - _LEAST_OF_RAMP) * share(place / count)) for place, name in enumerate(attentions)
    )


def _check_settings(given: Mapping[str, Any]) -> None:
    """Raise NodeUnsupported for settings that the pool does not have."""
    if given.get("image_negative") is not None:
        raise NodeUnsupported("image_negative: expected none: the pool reads no image for the negative text")
    if noise := given.get("noise"):
        raise NodeUnsupported(f"noise: found {noise:g}, expected 0: the pool reads no image for the negative text")
    if given.get("unfold_batch"):
        raise NodeUnsupported("unfold_batch: expected false: images of a batch are one image prompt each")
    scaling = given.get("embeds_scaling", _VALUES_ALONE)
    if scaling not in ((_VALUES_ALONE, _BOTH) if given["weight"] == 1 else (_VALUES_ALONE,)):
        raise NodeUnsupported(f"embeds_scaling: found {scaling!r}, expected {_VALUES_ALONE!r}")
    if given["weight"] < 0:
        raise NodeUnsupported(f"weight: found {given['weight']:g}, expected 0 or more")
    if given["start_at"] >= given["end_at"]:
        found = f"{given['start_at']:g} and {given['end_at']:g}"
        raise NodeUnsupported(f"start_at, end_at: found {found}, expected a start below the end")


def _applied(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return a model with one more image prompt; the model as it is for weight 0."""
    model: ModelValue = given["model"]
    adapter, image, weight = (given[name] for name in ("ipadapter", "image", "weight"))
    if not isinstance(adapter, AdapterValue):
        raise NodeUnsupported("ipadapter: expected one of IPAdapterModelLoader or IPAdapterUnifiedLoader")
    if not weight:
        return (model,)
    _check_settings(given)
    if isinstance(image, NodeImage) and (image.count > 1 or image.frames):
        raise NodeUnsupported("image: found several images, expected one; more of them are more IPAdapter nodes")
    check_parts("model", "image prompts", len(model.image_prompts) + 1, MAX_PARTS)
    blocks, for_xl = _blocks(given["weight_type"])
    span = given["start_at"], given["end_at"]
    use = ImagePromptUse(adapter, image, weight, *span, blocks=blocks, mask=given.get("attn_mask"), blocks_of_xl=for_xl)
    return (replace(model, image_prompts=(*model.image_prompts, use)),)


def _applied_first(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """The node of the pack's first version, in which "original" has the weight on what the attention adds."""
    if given["weight_type"] != "original" and not (given["weight_type"] == "linear" and given["weight"] == 1):
        raise NodeUnsupported(f"weight_type: found {given['weight_type']!r}, expected original, or linear of weight 1")
    return _applied(given)


def _applied_to_file(given: Mapping[str, Any]) -> tuple[Any, ...]:
    if not isinstance(given["image"], ImageFile) or not isinstance(given.get("attn_mask"), MaskFile | None):
        return only_in_workflows(given)
    return _applied(given)


def _applied_first_to_file(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return _applied_first(given) if isinstance(given["image"], ImageFile) else only_in_workflows(given)


def _prepared_file(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return an image of the user as a square from its centre, in the size that vision encoders read."""
    method = _method(given)
    if not isinstance(given["image"], ImageFile) or given["crop_position"] != "center":
        return only_in_workflows(given)
    return (with_step(given["image"], ImageScale(method, size=(_SEEN_SIDE, _SEEN_SIDE), crops=True)),)


def _prepared(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return an image as a square from one side, in the size that vision encoders read."""
    if given["crop_position"] not in _POSITIONS:
        expected = ", ".join(_POSITIONS)
        raise NodeUnsupported(f"crop_position: found {given['crop_position']!r}, expected one of {expected}")
    nodes: MadeNodes = given["nodes"]
    node_id, where = given["node_id"], {"position": given["crop_position"]}
    square = nodes.operate(f"{node_id}/square", "image_crop_square", NodeImage, {"image": given["image"]}, where)
    size = {"width": _SEEN_SIDE, "height": _SEEN_SIDE, "method": _method(given)}
    return (nodes.operate(node_id, "image_scale", NodeImage, {"image": square}, size),)


def _method(given: Mapping[str, Any]) -> str:
    """Return the method of scaling, and tell the user of sharpening. Raises NodeUnsupported."""
    warn_unread(given, "sharpening", "the pool does not sharpen what a vision encoder reads", own=0.0)
    if (found := given["interpolation"]) not in _METHODS:
        raise NodeUnsupported(f"interpolation: found {found!r}, expected one of {', '.join(_METHODS)}")
    return _METHODS[found]


_row = partial(node_row, category="ipadapter")
_MODEL, _ADAPTER, _IMAGE = link("model", "MODEL"), link("ipadapter", "IPADAPTER"), link("image", "IMAGE")
_VISION = link("clip_vision", "CLIP_VISION", is_required=False)
_MASK = link("attn_mask", "MASK", is_required=False)
_WEIGHT = number("weight", 1.0, -1.0, 5.0)
_SPAN = (number("start_at", 0.0, 0.0, 1.0), number("end_at", 1.0, 0.0, 1.0))
ADAPTER_NODES = (
    _row("IPAdapterModelLoader", (text("ipadapter_file", choices=STYLES),), _loaded, "IPADAPTER"),
    _row(
        "IPAdapterUnifiedLoader",
        (_MODEL, text("preset", "PLUS (high strength)"), link("ipadapter", "IPADAPTER", is_required=False)),
        _preset,
        "MODEL",
        "IPADAPTER",
    ),
    _row(
        "IPAdapter",
        (_MODEL, _ADAPTER, _IMAGE, _WEIGHT, *_SPAN, text("weight_type", "standard", is_required=False), _MASK),
        _applied_to_file,
        "MODEL",
    ),
    _row(
        "IPAdapterAdvanced",
        (
            *(_MODEL, _ADAPTER, _IMAGE, _WEIGHT, text("weight_type", "linear")),
            combo("combine_embeds", (_TOGETHER, "add", "subtract", "average", "norm average"), is_required=False),
            *_SPAN,
            text("embeds_scaling", _VALUES_ALONE, is_required=False),
            *(link("image_negative", "IMAGE", is_required=False), _MASK, _VISION),
        ),
        _applied_to_file,
        "MODEL",
    ),
    _row(
        "IPAdapterApply",
        (
            *(_ADAPTER, link("clip_vision", "CLIP_VISION", is_required=False), _IMAGE, _MODEL),
            *(_WEIGHT, number("noise", 0.0, 0.0, 1.0)),
            text("weight_type", "original", is_required=False),
            *(replace(each, is_required=False) for each in _SPAN),
            flag("unfold_batch", False, is_required=False),
            _MASK,
        ),
        _applied_first_to_file,
        "MODEL",
    ),
    _row(
        "PrepImageForClipVision",
        (
            *(_IMAGE, text("interpolation", "LANCZOS"), text("crop_position", "top")),
            number("sharpening", 0.0, 0.0, 1.0, is_required=False),
        ),
        _prepared_file,
        "IMAGE",
    ),
)
#: what they become in workflows
ADAPTER_BUILDERS: Mapping[str, Builder] = MappingProxyType(
    {
        **dict.fromkeys(("IPAdapter", "IPAdapterAdvanced"), _applied),
        "IPAdapterApply": _applied_first,
        "PrepImageForClipVision": _prepared,
    }
)
