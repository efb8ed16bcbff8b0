"""Strict reader for one line of a trace: each field once, of its type, in its range; no unknown fields.

Every error names the line and the field, what was found and what was expected. Knows nothing of the meaning of fields.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from math import inf, isfinite
from typing import Final, TypeVar

from modelpool.pool.values.core.errors import UserError, unknown_name, unusable_field

T = TypeVar("T")

#: the largest meaningful count of bytes, seeds or places
MOST: Final = 2**63 - 1
#: the longest duration, about 32 years, and the latest time: beyond it a clock cannot resolve a tenth of a millisecond
MOST_SECONDS: Final = 1e9
LATEST: Final = 1e12
#: the most steps of an image, and passes over weights
MOST_STEPS: Final = 1_000_000


class Fields:
    """The fields of one JSON object, taken one by one. A default is the value of a missing field."""

    def __init__(self, place: str, values: Mapping[str, object]) -> None:
        self._place = place
        self._values = dict(values)
        self._known: list[str] = []

    @classmethod
    def of_line(cls, number: int, line: str) -> Fields:
        """Raises UnusableField if the line is not one JSON object, or names a field twice."""
        place = f"line {number}"
        try:
            value = json.loads(line, object_pairs_hook=_without_repeats)
        except (ValueError, RecursionError) as error:
            raise unusable_field(place, line[:80], f"one JSON object ({error})") from None
        return cls._of(place, value)

    def __contains__(self, name: str) -> bool:
        return name in self._values

    @property
    def names(self) -> tuple[str, ...]:
        """The fields that were not taken yet."""
        return tuple(self._values)

    def text(self, name: str, default: str | None = None) -> str:
        """A string; without a default it must exist and be non-empty."""
        found = self._take(name, default)
        if not isinstance(found, str) or (default is None and not found):
            raise self.problem(name, found, "a text" if default is not None else "a text that is not empty")
        return found

    def one_of(self, name: str, choices: Mapping[str, T]) -> T:
        """The value in `choices` for the text found."""
        found = self.text(name)
        if found not in choices:
            raise self.problem(name, found, "one of " + ", ".join(choices))
        return choices[found]

    def whole(self, name: str, least: int, default: int | None = None, most: int = MOST) -> int:
        """An integer."""
        found = self._take(name, default)
        if isinstance(found, bool) or not isinstance(found, int) or not least <= found <= most:
            raise self.problem(name, found, f"a whole number from {least} to {most}")
        return found

    def number(self, name: str, least: float, default: float | None = None, most: float = inf) -> float:
        """A finite number."""
        found = self._take(name, default)
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise self.problem(name, found, "a number")
        if not (isfinite(found) if isinstance(found, float) else abs(found) <= MOST) or not least <= found <= most:
            upper = f" to {most}" if isfinite(most) else " or more"
            raise self.problem(name, found, f"a finite number from {least}{upper}")
        return float(found)

    def number_or_none(self, name: str, least: float, most: float = inf) -> float | None:
        """A finite number; None if null or missing."""
        if self._values.get(name) is None:
            self._known.append(name)
            self._values.pop(name, None)
            return None
        return self.number(name, least, most=most)

    def truth(self, name: str, default: bool) -> bool:
        """A boolean."""
        found = self._take(name, default)
        if not isinstance(found, bool):
            raise self.problem(name, found, "true or false")
        return found

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of non-empty strings; () if missing."""
        return tuple(self.as_text(f"{name}[{i}]", found) for i, found in enumerate(self.items(name)))

    def items(self, name: str) -> list[object]:
        """A list of any values; empty if missing."""
        found = self._take(name, [])
        if not isinstance(found, list):
            raise self.problem(name, found, "a list")
        return list(found)

    def objects(self, name: str) -> list[Fields]:
        """A list of objects; empty if missing."""
        return [self._of(f"{self._place}: {name}[{i}]", found) for i, found in enumerate(self.items(name))]

    def as_text(self, name: str, found: object) -> str:
        """`found`, the value of field `name`, as a non-empty string."""
        if not isinstance(found, str) or not found:
            raise self.problem(name, found, "a text that is not empty")
        return found

    def problem(self, name: str, found: object, expected: str) -> UserError:
        """An error about a field."""
        return unusable_field(f"{self._place}: {name}" if name else self._place, found, expected)

    def end(self) -> None:
        """Raises UnknownName if unknown fields are left."""
        if self._values:
            raise unknown_name(f"field of {self._place}", next(iter(self._values)), self._known)

    @classmethod
    def _of(cls, place: str, value: object) -> Fields:
        if not isinstance(value, dict):
            raise unusable_field(place, value, "a JSON object")
        return cls(place, value)

    def _take(self, name: str, default: object) -> object:
        self._known.append(name)
        if name not in self._values and default is None:
            raise self.problem(name, None, "this field to exist")
        return self._values.pop(name, default)


def _without_repeats(pairs: Iterable[tuple[str, object]]) -> dict[str, object]:
    values: dict[str, object] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"{name!r} is named twice")
        values[name] = value
    return values
