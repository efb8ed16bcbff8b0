"""The thread that reads the events of a driver notifies those submissions that something has happened to."""

from __future__ import annotations

from typing import Any

from modelpool.actors.control.event_reader import EventReader
from modelpool.actors.worker.wire.messages import ClientId, DriverEvents, NodesEnded, SubmissionId, TaskProgress
from modelpool.pool.values.specs.spec import JobId, Stage, WorkerId


class Notes:
    """A listener that keeps what it is notified of."""

    def __init__(self) -> None:
        self.running: list[tuple[Any, ...]] = []
        self.kinds: list[str] = []

    def on_running(self, running: tuple[Any, ...]) -> None:
        self.running.append(running)
        self.kinds.append("running")

    def on_nodes_ended(self, ended: tuple[NodesEnded, ...]) -> None:
        self.kinds.append("nodes")

    def on_job_ended(self, job: Any) -> None: ...
    def on_preview(self, made: Any) -> None: ...
    def on_lost(self, reason: Exception) -> None: ...


def test_a_submission_is_notified_of_its_own_tasks_only() -> None:
    """Otherwise each event costs as much as there are submissions."""
    reader = EventReader(None, ClientId("me"))  # type: ignore[arg-type]
    notes = {name: Notes() for name in ("a", "b", "c")}
    for name, each in notes.items():
        reader.listen(SubmissionId(name), each)
    task = TaskProgress(SubmissionId("a"), 0, JobId("a-0"), Stage.SAMPLE, WorkerId("gpu-0"), 1, 4)
    for running in ((task,), (task,), (), ()):
        reader._notify(DriverEvents(cursor=1, ended=(), running=running))
    assert notes["a"].running == [(task,), (task,), ()]
    assert notes["b"].running == notes["c"].running == []


def test_tasks_that_run_are_never_older_than_ends_of_nodes() -> None:
    """Before: a reader between two notifications saw a node end, and run after that."""
    reader = EventReader(None, ClientId("me"))  # type: ignore[arg-type]
    notes, name = Notes(), SubmissionId("a")
    reader.listen(name, notes)
    task = TaskProgress(name, 0, JobId("a-0"), Stage.SAMPLE, WorkerId("gpu-0"), 1, 4, ("sampler",))
    end = NodesEnded(name, 0, JobId("a-0"), ("sampler",), Stage.SAMPLE, "gpu-0", 1.0)
    reader._notify(DriverEvents(cursor=1, ended=(), running=(task,)))
    reader._notify(DriverEvents(cursor=2, ended=(), running=(), nodes=(end,)))
    assert notes.kinds == ["running", "running", "nodes"]
