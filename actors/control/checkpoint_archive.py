"""`CheckpointArchive`: the checkpoints of a pool in a place that survives its nodes and its controller.

Saves the states that reach the controller, and returns those that runs of an earlier controller left. What the workers
of this node save in the same folder is only noted: it is there already. No method waits for the disk, except `open`
and `find`, for a limited time; `find` only for tasks that have a checkpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping

from modelpool.actors.worker.step_checkpoints.checkpoint_disk import READ_SECONDS, CheckpointDisk
from modelpool.pool.values.core.results import RunState
from modelpool.pool.values.core.stage_params import SampleParams, StageParams
from modelpool.pool.values.specs.spec import TaskId

logger = logging.getLogger(__name__)

#: tasks that may have a checkpoint, as remembered; as many small states as the default bound of a folder holds
MOST_NOTED = 100_000


class CheckpointArchive:
    """The archive of one controller; all methods for its event loop. Without a `disk` it is empty."""

    def __init__(self, disk: CheckpointDisk | None = None, is_shared: bool = False) -> None:
        """`is_shared`: the workers of this node save their checkpoints in the same folder."""
        self._disk = disk
        self.is_shared = is_shared
        self._opened = asyncio.Event()
        #: tasks that may have a checkpoint, oldest first; a dict as an ordered set
        self.noted: dict[TaskId, None] = {}

    async def open(self) -> None:
        """Read which tasks have a checkpoint, and remove old and excess checkpoints."""
        if self._disk is None:
            return
        self._disk.clean()
        try:
            async with asyncio.timeout(READ_SECONDS):
                found = await asyncio.to_thread(self._disk.folder.steps)
            for task_id in found:
                self.note(task_id)
        except TimeoutError:
            logger.warning("%s: did not answer; earlier checkpoints are not used", self._disk.folder.path)
        finally:
            self._opened.set()

    async def find(self, works: Mapping[TaskId, StageParams]) -> dict[TaskId, RunState]:
        """Return the newest state of each of these tasks that has one. Waits until the archive is open, as requests may
        arrive before: drivers find a new controller by its name."""
        if self._disk is None:
            return {}
        if not self._opened.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(READ_SECONDS):
                    await self._opened.wait()
        if not self.noted:
            return {}
        wanted = {
            task_id: work.steps_run
            for task_id, work in works.items()
            if task_id in self.noted and isinstance(work, SampleParams)
        }
        found = {}
        for task_id, steps in wanted.items():
            state = await asyncio.to_thread(self._disk.find, task_id, steps)
            if state is not None:
                found[task_id] = state
        return found

    def note(self, task_id: TaskId) -> None:
        """Note that a task may have a checkpoint."""
        self.noted.pop(task_id, None)
        self.noted[task_id] = None
        if len(self.noted) > MOST_NOTED:
            del self.noted[next(iter(self.noted))]

    def takes(self, task_id: TaskId) -> bool:
        """Return whether a state of `task_id` would be saved now."""
        return self._disk is not None and self._disk.takes(task_id)

    def save(self, task_id: TaskId, state: RunState) -> None:
        """Save a state soon."""
        if self._disk is not None:
            self._disk.save(task_id, state)
            self.note(task_id)

    def remove(self, task_id: TaskId) -> None:
        """Remove the checkpoints of a task soon, if it has any."""
        if task_id in self.noted and self._disk is not None:
            del self.noted[task_id]
            self._disk.remove(task_id)

    async def flush(self, seconds: float) -> None:
        """Wait until everything is saved, at most `seconds`."""
        if self._disk is not None:
            await asyncio.to_thread(self._disk.flush, seconds)

    def close(self) -> None:
        """Save nothing more. Idempotent."""
        if self._disk is not None:
            self._disk.close()
