"""The journal of a fetch: which chunks of a file are complete on disk, and which are being fetched from the source.

Append-only lines, so that a killed process leaves at most one incomplete line, which is ignored. Other processes of the
node, and its file server, read the journal while it grows. Pure values; no I/O.

    modelpool-fetch 1 SIZE CHUNK_BYTES     the file
    begin                                  a process starts, or takes over: earlier claims are void
    claim N                                chunk N is being fetched from the source
    drop N                                 it is not, any more
    done N                                 the bytes of chunk N are on disk
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from modelpool.pool.files.formats.byte_ranges import ByteRange

_KIND = "modelpool-fetch 1"
#: chunks of a file: few enough to describe, and many enough to share a small file among nodes
_MIN_CHUNK_BYTES, _MAX_CHUNK_BYTES, _WANTED_CHUNKS = 1 << 18, 8 << 20, 256


@dataclass(frozen=True, slots=True)
class FetchProgress:
    """The chunks of one file: those that are complete, and those that are being fetched from the source."""

    size_bytes: int
    chunk_bytes: int
    done: frozenset[int] = frozenset()
    claimed: frozenset[int] = frozenset()

    @property
    def chunks(self) -> int:
        """The number of chunks."""
        return -(-self.size_bytes // self.chunk_bytes)

    @property
    def is_complete(self) -> bool:
        """Whether every chunk is on disk."""
        return len(self.done) == self.chunks

    @property
    def done_bytes(self) -> int:
        """Bytes of the complete chunks."""
        return sum(end - begin for begin, end in map(self.range_of, self.done))

    def range_of(self, chunk: int) -> ByteRange:
        """Return the bytes of a chunk."""
        begin = chunk * self.chunk_bytes
        return begin, min(self.size_bytes, begin + self.chunk_bytes)

    def covers(self, begin: int, end: int) -> bool:
        """Whether all of these bytes are on disk."""
        if not 0 <= begin <= end <= self.size_bytes:
            return False
        return all(chunk in self.done for chunk in range(begin // self.chunk_bytes, -(-end // self.chunk_bytes)))


def new_progress(size_bytes: int) -> FetchProgress:
    """Return the progress of a file of which nothing is on disk."""
    chunk_bytes = _MIN_CHUNK_BYTES
    while chunk_bytes < _MAX_CHUNK_BYTES and size_bytes > chunk_bytes * _WANTED_CHUNKS:
        chunk_bytes *= 2
    return FetchProgress(size_bytes, chunk_bytes)


def journal_start(progress: FetchProgress) -> str:
    """Return the first line of the journal."""
    return f"{_KIND} {progress.size_bytes} {progress.chunk_bytes}\n"


def read_journal(text: str, size_bytes: int) -> FetchProgress | None:
    """Return the progress that a journal records; None if it is no journal of a file of this size."""
    lines = text.split("\n")[:-1]  # what follows the last end of line is incomplete
    fresh = new_progress(size_bytes)
    if not lines or lines[0] + "\n" != journal_start(fresh):
        return None
    done: set[int] = set()
    claimed: set[int] = set()
    for line in lines[1:]:
        word, _, number = line.partition(" ")
        if word == "begin":
            claimed.clear()
            continue
        if not number.isdecimal() or int(number) >= fresh.chunks:
            return None
        chunk = int(number)
        if word == "done":
            done.add(chunk)
            claimed.discard(chunk)
        elif word == "claim":
            claimed.add(chunk)
        elif word == "drop":
            claimed.discard(chunk)
        else:
            return None
    return FetchProgress(size_bytes, fresh.chunk_bytes, frozenset(done), frozenset(claimed))


def as_bitmap(chunks: Collection[int], count: int) -> str:
    """Return chunk numbers as hexadecimal digits."""
    number = 0
    for chunk in chunks:
        number |= 1 << chunk
    return f"{number:0{-(-count // 4)}x}"


def from_bitmap(digits: str, count: int) -> frozenset[int]:
    """Return the chunk numbers of a bitmap. Raises ValueError for anything else."""
    number = int(digits or "0", 16)
    if number >> count:
        raise ValueError("more chunks than the file has")
    return frozenset(chunk for chunk in range(count) if number >> chunk & 1)
