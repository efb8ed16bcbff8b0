"""The base class of all parsed input: frozen models without unknown keys, and readable validation errors.

A field that is null (None) is not set, whatever its default: clients write every field that they know. Pydantic
validates; this module turns its errors, one of each field, into one `UserError` that names the fields, the values
found and the values expected, and suggests the nearest name for an unknown field.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo
from pydantic_core import ErrorDetails

from modelpool.actors.request.bounds import OverBound
from modelpool.actors.request.expected_words import expected_words
from modelpool.actors.request.other_names import unknown_field
from modelpool.pool.values.core.errors import UnusableField, UserError, together, unusable_field

#: what pydantic adds to the place of a value that may be of several types
_OPTION_OF_UNION = re.compile(
    r"(?:str|int|float|bool|path|constrained-\w+|(?:literal|function-\w+|lax-or-strict|is-instance|nullable)\[.*)$"
)
#: characters of a key in a message
_MOST_SHOWN = 200


class WrongValue(UnusableField):
    """A field with a value of the wrong type or range. `is_relative`: by its name in the model that has it, so that the
    model around it adds its own; not if the message was written again with a place."""

    def __init__(self, message: str, is_relative: bool = False, parts: tuple[UserError, ...] = ()) -> None:
        """`parts` are the errors of several fields in one message."""
        super().__init__(message)
        self.is_relative = is_relative
        self.parts = parts

    @classmethod
    def of(cls, parts: Sequence[UserError]) -> WrongValue:
        """Return the errors of several fields as one."""
        return cls(str(together([UserError(str(part)) for part in parts])), is_relative=True, parts=tuple(parts))

    def within(self, place: str) -> WrongValue:
        """Return the same error with the place of the model that has the field."""
        if self.parts:
            return WrongValue.of([_within(part, place) for part in self.parts])
        return WrongValue(f"{place}.{self}", is_relative=True)


def _within(problem: UserError, place: str) -> UserError:
    return problem.within(place) if isinstance(problem, WrongValue) and problem.is_relative else problem


class Strict(BaseModel):
    """A frozen model of external input.

    Raises a UserError (a ValueError) if the input is invalid.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def __init__(self, **fields: Any) -> None:
        problem: UserError | None = None
        # not a validator: validators of the class, which look at several fields, come first
        known = type(self).model_fields
        set_fields = {name: value for name, value in fields.items() if value is not None or name not in known}
        try:
            super().__init__(**set_fields)
        except ValidationError as error:
            problem = _one_error(type(self), error)
        # raised here, not above: pydantic's error refers to ours without supporting garbage collection, so that ours
        # must not refer to it as its context
        if problem is not None:
            raise problem
        for name, value in set_fields.items():
            # pydantic takes true for 1
            if isinstance(value, bool) and name in known and _takes_only_numbers(known[name].annotation):
                raise WrongValue(str(unusable_field(name, value, "a number")), is_relative=True)


def _takes_only_numbers(annotation: Any) -> bool:
    options = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    plain = {get_args(option)[0] if get_origin(option) is Annotated else option for option in options}
    return bool(plain & {int, float}) and not plain & {bool, Any}


def _one_error(model: type[BaseModel], error: ValidationError) -> UserError:
    """Return pydantic's errors, the most specific one of each field, as one UserError: unknown fields first, then the
    errors that validators raised. A field that has too much is reported alone."""
    details = error.errors()
    found: dict[str, UserError] = {}
    for detail in details:
        if detail["type"] == "extra_forbidden":
            unknown = unknown_field(f"field of {model.__name__}", str(detail["loc"][-1]), model.model_fields)
            found.setdefault(_place(detail), unknown)
    for detail in details:
        if (problem := _raised(detail)) is not None:
            found.setdefault(_field(detail), problem)
    for detail in details:  # the options of a union have an error each
        if detail["type"] != "extra_forbidden":
            found.setdefault(_field(detail), _to_user_error(detail))
    problems = list(found.values())
    over = next((problem for problem in problems if isinstance(problem, OverBound)), None)
    if over is not None:  # servers count these by their class
        return over
    return problems[0] if len(problems) == 1 else WrongValue.of(problems)


def _raised(detail: ErrorDetails) -> UserError | None:
    """Return the UserError that a validator raised, with the place of the part of a request in which it was."""
    problem = detail.get("ctx", {}).get("error")
    if not isinstance(problem, UserError):
        return None
    if isinstance(problem, WrongValue) and problem.is_relative and detail["loc"]:
        return problem.within(_place(detail))
    return problem


def _field(detail: ErrorDetails) -> str:
    return str(next(iter(detail["loc"]), ""))


def _place(detail: ErrorDetails) -> str:
    """Return the place of a value, without the type of a union for which pydantic tried it."""
    # keys of the caller are cut: they may be long
    parts = (str(part)[:_MOST_SHOWN] for part in detail["loc"])
    return ".".join(part for part in parts if not _OPTION_OF_UNION.match(part))


def _to_user_error(detail: ErrorDetails) -> UserError:
    if detail["type"] == "missing":
        return WrongValue(f"{_place(detail)}: missing; this field is required", is_relative=True)
    message = expected_words(detail["type"], detail["msg"])
    return WrongValue(str(unusable_field(_place(detail), detail["input"], message)), is_relative=True)


def no_truth_value(value: Any, about: ValidationInfo) -> Any:
    """Refuse a boolean in a field of a number: Python counts it as one. A validator before pydantic's own."""
    if isinstance(value, bool):
        raise unusable_field(str(about.field_name), value, "a number")
    return value


def check_schedule_span(field: str, start: float, end: float) -> None:
    """Raise UnusableField unless the fields `start` and `end` of `field` are a part of the schedule."""
    if not 0 <= start < end <= 1:
        expected = "fractions of the schedule from 0 to 1, with start below end"
        raise unusable_field(f"{field}.start, {field}.end", f"{start:g} to {end:g}", expected)
