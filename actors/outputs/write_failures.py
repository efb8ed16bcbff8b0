"""Distinguishes failures that concern one file from those that concern the folder, and so every later write."""

from __future__ import annotations

import errno
from pathlib import Path

from modelpool.actors.outputs.atomic_write import TEMPORARY_SUFFIX
from modelpool.pool.values.core.errors import OutputFailed

#: the disk is full, read-only, broken or gone, or the process has no file left to open
_OF_EVERY_WRITE = frozenset(
    {
        *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ENODEV, errno.ENXIO, errno.ESTALE),
        *(errno.ENOTCONN, errno.EHOSTDOWN, errno.EMFILE, errno.ENFILE),
    }
)


class FolderFailed(OutputFailed):
    """A write that failed because of its folder or disk: others would fail too."""


def output_failure(error: OSError, path: Path, folder: Path) -> OutputFailed:
    """Return the error for a failed write to `path` in `folder`: a `FolderFailed` if every other write would fail too.
    Writes and removes a small file where the error does not tell. An error that names another file of the folder, such
    as its manifest or its lock, is about that file.
    """
    reason = error.strerror or str(error)
    if error.errno in _OF_EVERY_WRITE:
        return FolderFailed(f"{folder}: cannot be written ({reason})")
    try:
        check_writable(folder)
    except OSError as found:
        return FolderFailed(f"{folder}: cannot be written ({found.strerror or found})")
    return OutputFailed(f"{_named_file(error, folder) or path}: cannot be written ({reason})")


def _named_file(error: OSError, folder: Path) -> Path | None:
    """Return the file of the folder that an error names; None without one, and for a temporary file, which users do not
    know."""
    if not isinstance(error.filename, str | Path):
        return None
    named = Path(error.filename)
    return named if folder in named.parents and not named.name.endswith(TEMPORARY_SUFFIX) else None


def check_writable(folder: Path) -> None:
    """Write and remove a small file: only this detects permissions, read-only mounts and full disks. Raises OSError."""
    probe = folder / f".probe{TEMPORARY_SUFFIX}"
    try:
        probe.write_bytes(b"modelpool")
    finally:
        probe.unlink(missing_ok=True)
