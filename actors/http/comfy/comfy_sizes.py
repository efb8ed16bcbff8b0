"""Sizes of images, masks and latents between the nodes of a ComfyUI workflow, as far as they are known before anything
is made: nodes that return a size need them. Pure.

A node that is not here, or reads something of an unknown size, makes something of an unknown size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

from modelpool.actors.http.comfy.comfy_image_nodes import KONTEXT_SIZES
from modelpool.actors.http.comfy.comfy_request_fields import whole_cells
from modelpool.pool.inference.operations.image_detail import Stitch, stitch_size
from modelpool.pool.inference.operations.image_scaling import shortest_size, size_wanted, whole_multiples
from modelpool.pool.inference.operations.operation import Size
from modelpool.pool.inference.operations.pack_edits import CropAt, Fit, crop_box, fit_size
from modelpool.pool.values.core.errors import UnusableField

#: width and height in pixels
Pixels: TypeAlias = "tuple[int, int]"
#: the size that a node makes, from its written inputs and the sizes of its linked ones; None if it is not known
SizeRule: TypeAlias = "Callable[[Mapping[str, Any], Mapping[str, Pixels]], Pixels | None]"

#: what a custom node that resizes under a condition calls its ways and its conditions
_FITS: Mapping[str, str] = MappingProxyType(
    {"stretch": "stretch", "keep proportion": "within", "fill / crop": "fill", "pad": "pad"}
)
_CONDITIONS: Mapping[str, str] = MappingProxyType(
    {"always": "always", "downscale if bigger": "larger", "upscale if smaller": "smaller",
     "if bigger area": "larger area", "if smaller area": "smaller area"}
)  # fmt: skip
_SIZES_OF_XL = (
    (1024, 1024), (1152, 896), (896, 1152), (1216, 832), (832, 1216), (1344, 768), (768, 1344), (1536, 640),
    (640, 1536),
)  # fmt: skip
#: nodes that make something as large as one of their inputs
_AS_LARGE = {
    "image": (
        "ImageInvert", "ImageBlur", "ImageSharpen", "ImageQuantize", "ImageFlip", "Canny", "Morphology",
        "ImageAddNoise", "LTXVPreprocess", "ImageFromBatch", "RepeatImageBatch", "ImageToMask", "ImageColorToMask",
        "SplitImageWithAlpha", "JoinImageWithAlpha", "AdjustBrightness", "AdjustContrast", "ImageRGBToYUV",
        "GetImageSizeAndCount", "ImageFromBatch+", "ImageFlip+", "ImageCASharpening+", "ImageDesaturate+",
        "ImagePosterize+", "ImageRemoveAlpha+", "ImageExpandBatch+", "MaskFromColor+", "MaskFromRGBCMYBW+",
    ),
    "images": (
        "RebatchImages", "GetImageRangeFromBatch", "Image Flip", "Images to RGB", "GetImagesFromBatchIndexed",
        "ImageSelector", "ReverseImageBatch", "ImageBatchRepeatInterleaving", "VHS_SplitImages",
        "VHS_SelectEveryNthImage", "VHS_DuplicateImages",
    ),
    "image_1": ("ImageBatchMultiple+",),
    "mask1": ("MaskBatch+", "AddMask", "SubtractMask"),
    "latent": ("GetLatentSizeAndCount",),
    "image1": ("ImageBatch", "ImageBlend"),
    "image_target": ("ColorMatch",),
    "images.image0": ("BatchImagesNode",),
    "destination": ("ImageCompositeMasked", "MaskComposite", "LatentCompositeMasked"),
    "mask": ("MaskToImage", "InvertMask", "GrowMask", "FeatherMask", "ThresholdMask", "GrowMaskWithBlur",
             "MaskBlur+", "MaskSmooth+", "MaskFlip+", "MaskExpandBatch+", "MaskFromBatch+", "ImpactGaussianBlurMask",
             "ToBinaryMask"),
    "samples": (
        "VAEDecode", "VAEDecodeTiled", "SetLatentNoiseMask", "LatentFromBatch", "RepeatLatentBatch", "LatentFlip",
        "LatentMultiply", "LatentBatchSeedBehavior",
    ),
    "samples1": ("LatentBatch", "LatentBlend", "LatentInterpolate", "LatentAdd", "LatentSubtract"),
    "samples_to": ("LatentComposite",),
    "latent_image": ("KSampler", "KSamplerAdvanced", "SamplerCustom", "SamplerCustomAdvanced", "KSampler (Efficient)",
                     "KSampler //Inspire"),
    "upscaled_image": ("UltimateSDUpscaleNoUpscale",),
    "masks.mask0": ("BatchMasksNode",),
}  # fmt: skip
#: nodes that have a width and a height
_WRITTEN = (
    "EmptyFlux2LatentImage", "EmptyImage", "SolidMask", "Colored Image (mtb)", "JWImageResize",
    "EmptyHunyuanLatentVideo", "EmptyLTXVLatentVideo", "EmptyMochiLatentVideo", "EmptyCosmosLatentVideo",
    "WanImageToVideo", "WanFirstLastFrameToVideo", "WanVaceToVideo", "Wan22ImageToVideoLatent", "HunyuanImageToVideo",
    "LTXVImgToVideo", "SVD_img2vid_Conditioning",
)  # fmt: skip
#: the same of latents: parts of a cell are cut off
_WRITTEN_CELLS = ("EmptyLatentImage", "EmptySD3LatentImage")
#: nodes that encode an image: parts of a cell are cut off
_ENCODING = ("VAEEncode", "VAEEncodeTiled", "VAEEncodeForInpaint", "InpaintModelConditioning",
             "InstructPixToPixConditioning")  # fmt: skip


def _as_large(name: str) -> SizeRule:
    return lambda given, sizes: sizes.get(name)


def _written(given: Mapping[str, Any], sizes: Mapping[str, Pixels]) -> Pixels | None:
    return given["width"], given["height"]


def _written_cells(given: Mapping[str, Any], sizes: Mapping[str, Pixels]) -> Pixels | None:
    return _in_cells((given["width"], given["height"]))


def _loaded(given: Mapping[str, Any], sizes: Mapping[str, Pixels]) -> Pixels | None:
    return _in_cells((given["empty_latent_width"], given["empty_latent_height"]))


def _encoded(given: Mapping[str, Any], sizes: Mapping[str, Pixels]) -> Pixels | None:
    return _in_cells(sizes["pixels"]) if "pixels" in sizes else None


def _in_cells(size: Pixels) -> Pixels:
    found = whole_cells(*size)
    return found["width"], found["height"]


def _scaled(name: str, least: int) -> SizeRule:
    def rule(given: Mapping[str, Any], sizes: Mapping[str, Pixels]) -> Pixels | None:
        wide, high = given["width"], given["height"]
        if wide and high:  # of whatever size the image is
            return max(least, wide), max(least, high)
        if name not in sizes:
            return None
        width, height = sizes[name]
        if not wide and not high:
            return width, height
        return (
            max(least, wide or round(width * high / height)),
            max(least, high or round(height * wide / width)),
        )

    return rule


def _enlarged(given: Mapping[str, Any], sizes: Mapping[str, Pixels]) -> Pixels | None:
    return None if "image" not in sizes else _times(sizes["image"], given["upscale_by"])


def _by_factor(name: str) -> SizeRule:
    def rule(given: Mapping[str, Any], sizes: Mapping[str, Pixels]) -> Pixels | None:
        factor = given["scale_by"] if "scale_by" in given else given["factor"]
        return None if name not in sizes else _times(sizes[name], factor)

    return rule


def _times(size: Pixels, factor: float, multiple: int = 1) -> Pixels:
    width, height = (max(1, round(side * factor / multiple)) * multiple for side in size)
    return width, height


def _to_pixels(given: Mapping[str, Any], sizes: Mapping[str, Pixels]) -> Pixels | None:
    if "image" not in sizes:
        return None
    width, height = sizes["image"]
    factor = math.sqrt(given["megapixels"] * 1024 * 1024 / (width * height))
    return _times((width, height), factor, given.get("resolution_steps") or 1)


def _to_longest(given: Mapping[str, Any], sizes: Mapping[str, Pixels]) -> Pixels | None:
    if "image" not in sizes:
        return None
    width, height = sizes["image"]
    longest = given["largest_size"] if "largest_size" in given else given["size"]
    if height > width:
        return max(1, round(width * longest / height)), longest
    return longest, max(1, round(height * longest / width))


def _for_kontext(given: Mapping[str, Any], sizes: Mapping[str, Pixels]) -> Pixels | None:
    if "image" not in sizes:
        return None
    width, height = sizes["image"]
    return min(KONTEXT_SIZES, key=lambda each: abs(width / height - each[0] / each[1]))


def _padded(given: Mapping[str, Any], sizes: Mapping[str, Pixels]) -> Pixels | None:
    if "image" not in sizes:
        return None
    width, height = sizes["image"]
    return width + given["left"] + given["right"], height + given["top"] + given["bottom"]


def _cropped(given: Mapping[str, Any], sizes: Mapping[str, Pixels]) -> Pixels | None:
    if "image" not in sizes:
        return None
    width, height = sizes["image"]
    left, top = min(given["x"], width - 1), min(given["y"], height - 1)
    return min(given["width"], width - left), min(given["height"], height - top)


def _stitched(given: Mapping[str, Any], sizes: Mapping[str, Pixels]) -> Pixels | None:
    if "image1" not in sizes or ("image2" in given and "image2" not in sizes):
        return None
    if "image2" not in sizes:
        return sizes["image1"]
    params = Stitch(given["direction"], given["match_image_size"], given["spacing_width"], given["spacing_color"])
    found = stitch_size(params, {"first": Size(*sizes["image1"]), "second": Size(*sizes["image2"])})
    return found.width, found.height


def _letterboxed(given: Mapping[str, Any], sizes: Mapping[str, Pixels]) -> Pixels | None:
    return given["target_width"], given["target_height"]


def fit_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a fit from the inputs of a custom node that resizes under a condition."""
    return {
        "width": given["width"],
        "height": given["height"],
        "method": given["interpolation"],
        "how": _FITS[given["method"]],
        "condition": _CONDITIONS[given["condition"]],
        "multiple": given["multiple_of"],
    }


