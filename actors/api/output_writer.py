"""`ImageWriter`: writes finished images, videos and audio clips to one place as they arrive, in its own thread.

If the folder cannot be written (full disk, removed folder), the output is kept and written as soon as that is possible
again, up to a limit; its listeners learn of it, so that they start nothing new meanwhile.
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from modelpool.actors.control.connection import Connection
from modelpool.actors.control.finished_output import fetch_output
from modelpool.actors.outputs.failures import FailedOutput
from modelpool.actors.outputs.output_file import FinishedOutput, encoded
from modelpool.actors.outputs.place import OutputPlace, WrittenOutput
from modelpool.actors.outputs.write_failures import FolderFailed
from modelpool.actors.wire.messages import JobEnded
from modelpool.pool.core.errors import OutputFailed

#: default limit for waiting for a folder that cannot be written: long enough to free space or to mount a disk again
HOLD_SECONDS = 600.0
#: time between two attempts
_RETRY_SECONDS = 1.0


class WriteListener(Protocol):
    """Receives what happens to the outputs of one submission, in the writer's thread."""

    @property
    def wants_no_outputs(self) -> bool:
        """Whether the submission was cancelled, so that waiting for its folder is pointless."""

    def labelled(self, output: FinishedOutput) -> FinishedOutput:
        """Return an output as it is listed: with the labels of its request."""

    def on_written(self, job: JobEnded, outcome: WrittenOutput | Exception) -> None:
        """The output was written, or could not be."""

    def on_folder_failed(self, problem: FolderFailed) -> None:
        """The folder cannot be written. The writer tries again until one of the next two."""

    def on_folder_usable(self) -> None:
        """The folder can be written again."""

    def on_folder_given_up(self, problem: FolderFailed) -> None:
        """The folder could not be written for too long: pending outputs fail with `problem`."""


class ImageWriter:
    """Writes to one output folder or object store of a driver."""

    def __init__(self, place: OutputPlace, connection: Connection, hold_seconds: float = HOLD_SECONDS) -> None:
        self.place = place
        self._connection = connection
        self._hold_seconds = hold_seconds
        self._lock = threading.Lock()
        self._listeners: list[WriteListener] = []
        #: on the monotonic clock, since when no write succeeds; None while they do
        self._failing_since: float | None = None
        self._given_up = False
        #: set to try again at once, or to stop trying
        self._wake = threading.Event()
        self._closing = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="modelpool images")

    def prepare(self) -> None:
        """Create the folder again if it was removed. Raises FolderFailed if it cannot be written now."""
        self.place.prepare()

    def add(self, listener: WriteListener) -> None:
        """Tell `listener` of failures of the folder until `remove`."""
        with self._lock:
            self._listeners.append(listener)

    def remove(self, listener: WriteListener) -> None:
        """Forget a listener. Idempotent."""
        with self._lock:
            self._listeners = [known for known in self._listeners if known is not listener]

    def write(self, job: JobEnded, listener: WriteListener) -> None:
        """Fetch and write the output of `job` in the background, and call `listener.on_written`."""

        def write() -> None:
            try:
                outcome: WrittenOutput | Exception = self._write(job, listener)
            except Exception as problem:
                outcome = problem
            listener.on_written(job, outcome)

        self.run(write)

    def run(self, work: Callable[[], None]) -> None:
        """Run `work` in the writer's thread after what is pending there."""
        self._thread.submit(work)

    def note_failure(self, failure: FailedOutput) -> None:
        """Remember in the place of outputs, in the background, that one could not be generated."""

        def note() -> None:
            # the program learns of the failure anyway: it is only missing in a report
            with contextlib.suppress(OutputFailed):
                self.place.note_failures([failure])

        with contextlib.suppress(RuntimeError):  # it was closed
            self.run(note)

    def wake(self) -> None:
        """Ask the listeners again whether they still want their outputs."""
        self._wake.set()

    def close(self) -> None:
        """Write pending outputs and stop; those of a folder that cannot be written fail. Idempotent."""
        self._closing = True
        self._wake.set()
        self._thread.shutdown(wait=True)
        try:
            self.place.finish()
        except OutputFailed as problem:  # what is written is complete, and the next run continues from there
            warnings.warn(f"{problem}; the next run that writes there completes it", stacklevel=2)

    def _write(self, job: JobEnded, listener: WriteListener) -> WrittenOutput:
        finished = listener.labelled(fetch_output(self._connection, job))
        content = encoded(finished.output, finished.recipe, finished.labels)
        while True:
            self._wake.clear()
            try:
                written = self.place.write(finished, content)
            except FolderFailed as problem:
                if not self._may_retry(problem, listener):
                    raise
                self._wake.wait(_RETRY_SECONDS)
            else:
                self._note_usable()
                return written

    def _may_retry(self, problem: FolderFailed, listener: WriteListener) -> bool:
        """Note a failed attempt, and tell the listeners; return whether to make another one."""
        if self._failing_since is None:
            self._failing_since = time.monotonic()
            for each in self._all_listeners():
                each.on_folder_failed(problem)
        if self._given_up or self._closing or listener.wants_no_outputs:
            return False
        if time.monotonic() - self._failing_since < self._hold_seconds:
            return True
        self._given_up = True
        for each in self._all_listeners():
            each.on_folder_given_up(problem)
        return False

    def _note_usable(self) -> None:
        if self._failing_since is not None:
            self._failing_since, self._given_up = None, False
            for each in self._all_listeners():
                each.on_folder_usable()

    def _all_listeners(self) -> tuple[WriteListener, ...]:
        with self._lock:
            return tuple(self._listeners)
