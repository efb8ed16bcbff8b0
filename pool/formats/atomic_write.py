"""Files and folders that are there whole or not at all.

What is written goes under a hidden name beside its place, reaches the disk, and is renamed at the end. Whatever goes
wrong meanwhile (a full disk, Ctrl-C) leaves the place as it was and nothing beside it. Does not know what is written.
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

from modelpool.pool.core.errors import FilesWouldBeLost, OutputFailed

#: what the scan of model folders takes for an unfinished download, and leaves out
UNFINISHED = ".part"
#: files that a message names
_MOST_NAMED = 5


def expect_free(path: Path, overwrite: bool) -> None:
    """Raise OutputFailed when `path` is taken and may not be written over, or is in no folder."""
    if not path.parent.is_dir():
        raise OutputFailed(f"{path}: cannot be written: there is no folder {path.parent}")
    if os.path.lexists(path) and not overwrite:
        raise OutputFailed(f"{path}: is there already, expected a new name (or to be allowed to write over it)")


@contextlib.contextmanager
def whole_file(path: Path, *, overwrite: bool = False) -> Iterator[BinaryIO]:
    """A file to write, which becomes `path` when the block ends, or is gone when the block raises.

    Raises OutputFailed for a place that is taken, unless `overwrite`, and for everything that the system refuses. A
    link at `path` is replaced, not followed.
    """
    expect_free(path, overwrite)
    if path.is_dir():
        raise OutputFailed(f"{path}: is a folder, expected the name of a file")
    temporary = _beside(path)
    with _telling(path), _removed_at_the_end(temporary):
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        expect_free(path, overwrite)  # somebody may have been faster
        temporary.replace(path)
        _sync_folder(path.parent)


@contextlib.contextmanager
def whole_folder(path: Path, lost_files: Callable[[Path], Iterable[str]], *, overwrite: bool = False) -> Iterator[Path]:
    """A folder to fill, which becomes `path` when the block ends, or is gone when the block raises.

    With `overwrite` a folder at `path` is replaced, unless `lost_files` names files in it that must not be lost with
    it. Raises FilesWouldBeLost for those, at the beginning and where they came meanwhile, and OutputFailed as
    `whole_file` does.
    """
    expect_free(path, overwrite)
    temporary, old = _beside(path), _beside(path)
    with _telling(path), _removed_at_the_end(temporary):
        _expect_replaceable(path, lost_files)
        temporary.mkdir()
        yield temporary
        _expect_replaceable(path, lost_files)
        expect_free(path, overwrite)
        had_one = path.is_dir()
        if had_one:
            path.rename(old)
        try:
            temporary.rename(path)
        except OSError:
            if had_one:
                old.rename(path)
            raise
        _sync_folder(path.parent)
        shutil.rmtree(old, ignore_errors=True)


def _expect_replaceable(path: Path, lost_files: Callable[[Path], Iterable[str]]) -> None:
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_dir():
        raise OutputFailed(f"{path}: is no folder, expected the name of one")
    lost = list(islice(lost_files(path), _MOST_NAMED + 1))
    if lost:
        named = f"{', '.join(lost[:_MOST_NAMED])}{' and more' if len(lost) > _MOST_NAMED else ''}"
        raise FilesWouldBeLost(
            f"{path}: holds other things, which would be lost: {named}; expected a new name, or a folder without them"
        )


def _beside(path: Path) -> Path:
    place = Path(os.path.abspath(path))  # "." has no name by itself
    return place.with_name(f".{place.name[:100]}.{uuid.uuid4().hex[:12]}{UNFINISHED}")


@contextlib.contextmanager
def _telling(path: Path) -> Iterator[None]:
    """What the system refuses, as OutputFailed that names `path`."""
    try:
        yield
    except OSError as error:
        raise OutputFailed(f"{path}: cannot be written: {error.strerror or error}") from error


@contextlib.contextmanager
def _removed_at_the_end(temporary: Path) -> Iterator[None]:
    """`temporary`, if it is still there, goes: a file or a folder."""
    try:
        yield
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """The new name reaches the disk too; where folders cannot be synchronised, it does so in its own time."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
