"""`Uploads`: images that callers upload and name in later calls, in a bounded folder, apart for each owner."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from modelpool.actors.http.problems import HttpProblem
from modelpool.actors.http.shown_names import folders_on_disk, name_of_disk, name_on_disk, shown_name
from modelpool.actors.outputs.atomic_write import make_private_folder, write_atomically
from modelpool.actors.request.image_decoding import image_of_bytes
from modelpool.pool.core.errors import UserError, unusable_field

if TYPE_CHECKING:
    from PIL.Image import Image

#: of all uploads together; the oldest are removed
MOST_BYTES = 1 << 30


class Uploads:
    """Thread-safe."""

    def __init__(self, folder: Path, most_bytes: int = MOST_BYTES) -> None:
        self._folder = folder
        self._most_bytes = most_bytes
        self._lock = threading.Lock()

    def add(self, owner: str, name: str, content: bytes, subfolder: str = "", overwrite: bool = False) -> str:
        """Store an image, and return its name, which has a number if another image has that name. Raises UserError."""
        name = shown_name(name)
        path = self._path(owner, name, subfolder)
        image_of_bytes("image", content)
        if len(content) > self._most_bytes:
            raise HttpProblem(413, f"image: found {len(content)} bytes, expected up to {self._most_bytes}")
        with self._lock:
            self._make_folder(path, subfolder)
            number, stored = 1, name
            while path.exists() and not overwrite and path.read_bytes() != content:
                stored = f"{Path(name).stem} ({number}){Path(name).suffix}"
                path = self._path(owner, stored, subfolder)
                number += 1
            write_atomically(path, content)
            self._remove_oldest(path)
        return stored

    def names(self, owner: str) -> tuple[str, ...]:
        """Return the names of an owner's images, with their subfolders."""
        root = self._root(owner)
        return tuple(sorted("/".join(map(name_of_disk, path.relative_to(root).parts)) for path in _files(root)))

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
        """Return the place of an image. Raises UnusableField."""
        folders = folders_on_disk("subfolder", subfolder)
        return self._root(owner).joinpath(*folders, name_on_disk("filename", name))

    def _make_folder(self, path: Path, subfolder: str) -> None:
        """Make the folder of an image. Raises UnusableField if a file has the name of a folder, or a folder its."""
        try:
            make_private_folder(path.parent)
        except (FileExistsError, NotADirectoryError):
            raise unusable_field("subfolder", subfolder[:100], "another name: a file has it") from None
        if path.is_dir():
            raise unusable_field("filename", name_of_disk(path.name)[:100], "another name: a subfolder has it")

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
