"""The `decoder` field of a request: the second model of a two-stage model; parsed and validated.

The catalog knows which models need a decoder, and which decoders exist. Torch-free, ray-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import field_validator, model_validator

from modelpool.actors.request.number_fields import CFG, STEPS
from modelpool.actors.request.strict import Strict
from modelpool.pool.values.core.errors import unusable_field

_FORMS = "NAME, NAME:STEPS or NAME:STEPS:CFG, such as stage_b:10:1.1"


class Decoder(Strict):
    """The decoder (second stage) of a two-stage model, such as Stable Cascade's stage B. Accepts "NAME", "NAME:STEPS",
    "NAME:STEPS:CFG" and {"model":, "steps":, "cfg":}.

    model  its name; default: the one in the same folder as the first model, or the only one in the catalog
    steps  default: the decoder's default
    cfg    guidance scale; default 1 (no guidance)
    """

    model: str = ""
    steps: int | None = None
    cfg: float | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_short_forms(cls, value: Any) -> Any:
        if not isinstance(value, str | Mapping | Decoder):
            raise unusable_field("decoder", value, _FORMS)
        if not isinstance(value, str):
            return value
        name, *numbers = value.rsplit(":", 2)
        # a colon may be part of a path
        while numbers and not _is_number(numbers[0]):
            name = f"{name}:{numbers.pop(0)}"
        if not name.strip() and not numbers:
            raise unusable_field("decoder", value, _FORMS)
        return {"model": name.strip(), **dict(zip(("steps", "cfg"), numbers, strict=False))}

    @field_validator("model", mode="before")
    @classmethod
    def _model(cls, value: Any) -> str:
        if not isinstance(value, str):
            raise unusable_field("decoder.model", value, "the name of a model")
        return value

    @field_validator("steps", mode="before")
    @classmethod
    def _steps(cls, value: Any) -> int | None:
        return None if value is None else STEPS.parse("decoder.steps", value)

    @field_validator("cfg", mode="before")
    @classmethod
    def _cfg(cls, value: Any) -> float | None:
        return None if value is None else CFG.parse("decoder.cfg", value)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
