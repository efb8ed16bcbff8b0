"""ComfyUI nodes of images: loading, masks, sizes, the VAE, and saving. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from modelpool.actors.http.comfy.comfy_node_types import (
    IMAGES,
    MAX_SIDE,
    MOST_GROWN,
    UPSCALERS,
    NodeUnsupported,
    combo,
    flag,
    link,
    node_row,
    number,
    text,
    warn,
    warn_unread,
    whole,
)
from modelpool.actors.http.comfy.comfy_sampling_nodes import complete_latent, scale_to
from modelpool.actors.http.comfy.comfy_values import (
    BlankLatent,
    DecodedImage,
    EncodedImage,
    ImageCrop,
    ImageFile,
    ImageNegative,
    ImagePad,
    ImageScale,
    ImageStep,
    MaskFile,
    SampledLatent,
    ScaledLatent,
)

#: how an image is scaled; "bislerp" is for latents
SCALE_METHODS = ("nearest-exact", "bilinear", "area", "bicubic", "lanczos")
#: the one by which requests without a workflow scale images
UPSCALED_METHOD = "lanczos"
_METHOD = combo("upscale_method", SCALE_METHODS)
_IMAGE, _MASK, _PIXELS = link("image", "IMAGE"), link("mask", "MASK"), link("pixels", "IMAGE")
_CHANNELS = combo("channel", ("alpha", "red", "green", "blue"))
_TILES = (
    whole("tile_size", 512, 64, 4096),
    whole("overlap", 64, 0, 4096, is_required=False),
    whole("temporal_size", 64, 8, 4096, is_required=False),
    whole("temporal_overlap", 8, 4, 4096, is_required=False),
)
#: sizes that Flux Kontext was trained with, the narrow ones. Source: black-forest-labs/flux
_NARROW_SIZES = ((672, 1568), (688, 1504), (720, 1456), (752, 1392), (800, 1328), (832, 1248), (880, 1184), (944, 1104))
KONTEXT_SIZES = (*_NARROW_SIZES, (1024, 1024), *((height, width) for width, height in reversed(_NARROW_SIZES)))


def _loaded(given: Mapping[str, Any]) -> tuple[Any, ...]:
    image = ImageFile(given["image"])
    return image, MaskFile(image, "A")


def _loaded_mask(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (MaskFile(ImageFile(given["image"]), given["channel"][0].upper()),)


def _mask_of_image(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (MaskFile(_file(given["image"]), given["channel"][0].upper()),)


def _file(image: object, name: str = "image") -> ImageFile:
    if not isinstance(image, ImageFile):
        raise NodeUnsupported(f"{name}: expected an image of LoadImage")
    return image


def _inverted(given: Mapping[str, Any]) -> tuple[Any, ...]:
    mask: MaskFile = given["mask"]
    if mask.grown:
        raise NodeUnsupported("mask: expected one that was not grown before it is inverted")
    return (replace(mask, inverted=not mask.inverted),)


def _grown(given: Mapping[str, Any]) -> tuple[Any, ...]:
    if given["tapered_corners"] and given["expand"]:
        raise NodeUnsupported("tapered_corners: found true, expected false")
    if given["expand"] < 0:
        raise NodeUnsupported(f"expand: found {given['expand']}, a mask that shrinks, which is an operation")
    return (replace(given["mask"], grown=_total_grown(given["mask"], given["expand"])),)


def _total_grown(mask: MaskFile, by: int) -> int:
    if mask.grown + by > MOST_GROWN:
        raise NodeUnsupported(f"mask: found {mask.grown + by} pixels of growth, expected up to {MOST_GROWN}")
    return mask.grown + by


def _scaled(given: Mapping[str, Any]) -> tuple[Any, ...]:
    width, height, image = given["width"], given["height"], given["image"]
    if not width and not height:
        return (image,)
    if isinstance(image, DecodedImage):
        return (replace(image, scale=scale_to(image.latent, width, height), method=given["upscale_method"]),)
    scale = ImageScale(given["upscale_method"], size=(width, height), crops=given["crop"] == "center")
    return (with_step(image, scale),)


def _scaled_by_factor(given: Mapping[str, Any]) -> tuple[Any, ...]:
    if isinstance(given["image"], DecodedImage):
        return (replace(_scaled_by(given["image"], given["scale_by"]), method=given["upscale_method"]),)
    return (with_step(given["image"], ImageScale(given["upscale_method"], factor=given["scale_by"])),)


def _scaled_by(image: DecodedImage, factor: float) -> DecodedImage:
    if image.scale is None:
        raise NodeUnsupported("image: the factor of its upscaler is not known here; scale it to a width and a height")
    return replace(image, scale=image.scale * factor)


def _upscaler(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (given["model_name"],)


def _upscaled(given: Mapping[str, Any]) -> tuple[Any, ...]:
    image = given["image"]
    if not isinstance(image, DecodedImage) or image.scale != 1:
        raise NodeUnsupported("image: expected a generated image as it was decoded")
    return (replace(image, scale=None, upscaler=given["upscale_model"]),)


def _scaled_to_pixels(given: Mapping[str, Any]) -> tuple[Any, ...]:
    pixels = given["megapixels"] * 1024 * 1024
    scale = ImageScale(given["upscale_method"], pixels=pixels, multiple=given["resolution_steps"] or 1)
    return (with_step(_file(given["image"]), scale),)


def _scaled_for_kontext(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (with_step(_file(given["image"]), ImageScale("lanczos", sizes=KONTEXT_SIZES, crops=True)),)


def _padded(given: Mapping[str, Any]) -> tuple[Any, ...]:
    pad = ImagePad(given["left"], given["top"], given["right"], given["bottom"], given["feathering"])
    image = with_step(_file(given["image"]), pad)
    return image, MaskFile(image, "pad")


def _cropped(given: Mapping[str, Any]) -> tuple[Any, ...]:
    crop = ImageCrop(given["x"], given["y"], given["width"], given["height"])
    return (with_step(_file(given["image"]), crop),)


def _negative(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (with_step(_file(given["image"]), ImageNegative()),)


def with_step(image: ImageFile, step: ImageStep) -> ImageFile:
    """Return an image of the user with one more change. Raises NodeUnsupported for too many."""
    if len(image.steps) >= 8:
        raise NodeUnsupported("image: expected up to 8 changes")
    return replace(image, steps=(*image.steps, step))


def _encoded(given: Mapping[str, Any]) -> tuple[Any, ...]:
    image = given["pixels"]
    if isinstance(image, DecodedImage):
        if image.scale is None or image.scale <= 1:
            raise NodeUnsupported("pixels: a generated image is only encoded again after it was scaled up to a size")
        return (ScaledLatent(image.latent, image.scale, "image", image.upscaler, image.method),)
    return (EncodedImage(_file(image, "pixels"), vae=given["vae"].name),)


def _encoded_in_tiles(given: Mapping[str, Any]) -> tuple[Any, ...]:
    warn_of_encoder_tiles(given)
    return _encoded(given)


def warn_of_encoder_tiles(given: Mapping[str, Any]) -> None:
    """Tell the user of tiles by which images are encoded."""
    found = ", ".join(f"{each.name} {given[each.name]}" for each in _TILES if given.get(each.name) is not None)
    warn(given, f"{found}: not read: images are encoded in one piece")


def _encoded_for_inpainting(given: Mapping[str, Any]) -> tuple[Any, ...]:
    mask = replace(given["mask"], grown=_total_grown(given["mask"], given["grow_mask_by"]))
    return (EncodedImage(_file(given["pixels"], "pixels"), mask, hides=True, vae=given["vae"].name),)


def decoded_latent(given: Mapping[str, Any]) -> SampledLatent:
    """Return the latents that a node decodes. Raises NodeUnsupported for the VAE of another model."""
    latent = complete_latent(given["samples"])
    if given["vae"].name not in ("", latent.model.name):
        raise NodeUnsupported(f"vae: it is of {given['vae'].name}, expected that of {latent.model.name}")
    if latent.model.has_vae:
        warn_of_vae(given, latent.model.name)
    return latent


def warn_of_vae(given: Mapping[str, Any], model: str) -> None:
    """Tell the user of the file of a VAE that does not take the place of the model's own."""
    if given["vae"].file:
        warn(given, f"vae: found vae_name {given['vae'].file[:100]}, which is not read: the VAE of model {model!r} is")


