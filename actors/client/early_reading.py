"""Reads the files that the first requests name into the page cache, while a pool starts."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from modelpool.pool.devices.memory_limits import host_memory
from modelpool.pool.files.formats.page_cache import advise_willneed, in_memory
from modelpool.pool.values.core.errors import UserError

#: Share of the available memory for files that are read early. The rest is for the pool's processes.
MEMORY_SHARE = 0.5


class EarlyReading:
    """Asks the system to read files into the page cache. Only advice: whatever fails is left to the reader of a file.

    Files beyond `most_bytes` together are left out; without it, beyond `MEMORY_SHARE` of the available memory.
    """

    def __init__(self, most_bytes: int | None = None) -> None:
        self._left_bytes = int(host_memory().available_bytes * MEMORY_SHARE) if most_bytes is None else most_bytes

    def add(self, files: Sequence[Path]) -> threading.Thread:
        """Have these files read, and return at once. The returned thread ends when all reads are requested."""
        thread = threading.Thread(target=self._advise, args=(tuple(files),), name="read early", daemon=True)
        thread.start()
        return thread

    def _advise(self, files: Sequence[Path]) -> None:
        for path in files:
            try:
                size_bytes = path.stat().st_size
                if size_bytes > self._left_bytes or in_memory(str(path), [(0, size_bytes)]):
                    continue
                self._left_bytes -= size_bytes
                advise_willneed(str(path), [(0, size_bytes)])
            except (OSError, UserError):
                continue
