"""`ImageWriter`: has finished images, videos and audio clips written to one place as they arrive, several at a time.

If the folder cannot be written (full disk, removed folder), outputs are kept and written as soon as that is possible
again, up to a limit; its listeners learn of it, so that they start nothing new meanwhile. While no write succeeds, one
thread tries again, for all.
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, Protocol

from modelpool.actors.config.output_address import OutputAddress, absolute_address, output_address
from modelpool.actors.control.connection import Connection
from modelpool.actors.control.output_commit import WRITE_THREADS, NodeWriters, OutputCommitter
from modelpool.actors.outputs.failures import FailedOutput
from modelpool.actors.outputs.open_outputs import open_outputs
from modelpool.actors.outputs.place import OutputPlace, WrittenOutput
from modelpool.actors.outputs.write_failures import FolderFailed
from modelpool.actors.request.labels import Labels
from modelpool.actors.request.name_template import NameTemplate
from modelpool.actors.worker.wire.messages import JobEnded
from modelpool.pool.values.core.errors import OutputFailed, unusable_field

#: default limit for waiting for a folder that cannot be written: long enough to free space or to mount a disk again
HOLD_SECONDS = 600.0
#: time between two attempts
_RETRY_SECONDS = 1.0


class WriteListener(Protocol):
    """Receives what happens to the outputs of one submission, in threads of the writer."""

    @property
    def wants_no_outputs(self) -> bool:
        """Whether the submission was cancelled, so that waiting for its folder is pointless."""

    def labels_of(self, job: JobEnded) -> Labels:
        """Return the labels of a job's request, with which its output is listed."""

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

    def __init__(
        self,
        place: OutputPlace,
        connection: Connection,
        hold_seconds: float = HOLD_SECONDS,
        writers: NodeWriters | None = None,
    ) -> None:
        """`writers` are processes that write on the nodes of the outputs; without them, this process writes all."""
        self.place = place
        self._connection = connection
        self._hold_seconds = hold_seconds
        self._committer = OutputCommitter(place, writers)
        self._lock = threading.Lock()
        self._listeners: list[WriteListener] = []
        #: held by the thread that tries again
        self._trying_again = threading.Lock()
        #: guards the next two, and is held while listeners learn of a change: they learn of them in order
        self._changing = threading.Lock()
        #: on the monotonic clock, since when no write succeeds; None while they do
        self._failing_since: float | None = None
        self._given_up = False
        #: set to try again at once, or to stop trying
        self._wake = threading.Event()
        self._closing = False
        self._threads = ThreadPoolExecutor(WRITE_THREADS, thread_name_prefix="modelpool images")
        #: for work other than writing outputs, which must not wait for many of them
        self._others = ThreadPoolExecutor(1, thread_name_prefix="modelpool image lists")

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
        """Have the output of `job` written in the background, and call `listener.on_written`."""

        def write() -> None:
            try:
                outcome: WrittenOutput | Exception = self._write(job, listener)
            except Exception as problem:
                outcome = problem
            listener.on_written(job, outcome)

        self._threads.submit(write)

    def run(self, work: Callable[[], None]) -> None:
        """Run `work` in a thread of the writer, and not while listeners learn that the folder failed or is usable."""

        def run() -> None:
            with self._changing:
                work()

        self._others.submit(run)

    def note_failure(self, failure: FailedOutput) -> None:
        """Remember in the place of outputs, in the background, that one could not be generated."""

        def note() -> None:
            # the program learns of the failure anyway: it is only missing in a report
            with contextlib.suppress(OutputFailed):
                self.place.note_failures([failure])

        with contextlib.suppress(RuntimeError):  # it was closed
            self._others.submit(note)

    def wake(self) -> None:
        """Ask the listeners again whether they still want their outputs."""
        self._wake.set()

    def close(self) -> None:
        """Write pending outputs and stop; outputs of a folder that cannot be written fail. Idempotent."""
        self._closing = True
        self._wake.set()
        self._threads.shutdown(wait=True)
        self._others.shutdown(wait=True)
        try:
            self.place.finish()
        except OutputFailed as problem:  # written outputs are complete, and the next run continues from there
            warnings.warn(f"{problem}; the next run that writes there completes it", stacklevel=2)

    def _write(self, job: JobEnded, listener: WriteListener) -> WrittenOutput:
        try:
            return self._attempt(job, listener)
        except FolderFailed as problem:
            if not self._may_retry(problem, listener):
                raise
            failed = problem
        with self._trying_again:  # the others wait here until a write succeeds, or until nothing is tried again
            ends = self._given_up or self._closing or listener.wants_no_outputs
            if ends and self._failing_since is not None:  # each attempt may take as long as the store is waited for
                raise failed
            while True:
                self._wake.clear()
                try:
                    return self._attempt(job, listener)
                except FolderFailed as problem:
                    if not self._may_retry(problem, listener):
                        raise
                self._wake.wait(_RETRY_SECONDS)

    def _attempt(self, job: JobEnded, listener: WriteListener) -> WrittenOutput:
        written = self._committer.write(self._connection, job, listener.labels_of)
        self._note_usable()
        return written

    def _may_retry(self, problem: FolderFailed, listener: WriteListener) -> bool:
        """Note a failed attempt, and tell the listeners; return whether to make another one."""
        with self._changing:
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
        if self._failing_since is None:  # if it is set at this moment, the thread that sets it tries again
            return
        with self._changing:
            if self._failing_since is not None:
                self._failing_since, self._given_up = None, False
                for each in self._all_listeners():
                    each.on_folder_usable()

    def _all_listeners(self) -> tuple[WriteListener, ...]:
        with self._lock:
            return tuple(self._listeners)


class DriverOutputs:
    """The places to which a driver writes, each opened when it is first named. `default` and `file_name` are the usual
    place and the usual template of names."""

    def __init__(
        self,
        connection: Connection,
        default: OutputAddress | None,
        file_name: str | None,
        hold_seconds: float,
        node_writers: NodeWriters | None,
    ) -> None:
        self._connection = connection
        self._default = default
        self._file_name = file_name
        self._hold_seconds = hold_seconds
        self._node_writers = node_writers
        self._writers: dict[OutputAddress, ImageWriter] = {}

    def writer(self, output: str | Path | Literal[False] | None) -> ImageWriter | None:
        """Return the writer to the place that was given to `submit`; None if nothing is to be written. Raises
        UserError."""
        if not (output is None or output is False or isinstance(output, str | Path)):
            raise unusable_field("output", output, "a folder, a URL such as s3://bucket/folder, or False")
        given = self._default if output is None else None if output is False else output_address(output)
        if given is None:
            return None
        address = absolute_address(given)
        if address in self._writers:
            self._writers[address].prepare()
        else:
            self._writers[address] = ImageWriter(
                open_outputs(address), self._connection, self._hold_seconds, self._node_writers
            )
        return self._writers[address]

    def template(self, name: str | None) -> NameTemplate | None:
        """Return the template of the names of files, by default the usual one. Raises UserError."""
        text = self._file_name if name is None else name
        return None if text is None else NameTemplate.of(text)

    def close(self) -> None:
        """Write pending outputs."""
        for writer in self._writers.values():
            writer.close()
        if self._node_writers is not None:
            self._node_writers.close()
