"""`CheckpointDisk`: a checkpoint folder with threads that read and write it, so that no run waits long for a disk."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from functools import partial

from modelpool.actors.worker.step_checkpoints.checkpoint_folder import CheckpointFolder
from modelpool.actors.worker.step_checkpoints.latest_queue import LatestQueue
from modelpool.pool.values.core.errors import OutputFailed
from modelpool.pool.values.core.results import RunState
from modelpool.pool.values.specs.spec import TaskId

logger = logging.getLogger(__name__)

#: the usual limit of a read
READ_SECONDS = 10.0
#: states of this size together may wait; more are skipped: a slow disk must not fill the memory
MOST_WAITING_BYTES = 512 << 20
#: after a failed write, as on a full disk, nothing is written for this time
PAUSE_SECONDS = 600.0


class CheckpointDisk:
    """Saves and finds checkpoints in one folder. A slow disk skips checkpoints; a full one is left alone for
    `PAUSE_SECONDS`; one that does not answer has no checkpoints."""

    def __init__(self, folder: CheckpointFolder, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder = folder
        self._clock = clock
        self._queue = LatestQueue("write checkpoints")
        self._reads = LatestQueue("read checkpoints")
        #: these three are read and written by several threads, in single atomic operations
        self._paused_until = float("-inf")
        #: a read was given up, and has not ended yet
        self._is_silent = False
        #: sizes of the states that wait or are being written
        self._waiting_bytes: dict[TaskId, int] = {}

    def find(self, task_id: TaskId, steps: int, above: int = 0, seconds: float = READ_SECONDS) -> RunState | None:
        """Return the newest valid state of a run of `steps` steps that is beyond step `above`; None without one, and
        if the disk does not answer within `seconds`, or has not answered an earlier call that gave up."""
        if self._is_silent:
            return None
        answers: queue.SimpleQueue[RunState | None] = queue.SimpleQueue()

        def read() -> None:
            found = None
            try:
                found = self.folder.newest(task_id, steps, above)
            finally:
                answers.put(found)
                self._is_silent = False

        self._reads.put(object(), read)
        try:
            return answers.get(timeout=seconds)
        except queue.Empty:
            self._is_silent = True
            if not answers.empty():  # it came just now, and nothing would end the silence
                self._is_silent = False
            logger.warning("%s has not answered for %.0f s; a checkpoint is not used", self.folder.path, seconds)
            return None

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
        """Remove old and excess checkpoints, soon."""
        self._queue.put("clean", self.folder.clean)

    def flush(self, seconds: float) -> bool:
        """Wait until everything is written, at most `seconds`; return whether it is."""
        return self._queue.flush(seconds)

    def close(self) -> None:
        """Write nothing more. Idempotent."""
        self._queue.close()
        self._reads.close()

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
