"""Opens files from untrusted names: regular files only; every failure is a `CorruptFile` that names the path."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

from modelpool.pool.values.core.errors import CorruptFile

#: larger than any configuration or index of a published model
MAX_TEXT_BYTES = 64 << 20


@contextmanager
def open_regular(
    path: str | os.PathLike[str], expected: str = "a safetensors file"
) -> Iterator[tuple[BufferedReader, int]]:
    """Open the file at `path` for reading; yield it and its size in bytes.

    Raises CorruptFile when it does not exist, is a folder, a pipe or a device, or when reading fails inside the block.
    """
    place = os.fspath(path)
    try:
        with open(place, "rb", opener=_without_waiting) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise CorruptFile(f"{place}: not a regular file, expected {expected}")
            yield file, status.st_size
    except FileNotFoundError:
        raise CorruptFile(f"{place}: no such file, expected {expected}") from None
    except IsADirectoryError:
        raise CorruptFile(f"{place}: a folder, expected {expected}") from None
    except OSError as error:
        raise CorruptFile(f"{place}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        if "null" not in str(error) or "\0" not in place:
            raise
        raise CorruptFile(f"{place!r}: not a path, expected {expected}") from None


def read_text_file(path: str | os.PathLike[str], expected: str) -> bytes:
    """Return the contents of a small file. Raises CorruptFile as `open_regular` does, and when it is too large."""
    with open_regular(path, expected) as (file, size_bytes):
        if size_bytes > MAX_TEXT_BYTES:
            raise CorruptFile(
                f"{os.fspath(path)}: {size_bytes} bytes, expected {expected} of at most {MAX_TEXT_BYTES} bytes"
            )
        return file.read(size_bytes)


def without_links(path: str | os.PathLike[str]) -> Path:
    """Return the path with every symbolic link followed. Raises CorruptFile for a cycle of links."""
    try:
        return Path(path).resolve()
    except (OSError, RuntimeError) as error:
        raise CorruptFile(f"{os.fspath(path)}: cannot be followed: {error}") from None


def _without_waiting(path: str, flags: int) -> int:
    # opening a pipe would block until it has a writer, perhaps for ever
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
