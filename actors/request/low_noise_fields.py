"""The `low_noise` field of a request, for models with two experts, high-noise and low-noise (Wan 2.2 14B); parsed and
validated.

The catalog knows which models have two experts. Torch-free, ray-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

from pydantic import field_validator, model_validator

from modelpool.actors.request.number_fields import CFG, finite_number
from modelpool.actors.request.strict import Strict
from modelpool.pool.values.core.errors import unusable_field

_FORMS = "CFG or CFG:BOUNDARY, such as 3 or 3:0.9"
_BOUNDARY = "a noise level from 0 (the high-noise expert runs all steps) to 1 (it runs only steps from pure noise)"


class LowNoiseRun(Strict):
    """Settings of the low-noise expert. Accepts a number (`cfg`), "CFG", "CFG:BOUNDARY", ":BOUNDARY" and
    {"cfg":, "boundary":}.

    cfg       guidance scale; default: the `cfg` of the request if set, else the model's default
    boundary  the noise level below which the low-noise expert takes over; default: the model's
    """

    cfg: float | None = None
    boundary: float | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_short_forms(cls, value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, str | Real | Mapping | LowNoiseRun):
            raise unusable_field("low_noise", value, _FORMS)
        if isinstance(value, Real):
            return {"cfg": value}
        if not isinstance(value, str):
            return value
        cfg, _, boundary = (part.strip() for part in value.partition(":"))
        if not (cfg or boundary):
            raise unusable_field("low_noise", value, _FORMS)
        return {name: part for name, part in (("cfg", cfg), ("boundary", boundary)) if part}

    @field_validator("cfg", mode="before")
    @classmethod
    def _cfg(cls, value: Any) -> float | None:
        return None if value is None else CFG.parse("low_noise.cfg", value)

    @field_validator("boundary", mode="before")
    @classmethod
    def _boundary(cls, value: Any) -> float | None:
        if value is None:
            return None
        share = finite_number(value)
        if share is None or not 0.0 <= share <= 1.0:
            raise unusable_field("low_noise.boundary", value, _BOUNDARY)
        return share
