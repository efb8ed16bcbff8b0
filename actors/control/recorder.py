"""`Recorder`: keeps what the scheduler is told and says in a file, so that it can be decided again later.

Rules
1. The dispatcher's way is kept short: values are put aside, and made text of by another thread when the pool is idle or
   a second has passed. No more than `MOST_WAITING` are put aside; what comes beyond waits for the writing.
2. A file is never written over: where there is one, the next free number is put into the name.
3. A recorder that cannot write stops recording and says why; the pool goes on.
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
from modelpool.pool.core.errors import OutputFailed
from modelpool.scheduler.record.event_log import Header, entry_line, header_line
from modelpool.scheduler.tables.config import SchedulerConfig
from modelpool.scheduler.tables.messages import Command, Event

#: between two writings
FLUSH_SECONDS = 1.0
#: entries that are put aside at most: some 100 MiB of them, when every one is a job's
MOST_WAITING = 16_384


class Recorder:
    """One log, from `open` to `close`; without a path it records nothing."""

    def __init__(self, path: Path | None = None, config: SchedulerConfig | None = None) -> None:
        self._wanted = path
        self._config = config or SchedulerConfig()
        self._file: TextIO | None = None
        #: where it records; not always where it was wanted
        self.path: Path | None = None
        #: put aside by one thread, taken by another
        self._waiting: deque[tuple[Event, Sequence[Command]]] = deque()
        self._writing = threading.Lock()
        #: why nothing is recorded any more; "" while it is
        self.trouble = ""

    def open(self) -> None:
        """Begin. Raises OutputFailed when the file cannot be made."""
        if self._wanted is not None:
            self._file, self.path = _open_new(self._wanted)
            self._write(header_line(Header(self._config, _version())))

    @property
    def words(self) -> str:
        """Where it records, or why it does not any more; "" when nobody wants it to."""
        return self.trouble or str(self.path or "")

    def heard(self, event: Event, commands: Sequence[Command]) -> None:
        """The core handled `event` and said `commands`."""
        if self._file is None or self.trouble:
            return
        self._waiting.append((event, commands))
        if len(self._waiting) >= MOST_WAITING:
            self.flush()

    def flush(self) -> None:
        """Write what was put aside. Any thread may call."""
        with self._writing:
            taken = [self._waiting.popleft() for _ in range(len(self._waiting))]
            if taken and not self.trouble:
                self._write_entries(taken)

    async def keep_writing(self, clock: Clock) -> None:
        """Write what is put aside now and then, in a thread: the pool goes on meanwhile. Until it is cancelled."""
        while self._file is not None and not self.trouble:
            await clock.sleep(FLUSH_SECONDS)
            await asyncio.to_thread(self.flush)

    def close(self) -> None:
        """Write all of it and record no more. Idempotent."""
        self.flush()
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:  # what a full disk did not take is tried again here
                self.trouble = self.trouble or f"{self.path}: no longer recorded ({error})"

    def _write_entries(self, entries: Sequence[tuple[Event, Sequence[Command]]]) -> None:
        try:
            text = "".join([entry_line(event, commands) for event, commands in entries])
        except Exception as mistake:  # a value that is no plain one: no reason to end a pool
            self.trouble = f"{self.path}: no longer recorded ({type(mistake).__name__}: {mistake})"
            return
        self._write(text)

    def _write(self, text: str) -> None:
        assert self._file is not None, "nothing is put aside while no file is open"
        try:
            self._file.write(text)
            self._file.flush()
        except (OSError, ValueError) as error:
            self.trouble = f"{self.path}: no longer recorded ({error})"


def _version() -> str:
    try:
        return version("modelpool")
    except PackageNotFoundError:  # run from its folder
        return ""


def _open_new(path: Path) -> tuple[TextIO, Path]:
    """A new file at `path`, or at the first name with a number that is free."""
    number = 1
    free = path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        while free.exists():
            number += 1
            free = path.with_name(f"{path.stem}-{number}{path.suffix}")
        return free.open("x", encoding="ascii", newline="\n"), free
    except OSError as error:
        raise OutputFailed(f"{free}: cannot be written ({error.strerror or error})") from error
