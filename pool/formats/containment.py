"""Which files of a model folder may be read: those that lie in it. Torch-free.

The policy: a path that a person names is read wherever its links lead. What is found by looking into a folder, or named
by a file in it, has to lie in that folder: a downloaded model must not reach for other files of the machine.
One layout of links is known and allowed: the cache of the Hugging Face hub keeps `REPOSITORY/snapshots/REVISION/FILE`
as a link into `REPOSITORY/blobs`. Source: "Understand caching" in the documentation of huggingface_hub.
"""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath, PureWindowsPath

from modelpool.pool.core.errors import UnsafeFile
from modelpool.pool.formats.regular_file import without_links
from modelpool.pool.formats.strict_json import brief


def contained(path: Path, folder: Path) -> Path:
    """`path` itself, when it lies in `folder` after every link is followed. It need not exist.

    Raises UnsafeFile naming the path and where it leads.
    """
    real = without_links(path)
    if not any(real.is_relative_to(root) for root in _roots(without_links(folder))):
        raise UnsafeFile(f"{path}: a link that leads to {real}, expected a file in {folder}")
    return path


def leads_out(path: str | os.PathLike[str], folder: str | os.PathLike[str]) -> bool:
    """Whether `path`, found in `folder`, leads out of it. A circle of links does."""
    try:
        contained(Path(path), Path(folder))
    except ValueError:
        return True
    return False


def plain_name(name: object, said_by: str | os.PathLike[str]) -> str:
    """`name`, when it is the name of a file and no path.

    Raises UnsafeFile naming the file that said it.
    """
    if (
        not isinstance(name, str)
        or name in ("", ".", "..")
        or "\0" in name
        or PurePosixPath(name).name != name
        or PureWindowsPath(name).name != name
    ):
        raise UnsafeFile(f"{os.fspath(said_by)}: names {brief(name)}, expected the name of a file in the same folder")
    return name


def _roots(folder: Path) -> tuple[Path, ...]:
    """The folders that files of `folder` may lie in: itself, and the blobs of the cache that it is part of."""
    for inner, outer in zip((folder, *folder.parents), folder.parents, strict=False):
        if outer.name == "snapshots" and inner.parent == outer and (outer.parent / "blobs").is_dir():
            return folder, outer.parent / "blobs"
    return (folder,)
