"""`NewsReader`: the thread in which a driver hears of its jobs. Knows who waits for what; nothing of images.

A thread of its own, so that jobs go on, images are written and the pool sees a living driver while the program does
something else.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Protocol

from modelpool.actors.control.connection import Line
from modelpool.actors.control.controller import Controller
from modelpool.actors.results.outcomes import PoolLost
from modelpool.actors.wire.messages import ClientId, JobEnded, RunningTask, SubmissionId

#: how long one question may wait; the pool gives a driver up that is silent for several times as long
NEWS_SECONDS = 10.0
_JOIN_SECONDS = 5.0


class Listener(Protocol):
    """Whoever submitted something. Called in the reader's thread; must not wait."""

    def heard_end(self, job: JobEnded) -> None:
        """A job of the submission ended."""

    def heard_running(self, running: tuple[RunningTask, ...]) -> None:
        """These tasks of the submission run now, and no others."""

    def heard_loss(self, reason: Exception) -> None:
        """There will be no more news."""


class NewsReader:
    """Listens from `start` to `stop`."""

    def __init__(self, line: Line, client_id: ClientId) -> None:
        self._line = line
        self._client_id = client_id
        self._lock = threading.Lock()
        self._listeners: dict[SubmissionId, Listener] = {}
        self._lost: Exception | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._read, name="modelpool news", daemon=True)

    def start(self) -> None:
        """The controller knows the driver now."""
        self._thread.start()

    def listen(self, submission_id: SubmissionId, listener: Listener) -> None:
        """Pass on what concerns this submission. Before it is submitted, so that nothing is missed."""
        with self._lock:
            lost = self._lost
            if lost is None:
                self._listeners[submission_id] = listener
        if lost is not None:
            raise lost

    def forget(self, submission_id: SubmissionId) -> None:
        """Nothing more will come of it, or nobody wants to know."""
        with self._lock:
            self._listeners.pop(submission_id, None)

    def stop(self, wake: Callable[[], None]) -> None:
        """End the thread; `wake` makes the controller answer. Who still listens hears of a loss."""
        self._stopping = True
        wake()
        if self._thread.is_alive():
            self._thread.join(_JOIN_SECONDS)
        self._tell_loss(PoolLost("the pool was closed"))

    def _read(self) -> None:
        cursor = 0
        try:
            while not self._stopping:
                news = self._line.ask(Controller.news, self._client_id, cursor, NEWS_SECONDS)
                for job in news.ended:
                    self._tell_end(job)
                self._tell_running(news.running)
                cursor = news.cursor
        except Exception as lost:
            if not self._stopping:
                self._tell_loss(lost)

    def _tell_end(self, job: JobEnded) -> None:
        with self._lock:
            listener = self._listeners.get(job.submission_id)
        if listener is not None:
            listener.heard_end(job)

    def _tell_running(self, running: tuple[RunningTask, ...]) -> None:
        by_submission = {
            submission_id: tuple(tasks)
            for submission_id, tasks in itertools.groupby(
                sorted(running, key=lambda task: task.submission_id), key=lambda task: task.submission_id
            )
        }
        with self._lock:
            listeners = tuple(self._listeners.items())
        for submission_id, listener in listeners:
            listener.heard_running(by_submission.get(submission_id, ()))

    def _tell_loss(self, reason: Exception) -> None:
        with self._lock:
            self._lost = self._lost or reason
            listeners, self._listeners = tuple(self._listeners.values()), {}
        for listener in listeners:
            listener.heard_loss(reason)
