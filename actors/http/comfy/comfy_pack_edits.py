"""Custom nodes of images and masks that are operations of the pool: essentials, KJNodes, Video Helper Suite, Impact and
others. Pure.

They are here under their own names, with what their public descriptions say. To support a node, add a row.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from modelpool.actors.http.comfy.comfy_made_nodes import MadeNodes
from modelpool.actors.http.comfy.comfy_node_types import (
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
    warn_unread,
    whole,
)
from modelpool.actors.http.comfy.comfy_values import NodeImage, NodeMask, UnknownSize
from modelpool.pool.inference.operations.image_edits import FLIPS
from modelpool.pool.inference.operations.pack_edits import CORNERS, GREYS, PRIMARIES
from modelpool.pool.inference.operations.resampling import IMAGE_METHODS
from modelpool.pool.values.core.errors import counted

_MANY, _MOST_PLACES = 2**31, 4096
_EXPANDED = ("expand", "repeat all", "repeat first", "repeat last")
_COLOUR = re.compile(r"#?([0-9a-fA-F]{6})")
_TO_MASK = {"channel": "red"}
#: the interpolations of a pack that names them with blanks
_JW_METHODS = ("bilinear", "bicubic", "area", "nearest exact")


def _operate(
    given: Mapping[str, Any], operation: str, values: Mapping[str, Any], part: str = "", **settings: Any
) -> Any:
    nodes: MadeNodes = given["nodes"]
    result = NodeMask if operation.startswith("mask_") and operation != "mask_to_image" else NodeImage
    node_id = f"{given['node_id']}/{part}" if part else given["node_id"]
    return nodes.operate(node_id, operation, result, values, settings)


def images_of(value: Any) -> int:
    """Return how many images, masks or latents a value has."""
    return max(1, getattr(value, "count", 1)) * max(1, getattr(value, "frames", 0))


def _picked(given: Mapping[str, Any], image: Any, places: list[int], part: str = "") -> Any:
    """Return some images of a batch, by their places. Raises NodeUnsupported."""
    if not 0 < len(places) <= _MOST_PLACES:
        raise NodeUnsupported(f"found {counted(len(places), 'image')}, expected 1 to {_MOST_PLACES}")
    if places == list(range(images_of(image))):
        return image
    return _operate(given, "image_pick", {"image": image}, part, indices=tuple(places))


def _picked_masks(given: Mapping[str, Any], mask: Any, places: list[int]) -> Any:
    shown = _operate(given, "mask_to_image", {"mask": mask}, "shown")
    return _operate(given, "mask_from_image", {"image": _picked(given, shown, places, "picked")}, **_TO_MASK)


def _changed(operation: str, source: str = "image", **settings: str) -> Builder:
    """Return a node that is one operation on one input: `settings` are the names of its inputs."""
    name = "mask" if operation == "mask_gaussian" else "image"

    def build(given: Mapping[str, Any]) -> tuple[Any, ...]:
        how = {setting: given[each] for setting, each in settings.items()}
        return (_operate(given, operation, {name: given[source]}, **how),)

    return build


def _cropped(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """A part of an image at a named place, and its corner, which is known when the image is made."""
    how = {"width": given["width"], "height": given["height"], "position": given["position"]}
    image = _operate(given, "image_crop_at", {"image": given["image"]}, **how, x=given["x_offset"], y=given["y_offset"])
    return image, UnknownSize(), UnknownSize()


def _expanded_places(given: Mapping[str, Any], count: int) -> list[int]:
    """Return the places of images in a batch of a size: spread, all again, or the first or the last one repeated."""
    size = given["size"]
    if size == count or size <= 1:
        return list(range(size))
    match given["method"]:
        case "expand" if size < count:
            return [min(round(place * (count - 1) / (size - 1)), count - 1) for place in range(size)]
        case "expand":
            return [min(int((place + 0.5) * count / size), count - 1) for place in range(size)]
        case "repeat all":
            return [place % count for place in range(size)]
        case "repeat first" if size > count:
            return [0] * (size - count) + list(range(count))
    return [min(place, count - 1) for place in range(size)]


def _expanded(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (_picked(given, given["image"], _expanded_places(given, images_of(given["image"]))),)


def _expanded_masks(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (_picked_masks(given, given["mask"], _expanded_places(given, images_of(given["mask"]))),)


def _batched(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """A batch of all images in the size of the first one, cut at the centre."""
    found = [given[name] for name in _FIVE if given.get(name) is not None]
    first, *others = found
    for place, each in enumerate(others, start=1):
        fitting = _operate(given, "image_scale_like", {"image": each, "like": found[0]}, f"{place}/scaled",
                           method=given["method"], crop=True)  # fmt: skip
        part = "" if place == len(others) else str(place)
        first = _operate(given, "image_batch", {"first": first, "second": fitting}, part)
    return (first,)


def _masks_batched(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Two masks, the second one in the size of the first, cut at the centre."""
    one, other = (_operate(given, "mask_to_image", {"mask": given[name]}, name) for name in ("mask1", "mask2"))
    fitting = _operate(given, "image_scale_like", {"image": other, "like": one}, "scaled", method="bicubic", crop=True)
    both = _operate(given, "image_batch", {"first": one, "second": fitting}, "both")
    return (_operate(given, "mask_from_image", {"image": both}, **_TO_MASK),)


