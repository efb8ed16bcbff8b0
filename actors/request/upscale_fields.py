"""`Upscale`: the upscaler that enlarges an output, as a request names it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from modelpool.actors.request.bounds import MAX_NAME_CHARACTERS
from modelpool.actors.request.decoder_fields import is_number
from modelpool.actors.request.strict import Strict
from modelpool.pool.values.core.errors import unusable_field

#: largest factor of both sides; smallest and largest edge of a tile in pixels
MAX_SCALE, MIN_TILE, MAX_TILE = 16.0, 32, 4096
_FORM = "the name of an upscaler, or NAME:SCALE, such as 4x-ultra:2"


class Upscale(Strict):
    """An upscaler (ESRGAN and its relatives) that enlarges the decoded output. Accepts "NAME", "NAME:2" (and scale) and
    {"model":, "scale":, "tile":, "overlap":}.

    scale    factor of both sides of the result; default: that of the upscaler. Another one than its own is reached by
             Lanczos scaling of its result
    tile     edge of tiles in pixels of the image before it is enlarged; default: one tile if memory allows it
    overlap  of neighbouring tiles, over which one fades into the other; default: an eighth of the tile, at least 16
    """

    model: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARACTERS)]
    scale: float | None = None
    tile: Annotated[int | None, Field(ge=MIN_TILE, le=MAX_TILE)] = None
    overlap: Annotated[int | None, Field(ge=1, le=MAX_TILE // 2)] = None

    @model_validator(mode="before")
    @classmethod
    def _from_short_forms(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        name, colon, scale = value.strip().rpartition(":")
        if not colon or not is_number(scale):
            name, scale = value.strip(), ""
        if not name:
            raise unusable_field("upscale", value, _FORM)
        return {"model": name, "scale": float(scale)} if scale else {"model": name}

    @field_validator("scale")
    @classmethod
    def _scale(cls, value: float | None) -> float | None:
        if value is not None and not 1 <= value <= MAX_SCALE:
            raise unusable_field("upscale.scale", value, f"a number from 1 to {MAX_SCALE:g}")
        return value

    @model_validator(mode="after")
    def _overlap(self) -> Upscale:
        if self.overlap is not None and (self.tile is None or self.overlap > self.tile // 2):
            raise unusable_field("upscale.overlap", self.overlap, "a number up to half of upscale.tile, which is set")
        return self
