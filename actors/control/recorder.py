"""`Recorder`: writes the scheduler's events and commands to an event log, for replay.

Rules
1. The dispatcher is not delayed: values are queued, and formatted by another thread when the pool is idle or a second
   has passed. At most `MOST_WAITING` are queued; beyond that, the dispatcher waits for the file.
2. A file is never overwritten: if it exists, the next free number is added to the name.
3. A full or broken disk is no reason to stop a pool. `words` says why nothing is written; it is logged once. The lines
   wait and are tried again; beyond `MOST_WAITING` the oldest are given up, and a line in their place counts them. So
   it is with a file that cannot be created, if the pool has run before: a first start is refused (`require_file`).
4. The file has whole lines: what a failed write has left of one is cut off before the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from modelpool.actors.control.fleet import Clock
from modelpool.actors.outputs.atomic_write import private_opener
from modelpool.pool.values.core.errors import OutputFailed, counted
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.messages import Command, Event
from modelpool.scheduler.simulator.record.event_log import LogHeader, entry_line, gap_line, header_line

logger = logging.getLogger(__name__)

#: interval between writes
FLUSH_SECONDS = 1.0
#: interval between attempts while the disk takes nothing
RETRY_SECONDS = 5.0
#: the most queued entries, and the most lines that wait for the disk: about 100 MiB each if all of them are jobs
MOST_WAITING = 16_384
#: lines of one write
_LINES_PER_WRITE = 256
#: how the line of an event begins that cannot be written
_GAP_BEGIN = b'{"lost":'


class Recorder:
    """One event log, from `open` to `close`; without a path it records nothing."""

    def __init__(self, path: Path | None = None, config: SchedulerConfig | None = None) -> None:
        self._requested_path = path
        self._config = config or SchedulerConfig()
        #: from `open` to `close`, if there is a path
        self._is_recording = False
        #: None until it can be created
        self._file: BinaryIO | None = None
        #: the actual path, which may differ from the requested one; this one until there is a file
        self.path: Path | None = None
        #: filled by one thread, emptied by another
        self._waiting: deque[tuple[Event, Sequence[Command]]] = deque()
        self._writing = threading.Lock()
        #: the first line, from `open` on
        self._header = b""
        #: formatted lines that the file does not have yet
        self._lines: deque[bytes] = deque()
        #: bytes of the whole lines in the file
        self._size_bytes = 0
        #: lines given up since the last write, which come before `_lines`
        self._gap = 0
        #: events that the log lacks, in all
        self._lost = 0
        #: why nothing is written; "" while the disk takes the lines
        self.trouble = ""
        self._cause = ""

    def open(self) -> None:
        """Start recording. A file that cannot be created is tried again; see `require_file`."""
        if self._requested_path is not None:
            self._is_recording, self.path = True, self._requested_path
            with self._writing:
                self._header = header_line(LogHeader(self._config, _version())).encode("ascii")
                self._write()

    def require_file(self) -> None:
        """Raise OutputFailed, and stop recording, if the file could not be created."""
        if self._is_recording and self._file is None:
            self._is_recording = False
            raise OutputFailed(f"{self.path}: cannot be written ({self._cause})")

    @property
    def words(self) -> str:
        """The path, with why nothing is written and how many events the log lacks; "" if recording is off."""
        if self.path is None:
            return ""
        notes = [self.trouble] if self.trouble else []
        if self._lost:
            notes.append(f"{counted(self._lost, 'event')} lost")
        return f"{self.path}: {'; '.join(notes)}" if notes else str(self.path)

    def note(self, event: Event, commands: Sequence[Command]) -> None:
        """Queue an event with the core's commands."""
        if not self._is_recording:
            return
        self._waiting.append((event, commands))
        if len(self._waiting) >= MOST_WAITING:
            self.flush()

    def flush(self) -> None:
        """Write the queued entries. Thread-safe."""
        with self._writing:
            for _ in range(len(self._waiting)):
                self._lines.append(self._formatted(*self._waiting.popleft()))
            if self._is_recording and (self._lines or self._file is None):
                self._write()
                self._give_up(len(self._lines) - MOST_WAITING)

    async def keep_writing(self, clock: Clock) -> None:
        """Write the queued entries periodically, in a thread, until cancelled."""
        while self._is_recording:
            await clock.sleep(RETRY_SECONDS if self.trouble else FLUSH_SECONDS)
            await asyncio.to_thread(self.flush)

    def close(self) -> None:
        """Write everything and stop recording. Idempotent."""
        self.flush()
        with self._writing:
            file, self._file = self._file, None
            if not self._is_recording:
                return
            self._is_recording = False
            self._give_up(len(self._lines))
            if self.trouble:
                logger.warning("the event log ends early: %s", self.words)
            if file is not None:
                with contextlib.suppress(OSError):  # of file systems that write when a file is closed
                    file.close()

    def _formatted(self, event: Event, commands: Sequence[Command]) -> bytes:
        try:
            return entry_line(event, commands).encode("ascii")
        except Exception as mistake:  # a value that cannot be formatted is no reason to end a pool
            reason = f"{type(event).__name__} cannot be written ({type(mistake).__name__}: {mistake})"
            logger.warning("the event log of the pool has a gap: %s", reason)
            self._lost += 1
            return gap_line(1, reason).encode("ascii")

    def _write(self) -> None:
        """Write the lines, to a new file if there is none; those that the disk does not take stay."""
        try:
            if self._file is None:
                assert self._requested_path is not None
                self._file, self.path = _open_new(self._requested_path)
            file = self._file
            self._find_end(file)
            if not self._size_bytes:
                self._append(file, self._header)
            if self._gap:
                self._append(file, gap_line(self._gap, self.trouble or "no room").encode("ascii"))
                self._gap = 0
            while chunk := list(islice(self._lines, _LINES_PER_WRITE)):
                self._append(file, b"".join(chunk))
                for _ in chunk:
                    self._lines.popleft()
        except OSError as error:
            if not self.trouble:
                logger.warning("the event log of the pool is not written: %s: %s", self.path, error.strerror or error)
            self._cause = error.strerror or str(error)
            self.trouble = f"not written now ({self._cause})"
            if self._file is not None:
                with contextlib.suppress(OSError):  # readers see whole lines; otherwise the next attempt does it
                    self._find_end(self._file)
            return
        if self.trouble:
            self.trouble = ""
            lost = f"; {counted(self._lost, 'event')} lost" if self._lost else ""
            logger.info("the event log of the pool is written again: %s%s", self.path, lost)

    def _find_end(self, file: BinaryIO) -> None:
        """Cut off the part of a line that a failed write has left. Raises OSError, also if the lines are gone."""
        found = os.fstat(file.fileno())
        if not found.st_nlink or found.st_size < self._size_bytes:
            raise OSError("another program has removed the file or cut it off")
        if found.st_size > self._size_bytes:
            os.ftruncate(file.fileno(), self._size_bytes)

    def _append(self, file: BinaryIO, text: bytes) -> None:
        """Write bytes after the whole lines, all of them. Raises OSError."""
        rest, at = memoryview(text), self._size_bytes
        while rest:
            written = os.pwrite(file.fileno(), rest, at)
            rest, at = rest[written:], at + written
        self._size_bytes = at

    def _give_up(self, lines: int) -> None:
        """Drop the oldest lines."""
        for _ in range(lines):
            is_counted = self._lines.popleft().startswith(_GAP_BEGIN)  # it stands for one event, which is lost already
            self._gap += 1
            self._lost += not is_counted


def _version() -> str:
    try:
        return version("modelpool")
    except PackageNotFoundError:  # run from a checkout
        return ""


def _open_new(path: Path) -> tuple[BinaryIO, Path]:
    """Create a file at `path`, or at the first free numbered name. Raises OSError."""
    number = 1
    free = path
    path.parent.mkdir(parents=True, exist_ok=True)
    while free.exists():
        number += 1
        free = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return open(free, "xb", buffering=0, opener=private_opener), free
