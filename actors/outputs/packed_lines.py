"""`PackedLines`: lines that are like each other, each compressed by itself: about a tenth of their size."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator

#: of a line that the others are compared with: the window of the compression
_SAMPLE_BYTES = 32 << 10


class PackedLines:
    """Lines by their number, from 0. Not thread-safe."""

    __slots__ = ("_lines", "_sample")

    def __init__(self) -> None:
        #: the first line, which later ones repeat for the most part
        self._sample = b""
        self._lines: list[bytes] = []

    def add(self, line: bytes) -> int:
        """Add a line; return its number."""
        if not self._lines:
            self._sample = line[:_SAMPLE_BYTES]
        packer = zlib.compressobj(zdict=self._sample)
        self._lines.append(packer.compress(line) + packer.flush())
        return len(self._lines) - 1

    def read(self, numbers: Iterable[int]) -> Iterator[bytes]:
        """Yield the lines with these numbers."""
        for number in numbers:
            yield zlib.decompressobj(zdict=self._sample).decompress(self._lines[number])
