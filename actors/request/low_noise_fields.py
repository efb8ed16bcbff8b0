"""What a request says of a model that is two diffusion models, one for much noise and one for little (Wan 2.2 of 14B).
Checked here, as `actors.request.requests` is; whether a model is two, the catalog says.

Torch-free, ray-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

from pydantic import field_validator, model_validator

from modelpool.actors.request.number_fields import checked_cfg, finite_number
from modelpool.actors.request.strict import Strict
from modelpool.pool.core.errors import unusable_field
from modelpool.pool.core.expert_names import HALVES

_FORMS = "CFG or CFG:BOUNDARY, such as 3 or 3:0.9"
_BOUNDARY = "a share of noise from 0 (the first model makes all steps) to 1 (it makes what begins with noise alone)"


class LowNoiseRun(Strict):
    """How the second of two diffusion models is run, the one for low noise. Accepts a number (`cfg`), "CFG",
    "CFG:BOUNDARY", ":BOUNDARY" and {"cfg":, "boundary":}.

    cfg       how strongly it follows the prompt, away from the negative prompt. Left out, as strongly as the first one
              where the request says that, and otherwise the model's own
    boundary  the share of noise below which it takes over; left out, the model's own
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
        return None if value is None else checked_cfg("low_noise.cfg", value)

    @field_validator("boundary", mode="before")
    @classmethod
    def _boundary(cls, value: Any) -> float | None:
        if value is None:
            return None
        share = finite_number(value)
        if share is None or not 0.0 <= share <= 1.0:
            raise unusable_field("low_noise.boundary", value, _BOUNDARY)
        return share


def lora_parts(value: Any) -> Any:
    """The fields of a LoRA in a request's short form: "light:0.8", "light:0.8:low", ("light", 0.8), ("light", 0.8,
    "low"); anything else as it is."""
    if isinstance(value, str):
        head, colon, last = value.rpartition(":")
        name, noise = (head, last.strip()) if colon and last.strip().lower() in HALVES else (value, "")
        said = {"noise": noise} if noise else {}
        head, colon, strength = name.rpartition(":")
        return {"name": head, "strength": strength, **said} if colon and head else {"name": name, **said}
    if isinstance(value, tuple | list) and len(value) in (2, 3):
        return dict(zip(("name", "strength", "noise"), value, strict=False))
    return value


def checked_noise(value: Any) -> str:
    """Which of two diffusion models a LoRA is for; "" is both."""
    if not isinstance(value, str) or value.strip().lower() not in (*HALVES, ""):
        raise unusable_field("loras.noise", value, f"one of {', '.join(map(repr, HALVES))}, or nothing for both models")
    return value.strip().lower()
