"""What a driver may ask for. Checked here, at the edge, before anything is sent.

Knows names and numbers; not which models exist (the catalog says) nor where anything runs. Torch-free, ray-free.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from actors.strict import Strict
from actors.terms import MOST_PRIORITY, check_user, parse_seconds
from pool.errors import unknown_name, unusable_field
from pool.sampling.names import MAX_CFG, MAX_STEPS, MIN_CFG, SCHEDULES, resolve_sampler

#: sizes are multiples of this: the VAE halves a picture three times
SIZE_STEP = 8
MAX_SEED = 2**64 - 1


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

    @field_validator("steps")
    @classmethod
    def _steps(cls, value: int) -> int:
        if not 1 <= value <= MAX_STEPS:
            raise unusable_field("steps", value, f"a whole number from 1 to {MAX_STEPS}")
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
            raise unusable_field(info.field_name, value, f"a multiple of {SIZE_STEP} from {SIZE_STEP} to 16384")
        return value

    @field_validator("seed")
    @classmethod
    def _seed(cls, value: int | None) -> int | None:
        if value is not None and not 0 <= value <= MAX_SEED:
            raise unusable_field("seed", value, "a whole number from 0 to 2**64 - 1")
        return value

    @field_validator("priority")
    @classmethod
    def _priority(cls, value: int) -> int:
        if abs(value) > MOST_PRIORITY:
            raise unusable_field("priority", value, f"a whole number from -{MOST_PRIORITY} to {MOST_PRIORITY}")
        return value

    @field_validator("user")
    @classmethod
    def _user(cls, value: str | None) -> str | None:
        return None if value is None else check_user(value)

    @field_validator("deadline", mode="before")
    @classmethod
    def _deadline(cls, value: Any) -> float | None:
        return None if value is None else parse_seconds(value)

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
