"""The field of a request that names ControlNets. Checked here, as `actors.request.image_fields` is.

Torch-free, ray-free.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from modelpool.actors.request.image_fields import checked_image
from modelpool.actors.request.strict import Strict
from modelpool.pool.core.errors import unusable_field

#: far beyond what ControlNets were trained with
MOST_CONTROL = 10.0
#: of the number of a mode, in a short form: more are refused as the name of none
_MODE_DIGITS = 9


class Control(Strict):
    """A ControlNet and the image that it speaks of (edges, depth, a pose: made already). Accepts "NAME=FILE",
    "NAME=FILE:STRENGTH", "NAME=FILE:STRENGTH:START:END", the same without "=FILE", the same with "NAME@MODE", and
    {"model":, "mode":, "image":, "mask":, "strength":, "start":, "end":}.

    image       left out, the `image` of the request
    mask        of one that fills holes: an image of the size of its `image`, white where that is hidden from it; left
                out, the `mask` of the request
    strength    how strongly; 0 is not at all
    start, end  from which share of the steps to which
    mode        of one that has several: its name ("canny") or its number
    """

    model: Annotated[str, Field(min_length=1)]
    #: once checked, a `ImageSource`
    image: Any = None
    strength: float = 1.0
    start: float = 0.0
    end: float = 1.0
    mode: str | int | None = None
    #: once checked, a `ImageSource`
    mask: Any = None

    @model_validator(mode="before")
    @classmethod
    def _from_short_forms(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        name, equals, rest = value.partition("=")
        image, numbers = _without_numbers(rest if equals else name, 3)
        name, said = _without_mode(name if equals else image)
        shown = {"image": image} if equals else {}
        return {"model": name, **said, **shown, **dict(zip(("strength", "start", "end"), numbers, strict=False))}

    @field_validator("image", "mask", mode="before")
    @classmethod
    def _image(cls, value: Any, info: Any) -> Any:
        return checked_image(f"controls.{info.field_name}", value, is_mask=info.field_name == "mask")

    @field_validator("strength")
    @classmethod
    def _strength(cls, value: float) -> float:
        if not 0 <= value <= MOST_CONTROL:
            raise unusable_field("controls.strength", value, f"a number from 0 to {MOST_CONTROL:g}")
        return value

    @field_validator("mode", mode="before")
    @classmethod
    def _mode(cls, value: Any) -> Any:
        if value is None or (isinstance(value, str) and value) or (type(value) is int and value >= 0):
            return value
        raise unusable_field("controls.mode", value, "the name of a mode, or its number from 0")

    @model_validator(mode="after")
    def _share(self) -> Control:
        if not 0 <= self.start < self.end <= 1:
            found = f"{self.start:g} to {self.end:g}"
            raise unusable_field("controls.start, controls.end", found, "a share of the steps within 0 to 1")
        return self

    @model_serializer(mode="wrap")
    def _as_said(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without a mask that is not said: seeds of job files are made of this."""
        return {name: value for name, value in plain(self).items() if name != "mask" or value is not None}


def _without_mode(name: str) -> tuple[str, dict[str, str | int]]:
    """What a ControlNet is called in "NAME@MODE", and the mode as a field. "@" in a folder's name, or before a file's
    ending, is part of the name."""
    model, _, mode = name.rpartition("@")
    if not model or any(character in mode for character in "/\\."):
        return name, {}
    return model, {"mode": int(mode) if mode.isdecimal() and len(mode) <= _MODE_DIGITS else mode}


def _without_numbers(text: str, most: int) -> tuple[str, list[float]]:
    """`text` without the numbers that it ends with, each after a colon, and those; at most so many."""
    numbers: list[float] = []
    while len(numbers) < most:
        head, colon, tail = text.rpartition(":")
        try:
            number = float(tail)
        except ValueError:
            break
        if not colon or not head:
            break
        text = head
        numbers.insert(0, number)
    return text, numbers
