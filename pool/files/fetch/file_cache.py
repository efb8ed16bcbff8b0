"""`FileCache`: the bounded folder of a node for the files of sources, shared by all processes of the node.

    content/SHA256           complete, verified files; nothing else is ever read as weights
    partial/KEY.part         files that are being fetched, with their journals; they count with their full size
    views/DIGEST/PATH        hard links to content, with the names that a model's files have at their source
    hashes/KEY               SHA-256 of files, as it was found, where the source publishes none
    cache.lock               held while room is made, for some milliseconds

Rules
1. A file gets its name in `content` by one rename, after its bytes were compared with its hash.
2. The sizes of all content and partial files never exceed the bound: room is made before a fetch begins.
3. A file is used under a lease, a shared lock that ends with the process. Evicting needs the exclusive lock.
4. Each file is fetched by one process at a time. The others wait, and one of them continues if it is killed.

Needs POSIX locks and hard links: a local disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TypeAlias

from modelpool.pool.files.fetch.cache_eviction import CachedFile, eviction_order
from modelpool.pool.files.fetch.fetch_errors import CacheFull, WrongContent
from modelpool.pool.files.fetch.partial_file import DATA_SUFFIX, JOURNAL_SUFFIX, PartialFile, is_fetched_now
from modelpool.pool.values.core.errors import UserError, format_bytes
from modelpool.pool.values.core.remote_file import RemoteFile

#: an interrupted fetch that nobody continued for this long is removed when a process opens the cache
STALE_SECONDS = 24 * 3600.0
#: pause between two tries to take over a fetch of another process
POLL_SECONDS = 0.05
#: stored hashes of files without published ones
MAX_HASHES = 20_000
#: left free on the disk for others
_MARGIN_BYTES = 1 << 20
_HASH_CHUNK_BYTES = 1 << 20


class FileLease:
    """Keeps a complete file in the cache until it is closed, or the process ends."""

    def __init__(self, path: Path, sha256: str, opened: int) -> None:
        self.path = path
        self.sha256 = sha256
        self._opened = opened

    def inode(self) -> tuple[int, int]:
        """Return the identity of the file, under all its names."""
        status = os.fstat(self._opened)
        return status.st_dev, status.st_ino

    def is_at(self, path: Path) -> bool:
        """Whether the file has this name."""
        return _is_at(path, os.fstat(self._opened))

    def close(self) -> None:
        """Release the file. Idempotent."""
        if self._opened >= 0:
            os.close(self._opened)
            self._opened = -1


@dataclass(frozen=True, slots=True)
class CacheUse:
    """The content of a cache.

    used_bytes  of complete and partial files, these with their full size
    """

    files: tuple[CachedFile, ...]
    used_bytes: int


#: fills a partial file that was opened, and returns when all chunks are done, or early when the fetch should stop.
#: Returns whether bytes came from other nodes, which the last argument forbids. Raises SourceFailed, CacheFull
Fill: TypeAlias = Callable[[PartialFile, RemoteFile, bool], bool]


class FileCache:
    """The cache in one folder. Any number of processes and threads may use it at once."""

    def __init__(self, root: Path, bound_bytes: int | None = None) -> None:
        """Create the folders. `bound_bytes` is the maximum of all files; None is the size of the disk.

        Raises CacheFull if the folder cannot be created.
        """
        self.root = root
        self.bound_bytes = bound_bytes
        self.content = root / "content"
        self.partial = root / "partial"
        self.views = root / "views"
        self._hashes = root / "hashes"
        try:
            root.mkdir(parents=True, exist_ok=True)
            self.create_folders()
        except OSError as error:
            raise CacheFull(
                f"{root}: cannot be created ({error.strerror}); expected a folder on a local disk as [models] cache"
            ) from None
        #: distinguishes the caches of the nodes
        self.identity = self._identity()

    def create_folders(self) -> None:
        """Create the folders in `root`, which may have been emptied. A root that is gone is not created: its disk may
        be. Raises OSError."""
        for folder in (self.content, self.partial, self.views, self._hashes):
            folder.mkdir(exist_ok=True)

    def clean_up(self, now: float | None = None) -> None:
        """Remove what killed processes left: old interrupted fetches, and names of files that are gone."""
        now = time.time() if now is None else now
        with self._room_lock():
            for path in self.partial.iterdir():
                with contextlib.suppress(FileNotFoundError):
                    journal = path.with_suffix(JOURNAL_SUFFIX)
                    is_alone = path.suffix == DATA_SUFFIX and not journal.exists()
                    is_old = now - path.stat().st_mtime > STALE_SECONDS
                    if (is_alone or is_old) and not is_fetched_now(journal):
                        path.unlink()
            for view, path in self._view_files():
                if path.stat().st_nlink == 1:
                    path.unlink()
                    self._remove_empty(path.parent, view)
            known = []
            for path in self._hashes.iterdir():
                with contextlib.suppress(FileNotFoundError):  # a draft of `hash_is_known_as`
                    known.append((path.stat().st_mtime, path))
            for _, path in sorted(known)[:-MAX_HASHES]:
                path.unlink(missing_ok=True)

    def lease(self, sha256: str) -> FileLease | None:
        """Return a lease of the complete file; None if it is not in the cache."""
        path = self.content / _checked_key(sha256)
        while True:
            try:
                opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return None
            fcntl.flock(opened, fcntl.LOCK_SH)  # an eviction holds the other lock only while it removes the file
            status = os.fstat(opened)
            if status.st_nlink and _is_at(path, status):
                with contextlib.suppress(OSError):
                    os.utime(opened)
                return FileLease(path, sha256, opened)
            os.close(opened)

    def known_sha256(self, file: RemoteFile) -> str:
        """Return the SHA-256 of `file`: as published, or as found when it was fetched; "" if neither is known."""
        if file.sha256:
            return file.sha256
        try:
            found = (self._hashes / version_key(file)).read_text(errors="replace")
        except OSError:
            return ""
        return found if _is_key(found) else ""  # after a power failure, a file may be empty or have other bytes

    def fetch(
        self,
        file: RemoteFile,
        fill: Fill,
        needed_next: Sequence[str] = (),
        should_stop: Callable[[], bool] = lambda: False,
    ) -> FileLease | None:
        """Return a lease of `file`, fetching it first if it is missing, in this process or in another; None when
        `should_stop`.

        needed_next  hashes of files that are expected to be needed soon, the soonest first: they are evicted last
        Raises WrongContent if the source has other bytes than it announced, CacheFull, SourceFailed.
        """
        while not should_stop():
            sha256 = self.known_sha256(file)
            if sha256 and (lease := self.lease(sha256)) is not None:
                return lease
            partial = PartialFile.try_lock(self.partial, cache_key(file), file.size_bytes)
            if partial is None:
                time.sleep(POLL_SECONDS)
                continue
            try:
                sha256 = self.known_sha256(file)
                if sha256 and (self.content / sha256).exists():
                    continue  # completed before it was locked
                self._complete(partial, file, fill, needed_next, should_stop)
            finally:
                partial.close()
        return None

    def hash_is_known_as(self, file: RemoteFile, sha256: str) -> None:
        """Remember the SHA-256 of a file from a source that publishes none."""
        path = self._hashes / version_key(file)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(sha256)
        temporary.replace(path)

    def view(self, files: Iterable[tuple[str, str]]) -> Path:
        """Return the folder in which leased files have their names; `files` are pairs of path and SHA-256.

        The folder is named by its content, so that it is the same for all processes and never changes.
        """
        wanted = sorted(set(files))
        folder = self.views / view_name(wanted)
        for name, sha256 in wanted:
            path = folder / checked_path(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._link(self.content / sha256, path)
        return folder

    def use(self) -> CacheUse:
        """Return the files of the cache. Files that a process fetches at this moment count, and are not listed."""
        files, used_bytes = [], 0
        for path in self.content.glob("*"):  # nothing if somebody has removed the folder
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                used_bytes += status.st_size
                files.append(CachedFile(path.name, status.st_size, status.st_mtime))
        for path in self.partial.glob(f"*{DATA_SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                used_bytes += status.st_size
                if not is_fetched_now(path.with_suffix(JOURNAL_SUFFIX)):
                    files.append(CachedFile(path.stem, status.st_size, status.st_mtime, is_partial=True))
        return CacheUse(tuple(files), used_bytes)

    def make_room(self, size_bytes: int, needed_next: Sequence[str] = (), what: str = "a file") -> None:
        """Evict files until `size_bytes` more fit. Raises CacheFull naming `what`. Call with the room lock held."""
        if self.bound_bytes is not None and size_bytes > self.bound_bytes:
            raise CacheFull(
                f"{what}: has {format_bytes(size_bytes)}, and the cache {self.root} holds at most "
                f"{format_bytes(self.bound_bytes)}; expected a larger cache_bytes in [models]"
            )
        use = self.use()
        excess_bytes = self._excess_bytes(use.used_bytes, size_bytes)
        for file in eviction_order(use.files, needed_next) if excess_bytes > 0 else ():
            if self._evict(file):
                use = replace(use, used_bytes=use.used_bytes - file.size_bytes)
                excess_bytes = self._excess_bytes(use.used_bytes, size_bytes)
                if excess_bytes <= 0:
                    return
        if excess_bytes > 0:
            free = format_bytes(max(0, shutil.disk_usage(self.root).free))
            limit = "" if self.bound_bytes is None else f", cache_bytes is {format_bytes(self.bound_bytes)}"
            raise CacheFull(
                f"{self.root}: no room for {what} of {format_bytes(size_bytes)}: {format_bytes(use.used_bytes)} are in "
                f"use by running work or by fetches{limit}, and the disk has {free} free"
            )

    def _complete(
        self,
        partial: PartialFile,
        file: RemoteFile,
        fill: Fill,
        needed_next: Sequence[str],
        should_stop: Callable[[], bool],
    ) -> None:
        """Fetch the missing chunks of a locked partial file, verify it and give it its name."""
        for attempt in (1, 2):
            with self._room_lock():
                reserved = partial.data_path.stat().st_size if partial.data_path.exists() else 0
                if reserved != file.size_bytes:
                    partial.data_path.unlink(missing_ok=True)
                    self.make_room(file.size_bytes, needed_next, file.url)
                before = partial.open()
            from_peers = fill(partial, file, attempt == 2)
            if should_stop() or not partial.progress.is_complete:
                return
            sha256 = _hash_of(partial, file.size_bytes)
            if file.sha256 in ("", sha256):
                if not file.sha256:
                    self.hash_is_known_as(file, sha256)
                partial.finish(self.content / sha256)
                return
            partial.reset()
            # chunks of an earlier process may be damaged by a power failure, or by another node: once more, from the
            # source
            if attempt == 2 or not (before.done or from_peers):
                partial.discard()
                raise WrongContent(
                    f"{file.url}: found the SHA-256 {sha256}, expected {file.sha256} as published by the source; "
                    "the file was not used"
                )

    def _excess_bytes(self, used_bytes: int, size_bytes: int) -> int:
        """Return the bytes that have to go before `size_bytes` more fit in the bound and on the disk."""
        over_bound = used_bytes + size_bytes - self.bound_bytes if self.bound_bytes is not None else 0
        over_disk = size_bytes + _MARGIN_BYTES + self._promised_bytes() - shutil.disk_usage(self.root).free
        return max(over_bound, over_disk)

    def _promised_bytes(self) -> int:
        """Return the bytes of partial files that are not yet allocated on the disk."""
        promised = 0
        for path in self.partial.glob(f"*{DATA_SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                promised += max(0, status.st_size - 512 * status.st_blocks)
        return promised

    def _evict(self, file: CachedFile) -> bool:
        """Remove a file unless it is in use. Its names go first: after an interruption it is complete or gone."""
        if file.is_partial:
            partial = PartialFile.try_lock(self.partial, file.key, file.size_bytes)
            if partial is None:
                return False
            partial.discard()
            return True
        path = self.content / file.key
        try:
            opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return True
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            status = os.fstat(opened)
            if status.st_nlink > 1:
                for view, name in self._view_files():
                    if _is_at(name, status):
                        name.unlink(missing_ok=True)
                        self._remove_empty(name.parent, view)
            path.unlink(missing_ok=True)
        except BlockingIOError:
            return False
        finally:
            os.close(opened)
        return True

    def _view_files(self) -> Iterator[tuple[Path, Path]]:
        """Yield each view and each name in it."""
        for view in self.views.iterdir():
            for base, _, names in os.walk(view):
                for name in names:
                    yield view, Path(base, name)

    def _remove_empty(self, folder: Path, view: Path) -> None:
        """Remove the folder and its parents up to the view, as far as they are empty."""
        with contextlib.suppress(OSError):
            while folder.is_relative_to(view):
                folder.rmdir()
                folder = folder.parent

    def _link(self, content: Path, path: Path) -> None:
        status = content.stat()
        for _ in range(3):
            try:
                os.link(content, path)
            except FileExistsError:
                if _is_at(path, status):
                    return
                path.unlink(missing_ok=True)  # of a file that was evicted by a process that was killed
            except FileNotFoundError:
                path.parent.mkdir(parents=True, exist_ok=True)  # an eviction removed the empty folder
            else:
                return
        raise CacheFull(f"{path}: cannot be created, expected a folder that only modelpool changes")

    def _identity(self) -> str:
        path = self.root / "identity"
        with self._room_lock():
            if not path.exists():
                temporary = path.with_suffix(f".{os.getpid()}.tmp")
                temporary.write_text(secrets.token_hex(16))
                temporary.replace(path)
        return path.read_text()

    @contextlib.contextmanager
    def _room_lock(self) -> Iterator[None]:
        opened = os.open(self.root / "cache.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(opened, fcntl.LOCK_EX)
            yield
        finally:
            os.close(opened)


def version_key(file: RemoteFile) -> str:
    """Return a name for this version of a file at its URL."""
    text = f"{file.url}\n{file.size_bytes}\n{file.version}"
    return "v-" + hashlib.sha256(text.encode()).hexdigest()


def cache_key(file: RemoteFile) -> str:
    """Return the key under which a file is fetched: its hash, so that equal files of several URLs are one; else its
    version at its URL."""
    return _checked_key(file.sha256) if file.sha256 else version_key(file)


def view_name(files: Sequence[tuple[str, str]]) -> str:
    """Return the name of the view of these files, which are sorted pairs of path and SHA-256."""
    lines = "".join(f"{sha256} {path}\n" for path, sha256 in files)
    return hashlib.sha256(lines.encode()).hexdigest()[:32]


def checked_path(path: str) -> PurePosixPath:
    """Return a path below a source. Raises WrongContent if it leads out of it."""
    parts = PurePosixPath(path)
    if parts.is_absolute() or not parts.parts or ".." in parts.parts or "\0" in path:
        raise WrongContent(f"{path!r}: found a file name that leads out of its folder, expected one inside")
    return parts


def _is_key(sha256: str) -> bool:
    return len(sha256) == 64 and set(sha256) <= set("0123456789abcdef")


def _checked_key(sha256: str) -> str:
    if not _is_key(sha256):
        raise UserError(f"{sha256!r}: no SHA-256, expected 64 hexadecimal digits")
    return sha256


def _hash_of(partial: PartialFile, size_bytes: int) -> str:
    found = hashlib.sha256()
    for begin in range(0, size_bytes, _HASH_CHUNK_BYTES):
        found.update(partial.read(begin, min(size_bytes, begin + _HASH_CHUNK_BYTES)))
    return found.hexdigest()


def _is_at(path: Path, status: os.stat_result) -> bool:
    try:
        now = path.stat(follow_symlinks=False)
    except OSError:
        return False
    return stat.S_ISREG(now.st_mode) and (now.st_dev, now.st_ino) == (status.st_dev, status.st_ino)
