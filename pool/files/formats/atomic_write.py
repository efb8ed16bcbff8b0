"""Writes files and folders atomically: they appear complete or not at all.

Data is written under a hidden temporary name in the target's folder, synced to the disk, and renamed at the end. After
a failure (a full disk, Ctrl-C) the target is unchanged and the temporary is removed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from modelpool.pool.values.core.errors import FilesWouldBeLost, OutputFailed

#: suffix of temporaries; the scan of model folders skips it as an unfinished download
PARTIAL_SUFFIX = ".part"
#: files listed in an error message
_MAX_LISTED = 5


def expect_free(path: Path, overwrite: bool) -> None:
    """Raise OutputFailed if `path` exists and must not be overwritten, or if its folder is missing."""
    if not path.parent.is_dir():
        raise OutputFailed(f"{path}: cannot be written: there is no folder {path.parent}")
    if os.path.lexists(path) and not overwrite:
        raise OutputFailed(f"{path}: already exists, expected a new name (or permission to overwrite it)")


@contextlib.contextmanager
def atomic_file(path: Path, *, overwrite: bool = False) -> Iterator[BinaryIO]:
    """Yield a file to write, which becomes `path` when the block ends and is removed if the block raises.

    Raises OutputFailed if `path` exists, unless `overwrite`, and for every system error. A link at `path` is replaced,
    not followed.
    """
    expect_free(path, overwrite)
    if path.is_dir():
        raise OutputFailed(f"{path}: is a folder, expected the name of a file")
    temporary = _temporary_path(path)
    with _translated_errors(path), _removed_at_exit(temporary):
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        expect_free(path, overwrite)  # another process may have created it meanwhile
        temporary.replace(path)
        _sync_folder(path.parent)


@contextlib.contextmanager
def atomic_folder(
    path: Path, lost_files: Callable[[Path], Iterable[str]], *, overwrite: bool = False
) -> Iterator[Path]:
    """Yield a folder to fill, which becomes `path` when the block ends and is removed if the block raises.

    With `overwrite` an existing folder is replaced, unless `lost_files` returns files in it that must not be lost: then
    raises FilesWouldBeLost, both at the beginning and if they appear before the end. Raises OutputFailed as
    `atomic_file` does.
    """
    expect_free(path, overwrite)
    temporary, old = _temporary_path(path), _temporary_path(path)
    with _translated_errors(path), _removed_at_exit(temporary):
        _expect_replaceable(path, lost_files)
        temporary.mkdir()
        yield temporary
        _expect_replaceable(path, lost_files)
        expect_free(path, overwrite)
        existed = path.is_dir()
        if existed:
            path.rename(old)
        try:
            temporary.rename(path)
        except OSError:
            if existed:
                old.rename(path)
            raise
        _sync_folder(path.parent)
        shutil.rmtree(old, ignore_errors=True)


def _expect_replaceable(path: Path, lost_files: Callable[[Path], Iterable[str]]) -> None:
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_dir():
        raise OutputFailed(f"{path}: is no folder, expected the name of one")
    lost = list(islice(lost_files(path), _MAX_LISTED + 1))
    if lost:
        listed = f"{', '.join(lost[:_MAX_LISTED])}{' and more' if len(lost) > _MAX_LISTED else ''}"
        raise FilesWouldBeLost(
            f"{path}: contains other files, which would be lost: {listed}; expected a new name or a folder without them"
        )


def _temporary_path(path: Path) -> Path:
    target = Path(os.path.abspath(path))  # "." has no name by itself
    return target.with_name(f".{target.name[:100]}.{uuid.uuid4().hex[:12]}{PARTIAL_SUFFIX}")


@contextlib.contextmanager
def _translated_errors(path: Path) -> Iterator[None]:
    """Raise system errors as OutputFailed naming `path`."""
    try:
        yield
    except OSError as error:
        raise OutputFailed(f"{path}: cannot be written: {error.strerror or error}") from error


@contextlib.contextmanager
def _removed_at_exit(temporary: Path) -> Iterator[None]:
    """Remove `temporary`, a file or a folder, if it still exists at the end."""
    try:
        yield
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Sync the rename to the disk; does nothing where folders cannot be synced."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
