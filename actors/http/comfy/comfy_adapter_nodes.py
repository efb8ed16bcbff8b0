"""Custom nodes of IP-Adapters: images that a model reads besides its text. Pure.

They are here under their own names, with what their public descriptions say. In ComfyUI they change a model; here a
run of the model reads the images, as `image_prompts` of a request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from modelpool.actors.http.comfy.comfy_node_types import (
    STYLES,
    NodeInput,
    NodeType,
    NodeUnsupported,
    check_parts,
    file_stem,
    link,
    number,
    only_in_workflows,
    text,
    warn,
)
from modelpool.actors.http.comfy.comfy_values import ImageFile, ImagePromptUse, ModelValue, NodeImage
from modelpool.actors.request.image_fields import MAX_PARTS

#: weights that are the same in all blocks of the model, and tokens that only give values
_PLAIN_WEIGHTS, _PLAIN_SCALING = ("original", "linear", "standard"), "V only"
_COMBINED = ("concat", "average", "norm average", "add", "subtract", "max", "min")


def _adapter(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (file_stem(given["ipadapter_file"]),)


def _applied(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """A model with an image that it reads. Raises NodeUnsupported for what the pool's runs do not have."""
    image, model = given["image"], given["model"]
    assert isinstance(model, ModelValue), "the type of the input"
    if not isinstance(image, ImageFile | NodeImage):
        only_in_workflows(given)
    if "nodes" not in given and not isinstance(image, ImageFile):
        only_in_workflows(given)
    if isinstance(image, NodeImage) and (image.frames or image.count > 1):
        raise NodeUnsupported("image: found several images, expected one; use a node for each")
    for name in ("image_negative", "attn_mask"):
        if given.get(name) is not None:
            raise NodeUnsupported(f"{name}: expected none: masks of image prompts are in the pool's own requests")
    if given.get("noise"):
        raise NodeUnsupported(f"noise: found {given['noise']:g}, expected 0: the pool adds none to an image prompt")
    weights, scaling = given.get("weight_type", "original"), given.get("embeds_scaling", _PLAIN_SCALING)
    if weights not in _PLAIN_WEIGHTS or scaling != _PLAIN_SCALING:
        found = f"{weights} and {scaling}"
        raise NodeUnsupported(
            f"weight_type, embeds_scaling: found {found[:100]}, expected linear, and V only: other weights by block "
            "are in the pool's own requests"
        )
    start, end = given.get("start_at", 0.0), given.get("end_at", 1.0)
    if start > end:
        raise NodeUnsupported(f"start_at, end_at: found {start:g} and {end:g}, expected the smaller one first")
    if (start, end) != (0, 1):
        warn(given, "start_at, end_at: shares of the steps here, and of the noise levels in ComfyUI")
    check_parts("model", "image prompts", len(model.image_prompts) + 1, MAX_PARTS)
    use = ImagePromptUse(given["ipadapter"], image, given["weight"], start, end)
    return (replace(model, image_prompts=(*model.image_prompts, use)),)


def _row(name: str, inputs: tuple[NodeInput, ...], *outputs: str, build: Any = _applied) -> NodeType:
    return NodeType(name, "custom", inputs, outputs, build)


_WEIGHT = number("weight", 1.0, 0.0, 5.0)
_SHARES = tuple(number(name, default, 0.0, 1.0, False) for name, default in (("start_at", 0.0), ("end_at", 1.0)))
_MASK, _VISION = link("attn_mask", "MASK", is_required=False), link("clip_vision", "CLIP_VISION", is_required=False)
_LINKS = (link("model", "MODEL"), link("ipadapter", "IPADAPTER"), link("image", "IMAGE"))
ADAPTER_NODES = (
    _row("IPAdapterModelLoader", (text("ipadapter_file", choices=STYLES),), "IPADAPTER", build=_adapter),
    _row(
        "IPAdapterApply",
        (
            *_LINKS,
            _WEIGHT,
            number("noise", 0.0, 0.0, 1.0, False),
            text("weight_type", "original", False),
            *_SHARES,
            NodeInput("unfold_batch", "BOOLEAN", False, is_required=False),
            _VISION,
            _MASK,
        ),
        "MODEL",
    ),
    _row("IPAdapter", (*_LINKS, _WEIGHT, *_SHARES, text("weight_type", "standard", False), _MASK), "MODEL"),
    _row(
        "IPAdapterAdvanced",
        (
            *_LINKS,
            _WEIGHT,
            text("weight_type", "linear", False),
            text("combine_embeds", "concat", False, choices=_COMBINED),
            *_SHARES,
            text("embeds_scaling", _PLAIN_SCALING, False),
            link("image_negative", "IMAGE", is_required=False),
            _MASK,
            _VISION,
        ),
        "MODEL",
    ),
)
