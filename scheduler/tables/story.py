"""The story: every move of a job, task or worker with the event that caused it. For people; nothing is decided by it.

Lines are kept as they fall and put into words when somebody reads them. `Story.move` is the only writer of a status.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterator
from enum import Enum
from typing import Any, ClassVar, Protocol, TypeAlias

from modelpool.pool.specs.spec import JobId
from modelpool.scheduler.tables.messages import (
    CancelAsked,
    ComponentsKnown,
    Event,
    ResultLost,
    RunEnded,
    StartFailed,
    Submitted,
    Tick,
    WorkerDown,
    WorkersWanted,
    WorkerUp,
)
from modelpool.scheduler.tables.placement_record import Brought, Start
from modelpool.scheduler.tables.story_lines import StoryLine, dump


class Status(Enum):
    """Where a job, task or worker stands. Hashed by identity: legal moves are looked up with every event, and an Enum's
    own hash takes longer than all the rest of a move."""

    __hash__ = object.__hash__


class Movable(Protocol):
    """What has a status: Job, Task, Worker. `MOVES` maps each status to those that may follow."""

    status: Any
    MOVES: ClassVar[Any]

    @property
    def name(self) -> str: ...


#: what else is worth knowing of a move: a value where it is noted with every event, put into words when it is read
Note: TypeAlias = str | Start | Brought
#: at, event behind it, subject, status before and after, note
Entry: TypeAlias = tuple[float, Event, str, Status | None, Status, Note]


class Story:
    """The last `length` moves (all when None)."""

    def __init__(self, length: int | None) -> None:
        self._entries: deque[Entry] = deque(maxlen=length)
        self._keep = self._entries.append
        self._cause: Event = WorkersWanted(0.0, ())
        self._at = 0.0

    def begin(self, cause: Event, at: float) -> None:
        """The moves that follow are caused by this event."""
        self._cause = cause
        self._at = at

    def born(self, subject: Movable, note: str = "") -> None:
        """Note that `subject` is new."""
        self._keep((self._at, self._cause, subject.name, None, subject.status, note))

    def move(self, subject: Movable, to: Status, note: Note = "") -> None:
        """Give `subject` the status `to`, which must be a legal move."""
        before = subject.status
        assert to in subject.MOVES[before], f"{subject.name}: {before.value} -> {to.value} is no legal move\n" + dump(
            self.lines(frozenset({subject.name}))
        )
        self._keep((self._at, self._cause, subject.name, before, to, note))
        subject.status = to

    def note(self, subject: Movable, text: Note) -> None:
        """Keep what was done about `subject` while its status stays as it is."""
        self._keep((self._at, self._cause, subject.name, subject.status, subject.status, text))

    def entries(self, subjects: Container[str] | None = None) -> Iterator[Entry]:
        """What is kept of these subjects (of all when None) as values, oldest first."""
        return (e for e in self._entries if subjects is None or e[2] in subjects)

    def lines(self, subjects: Container[str] | None = None) -> tuple[StoryLine, ...]:
        """What is kept of these subjects (of all when None), oldest first."""
        return tuple(map(_in_words, self.entries(subjects)))

    def of_job(self, job_id: JobId) -> tuple[StoryLine, ...]:
        """The moves of the job and of every task that it was submitted with, as far as they are kept."""
        subjects: set[str] = {job_id}
        for _, cause, *_ in self._entries:
            if isinstance(cause, Submitted) and cause.job.job_id == job_id:
                subjects.update(task.task_id for task in cause.job.tasks)
        return self.lines(subjects)


def _in_words(entry: Entry) -> StoryLine:
    at, cause, subject, before, after, note = entry
    words = note if isinstance(note, str) else note.words
    return StoryLine(at, describe(cause), subject, "" if before is None else before.value, after.value, words)


def describe(event: Event) -> str:
    """The event in a few words."""
    match event:
        case Submitted():
            return f"submitted {event.job.job_id}"
        case CancelAsked():
            return f"cancel asked for {event.job_id}"
        case WorkersWanted():
            return f"{len(event.worker_ids)} workers wanted"
        case ComponentsKnown():
            return f"{len(event.components)} components known"
        case WorkerUp():
            return f"{event.worker.worker_id}#{event.worker.incarnation} up"
        case StartFailed():
            return f"{event.worker_id}#{event.incarnation} did not start: {event.reason}"
        case WorkerDown():
            return f"{event.worker_id}#{event.incarnation} down: {event.reason}"
        case ResultLost():
            return f"result of {event.task_id} lost"
        case Tick():
            return "time passed"
        case RunEnded():
            report = event.report
            ended = "done" if report.error is None else report.error.kind.value
            return f"{report.task_id} attempt {report.attempt} on {report.worker_id}#{report.incarnation}: {ended}"
