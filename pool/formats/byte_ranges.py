"""Ranges of bytes in a file, as disks like to read them: in order, and few."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

#: first byte, and the one after the last
ByteRange: TypeAlias = tuple[int, int]

#: ranges with less than this between them are read as one: a disk gives a page more as fast as it skips it
LEAST_GAP_BYTES = 1 << 20


def joined(ranges: Iterable[ByteRange]) -> tuple[ByteRange, ...]:
    """`ranges` in order, those that are close to each other as one."""
    result: list[ByteRange] = []
    for begin, end in sorted(ranges):
        if result and begin - result[-1][1] < LEAST_GAP_BYTES:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((begin, end))
    return tuple(result)
