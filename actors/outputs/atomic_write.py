"""Atomic file writes: a file exists completely or not at all.

A process that is killed while it writes leaves a temporary file. It holds a lock of that file until it ends, however
it ends: so whoever opens a folder next removes what no process holds, at once, and never what another one writes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from modelpool.pool.values.core.errors import OutputFailed

#: suffix of a file that is being written
TEMPORARY_SUFFIX = ".partial"
#: beginning of the names of marks (`place_writer.PlaceMark`)
MARK_NAME = "mark-"
#: age after which a temporary object of a store, which has no locks, was left by a process that was killed
LEFTOVER_SECONDS = 24 * 3600.0
#: how long another process holds a leftover to remove it, at most
REMOVAL_SECONDS = 0.2


def write_atomically(path: Path, content: bytes) -> None:
    """Write `content` to `path` atomically, and wait until it is on disk.

    After a failure the previous file is unchanged. Raises OSError.
    """
    with temporary_file(path.with_name(f".{path.name}{TEMPORARY_SUFFIX}")) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        Path(file.name).replace(path)
    sync_folder(path.parent)


def write_output(path: Path, content: bytes) -> Path:
    """Write `content` to `path` as `write_atomically`; return the path. Raises OutputFailed naming the file."""
    try:
        write_atomically(path, content)
    except OSError as error:
        raise OutputFailed(f"{path}: cannot be written ({error.strerror or error})") from error
    return path


@contextlib.contextmanager
def temporary_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file for writing. It is removed at the end of the block, unless it was renamed: also from a
    folder that was moved meanwhile. Until then `remove_leftovers` leaves it. Raises OSError."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with _held_file(path) as file:
            held = os.fstat(file.fileno())
            try:
                yield file
            finally:
                _remove_same(path.name, held, folder)
    finally:
        os.close(folder)


def remove_leftovers(paths: Iterable[Path]) -> None:
    """Remove the temporary files among `paths` that no process holds: their writers have ended. A file that cannot be
    opened stays."""
    for path in paths:
        with contextlib.suppress(OSError), path.open("rb+") as file:  # a lock over a network needs write access
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):  # its writer may have renamed it just now
                path.unlink()


def temporary_files(folder: Path) -> Iterator[Path]:
    """Return the temporary files of atomic writes in a folder, not below it; none if there is no folder."""
    return folder.glob(f".*{TEMPORARY_SUFFIX}")


def make_private_folder(path: Path) -> None:
    """Make a folder that other users of the machine cannot read, and the folders above it that do not exist. A folder
    that exists keeps its permissions. Raises OSError."""
    if not path.is_dir():
        make_private_folder(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)


def private_opener(path: str, flags: int) -> int:
    """Open a file for `open(opener=)`; a new one cannot be read by other users of the machine. A file that exists keeps
    its permissions."""
    return os.open(path, flags, 0o600)


def own_umask() -> int | None:
    """Return which permissions new files of this process lack; None if the system does not tell. `os.umask` tells only
    by changing it, also for other threads.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    found = next((line for line in status.splitlines() if line.startswith("Umask:")), None)
    return None if found is None else int(found.split()[1], 8)


def sync_folder(path: Path) -> None:
    """Make a rename durable. File systems that cannot sync a folder do not need it."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(folder)


@contextlib.contextmanager
def _held_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a file, empty, and lock it until the end of the block. Another process may remove it between the two, as a
    leftover: then it is created again."""
    while True:
        with path.open("wb") as file:
            _lock(file)
            if os.fstat(file.fileno()).st_nlink:
                yield file
                return


def _lock(file: IO[bytes]) -> None:
    """Lock a file. Waits for a moment for a process that holds it to remove it as a leftover; leaves it without a lock
    after that, to a second writer of the same file, and on a file system without locks."""
    until = time.monotonic() + REMOVAL_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                return
            time.sleep(0.001)
        except OSError:
            return
        else:
            return


def _remove_same(name: str, held: os.stat_result, folder: int) -> None:
    """Remove a file of an open folder if it is still the held one."""
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(held, os.stat(name, dir_fd=folder, follow_symlinks=False)):
            os.unlink(name, dir_fd=folder)