def _decoded(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (DecodedImage(decoded_latent(given)),)


def tile_fields(given: Mapping[str, Any], size: tuple[int, int], frames: int) -> tuple[tuple[str, int], ...]:
    """Return the fields of a request for the tiles of VAEDecodeTiled; none for sides and frames that fit into one."""
    found: list[tuple[str, int]] = []
    tile = given["tile_size"] // 8 * 8
    if max(size) > tile or not any(size):
        found.append(("vae_tile", tile))
    if frames > (length := given["temporal_size"] or 64):
        found.append(("vae_frames", length))
    if found and given["overlap"] is not None and given["overlap"] * 4 != tile:
        warn(given, f"overlap: found {given['overlap']}; tiles of the pool overlap by a quarter, {tile // 4}")
    if "vae_frames" in dict(found):
        warn_unread(given, "temporal_overlap", f"tiles overlap by a quarter, {length // 4}", own=length // 4)
    return tuple(found)


def _decoded_in_tiles(given: Mapping[str, Any]) -> tuple[Any, ...]:
    (image,) = _decoded(given)
    start = image.latent.start
    while isinstance(start, ScaledLatent):
        start = start.latent.start
    size = (start.width, start.height) if isinstance(start, BlankLatent) and start is image.latent.start else (0, 0)
    return (replace(image, tiles=tile_fields(given, size, getattr(start, "frames", 0))),)


def _saved(given: Mapping[str, Any]) -> tuple[Any, ...]:
    image = given["images"]
    if not isinstance(image, DecodedImage):
        raise NodeUnsupported("images: expected images that are generated, from VAEDecode")
    if image.scale != 1 and not image.upscaler:
        raise NodeUnsupported("images: expected them as they were decoded, or sampled again after they were scaled")
    if image.scale not in (None, 1.0) and image.method not in ("", UPSCALED_METHOD):
        warn(given, f"images: upscale_method {image.method} is not read behind an upscaler: {UPSCALED_METHOD} is")
    if getattr(image.latent.start, "frames", 0):
        raise NodeUnsupported("images: found the frames of a video, each of which is a file")
    return (image,)


_row = partial(node_row, category="image")
IMAGE_NODES = (
    _row("LoadImage", (combo("image", IMAGES),), _loaded, "IMAGE", "MASK"),
    _row(
        "LoadImageOutput",
        (
            combo("image", IMAGES),
            flag("upload", False, is_required=False),
            text("refresh", "refresh", is_required=False),
        ),
        _loaded,
        "IMAGE",
        "MASK",
    ),
    _row("LoadImageMask", (combo("image", IMAGES), _CHANNELS), _loaded_mask, "MASK", category="mask"),
    _row("ImageToMask", (_IMAGE, _CHANNELS), _mask_of_image, "MASK", category="mask"),
    _row("InvertMask", (_MASK,), _inverted, "MASK", category="mask"),
    _row(
        "GrowMask",
        (_MASK, whole("expand", 0, -MOST_GROWN, MOST_GROWN), flag("tapered_corners", True)),
        _grown,
        "MASK",
        category="mask",
    ),
    _row(
        "ImageScale",
        (
            _IMAGE,
            _METHOD,
            whole("width", 512, 0, MAX_SIDE),
            whole("height", 512, 0, MAX_SIDE),
            combo("crop", ("disabled", "center")),
        ),
        _scaled,
        "IMAGE",
    ),
    _row("ImageScaleBy", (_IMAGE, _METHOD, number("scale_by", 1.0, 0.01, 8.0)), _scaled_by_factor, "IMAGE"),
    _row(
        "ImageScaleToTotalPixels",
        (
            _IMAGE,
            _METHOD,
            number("megapixels", 1.0, 0.01, 16.0),
            whole("resolution_steps", 1, 1, 256, is_required=False),
        ),
        _scaled_to_pixels,
        "IMAGE",
    ),
    _row(
        "UpscaleModelLoader", (text("model_name", choices=UPSCALERS),), _upscaler, "UPSCALE_MODEL", category="loaders"
    ),
    _row("ImageUpscaleWithModel", (link("upscale_model", "UPSCALE_MODEL"), _IMAGE), _upscaled, "IMAGE"),
    _row("FluxKontextImageScale", (_IMAGE,), _scaled_for_kontext, "IMAGE"),
    _row(
        "ImagePadForOutpaint",
        (
            _IMAGE,
            *(whole(name, 0, 0, MAX_SIDE) for name in ("left", "top", "right", "bottom")),
            whole("feathering", 40, 0, MAX_SIDE),
        ),
        _padded,
        "IMAGE",
        "MASK",
    ),
    _row(
        "ImageCrop",
        (
            _IMAGE,
            *(whole(name, 512, 1, MAX_SIDE) for name in ("width", "height")),
            *(whole(name, 0, 0, MAX_SIDE) for name in ("x", "y")),
        ),
        _cropped,
        "IMAGE",
    ),
    _row("ImageInvert", (_IMAGE,), _negative, "IMAGE"),
    _row("VAEEncode", (_PIXELS, link("vae", "VAE")), _encoded, "LATENT", category="latent"),
    _row("VAEEncodeTiled", (_PIXELS, link("vae", "VAE"), *_TILES), _encoded_in_tiles, "LATENT", category="latent"),
    _row(
        "VAEEncodeForInpaint",
        (_PIXELS, link("vae", "VAE"), _MASK, whole("grow_mask_by", 6, 0, MOST_GROWN)),
        _encoded_for_inpainting,
        "LATENT",
        category="latent",
    ),
    _row("VAEDecode", (link("samples", "LATENT"), link("vae", "VAE")), _decoded, "IMAGE", category="latent"),
    _row(
        "VAEDecodeTiled",
        (link("samples", "LATENT"), link("vae", "VAE"), *_TILES),
        _decoded_in_tiles,
        "IMAGE",
        category="latent",
    ),
    _row("SaveImage", (link("images", "IMAGE"), text("filename_prefix", "ComfyUI")), _saved, is_output=True),
    _row("PreviewImage", (link("images", "IMAGE"),), _saved, is_output=True),
    _row("SaveImageWebsocket", (link("images", "IMAGE"),), _saved, is_output=True),
)
