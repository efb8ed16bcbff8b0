"""Decodes images: the one place where the bytes that a user gives become pixels, for every interface, file and field.

Rules
1. An image is upright: its orientation (EXIF or XMP) is applied once, here. What leaves this module has no metadata.
2. Channels have 8 bits. 16-bit grey values are divided by 257 and rounded; of 16-bit colours Pillow reads the high
   byte, which is within one level. CMYK is converted by Pillow's formula; colour profiles are not applied.
3. Transparency stays apart from the colours. The interface decides: over white, over black (masks), or as a mask.
4. Of an animation, the frame at which the image is counts: the first one of a file.
5. What has no 8-bit meaning is refused by the name of its mode: floating-point images, Lab, and integers beyond 16
   bits.

Torch-free, ray-free; imports Pillow and numpy when an image is read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

from modelpool.pool.files.formats.regular_file import open_regular
from modelpool.pool.values.core.errors import CorruptFile, UnusableField, UserError, counted, unusable_field

if TYPE_CHECKING:
    from PIL.Image import Image

    from modelpool.pool.values.core.stage_params import PixelArray

#: most pixels on one side, and in total; reading takes four bytes each
MAX_SIDE, MAX_PIXELS = 16384, 1 << 26
#: errors of Pillow for many more than that; the second one where warnings are errors
_TOO_MANY_PIXELS = ("DecompressionBombError", "DecompressionBombWarning")
#: image formats that are read, by Pillow's names. The other formats of Pillow need external programs (EPS), are not
#: images, or are very rare
IMAGE_FORMATS = (
    *("PNG", "JPEG", "MPO", "WEBP", "AVIF", "JPEG2000", "GIF", "BMP", "TIFF", "PPM"),
    *("TGA", "QOI", "ICO", "PCX", "SGI", "PSD"),
)
#: Pillow's modes of 16-bit grey, and every mode that is read
_GREY_16 = ("I;16", "I;16B", "I;16L", "I;16N")
_MODES = frozenset(
    ("1", "L", "P", "PA", "LA", "La", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV", "I", *_GREY_16)
)
_EXPECTED = "8 bits per channel, or 16-bit grey"
_MOST_16, _MOST_8 = 65535, 255
#: names of Pillow's turns that make an image upright, by its orientation. Source: EXIF 2.32, tag 0x0112
_ORIENTATION = 0x0112
_TURNS: Mapping[object, str] = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
#: factors of grey PNGs with fewer than 8 bits, by Pillow's names. Their transparent grey value is not multiplied by it
_GREY_FACTORS = {"L;2": 85, "L;4": 17}
#: TIFF tags. Source: TIFF 6.0
_BITS_PER_SAMPLE, _PHOTOMETRIC = 258, 262


@dataclass(frozen=True, slots=True)
class UprightImage:
    """An image as it is shown, with 8 bits per channel and without metadata.

    colours  RGB, also where the image is transparent
    alpha    L; None for an image without transparency
    """

    colours: Image
    alpha: Image | None = None

    @property
    def size(self) -> tuple[int, int]:
        return self.colours.size

    def on_white(self) -> Image:
        """Return RGB with the transparent areas over white."""
        return self._over("white")

    def as_mask(self) -> Image:
        """Return grey values (L) with the transparent areas over black."""
        return self._over("black").convert("L")

    def _over(self, background: str) -> Image:
        import PIL.Image

        if self.alpha is None:
            return self.colours
        above = self.colours.copy()
        above.putalpha(self.alpha)
        return PIL.Image.alpha_composite(PIL.Image.new("RGBA", self.size, background), above).convert("RGB")


@contextmanager
def open_image(name: str, path: str) -> Iterator[Image]:
    """Open the image at `path`, read its header, and check its size and mode. Raises UserError naming the field `name`,
    also for a path that is not a regular file."""
    from PIL import Image, UnidentifiedImageError

    if not os.path.exists(path):
        raise unusable_field(name, path, "an existing file")
    try:
        with open_regular(path, "an image") as (file, _):
            try:
                image = Image.open(file, formats=_readable())
            except UnidentifiedImageError:
                expected = f"expected one of {', '.join(IMAGE_FORMATS)}"
                raise UserError(f"{name}: {path} cannot be read as an image, {expected}") from None
            except Exception as error:  # decoders raise arbitrary exceptions for damaged files
                if type(error).__name__ in _TOO_MANY_PIXELS:
                    raise _too_large(f"{name}: {path}", "more pixels than Pillow reads") from None
                raise UserError(f"{name}: {path} cannot be read as an image ({error})") from None
            with image:
                _check_header(name, image)
                yield image
    except CorruptFile as problem:
        raise UserError(f"{name}: {problem}") from None
    except UserError as problem:
        beginning = f"{name}: "
        message = str(problem)
        if path in message or not message.startswith(beginning):
            raise
        raise UnusableField(f"{beginning}{path}: {message.removeprefix(beginning)}") from None


def image_of_bytes(name: str, content: bytes) -> Image:
    """Return the image in the content of a file with its size and mode checked; its pixels are read later. Raises
    UserError naming the field `name`.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        image = Image.open(BytesIO(content), formats=_readable())
    except UnidentifiedImageError:
        raise UserError(
            f"{name}: {counted(len(content), 'byte is', 'bytes are')} no image; expected {', '.join(IMAGE_FORMATS)}"
        ) from None
    except Exception as error:  # decoders raise arbitrary exceptions for damaged files
        if type(error).__name__ in _TOO_MANY_PIXELS:
            raise _too_large(name, "more pixels than Pillow reads") from None
        raise UserError(f"{name}: the image cannot be read ({error})") from None
    _check_header(name, image)
    return image


