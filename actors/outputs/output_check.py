"""Checks whether outputs can be written to an address, before a pool starts. Imports little, and leaves no folder."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from modelpool.actors.config.output_address import OutputAddress
from modelpool.actors.outputs.write_failures import FolderFailed, check_writable


def check_outputs(address: OutputAddress) -> None:
    """Raise OutputFailed if outputs cannot be written to a folder, or to a new one in the nearest folder that exists,
    or to a store, which must accept a small object. A small file is written to a folder that exists, or an empty folder
    to the nearest one, and removed.
    """
    if not isinstance(address, Path):
        from modelpool.actors.outputs.open_outputs import check_store

        check_store(address)
        return
    try:
        if os.path.lexists(address):
            check_writable(address)
        else:
            _check_parent(next(folder for folder in address.absolute().parents if os.path.lexists(folder)))
    except OSError as error:
        raise FolderFailed(f"{address}: cannot be written ({error.strerror or error})") from None


def _check_parent(folder: Path) -> None:
    """Raise OSError if a folder cannot be created in `folder`."""
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    # only this detects a full disk, and file systems in which nobody creates folders, such as /proc
    os.rmdir(tempfile.mkdtemp(prefix=".modelpool-", dir=folder))
