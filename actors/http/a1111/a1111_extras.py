"""Converts the bodies of A1111's extra-single-image and extra-batch-images. Pure, except that images are decoded.

An image is enlarged by a factor, or to cover a size, and is then cropped to it. A second upscaler may be
blended with the first. Without an upscaler ("None") nothing is enlarged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from modelpool.actors.http.a1111.a1111_upscalers import NEAREST, upscaler_name
from modelpool.actors.http.service.caller_images import MAX_CALL_PIXELS, CallerImages
from modelpool.actors.request.image_decoding import MAX_SIDE, check_size
from modelpool.actors.request.other_names import unknown_field
from modelpool.actors.request.strict import Strict
from modelpool.actors.request.upscale_fields import MAX_SCALE, Upscale
from modelpool.pool.values.core.errors import UserError, counted, unusable_field

if TYPE_CHECKING:
    from PIL.Image import Image

#: most images of one call
MAX_IMAGES = 100
#: fields of features that the pool does not have, with the values that do not ask for them
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {"gfpgan_visibility": (None, 0), "codeformer_visibility": (None, 0)}
#: fields of the web UI that mean nothing here, or nothing without another one that is refused
_WITHOUT_EFFECT = ("image", "imageList", "show_extras_results", "codeformer_weight", "upscale_first")
_MOST_NAMED, _MOST_SHOWN = 20, 200
_BY_FACTOR, _TO_SIZE = 0, 1
_SIDE = Field(ge=1, le=MAX_SIDE)


class ExtrasCall(Strict):
    """The fields that are used."""

    resize_mode: Annotated[int, Field(ge=_BY_FACTOR, le=_TO_SIZE)] = _BY_FACTOR
    upscaling_resize: Annotated[float, Field(gt=0, le=MAX_SCALE)] = 2.0
    upscaling_resize_w: Annotated[int, _SIDE] = 512
    upscaling_resize_h: Annotated[int, _SIDE] = 512
    upscaling_crop: bool = True
    upscaler_1: str = "None"
    upscaler_2: str = "None"
    extras_upscaler_2_visibility: Annotated[float, Field(ge=0, le=1)] = 0.0

    @property
    def upscalers(self) -> tuple[str, ...]:
        """The names of the upscalers that the result shows, as the web UI writes them. Without a first one nothing is
        enlarged."""
        if _is_none(self.upscaler_1):
            return ()
        is_blended = self.extras_upscaler_2_visibility > 0 and not _is_none(self.upscaler_2)
        return (self.upscaler_1, self.upscaler_2) if is_blended else (self.upscaler_1,)


@dataclass(frozen=True, slots=True)
class Enlarging:
    """How one image is enlarged: to `size` by each of `upscalers`, then cropped to `crop`, if that is not None."""

    size: tuple[int, int]
    upscalers: tuple[Upscale | str, ...]
    crop: tuple[int, int] | None


def parse_extras(body: Mapping[str, Any]) -> ExtrasCall:
    """Parse a body without its images. Raises UserError, also for features that the pool does not have."""
    for name, neutral in _NEUTRAL.items():
        if name in body and body[name] not in neutral:
            raise unusable_field(name, body[name], "no value: the pool does not have this feature")
    known = {name: value for name, value in body.items() if name in ExtrasCall.model_fields and value is not None}
    return ExtrasCall(**known)


def unread_extras(body: Mapping[str, Any]) -> list[str]:
    """Return a message for each field of a body that is unknown, and so has no effect."""
    known = {*ExtrasCall.model_fields, *_NEUTRAL, *_WITHOUT_EFFECT}
    unknown = [name for name in body if name not in known][:_MOST_NAMED]
    return [f"{unknown_field('field', name[:_MOST_SHOWN], known)} It is not used." for name in unknown]


def single_image(body: Mapping[str, Any]) -> tuple[Any]:
    """Return the encoded image of a body. Raises UserError."""
    if body.get("image") in (None, ""):
        raise UserError("image: missing; this field is required")
    return (body["image"],)


def several_images(body: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the encoded images of a body. Raises UserError."""
    listed = body.get("imageList")
    if not isinstance(listed, list) or not 1 <= len(listed) <= MAX_IMAGES:
        found = counted(len(listed), "image") if isinstance(listed, list) else type(listed).__name__
        raise unusable_field("imageList", found, f"a list of 1 to {MAX_IMAGES} images")
    for place, each in enumerate(listed):
        if not isinstance(each, Mapping) or not each.get("data"):
            raise unusable_field(f"imageList[{place}]", type(each).__name__, '{"data": IMAGE, "name": TEXT}')
    return tuple(each["data"] for each in listed)


def decoded(encoded: Sequence[Any], images: CallerImages) -> list[Image]:
    """Return the images of a call in RGB, over white. Raises UserError."""
    return [images.decode("image", value).on_white() for value in encoded]


def enlarging(call: ExtrasCall, width: int, height: int) -> Enlarging:
    """Return how an image of this size is enlarged. Raises UnusableField for a result that is too large."""
    if not call.upscalers:
        return Enlarging((width, height), (), None)
    scale, crop = call.upscaling_resize, None
    if call.resize_mode == _TO_SIZE:
        wanted = call.upscaling_resize_w, call.upscaling_resize_h
        scale = max(wanted[0] / width, wanted[1] / height)
        crop = wanted if call.upscaling_crop else None
    size = max(1, round(width * scale)), max(1, round(height * scale))
    check_size("upscaling_resize", size)
    if scale > MAX_SCALE:
        raise unusable_field("upscaling_resize", f"a scale of {scale:g}", f"up to {MAX_SCALE:g}")
    return Enlarging(size, tuple(_by(name, scale) for name in call.upscalers), crop)


def check_results(plans: Sequence[Enlarging]) -> None:
    """Raise UnusableField for a call with results that are too large together: the server holds all of them."""
    pixels = sum(plan.size[0] * plan.size[1] for plan in plans)
    if pixels > MAX_CALL_PIXELS:
        raise unusable_field(
            "upscaling_resize", f"{pixels} pixels", f"up to {MAX_CALL_PIXELS} in all results of a call"
        )


def resized(image: Image, size: tuple[int, int], name: str) -> Image:
    """Return an image that is scaled without an upscaler."""
    from PIL.Image import Resampling

    return image.resize(size, Resampling.NEAREST if name.strip().lower() == NEAREST else Resampling.LANCZOS)


def finished(call: ExtrasCall, plan: Enlarging, made: Sequence[Image]) -> Image:
    """Return the result from what each upscaler has made: blended and cropped."""
    import PIL.Image

    image = made[0]
    if len(made) > 1:
        image = PIL.Image.blend(image, made[1], call.extras_upscaler_2_visibility)
    if plan.crop is None:
        return image
    left, top = (image.width - plan.crop[0]) // 2, (image.height - plan.crop[1]) // 2
    return image.crop((left, top, left + plan.crop[0], top + plan.crop[1]))


def _is_none(name: str) -> bool:
    return name.strip().lower() in ("none", "")


def _by(name: str, scale: float) -> Upscale | str:
    """Return an upscaler and its scale, or the name of a way to scale without one, which is also used to scale down."""
    upscaler = upscaler_name(name)
    return Upscale(model=upscaler, scale=scale) if upscaler and scale > 1 else name
