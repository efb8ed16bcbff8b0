"""`EventReader`: the thread in which a driver receives the events of its jobs.

A separate thread, so that jobs continue, outputs are written and the pool sees a living driver while the program does
something else.
"""

from __future__ import annotations

import atexit
import itertools
import threading
from collections.abc import Callable
from functools import partial
from typing import Protocol

from modelpool.actors.control.connection import CONTROLLER, Connection
from modelpool.actors.outputs.results.outcomes import PoolLost
from modelpool.actors.worker.wire.messages import (
    ClientId,
    DriverEvents,
    JobEnded,
    JobPreview,
    NodesEnded,
    SubmissionId,
    TaskProgress,
)

#: longest wait of one call; the pool drops a driver only after several times as long
POLL_SECONDS = 10.0
_JOIN_SECONDS = 5.0


class Listener(Protocol):
    """Receives the events of a submission, in the reader's thread; must not block."""

    def on_job_ended(self, job: JobEnded) -> None:
        """A job of the submission ended."""

    def on_running(self, running: tuple[TaskProgress, ...]) -> None:
        """Exactly these tasks of the submission are running."""

    def on_preview(self, made: JobPreview) -> None:
        """There is a new preview of a job of the submission."""

    def on_nodes_ended(self, nodes: tuple[NodesEnded, ...]) -> None:
        """These tasks of workflows of the submission ended, or tasks failed."""

    def on_lost(self, reason: Exception) -> None:
        """There will be no more events."""


class EventReader:
    """Reads from `start` to `stop`."""

    def __init__(self, connection: Connection, client_id: ClientId) -> None:
        self._connection = connection
        self._client_id = client_id
        self._lock = threading.Lock()
        self._listeners: dict[SubmissionId, Listener] = {}
        #: submissions that had running tasks at the last notification
        self._running: frozenset[SubmissionId] = frozenset()
        self._lost: Exception | None = None
        self._stopping = False
        #: called when the program ends; None if nothing is then
        self._at_exit: Callable[[], None] | None = None
        self._thread = threading.Thread(target=self._read, name="modelpool events", daemon=True)

    def start(self, wake: Callable[[], None] | None = None) -> None:
        """Start reading; the controller knows the driver now. `wake` makes the controller answer, if the program ends
        without `stop`: Ray ends a process with code 1 in which a call still waits."""
        self._thread.start()
        if wake is not None:
            self._at_exit = partial(self.stop, wake)
            atexit.register(self._at_exit)

    def listen(self, submission_id: SubmissionId, listener: Listener) -> None:
        """Forward the events of this submission. Call it before submitting, so that no event is missed."""
        with self._lock:
            if self._lost is None:
                self._listeners[submission_id] = listener
        self.check()

    def check(self) -> None:
        """Raise the error with which reading has ended, if it has."""
        with self._lock:
            lost = self._lost
        if lost is not None:
            raise lost

    def forget(self, submission_id: SubmissionId) -> None:
        """Stop forwarding the events of a submission."""
        with self._lock:
            self._listeners.pop(submission_id, None)

    def stop(self, wake: Callable[[], None]) -> None:
        """End the thread; `wake` makes the controller answer. Remaining listeners get `on_lost`."""
        self._stopping = True
        if self._at_exit is not None:
            atexit.unregister(self._at_exit)
        wake()
        if self._thread.is_alive():
            self._thread.join(_JOIN_SECONDS)
        self._notify_lost(PoolLost("the pool was closed"))

    def _read(self) -> None:
        cursor = 0
        try:
            while not self._stopping:
                events = self._connection.call(CONTROLLER.events, self._client_id, cursor, POLL_SECONDS)
                cursor = self._notify(events)
                del events  # it has references of results, and the next answer may take long
        except Exception as lost:
            if not self._stopping:
                self._notify_lost(lost)

    def _notify(self, events: DriverEvents) -> int:
        """Notify the listeners; return the cursor of the next call."""
        for made in events.previews:
            self._notify_preview(made)
        # before the ends: readers that read in between must not see that a task runs which has ended
        self._notify_running(events.running)
        self._notify_nodes(events.nodes)
        for job in events.ended:
            self._notify_ended(job)
        return events.cursor

    def _notify_ended(self, job: JobEnded) -> None:
        with self._lock:
            listener = self._listeners.get(job.submission_id)
        if listener is not None:
            listener.on_job_ended(job)

    def _notify_preview(self, made: JobPreview) -> None:
        with self._lock:
            listener = self._listeners.get(made.submission_id)
        if listener is not None:
            listener.on_preview(made)

    def _notify_nodes(self, ended: tuple[NodesEnded, ...]) -> None:
        for submission_id in dict.fromkeys(nodes.submission_id for nodes in ended):
            with self._lock:
                listener = self._listeners.get(submission_id)
            if listener is not None:
                listener.on_nodes_ended(tuple(nodes for nodes in ended if nodes.submission_id == submission_id))

    def _notify_running(self, running: tuple[TaskProgress, ...]) -> None:
        by_submission = {
            submission_id: tuple(tasks)
            for submission_id, tasks in itertools.groupby(
                sorted(running, key=lambda task: task.submission_id), key=lambda task: task.submission_id
            )
        }
        changed = (*by_submission, *self._running.difference(by_submission))
        self._running = frozenset(by_submission)
        with self._lock:
            listeners = [(each, self._listeners[each]) for each in changed if each in self._listeners]
        for submission_id, listener in listeners:
            listener.on_running(by_submission.get(submission_id, ()))

    def _notify_lost(self, reason: Exception) -> None:
        with self._lock:
            self._lost = self._lost or reason
            listeners, self._listeners = tuple(self._listeners.values()), {}
        for listener in listeners:
            listener.on_lost(reason)
