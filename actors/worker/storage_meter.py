"""Counts the bytes that this process had read from disks, as the kernel counts them (/proc/self/io). 0 on other
systems.

Pages of mapped files count if they are touched and were not in memory, including the kernel's readahead; pages that
were in memory do not count. Network file systems count if they use the kernel's page cache and block layer.
"""

from __future__ import annotations

import os
from pathlib import Path

PROCESS_IO = Path("/proc/self/io")
THREAD_IO = Path("/proc/thread-self/io")

_FIELD = b"\nread_bytes:"
_MOST_BYTES = 1024


class StorageMeter:
    """Reads the kernel's counter. For a thread: opened and read by that thread."""

    def __init__(self, source: Path = PROCESS_IO) -> None:
        try:
            self._file: int | None = os.open(source, os.O_RDONLY)
        except OSError:
            self._file = None

    def read_bytes(self) -> int:
        """Return the bytes read from disks since the process, or the thread, began."""
        if self._file is None:
            return 0
        try:
            _, found, rest = os.pread(self._file, _MOST_BYTES, 0).partition(_FIELD)
        except OSError:
            return 0
        return int(rest.partition(b"\n")[0]) if found else 0

    def close(self) -> None:
        """Stop counting. Idempotent."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
