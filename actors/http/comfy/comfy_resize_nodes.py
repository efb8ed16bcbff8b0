"""ComfyUI nodes of images and masks with inputs that depend on a choice, or on the number of links:
ResizeImageMaskNode, batches of several inputs, and SaveImageAdvanced. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from modelpool.actors.http.comfy.comfy_image_nodes import IMAGE_NODES, SCALE_METHODS, with_step
from modelpool.actors.http.comfy.comfy_made_nodes import MadeNodes
from modelpool.actors.http.comfy.comfy_node_types import (
    ANY,
    MAX_BATCH,
    MAX_SIDE,
    Builder,
    NodeInput,
    NodeType,
    NodeUnsupported,
    check_parts,
    chosen_by,
    combo,
    link,
    number,
    only_in_workflows,
    text,
    warn,
    whole,
)
from modelpool.actors.http.comfy.comfy_values import (
    BlankLatent,
    DecodedImage,
    ImageFile,
    ImageScale,
    MaskFile,
    NodeImage,
    NodeMask,
    SavedAs,
)
from modelpool.actors.http.comfy.comfy_workflow_nodes import WORKFLOW_NODES

_TYPE = "resize_type"
_BY, _TO_SIZE, _TO_LONGER = "scale by multiplier", "scale dimensions", "scale longer dimension"
_TO_SHORTER, _TO_WIDTH, _TO_HEIGHT = "scale shorter dimension", "scale width", "scale height"
_TO_PIXELS, _MATCH, _TO_MULTIPLE = "scale total pixels", "match size", "scale to multiple"
RESIZE_TYPES = (_TO_SIZE, _BY, _TO_LONGER, _TO_SHORTER, _TO_WIDTH, _TO_HEIGHT, _TO_PIXELS, _MATCH, _TO_MULTIPLE)
_MEGAPIXEL = 1024 * 1024
#: sides that nodes set, and their names in operations
_SIDES: Mapping[str, str] = MappingProxyType({"longer_edge": "longest", "shorter_edge": "shortest"})
#: inputs of a node that takes as many as are linked
_MOST_LINKED = 50
_SAVED_IMAGE = next(row.build for row in IMAGE_NODES if row.name == "SaveImage")


def _step(given: Mapping[str, Any]) -> ImageScale | None:
    """Return the change of an image of the user that a resize is; None for one that is no such step."""
    kind, method = given[_TYPE], given["scale_method"]
    width, height = given[f"{_TYPE}.width"], given[f"{_TYPE}.height"]
    match kind:
        case "scale by multiplier":
            return ImageScale(method, factor=given[f"{_TYPE}.multiplier"])
        case "scale dimensions" if width or height:
            return ImageScale(method, size=(width, height), crops=given[f"{_TYPE}.crop"] == "center")
        case "scale width" if width:
            return ImageScale(method, size=(width, 0))
        case "scale height" if height:
            return ImageScale(method, size=(0, height))
        case "scale total pixels":
            return ImageScale(method, pixels=given[f"{_TYPE}.megapixels"] * _MEGAPIXEL)
    return None


def _operation(given: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the operation that a resize is, and its settings."""
    width, height = given[f"{_TYPE}.width"], given[f"{_TYPE}.height"]
    crop = given[f"{_TYPE}.crop"] == "center"
    found: dict[str, tuple[str, dict[str, Any]]] = {
        _BY: ("image_scale_by", {"factor": given[f"{_TYPE}.multiplier"]}),
        _TO_SIZE: ("image_scale", {"width": width, "height": height, "crop": crop}),
        _TO_WIDTH: ("image_scale", {"width": width, "height": 0}),
        _TO_HEIGHT: ("image_scale", {"width": 0, "height": height}),
        _TO_LONGER: ("image_scale_to_longest", {"longest": given[f"{_TYPE}.longer_size"]}),
        _TO_SHORTER: ("image_scale_to_shortest", {"shortest": given[f"{_TYPE}.shorter_size"]}),
        _TO_PIXELS: ("image_scale_to_pixels", {"megapixels": given[f"{_TYPE}.megapixels"]}),
        _MATCH: ("image_scale_like", {"crop": crop}),
        _TO_MULTIPLE: ("image_scale_to_multiple", {"multiple": given[f"{_TYPE}.multiple"]}),
    }
    name, settings = found[given[_TYPE]]
    return name, {**settings, "method": given["scale_method"]}


def _resized_file(given: Mapping[str, Any]) -> tuple[Any, ...]:
    step = _step(given)
    if not isinstance(given["input"], ImageFile) or step is None:
        return only_in_workflows(given)
    return (with_step(given["input"], step),)


