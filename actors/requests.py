"""What a driver may ask for. Checked here, at the edge, before anything is sent.

Knows names and numbers; not which models exist (the catalog says) nor where anything runs. Torch-free, ray-free.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from actors.strict import Strict
from actors.terms import MOST_PRIORITY, check_user, parse_seconds
from pool.errors import unknown_name, unusable_field
from pool.sampling.names import MAX_CFG, MAX_STEPS, MIN_CFG, SCHEDULES, resolve_sampler

#: sizes are multiples of this: the VAE halves a picture three times
SIZE_STEP = 8
MAX_SEED = 2**64 - 1
_SIZE = f"a multiple of {SIZE_STEP} from {SIZE_STEP} to 16384"
#: what is expected of each field that is a whole number
_WHOLE = {
    "steps": f"a whole number from 1 to {MAX_STEPS}",
    "width": _SIZE,
    "height": _SIZE,
    "seed": "a whole number from 0 to 2**64 - 1",
    "priority": f"a whole number from -{MOST_PRIORITY} to {MOST_PRIORITY}",
}


class LoraChoice(Strict):
    """A LoRA by name, and how strongly. Accepts ("light", 0.8), "light:0.8", "light" and {"name":, "strength":}."""

    name: Annotated[str, Field(min_length=1)]
    strength: float = 1.0

    @model_validator(mode="before")
    @classmethod
    def _from_short_forms(cls, value: Any) -> Any:
        if isinstance(value, str):
            name, colon, strength = value.rpartition(":")
            return {"name": name, "strength": strength} if colon and name else {"name": value}
        if isinstance(value, (tuple, list)) and len(value) == 2:
            return {"name": value[0], "strength": value[1]}
        return value


class GenerateRequest(Strict):
    """One picture. `width`, `height` left out are the model's own; `seed` left out is drawn when submitted.

    The last three do not change the picture. Of those that wait, a higher `priority` goes first. `user` is whose share
    it counts for; left out, it is the driver's. `deadline` is a time from submission, such as 90 (seconds) or "10m".
    Raises UserError (a ValueError) naming the field, what was found and what was expected.
    """

    model: Annotated[str, Field(min_length=1)]
    prompt: str
    negative: str = ""
    loras: tuple[LoraChoice, ...] = ()
    steps: int = 20
    cfg: float = 5.0
    sampler: str = "euler"
    #: None is the sampler's own
    schedule: str | None = None
    width: int | None = None
    height: int | None = None
    seed: int | None = None
    priority: int = 0
    user: str | None = None
    deadline: float | None = None

    @field_validator(*_WHOLE, mode="before")
    @classmethod
    def _whole(cls, value: Any, info: Any) -> int | None:
        """Numbers, and words of job files that are numbers; True is none."""
        is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        is_written = isinstance(value, str) and re.fullmatch(r"[+-]?\d{1,30}", value.strip(), re.ASCII)
        if isinstance(value, bool) or not (value is None or is_whole or is_written):
            raise unusable_field(info.field_name, value, _WHOLE[info.field_name])
        return None if value is None else int(value)

    @field_validator("steps")
    @classmethod
    def _steps(cls, value: int) -> int:
        if not 1 <= value <= MAX_STEPS:
            raise unusable_field("steps", value, _WHOLE["steps"])
        return value

    @field_validator("cfg")
    @classmethod
    def _cfg(cls, value: float) -> float:
        if not MIN_CFG <= value <= MAX_CFG:
            raise unusable_field("cfg", value, f"a number from {MIN_CFG:g} (no guidance) to {MAX_CFG:g}")
        return value

    @field_validator("width", "height")
    @classmethod
    def _size(cls, value: int | None, info: Any) -> int | None:
        if value is not None and (value < SIZE_STEP or value > 16384 or value % SIZE_STEP):
            raise unusable_field(info.field_name, value, _SIZE)
        return value

    @field_validator("seed")
    @classmethod
    def _seed(cls, value: int | None) -> int | None:
        if value is not None and not 0 <= value <= MAX_SEED:
            raise unusable_field("seed", value, _WHOLE["seed"])
        return value

    @field_validator("priority")
    @classmethod
    def _priority(cls, value: int) -> int:
        if abs(value) > MOST_PRIORITY:
            raise unusable_field("priority", value, _WHOLE["priority"])
        return value

    @field_validator("user")
    @classmethod
    def _user(cls, value: str | None) -> str | None:
        return None if value is None else check_user(value)

    @field_validator("deadline", mode="before")
    @classmethod
    def _deadline(cls, value: Any) -> float | None:
        return None if value is None else parse_seconds(value, what="a time from now,")

    @model_validator(mode="after")
    def _names(self) -> GenerateRequest:
        resolve_sampling(self.sampler, self.schedule)
        return self


def resolve_sampling(sampler: str, schedule: str | None) -> tuple[str, str]:
    """The keys of sampler and schedule that the two names mean; a schedule given wins over the one in `sampler`.

    Raises UnknownName.
    """
    key, own_schedule = resolve_sampler(sampler)
    if schedule is None:
        return key, own_schedule
    wanted = "_".join(schedule.lower().replace("-", " ").replace("_", " ").split())
    if wanted not in SCHEDULES:
        raise unknown_name("schedule", schedule, SCHEDULES)
    return key, wanted
