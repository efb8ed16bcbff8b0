"""The `decoder` field of a request: the second model of a two-stage model; parsed and validated.

The catalog knows which models need a decoder, and which decoders exist. Torch-free, ray-free.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from modelpool.actors.request.number_fields import CFG, STEPS
from modelpool.actors.request.strict import Strict
from modelpool.pool.inference.sampling.sampler_names import resolve_sampling
from modelpool.pool.values.core.errors import unusable_field

#: a sampler with which every schedule is checked
_ANY_SAMPLER = "euler"
_FORMS = "NAME, NAME:STEPS or NAME:STEPS:CFG, such as stage_b:10:1.1"


class Decoder(Strict):
    """The decoder (second stage) of a two-stage model, such as Stable Cascade's stage B. Accepts "NAME", "NAME:STEPS",
    "NAME:STEPS:CFG" and {"model":, "steps":, "cfg":, "seed":, "sampler":, "schedule":}.

    model  its name; default: the one in the same folder as the first model, or the only one in the catalog
    steps  default: the decoder's default
    cfg    guidance scale; default 1 (no guidance)
    seed   of its noise; default: it follows from the seed of the request
    sampler, schedule  default: the decoder's defaults
    """

    model: str = ""
    steps: int | None = None
    cfg: float | None = None
    seed: Annotated[int | None, Field(ge=0, lt=2**64)] = None
    sampler: str = ""
    schedule: str | None = None

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Show the seed, the sampler and the schedule where they are set."""
        later = ("seed", "sampler", "schedule")
        return (
            (name, value) for name, value in super().__repr_args__() if name not in later or value not in ("", None)
        )

    @model_serializer(mode="wrap")
    def _without_unset(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what was added later where it is not set: seeds of job files are derived from this."""
        always = ("model", "steps", "cfg")
        return {name: value for name, value in plain(self).items() if name in always or value not in ("", None)}

    @model_validator(mode="after")
    def _known_sampler(self) -> Decoder:
        if self.sampler or self.schedule:
            resolve_sampling(self.sampler or _ANY_SAMPLER, self.schedule)
        return self

    @model_validator(mode="before")
    @classmethod
    def _from_short_forms(cls, value: Any) -> Any:
        if not isinstance(value, str | Mapping | Decoder):
            raise unusable_field("decoder", value, _FORMS)
        if not isinstance(value, str):
            return value
        name, *numbers = value.rsplit(":", 2)
        # a colon may be part of a path
        while numbers and not is_number(numbers[0]):
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


def is_number(text: str) -> bool:
    """Return whether `text` is the text of a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True
