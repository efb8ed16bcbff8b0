"""Loads the images and masks of a ComfyUI workflow, and does with them what its nodes say."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from modelpool.actors.http.comfy.comfy_node_types import NodeUnsupported
from modelpool.actors.http.comfy.comfy_values import (
    AnyImage,
    ImageCrop,
    ImageFile,
    ImageNegative,
    ImagePad,
    ImageScale,
    ImageStep,
    MaskFile,
    crop_to_cells,
)
from modelpool.actors.http.service.caller_images import MAX_CALL_PIXELS
from modelpool.actors.request.image_decoding import MAX_SIDE, UprightImage, image_of_bytes, upright_image
from modelpool.pool.inference.operations.image_detail import extreme
from modelpool.pool.values.core.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

#: a tag of Exif, and its values for images that lie on a side
_ORIENTATION, _TURNED = 0x0112, (5, 6, 7, 8)
#: nodes that load an image of the user
LOADS_IMAGE = ("LoadImage", "LoadImageOutput", "LoadImageMask")
#: the ones of which ComfyUI reads all frames. Source: `load_image` of `LoadImage`, and of `LoadImageMask`, in nodes.py
LOADS_FRAMES = ("LoadImage", "LoadImageOutput")
#: formats of several frames or pages, by Pillow's names. Others have views of one image (MPO), or its layers (PSD)
_ANIMATED = ("GIF", "PNG", "WEBP", "AVIF", "TIFF")
#: a tag of TIFF and its bit for reduced copies of another page, and the pages that are looked at
_SUBFILE_TYPE, _REDUCED, _MOST_PAGES = 254, 1, 64
#: opens an uploaded image by its name; its pixels are not read yet
ReadImage: TypeAlias = "Callable[[str], Image]"


def image_size_of(read: ReadImage) -> Callable[[str], tuple[int, int]]:
    """Return a function of the name of an image that returns its width and height; its pixels are not read."""

    def size(name: str) -> tuple[int, int]:
        image = read(name)
        width, height = image.size
        # of a PNG without Exif before its pixels, Pillow would read all of them
        has_exif = image.format != "PNG" or "exif" in image.info
        is_turned = has_exif and image.getexif().get(_ORIENTATION, 1) in _TURNED
        return (height, width) if is_turned else (width, height)

    return size


def is_animation_of(read: ReadImage) -> Callable[[str], bool]:
    """Return a function of the name of an image that returns whether the file has several frames or pages that ComfyUI
    reads: pages of the size of the first one. Thumbnails are none."""

    def is_animation(name: str) -> bool:
        image = read(name)
        try:
            if image.format not in _ANIMATED or not getattr(image, "is_animated", False):
                return False
            return image.format != "TIFF" or _has_page_alike(image)
        except Exception:  # Pillow looks for the second frame: decoders raise arbitrary exceptions for damaged files
            return False

    return is_animation


def _has_page_alike(image: Image) -> bool:
    """Return whether another page of a TIFF has the size of the first one, and is no reduced copy of it; only headers
    of the first pages are read."""
    size, pages = image.size, min(int(getattr(image, "n_frames", 1)), _MOST_PAGES)
    for page in range(1, pages):
        image.seek(page)
        kind = getattr(image, "tag_v2", {}).get(_SUBFILE_TYPE, 0)
        if image.size == size and not kind & _REDUCED:
            return True
    return False


class WorkflowImages:
    """Reads the images of a workflow. One image may be used by every node: all uses together have a bound in pixels."""

    def __init__(
        self, read: ReadImage, most_pixels: int = MAX_CALL_PIXELS, take: Callable[[int], None] | None = None
    ) -> None:
        self._read = read
        self._take = take
        self._most_pixels = self._left_pixels = most_pixels

    def __call__(self, name: str) -> UprightImage:
        """Read an image. Raises NodeUnsupported if there are too many pixels, UserError, and what the reader raises."""
        image = self._read(name)
        self.take(image.size)
        return upright_image(name, image)

    def take(self, size: tuple[int, int]) -> None:
        """Count an image of this size. Raises NodeUnsupported if there are too many pixels, and HttpProblem (429) for
        too many of one user."""
        self._left_pixels -= size[0] * size[1]
        if self._left_pixels < 0:
            raise NodeUnsupported(
                f"images: found more than {self._most_pixels} pixels in all uses of images, after scaling"
            )
        if self._take is not None:
            self._take(size[0] * size[1])


#: pixels of an image that was scaled or padded: a few bytes of a workflow must not take much memory
MOST_PIXELS = 1 << 24
#: Pillow's filters for ComfyUI's names
_FILTERS = {
    "nearest-exact": "NEAREST",
    "bilinear": "BILINEAR",
    "area": "BOX",
    "bicubic": "BICUBIC",
    "lanczos": "LANCZOS",
}
_GRAY, _OPAQUE = (128, 128, 128), 255


def read_steps(image: AnyImage, read: WorkflowImages) -> Image:
    """Return an image as the nodes behind its loader leave it: RGB. As in ComfyUI, it has the colours of its
    transparent areas, and only masks read its alpha channel. Raises UserError."""
    assert isinstance(image, ImageFile), "images that nodes make are in workflows"
    return _after_steps(read(image.name).colours, image.steps, read)


def _after_steps(image: Image, steps: Sequence[ImageStep], read: WorkflowImages) -> Image:
    for step in steps:
        image = _after_step(image, step)
        read.take(image.size)
    return image


def read_mask(mask: MaskFile, read: WorkflowImages, size: tuple[int, int] | None = None) -> Image:
    """Return a mask that is white where the image is regenerated; scaled to the `size` of that image, as ComfyUI scales
    the mask of an image that was scaled after it was loaded. Raises UserError."""
    from PIL import ImageOps
    from PIL.Image import Resampling

    inverted = mask.inverted
    if mask.channel == "A":
        channel, inverted = _after_steps(_alpha_of(read(mask.image.name)), mask.image.steps, read), not inverted
    elif mask.channel == "pad":
        step = mask.image.steps[-1]
        assert isinstance(step, ImagePad), "the mask of a padded image"
        channel = _pad_mask(read_steps(mask.image, read).size, step)
    else:
        channel = read_steps(mask.image, read).getchannel(mask.channel)
    if inverted:
        channel = ImageOps.invert(channel)
    if mask.grown:
        channel = _grown(channel, mask.grown)
    if size is None or size == channel.size:
        return channel
    read.take(size)
    return channel.resize(size, Resampling.BILINEAR)


def _grown(mask: Image, pixels: int) -> Image:
    """Return a mask of which each pixel is the largest one of a square around it, with so many pixels on each side."""
    import numpy as np
    import PIL.Image

    values_THWC = np.asarray(mask)[None, :, :, None]
    return PIL.Image.fromarray(extreme(values_THWC, 2 * pixels + 1, np.maximum)[0, :, :, 0])


def in_whole_cells(image: Image) -> Image:
    """Return the part of an image or a mask that the VAE encodes (`crop_to_cells`)."""
    crop = crop_to_cells(*image.size)
    return image if crop is None else _cropped(image, crop)


def is_black(mask: Image) -> bool:
    """Whether a mask regenerates nothing: a request refuses it, as it is more likely a mistake there."""
    return mask.getbbox() is None


def with_alpha(original: bytes, mask: bytes) -> bytes:
    """Return an image file as PNG with the alpha channel of another one of the same size. Raises UserError."""
    from io import BytesIO

    image = upright_image("original_ref", image_of_bytes("original_ref", original))
    alpha = upright_image("image", image_of_bytes("image", mask))
    if image.size != alpha.size:
        found, expected = ("x".join(map(str, each.size)) for each in (alpha, image))
        raise UserError(f"image: found a mask of {found}, expected {expected}, the size of the image")
    whole = image.colours.copy()
    whole.putalpha(_alpha_of(alpha))
    content = BytesIO()
    whole.save(content, "PNG")
    return content.getvalue()


def _alpha_of(image: UprightImage) -> Image:
    """Return the alpha channel of an image, which is white for one without transparency."""
    import PIL.Image

    return PIL.Image.new("L", image.size, _OPAQUE) if image.alpha is None else image.alpha


def _after_step(image: Image, step: ImageStep) -> Image:
    """Return the colours (RGB) or the alpha channel (L) of an image after a node."""
    match step:
        case ImageScale():
            return _scaled(image, step)
        case ImagePad():
            return _padded(image, step)
        case ImageCrop():
            return _cropped(image, step)
        case ImageNegative():
            return _negative(image)


def _cropped(image: Image, crop: ImageCrop) -> Image:
    left, top = min(crop.x, image.width - 1), min(crop.y, image.height - 1)
    return image.crop((left, top, min(left + crop.width, image.width), min(top + crop.height, image.height)))


def _negative(image: Image) -> Image:
    from PIL import ImageOps

    return ImageOps.invert(image) if image.mode == "RGB" else image


def _scaled(image: Image, scale: ImageScale) -> Image:
    import PIL.Image

    size = _size_after(image.size, scale)
    _check_size(size)
    if scale.crops:
        image = image.crop(_middle(image.size, size))
    return image.resize(size, PIL.Image.Resampling[_FILTERS[scale.method]])


def _size_after(size: tuple[int, int], scale: ImageScale) -> tuple[int, int]:
    width, height = size
    if scale.sizes:
        return min(scale.sizes, key=lambda each: abs(width / height - each[0] / each[1]))
    if scale.size is not None:
        wanted_width, wanted_height = scale.size
        return (
            wanted_width or max(1, round(width * wanted_height / height)),
            wanted_height or max(1, round(height * wanted_width / width)),
        )
    factor = math.sqrt(scale.pixels / (width * height)) if scale.pixels is not None else scale.factor
    assert factor is not None, "a size, a factor or a number of pixels"
    wide, high = (max(1, round(side * factor / scale.multiple)) * scale.multiple for side in size)
    return wide, high


def _middle(size: tuple[int, int], wanted: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return the largest box in the middle of an image that has the shape of `wanted`."""
    width, height = size
    box_width = min(width, max(1, round(height * wanted[0] / wanted[1])))
    box_height = min(height, max(1, round(width * wanted[1] / wanted[0])))
    left, top = (width - box_width) // 2, (height - box_height) // 2
    return left, top, left + box_width, top + box_height


