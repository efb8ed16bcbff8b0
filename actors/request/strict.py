"""The base of every value that comes from outside: frozen, no unknown keys, and complaints that help.

Pydantic checks; this module turns its complaints into one `UserError` that names the field, what was found and what was
expected, and suggests the nearest name for an unknown field.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from modelpool.pool.core.errors import UserError, unknown_name, unusable_field


class Strict(BaseModel):
    """A frozen model of outside input.

    Raises a UserError (a ValueError) when it is built from anything unusable.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as complaint:
            raise _first_complaint(type(self), complaint) from None


def _first_complaint(model: type[BaseModel], complaint: ValidationError) -> UserError:
    """The most telling of pydantic's errors, as a UserError."""
    details = complaint.errors()
    unknown = next((d for d in details if d["type"] == "extra_forbidden"), None)
    if unknown is not None:
        return unknown_name(f"field of {model.__name__}", str(unknown["loc"][-1]), model.model_fields)
    own = next((d["ctx"]["error"] for d in details if isinstance(d.get("ctx", {}).get("error"), UserError)), None)
    if own is not None:
        assert isinstance(own, UserError)
        return own
    return _translated(details[0])


def _translated(detail: ErrorDetails) -> UserError:
    field = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "missing":
        return unusable_field(field, "nothing", "a value; this field must be given")
    message = detail["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    return unusable_field(field, detail["input"], message)
