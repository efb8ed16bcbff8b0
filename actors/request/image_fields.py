"""The fields of a request that name images, and what is to be done with them. Checked here, as
`actors.request.requests` is.

An image is the path of a file, an image of Pillow or an array of numpy. A path stays one until it is submitted; all
else becomes `Pixels` at once, so that what is changed afterwards changes no request. Reads headers of files only.
Torch-free, ray-free; imports Pillow and numpy when an image is there.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import Field, field_validator, model_validator

from modelpool.actors.request.strict import Strict
from modelpool.pool.core.errors import CorruptFile, UserError, unusable_field
from modelpool.pool.formats.regular_file import open_regular
from modelpool.pool.sampling.names import MAX_STEPS

if TYPE_CHECKING:
    from PIL.Image import Image

    from modelpool.pool.core.stage_params import PixelArray

#: most pixels along a side, and in all: what is read would take four times as many bytes
MOST_SIDE, MOST_PIXELS = 16384, 1 << 26
#: what files of images are read as, in Pillow's names: formats of pixels. Others that Pillow opens are read by other
#: programs (EPS), are no images, or are hardly ever met
IMAGE_FORMATS = (
    *("PNG", "JPEG", "MPO", "WEBP", "AVIF", "JPEG2000", "GIF", "BMP", "TIFF", "PPM"),
    *("TGA", "QOI", "ICO", "PCX", "SGI", "PSD"),
)
#: regions, and ControlNets, of one request: each is computed with at every step
MOST_PARTS = 16
#: images that a model works from at once; more than published ones were trained with
MOST_REFERENCES = 4
#: how much of an image is made anew where nobody says: a part; of what a mask shows, all
USUAL_STRENGTH, USUAL_MASKED_STRENGTH = 0.6, 1.0
#: a text that counts so much more than the prompt leaves nothing of it
MOST_REGION = 100.0
#: what a field that names an image expects
A_IMAGE = "the path of an image, an image of Pillow or an array of numpy"


@dataclass(frozen=True, slots=True)
class Pixels:
    """An image [H, W, 3] or a mask [H, W] of the driver's own, in memory. Equal when their pixels are."""

    sha256: str
    pixels: PixelArray = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class InputImage:
    """An image or a mask on its way to the pool, at the size that it is used in.

    sha256  of height, width and pixels
    file    the name of the file that it came from, for people; empty for one from memory
    """

    sha256: str
    width: int
    height: int
    file: str = ""


#: what a field that names an image holds once it is checked
ImageSource: TypeAlias = str | Pixels | InputImage


def pixels_digest(pixels: PixelArray) -> str:
    """SHA-256 of the shape and the bytes of an image or a mask."""
    import numpy as np

    return hashlib.sha256(repr(pixels.shape).encode() + np.ascontiguousarray(pixels).tobytes()).hexdigest()


def checked_image(name: str, value: Any, is_mask: bool = False) -> ImageSource | None:
    """The image in the field `name`. Raises UserError naming the field, and the file where it is one."""
    if value is None or isinstance(value, (Pixels, InputImage)):
        return value
    if isinstance(value, (str, os.PathLike)):
        path = os.fsdecode(value)
        with open_image(name, path):
            return path
    import numpy as np
    from PIL import Image

    if isinstance(value, Image.Image):
        check_size(name, value.size)
        pixels = plain_pixels(name, value, is_mask)
    elif isinstance(value, np.ndarray):
        pixels = _of_array(name, value, is_mask)
    else:
        raise unusable_field(name, type(value).__name__, A_IMAGE)
    return Pixels(pixels_digest(pixels), pixels)


def checked_references(value: Any) -> ImageSource | tuple[ImageSource, ...] | None:
    """The image to work from, or several, in order. Raises UserError."""
    if not isinstance(value, (list, tuple)):
        return checked_image("reference", value)
    if not 1 <= len(value) <= MOST_REFERENCES:
        raise unusable_field("reference", f"{len(value)} images", f"1 to {MOST_REFERENCES}")
    found = tuple(checked_image("reference", each) for each in value)
    sources = tuple(each for each in found if each is not None)
    if len(sources) < len(found):
        raise unusable_field("reference", "nothing among several", A_IMAGE)
    return sources if len(sources) > 1 else sources[0]


