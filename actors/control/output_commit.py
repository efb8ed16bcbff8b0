"""`OutputCommitter`: has the output of a job written to its place, by the node that made it or by this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from modelpool.actors.config.output_address import OutputAddress
from modelpool.actors.control.connection import Connection
from modelpool.actors.outputs.output_file import OutputFacts
from modelpool.actors.outputs.place import OutputPlace, WriteOrder, WriteReport, WrittenOutput
from modelpool.actors.outputs.results.outcomes import sampled_by, unshared_seconds
from modelpool.actors.outputs.write_failures import FolderFailed
from modelpool.actors.request.labels import Labels
from modelpool.actors.worker.wire.messages import JobEnded, ResultRef
from modelpool.pool.values.core.stage_params import AudioSamples, ImagePixels, Output, VideoFrames
from modelpool.pool.values.specs.spec import NO_NODE, NodeId

#: threads of a process that has outputs written. Most wait for other processes: for a store that takes 100 ms, twice
#: for each output, this is enough for 300 outputs in a second
WRITE_THREADS = 64
#: threads that fetch, encode and write an output in this process at a time
WRITES_HERE = 8


class NoWriter(Exception):
    """Raised if no process on that node can write to the place now; the message says why."""


class NodeWriters(Protocol):
    """The processes that write outputs for this one, on nodes of the pool. Thread-safe."""

    def can_write(self, node: NodeId, address: OutputAddress) -> bool:
        """Return at once whether there is such a process for this node and place. Called for each output that the node
        made: one is started when that is worth it.
        """

    def write(self, node: NodeId, address: OutputAddress, order: WriteOrder, result: ResultRef) -> WriteReport:
        """Have an output written on a node, which has it, or gets it if it is small. Waits. Raises NoWriter if the
        process has ended, or ResultGone, or as `OutputPlace.write`.
        """

    def close(self) -> None:
        """End the processes. Idempotent."""


class OutputCommitter:
    """Writes outputs of jobs to one place. Thread-safe, for `WRITE_THREADS` threads."""

    def __init__(self, place: OutputPlace, writers: NodeWriters | None) -> None:
        self.place = place
        self._writers = writers
        self._here = threading.BoundedSemaphore(WRITES_HERE)

    def write(self, connection: Connection, job: JobEnded, labels_of: Callable[[JobEnded], Labels]) -> WrittenOutput:
        """Have the output of a job written that succeeded, with the labels of its request. Raises ResultGone, and as
        `OutputPlace.write`.
        """
        facts = facts_of(job, labels_of(job))
        written = self._written_by_node(job, facts)
        if written is not None:
            return written
        with self._here:
            return self.place.write(facts.with_output(fetched(connection, job)))

    def _written_by_node(self, job: JobEnded, facts: OutputFacts) -> WrittenOutput | None:
        """Return what a process on the node of the output has written; None if this process has to."""
        if self._writers is None or job.node == NO_NODE or not self._writers.can_write(job.node, self.place.path):
            return None
        order = self.place.order(facts)
        if order is None:
            return None
        try:
            report = self._writers.write(job.node, self.place.path, order, job.result)
        except NoWriter:
            return None
        except FolderFailed:
            self.place.prepare()  # raises if nobody can write there; else it is a matter of that node
            return None
        return self.place.note(report)


def facts_of(job: JobEnded, labels: Labels) -> OutputFacts:
    """Return the facts about the output of a job of a request that succeeded."""
    assert job.recipe is not None, f"job {job.job_id} of a request has a recipe"
    return OutputFacts(
        recipe=job.recipe,
        index=job.index,
        job_id=job.job_id,
        worker=sampled_by(job.tasks),
        seconds=unshared_seconds(job.tasks),
        tasks=job.tasks,
        labels=labels,
    )


def fetched(connection: Connection, job: JobEnded) -> Output:
    """Return the output of a job that succeeded. Raises ResultGone."""
    output = connection.fetch(job.result)
    assert isinstance(output, ImagePixels | VideoFrames | AudioSamples), (
        f"job {job.job_id} returned {type(output).__name__}"
    )
    return output
