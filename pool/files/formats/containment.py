"""Checks that the files of a model folder are inside that folder. Torch-free.

The policy: a path that a user names is read wherever its links lead. A file found by listing a folder, or named by a
file in it, must be inside that folder: a downloaded model must not reach other files of the machine.
One layout of links is allowed: the cache of the Hugging Face hub keeps `REPOSITORY/snapshots/REVISION/FILE` as a link
into `REPOSITORY/blobs`. Source: "Understand caching" in the documentation of huggingface_hub.
"""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath, PureWindowsPath

from modelpool.pool.files.formats.regular_file import without_links
from modelpool.pool.files.formats.strict_json import brief
from modelpool.pool.values.core.errors import UnsafeFile


def contained(path: Path, folder: Path) -> Path:
    """Return `path` if it is inside `folder` after following every link. It need not exist.

    Raises UnsafeFile naming the path and its target.
    """
    real = without_links(path)
    if not any(real.is_relative_to(root) for root in _roots(without_links(folder))):
        raise UnsafeFile(f"{path}: a link that leads to {real}, expected a file in {folder}")
    return path


def leads_out(path: str | os.PathLike[str], folder: str | os.PathLike[str]) -> bool:
    """Whether `path`, found in `folder`, leads out of it. True for a cycle of links."""
    try:
        contained(Path(path), Path(folder))
    except ValueError:
        return True
    return False


def plain_name(name: object, source: str | os.PathLike[str]) -> str:
    """Return `name` if it is a file name without a path.

    Raises UnsafeFile naming `source`, the file that contains the name.
    """
    if (
        not isinstance(name, str)
        or name in ("", ".", "..")
        or "\0" in name
        or PurePosixPath(name).name != name
        or PureWindowsPath(name).name != name
    ):
        raise UnsafeFile(f"{os.fspath(source)}: names {brief(name)}, expected the name of a file in the same folder")
    return name


def _roots(folder: Path) -> tuple[Path, ...]:
    """The folders that files of `folder` may be in: itself, and the blobs of the hub cache that it is part of."""
    for inner, outer in zip((folder, *folder.parents), folder.parents, strict=False):
        if outer.name == "snapshots" and inner.parent == outer and (outer.parent / "blobs").is_dir():
            return folder, outer.parent / "blobs"
    return (folder,)