def _within(given: Mapping[str, Any], sizes: Mapping[str, Pixels]) -> Pixels | None:
    """The size of a custom node that resizes under a condition."""
    if "image" not in sizes:
        return None
    if given["condition"] == "always" and given["multiple_of"] <= 1:
        if given["method"] in ("stretch", "fill / crop") and given["width"] and given["height"]:
            return given["width"], given["height"]
        if given["method"] == "keep proportion":
            sides = zip((given["width"], given["height"]), sizes["image"], strict=True)
            return _times(sizes["image"], min((wanted / side for wanted, side in sides if wanted), default=1.0))
    try:
        found = fit_size(Fit(**fit_settings(given)), Size(*sizes["image"]))
    except UnusableField:  # the operation names it
        return None
    return found.width, found.height


def _crop_box(given: Mapping[str, Any], size: Pixels) -> tuple[int, int, Size] | None:
    """Return the corner and the size of a part at a named place; None if the operation refuses it."""
    names = {"width": "width", "height": "height", "position": "position", "x": "x_offset", "y": "y_offset"}
    try:
        return crop_box(CropAt(**{name: given[each] for name, each in names.items()}), Size(*size))
    except UnusableField:
        return None


def _cropped_at(given: Mapping[str, Any], sizes: Mapping[str, Pixels]) -> Pixels | None:
    """The size of a custom node that crops at a named place."""
    box = _crop_box(given, sizes["image"]) if "image" in sizes else None
    return None if box is None else (box[2].width, box[2].height)


