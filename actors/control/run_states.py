"""`RunStates`: the states of sampling runs, from which their tasks resume: found, held, saved and removed.

The archive saves them; this decides which ones, and which are needed no more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable

from modelpool.actors.control.checkpoint_archive import CheckpointArchive
from modelpool.actors.control.fleet import WorkerFleet
from modelpool.actors.control.task_store import TaskStore
from modelpool.actors.graph.common.task_collector import JobGraph
from modelpool.actors.worker.run_checkpoints import SUSPECT_ERRORS
from modelpool.actors.worker.wire.messages import ResultRef, StateSaved
from modelpool.pool.values.core.results import RunState
from modelpool.pool.values.specs.spec import TaskId, TaskReport, TaskSpec, WorkerId
from modelpool.scheduler.model.kept_states import state_id

logger = logging.getLogger(__name__)

#: the states of stopped runs may take so long to be saved before the pool ends
ARCHIVE_SECONDS = 4.0


class RunStates:
    """The states of the runs of one controller."""

    def __init__(self, archive: CheckpointArchive, fleet: WorkerFleet) -> None:
        self.archive = archive
        self._fleet = fleet
        #: tasks with a result and checkpoints, until no job needs them, and the workers that have saved those
        self._checkpointed: dict[TaskId, tuple[WorkerId, int]] = {}
        #: states of stopped runs that are being read to be saved
        self._archiving: set[asyncio.Task[None]] = set()

    @property
    def has_checkpoints(self) -> bool:
        """Whether a task may have a checkpoint."""
        return bool(self._checkpointed or self.archive.noted)

    async def found(self, graph: JobGraph) -> tuple[tuple[StateSaved, ResultRef], ...]:
        """Return the states that earlier runs of the tasks of a job left, each as a checkpoint of no run."""
        found = []
        for task_id, state in (await self.archive.find(graph.works)).items():
            size_bytes = sum(array.nbytes for array in state.arrays)
            saved = StateSaved(WorkerId(""), 0, task_id, 0, 0, state.step, state.steps, size_bytes)
            found.append((saved, await self._fleet.hold(state)))
        return tuple(found)

    def saved(self, saved: StateSaved, value: RunState, is_here: bool) -> None:
        """Note a state that the worker of a run has saved, and save it here, too; `is_here`: on this node."""
        if self.archive.is_shared and is_here:  # the worker saves in this folder itself
            self.archive.note(saved.task_id)
        elif self.archive.takes(saved.task_id):
            self.archive.save(saved.task_id, value)

    def run_ended(self, task: TaskSpec, report: TaskReport, tasks: TaskStore) -> None:
        """Keep on disk what a run that stopped has done, and remove checkpoints that may have failed it, or that no
        job needs."""
        if report.error is None:
            if report.has_checkpoints:
                self._checkpointed[task.task_id] = (report.worker_id, report.incarnation)
            may_forget = self._checkpointed or self.archive.noted
            if may_forget and tasks.first_job(task.task_id) is None:  # nobody waits for it any more
                self._forget(task.task_id)
        elif report.has_state:
            archiving = asyncio.ensure_future(self._archive(report, tasks))
            self._archiving.add(archiving)
            archiving.add_done_callback(self._archiving.discard)
        elif report.cost.steps_before and report.error.kind in SUSPECT_ERRORS:
            self.archive.remove(task.task_id)

    def job_ended(self, unneeded: Iterable[TaskId], has_succeeded: bool) -> None:
        """A job ended, and no other job needs its tasks `unneeded`: remove their checkpoints if it `has_succeeded`.
        Else it may be submitted again: they stay until their folder needs the room."""
        for task_id in unneeded:
            if has_succeeded:
                self._forget(task_id)
            else:
                self._checkpointed.pop(task_id, None)

    async def settle(self) -> None:
        """Wait until the states of stopped runs are saved, at most `ARCHIVE_SECONDS`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ARCHIVE_SECONDS):
                await asyncio.gather(*self._archiving)
                await self.archive.flush(ARCHIVE_SECONDS)

    def close(self) -> None:
        """Save nothing more. Idempotent."""
        for archiving in self._archiving:
            archiving.cancel()
        self.archive.close()

    def _forget(self, task_id: TaskId) -> None:
        """Remove the checkpoints of a task that has succeeded and that no job needs any more."""
        self.archive.remove(task_id)
        saved_by = self._checkpointed.pop(task_id, None)
        if saved_by is not None:
            self._fleet.forget_checkpoints(*saved_by, task_id)

    async def _archive(self, report: TaskReport, tasks: TaskStore) -> None:
        """Save the state that a run stopped with."""
        await asyncio.sleep(0)  # it is held once the report has been handled
        ref = tasks.find(state_id(report.task_id))
        if ref is None:
            return
        try:
            state = await self._fleet.read_result(ref)
        except Exception as failed:  # it is lost with its node, say: the task has an earlier state, or none
            logger.warning("the state of %s could not be saved: %s", report.task_id, failed)
            return
        if isinstance(state, RunState):  # in any case: its worker may end before it has written its own file
            self.archive.save(report.task_id, state)