def _padded(image: Image, pad: ImagePad) -> Image:
    import PIL.Image

    size = image.width + pad.left + pad.right, image.height + pad.top + pad.bottom
    _check_size(size)
    padded = PIL.Image.new(image.mode, size, _GRAY if image.mode == "RGB" else _OPAQUE)
    padded.paste(image, (pad.left, pad.top))
    return padded


def _pad_mask(size: tuple[int, int], pad: ImagePad) -> Image:
    """Return a mask that is white in the space around an image, and fades inside it by the square of the distance from
    each side that has some space."""
    import numpy as np
    import PIL.Image

    width, height = size
    inner = (slice(pad.top, height - pad.bottom), slice(pad.left, width - pad.right))
    mask_HW = np.ones((height, width), np.float32)
    inner_height, inner_width = mask_HW[inner].shape
    far = float(max(size))
    rows, columns = np.arange(inner_height, dtype=np.float32), np.arange(inner_width, dtype=np.float32)
    from_rows = np.minimum(
        rows if pad.top else np.full_like(rows, far), rows[::-1] if pad.bottom else np.full_like(rows, far)
    )
    from_columns = np.minimum(
        columns if pad.left else np.full_like(columns, far),
        columns[::-1] if pad.right else np.full_like(columns, far),
    )
    distance = np.minimum(from_rows[:, None], from_columns[None, :])
    fits = pad.feathering > 0 and pad.feathering * 2 < min(inner_height, inner_width)
    mask_HW[inner] = np.clip(1 - distance / pad.feathering, 0, 1) ** 2 if fits else 0.0
    return PIL.Image.fromarray((mask_HW * 255).astype(np.uint8))


def _check_size(size: tuple[int, int]) -> None:
    if max(size) > MAX_SIDE or size[0] * size[1] > MOST_PIXELS:
        expected = f"sides up to {MAX_SIDE} and up to {MOST_PIXELS} pixels"
        raise NodeUnsupported(f"image: found {size[0]}x{size[1]} after scaling, expected {expected}")