def _some_masks(given: Mapping[str, Any]) -> tuple[Any, ...]:
    count = images_of(given["mask"])
    start = min(given["start"], count - 1)
    return (_picked_masks(given, given["mask"], list(range(start, min(count, start + given["length"])))),)


def _mask_flipped(given: Mapping[str, Any]) -> tuple[Any, ...]:
    image = _operate(given, "mask_to_image", {"mask": given["mask"]}, "shown")
    for axis in given["axis"]:
        image = _operate(given, "image_flip", {"image": image}, axis, method=FLIPS[axis == "x"])
    return (_operate(given, "mask_from_image", {"image": image}, **_TO_MASK),)


def _blurred(given: Mapping[str, Any], level: float = 0.0) -> tuple[Any, ...]:
    """A mask under a kernel of an odd number of pixels, with the standard deviation that torchvision has for it."""
    if given["amount"] == 0:
        return (given["mask"],)
    size = given["amount"] | 1
    how: dict[str, Any] = {"radius": size // 2, "sigma": size * 0.15 + 0.35}
    if level:
        how["level"] = level
    return (_operate(given, "mask_gaussian", {"mask": given["mask"]}, **how),)


def _impact_blurred(given: Mapping[str, Any]) -> tuple[Any, ...]:
    if given["kernel_size"] <= 0:
        return (given["mask"],)
    how = {"radius": given["kernel_size"], "sigma": given["sigma"]}
    return (_operate(given, "mask_gaussian", {"mask": given["mask"]}, **how),)


def _primaries(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """A mask of each colour."""
    for name in ("remove_isolated_pixels", "fill_holes"):
        if given[name]:
            raise NodeUnsupported(f"{name}: found {given[name]}, expected {0 if name[0] == 'r' else False}")
    levels = {colour: given[f"threshold_{colour[0]}"] for colour in ("red", "green", "blue")}
    values = {"image": given["image"]}
    return tuple(_operate(given, "mask_of_primary", values, colour, colour=colour, **levels) for colour in PRIMARIES)


def _composed(mode: str) -> Builder:
    def build(given: Mapping[str, Any]) -> tuple[Any, ...]:
        values = {"destination": given["mask1"], "source": given["mask2"]}
        return (_operate(given, "mask_composite", values, mode=mode),)

    return build


def _binary(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (_operate(given, "mask_threshold", {"mask": given["mask"]}, level=given["threshold"] / 255),)


def _listed(given: Mapping[str, Any], name: str, first: int = 0) -> list[int]:
    """Return the places that a text lists. Raises NodeUnsupported."""
    parts = [part.strip() for part in given[name].split(",") if part.strip()]
    if not parts or not all(re.fullmatch(r"\d{1,9}", part) for part in parts):
        raise NodeUnsupported(f"{name}: found {given[name][:100]!r}, expected places of images, as in 1, 2, 3")
    return [int(part) - first for part in parts]


def _indexed(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (_picked(given, given["images"], _listed(given, "indexes")),)


def _selected(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (_picked(given, given["images"], _listed(given, "selected_indexes", first=1)),)


def _reversed(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (_picked(given, given["images"], list(range(images_of(given["images"])))[::-1]),)


def _interleaved(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Each image several times, one behind the other."""
    count, repeats = images_of(given["images"]), given["repeats"]
    return (_picked(given, given["images"], [place // repeats for place in range(min(count * repeats, _MANY))]),)


def _split(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """The images before a place, and the others, each with their number. Raises NodeUnsupported for an empty part."""
    count, place = images_of(given["images"]), given["split_index"]
    if not 0 < place < count:
        raise NodeUnsupported(f"split_index: found {place} for {counted(count, 'image')}, expected 1 to {count - 1}")
    parts = [_picked(given, given["images"], list(each), name)
             for name, each in (("a", range(place)), ("b", range(place, count)))]  # fmt: skip
    return parts[0], place, parts[1], count - place


def _every_nth(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Every so many images, behind some that are skipped, and their number."""
    places = list(range(given["skip_first_images"], images_of(given["images"]), given["select_every_nth"]))
    if not places:
        count = counted(images_of(given["images"]), "image")
        raise NodeUnsupported(f"skip_first_images: found {given['skip_first_images']} for {count}, expected fewer")
    return _picked(given, given["images"], places), len(places)


def _duplicated(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """The whole batch several times, and its number."""
    count = images_of(given["images"])
    places = list(range(count)) * min(given["multiply_by"], _MOST_PLACES)
    return _picked(given, given["images"], places), len(places)


def _counted(name: str) -> Builder:
    return lambda given: (images_of(given[name]),)


def _latent_and_size(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """The latents as they are, and their number; their sides are known when they are made."""
    return given["latent"], getattr(given["latent"], "count", 1), *[UnknownSize()] * 4


def _coloured(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """An image of one colour. Raises NodeUnsupported."""
    if given.get("foreground_image") is not None or given.get("foreground_mask") is not None:
        raise NodeUnsupported("foreground_image, foreground_mask: found a link, expected none: ImageCompositeMasked "
                              "lays an image over another")  # fmt: skip
    match = _COLOUR.fullmatch(str(given["color"]).strip())
    if match is None:
        raise NodeUnsupported(f"color: found {str(given['color'])[:40]!r}, expected #rrggbb")
    how = {"width": given["width"], "height": given["height"], "colour": int(match[1], 16)}
    return (_operate(given, "image_solid", {}, **how),)


def _scaled_by_jw(operation: str, **names: str) -> Builder:
    def build(given: Mapping[str, Any]) -> tuple[Any, ...]:
        method = given["interpolation_mode"].replace(" ", "-")
        if method not in IMAGE_METHODS:
            found = given["interpolation_mode"][:40]
            raise NodeUnsupported(f"interpolation_mode: found {found}, expected one of {', '.join(_JW_METHODS)}")
        how = {setting: given[each] for setting, each in names.items()}
        return (_operate(given, operation, {"image": given["image"]}, method=method, **how),)

    return build


def _without_device(build: Builder) -> Builder:
    """Return a node with a device that is not read."""

    def built(given: Mapping[str, Any]) -> tuple[Any, ...]:
        warn_unread(given, "device", "the pool decides about devices itself", own="auto")
        return build(given)

    return built


def _row(name: str, inputs: tuple[NodeInput, ...], *outputs: str) -> NodeType:
    return NodeType(name, "mask" if outputs[0] == "MASK" else "image", inputs, outputs, only_in_workflows)


_FIVE = tuple(f"image_{place}" for place in range(1, 6))
_IMAGE, _IMAGES, _MASK = link("image", "IMAGE"), link("images", "IMAGE"), link("mask", "MASK")
_BYTES = tuple(whole(name, 255, 0, 255) for name in ("red", "green", "blue"))
_SPAN = (whole("size", 16, 1, _MOST_PLACES), combo("method", _EXPANDED))
_TWO_MASKS = (link("mask1", "MASK"), link("mask2", "MASK"))
_DEVICE = combo("device", ("auto", "cpu", "gpu"))
_JW_METHOD = text("interpolation_mode", "bicubic", choices=_JW_METHODS)
_ROWS: tuple[tuple[NodeType, Builder], ...] = (
    (
        _row("ImageCrop+", (_IMAGE, *(whole(name, 256, 0, MAX_SIDE) for name in ("width", "height")),
                            combo("position", CORNERS),
                            *(whole(name, 0, -99999, 99999) for name in ("x_offset", "y_offset"))),
             *("IMAGE", "INT", "INT")),
        _cropped,
    ),
    (_row("ImageCASharpening+", (_IMAGE, number("amount", 0.8, 0.0, 1.0)), "IMAGE"),
     _changed("image_sharpen_adaptive", amount="amount")),
    (_row("ImageDesaturate+", (_IMAGE, number("factor", 1.0, 0.0, 1.0), combo("method", GREYS)), "IMAGE"),
     _changed("image_grey", factor="factor", method="method")),
    (_row("ImagePosterize+", (_IMAGE, number("threshold", 0.5, 0.0, 1.0)), "IMAGE"),
     _changed("image_two_levels", amount="threshold")),
    (_row("ImageRemoveAlpha+", (_IMAGE,), "IMAGE"), _changed("image_without_alpha")),
    (_row("Images to RGB", (_IMAGES,), "IMAGE"), _changed("image_without_alpha", "images")),
    (_row("ImageExpandBatch+", (_IMAGE, *_SPAN), "IMAGE"), _expanded),
    (_row("ImageBatchMultiple+", (link("image_1", "IMAGE"), combo("method", ("lanczos", "nearest-exact", "bilinear",
                                                                             "area", "bicubic")),
                                  *(link(name, "IMAGE", is_required=False) for name in _FIVE[1:])), "IMAGE"),
     _batched),
    (_row("MaskBlur+", (_MASK, whole("amount", 6, 0, 256), _DEVICE), "MASK"), _without_device(_blurred)),
    (_row("MaskSmooth+", (_MASK, whole("amount", 0, 0, 127)), "MASK"), lambda given: _blurred(given, 0.5)),
    (_row("MaskFlip+", (_MASK, combo("axis", ("x", "y", "xy"))), "MASK"), _mask_flipped),
    (_row("MaskFromColor+", (_IMAGE, *_BYTES, whole("threshold", 0, 0, 127)), "MASK"),
     _changed("mask_of_near_colour", red="red", green="green", blue="blue", threshold="threshold")),
    (
        _row("MaskFromRGBCMYBW+", (_IMAGE, *(number(f"threshold_{name}", 0.15, 0.0, 1.0) for name in "rgb"),
                                   whole("remove_isolated_pixels", 0, 0, 32, False), flag("fill_holes", False, False)),
             *["MASK"] * len(PRIMARIES)),
        _primaries,
    ),
    (_row("MaskBatch+", _TWO_MASKS, "MASK"), _masks_batched),
    (_row("MaskExpandBatch+", (_MASK, *_SPAN), "MASK"), _expanded_masks),
    (_row("MaskFromBatch+", (_MASK, whole("start", 0, 0, _MOST_PLACES), whole("length", 1, 1, _MOST_PLACES)), "MASK"),
     _some_masks),
    (_row("ImpactGaussianBlurMask", (_MASK, whole("kernel_size", 10, 0, 100), number("sigma", 10.0, 0.1, 100.0)),
          "MASK"), _impact_blurred),
    (_row("ToBinaryMask", (_MASK, whole("threshold", 20, 1, 255)), "MASK"), _binary),
    (_row("AddMask", _TWO_MASKS, "MASK"), _composed("add")),
    (_row("SubtractMask", _TWO_MASKS, "MASK"), _composed("subtract")),
    (_row("GetImagesFromBatchIndexed", (_IMAGES, text("indexes", "0, 1, 2")), "IMAGE"), _indexed),
    (_row("ImageSelector", (_IMAGES, text("selected_indexes", "1,2,3")), "IMAGE"), _selected),
    (_row("ReverseImageBatch", (_IMAGES,), "IMAGE"), _reversed),
    (_row("ImageBatchRepeatInterleaving", (_IMAGES, whole("repeats", 1, 1, _MOST_PLACES)), "IMAGE"), _interleaved),
    (_row("VHS_SplitImages", (_IMAGES, whole("split_index", 0, 0, _MANY)), *("IMAGE", "INT", "IMAGE", "INT")), _split),
    (_row("VHS_SelectEveryNthImage", (_IMAGES, whole("select_every_nth", 1, 1, _MANY),
                                      whole("skip_first_images", 0, 0, _MANY, False)), "IMAGE", "INT"), _every_nth),
    (_row("VHS_DuplicateImages", (_IMAGES, whole("multiply_by", 1, 1, _MANY)), "IMAGE", "INT"), _duplicated),
    *(
        (_row(f"VHS_Get{name}Count", (link(source, kind),), "INT"), _counted(source))
        for name, source, kind in (("Image", "images", "IMAGE"), ("Latent", "latents", "LATENT"),
                                   ("Mask", "mask", "MASK"))
    ),
    (_row("GetLatentSizeAndCount", (link("latent", "LATENT"),), "LATENT", *["INT"] * 5), _latent_and_size),
    (_row("Colored Image (mtb)", (text("color", "#ffffff"), *(whole(name, 512, 1, MAX_SIDE)
                                                             for name in ("width", "height")),
                                  link("foreground_image", "IMAGE", is_required=False),
                                  link("foreground_mask", "MASK", is_required=False)), "IMAGE"), _coloured),
    (_row("JWImageResizeByShorterSide", (_IMAGE, whole("size", 512, 1, MAX_SIDE), _JW_METHOD), "IMAGE"),
     _scaled_by_jw("image_scale_to_shortest", shortest="size")),
    (_row("JWImageResize", (_IMAGE, *(whole(name, 512, 1, MAX_SIDE) for name in ("height", "width")), _JW_METHOD),
          "IMAGE"), _scaled_by_jw("image_scale", width="width", height="height")),
)  # fmt: skip
#: kinds of nodes
PACK_EDIT_NODES = tuple(kind for kind, _ in _ROWS)
#: what they become in workflows
PACK_EDIT_BUILDERS: Mapping[str, Builder] = MappingProxyType({kind.name: build for kind, build in _ROWS})
