"""The fields of a request that name images, and the parts that use them (regions, second pass); parsed and validated.

An image is the path of a file, a Pillow image or a numpy array. A path stays a path until submission; everything else
becomes `Pixels` at once, so later changes of the original do not change the request. Only headers of files are read
here. Torch-free, ray-free; imports Pillow and numpy when an image is set.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import Field, field_validator, model_validator

from modelpool.actors.request.bounds import MAX_NAME_CHARACTERS, MAX_PROMPT_CHARACTERS, check_characters, check_complete
from modelpool.actors.request.image_decoding import check_size, open_image, plain_pixels
from modelpool.actors.request.strict import Strict
from modelpool.pool.inference.sampling.sampler_names import MAX_STEPS
from modelpool.pool.values.core.errors import counted, unusable_field

if TYPE_CHECKING:
    from modelpool.pool.values.core.stage_params import PixelArray

#: most regions, and most ControlNets, of one request: each costs compute at every step
MAX_PARTS = 16
#: most reference images; more than published models were trained with
MAX_REFERENCES = 4
#: default denoising strength of image-to-image, and with a mask
DEFAULT_STRENGTH, DEFAULT_MASKED_STRENGTH = 0.6, 1.0
#: at a strength above this, a region leaves nothing of the prompt
MAX_REGION = 100.0
#: expected values of an image field, for messages
IMAGE_FORMS = "the path of an image, a Pillow image or a numpy array"


@dataclass(frozen=True, slots=True)
class Pixels:
    """An image [H, W, 3] or a mask [H, W] in the driver's memory. Equal when their pixels are equal."""

    sha256: str
    pixels: PixelArray = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class InputImage:
    """An image or a mask on its way to the pool, at the size at which it is used.

    sha256  of height, width and pixels
    file    name of the source file, for display; empty for an image from memory
    """

    sha256: str
    width: int
    height: int
    file: str = ""


@dataclass(frozen=True, slots=True)
class TaskOutput:
    """An input of this size that a task of the same job computes, or that a node has. Only nodes of workflows have
    such."""

    task: str
    width: int
    height: int

    @property
    def sha256(self) -> str:
        """The id of the task, which identifies the result as a hash does."""
        return self.task

    @property
    def file(self) -> str:
        """The name of its file: none."""
        return ""


@dataclass(frozen=True, slots=True)
class TaskImage(TaskOutput):
    """An image or a mask."""


#: value of an image field after validation
ImageSource: TypeAlias = str | Pixels | InputImage | TaskImage


def pixels_digest(pixels: PixelArray) -> str:
    """Return the SHA-256 of the shape and the bytes of an image or a mask."""
    import numpy as np

    return hashlib.sha256(repr(pixels.shape).encode() + np.ascontiguousarray(pixels).tobytes()).hexdigest()


def checked_image(name: str, value: Any, is_mask: bool = False) -> ImageSource | None:
    """Validate the image in the field `name`. Raises UserError naming the field, and the file for a path."""
    if value is None or isinstance(value, (Pixels, InputImage, TaskImage)):
        return value
    if isinstance(value, (str, os.PathLike)):
        path = os.fsdecode(value)
        check_complete(name, path)
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
        raise unusable_field(name, type(value).__name__, IMAGE_FORMS)
    return Pixels(pixels_digest(pixels), pixels)


def checked_references(value: Any) -> ImageSource | tuple[ImageSource, ...] | None:
    """Validate the reference image, or a list of them in order. Raises UserError."""
    if not isinstance(value, (list, tuple)):
        return checked_image("reference", value)
    if not 1 <= len(value) <= MAX_REFERENCES:
        raise unusable_field("reference", counted(len(value), "image"), f"1 to {MAX_REFERENCES} images")
    found = tuple(checked_image("reference", each) for each in value)
    sources = tuple(each for each in found if each is not None)
    if len(sources) < len(found):
        raise unusable_field("reference", "None in a list", IMAGE_FORMS)
    return sources if len(sources) > 1 else sources[0]


def checked_parts(name: str, value: Any) -> Any:
    """Check the number of regions or ControlNets. Raises UnusableField."""
    if isinstance(value, (list, tuple)) and len(value) > MAX_PARTS:
        raise unusable_field(
            name, counted(len(value), "entry", "entries"), f"up to {MAX_PARTS}: each is computed at every step"
        )
    return value


def _of_array(name: str, array: Any, is_mask: bool) -> PixelArray:
    import numpy as np

    shape = array.shape
    if is_mask:
        expected = "an array [height, width] of uint8 (255 is regenerated) or bool"
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
    """Validate a denoising strength. Raises UnusableField."""
    if not 0 < value <= 1:
        raise unusable_field(name, value, "a number above 0 (keep the image) up to 1 (regenerate all of it)")
    return value


