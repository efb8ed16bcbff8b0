"""`Uploads`: images that callers upload and name in later calls, in a bounded folder, apart for each owner."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from modelpool.actors.http.problems import HttpProblem
from modelpool.actors.outputs.atomic_write import write_atomically
from modelpool.actors.request.image_decoding import image_of_bytes
from modelpool.pool.core.errors import UserError, unusable_field

if TYPE_CHECKING:
    from PIL.Image import Image

#: of all uploads together; the oldest are removed
MOST_BYTES = 1 << 30
#: a name of a file or of a subfolder: no separators, and no dot at the start
_NAME = re.compile(r"[A-Za-z0-9_()\[\]][A-Za-z0-9_()\[\] .+-]{0,199}")


class Uploads:
    """Thread-safe."""

    def __init__(self, folder: Path, most_bytes: int = MOST_BYTES) -> None:
        self._folder = folder
        self._most_bytes = most_bytes
        self._lock = threading.Lock()

    def add(self, owner: str, name: str, content: bytes, subfolder: str = "", overwrite: bool = False) -> str:
        """Store an image, and return its name, which has a number if another image has that name. Raises UserError."""
        path = self._path(owner, name, subfolder)
        image_of_bytes("image", content)
        if len(content) > self._most_bytes:
            raise HttpProblem(413, f"image: found {len(content)} bytes, expected up to {self._most_bytes}")
        with self._lock:
            path.parent.mkdir(parents=True, exist_ok=True)
            number = 1
            while path.exists() and not overwrite and path.read_bytes() != content:
                path = self._path(owner, f"{Path(name).stem} ({number}){Path(name).suffix}", subfolder)
                number += 1
            write_atomically(path, content)
            self._remove_oldest(path)
        return path.name

    def names(self, owner: str) -> tuple[str, ...]:
        """Return the names of an owner's images, with their subfolders."""
        root = self._root(owner)
        return tuple(sorted(path.relative_to(root).as_posix() for path in _files(root)))

    def content(self, owner: str, name: str) -> bytes:
        """Return the file of an image. Raises UserError."""
        subfolder, _, file = name.removesuffix(" [input]").rpartition("/")
        try:
            return self._path(owner, file, subfolder).read_bytes()
        except OSError:
            raise UserError(f"image: {name} was not uploaded, or was removed since") from None

    def image(self, owner: str, name: str) -> Image:
        """Return an image. Raises UserError."""
        return image_of_bytes(name, self.content(owner, name))

    def _root(self, owner: str) -> Path:
        return self._folder / hashlib.sha256(owner.encode()).hexdigest()[:16]

    def _path(self, owner: str, name: str, subfolder: str) -> Path:
        for field, text in (("filename", name), ("subfolder", subfolder)):
            if not _NAME.fullmatch(text) and not (field == "subfolder" and not text):
                raise unusable_field(field, text[:100], "a plain name of letters, digits, spaces and . _ - ( )")
        return self._root(owner) / subfolder / name

    def _remove_oldest(self, newest: Path) -> None:
        files = sorted(_files(self._folder), key=lambda path: (path == newest, path.stat().st_mtime))
        total_bytes = sum(path.stat().st_size for path in files)
        for path in files[:-1]:
            if total_bytes <= self._most_bytes:
                return
            total_bytes -= path.stat().st_size
            path.unlink()


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
