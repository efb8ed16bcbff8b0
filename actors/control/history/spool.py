"""`Spool`: the newest records of a process, in memory that outlives it.

A history is written in batches, at intervals. Records that are not in a batch yet would be lost with a process that is
killed; the kernel keeps the pages of a mapped file. Appending copies some bytes: it waits for no disk, calls no kernel,
and keeps Python's interpreter.

A spool has two halves. A batch takes everything that was appended so far (`turn`), and the other half is filled while
the batch is written; it is free by then, since one batch is written at a time. Each record has a number, and a batch
stores the number of its last record with it: what it has is not counted again.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

#: bytes of each half: some 3,000 records, as many as a pool has in a second at its highest rates
HALF_BYTES = 512 * 1024
_MAGIC = b"modelpool spool 2\n"
#: of the head of the file: the format, and the path of the history
_HEADER_BYTES = 4096
#: a spool is kept for so long without the folder of its history: the disk may come back
ORPHAN_SECONDS = 86400.0
#: size, checksum and number of a record
_HEAD = struct.Struct("<IIQ")
_SUFFIX = ".spool"


@dataclass(frozen=True, slots=True)
class SpooledRecord:
    """A record of a spool, and its number, from 1."""

    number: int
    text: str


class Spool:
    """A spool of this process. `append` and `turn` are called by one thread."""

    def __init__(self, prefix: Path, half_bytes: int = HALF_BYTES, history: Path = Path()) -> None:
        """Create the file `prefix`.ID.spool, for the history at this path. Raises OSError."""
        self.name = secrets.token_hex(8)
        self.path = spool_path(prefix, self.name)
        self._half_bytes = half_bytes
        size_bytes = _HEADER_BYTES + 2 * half_bytes
        descriptor = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size_bytes)  # else a full memory disk would end the process later
            self._pages = mmap.mmap(descriptor, size_bytes)
        except BaseException:
            with contextlib.suppress(OSError):
                self.path.unlink()
            raise
        finally:
            os.close(descriptor)
        header = (_MAGIC + os.fsencode(history))[: _HEADER_BYTES - 1]
        self._pages[: len(header)] = header
        self._half = 0
        self._used = 0
        #: of the last record
        self.number = 0

    def append(self, text: str) -> bool:
        """Add a record; False if the half is full, and the record is in memory of the process only."""
        content = text.encode()
        self.number += 1
        begin = self._used
        end = begin + _HEAD.size + len(content)
        if end > self._half_bytes:
            return False
        at = _HEADER_BYTES + self._half * self._half_bytes + begin
        head = _HEAD.pack(len(content), _checksum(self.number, content), self.number)
        # a process that ends in between leaves a wrong checksum
        self._pages[at : at + _HEAD.size + len(content)] = head + content
        self._used = end
        return True

    def turn(self) -> int:
        """Fill the other half from now on; return the number of the last record so far. What the other half has must
        have been stored."""
        self._half, self._used = 1 - self._half, 0
        return self.number

    def close(self) -> None:
        """Remove the file: everything has been stored. Idempotent."""
        self._pages.close()
        self.path.unlink(missing_ok=True)


def spool_path(prefix: Path, name: str) -> Path:
    """Return the file of the spool called `name`."""
    return prefix.with_name(f"{prefix.name}.{name}{_SUFFIX}")


def spools_left(prefix: Path) -> list[tuple[str, Path]]:
    """Return the names and files of the spools with this prefix, oldest first."""
    found = []
    for path in prefix.parent.glob(f"{prefix.name}.*{_SUFFIX}"):
        with contextlib.suppress(FileNotFoundError):
            found.append((path.stat().st_mtime_ns, path))
    return [(path.name[len(prefix.name) + 1 : -len(_SUFFIX)], path) for _, path in sorted(found)]


def remove_orphans(folder: Path, pattern: str, now: float) -> None:
    """Remove the spools of histories that have been without a folder for a day: their pools were killed, and never
    started again. `now` is the wall-clock time."""
    for path in folder.glob(f"{pattern}{_SUFFIX}"):
        with contextlib.suppress(OSError):
            with path.open("rb") as file:
                header = file.read(_HEADER_BYTES)
            history = Path(os.fsdecode(header[len(_MAGIC) :].rstrip(b"\0")))
            is_old = now - path.stat().st_mtime > ORPHAN_SECONDS
            if header.startswith(_MAGIC) and history.is_absolute() and is_old and not history.parent.exists():
                path.unlink()


def spooled_records(path: Path, after: int, half_bytes: int = HALF_BYTES) -> list[SpooledRecord]:
    """Return the records of a spool behind number `after`, in order; of a damaged file, those before the damage. Raises
    OSError."""
    content = path.read_bytes()
    if not content.startswith(_MAGIC):
        return []
    found = []
    for half in range(2):
        begin = _HEADER_BYTES + half * half_bytes
        found += [each for each in _records(content[begin : begin + half_bytes]) if each.number > after]
    return sorted(found, key=lambda record: record.number)


def _records(content: bytes) -> Iterator[SpooledRecord]:
    """Yield the records of a half. Behind the newest one are zeros, or older records: those were stored."""
    at, before = 0, 0
    while at + _HEAD.size <= len(content):
        size, checksum, number = _HEAD.unpack_from(content, at)
        text = content[at + _HEAD.size : at + _HEAD.size + size]
        if not number or number < before or len(text) < size or checksum != _checksum(number, text):
            return
        yield SpooledRecord(number, text.decode())
        at, before = at + _HEAD.size + size, number


def _checksum(number: int, content: bytes) -> int:
    return zlib.crc32(content, number & 0xFFFFFFFF)