def _corner(given: Mapping[str, Any], size: Pixels) -> Pixels | None:
    box = _crop_box(given, size)
    return None if box is None else box[:2]


def _to_shortest(given: Mapping[str, Any], sizes: Mapping[str, Pixels]) -> Pixels | None:
    if "image" not in sizes:
        return None
    found = shortest_size(Size(*sizes["image"]), given["size"])
    return found.width, found.height


def _resized(given: Mapping[str, Any], sizes: Mapping[str, Pixels]) -> Pixels | None:
    """The size of ResizeImageMaskNode."""
    if "input" not in sizes:
        return None
    kind, settings = given["resize_type"], {name.partition(".")[2]: value for name, value in given.items()}
    width, height = settings.get("width", 0), settings.get("height", 0)
    own = Size(*sizes["input"])
    match kind:
        case "scale by multiplier":
            return _times(sizes["input"], settings["multiplier"])
        case "scale dimensions" | "scale width" | "scale height":
            wanted = (0 if kind == "scale height" else width, 0 if kind == "scale width" else height)
            found = size_wanted(own, *wanted)
        case "scale longer dimension":
            return _to_longest({"largest_size": settings["longer_size"]}, {"image": sizes["input"]})
        case "scale shorter dimension":
            found = shortest_size(own, settings["shorter_size"])
        case "scale total pixels":
            return _to_pixels({"megapixels": settings["megapixels"]}, {"image": sizes["input"]})
        case "match size":
            return sizes.get("resize_type.match")
        case _:
            found = whole_multiples(own, settings["multiple"])
    return found.width, found.height


