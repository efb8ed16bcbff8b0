"""What the core believes of each worker, and when one is started, ended or given up. Knows nothing of jobs.

Residency is assumed when a task is placed and confirmed or corrected by the report of its run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from modelpool.pool.plan.residency import Residency, Resident
from modelpool.pool.specs.spec import ComponentKey, RunCost, TaskId, TaskReport, WorkerId, WorkerSpec
from modelpool.scheduler.tables.config import SchedulerConfig
from modelpool.scheduler.tables.messages import Command, EndWorker, StartWorker
from modelpool.scheduler.tables.story import Status, Story
from modelpool.scheduler.tables.worker_index import Whereabouts

if TYPE_CHECKING:
    from modelpool.scheduler.tables.cost_classes import Signature


class WorkerStatus(Status):
    """Where a worker stands."""

    STARTING = "starting"  #: a StartWorker is on its way; it answers as WorkerUp or StartFailed
    IDLE = "idle"
    BUSY = "busy"  #: it runs a task, or several at once
    GIVEN_UP = "given_up"  #: it failed too often; it stays down
    ENDED = "ended"  #: forgotten


#: Every legal move of a worker, with its reason.
WORKER_MOVES: Mapping[WorkerStatus, frozenset[WorkerStatus]] = {
    WorkerStatus.STARTING: frozenset(
        {
            WorkerStatus.IDLE,  # it is up
            WorkerStatus.STARTING,  # the start failed; the next incarnation is on its way
            WorkerStatus.GIVEN_UP,  # the start failed once too often
            WorkerStatus.ENDED,  # it answered, and is no longer wanted
        }
    ),
    WorkerStatus.IDLE: frozenset(
        {
            WorkerStatus.BUSY,  # a task was placed on it
            WorkerStatus.STARTING,  # it was lost, or is recycled
            WorkerStatus.GIVEN_UP,  # it was lost once too often
            WorkerStatus.ENDED,  # it is no longer wanted
        }
    ),
    WorkerStatus.BUSY: frozenset(
        {
            WorkerStatus.IDLE,  # the run ended
            WorkerStatus.STARTING,  # it was lost
            WorkerStatus.GIVEN_UP,  # it was lost once too often
            WorkerStatus.ENDED,  # it was lost, and is no longer wanted
        }
    ),
    WorkerStatus.GIVEN_UP: frozenset(
        {
            WorkerStatus.STARTING,  # its failures turned out to be a task's
            WorkerStatus.ENDED,  # it is no longer wanted
        }
    ),
    WorkerStatus.ENDED: frozenset(),
}


@dataclass(slots=True)
class WorkerTotals:
    """What the runs of a worker, or of all of them, came to."""

    runs: int = 0
    runs_resident: int = 0
    uploaded_bytes: int = 0
    streamed_bytes: int = 0
    patch_switches: int = 0

    def add(self, cost: RunCost) -> None:
        """Count one run."""
        self.runs += 1
        self.runs_resident += cost.resident
        self.uploaded_bytes += cost.uploaded_bytes + cost.ahead_bytes
        self.streamed_bytes += cost.streamed_bytes
        self.patch_switches += cost.patch_switches


@dataclass(slots=True, eq=False)
class Worker:
    """One worker through all its incarnations."""

    MOVES: ClassVar[Mapping[WorkerStatus, frozenset[WorkerStatus]]] = WORKER_MOVES

    worker_id: WorkerId
    #: of the latest StartWorker or WorkerUp
    incarnation: int
    status: WorkerStatus = WorkerStatus.STARTING
    #: False: it takes no new task and ends when it is idle
    wanted: bool = True
    #: how it last introduced itself; None when it never was up
    spec: WorkerSpec | None = None
    #: the last known capacity; None when it never was up
    capacity_bytes: int | None = None
    #: measured at its start, then learnt from its loads
    link_bytes_per_second: float = 1.0
    #: set exactly while IDLE or BUSY
    residency: Residency | None = None
    #: the entries of `residency`
    entries: dict[ComponentKey, Resident] = field(default_factory=dict)
    used_bytes: int = 0
    #: grows when entries, capacity or link are not what they were
    version: int = 0
    #: set exactly while BUSY: the first task of its run that has not ended, and the others
    task_id: TaskId | None = None
    mates: tuple[TaskId, ...] = ()
    #: tasks that its run, or its last one, began with
    members: int = 0
    #: when its run should end; None when nothing is known of such runs yet
    expected_end: float | None = None
    #: when the weights of its run should be there; None where nothing can be brought beside it
    loaded_at: float | None = None
    #: what was brought beside its runs and not used since: for which tasks, how many bytes
    ahead: dict[Signature, int] = field(default_factory=dict)
    idle_since: float = 0.0
    #: starts that failed and losses since its last completed run
    failures: int = 0
    totals: WorkerTotals = field(default_factory=WorkerTotals)

    @property
    def name(self) -> WorkerId:
        """The id, as the story prints it."""
        return self.worker_id

    @property
    def task_ids(self) -> tuple[TaskId, ...]:
        """The tasks of its run that have not ended."""
        return () if self.task_id is None else (self.task_id, *self.mates)

    @property
    def is_idle(self) -> bool:
        """It is up and runs nothing."""
        return self.status is WorkerStatus.IDLE

    @property
    def live(self) -> bool:
        """It is up."""
        return self.residency is not None

    def believe(self, residency: Residency | None) -> None:
        """Take this for what is on the GPU. Entries are compared with every event, and fast where they are the same
        objects: so those that only came anew are taken for those that were there, and the other way round where nothing
        else is new, since the next report will have them again. The same entries in another order change that order
        alone: what was predicted still holds (`version`)."""
        before, now = self.entries, self.residency
        if residency is None:
            self.residency, self.entries, self.used_bytes = None, {}, 0
            return
        if now is not None and residency.capacity_bytes == now.capacity_bytes and residency.entries == now.entries:
            for place, entry in enumerate(residency.entries):
                if entry is not now.entries[place]:
                    before[entry.component] = entry
            self.residency = residency
            return
        entries: dict[ComponentKey, Resident] = {}
        used_bytes, is_changed = 0, len(residency.entries) != len(before)
        for entry in residency.entries:
            key = entry.component
            known = before.get(key)
            if known is not entry and known is not None and known == entry:
                entries[key] = known
            else:
                entries[key] = entry
                is_changed = is_changed or known is not entry
            used_bytes += entry.resident_bytes
        self.residency, self.entries, self.used_bytes = residency, entries, used_bytes
        if is_changed or residency.capacity_bytes != self.capacity_bytes:
            self.capacity_bytes = residency.capacity_bytes
            self.version += 1

    def learn_link(self, weight: float, bytes_per_second: float) -> None:
        """Take a measurement into the average."""
        self.link_bytes_per_second += weight * (bytes_per_second - self.link_bytes_per_second)
        self.version += 1

    def wait_seconds(self, at: float) -> float | None:
        """Time until it should be free; None when that is not known.

        A run that is overdue is expected to take as long again as it is late.
        """
        if self.status is WorkerStatus.IDLE:
            return 0.0
        return None if self.expected_end is None else abs(self.expected_end - at)


def restart_delay_seconds(config: SchedulerConfig, failures: int) -> float:
    """How long to wait before the next start after so many failures in a row: 0, then doubling up to the limit."""
    if failures <= 1:
        return 0.0
    doublings = min(failures - 2, 60)
    return min(config.start_backoff_limit_seconds, config.start_backoff_seconds * float(2**doublings))


class Fleet:
    """The workers that are wanted, and those that still have to end. Methods append their commands to `out`."""

    def __init__(self, config: SchedulerConfig, story: Story, out: list[Command]) -> None:
        self._config = config
        self._story = story
        self._out = out
        #: in the order in which they were first wanted
        self.workers: dict[WorkerId, Worker] = {}
        #: the highest incarnation of every worker id ever started, so that no number is used twice
        self.incarnations: dict[WorkerId, int] = {}
        #: over all workers, those that are gone included
        self.totals = WorkerTotals()
        #: where to look for one that may be used
        self.whereabouts = Whereabouts()

    def want(self, worker_ids: Iterable[WorkerId]) -> None:
        """Start what is new, end what is no longer named (when it is idle)."""
        named = dict.fromkeys(worker_ids)
        for worker in list(self.workers.values()):
            worker.wanted = worker.worker_id in named
            if not worker.wanted and worker.status in (WorkerStatus.IDLE, WorkerStatus.GIVEN_UP):
                self._forget(worker)
            self._note(worker)
        for worker_id in named:
            if worker_id not in self.workers:
                incarnation = self.incarnations.get(worker_id, 0) + 1
                worker = self.workers[worker_id] = Worker(worker_id, incarnation)
                self._story.born(worker, f"#{incarnation}")
                self._start(worker, incarnation, 0.0)

    def up(self, spec: WorkerSpec, at: float) -> tuple[TaskId, ...]:
        """A worker answers. Returns the tasks that it turns out to have lost."""
        worker = self.workers.get(spec.worker_id)
        if worker is None or worker.status is WorkerStatus.GIVEN_UP or spec.incarnation < worker.incarnation:
            self._out.append(EndWorker(spec.worker_id, spec.incarnation))  # nobody wants this one
            return ()
        if worker.live and spec.incarnation == worker.incarnation:
            # It says that it has lost everything, yet it cannot be told from an old message: end it, start afresh.
            self._out.append(EndWorker(spec.worker_id, spec.incarnation))
            return self.lost(worker, "it introduced itself again")
        lost_tasks = worker.task_ids
        if worker.live:
            worker.failures += 1
            self._down(worker)
            self._story.move(worker, WorkerStatus.STARTING, f"#{spec.incarnation} appeared in place of it")
        worker.incarnation = self.incarnations[worker.worker_id] = spec.incarnation
        worker.spec = spec
        worker.version += 1
        worker.link_bytes_per_second = max(spec.link_bytes_per_second, 1.0)
        worker.believe(Residency(spec.capacity_bytes))
        worker.idle_since = at
        self._story.move(worker, WorkerStatus.IDLE, f"#{spec.incarnation}")
        if not worker.wanted:
            self._forget(worker)
        self._note(worker)
        return lost_tasks

    def lost(self, worker: Worker, reason: str) -> tuple[TaskId, ...]:
        """The current incarnation is gone, or never came up. Ask for the next, unless it is unwanted or hopeless.

        Returns the tasks that it was running.
        """
        lost_tasks = worker.task_ids
        self._down(worker)
        worker.failures += 1
        if not worker.wanted:
            self._forget(worker)
        elif worker.failures >= self._config.start_retry_limit:
            self._story.move(worker, WorkerStatus.GIVEN_UP, f"{worker.failures} failures in a row, last: {reason}")
        else:
            self._story.move(worker, WorkerStatus.STARTING, f"#{worker.incarnation + 1}: {reason}")
            self._start(worker, worker.incarnation + 1, restart_delay_seconds(self._config, worker.failures))
        return lost_tasks

    def recycle(self, worker: Worker, reason: str) -> None:
        """End an idle worker's process and start it anew. Counts as no failure, whatever there was before: it gets one
        start."""
        assert worker.task_id is None, f"{worker.name} runs {worker.task_id}"
        worker.failures = min(worker.failures, self._config.start_retry_limit - 1)
        self._out.append(EndWorker(worker.worker_id, worker.incarnation))
        self._down(worker)
        self._story.move(worker, WorkerStatus.STARTING, f"#{worker.incarnation + 1}: {reason}")
        self._start(worker, worker.incarnation + 1, 0.0)

    def forgive(self, worker_id: WorkerId) -> None:
        """One of its failures was the fault of a task. One that was given up for too many gets a new chance."""
        worker = self.workers.get(worker_id)
        if worker is None or worker.failures == 0:
            return
        worker.failures -= 1
        if worker.status is WorkerStatus.GIVEN_UP and worker.failures < self._config.start_retry_limit:
            self._story.move(worker, WorkerStatus.STARTING, f"#{worker.incarnation + 1}: a task had taken it down")
            self._start(worker, worker.incarnation + 1, restart_delay_seconds(self._config, worker.failures))

    def run_started(
        self,
        worker: Worker,
        task_id: TaskId,
        assumed: Residency,
        expected_end: float | None,
        mates: tuple[TaskId, ...] = (),
    ) -> None:
        """A task was placed, with others that run with it, and its weights are assumed to arrive."""
        worker.task_id, worker.mates, worker.members = task_id, mates, 1 + len(mates)
        worker.expected_end = expected_end
        self._story.move(worker, WorkerStatus.BUSY, task_id)
        worker.believe(assumed)
        self._note(worker)

    def assume(self, worker: Worker, residency: Residency) -> None:
        """More than its run brings is assumed to arrive."""
        worker.believe(residency)
        self._note(worker)

    def run_ended(self, worker: Worker, report: TaskReport, at: float) -> None:
        """A task of the run of `worker` ended. With the last of them the run has, and its report corrects what was
        assumed."""
        worker.totals.add(report.cost)
        self.totals.add(report.cost)
        if report.error is None:
            worker.failures = 0
        if worker.mates:
            worker.task_id, *others = (name for name in worker.task_ids if name != report.task_id)
            worker.mates = tuple(others)
            return
        worker.task_id = worker.expected_end = None
        worker.idle_since = at
        worker.believe(report.residency)
        self._story.move(worker, WorkerStatus.IDLE)
        if not worker.wanted:
            self._forget(worker)
        self._note(worker)

    def current(self, worker_id: WorkerId, incarnation: int) -> Worker | None:
        """The worker, when that is its incarnation of now."""
        worker = self.workers.get(worker_id)
        return worker if worker is not None and worker.incarnation == incarnation else None

    def usable(self, status: WorkerStatus) -> list[Worker]:
        """The wanted workers that are IDLE, or BUSY."""
        return [w for w in self.workers.values() if w.status is status and w.wanted]

    def may_take(self, worker_id: WorkerId, needed_bytes: int) -> bool:
        """Whether the worker is wanted, not given up, known, and has so much memory; it may be busy or starting."""
        worker = self.workers.get(worker_id)
        return (
            worker is not None
            and worker.wanted
            and worker.status is not WorkerStatus.GIVEN_UP
            and (worker.capacity_bytes or 0) >= needed_bytes
        )

    def largest(self) -> Worker | None:
        """Of the wanted workers that are not given up, the one with most memory; None while one of them is unknown."""
        given_up = WorkerStatus.GIVEN_UP
        if any(w.capacity_bytes is None and w.wanted and w.status is not given_up for w in self.workers.values()):
            return None
        expected = [w for w in self.workers.values() if w.wanted and w.status is not given_up]
        return max(expected, key=lambda w: (w.capacity_bytes or 0, w.worker_id), default=None)

    def hopeless(self) -> str | None:
        """Why no task can ever run: every wanted worker was given up. None while there is hope."""
        for worker in self.workers.values():
            if worker.wanted and worker.status is not WorkerStatus.GIVEN_UP:
                return None
        wanted = [w for w in self.workers.values() if w.wanted]
        if not wanted:
            return None
        names = ", ".join(w.worker_id for w in wanted)
        return f"no worker is left: {names} failed {self._config.start_retry_limit} times in a row each"

    def _start(self, worker: Worker, incarnation: int, delay_seconds: float) -> None:
        worker.incarnation = self.incarnations[worker.worker_id] = incarnation
        self._out.append(StartWorker(worker.worker_id, incarnation, delay_seconds))

    def _down(self, worker: Worker) -> None:
        worker.task_id = worker.expected_end = worker.loaded_at = None
        worker.mates, worker.ahead = (), {}
        worker.believe(None)
        self._note(worker)

    def _note(self, worker: Worker) -> None:
        self.whereabouts.note(worker, worker.wanted and worker.residency is not None)

    def _forget(self, worker: Worker) -> None:
        if worker.live:
            self._out.append(EndWorker(worker.worker_id, worker.incarnation))
            worker.believe(None)
        self._note(worker)
        self._story.move(worker, WorkerStatus.ENDED, "no longer wanted")
        del self.workers[worker.worker_id]
