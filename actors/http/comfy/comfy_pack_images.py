"""Custom nodes of images and masks that are operations of the pool: joined, batched, cropped, flipped, resized. Pure.

They are here under their own names, with what their public descriptions say.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from modelpool.actors.http.comfy.comfy_image_nodes import IMAGE_NODES
from modelpool.actors.http.comfy.comfy_made_nodes import MadeNodes
from modelpool.actors.http.comfy.comfy_node_types import (
    ANY,
    MAX_SIDE,
    Builder,
    NodeInput,
    NodeType,
    NodeUnsupported,
    combo,
    flag,
    link,
    number,
    only_in_workflows,
    text,
    whole,
)
from modelpool.actors.http.comfy.comfy_values import ImageFile, NodeImage, NodeMask
from modelpool.actors.http.comfy.comfy_workflow_nodes import WORKFLOW_NODES
from modelpool.pool.inference.operations.image_colours import COLOUR_METHODS
from modelpool.pool.values.core.errors import counted

_JOINED = 100
_IMAGES = tuple(f"image_{place}" for place in range(1, _JOINED + 1))
_DIRECTIONS = ("right", "down", "left", "up")
_METHODS = ("nearest-exact", "bilinear", "area", "bicubic", "lanczos")
#: the flips of nodes, and of operations
_FLIPS: Mapping[str, str] = MappingProxyType(
    {"x": "y-axis: horizontally", "y": "x-axis: vertically", "horizontal": "y-axis: horizontally",
     "vertical": "x-axis: vertically"}
)  # fmt: skip
_PLAIN_CROP: Builder = next(row.build for row in IMAGE_NODES if row.name == "ImageCrop")


def _operate(given: Mapping[str, Any], node_id: str, operation: str, values: Mapping[str, Any], **settings: Any) -> Any:
    nodes: MadeNodes = given["nodes"]
    result = NodeMask if operation.startswith("mask_") and operation != "mask_to_image" else NodeImage
    return nodes.operate(node_id, operation, result, values, settings)


def _stitched(given: Mapping[str, Any], node_id: str, first: Any, second: Any) -> Any:
    """Return two images side by side: the second one in the height or the width of the first, if the node says so."""
    how = {"direction": given["direction"], "matches": given["match_image_size"], "spacing": 0, "colour": "white"}
    return _operate(given, node_id, "image_stitch", {"first": first, "second": second}, **how)


def _two_stitched(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (_stitched(given, given["node_id"], given["image1"], given["image2"]),)


def _linked(given: Mapping[str, Any]) -> list[Any]:
    """Return the images that the node counts. Raises NodeUnsupported for missing ones."""
    found = [given.get(name) for name in _IMAGES[: given["inputcount"]]]
    if missing := [name for name, image in zip(_IMAGES, found, strict=False) if image is None]:
        raise NodeUnsupported(f"{missing[0]}: found nothing, expected {counted(given['inputcount'], 'image')}")
    return found


def _one_by_one(given: Mapping[str, Any], join: Any) -> tuple[Any, ...]:
    first, *others = _linked(given)
    for place, image in enumerate(others, start=1):
        node_id = given["node_id"] if place == len(others) else f"{given['node_id']}/{place}"
        first = join(node_id, first, image)
    return (first,)


def _all_stitched(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return _one_by_one(given, lambda node_id, first, second: _stitched(given, node_id, first, second))


def _batched(given: Mapping[str, Any], node_id: str, first: Any, second: Any) -> Any:
    return _operate(given, node_id, "image_batch", {"first": first, "second": second})


def _all_batched(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return _one_by_one(given, lambda node_id, first, second: _batched(given, node_id, first, second))


def _count(image: Any) -> int:
    return max(1, getattr(image, "count", 1)) * max(1, getattr(image, "frames", 0))


def _range(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Some images of a batch, from a place on or, for -1, the last ones; and the masks at these places."""
    if given.get("images") is None and given.get("masks") is None:
        raise NodeUnsupported("images, masks: found nothing that is linked, expected one of them")
    image = _part(given, given["node_id"], given.get("images"), given["start_index"], given["num_frames"])
    masks = given.get("masks")
    if masks is None:
        return image, None
    node_id = f"{given['node_id']}/masks"
    shown = _operate(given, f"{node_id}/image", "mask_to_image", {"mask": masks})
    part = _part(given, f"{node_id}/part", shown, given["start_index"], given["num_frames"])
    nodes: MadeNodes = given["nodes"]
    return image, nodes.operate(node_id, "mask_from_image", NodeMask, {"image": part}, {"channel": "red"})


