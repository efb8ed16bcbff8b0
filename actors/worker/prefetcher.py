"""Reads files ahead of their use in a thread of its own: they are in the machine's memory when a run maps them.

Advisory: what cannot be read is left to the run that needs it, which says what is wrong. Knows files and bytes; no
weights, no engine and no device, so that nothing which runs waits for it or is touched by it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence

from modelpool.actors.worker.storage_meter import THREAD_IO, StorageMeter
from modelpool.pool.core.errors import UserError
from modelpool.pool.formats.byte_ranges import ByteRange
from modelpool.pool.loading.file_parts import FilePart, byte_ranges

#: read at once; between two such reads a newer wish is heard
BLOCK_BYTES = 4 << 20


class ReadAhead:
    """One wish at a time: a newer one takes the place of the one before, of which what was read stays read."""

    def __init__(self, find_ranges: Callable[[FilePart], Mapping[str, tuple[ByteRange, ...]]] = byte_ranges) -> None:
        self._find_ranges = find_ranges
        self._changed = threading.Condition()
        self._wished: tuple[FilePart, ...] = ()
        #: grows with each wish; a reader of an older one gives up
        self._wishes = 0
        self._closed = False
        self._thread: threading.Thread | None = None
        #: what was read from disks for wishes, as far as blocks are complete
        self.storage_bytes = 0

    def begin(self, parts: Sequence[FilePart]) -> None:
        """Read these from now on, in order; what is being read already goes on. Returns at once."""
        with self._changed:
            if self._closed or tuple(parts) == self._wished:
                return
            self._wished, self._wishes = tuple(parts), self._wishes + 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._read_wishes, name="read ahead", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def close(self) -> None:
        """Read no more. Idempotent."""
        with self._changed:
            self._closed = True
            self._wishes += 1
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def wait(self, timeout_seconds: float) -> bool:
        """Whether nothing is left to read, at the latest after so long."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._wished or self._closed, timeout_seconds)

    def _read_wishes(self) -> None:
        meter = StorageMeter(THREAD_IO)
        block = bytearray(BLOCK_BYTES)
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._wished or self._closed)
                    if self._closed:
                        return
                    parts, wish = self._wished, self._wishes
                for part in parts:
                    if wish != self._wishes:
                        break
                    with contextlib.suppress(OSError, UserError):
                        for path, ranges in self._find_ranges(part).items():
                            self._read(path, ranges, wish, memoryview(block), meter)
                with self._changed:
                    if wish == self._wishes:
                        self._wished = ()
                        self._changed.notify_all()
        finally:
            meter.close()

    def _read(self, path: str, ranges: Sequence[ByteRange], wish: int, block: memoryview, meter: StorageMeter) -> None:
        """Have the kernel keep the bytes; they are thrown away here."""
        with open(path, "rb", buffering=0) as file:
            for begin, end in ranges:
                file.seek(begin)
                while begin < end and wish == self._wishes:
                    read = file.readinto(block[: end - begin])  # without Python's lock
                    if not read:
                        return
                    begin += read
                    self.storage_bytes = meter.read_bytes()