def upright_image(name: str, image: Image) -> UprightImage:
    """Read the pixels of an opened image, or of one in memory. Raises UserError naming the field `name`, and the mode
    of an image that has no 8-bit meaning."""
    import PIL.Image

    _check_header(name, image)
    try:
        raw_mode = _raw_mode(image)
        image.load()
        colours, alpha = _colours_and_alpha(name, image, raw_mode)
        if turn := _TURNS.get(_orientation(image)):
            method = PIL.Image.Transpose[turn]
            colours, alpha = colours.transpose(method), None if alpha is None else alpha.transpose(method)
    except UserError:
        raise
    except Exception as error:  # decoders raise arbitrary exceptions for damaged files
        raise UserError(f"{name}: the image cannot be read ({error})") from None
    for part in (colours,) if alpha is None else (colours, alpha):
        part.info = {}  # what was applied must not be applied again
    return UprightImage(colours, alpha)


def plain_pixels(name: str, image: Image, is_mask: bool) -> PixelArray:
    """Return the pixels of `image`, upright: RGB over white, or grey values over black for a mask. Raises UserError."""
    import numpy as np

    upright = upright_image(name, image)
    return np.array(upright.as_mask() if is_mask else upright.on_white())


def check_size(name: str, size: tuple[int, int]) -> None:
    """Raise UnusableField for an image with no pixels, or with too many."""
    width, height = size
    if not (0 < width <= MAX_SIDE and 0 < height <= MAX_SIDE and width * height <= MAX_PIXELS):
        raise _too_large(name, f"{width}x{height} pixels")


def _too_large(name: str, found: str) -> UserError:
    expected = f"up to {MAX_SIDE} pixels on a side and {MAX_PIXELS} in total"
    return unusable_field(name, f"an image of {found}", expected)


def _readable() -> tuple[str, ...]:
    """Return the `IMAGE_FORMATS` that the installed Pillow supports."""
    from PIL import Image

    Image.init()
    return tuple(name for name in IMAGE_FORMATS if name in Image.OPEN)


def _check_header(name: str, image: Image) -> None:
    check_size(name, image.size)
    if image.mode not in _MODES:
        raise unusable_field(name, f"an image of mode {image.mode}", _EXPECTED)


def _raw_mode(image: Image) -> str:
    """Return how a file stores the pixels that are not read yet, by Pillow's name; "" if that is not known."""
    tiles = getattr(image, "tile", None)
    if not tiles:
        return ""
    found: Any = tiles[0][3]
    found = found[0] if isinstance(found, tuple) and found else found
    return found if isinstance(found, str) else ""


def _orientation(image: Image) -> object:
    try:
        return image.getexif().get(_ORIENTATION, 1)
    except Exception:  # damaged metadata raise arbitrary exceptions; viewers show such an image as it is stored
        return 1


def _colours_and_alpha(name: str, image: Image, raw_mode: str) -> tuple[Image, Image | None]:
    """Return a loaded image as RGB, and its alpha channel if it has transparency."""
    if image.mode == "I" or image.mode in _GREY_16:
        return _from_16_bits(name, image)
    if not image.has_transparency_data:
        return image.convert("RGB"), None
    key: Any = image.info.get("transparency")
    if image.mode == "RGB" and isinstance(key, tuple) and ("16" in raw_mode or max(key) > _MOST_8):
        found = "an image with 16 bits per channel and a transparent colour"
        raise unusable_field(name, found, "an alpha channel in place of the transparent colour")
    if image.mode == "L" and isinstance(key, int) and raw_mode in _GREY_FACTORS:
        image = image.copy()
        image.info["transparency"] = key * _GREY_FACTORS[raw_mode]
    if image.mode == "La":
        image = image.convert("LA")
    clear = image.convert("RGBA")
    return clear.convert("RGB"), clear.getchannel("A")


def _from_16_bits(name: str, image: Image) -> tuple[Image, Image | None]:
    """Return what `_colours_and_alpha` does for grey values of 16 bits. Raises UnusableField for other ranges."""
    import numpy as np
    import PIL.Image

    values_HW = np.asarray(image)
    if image.mode == "I":  # 32-bit integers, which hold 16-bit values in Pillow
        lowest, highest = int(values_HW.min()), int(values_HW.max())
        is_16_bit = highest > _MOST_8 or highest == 0 or image.format == "PPM"
        if lowest < 0 or highest > _MOST_16 or not is_16_bit:
            found = f"an image of mode I with values from {lowest} to {highest}"
            raise unusable_field(name, found, f"{_EXPECTED} with values from 0 to {_MOST_16}")
    tags: Mapping[int, Any] = getattr(image, "tag_v2", {})
    if image.mode != "I" and tags.get(_BITS_PER_SAMPLE, (16,))[0] != 16:
        raise unusable_field(name, f"an image of {tags[_BITS_PER_SAMPLE][0]} bits per channel", _EXPECTED)
    grey_HW = ((values_HW.astype(np.uint32) + 128) // 257).astype(np.uint8)
    if image.mode != "I" and tags.get(_PHOTOMETRIC) == 0:  # white is zero: Pillow inverts 8-bit values only
        grey_HW = _MOST_8 - grey_HW
    key = image.info.get("transparency")
    alpha = None if key is None else PIL.Image.fromarray(np.where(values_HW == key, 0, _MOST_8).astype(np.uint8))
    return PIL.Image.fromarray(grey_HW).convert("RGB"), alpha