def _part(given: Mapping[str, Any], node_id: str, images: Any, start: int, length: int) -> Any:
    if images is None:
        return None
    count = _count(images)
    start = max(0, count - length) if start < 0 else start
    if start >= count:
        raise NodeUnsupported(f"start_index: found {start} for {counted(count, 'image')}, expected a smaller one")
    return _operate(given, node_id, "image_from_batch", {"image": images}, start=start,
                    length=min(length, count - start))  # fmt: skip


def _from_batch(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Some images of a batch, or, for a length of -1, all that follow."""
    count = _count(given["image"])
    start = min(given["start"], count - 1)
    length = count - start if given["length"] < 0 else min(given["length"], count - start)
    if not length:
        raise NodeUnsupported("length: found 0, expected at least 1, or -1 for all")
    return (_part(given, given["node_id"], given["image"], start, length),)


def _flipped(given: Mapping[str, Any], source: str, how: str) -> tuple[Any, ...]:
    """An image that is flipped along an axis, or both."""
    axes = ("x", "y") if given[how] == "xy" else (given[how],)
    image = given[source]
    for place, axis in enumerate(axes):
        node_id = given["node_id"] if place == len(axes) - 1 else f"{given['node_id']}/{axis}"
        image = _operate(given, node_id, "image_flip", {"image": image}, method=_FLIPS[axis])
    return (image,)


def _box(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs of a crop from a region. Raises NodeUnsupported."""
    region = given["crop_region"]
    names = ("x", "y", "width", "height")
    values = [region.get(name) for name in names] if isinstance(region, dict) else []
    if not values or not all(isinstance(each, int) and 0 <= each <= MAX_SIDE for each in values):
        raise NodeUnsupported(f"crop_region: found {str(region)[:100]!r}, expected x, y, width and height in pixels")
    if not values[2] or not values[3]:
        raise NodeUnsupported("crop_region: found a width or a height of 0, expected at least 1")
    return {**given, **dict(zip(names, values, strict=True))}


def _cropped_file(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return _PLAIN_CROP(_box(given))


def _cropped(given: Mapping[str, Any]) -> tuple[Any, ...]:
    box = _box(given)
    if isinstance(given["image"], ImageFile):
        return _PLAIN_CROP(box)
    settings = {name: box[name] for name in ("x", "y", "width", "height")}
    return (_operate(given, given["node_id"], "image_crop", {"image": given["image"]}, **settings),)


def _resized(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """An image of a size, and this: `comfy_sizes.settled` has computed a size in proportion where the size of the image
    is known."""
    others = ("width_input", "height_input", "get_image_size")
    if wrong := [name for name in others if given.get(name) is not None]:
        raise NodeUnsupported(f"{', '.join(wrong)}: the sizes are not known before an image is made; expected none")
    if given["keep_proportion"] or not given["width"] or not given["height"]:
        raise NodeUnsupported(
            "keep_proportion, width, height: the size of the image is not known before it is made; expected false, and "
            "a width and a height"
        )
    step = max(1, given["divisible_by"])
    wide, high = (given[name] // step * step for name in ("width", "height"))
    if not wide or not high:
        raise NodeUnsupported(f"divisible_by: found {step}, expected up to the sides, {given['width']} and "
                              f"{given['height']}")  # fmt: skip
    how = {"width": wide, "height": high, "method": given["upscale_method"], "crop": given["crop"] == "center"}
    return _operate(given, given["node_id"], "image_scale", {"image": given["image"]}, **how), wide, high


def _to_longer_side(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return an image scaled in proportion to a length of its longer side; the other side is rounded."""
    method = given["interpolation_mode"].replace(" ", "-")
    if method not in _METHODS:
        raise NodeUnsupported(f"interpolation_mode: found {given['interpolation_mode'][:40]}, expected one of "
                              f"{', '.join(_METHODS)}")  # fmt: skip
    how = {"method": method, "longest": given["size"]}
    return (_operate(given, given["node_id"], "image_scale_to_longest", {"image": given["image"]}, **how),)


def _by_factor(build: Builder) -> Builder:
    """Return a node that scales both sides, from ComfyUI's own one."""

    def scaled(given: Mapping[str, Any]) -> tuple[Any, ...]:
        method = given["interpolation_mode"].replace(" ", "-")
        if method not in _METHODS:
            raise NodeUnsupported(f"interpolation_mode: found {given['interpolation_mode'][:40]}, expected one of "
                                  f"{', '.join(_METHODS)}")  # fmt: skip
        return build({**given, "upscale_method": method, "scale_by": given["factor"]})

    return scaled


def _matched(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """An image with the colours of another one. Raises NodeUnsupported."""
    if given["method"] not in COLOUR_METHODS:
        raise NodeUnsupported(f"method: found {given['method'][:40]}, expected {', '.join(COLOUR_METHODS)}")
    values = {"image": given["image_target"], "reference": given["image_ref"]}
    how = {name: given[name] for name in ("method", "strength")}
    return (_operate(given, given["node_id"], "image_match_colours", values, **how),)


def _of_mask(operation: str, source: str) -> Builder:
    return lambda given: (_operate(given, given["node_id"], operation, {"mask": given[source]}),)


def _row(name: str, inputs: tuple[NodeInput, ...], *outputs: str, build: Any = only_in_workflows) -> NodeType:
    return NodeType(name, "image", inputs, outputs, build)


_IMAGE = link("image", "IMAGE")
_JW_METHODS = ("bilinear", "bicubic", "area", "nearest exact")
_SIDE_BY_SIDE = (combo("direction", _DIRECTIONS), flag("match_image_size"))
_MANY = tuple(link(name, "IMAGE", is_required=False) for name in _IMAGES)
_ROWS: tuple[tuple[NodeType, Builder], ...] = (
    (_row("ImageConcanate", (*(link(name, "IMAGE") for name in ("image1", "image2")), *_SIDE_BY_SIDE), "IMAGE"),
     _two_stitched),
    (_row("ImageConcatMulti", (whole("inputcount", 2, 2, _JOINED), *_SIDE_BY_SIDE, *_MANY), "IMAGE"), _all_stitched),
    (_row("ImageBatchMulti", (whole("inputcount", 2, 2, _JOINED), *_MANY), "IMAGE"), _all_batched),
    (
        _row(
            "GetImageRangeFromBatch",
            (
                whole("start_index", 0, -1, 4096), whole("num_frames", 1, 1, 4096),
                link("images", "IMAGE", is_required=False), link("masks", "MASK", is_required=False),
            ),
            *("IMAGE", "MASK"),
        ),
        _range,
    ),
    (_row("ImageFromBatch+", (_IMAGE, whole("start", 0, 0, 4096), whole("length", -1, -1, 4096)), "IMAGE"),
     _from_batch),
    (_row("ImageFlip+", (_IMAGE, combo("axis", ("x", "y", "xy"))), "IMAGE"),
     lambda given: _flipped(given, "image", "axis")),
    (_row("Image Flip", (link("images", "IMAGE"), combo("mode", ("horizontal", "vertical"))), "IMAGE"),
     lambda given: _flipped(given, "images", "mode")),
    (_row("ImageCropV2", (_IMAGE, link("crop_region", ANY)), "IMAGE", build=_cropped_file), _cropped),
    (
        _row(
            "ImageResizeKJ",
            (
                _IMAGE, *(whole(name, 512, 0, MAX_SIDE) for name in ("width", "height")),
                combo("upscale_method", _METHODS), flag("keep_proportion"),
                whole("divisible_by", 2, 0, 512), *(link(f"{name}_input", ANY, is_required=False)
                                                    for name in ("width", "height")),
                link("get_image_size", "IMAGE", is_required=False),
                combo("crop", ("disabled", "center"), is_required=False),
            ),
            *("IMAGE", "INT", "INT"),
        ),
        _resized,
    ),
    (
        _row("JWImageResizeByFactor", (_IMAGE, number("factor", 2.0, 0.01, 8.0),
                                       text("interpolation_mode", "bicubic", choices=_JW_METHODS)), "IMAGE",
             build=_by_factor(next(row.build for row in IMAGE_NODES if row.name == "ImageScaleBy"))),
        _by_factor(WORKFLOW_NODES["ImageScaleBy"]),
    ),
    (
        _row("JWImageResizeByLongerSide", (_IMAGE, whole("size", 512, 1, MAX_SIDE),
                                           text("interpolation_mode", "bicubic", choices=_JW_METHODS)), "IMAGE"),
        _to_longer_side,
    ),
    (
        _row(
            "ColorMatch",
            (
                link("image_ref", "IMAGE"), link("image_target", "IMAGE"),
                text("method", "mkl", choices=COLOUR_METHODS),
                number("strength", 1.0, 0.0, 10.0, is_required=False),
                flag("multithread", True, is_required=False),
            ),
            "IMAGE",
        ),
        _matched,
    ),
    (_row("Convert Masks to Images", (link("masks", "MASK"),), "IMAGE"), _of_mask("mask_to_image", "masks")),
    (_row("LayerMask: MaskInvert", (link("mask", "MASK"),), "MASK"), _of_mask("mask_invert", "mask")),
    (_row("Mask Invert", (link("masks", "MASK"),), "MASK"), _of_mask("mask_invert", "masks")),
)  # fmt: skip
PACK_IMAGES = tuple(kind for kind, _ in _ROWS)
#: what they become in workflows
PACK_IMAGE_BUILDERS: Mapping[str, Builder] = MappingProxyType({kind.name: build for kind, build in _ROWS})
