"""Byte ranges of a file: sorted and merged for sequential reads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

#: first byte, and one past the last
ByteRange: TypeAlias = tuple[int, int]

#: ranges closer than this are merged: a disk reads this much about as fast as it skips it
MIN_GAP_BYTES = 1 << 20


def merge_ranges(ranges: Iterable[ByteRange]) -> tuple[ByteRange, ...]:
    """Return `ranges` sorted, with ranges less than MIN_GAP_BYTES apart merged."""
    result: list[ByteRange] = []
    for begin, end in sorted(ranges):
        if result and begin - result[-1][1] < MIN_GAP_BYTES:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((begin, end))
    return tuple(result)
