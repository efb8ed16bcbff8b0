"""`HistoryWriter`: writes batches to the history of a pool, in a thread of its own.

Rules
1. Nobody waits for it: not the event loop of the controller, and not the end of the pool beyond CLOSE_SECONDS. A disk
   that does not answer holds up this thread only.
2. A full or broken disk is no reason to stop a pool. `trouble` says why nothing is written; it is logged once. The
   batch is tried again every RETRY_SECONDS, and what follows is summed up in memory meanwhile.
3. Opening counts what killed controllers have left in their spools.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from modelpool.actors.control.history.history_file import (
    USUAL_BOUNDS,
    HistoryBounds,
    HistoryBusy,
    HistoryFailed,
    HistoryFile,
    LeftHistory,
    batch_of,
)
from modelpool.actors.control.history.history_values import EventKind, HistoryBatch, HistoryEvent
from modelpool.actors.control.history.spool import remove_orphans, spooled_records, spools_left
from modelpool.pool.values.core.errors import counted

logger = logging.getLogger(__name__)

#: interval of trying again where the history cannot be opened or written
RETRY_SECONDS = 5.0
#: longest wait for the last batch
CLOSE_SECONDS = 5.0
#: a controller that has ended may hold the lock for a moment longer
LOCK_SECONDS = 10.0
#: batches after which old rows are removed
PRUNE_BATCHES = 60
#: spools of killed controllers that are kept while the history cannot be opened; the oldest ones are given up
MOST_SPOOLS = 8


@dataclass(frozen=True, slots=True)
class WriterStart:
    """The start of a controller, for the first event of its history.

    at           wall-clock time
    text         what has started
    """

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class DiskUse:
    """The disk of the history and the journal, and the size of the history itself, in bytes."""

    total_bytes: int
    free_bytes: int
    history_bytes: int


class HistoryWriter:
    """The writer of one controller. Attributes may be read by any thread."""

    def __init__(
        self,
        path: Path,
        spool_prefix: Path | None,
        own_spool: str,
        start: WriterStart,
        bounds: HistoryBounds = USUAL_BOUNDS,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`spool_prefix` is of the spools of all controllers of the pool, `own_spool` the name of this one's."""
        self._path = path
        self._spool_prefix = spool_prefix
        self._own_spool = own_spool
        self._start = start
        self._bounds = bounds
        self._wall_clock = wall_clock
        #: what earlier controllers have left; None until the history is open
        self.left: LeftHistory | None = None
        #: why nothing is written; "" while the history is
        self.trouble = ""
        self.disk: DiskUse | None = None
        self._batches: queue.SimpleQueue[HistoryBatch | None] = queue.SimpleQueue()
        self._is_idle = threading.Event()
        self._is_idle.set()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="modelpool history", daemon=True)
        self._thread.start()

    @property
    def is_idle(self) -> bool:
        """Whether everything that was handed over is stored, and the history is open."""
        return self.left is not None and self._is_idle.is_set()

    def write(self, batch: HistoryBatch) -> None:
        """Hand over a batch; the writer must be idle."""
        self._is_idle.clear()
        self._batches.put(batch)

    def close(self, last: HistoryBatch) -> bool:
        """Write the last batch, and release the history; wait CLOSE_SECONDS at most. Returns whether all is stored."""
        self._batches.put(last)
        self._batches.put(None)
        self._stopping.set()
        self._thread.join(CLOSE_SECONDS)
        return not self._thread.is_alive() and not self.trouble and self.left is not None

    # ---- the writer's thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        file: HistoryFile | None = None
        try:
            file = self._opened()
            if file is None:
                return
            self._note_disk(file)
            batches = 0
            while (batch := self._batches.get()) is not None:
                if not self._written(file, batch):
                    return
                if self._batches.empty():
                    self._is_idle.set()
                batches += 1
                self._note_disk(file)
                if batches % PRUNE_BATCHES == 1:
                    with contextlib.suppress(HistoryFailed):  # the next batch fails, too
                        file.prune()
        except Exception as mistake:  # a bug here must not end the pool; its status shows it
            logger.exception("the history of the pool is no longer written")
            self.trouble = f"{self._path}: the history is no longer written ({type(mistake).__name__}: {mistake})"
        finally:
            if file is not None:
                file.close()

    def _opened(self) -> HistoryFile | None:
        """Open the history, once that is possible; None if the pool ends first."""
        until = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                file = HistoryFile(self._path, self._bounds)
            except HistoryBusy as busy:  # the controller before this one ends
                if time.monotonic() > until:
                    self._note_trouble(str(busy))
            except HistoryFailed as failed:
                self._note_trouble(str(failed))
            else:
                try:
                    self._take_over(file)
                    return file
                except HistoryFailed as failed:
                    self._note_trouble(str(failed))
                    file.close()
            if self._stopping.wait(0.1 if not self.trouble else RETRY_SECONDS):
                return None

    def _take_over(self, file: HistoryFile) -> None:
        """Store what killed controllers have left, and that this one has started. Raises HistoryFailed."""
        left = [] if self._spool_prefix is None else spools_left(self._spool_prefix)
        for name, path in left:
            if name == self._own_spool:
                continue
            try:
                records = spooled_records(path, file.stored_number(name))
            except OSError as error:
                logger.warning("what a controller has left is not counted: %s (%s)", path, error)
                continue
            if records:
                batch = batch_of(name, records)
                file.write(batch)
                if batch.dropped:
                    logger.warning(
                        "of what a controller has left, %s is not counted: another version of modelpool wrote it",
                        counted(batch.dropped, "record"),
                    )
            with contextlib.suppress(OSError):
                path.unlink()
        if self._spool_prefix is not None:
            pool_pattern = f"{self._spool_prefix.name.rpartition('-')[0]}-*"
            remove_orphans(self._spool_prefix.parent, pool_pattern, self._wall_clock())
        found = file.left
        kind = EventKind.CONTROLLER_RESTARTED if found.was_running else EventKind.POOL_STARTED
        words = "the controller was restarted" if found.was_running else "the pool has started"
        file.write(HistoryBatch(events=[HistoryEvent(self._start.at, kind, f"{words}: {self._start.text}")]))
        self._end_trouble()
        self.left = found

    def _written(self, file: HistoryFile, batch: HistoryBatch) -> bool:
        """Write a batch, as soon as the disk takes it; False if the pool ends first."""
        while True:
            try:
                had_trouble = self.trouble
                if had_trouble or batch.dropped:
                    lost = f"; {batch.dropped} events had no room in memory" if batch.dropped else ""
                    text = f"the history is written again: {had_trouble or 'no trouble'}{lost}"
                    resumed = HistoryEvent(self._wall_clock(), EventKind.HISTORY_RESUMED, text)
                    file.write(_with_event(batch, resumed))
                else:
                    file.write(batch)
                self._end_trouble()
                return True
            except HistoryFailed as failed:
                self._note_trouble(str(failed))
            if self._stopping.is_set() or self._stopping.wait(RETRY_SECONDS):
                return False

    def _note_trouble(self, trouble: str) -> None:
        if not self.trouble:
            logger.warning("the history of the pool is not written: %s", trouble)
            self._drop_old_spools()
        self.trouble = trouble

    def _end_trouble(self) -> None:
        if self.trouble:
            logger.info("the history of the pool is written again")
        self.trouble = ""

    def _drop_old_spools(self) -> None:
        left = [] if self._spool_prefix is None else spools_left(self._spool_prefix)
        for _, path in left[:-MOST_SPOOLS]:
            logger.warning("what a controller has left is given up: %s", path)
            with contextlib.suppress(OSError):
                path.unlink()

    def _note_disk(self, file: HistoryFile) -> None:
        with contextlib.suppress(OSError, HistoryFailed):
            found = os.statvfs(self._path.parent)
            self.disk = DiskUse(
                found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize, self._path.stat().st_size
            )


def _with_event(batch: HistoryBatch, event: HistoryEvent) -> HistoryBatch:
    return HistoryBatch(
        batch.costs,
        batch.node_costs,
        [*batch.events, event],
        batch.level,
        batch.spool,
        batch.sequence,
        is_last=batch.is_last,
    )