def _resized(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return an image, or a mask, in another size. A mask is scaled as a grey image with its levels."""
    value, nodes, node_id = given["input"], given["nodes"], given["node_id"]
    if isinstance(value, ImageFile) and _step(given) is not None:
        return _resized_file(given)
    name, settings = _operation(given)
    others = {"like": _as_image(given, "match", given.get(f"{_TYPE}.match"))} if given[_TYPE] == _MATCH else {}
    image = _as_image(given, "input", value)
    if image is value:
        return (nodes.operate(node_id, name, NodeImage, {"image": image, **others}, settings),)
    made = nodes.operate(f"{node_id}/scaled", name, NodeImage, {"image": image, **others}, settings)
    return (nodes.operate(node_id, "mask_from_image", NodeMask, {"image": made}, {"channel": "red"}),)


def _as_image(given: Mapping[str, Any], name: str, value: Any) -> Any:
    """Return an image as it is, and a mask as a grey image. Raises NodeUnsupported for anything else."""
    if isinstance(value, ImageFile | NodeImage):
        return value
    if not isinstance(value, MaskFile | NodeMask):
        raise NodeUnsupported(f"{name}: expected an image or a mask")
    nodes: MadeNodes = given["nodes"]
    return nodes.operate(f"{given['node_id']}/{name}", "mask_to_image", NodeImage, {"mask": value}, {})


def _to_side(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return images with a longer, or a shorter, side of a length."""
    name, setting = next((each, _SIDES[each]) for each in _SIDES if each in given)
    settings = {setting: given[name], "method": "lanczos"}
    operation = f"image_scale_to_{setting}"
    return (given["nodes"].operate(given["node_id"], operation, NodeImage, {"image": given["images"]}, settings),)


def _linked(given: Mapping[str, Any], names: tuple[str, ...]) -> list[Any]:
    found = [given[name] for name in names if given.get(name) is not None]
    if not found:
        raise NodeUnsupported(f"{names[0]}: found nothing that is linked, expected at least one")
    return found


def _images_joined(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return images one behind the other; all get the size of the first one, cut at the centre."""
    nodes: MadeNodes = given["nodes"]
    first, *others = _linked(given, _IMAGES)
    for place, each in enumerate(others, start=1):
        node_id = given["node_id"] if place == len(others) else f"{given['node_id']}/{place}"
        first = nodes.operate(node_id, "image_batch", NodeImage, {"first": first, "second": each}, {})
    return (first,)


def _masks_joined(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return masks one behind the other; all get the size of the first one."""
    nodes: MadeNodes = given["nodes"]
    first, *others = _linked(given, _MASKS)
    if not others:
        return (first,)
    node_id = given["node_id"]
    like = made = nodes.operate(f"{node_id}/0", "mask_to_image", NodeImage, {"mask": first}, {})
    for place, mask in enumerate(others, start=1):
        image = nodes.operate(f"{node_id}/{place}", "mask_to_image", NodeImage, {"mask": mask}, {})
        fitting = nodes.operate(
            f"{node_id}/fitting", "image_scale_like", NodeImage, {"image": image, "like": like}, {"method": "bilinear"}
        )
        made = nodes.operate(f"{node_id}/batch", "image_batch", NodeImage, {"first": made, "second": fitting}, {})
    return (nodes.operate(node_id, "mask_from_image", NodeMask, {"image": made}, {"channel": "red"}),)


def _latents_joined(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return a batch of all latents."""
    found = _linked(given, _LATENTS)
    empty = [each for each in found if isinstance(each, BlankLatent)]
    if len(empty) == len(found):
        count = sum(each.count for each in empty)
        check_parts("batch", "images", count, MAX_BATCH)
        if len({(each.width, each.height, each.frames) for each in empty}) > 1:
            raise NodeUnsupported("latents: found empty ones of several sizes, expected one size")
        return (replace(found[0], count=count),)
    if empty:
        raise NodeUnsupported("latents: expected latents of images or of samplers, or empty ones alone")
    if len({each.size for each in found}) > 1 or found[0].size == (0, 0):
        warn(given, "latents of a batch have one size in ComfyUI; here each keeps its own")
    nodes: MadeNodes = given["nodes"]
    return (nodes.one_of(given["node_id"], found),)


def _saved_as(given: Mapping[str, Any]) -> SavedAs | None:
    """Return the file of an image; None for the usual one, a PNG of 8 bits."""
    kind = given["format"]
    bits, space = given["format.bit_depth"], given["format.input_color_space"]
    still = kind != "avif" or given["format.save_mode"] == "still images"
    expected = {"png": ("8-bit",), "avif": ("auto", "8-bit YUV420")}.get(kind, ())
    if bits not in expected or space != "sRGB" or not still:
        raise NodeUnsupported(
            f"format: found {kind} with {bits}, {space}{'' if still else ', animated'}; expected png or avif of 8 bits "
            "in sRGB, of still images: images of the pool have 8 bits"
        )
    if kind == "png":
        return None
    warn(given, f"format.crf: found {given['format.crf']}, which is not read: the file has the pool's usual quality")
    return SavedAs("avif")


def _saved(given: Mapping[str, Any]) -> tuple[Any, ...]:
    (image,), file = _SAVED_IMAGE(given), _saved_as(given)
    assert isinstance(image, DecodedImage), "the builder of SaveImage checks it"
    return (image if file is None else replace(image, saved=file),)


def _saved_node(given: Mapping[str, Any]) -> tuple[Any, ...]:
    (image,), file = WORKFLOW_NODES["SaveImage"](given), _saved_as(given)
    return (image if file is None else replace(image, saved=file),)


def _row(
    name: str, category: str, inputs: tuple[NodeInput, ...], build: Any, output: str, is_output: bool = False
) -> NodeType:
    return NodeType(name, category, inputs, (output,), build, is_output)


def _with_choices(*choices: str, inputs: tuple[NodeInput, ...]) -> tuple[NodeInput, ...]:
    return chosen_by(_TYPE, *choices, inputs=inputs)


_IMAGES = tuple(f"images.image{place}" for place in range(_MOST_LINKED))
_MASKS = tuple(f"masks.mask{place}" for place in range(_MOST_LINKED))
_LATENTS = tuple(f"latents.latent{place}" for place in range(_MOST_LINKED))
_SIDE = MAX_SIDE
_SAVING = (
    *chosen_by("format", "png", "exr", "avif", inputs=(text("bit_depth"), text("input_color_space", "sRGB"))),
    *chosen_by("format", "avif", inputs=(whole("crf", 18, 1, 63), combo("save_mode", ("still images", "animated")))),
    *chosen_by(
        "format.save_mode", "animated", inputs=(number("fps", 6.0, 0.01, 1000.0), whole("loop_count", 0, 0, 1000))
    ),
)
RESIZE_NODES = (
    *(
        _row(f"ResizeImagesBy{side}Edge", "image", inputs, only_in_workflows, "IMAGE")
        for side, inputs in (
            (side, (link("images", "IMAGE"), whole(f"{side.lower()}_edge", 1024, 1, _SIDE)))
            for side in ("Longer", "Shorter")
        )
    ),
    _row(
        "ResizeImageMaskNode",
        "image",
        (
            link("input", ANY),
            combo(_TYPE, RESIZE_TYPES),
            *_with_choices(_TO_SIZE, _TO_WIDTH, inputs=(whole("width", 512, 0, _SIDE),)),
            *_with_choices(_TO_SIZE, _TO_HEIGHT, inputs=(whole("height", 512, 0, _SIDE),)),
            *_with_choices(_BY, inputs=(number("multiplier", 1.0, 0.01, 8.0),)),
            *_with_choices(_TO_LONGER, inputs=(whole("longer_size", 512, 1, _SIDE),)),
            *_with_choices(_TO_SHORTER, inputs=(whole("shorter_size", 512, 1, _SIDE),)),
            *_with_choices(_TO_PIXELS, inputs=(number("megapixels", 1.0, 0.01, 16.0),)),
            *_with_choices(_MATCH, inputs=(link("match", ANY),)),
            *_with_choices(_TO_SIZE, _MATCH, inputs=(combo("crop", ("disabled", "center")),)),
            *_with_choices(_TO_MULTIPLE, inputs=(whole("multiple", 8, 1, _SIDE),)),
            NodeInput("scale_method", "COMBO", "area", choices=SCALE_METHODS),
        ),
        _resized_file,
        ANY,
    ),
    _row(
        "BatchImagesNode",
        "image",
        tuple(link(name, "IMAGE", is_required=False) for name in _IMAGES),
        only_in_workflows,
        "IMAGE",
    ),
    _row(
        "BatchMasksNode",
        "mask",
        tuple(link(name, "MASK", is_required=False) for name in _MASKS),
        only_in_workflows,
        "MASK",
    ),
    _row(
        "BatchLatentsNode",
        "latent",
        tuple(link(name, "LATENT", is_required=False) for name in _LATENTS),
        only_in_workflows,
        "LATENT",
    ),
    _row(
        "SaveImageAdvanced",
        "image",
        (
            link("images", "IMAGE"),
            text("filename_prefix", "ComfyUI"),
            combo("format", ("png", "exr", "avif")),
            *_SAVING,
        ),
        _saved,
        "IMAGE",
        is_output=True,
    ),
)
#: what they become in workflows
RESIZE_BUILDERS: Mapping[str, Builder] = MappingProxyType(
    {
        "ResizeImageMaskNode": _resized,
        **dict.fromkeys(("ResizeImagesByLongerEdge", "ResizeImagesByShorterEdge"), _to_side),
        "BatchImagesNode": _images_joined,
        "BatchMasksNode": _masks_joined,
        "BatchLatentsNode": _latents_joined,
        "SaveImageAdvanced": _saved_node,
    }
)
