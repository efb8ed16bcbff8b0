"""Folders as values: what many tests start from is made once and written again for each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeAlias

#: bytes of files by their path in the folder
Contents: TypeAlias = Mapping[str, bytes]


def contents_made(make: Callable[[Path], object]) -> Contents:
    """Return everything that `make` writes below the new folder that it gets."""
    with TemporaryDirectory() as name:
        base = Path(name)
        make(base)
        files = [path for path in base.rglob("*") if path.is_file()]
        return {path.relative_to(base).as_posix(): path.read_bytes() for path in files}


def write_contents(contents: Contents, base: Path) -> None:
    """Write files below `base`; folders are created."""
    for name, data in contents.items():
        path = base / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
