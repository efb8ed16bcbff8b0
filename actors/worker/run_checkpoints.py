"""`RunCheckpoints`: saves the states of a worker's sampling runs, and finds states of earlier runs of the same tasks.

A state is copied from the device between two steps, by the thread that runs. Writing it to the node's disk and sending
it are done by a thread each: one that is slow skips checkpoints, delays no run and not the other.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

from modelpool.actors.worker.step_checkpoints.latest_queue import LatestQueue
from modelpool.actors.worker.wire.messages import RunRequest, StateSaved
from modelpool.actors.worker.worker_setup import Checkpointing
from modelpool.pool.values.core.results import RunState
from modelpool.pool.values.core.stage_params import SampleParams
from modelpool.pool.values.specs.spec import RunError, RunErrorKind, TaskId, WorkerId

logger = logging.getLogger(__name__)

#: errors of a resumed run that its state may be the cause of
SUSPECT_ERRORS = frozenset({RunErrorKind.BAD_INPUT, RunErrorKind.INTERNAL})


class RunCheckpoints:
    """The checkpoints of one worker; methods are for the thread that runs, unless they say otherwise."""

    def __init__(
        self,
        worker_id: WorkerId,
        incarnation: int,
        checkpointing: Checkpointing,
        send: Callable[[StateSaved, RunState], None],
    ) -> None:
        """`send` brings a state to the controller."""
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._seconds = checkpointing.seconds
        self._send = send
        self._disk = checkpointing.disk
        self._sending = LatestQueue("send checkpoints")
        #: running tasks that may have files
        self._on_disk: set[TaskId] = set()

    def rename(self, worker_id: WorkerId, incarnation: int) -> None:
        """Send states under another name from now on: the controller ignores states of unknown workers."""
        self._worker_id, self._incarnation = worker_id, incarnation

    def open(self) -> None:
        """Remove old and excess states from the node's disk, in the background."""
        if self._disk is not None:
            self._disk.clean()

    def resume(self, request: RunRequest, sent: RunState | None) -> RunState | None:
        """Return the state that a run resumes from: the one that was `sent` with it, or a later one that an earlier run
        on this node saved."""
        if self._disk is None or not isinstance(request.work, SampleParams):
            return sent
        task_id, above = request.task.task_id, 0 if sent is None else sent.step
        found = self._disk.find(task_id, request.work.steps_run, above)
        if found is None:
            return sent
        logger.info("%s resumes after step %d of %d, as saved on this node", task_id, found.step, found.steps)
        self._on_disk.add(task_id)
        return found

    def callback(self, request: RunRequest) -> Callable[[Callable[[], Sequence[RunState]]], None]:
        """Return a callback for between two steps, with a function that copies the state from the device. The copy is
        all that takes the time of the run."""
        seconds = self._seconds
        if seconds is None:
            return lambda states: None
        saved_at = time.monotonic()

        def checkpoint(states: Callable[[], Sequence[RunState]]) -> None:
            nonlocal saved_at
            now = time.monotonic()
            if now - saved_at < seconds:
                return
            task_id = request.task.task_id
            to_disk = self._disk is not None and self._disk.takes(task_id)
            to_controller = not self._sending.has(task_id)
            if not (to_disk or to_controller):
                return
            (state,) = states()
            saved_at = now
            if to_controller:
                self._sending.put(task_id, partial(self._send, self._saved(request, state), state))
            if to_disk:
                self._on_disk.add(task_id)
                self._save(task_id, state)

        return checkpoint

    def ended(self, request: RunRequest, error: RunError | None, state: RunState | None, resumed: bool) -> bool:
        """Note the end of a run, which `resumed`, with its `state` if it stopped with one; return whether there are
        checkpoints of a run with a result. An error that a state may have caused makes checkpoints suspect. Others
        stay: the task may run again, and a result may be lost with the controller."""
        task_id = request.task.task_id
        has_files = task_id in self._on_disk
        self._on_disk.discard(task_id)
        if state is not None:
            self._save(task_id, state)  # the controller, which gets it as the result, saves it too
        elif has_files and resumed and error is not None and error.kind in SUSPECT_ERRORS:
            self.forget(task_id)
        return has_files and error is None

    def forget(self, task_id: TaskId) -> None:
        """Remove the checkpoints of a task soon. Any thread."""
        if self._disk is not None:
            self._disk.remove(task_id)

    def close(self) -> None:
        """Save nothing more. Idempotent."""
        self._sending.close()
        if self._disk is not None:
            self._disk.close()

    def _save(self, task_id: TaskId, state: RunState) -> None:
        if self._disk is not None:
            self._disk.save(task_id, state)

    def _saved(self, request: RunRequest, state: RunState) -> StateSaved:
        return StateSaved(
            self._worker_id,
            self._incarnation,
            request.task.task_id,
            request.attempt,
            request.run,
            state.step,
            state.steps,
            sum(array.nbytes for array in state.arrays),
            request.epoch,
        )
