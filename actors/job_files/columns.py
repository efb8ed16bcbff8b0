"""Columns of job files that are tables: which fields of a request they are."""

from __future__ import annotations

from collections.abc import Sequence

from modelpool.actors.request.other_names import unknown_field
from modelpool.actors.request.requests import DIFFUSERS_NAMES, GenerateRequest
from modelpool.pool.core.errors import UserError

#: fields with several values, which are one text in a table
LIST_FIELDS = ("loras", "controls", "regions", "reference")


def field_names(where: str, columns: Sequence[str]) -> list[str]:
    """Return the fields that columns are: names in any case, with spaces or hyphens for underscores.

    Raises UserError for a column that is no field, with the nearest one, and for two columns of one field.
    """
    names = [column.strip().lower().replace(" ", "_").replace("-", "_") for column in columns]
    known = {*GenerateRequest.model_fields, *DIFFUSERS_NAMES}
    for column, name in zip(columns, names, strict=True):
        if name not in known:
            raise UserError(f"{where}: {unknown_field('column', column, known)}")
        if names.count(name) > 1:
            raise UserError(f"{where}: column {column!r} occurs twice")
    return names
