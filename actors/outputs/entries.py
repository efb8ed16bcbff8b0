"""One entry of a manifest, as a typed value. Knows what an entry contains; not files or folders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from modelpool.actors.graph.features.recipe import Recipe
from modelpool.actors.outputs.recipe_json import recipe_from_json
from modelpool.actors.request.json_text import parse_json
from modelpool.actors.request.labels import Labels, labels_from_json, output_key
from modelpool.pool.values.core.errors import UserError, unusable_field

#: required fields and their types; others were added later
_TYPES: Mapping[str, type] = {"digest": str, "file": str, "run": int, "index": int, "pixels_sha256": str}
_LATER_TYPES: Mapping[str, type] = {"file_bytes": int, "file_sha256": str, "id": str, "line": int}
_TYPE_NAMES = {str: "a text", int: "a whole number"}


class UnusableEntry(UserError):
    """A JSON object that is not an entry of a manifest. The message names the field."""


@dataclass(frozen=True, slots=True)
class ManifestEntry:
    """A finished output, as listed.

    digest         of the recipe
    file           name in the folder, without a path
    run, index     number of the run that wrote it, and position of its request in the command or call, from 0
    pixels_sha256  of the pixels as generated, independent of the file; "" if they are not known any more
    file_bytes, file_sha256  of the file; None and "" in entries of earlier versions
    fields         the complete entry
    """

    digest: str
    file: str
    run: int
    index: int
    recipe: Recipe
    pixels_sha256: str
    file_bytes: int | None
    file_sha256: str
    fields: Mapping[str, Any]

    @property
    def labels(self) -> Labels:
        """The labels of its request."""
        return labels_from_json({name: value for name, value in self.fields.items() if name != "name"})

    @property
    def key(self) -> str:
        """What identifies it among the outputs of a place."""
        return output_key(self.digest, self.fields.get("id") or "")


def parse_entry(fields: Any) -> ManifestEntry:
    """Return `fields` as an entry. Raises UserError naming a field that is missing or of another type, or a file that
    is not directly in the folder.
    """
    if not isinstance(fields, Mapping):
        raise UnusableEntry(f"found {type(fields).__name__}, expected a JSON object")
    for name in (*_TYPES, "recipe"):
        if name not in fields:
            raise UnusableEntry(f"no {name!r}; is it an entry of a modelpool manifest?")
    for name, expected in {**_TYPES, **_LATER_TYPES}.items():
        if name in fields and type(fields[name]) is not expected:
            raise unusable_field(name, _shortened(fields[name]), _TYPE_NAMES[expected])
    file = fields["file"]
    if not file or file.startswith(".") or any(character in file for character in "/\\\0"):
        raise unusable_field("file", _shortened(file), "the name of a file in the folder of the manifest")
    return ManifestEntry(
        digest=fields["digest"],
        file=file,
        run=fields["run"],
        index=fields["index"],
        recipe=recipe_from_json(fields["recipe"]),
        pixels_sha256=fields["pixels_sha256"],
        file_bytes=fields.get("file_bytes"),
        file_sha256=fields.get("file_sha256", ""),
        fields=fields,
    )


def _shortened(found: object) -> str:
    text = found if isinstance(found, str) else repr(found)
    return text if len(text) <= 80 else f"{text[:80]}..."


def is_usable(line: bytes) -> bool:
    """Return whether a line of a manifest is an entry."""
    try:
        parse_entry(parse_json(line))
    except UserError:
        return False
    return True
