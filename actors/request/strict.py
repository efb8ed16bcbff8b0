"""The base class of all parsed input: frozen models without unknown keys, and readable validation errors.

A field that is null (None) is not set, whatever its default: clients write every field that they know. Pydantic
validates; this module turns its first error into one `UserError` that names the field, the value found and the
value expected, and suggests the nearest name for an unknown field.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from modelpool.actors.request.other_names import unknown_field
from modelpool.pool.core.errors import UnusableField, UserError, unusable_field


class Strict(BaseModel):
    """A frozen model of external input.

    Raises a UserError (a ValueError) if the input is invalid.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def __init__(self, **fields: Any) -> None:
        problem: UserError | None = None
        # not a validator: those of the class, which look at several fields, come first
        known = type(self).model_fields
        set_fields = {name: value for name, value in fields.items() if value is not None or name not in known}
        try:
            super().__init__(**set_fields)
        except ValidationError as error:
            problem = _first_error(type(self), error)
        # raised here, not above: pydantic's error refers to ours without supporting garbage collection, so that ours
        # must not refer to it as its context
        if problem is not None:
            raise problem


def _first_error(model: type[BaseModel], error: ValidationError) -> UserError:
    """Return the most specific of pydantic's errors as a UserError."""
    details = error.errors()
    unknown = next((d for d in details if d["type"] == "extra_forbidden"), None)
    if unknown is not None:
        return unknown_field(f"field of {model.__name__}", str(unknown["loc"][-1]), model.model_fields)
    raised = next((d["ctx"]["error"] for d in details if isinstance(d.get("ctx", {}).get("error"), UserError)), None)
    if raised is not None:
        assert isinstance(raised, UserError)
        return raised
    return _to_user_error(details[0])


def _to_user_error(detail: ErrorDetails) -> UserError:
    field = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "missing":
        return UnusableField(f"{field}: missing; this field is required")
    message = detail["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    return unusable_field(field, detail["input"], message)
