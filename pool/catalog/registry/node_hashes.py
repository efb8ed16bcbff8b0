"""`NodeHashes`: the SHA-256 of the files that a machine has, each computed once for all processes of the machine.

A pool names files by their SHA-256. A machine with a copy not hashed by this pool may have another file of that
name, so its workers hash what they use, in the background. Torch-free. Rules
1. One process of a machine hashes at a time, one file: the holder of a lock file. The others find its result.
2. A hash is valid for one state of a file: size, times, inode and device. Files with a state so young that they may
   change again with equal times are not remembered on the disk.
3. What the registry of this machine has hashed is not hashed again.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path

from modelpool.pool.catalog.registry.database import Database, Schema
from modelpool.pool.catalog.registry.folder_scan import FileForm, WeightsFile, weights_file
from modelpool.pool.catalog.registry.hashes import FileHashes, hash_file
from modelpool.pool.catalog.registry.model_hash import assembly_hash, hash_whole
from modelpool.pool.catalog.registry.registry import SETTLED_NS
from modelpool.pool.catalog.registry.registry_store import RegistryStore, open_store
from modelpool.pool.values.core.errors import CorruptFile, OutputFailed
from modelpool.pool.values.core.file_part import FilePart
from modelpool.pool.values.core.lru_cache import LruCache
from modelpool.pool.values.core.user_folders import machine_folder
from modelpool.pool.weights.patches.adapter_config import config_beside
from modelpool.pool.weights.quant.file_hash import assembly_sha256

logger = logging.getLogger(__name__)

DATABASE_FILE, LOCK_FILE = "file_hashes.sqlite3", "file_hashes.turn"
#: files with a stored hash; the oldest are removed first
MOST_FILES = 50_000
#: hashes that a process remembers
MOST_REMEMBERED = 16_384
#: most bytes that are read in a second: runs load weights from the same disk
BYTES_PER_SECOND = 1 << 30
#: interval of asking whether another process still hashes
TURN_SECONDS = 0.1
#: after this time a process hashes next to another one, which may hang
LONGEST_TURN_SECONDS = 600.0
SCHEMA = Schema(
    version=1,
    tables={
        # one row per file; processes in containers of one machine may see different files under one path
        "hashes": "path TEXT NOT NULL, size_bytes INTEGER NOT NULL, modified_ns INTEGER NOT NULL, "
        "changed_ns INTEGER NOT NULL, inode INTEGER NOT NULL, device INTEGER NOT NULL, sha256 TEXT NOT NULL, "
        "PRIMARY KEY (path, inode, device)",
    },
)


class HashingStopped(Exception):
    """Hashing was stopped."""


@dataclass(frozen=True, slots=True)
class FileState:
    """What tells that a file was changed."""

    path: str
    size_bytes: int
    modified_ns: int
    changed_ns: int
    inode: int
    device: int


def file_state(path: str | os.PathLike[str]) -> FileState:
    """Return the state of the file at `path`. Raises CorruptFile if there is none."""
    real = os.path.realpath(path)
    try:
        found = os.stat(real)
    except OSError as error:
        raise CorruptFile(f"{path}: cannot be read: {error.strerror or error}") from error
    return FileState(real, found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev)


def is_unchanged(path: str | os.PathLike[str], state: FileState) -> bool:
    """Whether the file at `path` has this state; follows links without resolving them. Raises CorruptFile if there is
    none."""
    try:
        found = os.stat(path)
    except OSError as error:
        raise CorruptFile(f"{path}: cannot be read: {error.strerror or error}") from error
    return (
        found.st_mtime_ns == state.modified_ns
        and found.st_ctime_ns == state.changed_ns
        and found.st_size == state.size_bytes
        and found.st_ino == state.inode
        and found.st_dev == state.device
    )


def is_same_file(path: str | os.PathLike[str], state: FileState) -> bool:
    """Whether at most the times of the file at `path` are others than in this state. Raises CorruptFile if there is
    none."""
    found = file_state(path)
    return (found.size_bytes, found.inode, found.device) == (state.size_bytes, state.inode, state.device)


def members_of(part: FilePart) -> tuple[str, ...]:
    """Return the files that the hash of `part` covers. Raises CorruptFile if they cannot be found."""
    try:
        if part.assembly is not None:
            files = [weights_file(Path(each)) for each in part.assembly.files]
        else:
            files = [weights_file(Path(part.path))]
    except OSError as error:
        raise CorruptFile(f"{part.path}: cannot be read: {error.strerror or error}") from error
    found = [str(member) for file in files for member in file.members]
    config = config_beside(Path(part.path)) if part.role is None else None
    return tuple(dict.fromkeys([part.path, *found] if os.path.isfile(part.path) else found)) + (
        () if config is None else (str(config),)
    )


class NodeHashes:
    """The hashes of files of this machine. For one thread."""

    def __init__(
        self,
        folder: Path | None = None,
        registry: RegistryStore | None = None,
        now_ns: Callable[[], int] = time.time_ns,
        bytes_per_second: float = BYTES_PER_SECOND,
    ) -> None:
        """`folder` is this machine's, and `registry` this user's; None: the defaults."""
        self._folder = folder
        self._registry = registry
        self._now_ns = now_ns
        self._bytes_per_second = bytes_per_second
        self._remembered: LruCache[FileState, str] = LruCache(MOST_REMEMBERED)
        self._has_warned = False

    def known(self, part: FilePart) -> str | None:
        """Return the hash of `part` as a reference names it, if nothing has to be read for it except a small
        configuration; None otherwise. Raises CorruptFile."""

        def member(path: str | os.PathLike[str]) -> str:
            found = self._known_of(file_state(path))
            if found is None:
                raise LookupError(path)
            return found

        try:
            return _hash_of(part, member, self._registered)
        except LookupError:
            return None

    def sha256(self, part: FilePart, should_stop: Callable[[], bool] = lambda: False) -> str:
        """Return the hash of `part` as a reference names it; reads the files that are not known. Raises CorruptFile if
        one cannot be read or changes meanwhile, and HashingStopped."""

        def member(path: str | os.PathLike[str]) -> str:
            state = file_state(path)
            found = self._known_of(state)
            if found is None:
                with self._turn(should_stop):
                    found = self._known_of(state) or self._hashed(state, should_stop)
            return found

        return _hash_of(part, member, self._registered)

    def _hashed(self, state: FileState, should_stop: Callable[[], bool]) -> str:
        """Read a file, and remember its hash."""
        began_ns, began, done_bytes = self._now_ns(), time.monotonic(), 0

        def pause(count: int) -> None:
            nonlocal done_bytes
            if should_stop():
                raise HashingStopped(state.path)
            done_bytes += count
            ahead_seconds = done_bytes / self._bytes_per_second - (time.monotonic() - began)
            if ahead_seconds > 0:
                time.sleep(ahead_seconds)

        found = hash_file(state.path, False, pause).sha256
        if file_state(state.path) != state:
            raise CorruptFile(f"{state.path}: changed while it was read")
        self._remembered.put(state, found)
        if began_ns - max(state.modified_ns, state.changed_ns) > SETTLED_NS:
            self._save(state, found)
        return found

    def _known_of(self, state: FileState) -> str | None:
        """Return the hash of a file that this process, or another one of the machine, has computed."""
        found = self._remembered.kept(state)
        if found is None and (found := self._stored(state)) is not None:
            self._remembered.put(state, found)
        return found

    def _registered(self, file: WeightsFile) -> str | None:
        """Return the hash of a model or another file that the registry has computed for its current state."""
        with self._warned():
            if self._registry is None:
                self._registry = open_store()
            record = self._registry.hash_record(str(file.real_path))
            if record is not None and record.fingerprint == file.fingerprint:
                return record.hashes.sha256
        return None

    def _stored(self, state: FileState) -> str | None:
        select = "SELECT size_bytes, modified_ns, changed_ns, inode, device, sha256 FROM hashes "
        select += "WHERE path = ? AND inode = ? AND device = ?"
        key = (state.path, state.inode, state.device)
        with self._warned():
            database = self._database()
            if database.path.exists():
                row = database.read(lambda db: db.execute(select, key).fetchone())
                if row is not None and tuple(row[:5]) == astuple(state)[1:]:
                    return str(row[5])
        return None

    def _save(self, state: FileState, sha256: str) -> None:
        with self._warned():
            oldest = "SELECT rowid FROM hashes ORDER BY rowid DESC LIMIT -1 OFFSET ?"

            def change(db: sqlite3.Connection) -> None:
                db.execute("INSERT OR REPLACE INTO hashes VALUES (?, ?, ?, ?, ?, ?, ?)", (*astuple(state), sha256))
                db.execute(f"DELETE FROM hashes WHERE rowid IN ({oldest})", (MOST_FILES,))

            self._database().write(change)

    def _database(self) -> Database:
        return Database((self._folder or machine_folder()) / DATABASE_FILE, SCHEMA)

    @contextlib.contextmanager
    def _warned(self) -> Iterator[None]:
        """Do without the databases if they cannot be used; log that once."""
        try:
            yield
        except OutputFailed as problem:
            if not self._has_warned:
                self._has_warned = True
                logger.warning("hashes of files are not remembered: %s", problem)

    @contextlib.contextmanager
    def _turn(self, should_stop: Callable[[], bool]) -> Iterator[None]:
        """Wait until no other process of this machine hashes. Without a lock file, several may."""
        if sys.platform == "win32":  # has no flock
            yield
            return
        import fcntl

        try:
            path = (self._folder or machine_folder()) / LOCK_FILE
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except (OSError, OutputFailed):
            yield
            return
        over_at = time.monotonic() + LONGEST_TURN_SECONDS
        try:
            while time.monotonic() < over_at:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if should_stop():
                        raise HashingStopped(str(path)) from None
                    time.sleep(TURN_SECONDS)
            yield
        finally:
            os.close(descriptor)


def _hash_of(
    part: FilePart,
    hash_member: Callable[[str | os.PathLike[str]], str],
    registered: Callable[[WeightsFile], str | None],
) -> str:
    """Return the hash of `part` from the hashes of its files."""

    def whole(path: str) -> str:
        try:
            file = weights_file(Path(path))
        except OSError as error:
            raise CorruptFile(f"{path}: cannot be read: {error.strerror or error}") from error
        if file.form is FileForm.ASSEMBLED:
            return assembly_hash(file, whole)
        known = registered(file)
        return known or hash_whole(file, lambda member: FileHashes(hash_member(member))).sha256

    if part.assembly is not None:
        return assembly_sha256(part.assembly, whole)
    found = whole(part.path)
    try:
        config = config_beside(Path(part.path)) if part.role is None else None
        return found if config is None else hashlib.sha256(found.encode() + config.read_bytes()).hexdigest()
    except OSError as error:
        raise CorruptFile(f"{part.path}: its configuration cannot be read: {error.strerror or error}") from error
