"""What of a file is in the machine's memory, and asking the system to read the rest.

Advisory: where the system cannot, nothing happens, and whoever reads the file says what is wrong with it. Knows files
and ranges; no weights, no mappings (`pool.formats.page_tables`). Torch-free.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from modelpool.pool.core.errors import UserError
from modelpool.pool.formats.byte_ranges import ByteRange
from modelpool.pool.formats.regular_file import open_regular

#: Asked for at once. Of a longer range Linux reads the beginning only, as much as one request to the disk can have
#: (mm/readahead.c, force_page_cache_ra); 128 KiB is the least that this is by default.
_ADVICE_BYTES = 128 << 10
#: places at which a file is looked at to tell whether it is in memory
_SAMPLES = 64


def ask_for(path: str, ranges: Sequence[ByteRange]) -> None:
    """Ask the system to read these ranges of the file, and return when all is asked for: a second or so for gigabytes.
    Nothing where it has no such call (macOS, Windows).

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
    """Whether these ranges of the file seem to be in the machine's memory: some of their bytes are looked at.

    False where the system does not say; True for a file that cannot be read, which somebody else will find.
    """
    total_bytes = sum(end - begin for begin, end in ranges)
    step_bytes = max(1, -(-total_bytes // _SAMPLES))
    try:
        with open_regular(path) as (file, _):
            return all(_is_there(file.fileno(), at) for at in _spread(ranges, step_bytes))
    except UserError:
        return True


def _spread(ranges: Sequence[ByteRange], step_bytes: int) -> Iterator[int]:
    """Places that are so far from each other when the ranges are put together."""
    skipped = 0
    for begin, end in ranges:
        yield from range(begin + skipped, end, step_bytes)
        skipped = -(end - begin - skipped) % step_bytes


def _is_there(file: int, at: int) -> bool:
    """Whether one byte can be had without asking a disk; False where the system does not say."""
    try:
        os.preadv(file, [bytearray(1)], at, os.RWF_NOWAIT)
    except (OSError, AttributeError):  # BlockingIOError is one
        return False
    return True
