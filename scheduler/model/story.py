"""The story: every status change of a job, task or worker, with the event that caused it. For users; decides nothing.

Entries are stored as values and formatted when read. `Story.move` is the only writer of a status.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Iterator
from enum import Enum
from operator import itemgetter
from typing import Any, ClassVar, Protocol, TypeAlias

from modelpool.pool.values.core.errors import counted
from modelpool.pool.values.specs.spec import JobId
from modelpool.scheduler.model.messages import (
    CancelRequested,
    ComponentsKnown,
    Cordoned,
    DisruptionsAllowed,
    Event,
    FilesJudged,
    NodeDraining,
    PinComponents,
    PoolEnding,
    PruneComponents,
    Remembered,
    RestartRequested,
    ResultLost,
    RunEnded,
    StartFailed,
    StateKept,
    Submitted,
    TaskRevoked,
    Tick,
    Uncordoned,
    WeightsLoaded,
    WorkerDown,
    WorkersWanted,
    WorkerUp,
)
from modelpool.scheduler.model.placement_record import PreloadNote, TaskStart
from modelpool.scheduler.model.story_lines import StoryLine, dump


class Status(Enum):
    """Status of a job, task or worker. Hashed by identity: legal transitions are looked up with every event, and the
    hash of an Enum takes longer than the rest of a transition."""

    __hash__ = object.__hash__


class Movable(Protocol):
    """Anything with a status: Job, Task, Worker. `MOVES` maps each status to those that may follow."""

    status: Any
    MOVES: ClassVar[Any]

    @property
    def name(self) -> str: ...


#: details of a transition: stored as a value, formatted when read
Note: TypeAlias = str | TaskStart | PreloadNote
#: time, event that caused it, subject, status before and after, note
StoryEntry: TypeAlias = tuple[float, Event, str, Status | None, Status, Note]


class Story:
    """The last `length` transitions (all if None)."""

    def __init__(self, length: int | None) -> None:
        self._entries: deque[StoryEntry] = deque(maxlen=length)
        self._keep = self._entries.append
        self._cause: Event = WorkersWanted(0.0, ())
        self._at = 0.0

    def begin(self, cause: Event, at: float) -> None:
        """Set the event that causes the following entries."""
        self._cause = cause
        self._at = at

    def born(self, subject: Movable, note: str = "") -> None:
        """Record that `subject` is new."""
        self._keep((self._at, self._cause, subject.name, None, subject.status, note))

    def move(self, subject: Movable, to: Status, note: Note = "") -> None:
        """Give `subject` the status `to`, which must be a legal transition."""
        before = subject.status
        assert to in subject.MOVES[before], (
            f"{subject.name}: {before.value} -> {to.value} is no legal transition\n"
            + dump(self.lines(frozenset({subject.name})))
        )
        self._keep((self._at, self._cause, subject.name, before, to, note))
        subject.status = to

    def note(self, subject: Movable, text: Note) -> None:
        """Record something about `subject` without a change of status."""
        self._keep((self._at, self._cause, subject.name, subject.status, subject.status, text))

    def entries(self, subjects: Container[str] | None = None) -> Iterator[StoryEntry]:
        """The kept entries of these subjects (of all if None) as values, oldest first."""
        return (e for e in self._entries if subjects is None or e[2] in subjects)

    def lines(self, subjects: Container[str] | None = None) -> tuple[StoryLine, ...]:
        """The kept entries of these subjects (of all if None) as text lines, oldest first."""
        return tuple(map(_in_words, self.entries(subjects)))

    def by_subject(self) -> StoryBySubject:
        """The kept entries, for many questions at one moment."""
        return StoryBySubject(self._entries)

    def of_job(self, job_id: JobId) -> tuple[StoryLine, ...]:
        """The kept lines of the job and of every task that it was submitted with."""
        subjects: set[str] = {job_id}
        for _, cause, *_ in self._entries:
            if isinstance(cause, Submitted) and cause.job.job_id == job_id:
                subjects.update(task.task_id for task in cause.job.tasks)
        return self.lines(subjects)


class StoryBySubject:
    """The entries of a story at one moment, by subject: each question costs as much as its answer."""

    def __init__(self, entries: Iterable[StoryEntry]) -> None:
        self._of: dict[str, list[tuple[int, StoryEntry]]] = {}
        for place, entry in enumerate(entries):
            self._of.setdefault(entry[2], []).append((place, entry))

    def entries(self, subjects: Iterable[str]) -> Iterator[StoryEntry]:
        """The kept entries of these subjects as values, oldest first."""
        found = [each for subject in subjects for each in self._of.get(subject, ())]
        return (entry for _, entry in sorted(found, key=itemgetter(0)))

    def lines(self, subjects: Iterable[str]) -> tuple[StoryLine, ...]:
        """The kept entries of these subjects as text lines, oldest first."""
        return tuple(map(_in_words, self.entries(subjects)))


def _in_words(entry: StoryEntry) -> StoryLine:
    at, cause, subject, before, after, note = entry
    words = note if isinstance(note, str) else note.words
    return StoryLine(at, describe(cause), subject, "" if before is None else before.value, after.value, words)


def describe(event: Event) -> str:
    """The event in a few words."""
    match event:
        case Submitted():
            return f"submitted {event.job.job_id}"
        case CancelRequested():
            return f"cancel requested for {event.job_id}"
        case WorkersWanted():
            return f"{counted(len(event.worker_ids), 'worker')} wanted"
        case ComponentsKnown():
            return f"{counted(len(event.components), 'component')} announced"
        case PruneComponents():
            return "unused components forgotten"
        case WorkerUp():
            return f"{event.worker.worker_id}#{event.worker.incarnation} up"
        case StartFailed():
            return f"{event.worker_id}#{event.incarnation} did not start: {event.reason}"
        case WorkerDown():
            return f"{event.worker_id}#{event.incarnation} down: {event.reason}"
        case TaskRevoked():
            return f"{event.worker_id}#{event.incarnation}: {event.task_id} revoked (attempt {event.attempt})"
        case StateKept():
            where = f"attempt {event.attempt}: state saved" if event.attempt else "state of an earlier pool found"
            return f"{event.task_id} {where} after step {event.step} of {event.steps}"
        case FilesJudged():
            words = "; ".join(f"{', '.join(file.components)} {file.verdict.value}" for file in event.files)
            return f"files of {event.worker_id}#{event.incarnation}: {words}"
        case ResultLost():
            return f"result of {event.task_id} lost"
        case NodeDraining():
            return f"{event.node} ends at {event.deadline:.1f} s: {event.reason}"
        case Cordoned():
            place = event.worker_id or event.node
            return f"{place} {'cordoned' if event.deadline is None else 'drained'} by the operator"
        case Uncordoned():
            return f"{event.worker_id or event.node} uncordoned"
        case RestartRequested():
            return f"restart of {event.worker_id} requested by the operator"
        case DisruptionsAllowed():
            return f"no disruptions: {event.obstacle}" if event.obstacle else "disruptions are allowed"
        case Remembered():
            return "an earlier controller's memory"
        case PinComponents():
            return f"{counted(len(event.components), 'component')} pinned to {counted(event.replicas, 'worker')}"
        case PoolEnding():
            return f"the pool ends at {event.deadline:.1f} s"
        case WeightsLoaded():
            ended = "ended" if event.error is None else f"failed: {event.error.message}"
            return f"load on {event.worker_id}#{event.incarnation} {ended}"
        case Tick():
            return "time passed"
        case RunEnded():
            report = event.report
            ended = "done" if report.error is None else report.error.kind.value
            return f"{report.task_id} attempt {report.attempt} on {report.worker_id}#{report.incarnation}: {ended}"