@contextmanager
def open_image(name: str, path: str) -> Iterator[Image]:
    """The image at `path`, its header read and its size checked. Raises UserError naming the field `name`, for what
    is no regular file too."""
    from PIL import Image, UnidentifiedImageError

    if not os.path.exists(path):
        raise unusable_field(name, path, "a file that is there")
    try:
        with open_regular(path, "an image") as (file, _):
            try:
                image = Image.open(file, formats=_readable())
            except UnidentifiedImageError:
                expected = f"expected one of {', '.join(IMAGE_FORMATS)}"
                raise UserError(f"{name}: {path} cannot be read as an image, {expected}") from None
            except Exception as error:  # what decoders raise over damaged files is not told beforehand
                raise UserError(f"{name}: {path} cannot be read as an image ({error})") from None
            with image:
                check_size(name, image.size)
                yield image
    except CorruptFile as problem:
        raise UserError(f"{name}: {problem}") from None


def _readable() -> tuple[str, ...]:
    """Those of `IMAGE_FORMATS` that this Pillow has."""
    from PIL import Image

    Image.init()
    return tuple(name for name in IMAGE_FORMATS if name in Image.OPEN)


def check_size(name: str, size: tuple[int, int]) -> None:
    """Raise UnusableField for an image without pixels, or with too many."""
    width, height = size
    if not (0 < width <= MOST_SIDE and 0 < height <= MOST_SIDE and width * height <= MOST_PIXELS):
        expected = f"up to {MOST_SIDE} on a side and {MOST_PIXELS} in all"
        raise unusable_field(name, f"an image of {width}x{height} pixels", expected)


def plain_pixels(name: str, image: Image, is_mask: bool) -> PixelArray:
    """The pixels of `image` as a camera held it upright: three colours, or one brightness for a mask. What can be
    seen through is laid over white, of a mask over black. Raises UserError."""
    import numpy as np
    from PIL import Image, ImageOps

    if image.mode[0] in "IF":
        raise unusable_field(name, f"an image of mode {image.mode}", "one of 8 bits for each colour")
    try:
        image = ImageOps.exif_transpose(image)
        if image.has_transparency_data:
            under = Image.new("RGBA", image.size, "black" if is_mask else "white")
            image = Image.alpha_composite(under, image.convert("RGBA"))
        return np.array(image.convert("L" if is_mask else "RGB"))
    except Exception as error:  # what decoders raise over damaged files is not told beforehand
        raise UserError(f"{name}: the image cannot be read ({error})") from None


def checked_parts(name: str, value: Any) -> Any:
    """As many regions or ControlNets as a request may have. Raises UnusableField."""
    if isinstance(value, (list, tuple)) and len(value) > MOST_PARTS:
        raise unusable_field(name, f"{len(value)} of them", f"up to {MOST_PARTS}: each is computed with at every step")
    return value


def _of_array(name: str, array: Any, is_mask: bool) -> PixelArray:
    import numpy as np

    shape = array.shape
    if is_mask:
        expected = "an array [height, width] of uint8 (255 is made anew) or bool"
        if array.ndim != 2 or array.dtype not in (np.uint8, np.bool_):
            raise unusable_field(name, f"an array {list(shape)} of {array.dtype}", expected)
        array = array.astype(np.uint8) * 255 if array.dtype == np.bool_ else array
    elif array.ndim != 3 or shape[2] != 3 or array.dtype != np.uint8:
        found = f"an array {list(shape)} of {array.dtype}"
        raise unusable_field(name, found, "an array [height, width, 3] of uint8")
    check_size(name, (shape[1], shape[0]))
    copy: PixelArray = np.array(array, order="C")
    return copy


def checked_strength(name: str, value: float) -> float:
    """A share of a schedule. Raises UnusableField."""
    if not 0 < value <= 1:
        raise unusable_field(name, value, "a number above 0 (leave all as it is) up to 1 (make all anew)")
    return value


