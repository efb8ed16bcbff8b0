"""`OutputLayout`: how the outputs of a place are stored: as files, or packed in WebDataset or Parquet shards.

A place that has another layout than files, or thumbnails, says so in `layout.json`, so that every process that opens it
writes and reads it in the same way.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from modelpool.actors.config.output_address import OutputAddress
from modelpool.actors.outputs.objects import ObjectPrefix
from modelpool.actors.request.json_text import NotJson, parse_json
from modelpool.pool.values.core.errors import UserError, unknown_name, unusable_field

LAYOUT_NAME = "layout.json"
MAX_SHARD_ROWS, MAX_THUMBNAIL_PIXELS = 1_000_000, 4096
#: longest side of a thumbnail
THUMBNAIL_PIXELS = 256


class LayoutKind(Enum):
    """What an output becomes part of."""

    FILES = "files"
    WEBDATASET = "webdataset"
    PARQUET = "parquet"


@dataclass(frozen=True, slots=True)
class OutputLayout:
    """How outputs are stored.

    shard_rows         most outputs in a shard; 0 for files
    thumbnail_pixels   longest side of the thumbnails; 0 for none
    """

    kind: LayoutKind = LayoutKind.FILES
    shard_rows: int = 0
    thumbnail_pixels: int = 0

    def __post_init__(self) -> None:
        if self.kind is LayoutKind.FILES:
            if self.shard_rows:
                raise unusable_field("shards", self.shard_rows, "a layout with shards: webdataset or parquet")
        elif not 0 < self.shard_rows <= MAX_SHARD_ROWS:
            raise unusable_field("shards", self.shard_rows, f"a number of outputs from 1 to {MAX_SHARD_ROWS}")
        elif self.thumbnail_pixels:
            raise unusable_field("thumbnails", self.thumbnail_pixels, "no shards: thumbnails are files next to images")
        if not 0 <= self.thumbnail_pixels <= MAX_THUMBNAIL_PIXELS:
            raise unusable_field("thumbnails", self.thumbnail_pixels, f"pixels, up to {MAX_THUMBNAIL_PIXELS}")

    def as_json(self) -> dict[str, Any]:
        """Return the content of `LAYOUT_NAME`."""
        return {"layout": self.kind.value, "shard_rows": self.shard_rows, "thumbnail_pixels": self.thumbnail_pixels}


FILES = OutputLayout()


def layout_of(shard_rows: int | None, shard_format: str | None, has_thumbnails: bool) -> OutputLayout:
    """Return the layout of a command's options --shards, which is None for files, --shard-format, and --thumbnails.
    Raises UserError."""
    kinds = {kind.value: kind for kind in LayoutKind if kind is not LayoutKind.FILES}
    if shard_format is not None and shard_format not in kinds:
        raise unknown_name("shard format", shard_format, kinds)
    if shard_rows is None and shard_format is not None:
        raise unusable_field("--shard-format", shard_format, "--shards N, too: without it, outputs are files")
    if shard_rows is not None and shard_rows < 1:
        raise unusable_field("--shards", shard_rows, "a whole number from 1")
    kind = LayoutKind.FILES if shard_rows is None else kinds[shard_format or LayoutKind.WEBDATASET.value]
    return OutputLayout(kind, shard_rows or 0, THUMBNAIL_PIXELS if has_thumbnails else 0)


def read_layout(address: OutputAddress) -> OutputLayout:
    """Return the layout of a place; files for one that says nothing. Raises OutputFailed, and UserError for a
    `layout.json` of another program.
    """
    if isinstance(address, Path):
        try:
            content: bytes | None = (address / LAYOUT_NAME).read_bytes()
        except OSError:  # a folder that cannot be read is reported by who opens it
            content = None
    else:
        content = objects_at(address).read_one(LAYOUT_NAME)
    return FILES if content is None else _parsed(content, f"{address}/{LAYOUT_NAME}")


def declare_layout(address: OutputAddress, layout: OutputLayout) -> None:
    """Give a place its layout before anything is written there. Raises UnusableField if it has another one."""
    found = read_layout(address)
    if found == layout:
        return
    objects = objects_at(address)
    if found == FILES and not objects.has_any():
        content = json.dumps(layout.as_json(), indent=1).encode()
        found = layout if objects.create(LAYOUT_NAME, content) else read_layout(address)
    if found != layout:
        expected = f"a place without outputs, or with {_words(layout)}; this one has {_words(found)}"
        raise unusable_field("output", str(address), expected)


def objects_at(address: OutputAddress) -> ObjectPrefix:
    """Return the objects of a place; in a folder, its files."""
    return ObjectPrefix(f"file://{address.absolute()}" if isinstance(address, Path) else address)


def _words(layout: OutputLayout) -> str:
    words = "files" if layout.kind is LayoutKind.FILES else f"{layout.kind.value} shards of {layout.shard_rows}"
    return f"{words} and thumbnails of {layout.thumbnail_pixels} pixels" if layout.thumbnail_pixels else words


def _parsed(content: bytes, name: str) -> OutputLayout:
    try:
        fields = parse_json(content)
    except NotJson as problem:
        raise UserError(f"{name}: {problem}") from None
    kinds = [kind.value for kind in LayoutKind]
    if not isinstance(fields, Mapping) or fields.get("layout") not in kinds:
        raise UserError(f"{name}: found {content[:80]!r}, expected an object with a layout of {', '.join(kinds)}")
    numbers = [fields.get(name, 0) for name in ("shard_rows", "thumbnail_pixels")]
    if not all(type(number) is int for number in numbers):
        raise UserError(f"{name}: found {numbers}, expected whole numbers")
    return OutputLayout(LayoutKind(fields["layout"]), *numbers)
