"""The `image_prompts` field of a request: image prompt adapters and their images; parsed and validated.

Torch-free, ray-free.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    field_serializer,
    field_validator,
    model_serializer,
    model_validator,
)

from modelpool.actors.request.bounds import MAX_ENTRIES, MAX_NAME_CHARACTERS, check_entries
from modelpool.actors.request.control_fields import split_numbers
from modelpool.actors.request.face_fields import Faces, FaceSource, InputFaces, checked_faces
from modelpool.actors.request.field_errors import missing_field
from modelpool.actors.request.image_fields import IMAGE_FORMS, ImageSource, checked_image
from modelpool.actors.request.strict import Strict, check_schedule_span
from modelpool.pool.values.core.errors import counted, unusable_field
from modelpool.pool.values.core.image_prompt_blocks import BLOCK

#: far above the strengths that adapters are trained with
MAX_STRENGTH = 10.0
#: most images of one image prompt
MAX_IMAGES = 16
#: what precedes the file of the mask in the short form
_MASK_PART = ",mask="
#: fields that were added later, and their defaults
_LATER: Mapping[str, Any] = MappingProxyType({"noise": 0.0, "shares_of": "steps"})
_BLOCK_FORMS = 'factors by names such as "down.2", "mid" or "up.0.1"'


class ImagePrompt(Strict):
    """An image prompt: an adapter (IP-Adapter, Redux) and the images that it reads; or, for models that read images
    by themselves (unCLIP, Stable Cascade, Stable Diffusion XL), the name of the model and images. Accepts "NAME=FILE",
    "NAME=FILE:STRENGTH", "NAME=FILE:STRENGTH:START:END", each also with ",mask=FILE" at the end, and {"model":,
    "image":, "faces":, "encoder":, "strength":, "start":, "end":, "blocks":, "mask":, "noise":}.

    image       an image, or a list of several that are read together
    faces       embeddings of faces, for FaceID: a file (.npy, .safetensors, .json), a list of numbers or an array
    encoder     name of the vision encoder; default: the one in the model's file, or the only one that fits
    strength    0 disables it
    start, end  the part of the schedule in which it is active, as fractions from 0 to 1
    shares_of   "steps": of the steps that are run; "noise": of the noise levels that the model was trained with, as of
                `controls`
    blocks      factors of the strength by block, {"up.0.1": 1.0}; blocks that are not named are left out
    mask        an image that is white where the image prompt acts, scaled to the size of the output; or a list of
                several, one for each image (or face): each image then acts in its own area
    noise       on the embedding of an image that a model varies, 0 to 1
    """

    model: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARACTERS)]
    #: an `ImageSource`, or a tuple of several, after validation
    image: Any = None
    #: a `FaceSource` of `actors.request.face_fields` after validation
    faces: Any = None
    encoder: Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)] = ""
    strength: float = 1.0
    start: float = 0.0
    end: float = 1.0
    blocks: tuple[tuple[str, float], ...] = ()
    #: an `ImageSource`, or a tuple of several, after validation
    mask: Any = None
    noise: Annotated[float, Field(ge=0, le=1)] = 0.0
    shares_of: Literal["steps", "noise"] = "steps"

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Show fields that were added later only where they are set."""
        return ((name, value) for name, value in super().__repr_args__() if _LATER.get(name or "", ...) != value)

    @property
    def images(self) -> tuple[ImageSource, ...]:
        """The images as a tuple."""
        return self.image if isinstance(self.image, tuple) else () if self.image is None else (self.image,)

    @property
    def masks(self) -> tuple[ImageSource, ...]:
        """The masks as a tuple; none if it acts everywhere."""
        return self.mask if isinstance(self.mask, tuple) else () if self.mask is None else (self.mask,)

    @model_validator(mode="before")
    @classmethod
    def _from_short_forms(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        name, equals, rest = value.partition("=")
        if not equals:
            raise unusable_field("image_prompts", value, '"NAME=FILE" or "NAME=FILE:STRENGTH:START:END"')
        rest, comma, mask = rest.partition(_MASK_PART)
        image, numbers = split_numbers(rest, 3)
        found = {"model": name, "image": image, **dict(zip(("strength", "start", "end"), numbers, strict=False))}
        return {**found, "mask": mask} if comma else found

    @field_validator("image", mode="before")
    @classmethod
    def _image(cls, value: Any) -> Any:
        return _one_or_several("image_prompts.image", value)

    @field_validator("mask", mode="before")
    @classmethod
    def _mask(cls, value: Any) -> Any:
        return _one_or_several("image_prompts.mask", value, is_mask=True)

    @field_validator("faces", mode="before")
    @classmethod
    def _faces(cls, value: Any) -> Any:
        return checked_faces("image_prompts.faces", value)

    @field_validator("strength")
    @classmethod
    def _strength(cls, value: float) -> float:
        if not 0 <= value <= MAX_STRENGTH:
            raise unusable_field("image_prompts.strength", value, f"a number from 0 to {MAX_STRENGTH:g}")
        return value

    @field_validator("blocks", mode="before")
    @classmethod
    def _blocks(cls, value: Any) -> Any:
        check_entries("image_prompts.blocks", value, MAX_ENTRIES)
        pairs = list(value.items()) if isinstance(value, Mapping) else value
        if not isinstance(pairs, (list, tuple)) or not all(isinstance(pair, (list, tuple)) for pair in pairs):
            raise unusable_field("image_prompts.blocks", value, _BLOCK_FORMS)
        for pair in pairs:
            name, factor = pair if len(pair) == 2 else (pair, None)
            if not isinstance(name, str) or BLOCK.fullmatch(name) is None:
                raise unusable_field("image_prompts.blocks", name, _BLOCK_FORMS)
            if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 <= factor <= MAX_STRENGTH:
                raise unusable_field(f"image_prompts.blocks.{name}", factor, f"a number from 0 to {MAX_STRENGTH:g}")
        return tuple(sorted((name, factor) for name, factor in pairs))

    @model_validator(mode="after")
    def _share(self) -> ImagePrompt:
        check_schedule_span("image_prompts", self.start, self.end)
        if self.image is None and self.faces is None:
            raise missing_field("image_prompts.image", f"set it to {IMAGE_FORMS}, or set image_prompts.faces")
        if len(self.masks) > 1 and len(self.masks) != self._read_apart:
            expected = f"one mask, or {self._read_apart}: one for each image or face"
            raise unusable_field("image_prompts.mask", counted(len(self.masks), "mask"), expected)
        return self

    @property
    def _read_apart(self) -> int:
        """Images or faces that have tokens of their own."""
        faces: FaceSource | None = self.faces
        count = 0 if faces is None else faces.count if isinstance(faces, InputFaces) else len(faces.rows)
        return max(len(self.images), count)

    @field_serializer("faces")
    def _numbers(self, faces: FaceSource | None) -> list[list[float]] | str | None:
        """Write embeddings as numbers, which can be read again, or as their hash where only the pool has them."""
        return faces.rows.tolist() if isinstance(faces, Faces) else None if faces is None else faces.sha256

    @model_serializer(mode="wrap")
    def _without_unset(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out optional parts that are not set, and write blocks as they are given."""
        found = {name: value for name, value in plain(self).items() if name in ("model", "image") or value}
        if self.shares_of == "steps":
            found.pop("shares_of", None)
        return {**found, **({"blocks": dict(self.blocks)} if self.blocks else {})}


def _one_or_several(name: str, value: Any, is_mask: bool = False) -> Any:
    """Validate the image or mask in the field `name`, or a list of them. Raises UserError."""
    if not isinstance(value, (list, tuple)):
        return checked_image(name, value, is_mask)
    if not 1 <= len(value) <= MAX_IMAGES:
        raise unusable_field(name, counted(len(value), "image"), f"1 to {MAX_IMAGES} images")
    found = tuple(checked_image(name, each, is_mask) for each in value)
    if any(each is None for each in found):
        raise unusable_field(name, "None in a list", IMAGE_FORMS)
    return found if len(found) > 1 else found[0]
