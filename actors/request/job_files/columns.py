"""Columns of job files: which fields of a request they are."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from modelpool.actors.request.other_names import unknown_field
from modelpool.actors.request.requests import OTHER_FIELDS, GenerateRequest
from modelpool.pool.values.core.errors import UserError, unusable_field

#: fields with several values, which are one text in a table
LIST_FIELDS = ("loras", "controls", "image_prompts", "regions", "reference")
_OPTION = "--column"


@dataclass(frozen=True, slots=True)
class ColumnChoice:
    """The choice of columns that a command makes for a job file.

    fields   the columns that fields have, by field; "" for none: a column of that name is not read
    ignores  columns that are no field are not read; without it, they are errors
    """

    fields: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    ignores: bool = False

    @classmethod
    def of(cls, given: Iterable[str], ignores: bool = False) -> ColumnChoice:
        """Parse texts such as prompt=caption, or width= for a column that is not read. Raises UserError."""
        found: dict[str, str] = {}
        for text in given:
            name, equals, column = (part.strip() for part in text.partition("="))
            if not equals:
                raise unusable_field(_OPTION, text, "FIELD=COLUMN, such as prompt=caption")
            if name not in GenerateRequest.model_fields:
                raise unknown_field(f"field in {_OPTION}", name, GenerateRequest.model_fields)
            if name in found:
                raise unusable_field(_OPTION, text, f"one column for {name}")
            if column and _plain(column) in map(_plain, found.values()):
                raise unusable_field(_OPTION, text, f"one field for column {column!r}")
            found[name] = column
        return cls(MappingProxyType(found), ignores)

    def field_names(self, where: str, columns: Sequence[str]) -> list[str]:
        """Return the fields that columns are, "" for those that are not read: names in any case, with spaces or hyphens
        for underscores.

        Raises UserError for a column that is no field, with the nearest one, for two columns of one field, and for a
        column that was named and is missing.
        """
        chosen = {_plain(column): name for name, column in self.fields.items() if column}
        found = set(map(_plain, columns))
        for name, column in self.fields.items():  # first: the column that is meant may be called a wrong name, too
            if column and _plain(column) not in found:
                raise UserError(f"{where}: has no column {column!r} for {name}; found {', '.join(columns)}")
        names = [chosen.get(_plain(column)) or self._own_name(where, column) for column in columns]
        for column, name in zip(columns, names, strict=True):
            if name and names.count(name) > 1:
                raise UserError(f"{where}: column {column!r} occurs twice")
        return names

    def row(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a row of JSON. Without a choice, a request names its unknown fields itself."""
        if not self.fields and not self.ignores:
            return dict(fields)
        chosen = {_plain(column): name for name, column in self.fields.items() if column}
        known = {*GenerateRequest.model_fields, *OTHER_FIELDS}
        found: dict[str, Any] = {}
        for key, value in fields.items():
            name = chosen.get(_plain(key), "" if key in self.fields else key)
            if name and (name in known or not self.ignores):
                found[name] = value
        return found

    def named_in(self, columns: Iterable[str]) -> set[str]:
        """Return the named columns that are among `columns`, as `missing` takes them."""
        return {_plain(column) for column in self.fields.values() if column}.intersection(map(_plain, columns))

    def missing(self, found: Container[str]) -> str:
        """Return a sentence about the named columns that are not among the `found` ones; "" if all are."""
        missing = [
            f"{column!r} for {name}" for name, column in self.fields.items() if column and _plain(column) not in found
        ]
        return f"no line has column {', '.join(missing)} ({_OPTION})" if missing else ""

    def _own_name(self, where: str, column: str) -> str:
        """Return the field that a column is by its own name; "" for one that is not read. Raises UserError."""
        name = _plain(column)
        known = {*GenerateRequest.model_fields, *OTHER_FIELDS}
        if name in self.fields:  # another column has it, or none
            return ""
        if name in known:
            return name
        if self.ignores:
            return ""
        hint = f"{_OPTION} FIELD={column} names its field, and --ignore-columns leaves such columns out"
        raise UserError(f"{where}: {unknown_field('column', column, known)} ({hint})")


#: every column is the field of its name
NO_CHOICE = ColumnChoice()


def _plain(column: str) -> str:
    return column.strip().lower().replace(" ", "_").replace("-", "_")
