"""Labels of a request: its id, metadata and line of a job file, which its output carries; parsed and validated.

Labels do not change the output: seeds of job files, recipes and task ids leave them out (`LABEL_FIELDS`), and they are
not sent to the controller. Torch-free, ray-free.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from modelpool.actors.request.json_text import NotJson, parse_json
from modelpool.pool.values.core.errors import counted, unusable_field

#: request fields that an output carries and that do not change it
LABEL_FIELDS = frozenset({"id", "metadata", "line"})
MAX_ID_CHARACTERS = 200
#: larger numbers are in no table, and printing them takes long
_MOST_ID = 1 << 128
#: bound of metadata as JSON: a manifest has it once for each output, and PNG readers limit texts to 1 MiB
MAX_METADATA_BYTES = 16 << 10
#: lists and objects within each other; a manifest, a journal and an HTTP body nest it deeper
MAX_METADATA_DEPTH = 16


@dataclass(frozen=True, slots=True)
class Labels:
    """The labels of an output.

    id        chosen by the user; "" if there is none
    metadata  JSON values; None if there are none
    line      of the job file that the request is from, from 1; None if it is from none
    name      stem of the file name that was asked for; "" for the default
    """

    id: str = ""
    metadata: Any = None
    line: int | None = None
    name: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return those that are set as JSON values. `name` is left out: an entry has the name of the file."""
        found = {"id": self.id or None, "metadata": self.metadata, "line": self.line}
        return {name: value for name, value in found.items() if value is not None}

    def as_text(self) -> str:
        """Return those that are set, with `name`, as JSON for an output file; "" if none is."""
        found = {**self.as_json(), **({"name": self.name} if self.name else {})}
        return json.dumps(found) if found else ""


#: of an output that has none
NO_LABELS = Labels()


class Labelled(Protocol):
    """A request, as far as its labels go."""

    @property
    def id(self) -> str | None: ...
    @property
    def metadata(self) -> Any: ...
    @property
    def line(self) -> int | None: ...


def labels_of(request: Labelled, name: str = "") -> Labels:
    """Return the labels of a request. `name` is the stem of the file name that was asked for."""
    return Labels(request.id or "", request.metadata, request.line, name)


def labels_from_json(fields: Any) -> Labels:
    """Return the labels in an output file or in a manifest; those that cannot be used are left out."""
    if not isinstance(fields, Mapping):
        return NO_LABELS
    label_id, line, name = fields.get("id"), fields.get("line"), fields.get("name")
    return Labels(
        label_id if isinstance(label_id, str) else "",
        fields.get("metadata"),
        line if isinstance(line, int) and not isinstance(line, bool) else None,
        name if isinstance(name, str) else "",
    )


def output_key(digest: str, label_id: str) -> str:
    """Return the key of an output in its place: the digest of its recipe, or 20 hexadecimal digits of it
    and the id of the request. Equal requests with different ids have a file each.
    """
    if not label_id:
        return digest
    return hashlib.sha256(f"{digest}\0{label_id}".encode()).hexdigest()[:20]


def checked_id(value: Any) -> str:
    """Return the id of a request: a text, or a whole number as text, since tables often have ids as numbers. Raises
    UnusableField."""
    expected = f"a text of 1 to {MAX_ID_CHARACTERS} printable characters, or a whole number"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _MOST_ID:
        return str(value)
    if not isinstance(value, str) or not 0 < len(value) <= MAX_ID_CHARACTERS or not value.isprintable():
        found = value[:40] if isinstance(value, str) else value
        raise unusable_field("id", found, expected)
    return value


def checked_metadata(value: Any) -> Any:
    """Return JSON values as `json.loads` would: a copy. Raises UnusableField for anything else, and for too much."""
    try:
        text = json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
        content = text.encode("utf-8")
    except (TypeError, ValueError, RecursionError) as problem:
        raise unusable_field("metadata", type(value).__name__, f"JSON values ({problem})") from None
    if len(content) > MAX_METADATA_BYTES:
        raise unusable_field("metadata", counted(len(content), "byte"), f"up to {MAX_METADATA_BYTES} bytes of JSON")
    try:
        return parse_json(content, max_depth=MAX_METADATA_DEPTH)
    except NotJson as problem:
        raise unusable_field("metadata", type(value).__name__, f"JSON values ({problem})") from None
