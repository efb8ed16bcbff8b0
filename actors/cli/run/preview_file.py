"""Keeps the newest preview in a file, for image viewers that read a file again when it changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from modelpool.pool.values.core.errors import unusable_field

if TYPE_CHECKING:
    from modelpool.actors.outputs.results.previews import ImagePreview

#: formats of Pillow by the ending of the file
_FORMATS = {".webp": "WEBP", ".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG"}


def preview_file(path: str) -> Path:
    """Return the path of a file for previews. Raises UnusableField for another ending, or if its folder is missing."""
    found = Path(path).expanduser()
    if found.suffix.lower() not in _FORMATS:
        raise unusable_field("--preview", path, f"a file that ends in {', '.join(_FORMATS)}")
    if not found.parent.is_dir():
        raise unusable_field("--preview", path, "a file in a folder that exists")
    return found


def writer_of(path: Path) -> Callable[[ImagePreview], None]:
    """Return a function that replaces the file at `path`; a reader never sees half of one. Raises OSError."""

    def write(preview: ImagePreview) -> None:
        part = path.with_name(f".{path.name}.part")
        part.write_bytes(preview.as_format(_FORMATS[path.suffix.lower()]))
        part.replace(path)

    return write
