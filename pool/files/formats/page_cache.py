"""Tests which ranges of a file are in the page cache and asks the system to read ranges into it.

Advisory: where the system has no such calls nothing happens, and the reader of the file reports errors. Knows files and
ranges; no weights, no mappings (`pool.files.formats.page_tables`). Torch-free.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from modelpool.pool.files.formats.byte_ranges import ByteRange
from modelpool.pool.files.formats.regular_file import open_regular
from modelpool.pool.values.core.errors import UserError

#: Bytes per request. Of a longer range Linux reads only the beginning, as much as one disk request can hold
#: (mm/readahead.c, force_page_cache_ra); 128 KiB is the smallest default.
_ADVICE_BYTES = 128 << 10
#: positions of a file that are tested for being in memory
_SAMPLES = 64


def advise_willneed(path: str, ranges: Sequence[ByteRange]) -> None:
    """Ask the system to read these ranges of the file into the page cache; return when all are requested, about a
    second for gigabytes. Does nothing where the system has no such call (macOS, Windows).

    Raises CorruptFile when the file is gone.
    """
    advise = getattr(os, "posix_fadvise", None)
    if advise is None:
        return
    with open_regular(path) as (file, _):
        for begin, end in ranges:
            for at in range(begin, end, _ADVICE_BYTES):
                advise(file.fileno(), at, min(_ADVICE_BYTES, end - at), os.POSIX_FADV_WILLNEED)


def in_memory(path: str, ranges: Sequence[ByteRange]) -> bool:
    """Whether these ranges of the file seem to be in the page cache: tests a sample of their bytes.

    False where the system cannot tell; True for a file that cannot be read: its reader will report it.
    """
    total_bytes = sum(end - begin for begin, end in ranges)
    step_bytes = max(1, -(-total_bytes // _SAMPLES))
    try:
        with open_regular(path) as (file, _):
            return all(_is_cached(file.fileno(), at) for at in _spread(ranges, step_bytes))
    except UserError:
        return True


def _spread(ranges: Sequence[ByteRange], step_bytes: int) -> Iterator[int]:
    """Positions every `step_bytes` bytes of the concatenated ranges."""
    skipped = 0
    for begin, end in ranges:
        yield from range(begin + skipped, end, step_bytes)
        skipped = -(end - begin - skipped) % step_bytes


def _is_cached(file: int, at: int) -> bool:
    """Whether one byte can be read without waiting for a disk; False where the system cannot tell."""
    try:
        os.preadv(file, [bytearray(1)], at, os.RWF_NOWAIT)
    except (OSError, AttributeError):  # including BlockingIOError
        return False
    return True