def _resized_whole(given: Mapping[str, Any], sizes: Mapping[str, Pixels]) -> Pixels | None:
    """The size of a custom node of which the settings are settled."""
    step = max(1, given["divisible_by"])
    if given["keep_proportion"] not in (False, "stretch", "crop") or not given["width"] or not given["height"]:
        return None
    return given["width"] // step * step, given["height"] // step * step


def settled(kind: str, given: Mapping[str, Any], sizes: Mapping[str, Pixels]) -> dict[str, Any]:
    """Return the settings of a node that follow from the known size of its image: width and height, for nodes that
    resize in proportion or to the size of another image. A setting that is used up is None. {} for all other nodes."""
    if kind not in ("ImageResizeKJ", "ImageResizeKJv2") or "image" not in sizes:
        return {}
    (wide, high), how = sizes["image"], given.get("keep_proportion")
    wanted = [given.get(f"{name}_input") or given.get(name) for name in ("width", "height")]
    if kind == "ImageResizeKJ" and "get_image_size" in given:
        if "get_image_size" not in sizes:
            return {}
        like = dict(zip(("width", "height"), sizes["get_image_size"], strict=True))
        alone = dict.fromkeys(("width_input", "height_input", "get_image_size"))
        return {**like, "keep_proportion": False, "divisible_by": 1, **alone}
    if not all(isinstance(each, int) and each >= 0 for each in wanted):
        return {}
    width, height = wanted
    if how in (True, "resize"):
        ratio = min((one / side for one, side in ((width, wide), (height, high)) if one), default=1.0)
        width, height = round(wide * ratio), round(high * ratio)
        how = False if kind == "ImageResizeKJ" else "stretch"
    elif how in (False, "stretch"):
        width, height = width or wide, height or high
    else:
        return {}
    given_before = ("width_input", "height_input", "get_image_size") if kind == "ImageResizeKJ" else ()
    return {"width": width, "height": height, "keep_proportion": how, **dict.fromkeys(given_before)}