def skipped_steps(name: str, strength: float, steps: int, rounds_up: bool = False) -> int:
    """Return how many of the first `steps` are skipped at a denoising strength, as diffusers counts them. A fraction
    of a step that is run counts as one step with `rounds_up`, else as none.
    Raises UnusableField if no step is left."""
    left_out = int(steps - steps * strength) if rounds_up else steps - min(int(steps * strength), steps)
    if left_out == steps:
        expected = f"at least {1 / steps:.2g}: with {counted(steps, 'step')}, a smaller strength runs none of them"
        raise unusable_field(name, strength, expected)
    return left_out


class Region(Strict):
    """A prompt for a part of the image. Accepts "X,Y,WIDTH,HEIGHT=TEXT", "X,Y,WIDTH,HEIGHT:STRENGTH=TEXT" and
    {"prompt":, "box": or "mask":, "strength":}.

    box       left, top, width and height in pixels of the requested image; its edges are soft
    mask      an image that is white where the prompt applies; it is scaled to the size of the image
    strength  weight of the prompt there; the prompt of the request has weight 1 everywhere
    """

    prompt: str
    box: tuple[int, int, int, int] | None = None
    #: an `ImageSource` after validation
    mask: Any = None
    strength: float = 1.0

    @model_validator(mode="before")
    @classmethod
    def _from_short_forms(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        check_characters("regions", value, MAX_PROMPT_CHARACTERS + MAX_NAME_CHARACTERS)
        place, equals, prompt = value.partition("=")
        box, colon, strength = place.partition(":")
        sides = box.split(",")
        if not equals or len(sides) != 4:
            raise unusable_field("regions", value, "X,Y,WIDTH,HEIGHT=TEXT or X,Y,WIDTH,HEIGHT:STRENGTH=TEXT")
        fields: dict[str, Any] = {"prompt": prompt, "box": tuple(side.strip() for side in sides)}
        return {**fields, "strength": strength} if colon else fields

    @field_validator("prompt")
    @classmethod
    def _prompt(cls, value: str) -> str:
        check_characters("regions.prompt", value, MAX_PROMPT_CHARACTERS)
        return value

    @field_validator("mask", mode="before")
    @classmethod
    def _mask(cls, value: Any) -> Any:
        return checked_image("regions.mask", value, is_mask=True)

    @field_validator("strength")
    @classmethod
    def _strength(cls, value: float) -> float:
        if not 0 <= value <= MAX_REGION:
            raise unusable_field("regions.strength", value, f"a number from 0 to {MAX_REGION:g}")
        return value

    @model_validator(mode="after")
    def _place(self) -> Region:
        if (self.box is None) == (self.mask is None):
            found = "neither" if self.box is None else "both"
            raise unusable_field("regions", found, f"either a box or a mask for {self.prompt!r}")
        if self.box is not None and (min(self.box[:2]) < 0 or min(self.box[2:]) < 1):
            raise unusable_field("regions.box", self.box, "left, top, width and height in pixels")
        return self


#: the value of `via` for which users write "image"
EARLIER_VIA = "picture"


class Hires(Strict):
    """A second pass: the image is generated at the requested size, scaled up, and partly regenerated. Accepts 2,
    "2:0.5" (scale and strength), "2:0.5:10" (and steps), any of these followed by "=NAME" (an upscaler), and
    {"scale":, "strength":, "steps":, "via":, "upscaler":}.

    strength  denoising strength of the second pass
    steps     length of its full schedule; default: the steps of the first pass
    via       scales the "latent", or the decoded "image", also called "picture". Default: the latent without `upscaler`
    upscaler  name of the upscaler that enlarges the decoded image; without one, it is scaled with Lanczos
    """

    scale: float = 2.0
    strength: float = 0.5
    steps: Annotated[int | None, Field(ge=1, le=MAX_STEPS)] = None
    via: Literal["latent", "image"] = "latent"
    upscaler: Annotated[str | None, Field(min_length=1, max_length=MAX_NAME_CHARACTERS)] = None

    @model_validator(mode="before")
    @classmethod
    def _from_short_forms(cls, value: Any) -> Any:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return {"scale": value}
        if isinstance(value, str):
            numbers, equals, upscaler = value.partition("=")
            parts = numbers.split(":")
            if len(parts) > 3:
                raise unusable_field("hires", value, "SCALE, SCALE:STRENGTH or SCALE:STRENGTH:STEPS, such as 2:0.5:10")
            found: Any = dict(zip(("scale", "strength", "steps"), (part.strip() for part in parts), strict=False))
            value = found | ({"upscaler": upscaler.strip()} if equals else {})
        if isinstance(value, Mapping) and value.get("via") == EARLIER_VIA:
            value = {**value, "via": "image"}
        if isinstance(value, Mapping) and value.get("upscaler") is not None:
            if value.get("via", "image") != "image":
                raise unusable_field("hires.via", value["via"], "'image': an upscaler reads the decoded image")
            return {**value, "via": "image"}
        return value

    def recorded(self) -> dict[str, Any]:
        """Return the fields as recipes and seeds of job files have them: by the earlier name of `via`, so that the same
        request means the same output."""
        return {**self.model_dump(), "via": EARLIER_VIA if self.via == "image" else self.via}

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
