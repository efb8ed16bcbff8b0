"""`PartialFile`: a file while it is fetched: its bytes, its journal, and the lock of the process that fetches it.

The lock is on the journal and ends with the process, however that ends: another process takes over and continues with
the chunks that are missing. A partial file is never read as weights; only complete chunks are served to other nodes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
from pathlib import Path

from modelpool.pool.files.fetch.fetch_errors import CacheFull
from modelpool.pool.files.fetch.fetch_progress import FetchProgress, journal_start, new_progress, read_journal

DATA_SUFFIX, JOURNAL_SUFFIX = ".part", ".journal"


class PartialFile:
    """The partial file `key` in a folder. Only one process at a time has it; its threads may share it."""

    def __init__(self, folder: Path, key: str, size_bytes: int, journal: int, remedy: str) -> None:
        """Use `PartialFile.try_lock`."""
        self._remedy = remedy
        self.data_path = folder / f"{key}{DATA_SUFFIX}"
        self.journal_path = folder / f"{key}{JOURNAL_SUFFIX}"
        self._size_bytes = size_bytes
        self._journal = journal
        self._data = -1
        self._lock = threading.Lock()
        self.progress = new_progress(size_bytes)

    @classmethod
    def try_lock(
        cls,
        folder: Path,
        key: str,
        size_bytes: int,
        remedy: str = "Free some, or set a smaller cache_bytes in [models]",
    ) -> PartialFile | None:
        """Take the partial file over; None if another process has it. Nothing is opened or reserved yet. `remedy` is
        what helps against a full disk."""
        path = folder / f"{key}{JOURNAL_SUFFIX}"
        while True:
            journal = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(journal)
                return None
            if os.fstat(journal).st_nlink:  # else it was completed, or cleaned up, before it was locked
                return cls(folder, key, size_bytes, journal, remedy)
            os.close(journal)

    def open(self) -> FetchProgress:
        """Open or create the bytes at full size, and return what they contain already. Raises CacheFull."""
        text = os.pread(self._journal, os.fstat(self._journal).st_size, 0).decode("ascii", "replace")
        known = read_journal(text, self._size_bytes) if self.data_path.exists() else None
        try:
            self._data = os.open(self.data_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if known is None or os.fstat(self._data).st_size != self._size_bytes:
                known = new_progress(self._size_bytes)
                os.ftruncate(self._journal, 0)
                os.ftruncate(self._data, 0)
                os.ftruncate(self._data, self._size_bytes)
                self._append(journal_start(known))
            elif not text.endswith("\n"):  # the last writer was killed within a line
                os.ftruncate(self._journal, text.rindex("\n") + 1)
            self._append("begin\n")
        except OSError as error:
            raise self._full(error) from error
        self.progress = FetchProgress(known.size_bytes, known.chunk_bytes, known.done)
        return self.progress

    def claim(self, chunk: int) -> None:
        """Record that the chunk is being fetched from the source."""
        with self._lock:
            self._append(f"claim {chunk}\n")

    def drop(self, chunk: int) -> None:
        """Record that it is not, any more."""
        with self._lock:
            self._append(f"drop {chunk}\n")

    def write(self, begin: int, piece: bytes) -> None:
        """Write bytes of a chunk. Raises CacheFull."""
        view = memoryview(piece)
        try:
            while view:
                count = os.pwrite(self._data, view, begin)
                begin, view = begin + count, view[count:]
        except OSError as error:
            raise self._full(error) from error

    def done(self, chunk: int) -> None:
        """Record that all bytes of a chunk were written: they are on disk before the journal says so."""
        try:
            os.fdatasync(self._data)
            with self._lock:
                self._append(f"done {chunk}\n")
                now = self.progress
                self.progress = FetchProgress(now.size_bytes, now.chunk_bytes, now.done | {chunk})
        except OSError as error:
            raise self._full(error) from error

    def read(self, begin: int, end: int) -> bytes:
        """Return bytes of complete chunks."""
        return os.pread(self._data, end - begin, begin)

    def finish(self, path: Path, mode: int = 0o444, replaces: bool = False) -> None:
        """Give the complete and verified file its final name, atomically, and release the lock. A file that has this
        name already has equal bytes and stays, unless this one `replaces` it."""
        if path.exists() and not replaces:
            self.discard()
            return
        os.fchmod(self._data, mode)
        os.fsync(self._data)
        os.rename(self.data_path, path)
        _sync_folder(path.parent)
        self.journal_path.unlink(missing_ok=True)
        self.close()

    def reset(self) -> None:
        """Forget all bytes; the lock and the reserved room stay."""
        os.ftruncate(self._journal, 0)
        os.close(self._data)
        self._data = -1

    def discard(self) -> None:
        """Delete the partial file, and release the lock."""
        self.data_path.unlink(missing_ok=True)
        self.journal_path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Release the lock; what was fetched stays. Idempotent."""
        if self._journal >= 0 and not self.data_path.exists() and os.fstat(self._journal).st_nlink:
            self.journal_path.unlink(missing_ok=True)  # nothing was begun
        for file in (self._data, self._journal):
            if file >= 0:
                os.close(file)
        self._data = self._journal = -1

    def _append(self, text: str) -> None:
        if text:
            os.write(self._journal, text.encode("ascii"))

    def _full(self, error: OSError) -> CacheFull | OSError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return CacheFull(
                f"{self.data_path.parent.parent}: the disk is full ({error.strerror}); expected room for "
                f"{self._size_bytes} bytes. {self._remedy}"
            )
        return error


def is_fetched_now(journal_path: Path) -> bool:
    """Whether a process has the lock of this journal."""
    try:
        journal = os.open(journal_path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(journal)
    return False


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # not every file system can
        opened = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
