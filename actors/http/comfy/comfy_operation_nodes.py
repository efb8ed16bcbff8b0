"""ComfyUI nodes of images, masks and latents that are operations of the pool (`pool.inference.operations`). Pure.

No request without a workflow can say them. To support a node, add a row: its inputs, the operation, and which input of
the node each input and setting of the operation reads. Custom nodes are here under their own names, with what their
public descriptions say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from modelpool.actors.http.comfy.comfy_image_nodes import IMAGE_NODES, KONTEXT_SIZES, SCALE_METHODS
from modelpool.actors.http.comfy.comfy_made_nodes import MadeNodes
from modelpool.actors.http.comfy.comfy_node_types import (
    MAX_BATCH,
    MAX_SEED,
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
    warn,
    whole,
)
from modelpool.actors.http.comfy.comfy_sizes import fit_settings
from modelpool.actors.http.comfy.comfy_values import (
    BlankLatent,
    ImageFile,
    NodeImage,
    NodeLatent,
    NodeMask,
    UnknownSize,
)
from modelpool.actors.http.comfy.comfy_workflow_nodes import OperationRow
from modelpool.pool.inference.operations.image_detail import COLOURS, DIRECTIONS, MORPHOLOGY, PLANES
from modelpool.pool.inference.operations.image_edits import BLEND_MODES, FLIPS, TURNS
from modelpool.pool.inference.operations.image_filters import DITHERS, MAX_RADIUS
from modelpool.pool.inference.operations.mask_edits import COMPOSITIONS, MOST_GROWN
from modelpool.pool.inference.operations.resampling import ALIGNED_METHODS
from modelpool.pool.values.core.errors import counted

_KINDS = {"IMAGE": NodeImage, "MASK": NodeMask, "LATENT": NodeLatent}
_IMAGE, _MASK, _LATENT = link("image", "IMAGE"), link("mask", "MASK"), link("samples", "LATENT")
_XY = tuple(whole(name, 0, 0, MAX_SIDE) for name in ("x", "y"))
_SIDES = tuple(whole(name, 512, 1, MAX_SIDE) for name in ("width", "height"))
_BORDER = tuple(whole(name, 0, 0, MAX_SIDE) for name in ("left", "top", "right", "bottom"))
_PASTED = (link("destination", "IMAGE"), link("source", "IMAGE"), *_XY, flag("resize_source"))
_LATENTS = (link("samples1", "LATENT"), link("samples2", "LATENT"))
_TWO_LATENTS = {"first": "samples1", "second": "samples2"}
_WHERE = {"x": "x", "y": "y"}
_SAMPLES = {"samples": "samples"}
#: cells of which the sides of latents are multiples after a custom node
_CELLS_OF_SIDES = 8
_BY_SIDES = (_LATENT, combo("upscale_method", ("nearest-exact", "bilinear", "area")))
_CROP = combo("crop", ("disabled", "center"))


@dataclass(frozen=True, slots=True)
class _Row:
    """A kind of node, and what it becomes in a workflow."""

    kind: NodeType
    build: Builder


def _row(
    name: str,
    category: str,
    result: str,
    inputs: tuple[NodeInput, ...],
    operation: str,
    reads: Mapping[str, str] | None = None,
    settings: Mapping[str, str] | None = None,
    **constants: Any,
) -> _Row:
    """Return the row of a node that is one operation. By default it reads one input with the name of its type."""
    kind = NodeType(name, category, inputs, (result,), only_in_workflows)
    reads = {result.lower(): result.lower()} if reads is None else reads
    return _Row(kind, OperationRow(operation, _KINDS[result], reads, settings or {}, constants).build)


def _built(
    name: str,
    category: str,
    inputs: tuple[NodeInput, ...],
    build: Builder,
    *outputs: str,
    is_output: bool = False,
) -> _Row:
    return _Row(NodeType(name, category, inputs, outputs, only_in_workflows, is_output), build)


def _same(*names: str) -> dict[str, str]:
    return dict(zip(names, names, strict=True))


def _operate(given: Mapping[str, Any], result: Any, operation: str, values: Mapping[str, Any], **settings: Any) -> Any:
    nodes: MadeNodes = given["nodes"]
    return nodes.operate(given["node_id"], operation, result, values, settings)


def _empty_image(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Images of one colour."""
    settings = {name: given[name] for name in ("width", "height")} | {"colour": given["color"]}
    if given["batch_size"] > 1:
        settings["count"] = given["batch_size"]
    return (_operate(given, NodeImage, "image_solid", {}, **settings),)


