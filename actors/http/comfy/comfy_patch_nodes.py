"""ComfyUI nodes of ControlNets that are patches of a model, and of ControlNets with a mask. Pure.

A patch acts on every run of its model: it is a ControlNet of the model's value, next to the ones of its texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from modelpool.actors.http.comfy.comfy_node_types import (
    CONTROLNETS,
    Builder,
    NodeUnsupported,
    check_parts,
    link,
    node_row,
    number,
    text,
)
from modelpool.actors.http.comfy.comfy_text_nodes import with_control, with_unread
from modelpool.actors.http.comfy.comfy_values import ControlNetValue, ControlUse, ImageFile, MaskFile
from modelpool.actors.request.image_fields import MAX_PARTS

_SPAN = (
    number("start_percent", 0.0, 0.0, 1.0, is_required=False),
    number("end_percent", 1.0, 0.0, 1.0, is_required=False),
)


def _loaded(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (ControlNetValue(given["name"]),)


def _patched_by_file(given: Mapping[str, Any]) -> tuple[Any, ...]:
    if not isinstance(given["image"], ImageFile | None):
        raise NodeUnsupported("image: expected an image of LoadImage")
    return _patched(given)


def _patched(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return a model with one more ControlNet; the model as it is for strength 0, and without an image."""
    model, strength = given["model"], given["strength"]
    if unread := [name for name in ("mask", "inpaint_image") if given.get(name) is not None]:
        raise NodeUnsupported(f"{', '.join(unread)}: expected none; a patch reads an image alone")
    if not strength or given["image"] is None:
        return (model,)
    if strength < 0:
        raise NodeUnsupported(f"strength: found {strength:g}, expected 0 or more")
    check_parts("model", "ControlNets", len(model.controls) + 1, MAX_PARTS)
    use = ControlUse(given["model_patch"], given["image"], strength, given["start_percent"], given["end_percent"])
    return (replace(model, controls=(*model.controls, use)),)


def _hiding_in_file(given: Mapping[str, Any]) -> tuple[Any, ...]:
    if not isinstance(given["image"], ImageFile) or not isinstance(given["mask"], MaskFile):
        raise NodeUnsupported("image, mask: expected an image and a mask of LoadImage")
    return _hiding(given)


def _hiding(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return both texts with a ControlNet that reads an image without the part under a mask, and the mask."""
    texts = given["positive"], given["negative"]
    if not given["strength"]:
        return texts
    span = given["start_percent"], given["end_percent"]
    use = ControlUse(given["control_net"], given["image"], given["strength"], *span, mask=given["mask"])
    return tuple(with_unread(with_control(each, use), given, "vae") for each in texts)


_row = partial(node_row, category="conditioning")
_PATCH = (link("model", "MODEL"), link("model_patch", "MODEL_PATCH"), link("vae", "VAE"))
_STRENGTH = number("strength", 1.0, -10.0, 10.0)
PATCH_NODES = (
    _row("ModelPatchLoader", (text("name", choices=CONTROLNETS),), _loaded, "MODEL_PATCH"),
    _row(
        "QwenImageDiffsynthControlnet",
        (*_PATCH, link("image", "IMAGE"), _STRENGTH, link("mask", "MASK", is_required=False), *_SPAN),
        _patched_by_file,
        "MODEL",
    ),
    _row(
        "ZImageFunControlnet",
        (
            *_PATCH,
            _STRENGTH,
            *(link(name, "IMAGE", is_required=False) for name in ("image", "inpaint_image")),
            link("mask", "MASK", is_required=False),
            *_SPAN,
        ),
        _patched_by_file,
        "MODEL",
    ),
    _row(
        "ControlNetInpaintingAliMamaApply",
        (
            *(link(name, "CONDITIONING") for name in ("positive", "negative")),
            link("control_net", "CONTROL_NET"),
            link("vae", "VAE"),
            link("image", "IMAGE"),
            link("mask", "MASK"),
            number("strength", 1.0, 0.0, 10.0),
            number("start_percent", 0.0, 0.0, 1.0),
            number("end_percent", 1.0, 0.0, 1.0),
        ),
        _hiding_in_file,
        "CONDITIONING",
        "CONDITIONING",
    ),
)
#: what they become in workflows
PATCH_BUILDERS: Mapping[str, Builder] = MappingProxyType(
    {
        "QwenImageDiffsynthControlnet": _patched,
        "ZImageFunControlnet": _patched,
        "ControlNetInpaintingAliMamaApply": _hiding,
    }
)
