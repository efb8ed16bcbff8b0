"""`ObjectPrefix`: the objects below one URL, through fsspec. Knows bytes and names; not what an output is.

An object exists completely or not at all, and `create` never replaces one: where the store has a conditional put
(S3's `If-None-Match: *`), that decides; in a folder, a hard link; elsewhere the content is uploaded under a temporary
name, and moved.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO

from modelpool.actors.outputs.atomic_write import (
    LEFTOVER_SECONDS,
    TEMPORARY_SUFFIX,
    remove_leftovers,
    sync_folder,
    temporary_file,
    temporary_files,
)
from modelpool.actors.outputs.write_failures import FolderFailed
from modelpool.pool.files.fetch.file_system import open_file_system
from modelpool.pool.files.fetch.source_url import FILE_SCHEME, scheme_of, without_credentials
from modelpool.pool.values.core.errors import UserError

#: bytes that one call of `read` requests at a time
READ_BYTES = 64 << 20
#: a store that does not answer holds up the other outputs of its process: give up after a quarter of a minute instead
#: of botocore's five minutes. It is tried again later
_OF_BOTOCORE: Mapping[str, Any] = {"connect_timeout": 5, "read_timeout": 60, "retries": {"total_max_attempts": 3}}
_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    **{key: {"config_kwargs": _OF_BOTOCORE} for key in ("s3", "s3a")},
    FILE_SCHEME: {"auto_mkdir": True},
}
_PROBE_CONTENT = b"modelpool"
#: objects that are being written, and probes. Files that a killed process left are removed a day later; at
#: once if no process holds it, in a folder
TEMPORARY_FOLDER = ".partial/"


class ObjectPrefix:
    """Objects below a URL, by their names relative to it. Thread-safe.

    Every method raises FolderFailed, with the URL and what to do: a store that refuses one object refuses others too.
    """

    def __init__(self, url: str) -> None:
        """Raises FolderFailed naming the extra to install if the library of the scheme is missing. Contacts no
        store.
        """
        self.url = url
        try:
            self._system = open_file_system(url, use_listings_cache=False, **_OPTIONS.get(scheme_of(url), {}))
        except UserError as problem:
            raise FolderFailed(without_credentials(str(problem))) from problem
        self._is_folder = scheme_of(url) == FILE_SCHEME
        self._root = str(self._system._strip_protocol(url)).rstrip("/")
        #: whether the store refuses to create an object that exists; None while unknown
        self._is_conditional: bool | None = None

    def url_of(self, name: str) -> str:
        """Return the URL of an object."""
        return f"{self.url}/{name}"

    def check_writable(self) -> None:
        """Create and remove a small object: only this detects a wrong bucket, missing permissions and what the store's
        conditional puts do. The first call also removes temporary objects of killed processes.
        """
        name = self._temporary(f"{'.' if self._is_folder else ''}probe-{uuid.uuid4().hex}")
        with self._failures_named():
            is_conditional = not self._is_folder and self._is_put_conditional(name)
            if self._is_folder:
                self._with_temporary(Path(self._key(name)), lambda file: file.write(_PROBE_CONTENT), lambda: None)
            else:
                if not is_conditional:
                    self._system.pipe_file(self._key(name), _PROBE_CONTENT)
                with contextlib.suppress(PermissionError):  # a store that keeps everything: the probe stays
                    self._system.rm_file(self._key(name))
        if self._is_conditional is None:
            self._remove_leftovers()
        self._is_conditional = is_conditional

    def sizes(self, below: str = "") -> dict[str, int]:
        """Return the sizes of all objects with names that begin with `below`, a folder that ends in a slash; temporary
        ones are left out.
        """
        with self._failures_named():
            self._system.invalidate_cache()
            try:
                found: Mapping[str, Mapping[str, Any]] = self._system.find(self._key(below).rstrip("/"), detail=True)
            except FileNotFoundError:
                return {}
        names = {key.removeprefix(f"{self._root}/"): facts for key, facts in found.items()}
        return {
            name: int(facts["size"] or 0)
            for name, facts in names.items()
            if facts.get("type", "file") == "file" and not name.endswith(TEMPORARY_SUFFIX)
        }

    def has_any(self) -> bool:
        """Whether there is any object, other than a temporary one."""
        return bool(self.sizes())

    def size(self, name: str) -> int | None:
        """Return the size of an object; None if there is none."""
        with self._failures_named():
            try:
                return int(self._system.info(self._key(name))["size"])
            except FileNotFoundError:
                return None

    def read(self, sizes: Mapping[str, int]) -> Iterator[tuple[str, bytes]]:
        """Yield the contents of objects with about these sizes, several requests at a time. Those that do not exist are
        left out.
        """
        for names in _groups(sizes):
            with self._failures_named():
                # unlike `cat`, without a request for each object to see whether it is a folder
                keys = [self._key(name) for name in names]
                found = self._system.cat_ranges(keys, None, None, on_error="return")
                for name, content in zip(names, found, strict=True):
                    if isinstance(content, FileNotFoundError):
                        continue
                    if isinstance(content, BaseException):
                        raise content
                    yield name, content

    def read_one(self, name: str) -> bytes | None:
        """Return the content of an object; None if there is none."""
        return next((content for _, content in self.read({name: 0})), None)

    def create(self, name: str, content: bytes) -> bool:
        """Store an object unless one of this name exists; return whether it was stored."""
        if self._is_conditional is None:
            self.check_writable()
        with self._failures_named():
            if self._is_conditional:
                return self._put_new(name, content)
            return self._move_new(name, content)

    def create_from(self, name: str, path: Path) -> bool:
        """Store a file of this machine as an object, of any size, unless one of this name exists; return whether it was
        stored.
        """
        if self._is_conditional is None:
            self.check_writable()
        with self._failures_named():
            if self._is_folder:
                with path.open("rb") as content:
                    return self._link_new(name, lambda file: shutil.copyfileobj(content, file, 1 << 20))
            if not self._is_conditional:
                return self._move_new_as(name, self._temporary(f"{uuid.uuid4().hex}"), path)
            try:
                self._system.put_file(str(path), self._key(name), mode="create")
            except FileExistsError:
                return False
            return True

    def reader(self, name: str) -> ObjectReader:
        """Return a reader of parts of an object."""
        return ObjectReader(self, name)

    def read_range(self, name: str, start: int, end: int) -> bytes:
        """Return the bytes of an object from `start` to `end`."""
        with self._failures_named():
            return bytes(self._system.cat_file(self._key(name), start=start, end=end))

    @contextlib.contextmanager
    def opened(self, name: str) -> Iterator[BinaryIO]:
        """Open an object as a file that is read in parts."""
        with self._failures_named(), self._system.open(self._key(name), "rb") as file:
            yield file

    def replace(self, name: str, content: bytes) -> None:
        """Store an object in place of one of this name."""
        with self._failures_named():
            self._system.pipe_file(self._key(name), content)

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects; missing objects, and objects of a store that keeps everything, are skipped."""
        keys = [self._key(name) for name in names]
        with self._failures_named(), contextlib.suppress(FileNotFoundError, PermissionError):
            if keys:
                self._system.rm(keys)

    def _key(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _temporary(self, name: str) -> str:
        return f"{TEMPORARY_FOLDER}{name}{TEMPORARY_SUFFIX}"

    def _remove_leftovers(self) -> None:
        """Remove old temporary objects, if the library knows how old they are; in a folder every temporary file that no
        process holds. s3fs may take one that another writer has just removed for a folder.
        """
        if self._is_folder:
            remove_leftovers(temporary_files(Path(self._root)))  # marks (`place_writer.PlaceMark`)
            remove_leftovers(temporary_files(Path(self._key(TEMPORARY_FOLDER))))
        ignored = (FileNotFoundError, IsADirectoryError, PermissionError, NotImplementedError)
        with self._failures_named(), contextlib.suppress(*ignored):
            for key in self._system.find(self._key(TEMPORARY_FOLDER).rstrip("/")):
                age_seconds = time.time() - self._system.modified(key).timestamp()
                if key.endswith(TEMPORARY_SUFFIX) and age_seconds > LEFTOVER_SECONDS:
                    self._system.rm_file(key)

    def _has_own_put(self) -> bool:
        """Whether the library stores objects by its own means. fsspec's own check before it writes is no condition."""
        general = importlib.import_module("fsspec").AbstractFileSystem.pipe_file
        return getattr(self._system.pipe_file, "__func__", None) is not general

    def _is_put_conditional(self, name: str) -> bool:
        """Whether the store refuses to create an object twice, which is tried with `name`. Many libraries have no
        conditions.
        """
        if not self._has_own_put():
            return False
        try:
            return self._put_new(name, _PROBE_CONTENT) and not self._put_new(name, _PROBE_CONTENT)
        except (NotImplementedError, TypeError):
            return False

    def _put_new(self, name: str, content: bytes) -> bool:
        """Create an object under the condition that it does not exist; False if it does."""
        try:
            self._system.pipe_file(self._key(name), content, mode="create")
        except FileExistsError:
            return False
        return True

    def _move_new(self, name: str, content: bytes) -> bool:
        """Create an object in a store without conditions. Of two processes that do so at the same moment, one replaces
        the other's object by an equal one.
        """
        if self._is_folder:
            return self._link_new(name, lambda file: file.write(content))
        key = self._key(name)
        if self._system.exists(key):
            return False
        temporary = self._key(self._temporary(f"{name.rpartition('/')[2]}-{hashlib.sha256(content).hexdigest()}"))
        self._system.pipe_file(temporary, content)
        if self._system.exists(key):
            self._system.rm_file(temporary)
            return False
        self._system.mv(temporary, key)
        return True

    def _move_new_as(self, name: str, temporary: str, path: Path) -> bool:
        """Upload a file under a temporary name, and move it, unless there is an object `name`."""
        if self._system.exists(self._key(name)):
            return False
        self._system.put_file(str(path), self._key(temporary))
        self._system.mv(self._key(temporary), self._key(name))
        return True

    def _link_new(self, name: str, write: Callable[[IO[bytes]], object]) -> bool:
        """Create a file of a folder from what `write` writes, synced, unless it exists."""
        path = Path(self._key(name))
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(self._key(self._temporary(f".{uuid.uuid4().hex}")))
        try:
            self._with_temporary(temporary, write, lambda: path.hardlink_to(temporary))
        except FileExistsError:
            return False
        sync_folder(path.parent)
        return True

    def _with_temporary(self, path: Path, write: Callable[[IO[bytes]], object], then: Callable[[], object]) -> None:
        """Write a temporary file of a folder, synced, and call `then` while it exists."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary_file(path) as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
            then()

    @contextlib.contextmanager
    def _failures_named(self) -> Iterator[None]:
        try:
            yield
        except FolderFailed:
            raise
        except Exception as error:  # each library has its own errors
            raise FolderFailed(f"{self.url}: {_reason(error)}") from error


@dataclass(frozen=True, slots=True)
class ObjectReader:
    """Reads parts of the object `name` below `prefix`."""

    prefix: ObjectPrefix
    name: str

    def range(self, start: int, end: int) -> bytes:
        """Return the bytes from `start` to `end`."""
        return self.prefix.read_range(self.name, start, end)

    def opened(self) -> AbstractContextManager[BinaryIO]:
        """Open it as a file."""
        return self.prefix.opened(self.name)


def _reason(error: Exception) -> str:
    """Return why a store refused, and what to do."""
    found = without_credentials(f"{type(error).__name__}: {error}")
    if isinstance(error, FileNotFoundError):
        return f"no such bucket or folder ({found}); create it, or correct the URL"
    if isinstance(error, PermissionError):
        return f"access is refused ({found}); the credentials of this process must be able to list, read and write"
    if "credentials" in type(error).__name__.lower():
        return f"no credentials ({found}); set those of the library in the environment of this process"
    return f"cannot be read or written ({found})"


def _groups(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Split names so that the objects of a group have at most `READ_BYTES` together, or are one."""
    group: list[str] = []
    group_bytes = 0
    for name, size_bytes in sizes.items():
        if group and (group_bytes + size_bytes > READ_BYTES or len(group) == 1000):
            yield group
            group, group_bytes = [], 0
        group.append(name)
        group_bytes += size_bytes
    if group:
        yield group