def _flipped(given: Mapping[str, Any]) -> tuple[Any, ...]:
    if isinstance(given["samples"], BlankLatent):
        return (given["samples"],)
    return (_operate(given, NodeLatent, "latent_flip", _given(given), method=given["flip_method"]),)


def _given(given: Mapping[str, Any]) -> dict[str, Any]:
    return {"samples": given["samples"]}


def _scaled_latent(given: Mapping[str, Any]) -> tuple[Any, ...]:
    factor, latent = given["factor"], given["samples"]
    if isinstance(latent, BlankLatent):
        width, height = (round(side * factor) for side in (latent.width, latent.height))
        return (BlankLatent(width, height, latent.count),)
    aligned = f"{given['mode']}-aligned"
    method = aligned if given["align"] == "true" and aligned in ALIGNED_METHODS else given["mode"]
    return (_operate(given, NodeLatent, "latent_upscale_by", _given(given), factor=factor, method=method),)


def _scaled_by_sides(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Latents scaled by a factor of each side, to multiples of 8 cells."""
    factors = (given.get(name) or given.get("factor") for name in ("WidthFactor", "HeightFactor"))
    settings = dict(zip(("width_factor", "height_factor"), factors, strict=True))
    if not all(settings.values()):
        raise NodeUnsupported("factor: found 0, expected a number above 0")
    how = {"multiple": _CELLS_OF_SIDES, "method": given["upscale_method"], "crop": given["crop"] == "center"}
    return (_operate(given, NodeLatent, "latent_upscale_by_sides", _given(given), **settings, **how),)


def _image_scaled_by_sides(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """An image scaled by a factor of each side, to multiples of 8 pixels if the node says so."""
    settings = {"width_factor": given["WidthFactor"], "height_factor": given["HeightFactor"]}
    how = {"multiple": _CELLS_OF_SIDES if given["MulOf46"] == "enabled" else 1, "method": given["upscale_method"]}
    crops = given["crop"] == "center"
    return (
        _operate(given, NodeImage, "image_scale_by_sides", {"image": given["image"]}, **settings, **how, crop=crops),
    )


def _resized(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the image, and its width and height, which are not known yet."""
    method = given["interpolation"]
    sides = {"width": given["width"], "height": given["height"]}
    values = {"image": given["image"]}
    is_plain = given["condition"] == "always" and given["multiple_of"] <= 1
    match given["method"]:
        case "keep proportion" if is_plain:
            image = _operate(given, NodeImage, "image_scale_within", values, **sides, method=method)
        case "stretch" | "fill / crop" if is_plain and all(sides.values()):
            crops = given["method"] != "stretch"
            image = _operate(given, NodeImage, "image_scale", values, **sides, method=method, crop=crops)
        case _:
            image = _operate(given, NodeImage, "image_fit", values, **fit_settings(given))
    return image, UnknownSize(), UnknownSize()


def _resized_by_mode(given: Mapping[str, Any]) -> tuple[Any, ...]:
    values = {"image": given["image"]}
    if given["supersample"] == "true" or given["resampling"] != "lanczos":
        how = {"method": given["resampling"], "oversampled": given["supersample"] == "true"}
        if given["mode"] == "rescale":
            how["factor"] = given["rescale_factor"]
        else:
            how |= {name: -(-given[f"resize_{name}"] // 8) * 8 for name in ("width", "height")}
        return (_operate(given, NodeImage, "image_scale_by_filter", values, **how),)
    if given["mode"] == "rescale":
        factor = given["rescale_factor"]
        return (_operate(given, NodeImage, "image_scale_by", values, factor=factor, method="lanczos", cut=True),)
    sides = {name: -(-given[f"resize_{name}"] // 8) * 8 for name in ("width", "height")}
    return (_operate(given, NodeImage, "image_scale", values, **sides, method="lanczos"),)


def _grown_and_blurred(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the mask, and its inverse."""
    expected = {"incremental_expandrate": 0.0, "lerp_alpha": 1.0, "decay_factor": 1.0, "fill_holes": False}
    if wrong := [name for name, value in expected.items() if given[name] != value]:
        raise NodeUnsupported(f"{', '.join(wrong)}: expected {', '.join(str(expected[name]) for name in wrong)}")
    nodes: MadeNodes = given["nodes"]
    node_id, mask = given["node_id"], given["mask"]
    if given["flip_input"]:
        mask = nodes.operate(f"{node_id}/flip", "mask_invert", NodeMask, {"mask": mask}, {})
    settings = {"pixels": given["expand"], "tapered": given["tapered_corners"]}
    mask = nodes.operate(f"{node_id}/grow", "mask_grow", NodeMask, {"mask": mask}, settings)
    mask = nodes.operate(node_id, "mask_blur", NodeMask, {"mask": mask}, {"pixels": given["blur_radius"]})
    return mask, nodes.operate(f"{node_id}/inverse", "mask_invert", NodeMask, {"mask": mask}, {})


def _shown_mask(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (_operate(given, NodeImage, "mask_to_image", {"mask": given["mask"]}),)


def _padded(given: Mapping[str, Any]) -> tuple[Any, ...]:
    nodes: MadeNodes = given["nodes"]
    settings = {name: given[name] for name in ("left", "top", "right", "bottom", "feathering")}
    values = {"image": given["image"]}
    mask = nodes.operate(f"{given['node_id']}/mask", "image_pad_mask", NodeMask, values, settings)
    return nodes.operate(given["node_id"], "image_pad", NodeImage, values, settings), mask


def _grown(given: Mapping[str, Any]) -> tuple[Any, ...]:
    settings = {"pixels": given["expand"], "tapered": given["tapered_corners"]}
    return (_operate(given, NodeMask, "mask_grow", {"mask": given["mask"]}, **settings),)


def _of_files(name: str, build: Builder) -> Builder:
    """Return the builder of a node that changes images: images of the user as in requests without a workflow."""
    plain = next(row.build for row in IMAGE_NODES if row.name == name)
    return lambda given: plain(given) if isinstance(given["image"], ImageFile) else build(given)


def _changed(name: str, operation: str, settings: Mapping[str, str], **constants: Any) -> tuple[str, Builder]:
    build = OperationRow(operation, NodeImage, {"image": "image"}, settings, constants).build
    return name, _of_files(name, build)


_IMAGES = (
    _row(
        "ImageScaleToMaxDimension",
        "image",
        "IMAGE",
        (_IMAGE, combo("upscale_method", SCALE_METHODS), whole("largest_size", 512, 1, MAX_SIDE)),
        "image_scale_to_longest",
        settings={"method": "upscale_method", "longest": "largest_size"},
    ),
    _row(
        "ImageBlend",
        "image",
        "IMAGE",
        (
            link("image1", "IMAGE"),
            link("image2", "IMAGE"),
            number("blend_factor", 0.5, 0.0, 1.0),
            combo("blend_mode", BLEND_MODES),
        ),
        "image_blend",
        {"first": "image1", "second": "image2"},
        {"factor": "blend_factor", "mode": "blend_mode"},
    ),
    _row(
        "ImageBlur",
        "image",
        "IMAGE",
        (_IMAGE, whole("blur_radius", 1, 1, MAX_RADIUS), number("sigma", 1.0, 0.1, 10.0)),
        "image_blur",
        settings={"radius": "blur_radius", "sigma": "sigma"},
    ),
    _row(
        "ImageSharpen",
        "image",
        "IMAGE",
        (
            _IMAGE,
            whole("sharpen_radius", 1, 1, MAX_RADIUS),
            number("sigma", 1.0, 0.1, 10.0),
            number("alpha", 1.0, 0.0, 5.0),
        ),
        "image_sharpen",
        settings={"radius": "sharpen_radius", "sigma": "sigma", "alpha": "alpha"},
    ),
    _row(
        "ImageQuantize",
        "image",
        "IMAGE",
        (_IMAGE, whole("colors", 256, 1, 256), combo("dither", DITHERS)),
        "image_quantize",
        settings={"colours": "colors", "dither": "dither"},
    ),
    *(
        _row(
            name,
            "image",
            "IMAGE",
            (_IMAGE, number("factor", 1.0, 0.0, 2.0, is_required=False)),
            operation,
            settings=_same("factor"),
        )
        for name, operation in (("AdjustBrightness", "image_brightness"), ("AdjustContrast", "image_contrast"))
    ),
    _row(
        "ImageCompositeMasked",
        "image",
        "IMAGE",
        (*_PASTED, link("mask", "MASK", is_required=False)),
        "image_composite",
        _same("destination", "source", "mask"),
        {**_WHERE, "resize": "resize_source"},
    ),
    _row(
        "ImageFlip",
        "image",
        "IMAGE",
        (_IMAGE, combo("flip_method", FLIPS)),
        "image_flip",
        settings={"method": "flip_method"},
    ),
    _row(
        "ImageRotate", "image", "IMAGE", (_IMAGE, combo("rotation", TURNS)), "image_rotate", settings=_same("rotation")
    ),
    _built(
        "EmptyImage",
        "image",
        (*_SIDES, whole("batch_size", 1, 1, MAX_BATCH), whole("color", 0, 0, 0xFFFFFF)),
        _empty_image,
        "IMAGE",
    ),
    _built(
        "ImageResize+",
        "image",
        (
            _IMAGE,
            *(whole(name, 512, 0, MAX_SIDE) for name in ("width", "height")),
            combo("interpolation", ("nearest", "bilinear", "bicubic", "area", "nearest-exact", "lanczos")),
            combo("method", ("stretch", "keep proportion", "fill / crop", "pad")),
            combo(
                "condition",
                ("always", "downscale if bigger", "upscale if smaller", "if bigger area", "if smaller area"),
            ),
            whole("multiple_of", 0, 0, MAX_SIDE),
        ),
        _resized,
        "IMAGE",
        "INT",
        "INT",
    ),
    _built(
        "ImageScaleFactor _O",
        "image",
        (
            _IMAGE,
            combo("upscale_method", ("nearest-exact", "bilinear", "area")),
            *(number(name, 1.25, 0.0, 10.0) for name in ("WidthFactor", "HeightFactor")),
            combo("MulOf46", ("enabled", "disabled")),
            _CROP,
        ),
        _image_scaled_by_sides,
        "IMAGE",
    ),
    _built(
        "Image Resize",
        "image",
        (
            _IMAGE,
            combo("mode", ("rescale", "resize")),
            combo("supersample", ("true", "false")),
            combo("resampling", ("lanczos", "nearest", "bilinear", "bicubic")),
            number("rescale_factor", 2.0, 0.01, 16.0),
            whole("resize_width", 1024, 1, MAX_SIDE),
            whole("resize_height", 1536, 1, MAX_SIDE),
        ),
        _resized_by_mode,
        "IMAGE",
    ),
)


def _canny(given: Mapping[str, Any]) -> tuple[Any, ...]:
    settings = {"low": given["low_threshold"], "high": given["high_threshold"]}
    return (_operate(given, NodeImage, "image_edges", {"image": given["image"]}, **settings),)


def _stitched(given: Mapping[str, Any]) -> tuple[Any, ...]:
    if given.get("image2") is None:
        return (given["image1"],)
    settings = {
        "direction": given["direction"],
        "matches": given["match_image_size"],
        "spacing": given["spacing_width"],
        "colour": given["spacing_color"],
    }
    values = {"first": given["image1"], "second": given["image2"]}
    return (_operate(given, NodeImage, "image_stitch", values, **settings),)


def _planes(given: Mapping[str, Any]) -> tuple[Any, ...]:
    nodes: MadeNodes = given["nodes"]
    values = {"image": given["image"]}
    return tuple(
        nodes.operate(f"{given['node_id']}/{plane}", "image_plane", NodeImage, values, {"plane": plane})
        for plane in PLANES
    )


def _split_alpha(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the image, and a black mask: images of LoadImage have no alpha channel here, as in ComfyUI."""
    return given["image"], _operate(given, NodeMask, "image_alpha_mask", {"image": given["image"]})


def _one_image(given: Mapping[str, Any]) -> tuple[Any, ...]:
    image = given["images"]
    count = max(getattr(image, "count", 1), getattr(image, "frames", 0))
    if given["batch_size"] < count:
        images = counted(count, "image")
        warn(given, f"batch_size: found {given['batch_size']}; {images} stay one batch, with seeds that count up")
    return (given["images"],)


_DETAILS = (
    _built(
        "Canny",
        "image",
        (_IMAGE, number("low_threshold", 0.4, 0.01, 0.99), number("high_threshold", 0.8, 0.01, 0.99)),
        _canny,
        "IMAGE",
    ),
    _row(
        "Morphology",
        "image",
        "IMAGE",
        (_IMAGE, combo("operation", MORPHOLOGY), whole("kernel_size", 3, 3, 999)),
        "image_morphology",
        settings={"operation": "operation", "kernel": "kernel_size"},
    ),
    _row(
        "ImageAddNoise",
        "image",
        "IMAGE",
        (_IMAGE, whole("seed", 0, 0, MAX_SEED), number("strength", 0.5, 0.0, 1.0)),
        "image_noise",
        settings=_same("seed", "strength"),
    ),
    _built(
        "ImageStitch",
        "image",
        (
            link("image1", "IMAGE"),
            combo("direction", DIRECTIONS),
            flag("match_image_size", True),
            whole("spacing_width", 0, 0, 1024),
            combo("spacing_color", tuple(COLOURS)),
            link("image2", "IMAGE", is_required=False),
        ),
        _stitched,
        "IMAGE",
    ),
    _row(
        "ResizeAndPadImage",
        "image",
        "IMAGE",
        (
            _IMAGE,
            whole("target_width", 512, 1, MAX_SIDE),
            whole("target_height", 512, 1, MAX_SIDE),
            combo("padding_color", ("white", "black")),
            combo("interpolation", ("area", "bicubic", "nearest-exact", "bilinear", "lanczos")),
        ),
        "image_letterbox",
        settings={
            "width": "target_width",
            "height": "target_height",
            "colour": "padding_color",
            "method": "interpolation",
        },
    ),
    _built("ImageRGBToYUV", "image", (_IMAGE,), _planes, "IMAGE", "IMAGE", "IMAGE"),
    _row(
        "ImageYUVToRGB",
        "image",
        "IMAGE",
        tuple(link(name, "IMAGE") for name in PLANES),
        "image_of_planes",
        _same(*PLANES),
    ),
    _row(
        "JoinImageWithAlpha",
        "image",
        "IMAGE",
        (_IMAGE, link("alpha", "MASK")),
        "image_with_alpha",
        {"image": "image", "mask": "alpha"},
    ),
)
_PASSED = (
    _built("SplitImageWithAlpha", "image", (_IMAGE,), _split_alpha, "IMAGE", "MASK"),
    _built("RebatchImages", "image", (link("images", "IMAGE"), whole("batch_size", 1, 1, 4096)), _one_image, "IMAGE"),
)
_BATCHES = (
    _row(
        "ImageBatch",
        "image",
        "IMAGE",
        (link("image1", "IMAGE"), link("image2", "IMAGE")),
        "image_batch",
        {"first": "image1", "second": "image2"},
    ),
    _row(
        "RepeatImageBatch",
        "image",
        "IMAGE",
        (_IMAGE, whole("amount", 1, 1, 4096)),
        "image_repeat",
        settings=_same("amount"),
    ),
    _row(
        "ImageFromBatch",
        "image",
        "IMAGE",
        (_IMAGE, whole("batch_index", 0, 0, 4095), whole("length", 1, 1, 4096)),
        "image_from_batch",
        settings={"start": "batch_index", "length": "length"},
    ),
)
_MASKS = (
    _built("MaskPreview", "mask", (_MASK,), _shown_mask, is_output=True),
    _built("MaskPreview+", "mask", (_MASK,), _shown_mask, is_output=True),
    _row("MaskToImage", "mask", "IMAGE", (_MASK,), "mask_to_image", {"mask": "mask"}),
    _row(
        "ImageColorToMask",
        "mask",
        "MASK",
        (_IMAGE, whole("color", 0, 0, 0xFFFFFF)),
        "mask_from_colour",
        {"image": "image"},
        {"colour": "color"},
    ),
    _row(
        "SolidMask",
        "mask",
        "MASK",
        (number("value", 1.0, 0.0, 1.0), *_SIDES),
        "mask_solid",
        {},
        {"level": "value", **_same("width", "height")},
    ),
    _row("CropMask", "mask", "MASK", (_MASK, *_XY, *_SIDES), "mask_crop", settings=_same("x", "y", "width", "height")),
    _row(
        "MaskComposite",
        "mask",
        "MASK",
        (link("destination", "MASK"), link("source", "MASK"), *_XY, combo("operation", COMPOSITIONS)),
        "mask_composite",
        _same("destination", "source"),
        {**_WHERE, "mode": "operation"},
    ),
    _row(
        "FeatherMask",
        "mask",
        "MASK",
        (_MASK, *_BORDER),
        "mask_feather",
        settings=_same("left", "top", "right", "bottom"),
    ),
    _row(
        "ThresholdMask",
        "mask",
        "MASK",
        (_MASK, number("value", 0.5, 0.0, 1.0)),
        "mask_threshold",
        settings={"level": "value"},
    ),
    _built(
        "GrowMaskWithBlur",
        "mask",
        (
            _MASK,
            whole("expand", 0, -MOST_GROWN, MOST_GROWN),
            number("incremental_expandrate", 0.0, 0.0, 100.0),
            flag("tapered_corners", True),
            flag("flip_input"),
            number("blur_radius", 0.0, 0.0, 100.0),
            number("lerp_alpha", 1.0, 0.0, 1.0),
            number("decay_factor", 1.0, 0.0, 1.0),
            flag("fill_holes", False, is_required=False),
        ),
        _grown_and_blurred,
        "MASK",
        "MASK",
    ),
)
_LATENT_ROWS = (
    _row(
        "LatentCrop",
        "latent",
        "LATENT",
        (_LATENT, *(whole(name, 512, 64, MAX_SIDE) for name in ("width", "height")), *_XY),
        "latent_crop",
        _SAMPLES,
        _same("x", "y", "width", "height"),
    ),
    _built("LatentFlip", "latent", (_LATENT, combo("flip_method", FLIPS)), _flipped, "LATENT"),
    _row(
        "LatentRotate",
        "latent",
        "LATENT",
        (_LATENT, combo("rotation", TURNS)),
        "latent_rotate",
        _SAMPLES,
        _same("rotation"),
    ),
    _row(
        "LatentComposite",
        "latent",
        "LATENT",
        (link("samples_to", "LATENT"), link("samples_from", "LATENT"), *_XY, whole("feather", 0, 0, MAX_SIDE)),
        "latent_composite",
        {"destination": "samples_to", "source": "samples_from"},
        {**_WHERE, "feather": "feather"},
    ),
    _row(
        "LatentCompositeMasked",
        "latent",
        "LATENT",
        (
            link("destination", "LATENT"),
            link("source", "LATENT"),
            *_XY,
            flag("resize_source"),
            link("mask", "MASK", is_required=False),
        ),
        "latent_composite",
        _same("destination", "source", "mask"),
        {**_WHERE, "resize": "resize_source"},
    ),
    _row("LatentAdd", "latent", "LATENT", _LATENTS, "latent_add", _TWO_LATENTS),
    _row("LatentSubtract", "latent", "LATENT", _LATENTS, "latent_subtract", _TWO_LATENTS),
    _row(
        "LatentMultiply",
        "latent",
        "LATENT",
        (_LATENT, number("multiplier", 1.0, -10.0, 10.0)),
        "latent_multiply",
        _SAMPLES,
        {"factor": "multiplier"},
    ),
    _row(
        "LatentInterpolate",
        "latent",
        "LATENT",
        (*_LATENTS, number("ratio", 1.0, 0.0, 1.0)),
        "latent_interpolate",
        _TWO_LATENTS,
        _same("ratio"),
    ),
    _row(
        "LatentBlend",
        "latent",
        "LATENT",
        (*_LATENTS, number("blend_factor", 0.5, 0.0, 1.0)),
        "latent_blend",
        _TWO_LATENTS,
        {"ratio": "blend_factor"},
    ),
    _built(
        "LatentUpscaleFactor _O",
        "latent",
        (*_BY_SIDES, *(number(name, 1.25, 0.0, 10.0) for name in ("WidthFactor", "HeightFactor")), _CROP),
        _scaled_by_sides,
        "LATENT",
    ),
    _built(
        "LatentUpscaleFactorSimple _O",
        "latent",
        (*_BY_SIDES, number("factor", 1.25, 0.0, 10.0), _CROP),
        _scaled_by_sides,
        "LATENT",
    ),
    _built(
        "Latent Upscale by Factor (WAS)",
        "latent",
        (
            _LATENT,
            combo("mode", ("area", "bicubic", "bilinear", "bislerp", "nearest")),
            number("factor", 2.0, 0.1, 8.0),
            combo("align", ("true", "false")),
        ),
        _scaled_latent,
        "LATENT",
    ),
)
_ROWS = (*_IMAGES, *_DETAILS, *_BATCHES, *_MASKS, *_LATENT_ROWS)
#: kinds of nodes
OPERATION_NODES = tuple(row.kind for row in (*_ROWS, *_PASSED))
#: what nodes become in workflows that pass an image on
PASSED_BUILDERS: Mapping[str, Builder] = MappingProxyType({row.kind.name: row.build for row in _PASSED})
_KONTEXT = {"sizes": tuple(side for size in KONTEXT_SIZES for side in size), "method": "lanczos"}
#: what nodes become in workflows, by kind; also nodes that requests without a workflow have for images of the user
OPERATION_BUILDERS: Mapping[str, Builder] = MappingProxyType(
    {
        **{row.kind.name: row.build for row in _ROWS},
        **dict(
            (
                _changed(
                    "ImageScaleToTotalPixels",
                    "image_scale_to_pixels",
                    {"method": "upscale_method", "megapixels": "megapixels", "multiple": "resolution_steps"},
                ),
                _changed("FluxKontextImageScale", "image_scale_to_nearest", {}, **_KONTEXT),
                _changed("ImageCrop", "image_crop", _same("x", "y", "width", "height")),
                _changed("ImageInvert", "image_invert", {}),
            )
        ),
        "ImagePadForOutpaint": _of_files("ImagePadForOutpaint", _padded),
        "GrowMask": _grown,
    }
)
