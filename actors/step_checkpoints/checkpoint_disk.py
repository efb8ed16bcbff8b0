"""`CheckpointDisk`: a checkpoint folder with a thread that writes it, so that no run waits for a disk."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

from modelpool.actors.step_checkpoints.checkpoint_folder import CheckpointFolder
from modelpool.actors.step_checkpoints.latest_queue import LatestQueue
from modelpool.pool.core.errors import OutputFailed
from modelpool.pool.core.results import RunState
from modelpool.pool.specs.spec import TaskId

logger = logging.getLogger(__name__)

#: states of this size together may wait; more are skipped: a slow disk must not fill the memory
MOST_WAITING_BYTES = 512 << 20
#: after a failed write, as on a full disk, nothing is written for this time
PAUSE_SECONDS = 600.0


class CheckpointDisk:
    """Saves and finds checkpoints in one folder. A slow disk skips checkpoints; a full one is left alone for
    `PAUSE_SECONDS`. Only `newest` and `steps` read the disk in the caller's thread."""

    def __init__(self, folder: CheckpointFolder, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder = folder
        self._clock = clock
        self._queue = LatestQueue("write checkpoints")
        #: these two are read and written by several threads, in single atomic operations
        self._paused_until = float("-inf")
        #: sizes of the states that wait or are being written
        self._waiting_bytes: dict[TaskId, int] = {}

    def takes(self, task_id: TaskId) -> bool:
        """Return whether a state of `task_id` would be written now: none of it is still being written, not too many
        others wait, and the disk is usable as far as known."""
        if self._clock() < self._paused_until or self._queue.has(task_id):
            return False
        return sum(tuple(self._waiting_bytes.values())) < MOST_WAITING_BYTES

    def save(self, task_id: TaskId, state: RunState) -> None:
        """Write a state soon, in place of one that waits."""
        if self._clock() >= self._paused_until:
            self._waiting_bytes[task_id] = sum(array.nbytes for array in state.arrays)
            self._queue.put(task_id, partial(self._write, task_id, state))

    def remove(self, task_id: TaskId) -> None:
        """Remove the checkpoints of a task soon, after one that is being written."""
        self._waiting_bytes.pop(task_id, None)
        self._queue.put(task_id, partial(self.folder.remove, task_id))

    def clean(self) -> None:
        """Remove what is too old or too much, soon."""
        self._queue.put("clean", self.folder.clean)

    def flush(self, seconds: float) -> bool:
        """Wait until everything is written, at most `seconds`; return whether it is."""
        return self._queue.flush(seconds)

    def close(self) -> None:
        """Write nothing more. Idempotent."""
        self._queue.close()

    def _write(self, task_id: TaskId, state: RunState) -> None:
        try:
            if not self.folder.save(task_id, state):
                logger.warning("a checkpoint of %s is larger than all checkpoints may be, and is not written", task_id)
        except OutputFailed as failed:
            self._paused_until = self._clock() + PAUSE_SECONDS
            logger.warning("no checkpoints are written for %.0f min: %s", PAUSE_SECONDS / 60, failed)
        finally:
            if not self._queue.waits(task_id):
                self._waiting_bytes.pop(task_id, None)