def nearest_of_xl(size: Pixels) -> Pixels:
    """Return the size of Stable Diffusion XL with the ratio of sides that is nearest to a size's; the first one of
    equally near ones. Source: the table of ComfyMath."""
    return min(_SIZES_OF_XL, key=lambda each: abs(size[0] / max(1, size[1]) - each[0] / each[1]))


def _of_images(rule: SizeRule, name: str, setting: str) -> SizeRule:
    """Return the rule of a node that calls its image and its side otherwise."""
    return lambda given, sizes: rule({setting: given[name]}, {"image": sizes["images"]} if "images" in sizes else {})


#: what the sizes of nodes follow from, by their kind
SIZE_RULES: Mapping[str, SizeRule] = MappingProxyType(
    {
        **{name: _as_large(source) for source, names in _AS_LARGE.items() for name in names},
        **dict.fromkeys(_WRITTEN, _written),
        **dict.fromkeys(_WRITTEN_CELLS, _written_cells),
        **dict.fromkeys(_ENCODING, _encoded),
        "Efficient Loader": _loaded,
        "ImageScale": _scaled("image", 1),
        "LatentUpscale": _scaled("samples", 64),
        **dict.fromkeys(("ImageScaleBy", "JWImageResizeByFactor"), _by_factor("image")),
        "LatentUpscaleBy": _by_factor("samples"),
        "ImageScaleToTotalPixels": _to_pixels,
        **dict.fromkeys(("ImageScaleToMaxDimension", "JWImageResizeByLongerSide"), _to_longest),
        "FluxKontextImageScale": _for_kontext,
        "ImagePadForOutpaint": _padded,
        "ImageCrop": _cropped,
        "ImageStitch": _stitched,
        "ResizeAndPadImage": _letterboxed,
        "ImageResize+": _within,
        "ImageCrop+": _cropped_at,
        "ResizeImagesByLongerEdge": _of_images(_to_longest, "longer_edge", "largest_size"),
        "ResizeImagesByShorterEdge": _of_images(_to_shortest, "shorter_edge", "size"),
        "JWImageResizeByShorterSide": _to_shortest,
        "ResizeImageMaskNode": _resized,
        **dict.fromkeys(("UltimateSDUpscale", "UltimateSDUpscaleCustomSample"), _enlarged),
        **dict.fromkeys(("ImageResizeKJ", "ImageResizeKJv2"), _resized_whole),
    }
)
#: the corner of the part of an image that a node keeps, by its kind: an output of the node
CORNERS_OF_CROPS: Mapping[str, Callable[[Mapping[str, Any], Pixels], Pixels | None]] = MappingProxyType(
    {"ImageCrop+": _corner}
)
#: nodes of a size, each with the input of which it is, unless they make one of their own, and what its outputs are:
#: "image" is passed on
SIZE_NODES: Mapping[str, tuple[str, tuple[str, ...]]] = MappingProxyType(
    {
        "GetImageSize": ("image", ("width", "height", "count")),
        "GetImageSize+": ("image", ("width", "height", "count")),
        "GetImageSizeAndCount": ("image", ("image", "width", "height", "count")),
        "Image Size to Number": ("image", ("width", "height", "width", "height", "width", "height")),
        "easy imageSize": ("image", ("width", "height")),
        "easy imageSizeBySide": ("image", ("side",)),
        "easy imageSizeByLongerSide": ("image", ("longest",)),
        "Get resolution [Crystools]": ("image", ("width", "height")),
        "Image or Latent Size (rgthree)": ("input", ("width", "height")),
        "GetImage_(Width&Height) _O": ("image", ("width", "height")),
        "CM_NearestSDXLResolution": ("image", ("sdxl_width", "sdxl_height")),
        "LayerUtility: GetImageSize": ("image", ("width", "height", "")),
        **dict.fromkeys(("ImageResize+", "ImageResizeKJ", "ImageResizeKJv2"), ("image", ("", "width", "height"))),
    }
)
