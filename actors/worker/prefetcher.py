"""Prefetches files into the page cache in its own thread, before a run maps them.

Advisory: files that cannot be read are left to the run that needs them, which reports the error. Knows files and
bytes; no weights, no engine and no device, so that no run waits for it or is affected by it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence

from modelpool.actors.worker.storage_meter import THREAD_IO, StorageMeter
from modelpool.pool.files.formats.byte_ranges import ByteRange
from modelpool.pool.models.loading.file_parts import byte_ranges
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.core.file_part import FilePart

#: bytes per read; a newer request takes effect between two reads
BLOCK_BYTES = 4 << 20


class Prefetcher:
    """Serves one request at a time: a newer one replaces the previous one; its blocks stay cached."""

    def __init__(self, find_ranges: Callable[[FilePart], Mapping[str, tuple[ByteRange, ...]]] = byte_ranges) -> None:
        self._find_ranges = find_ranges
        self._changed = threading.Condition()
        self._requested: tuple[FilePart, ...] = ()
        #: increases with each request; a reader of an older one gives up
        self._request_count = 0
        self._closed = False
        self._thread: threading.Thread | None = None
        #: bytes read from disks, for complete blocks
        self.storage_bytes = 0

    def begin(self, parts: Sequence[FilePart]) -> None:
        """Read these files from now on, in order; a request that is already running continues. Returns at once."""
        with self._changed:
            if self._closed or tuple(parts) == self._requested:
                return
            self._requested, self._request_count = tuple(parts), self._request_count + 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._read_requests, name="prefetch", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def close(self) -> None:
        """Stop reading. Idempotent."""
        with self._changed:
            self._closed = True
            self._request_count += 1
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until nothing is left to read; False after `timeout_seconds`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._requested or self._closed, timeout_seconds)

    def _read_requests(self) -> None:
        meter = StorageMeter(THREAD_IO)
        block = bytearray(BLOCK_BYTES)
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._requested or self._closed)
                    if self._closed:
                        return
                    parts, request = self._requested, self._request_count
                for part in parts:
                    if request != self._request_count:
                        break
                    with contextlib.suppress(OSError, UserError):
                        for path, ranges in self._find_ranges(part).items():
                            self._read(path, ranges, request, memoryview(block), meter)
                with self._changed:
                    if request == self._request_count:
                        self._requested = ()
                        self._changed.notify_all()
        finally:
            meter.close()

    def _read(
        self, path: str, ranges: Sequence[ByteRange], request: int, block: memoryview, meter: StorageMeter
    ) -> None:
        """Read the ranges so that the kernel caches them; the bytes are discarded."""
        with open(path, "rb", buffering=0) as file:
            for begin, end in ranges:
                file.seek(begin)
                while begin < end and request == self._request_count:
                    read = file.readinto(block[: end - begin])  # releases Python's lock
                    if not read:
                        return
                    begin += read
                    self.storage_bytes = meter.read_bytes()
