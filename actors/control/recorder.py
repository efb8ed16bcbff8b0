"""`Recorder`: writes the scheduler's events and commands to an event log, for replay.

Rules
1. The dispatcher is not delayed: values are queued, and formatted by another thread when the pool is idle or a second
   has passed. At most `MOST_WAITING` are queued; beyond that, the dispatcher waits for the file.
2. A file is never overwritten: if it exists, the next free number is added to the name.
3. A recorder that cannot write stops recording and reports the reason; the pool continues.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TextIO

from modelpool.actors.control.fleet import Clock
from modelpool.actors.outputs.atomic_write import private_opener
from modelpool.pool.values.core.errors import OutputFailed
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.messages import Command, Event
from modelpool.scheduler.simulator.record.event_log import LogHeader, entry_line, header_line

#: interval between writes
FLUSH_SECONDS = 1.0
#: the most queued entries: about 100 MiB if each of them is a job
MOST_WAITING = 16_384


class Recorder:
    """One event log, from `open` to `close`; without a path it records nothing."""

    def __init__(self, path: Path | None = None, config: SchedulerConfig | None = None) -> None:
        self._requested_path = path
        self._config = config or SchedulerConfig()
        self._file: TextIO | None = None
        #: the actual path, which may differ from the requested one
        self.path: Path | None = None
        #: filled by one thread, emptied by another
        self._waiting: deque[tuple[Event, Sequence[Command]]] = deque()
        self._writing = threading.Lock()
        #: why recording stopped; "" while it works
        self.trouble = ""

    def open(self) -> None:
        """Start recording. Raises OutputFailed if the file cannot be created."""
        if self._requested_path is not None:
            self._file, self.path = _open_new(self._requested_path)
            self._write(header_line(LogHeader(self._config, _version())))

    @property
    def words(self) -> str:
        """The path, or why recording stopped; "" if recording is off."""
        return self.trouble or str(self.path or "")

    def note(self, event: Event, commands: Sequence[Command]) -> None:
        """Queue an event with the core's commands."""
        if self._file is None or self.trouble:
            return
        self._waiting.append((event, commands))
        if len(self._waiting) >= MOST_WAITING:
            self.flush()

    def flush(self) -> None:
        """Write the queued entries. Thread-safe."""
        with self._writing:
            taken = [self._waiting.popleft() for _ in range(len(self._waiting))]
            if taken and not self.trouble:
                self._write_entries(taken)

    async def keep_writing(self, clock: Clock) -> None:
        """Write the queued entries periodically, in a thread, until cancelled."""
        while self._file is not None and not self.trouble:
            await clock.sleep(FLUSH_SECONDS)
            await asyncio.to_thread(self.flush)

    def close(self) -> None:
        """Write everything and stop recording. Idempotent."""
        self.flush()
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:  # data that a full disk did not take is written again here
                self.trouble = self.trouble or f"{self.path}: recording stopped ({error})"

    def _write_entries(self, entries: Sequence[tuple[Event, Sequence[Command]]]) -> None:
        try:
            text = "".join([entry_line(event, commands) for event, commands in entries])
        except Exception as mistake:  # a value that cannot be formatted is no reason to end a pool
            self.trouble = f"{self.path}: recording stopped ({type(mistake).__name__}: {mistake})"
            return
        self._write(text)

    def _write(self, text: str) -> None:
        assert self._file is not None, "nothing is queued while no file is open"
        try:
            self._file.write(text)
            self._file.flush()
        except (OSError, ValueError) as error:
            self.trouble = f"{self.path}: recording stopped ({error})"


def _version() -> str:
    try:
        return version("modelpool")
    except PackageNotFoundError:  # run from a checkout
        return ""


def _open_new(path: Path) -> tuple[TextIO, Path]:
    """Create a file at `path`, or at the first free numbered name."""
    number = 1
    free = path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        while free.exists():
            number += 1
            free = path.with_name(f"{path.stem}-{number}{path.suffix}")
        return open(free, "x", encoding="ascii", newline="\n", opener=private_opener), free
    except OSError as error:
        raise OutputFailed(f"{free}: cannot be written ({error.strerror or error})") from error