def steps_left_out(name: str, strength: float, steps: int, rounds_up: bool = False) -> int:
    """How many of `steps` are not made at this strength: those at the head of the schedule, as diffusers counts them.
    With `rounds_up` a part of a step that is to be made is a whole one, else it is none.
    Raises UnusableField where none is left."""
    left_out = int(steps - steps * strength) if rounds_up else steps - min(int(steps * strength), steps)
    if left_out == steps:
        raise unusable_field(name, strength, f"at least {1 / steps:.2g}: with {steps} steps, less makes none of them")
    return left_out


class Region(Strict):
    """A text for a part of the image. Accepts "X,Y,WIDTH,HEIGHT=TEXT", "X,Y,WIDTH,HEIGHT:STRENGTH=TEXT" and
    {"prompt":, "box": or "mask":, "strength":}.

    box       left, top, width and height in pixels of the image as it is asked for; its edges are soft
    mask      an image that is white where the text counts; it is scaled to the size of the image
    strength  how much it counts there; the prompt counts 1 everywhere
    """

    prompt: str
    box: tuple[int, int, int, int] | None = None
    #: once checked, a `ImageSource`
    mask: Any = None
    strength: float = 1.0

    @model_validator(mode="before")
    @classmethod
    def _from_short_forms(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        place, equals, prompt = value.partition("=")
        box, colon, strength = place.partition(":")
        sides = box.split(",")
        if not equals or len(sides) != 4:
            raise unusable_field("regions", value, "X,Y,WIDTH,HEIGHT=TEXT or X,Y,WIDTH,HEIGHT:STRENGTH=TEXT")
        fields: dict[str, Any] = {"prompt": prompt, "box": tuple(side.strip() for side in sides)}
        return {**fields, "strength": strength} if colon else fields

    @field_validator("mask", mode="before")
    @classmethod
    def _mask(cls, value: Any) -> Any:
        return checked_image("regions.mask", value, is_mask=True)

    @field_validator("strength")
    @classmethod
    def _strength(cls, value: float) -> float:
        if not 0 <= value <= MOST_REGION:
            raise unusable_field("regions.strength", value, f"a number from 0 to {MOST_REGION:g}")
        return value

    @model_validator(mode="after")
    def _place(self) -> Region:
        if (self.box is None) == (self.mask is None):
            found = "neither" if self.box is None else "both"
            raise unusable_field("regions", found, f"a box or a mask for {self.prompt!r}")
        if self.box is not None and (min(self.box[:2]) < 0 or min(self.box[2:]) < 1):
            raise unusable_field("regions.box", self.box, "left, top, width and height in pixels")
        return self


class Hires(Strict):
    """A second pass: the image is made small, scaled up, and made again in part. Accepts 2, "2:0.5" (scale and
    strength), "2:0.5:10" (and steps) and {"scale":, "strength":, "steps":, "via":}.

    strength  as of a request: which part of the steps of the second pass is made
    steps     of its whole schedule; left out, as many as of the first
    via       what is scaled up: the "latent", or the "image" that it is decoded to
    """

    scale: float = 2.0
    strength: float = 0.5
    steps: Annotated[int | None, Field(ge=1, le=MAX_STEPS)] = None
    via: Literal["latent", "picture"] = "latent"

    @model_validator(mode="before")
    @classmethod
    def _from_short_forms(cls, value: Any) -> Any:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return {"scale": value}
        if isinstance(value, str):
            parts = value.split(":")
            if len(parts) > 3:
                raise unusable_field("hires", value, "SCALE, SCALE:STRENGTH or SCALE:STRENGTH:STEPS, such as 2:0.5:10")
            return dict(zip(("scale", "strength", "steps"), (part.strip() for part in parts), strict=False))
        return value

    @field_validator("scale")
    @classmethod
    def _scale(cls, value: float) -> float:
        if not 1 < value <= 8:
            raise unusable_field("hires.scale", value, "a number above 1 up to 8")
        return value

    @field_validator("strength")
    @classmethod
    def _strength(cls, value: float) -> float:
        return checked_strength("hires.strength", value)
