"""Atomic file writes: a file exists completely or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

#: suffix of a file that is being written
TEMPORARY_SUFFIX = ".partial"
#: beginning of the names of marks (`place_writer.PlaceMark`)
MARK_NAME = "mark-"
#: age after which a temporary file that no lock protects was left by a process that was killed
LEFTOVER_SECONDS = 24 * 3600.0


def write_atomically(path: Path, content: bytes) -> None:
    """Write `content` to `path` atomically, and wait until it is on disk.

    After a failure the previous file is unchanged. Raises OSError.
    """
    temporary = path.with_name(f".{path.name}{TEMPORARY_SUFFIX}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


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
