"""`Uploads`: images, videos and audio that callers upload and name in later calls, in a bounded folder, each
owner apart."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from modelpool.actors.http.service.held_shares import of_the_largest
from modelpool.actors.http.service.problems import HttpProblem
from modelpool.actors.http.service.shown_names import (
    INPUT_MARK,
    folders_on_disk,
    name_of_disk,
    name_on_disk,
    numbered_name,
    shown_name,
)
from modelpool.actors.outputs.atomic_write import (
    TEMPORARY_SUFFIX,
    make_private_folder,
    remove_leftovers,
    write_atomically,
)
from modelpool.actors.request.audio_fields import AudioFile, audio_facts, check_audio_content, is_audio
from modelpool.actors.request.control_video_fields import VideoFile, check_video_content, is_moving, video_facts
from modelpool.actors.request.image_decoding import image_of_bytes
from modelpool.pool.values.core.errors import UserError, counted, unusable_field

if TYPE_CHECKING:
    from PIL.Image import Image

#: of all uploads together, and the part of it that a user with a key may have; the oldest are removed
MOST_BYTES, MOST_BYTES_OF_USER = 1 << 30, 256 << 20
#: uploads of an owner
MOST_FILES_OF_OWNER = 2000


class Uploads:
    """Thread-safe."""

    def __init__(
        self, folder: Path, most_bytes: int = MOST_BYTES, most_bytes_of_user: int = MOST_BYTES_OF_USER
    ) -> None:
        self._folder = folder
        self._most_bytes = most_bytes
        self._most_bytes_of_user = min(most_bytes, most_bytes_of_user)
        self._lock = threading.Lock()
        #: of each owner's folder: the files that are known, oldest first, with their bytes; and the sums of bytes. Read
        #: from disk once; other servers with the same folder may add files, which count after the next start
        self._files: dict[str, OrderedDict[Path, int]] | None = None
        self._bytes: Counter[str] = Counter()

    def add(self, owner: str, name: str, content: bytes, subfolder: str = "", overwrite: bool = False) -> str:
        """Store an image, a video or audio, and return its name, which has a number if another file has that name.
        Raises UserError."""
        name = shown_name(name)
        path = self._path(owner, name, subfolder)
        if is_moving(name):
            check_video_content("image", name, content)
        elif is_audio(name):
            check_audio_content("image", name, content)
        else:
            image_of_bytes("image", content)
        most_bytes = self._most_bytes_of(owner)
        if len(content) > most_bytes:
            message = f"image: found {counted(len(content), 'byte')}, expected up to {most_bytes}"
            raise HttpProblem(413, message, limit="stored_bytes")
        with self._lock:
            self._make_folder(path, subfolder)
            number, stored = 1, name
            while not overwrite and _is_another(path, content):
                stored = numbered_name(name, number)
                path = self._path(owner, stored, subfolder)
                number += 1
            write_atomically(path, content)
            self._note(self._root(owner).name, path, len(content))
            self._remove_oldest(owner)
        return stored

    def names(self, owner: str) -> tuple[str, ...]:
        """Return the names of an owner's files, with their subfolders."""
        root = self._root(owner)
        return tuple(sorted("/".join(map(name_of_disk, path.relative_to(root).parts)) for path in _files(root)))

    def content(self, owner: str, name: str) -> bytes:
        """Return the file of an image. Raises UserError."""
        subfolder, _, file = name.removesuffix(INPUT_MARK).rpartition("/")
        try:
            return self._path(owner, file, subfolder).read_bytes()
        except OSError:
            raise UserError(f"image: {name} was not uploaded, or was removed since") from None

    def image(self, owner: str, name: str) -> Image:
        """Return an image. Raises UserError."""
        return image_of_bytes(name, self.content(owner, name))

    def video(self, owner: str, name: str) -> VideoFile:
        """Return the facts of a video, with the place of its file. Raises UserError."""
        subfolder, _, file = name.removesuffix(INPUT_MARK).rpartition("/")
        path = self._path(owner, file, subfolder)
        if not path.is_file():
            raise UserError(f"video: {name[:200]} was not uploaded, or was removed since")
        try:
            return video_facts("video", str(path))
        except UserError:
            raise UserError(f"video: {name[:200]} cannot be read as a video") from None

    def audio(self, owner: str, name: str) -> AudioFile:
        """Return the facts of an audio file, with its place. Raises UserError."""
        subfolder, _, file = name.removesuffix(INPUT_MARK).rpartition("/")
        path = self._path(owner, file, subfolder)
        if not path.is_file():
            raise UserError(f"audio: {name[:200]} was not uploaded, or was removed since")
        try:
            return audio_facts("audio", str(path))
        except UserError as problem:
            # the caller does not know the place of the file
            raise UserError(str(problem).replace(str(path), name[:200])) from None

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

    def _most_bytes_of(self, owner: str) -> int:
        """Return how much an owner may have: all, without keys."""
        return self._most_bytes_of_user if owner else self._most_bytes

    def _note(self, root: str, path: Path, size_bytes: int) -> None:
        """Count a file of an owner's folder as the newest."""
        if self._files is None:
            self._files = {}
            remove_leftovers(self._folder.rglob(f".*{TEMPORARY_SUFFIX}"))
            found = sorted((path.stat().st_mtime, path) for path in _files(self._folder))
            for _, each in found:
                self._note(each.relative_to(self._folder).parts[0], each, each.stat().st_size)
        known = self._files.setdefault(root, OrderedDict())
        self._bytes[root] += size_bytes - known.pop(path, 0)
        known[path] = size_bytes

    def _remove_oldest(self, owner: str) -> None:
        """Remove the oldest files of `owner`, then of the owners who have most, until the bounds are kept."""
        assert self._files is not None, "a file was noted"
        root = self._root(owner).name
        most_bytes = self._most_bytes_of(owner)
        while len(self._files[root]) > MOST_FILES_OF_OWNER or self._bytes[root] > most_bytes:
            self._remove_first(root)
        while self._bytes.total() > self._most_bytes:
            self._remove_first(of_the_largest(self._bytes))

    def _remove_first(self, root: str) -> None:
        assert self._files is not None, "a file was noted"
        path, size_bytes = self._files[root].popitem(last=False)
        self._bytes[root] -= size_bytes
        path.unlink(missing_ok=True)


def _is_another(path: Path, content: bytes) -> bool:
    """Whether there is a file with other content; files of other sizes are not read."""
    try:
        return path.stat().st_size != len(content) or path.read_bytes() != content
    except FileNotFoundError:
        return False


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
