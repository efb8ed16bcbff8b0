"""The `controls` field of a request: ControlNets and their images; parsed and validated.

Torch-free, ray-free.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from modelpool.actors.request.bounds import MAX_NAME_CHARACTERS
from modelpool.actors.request.image_fields import checked_image
from modelpool.actors.request.strict import Strict, check_schedule_span
from modelpool.pool.values.core.errors import unusable_field

#: far above the strengths that ControlNets are trained with
MAX_CONTROL = 10.0
#: a commit of the hub
_COMMIT = re.compile(r"[0-9a-f]{40}")
#: most digits of a mode number in the short form; longer ones are treated as an (unknown) mode name
_MODE_DIGITS = 9


class Control(Strict):
    """A ControlNet and its control image, already preprocessed (edges, depth, pose). Accepts "NAME=FILE",
    "NAME=FILE:STRENGTH", "NAME=FILE:STRENGTH:START:END", the same without "=FILE", the same with "NAME@MODE", and
    {"model":, "mode":, "image":, "mask":, "strength":, "start":, "end":}.

    image       control image; default: the `image` of the request
    mask        for inpainting ControlNets: an image of the size of the control image, white where it is hidden;
    default:
                the `mask` of the request
    strength    conditioning scale; 0 disables it
    start, end  the part of the schedule in which it is active, as fractions from 0 to 1
    shares_of   "steps": of the steps that are run; "noise": of the noise levels that the model was trained with, as in
                ComfyUI: they mean the same levels in each part of a run
    mode        for ControlNets with several modes: a name ("canny") or a number
    """

    model: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARACTERS)]
    #: an `ImageSource` after validation
    image: Any = None
    strength: float = 1.0
    start: float = 0.0
    end: float = 1.0
    shares_of: Literal["steps", "noise"] = "steps"
    mode: str | int | None = None
    #: an `ImageSource` after validation
    mask: Any = None

    @model_validator(mode="before")
    @classmethod
    def _from_short_forms(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        name, equals, rest = value.partition("=")
        image, numbers = split_numbers(rest if equals else name, 3)
        name, mode = _without_mode(name if equals else image)
        source = {"image": image} if equals else {}
        return {"model": name, **mode, **source, **dict(zip(("strength", "start", "end"), numbers, strict=False))}

    @field_validator("image", "mask", mode="before")
    @classmethod
    def _image(cls, value: Any, info: Any) -> Any:
        return checked_image(f"controls.{info.field_name}", value, is_mask=info.field_name == "mask")

    @field_validator("strength")
    @classmethod
    def _strength(cls, value: float) -> float:
        if not 0 <= value <= MAX_CONTROL:
            raise unusable_field("controls.strength", value, f"a number from 0 to {MAX_CONTROL:g}")
        return value

    @field_validator("mode", mode="before")
    @classmethod
    def _mode(cls, value: Any) -> Any:
        if value is None or (isinstance(value, str) and value) or (type(value) is int and value >= 0):
            return value
        raise unusable_field("controls.mode", value, "the name of a mode, or its number, from 0")

    @model_validator(mode="after")
    def _share(self) -> Control:
        check_schedule_span("controls", self.start, self.end)
        return self

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Show fields that were added later only where they are set."""
        return ((name, value) for name, value in super().__repr_args__() if (name, value) != ("shares_of", "steps"))

    @model_serializer(mode="wrap")
    def _without_unset(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out unset fields: the seeds of job files are derived from this serialization."""
        left_out = {"mask": None, "shares_of": "steps"}
        return {name: value for name, value in plain(self).items() if left_out.get(name, ...) != value}


def _without_mode(name: str) -> tuple[str, dict[str, str | int]]:
    """Split "NAME@MODE" into the name and the mode as a field. "@" in a folder name, before a file extension, or before
    a commit of the hub is part of the name."""
    model, _, mode = name.rpartition("@")
    if not model or any(character in mode for character in "/\\.") or _COMMIT.fullmatch(mode):
        return name, {}
    return model, {"mode": int(mode) if mode.isdecimal() and len(mode) <= _MODE_DIGITS else mode}


def split_numbers(text: str, most: int) -> tuple[str, list[float]]:
    """Split `text` into its head and up to `most` numbers at its end, each after a colon."""
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
