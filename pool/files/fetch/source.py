"""`FileSource`: a place with files of weights that are read by ranges; and reading a range with retries.

A source knows names, sizes, versions and bytes; not the contents of a file, nor where it is kept.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

from modelpool.pool.files.fetch.fetch_errors import Interrupted, SourceFailed
from modelpool.pool.files.formats.shard_index import is_index
from modelpool.pool.files.formats.weights_file import PLAIN_SUFFIXES
from modelpool.pool.values.core.remote_file import RemoteFile

#: tries of one range, and the pause before the second; doubled for each further one
TRIES, FIRST_PAUSE_SECONDS = 6, 0.25
#: maximum number of files of one source; a larger one is not a folder of models
MAX_FILES = 20_000
#: bytes of one piece of a transfer
PIECE_BYTES = 1 << 20
#: file of a folder with the SHA-256 of others, as `sha256sum` writes it; and the suffix of a file for a single one
SUMS_NAME, SUM_SUFFIX = "SHA256SUMS", ".sha256"
#: largest such file
MAX_SUMS_BYTES = 4 << 20
#: files next to weights that models need: configurations, tokenizers, indexes
SMALL_SUFFIXES = (".json", ".txt", ".model", SUM_SUFFIX)
#: largest of those that are read
MAX_SMALL_BYTES = 64 << 20

_SUM_LINE = re.compile(r"([0-9a-fA-F]{64})(?: [ *]?(.+))?")


class FileSource(Protocol):
    """A place with files."""

    url: str

    def files(self) -> tuple[RemoteFile, ...]:
        """Return its files that models may need, by path. Raises SourceFailed, LibraryMissing."""

    def read(self, file: RemoteFile, begin: int, end: int) -> Iterator[bytes]:
        """Yield the bytes from `begin` to `end`, in order. Raises Interrupted if the transfer breaks off, SourceFailed
        if trying again makes no sense, FileGone if it is missing or, where reads show that, was replaced."""

    def check(self, file: RemoteFile) -> None:
        """Raise FileGone if the file was replaced since it was listed. Called after a file without a published hash was
        read."""


def is_wanted(name: str) -> bool:
    """Whether a file of this name may belong to a model. Pickles are not fetched: they can contain code."""
    low = name.rsplit("/", 1)[-1].lower()
    if low.startswith("."):
        return False
    return low.endswith((*PLAIN_SUFFIXES, *SMALL_SUFFIXES)) or is_index(low) or low == SUMS_NAME.lower()


def read_range(
    source: FileSource,
    file: RemoteFile,
    begin: int,
    end: int,
    pause: Callable[[float], None] = time.sleep,
    should_stop: Callable[[], bool] = lambda: False,
) -> Iterator[bytes]:
    """Yield the bytes from `begin` to `end`, continuing after interruptions where they broke off.

    Raises SourceFailed, naming the URL, when it broke off `TRIES` times without one new byte; stops early, without an
    error, when `should_stop`.
    """
    tries, wait_seconds = 0, FIRST_PAUSE_SECONDS
    while begin < end:
        try:
            for piece in source.read(file, begin, end):
                if begin + len(piece) > end:
                    raise SourceFailed(f"{file.url}: found more bytes than requested, expected {end - begin}")
                begin += len(piece)
                tries, wait_seconds = 0, FIRST_PAUSE_SECONDS
                yield piece
                if should_stop():
                    return
            if begin < end:
                raise Interrupted("the transfer ended early")
        except Interrupted as broken:
            tries += 1
            if tries >= TRIES:
                raise SourceFailed(
                    f"{file.url}: cannot be read, after {tries} tries: {broken}; expected bytes {begin} to {end}"
                ) from None
            if should_stop():
                return
            pause(wait_seconds)
            wait_seconds *= 2


def read_all(source: FileSource, file: RemoteFile) -> bytes:
    """Return the content of a small file. Raises as `read_range`."""
    return b"".join(read_range(source, file, 0, file.size_bytes))


def published_sums(files: Iterable[RemoteFile], read: Callable[[RemoteFile], bytes]) -> Mapping[str, str]:
    """Return the SHA-256 that a source publishes for its files, by path: lines of `SHA256SUMS` in the same folder or
    one above, and the content of `NAME.sha256`."""
    found: dict[str, str] = {}
    for file in files:
        folder, _, name = file.path.rpartition("/")
        if file.size_bytes > MAX_SUMS_BYTES or not (name == SUMS_NAME or name.endswith(SUM_SUFFIX)):
            continue
        below = f"{folder}/" if folder else ""
        for line in read(file).decode("utf-8", "replace").splitlines():
            match = _SUM_LINE.fullmatch(line.strip())
            if match is None:
                continue
            if name == SUMS_NAME:
                if match[2]:
                    found[below + match[2].removeprefix("./")] = match[1].lower()
            else:
                found[below + name.removesuffix(SUM_SUFFIX)] = match[1].lower()
    return found
