"""Fetches files of a hub into a folder of models, with their names.

A file has its name when it is complete and its hash is right, by one rename; before, it is `NAME.HASH.part` with a
journal beside it, and the same call continues there, also after `kill -9`. Indexes come last: a model of several files
is listed when all are there.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from modelpool.pool.files.fetch.chunk_plan import ChunkPlan
from modelpool.pool.files.fetch.fetch_errors import CacheFull, WrongContent
from modelpool.pool.files.fetch.file_cache import checked_path
from modelpool.pool.files.fetch.file_server import PeerClient
from modelpool.pool.files.fetch.hub_source import HubFile, HubSource
from modelpool.pool.files.fetch.partial_file import DATA_SUFFIX, PartialFile
from modelpool.pool.files.fetch.source import FileSource
from modelpool.pool.files.fetch.transfer import Transfer, Transferred
from modelpool.pool.files.formats.model_folder import INDEX_FILE
from modelpool.pool.files.formats.shard_index import is_index
from modelpool.pool.values.core.errors import OutputFailed, format_bytes
from modelpool.pool.values.core.remote_file import RemoteFile

#: called with the bytes that have arrived, by several threads at once
OnBytes = Callable[[int], None]

#: left free on the disk for others
_MARGIN_BYTES = 64 << 20
#: digits of a hash in the name of a partial file
_KEY_DIGITS = 12
_HASH_CHUNK_BYTES = 1 << 20
#: pause before another process that fetches the same file is asked again
_POLL_SECONDS = 0.1
#: of fetched files: the user may rename, move and delete them
_MODE = 0o644
_REMEDY = "Free some"


@dataclass(frozen=True, slots=True)
class FileToFetch:
    """One file and its place. `left_bytes` are not on this disk yet; 0 if the file is complete."""

    source: HubFile
    path: Path
    left_bytes: int
    is_complete: bool


@dataclass(frozen=True, slots=True)
class DownloadPlan:
    """What a download into `folder` will do."""

    folder: Path
    files: tuple[FileToFetch, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(each.source.file.size_bytes for each in self.files)

    @property
    def left_bytes(self) -> int:
        """Bytes that are to be fetched."""
        return sum(each.left_bytes for each in self.files)

    @property
    def free_bytes(self) -> int:
        """Bytes that are free on the disk of the folder now."""
        return shutil.disk_usage(_existing(self.folder)).free


def plan_download(files: Iterable[HubFile], folder: Path, *, overwrite: bool = False) -> DownloadPlan:
    """Compare `files` with what `folder` has. Reads complete files there, to compare their hashes.

    Raises OutputFailed for a file of that name with other content, unless `overwrite`; CacheFull if the rest does not
    fit on the disk; WrongContent for a name that leads out of the folder.
    """
    planned = []
    for source in sorted(files, key=lambda each: (_comes_last(each.file.path), each.file.path)):
        path = folder / checked_path(source.file.path)
        is_complete = path.is_file() and path.stat().st_size == source.file.size_bytes and _is_right(path, source)
        if path.is_dir():
            raise OutputFailed(f"{path}: is a folder, expected a file or nothing; move it away")
        if path.exists() and not is_complete and not overwrite:
            raise OutputFailed(
                f"{path}: exists with other content than {source.file.url}; select another folder with --folder, or "
                "replace it with --force"
            )
        partial = path.with_name(_key(source) + DATA_SUFFIX)
        here_bytes = min(source.file.size_bytes, 512 * partial.stat().st_blocks) if partial.exists() else 0
        left_bytes = 0 if is_complete else source.file.size_bytes - here_bytes
        planned.append(FileToFetch(source, path, left_bytes, is_complete))
    plan = DownloadPlan(folder, tuple(planned))
    if plan.left_bytes and plan.left_bytes + _MARGIN_BYTES > plan.free_bytes:
        raise CacheFull(
            f"{folder}: the disk has {format_bytes(plan.free_bytes)} free, expected {format_bytes(plan.left_bytes)} "
            f"for the files and {format_bytes(_MARGIN_BYTES)} for others; nothing was fetched"
        )
    return plan


def download(
    plan: DownloadPlan, source: HubSource, on_bytes: OnBytes, should_stop: Callable[[], bool] = lambda: False
) -> bool:
    """Fetch the missing files; return whether everything is complete, False only after `should_stop`.

    Raises SourceFailed, WrongContent, CacheFull, OutputFailed; what was fetched stays, and the next call continues.
    """
    for planned in plan.files:
        if should_stop():
            return False
        if not planned.is_complete and not _fetch(planned, _Counted(source, on_bytes), should_stop):
            return False
    return True


def _fetch(planned: FileToFetch, source: FileSource, should_stop: Callable[[], bool]) -> bool:
    """Fetch one file; return whether it is complete."""
    path, file = planned.path, planned.source.file
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputFailed(f"{path.parent}: cannot be created ({error.strerror})") from None
    try:
        while (
            partial := PartialFile.try_lock(path.parent, _key(planned.source), file.size_bytes, _REMEDY)
        ) is None:  # another process fetches it
            if should_stop():
                return False
            time.sleep(_POLL_SECONDS)
    except OSError as error:
        raise OutputFailed(f"{path.parent}: cannot be written to ({error.strerror})") from None
    try:
        if path.is_file() and path.stat().st_size == file.size_bytes and _is_right(path, planned.source):
            partial.discard()  # another process has fetched it
            return True
        for attempt in (1, 2):
            before = partial.open()
            _transfer(partial, file, source, should_stop)
            if not partial.progress.is_complete:
                return False
            if _is_right(partial.data_path, planned.source):
                partial.finish(path, mode=_MODE, replaces=True)
                return True
            partial.reset()
            # chunks of an earlier process may be damaged by a power failure: once more, all of it
            if attempt == 2 or not before.done:
                break
        partial.discard()
        raise WrongContent(f"{file.url}: has other bytes than the hub published a hash of; {path} was not written")
    finally:
        partial.close()


def _transfer(partial: PartialFile, file: RemoteFile, source: FileSource, should_stop: Callable[[], bool]) -> None:
    def no_peer(address: str) -> PeerClient:
        raise AssertionError("a download into a folder has no other nodes")

    plan = ChunkPlan(partial.progress, is_alone=True)
    Transfer(
        partial, file, "", source, plan, lambda: (), no_peer, "", should_stop, lambda address: None, Transferred()
    ).run(uses_peers=False)


class _Counted:
    """A source that counts the bytes which it yields."""

    def __init__(self, source: FileSource, on_bytes: OnBytes) -> None:
        self.url = source.url
        self._source = source
        self._on_bytes = on_bytes
        self._lock = threading.Lock()

    def files(self) -> tuple[RemoteFile, ...]:
        """See `FileSource`."""
        return self._source.files()

    def read(self, file: RemoteFile, begin: int, end: int) -> Iterator[bytes]:
        """See `FileSource`."""
        for piece in self._source.read(file, begin, end):
            with self._lock:
                self._on_bytes(len(piece))
            yield piece

    def check(self, file: RemoteFile) -> None:
        """See `FileSource`."""
        self._source.check(file)


def _is_right(path: Path, source: HubFile) -> bool:
    """Whether the content of the file has the published hash."""
    if source.file.sha256:
        found, expected = hashlib.sha256(), source.file.sha256
    elif source.git_sha1:
        found, expected = hashlib.sha1(b"blob %d\0" % source.file.size_bytes, usedforsecurity=False), source.git_sha1
    else:
        raise WrongContent(f"{source.file.url}: the hub publishes no hash of it, expected one")
    with path.open("rb") as opened:
        while piece := opened.read(_HASH_CHUNK_BYTES):
            found.update(piece)
    return found.hexdigest() == expected


def _key(source: HubFile) -> str:
    """Return the name of the partial file, which is another one for other content."""
    name = source.file.path.rpartition("/")[2]
    return f"{name}.{(source.file.sha256 or source.git_sha1)[:_KEY_DIGITS]}"


def _comes_last(path: str) -> bool:
    return path == INDEX_FILE or is_index(path)


def _existing(folder: Path) -> Path:
    """Return the nearest folder around that exists."""
    place = Path(os.path.abspath(folder))
    while not place.is_dir():
        place = place.parent
    return place
