"""State of each worker as the core assumes it, and when workers start, end or are given up. Knows no jobs.

Residency is assumed when a task is placed, and confirmed or corrected by the report of its run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from math import inf
from typing import TYPE_CHECKING, ClassVar

from modelpool.pool.values.core.errors import counted, format_bytes
from modelpool.pool.values.specs.spec import (
    ComponentKey,
    NodeId,
    RunCost,
    TaskId,
    TaskReport,
    TaskSpec,
    WorkerId,
    WorkerSpec,
)
from modelpool.pool.weights.plan.eviction_plan import Residency, Resident
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.cordons import Cordon, Cordons
from modelpool.scheduler.model.gang_runs import GangLoss, GangRun
from modelpool.scheduler.model.gpu_kinds import gang_link_of
from modelpool.scheduler.model.messages import Command, EndWorker, GangMember, LossCause, StartWorker
from modelpool.scheduler.model.placement_record import Why
from modelpool.scheduler.model.scaling_record import ScalingWhy
from modelpool.scheduler.model.story import Status, Story
from modelpool.scheduler.model.worker_index import WorkerIndex

if TYPE_CHECKING:
    from modelpool.scheduler.model.cost_classes import CostClass


class WorkerState(Status):
    """Status of a worker."""

    STARTING = "starting"  #: a StartWorker is pending; it is answered by WorkerUp or StartFailed
    IDLE = "idle"
    BUSY = "busy"  #: it runs a task, or several at once
    GIVEN_UP = "given_up"  #: it failed too often; it stays down
    DRAINED = "drained"  #: its machine was drained by an operator; it stays down until that is uncordoned
    ENDED = "ended"  #: forgotten


#: Every legal transition of a worker, with its reason.
WORKER_MOVES: Mapping[WorkerState, frozenset[WorkerState]] = {
    WorkerState.STARTING: frozenset(
        {
            WorkerState.IDLE,  # it is up
            WorkerState.STARTING,  # the start failed; the next incarnation is starting
            WorkerState.GIVEN_UP,  # the start failed once too often
            WorkerState.DRAINED,  # the start failed, and its machine is drained
            WorkerState.ENDED,  # it started, and is no longer wanted; or its node was never needed
        }
    ),
    WorkerState.IDLE: frozenset(
        {
            WorkerState.BUSY,  # a task was placed on it
            WorkerState.STARTING,  # it was lost, or is recycled
            WorkerState.GIVEN_UP,  # it was lost once too often
            WorkerState.DRAINED,  # its machine is drained, or was when it was lost
            WorkerState.ENDED,  # it is no longer wanted
        }
    ),
    WorkerState.BUSY: frozenset(
        {
            WorkerState.IDLE,  # the run ended
            WorkerState.STARTING,  # it was lost
            WorkerState.GIVEN_UP,  # it was lost once too often
            WorkerState.DRAINED,  # it was lost, and its machine is drained
            WorkerState.ENDED,  # it was lost, and is no longer wanted
        }
    ),
    WorkerState.GIVEN_UP: frozenset(
        {
            WorkerState.STARTING,  # its failures turned out to be caused by a task
            WorkerState.ENDED,  # it is no longer wanted
        }
    ),
    WorkerState.DRAINED: frozenset(
        {
            WorkerState.STARTING,  # its machine is not drained any more
            WorkerState.ENDED,  # it is no longer wanted
        }
    ),
    WorkerState.ENDED: frozenset(),
}


@dataclass(slots=True)
class WorkerRunTotals:
    """Totals over the runs of one worker, or of all of them."""

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


@dataclass(frozen=True, slots=True)
class PendingLoad:
    """A load that a worker was sent.

    runs  its completed runs when the load was sent: a later run has changed the weights on the GPU
    """

    components: tuple[ComponentKey, ...]
    runs: int


@dataclass(frozen=True, slots=True)
class PendingPreload:
    """Weights that were preloaded on a worker, or are being, and that no run has used since.

    hidden_bytes      expected bytes so far
    sent_at           when the first of them was requested
    expected_seconds  until a run uses them, as expected then
    """

    hidden_bytes: int
    sent_at: float
    expected_seconds: float


@dataclass(slots=True)
class QueuedTask:
    """A task that a busy worker starts after its run and the queued tasks before it.

    seconds     expected length of its run
    why         the reasons of the decision
    ready_at    as in the task before it was queued
    joins       it was sent in one call with the task before it, and their ends are reported together
    decodes     the weights with which it decodes, if its worker may begin the next tasks meanwhile
    overlaps    it may begin while such a decode in front of it is computed, unless it decodes with the same weights
    is_revoked  it was asked back, and the answer is not there
    may_have_started  set when its worker is lost: `Worker.begun` had it
    """

    task_id: TaskId
    seconds: float
    why: Why
    ready_at: float | None
    joins: bool = False
    decodes: ComponentKey | None = None
    overlaps: bool = False
    is_revoked: bool = False
    may_have_started: bool = False


@dataclass(slots=True, eq=False)
class Worker:
    """One worker through all its incarnations."""

    MOVES: ClassVar[Mapping[WorkerState, frozenset[WorkerState]]] = WORKER_MOVES

    worker_id: WorkerId
    #: of the latest StartWorker or WorkerUp
    incarnation: int
    status: WorkerState = WorkerState.STARTING
    #: False: it takes no new task and ends when it is idle
    wanted: bool = True
    #: its last introduction; None if it never was up
    spec: WorkerSpec | None = None
    #: the last known capacity; None if it never was up
    capacity_bytes: int | None = None
    #: measured at its start, then learned from its loads
    link_bytes_per_second: float = 1.0
    #: to other GPUs of its machine, as stated or by its data sheet; 0 if neither is known
    gang_link_bytes_per_second: float = 0.0
    #: set exactly while IDLE or BUSY
    residency: Residency | None = None
    #: the entries of `residency`
    entries: dict[ComponentKey, Resident] = field(default_factory=dict)
    used_bytes: int = 0
    #: grows when entries, capacity or link change
    version: int = 0
    #: the first task of its run that has not ended, and the others. Set exactly while BUSY, except on a worker that
    #: takes part in a gang which another worker stands for
    task_id: TaskId | None = None
    batch_mates: tuple[TaskId, ...] = ()
    #: number of tasks that its current or last run began with; if others joined it, of those that were in it then
    members: int = 0
    #: tasks with this `TaskSpec.pass_key` may join its run; "" if none may. Set only while BUSY
    pass_key: str = ""
    #: rows of that pass, and the first component of its tasks
    pass_rows: int = 0
    pass_component: ComponentKey | None = None
    #: the gang that it runs in, until it has reported its end; only while BUSY
    gang: GangRun | None = None
    #: the task for which it takes no others: it will share that run
    held_for: TaskId | None = None
    #: the workers, with their incarnations, with which it shared its last such run, itself included
    last_gang: tuple[GangMember, ...] = ()
    #: the weights of its run, if that is a decode and it may begin queued tasks meanwhile
    decodes: ComponentKey | None = None
    #: the tasks that it starts after its run, in order; only while BUSY
    queue: list[QueuedTask] = field(default_factory=list)
    #: their expected seconds
    queued_seconds: float = 0.0
    #: the residency before its run, if that task was queued
    residency_before: Residency | None = None
    #: a task was asked back during its run: it is sent no other one before the end of the run
    is_barred: bool = False
    #: when its run should end; None while no such run was measured
    expected_end: float | None = None
    #: when the weights of its run should be loaded; None if nothing can be preloaded during it
    loaded_at: float | None = None
    #: what was preloaded and not used since, by cost class
    preloaded: dict[CostClass, PendingPreload] = field(default_factory=dict)
    #: the load of a pinned set that has not been answered
    loading: PendingLoad | None = None
    idle_since: float = 0.0
    #: failed starts and losses since its last completed run, without external ones
    failures: int = 0
    #: losses since its last completed run that neither it nor a task can have caused
    external_losses: int = 0
    #: when its machine ends; None if that is not known to end
    drain_deadline: float | None = None
    #: the operator's cordon of it, or of its machine; None if there is none
    cordon: Cordon | None = None
    #: when its run must have ended because an operator wants it restarted; None if none does
    restart_by: float | None = None
    #: its process ran for an earlier controller
    was_taken_over: bool = False
    #: the group of nodes that it was requested from; "" for a worker that the shell named
    group: str = ""
    #: the request that it belongs to: the workers of one node are requested together
    request: int = 0
    #: when its node was requested
    requested_at: float = 0.0
    #: why its node was given up
    end_why: ScalingWhy | None = None
    totals: WorkerRunTotals = field(default_factory=WorkerRunTotals)

    @property
    def name(self) -> WorkerId:
        """The id, for the story."""
        return self.worker_id

    @property
    def task_ids(self) -> tuple[TaskId, ...]:
        """The tasks of its run that have not ended."""
        return () if self.task_id is None else (self.task_id, *self.batch_mates)

    @property
    def free_rows(self) -> int:
        """Rows of the pass that it runs for other tasks; 0 if none may join."""
        return self.pass_rows - len(self.task_ids) if self.pass_key else 0

    @property
    def takes_tasks(self) -> bool:
        """Whether new tasks may be placed on it while it is up."""
        return self.wanted and self.cordon is None and self.restart_by is None and self.held_for is None

    @property
    def drains(self) -> bool:
        """Whether an operator drains its machine."""
        return self.cordon is not None and self.cordon.deadline is not None

    @property
    def leave_by(self) -> float | None:
        """When its run must have ended, as an operator drains its machine or restarts it; None if neither."""
        drain_by = None if self.cordon is None else self.cordon.deadline
        if drain_by is None or self.restart_by is None:
            return self.restart_by if drain_by is None else drain_by
        return min(drain_by, self.restart_by)

    @property
    def is_idle(self) -> bool:
        """Whether it is up and runs nothing."""
        return self.status is WorkerState.IDLE

    @property
    def live(self) -> bool:
        """Whether it is up."""
        return self.residency is not None

    @property
    def overlaps_decode(self) -> bool:
        """Whether it may begin a task while it still decodes for the one before."""
        return self.spec is not None and self.spec.overlaps_decode

    def files_changed(self) -> None:
        """What its machine has of files has changed: predictions are made again."""
        self.version += 1

    def update_residency(self, residency: Residency | None) -> None:
        """Set the assumed content of the GPU. Entries are compared with every event, which is fast for identical
        objects: equal new entries are replaced by the known objects, or the known ones by the new ones if nothing
        else changed, since the next report will contain those again. A mere change of order keeps predictions valid
        (`version`)."""
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
        """Seconds until it should be free; None if unknown.

        A run that is overdue is expected to take as long again as it is late.
        """
        if self.status is WorkerState.IDLE:
            return 0.0
        if self.expected_end is None:
            return None
        return abs(self.expected_end - at) + self.queued_seconds

    @property
    def joined(self) -> list[QueuedTask]:
        """The queued tasks that were sent in one call with the task that it runs. They may have started, and ended:
        that is reported with the end of the last one."""
        return list(takewhile(lambda queued: queued.joins, self.queue))

    @property
    def begun(self) -> list[QueuedTask]:
        """The queued tasks that may have started: tasks of `joined`, and tasks behind a decode that may overlap with
        it. Of two decodes with the same weights, the second one waits. One with others may be an upscale, which does
        not."""
        found, decodes = list[QueuedTask](), [] if self.decodes is None else [self.decodes]
        for queued in self.queue:
            may_overlap = bool(decodes) and queued.overlaps and queued.decodes not in decodes
            if not (queued.joins or may_overlap):
                break
            found.append(queued)
            if queued.decodes is not None:
                decodes.append(queued.decodes)
        return found


def restart_delay_seconds(config: SchedulerConfig, failures: int) -> float:
    """Delay before the next start after this many failures in a row: 0, then doubling up to the limit."""
    if failures <= 1:
        return 0.0
    doublings = min(failures - 2, 60)
    return min(config.start_backoff_limit_seconds, config.start_backoff_seconds * float(2**doublings))


class WorkerTable:
    """The workers that are wanted, and those that still have to end. Methods append their commands to `out`."""

    def __init__(self, config: SchedulerConfig, story: Story, out: list[Command]) -> None:
        self._config = config
        self._story = story
        self._out = out
        #: in the order in which they were first wanted
        self.workers: dict[WorkerId, Worker] = {}
        #: the highest incarnation of every worker id ever started, so that no number is used twice
        self.incarnations: dict[WorkerId, int] = {}
        #: over all workers, including those that ended
        self.totals = WorkerRunTotals()
        #: index of the usable workers
        self.worker_index = WorkerIndex()
        #: the workers with queued tasks
        self.with_queued: dict[WorkerId, Worker] = {}
        #: the workers with a pass that tasks may join
        self.open_passes: dict[WorkerId, Worker] = {}
        #: queued tasks of lost workers. Emptied by the core
        self.returned: list[QueuedTask] = []
        #: lost members of gangs. Emptied by the core
        self.gang_losses: list[GangLoss] = []
        #: what operators have taken out of use
        self.cordons = Cordons()

    def want(self, worker_ids: Iterable[WorkerId]) -> None:
        """Start new workers; end workers that are no longer named: busy ones when their run has ended, and those that
        start at once, since they may wait for a GPU forever. Workers of groups are not concerned."""
        named = dict.fromkeys(worker_ids)
        for worker in list(self.workers.values()):
            if worker.group:
                continue
            worker.wanted = worker.worker_id in named
            if not worker.wanted and worker.status is not WorkerState.BUSY:
                if worker.status is WorkerState.STARTING:
                    self._out.append(EndWorker(worker.worker_id, worker.incarnation))
                self._forget(worker)
            self._note(worker)
        for worker_id in named:
            if worker_id not in self.workers:
                incarnation = self.incarnations.get(worker_id, 0) + 1
                worker = self.workers[worker_id] = Worker(worker_id, incarnation)
                worker.cordon = self.cordons.of(worker)
                self._story.born(worker, f"#{incarnation}")
                self._start(worker, incarnation, 0.0)

    def request(self, worker_ids: Iterable[WorkerId], group: str, request: int, at: float, why: ScalingWhy) -> None:
        """Start the workers of a new node of `group`."""
        is_first = True
        for worker_id in worker_ids:
            worker = self.workers[worker_id] = Worker(worker_id, 1, group=group, request=request, requested_at=at)
            self._story.born(worker, f"#1: {why.words}")
            self.incarnations[worker_id] = 1
            self._out.append(StartWorker(worker_id, 1, 0.0, group, why if is_first else None))
            is_first = False

    def release(self, worker: Worker, why: ScalingWhy) -> None:
        """End a worker because its node is given up: at once, or when its run has ended."""
        worker.wanted, worker.end_why = False, why
        self._story.note(worker, why.words)
        if worker.status is not WorkerState.BUSY:
            if worker.status is WorkerState.STARTING:
                self._out.append(EndWorker(worker.worker_id, worker.incarnation, why))
            self._forget(worker)
        else:
            self._note(worker)

    def up(
        self,
        spec: WorkerSpec,
        at: float,
        drain_deadline: float | None = None,
        residency: Residency | None = None,
    ) -> tuple[TaskId, ...]:
        """A worker is up, on a machine that ends at `drain_deadline`; with `residency` it was taken over. Returns the
        tasks that turn out to be lost with it."""
        worker = self.workers.get(spec.worker_id)
        is_down = worker is not None and worker.status in (WorkerState.GIVEN_UP, WorkerState.DRAINED)
        if worker is None or is_down or spec.incarnation < worker.incarnation:
            self._out.append(EndWorker(spec.worker_id, spec.incarnation))  # this one is not wanted
            return ()
        if worker.live and spec.incarnation == worker.incarnation:
            # It has lost everything; since this may also be a delayed message, end it and start the next incarnation.
            self._out.append(EndWorker(spec.worker_id, spec.incarnation))
            return self.lost(worker, "it introduced itself again")
        lost_tasks = () if worker.gang is not None else worker.task_ids
        if worker.live:
            worker.failures += 1
            self._down(worker)
            self._story.move(worker, WorkerState.STARTING, f"#{spec.incarnation} replaced it")
        worker.incarnation = self.incarnations[worker.worker_id] = spec.incarnation
        worker.spec = spec
        worker.version += 1
        worker.link_bytes_per_second = max(spec.link_bytes_per_second, 1.0)
        worker.gang_link_bytes_per_second = spec.gang_link_bytes_per_second or gang_link_of(spec.device_name)
        worker.update_residency(residency or Residency(spec.capacity_bytes))
        worker.idle_since = at
        worker.drain_deadline = drain_deadline
        worker.was_taken_over = residency is not None
        if not worker.was_taken_over:
            self.cordons.restarts.pop(worker.worker_id, None)
        held = "" if residency is None else f", taken over with {format_bytes(residency.used_bytes)} of weights"
        self._story.move(worker, WorkerState.IDLE, f"#{spec.incarnation}{held}")
        if not worker.wanted:
            self._forget(worker)
        self._note(worker)
        if self.cordons and worker.wanted:
            self.follow_cordons(worker)
        return lost_tasks

    def lost(self, worker: Worker, reason: str, cause: LossCause = LossCause.CRASH) -> tuple[TaskId, ...]:
        """The current incarnation is lost, or failed to start. Request the next, unless the worker is unwanted or given
        up. External causes slow down the next start when they repeat, and never give a worker up.

        Returns the tasks that it was running, without one that it shared with other workers.
        """
        lost_tasks = () if worker.gang is not None else worker.task_ids
        self._down(worker, reason, cause)
        if cause.is_external:
            worker.external_losses += 1
        else:
            worker.failures += 1
        if not worker.wanted:
            self._forget(worker)
        elif worker.drains:
            self._stay_drained(worker)
        elif worker.failures >= self._config.start_retry_limit:
            count = counted(worker.failures, "failure")
            self._story.move(worker, WorkerState.GIVEN_UP, f"{count} in a row, last: {reason}")
        else:
            self._story.move(worker, WorkerState.STARTING, f"#{worker.incarnation + 1}: {reason}")
            failures = worker.external_losses if cause.is_external else worker.failures
            self._start(worker, worker.incarnation + 1, restart_delay_seconds(self._config, failures))
        return lost_tasks

    def drain(self, node: NodeId, deadline: float | None) -> None:
        """The machine ends at `deadline`; None withdraws an earlier notice."""
        for worker in self.workers.values():
            if worker.live and worker.spec is not None and worker.spec.node == node:
                worker.drain_deadline = deadline
                note = "its machine is not drained any more" if deadline is None else "its machine is drained"
                self._story.note(worker, note)

    def end_drained(self, at: float) -> bool:
        """Leave machines past their deadline: their idle workers start elsewhere, except workers of groups: decisions
        request the nodes of groups. Returns whether any did."""
        drained = [w for w in self.workers.values() if w.is_idle and (w.drain_deadline or inf) <= at]
        for worker in drained:
            if worker.group:
                worker.wanted = False
                self._forget(worker)
            else:
                self.recycle(worker, "its machine was drained")
        return bool(drained)

    def follow_cordons(self, worker: Worker) -> None:
        """Give a worker the cordon that is in force for it; one that had ended because of an earlier one starts
        again."""
        cordon, restart_by = self.cordons.of(worker), self.cordons.restarts.get(worker.worker_id)
        if (cordon, restart_by) == (worker.cordon, worker.restart_by):
            return
        if cordon is not None and cordon != worker.cordon:
            doing = "cordoned" if cordon.deadline is None else "drained"
            self._story.note(worker, f"is {doing} by the operator")
        elif cordon is None and worker.cordon is not None:
            self._story.note(worker, "is uncordoned by the operator")
        worker.cordon, worker.restart_by = cordon, restart_by if worker.live else None
        if worker.status is WorkerState.DRAINED and not worker.drains:
            self._story.move(worker, WorkerState.STARTING, f"#{worker.incarnation + 1}: its machine is not drained")
            self._start(worker, worker.incarnation + 1, 0.0)
        self._note(worker)

    def end_for_drain(self, worker: Worker) -> None:
        """End an idle worker of a machine that an operator drains: one of a group for good, others until the machine is
        uncordoned."""
        assert worker.task_id is None, f"{worker.name} runs {worker.task_id}"
        if worker.group:
            worker.wanted = False
            self._forget(worker)
            return
        self._out.append(EndWorker(worker.worker_id, worker.incarnation))
        self._down(worker)
        self._stay_drained(worker)

    def _stay_drained(self, worker: Worker) -> None:
        if worker.group:
            worker.wanted = False
            self._forget(worker)
            return
        worker.failures = min(worker.failures, self._config.start_retry_limit - 1)
        self._story.move(worker, WorkerState.DRAINED, "its machine is drained by the operator")

    def recycle(self, worker: Worker, reason: str) -> None:
        """Restart the process of an idle worker. Not counted as a failure; a worker at its limit gets one more
        start."""
        assert worker.task_id is None, f"{worker.name} runs {worker.task_id}"
        worker.failures = min(worker.failures, self._config.start_retry_limit - 1)
        self._out.append(EndWorker(worker.worker_id, worker.incarnation))
        self._down(worker)
        self._story.move(worker, WorkerState.STARTING, f"#{worker.incarnation + 1}: {reason}")
        self._start(worker, worker.incarnation + 1, 0.0)

    def forgive(self, worker_id: WorkerId) -> None:
        """Discount a failure that a task caused. A worker that was given up may start again."""
        worker = self.workers.get(worker_id)
        if worker is None or worker.failures == 0:
            return
        worker.failures -= 1
        if worker.status is WorkerState.GIVEN_UP and worker.failures < self._config.start_retry_limit:
            self._story.move(worker, WorkerState.STARTING, f"#{worker.incarnation + 1}: a task had crashed it")
            self._start(worker, worker.incarnation + 1, restart_delay_seconds(self._config, worker.failures))

    def run_started(
        self,
        worker: Worker,
        task_id: TaskId,
        assumed: Residency,
        expected_end: float | None,
        batch_mates: tuple[TaskId, ...] = (),
        decodes: ComponentKey | None = None,
        open_for: TaskSpec | None = None,
    ) -> None:
        """A task was placed, with the others of its batch; its weights are assumed to arrive. `decodes` as in
        `Worker`; `open_for`: tasks like this one may join."""
        worker.task_id, worker.batch_mates, worker.members = task_id, batch_mates, 1 + len(batch_mates)
        worker.decodes = decodes
        if open_for is not None:
            worker.pass_key, worker.pass_rows = open_for.pass_key, open_for.batch_size
            worker.pass_component = open_for.uses[0].component
            self.open_passes[worker.worker_id] = worker
        worker.expected_end, worker.is_barred = expected_end, False
        self._story.move(worker, WorkerState.BUSY, task_id)
        worker.update_residency(assumed)
        self._note(worker)

    def joined_pass(self, worker: Worker, task_id: TaskId, expected_end: float | None) -> None:
        """A task joined the pass of a worker, and should end then. The worker is sent no other task before the end of
        the pass: one that comes too late to join runs next."""
        worker.batch_mates = (*worker.batch_mates, task_id)
        worker.members = len(worker.task_ids)
        worker.is_barred = True
        if worker.expected_end is not None and expected_end is not None:
            worker.expected_end = max(worker.expected_end, expected_end)
        self._note(worker)

    def _close_pass(self, worker: Worker) -> None:
        if worker.pass_key:
            worker.pass_key, worker.pass_rows, worker.pass_component = "", 0, None
            del self.open_passes[worker.worker_id]

    def gang_started(
        self, worker: Worker, gang: GangRun, assumed: Residency, expected_end: float | None, leads: bool
    ) -> None:
        """A worker begins its part of a run that it shares; the worker that `leads` stands for the run."""
        worker.gang, worker.task_id = gang, gang.task_id if leads else None
        worker.last_gang = gang.members
        worker.batch_mates, worker.members, worker.decodes, worker.loaded_at = (), 1, None, None
        worker.expected_end, worker.is_barred = expected_end, True
        self._story.move(worker, WorkerState.BUSY, f"{gang.task_id}, with {', '.join(gang.others(worker.worker_id))}")
        worker.update_residency(assumed)
        self._note(worker)

    def gang_ended(self, worker: Worker, report: TaskReport, at: float) -> None:
        """A worker has ended its part of a run that it shared."""
        worker.totals.add(report.cost)
        self.totals.add(report.cost)
        if report.error is None:
            worker.failures = worker.external_losses = 0
        worker.gang = worker.task_id = worker.expected_end = None
        worker.update_residency(report.residency)
        self._idle(worker, at)

    def hold(self, worker: Worker, task_id: TaskId | None) -> None:
        """Let a worker that is up take no tasks but this one; None ends that."""
        worker.held_for = task_id
        self._note(worker)

    def stands_for(self, worker: Worker) -> Worker | None:
        """Return the worker that stands for the run of `worker`: the worker itself, or one that it shares the run with.
        None if it runs nothing, or only its own part has not ended."""
        if worker.gang is None:
            return worker if worker.task_id is not None else None
        lead = self.workers.get(worker.gang.lead)
        return lead if lead is not None and lead.gang is worker.gang and lead.task_id is not None else None

    def queue(self, worker: Worker, queued: QueuedTask) -> None:
        """A busy worker was sent another task, which it starts after those that it has."""
        worker.queue.append(queued)
        worker.queued_seconds += queued.seconds
        self.with_queued[worker.worker_id] = worker

    def unqueue(self, worker: Worker, place: int = 0) -> QueuedTask:
        """A queued task starts, which is the first, or was revoked."""
        queued = worker.queue.pop(place)
        worker.queued_seconds -= queued.seconds
        if not worker.queue:
            worker.queued_seconds = 0.0  # without rounding errors
            del self.with_queued[worker.worker_id]
        return queued

    def unqueue_revoked(self, worker: Worker, task_id: TaskId) -> QueuedTask | None:
        """Remove a queued task that was revoked, and return it; None if it is not queued there."""
        for place, queued in enumerate(worker.queue):
            if queued.task_id == task_id:
                if place + 1 < len(worker.queue) and not queued.joins:
                    worker.queue[place + 1].joins = False  # it is the first of that call now
                return self.unqueue(worker, place)
        return None

    def run_revoked(self, worker: Worker, at: float) -> None:
        """The task that was believed to run had been revoked before it started: nothing runs there."""
        worker.task_id = worker.expected_end = None
        worker.update_residency(worker.residency_before)
        self._idle(worker, at)

    def pretend_idle(self, worker: Worker) -> None:
        """Index a busy worker as if it were idle, to ask what it would run next. `stop_pretending` must follow."""
        worker.status = WorkerState.IDLE
        self._note(worker)

    def stop_pretending(self, worker: Worker) -> None:
        """Index the worker as busy again."""
        worker.status = WorkerState.BUSY
        self._note(worker)

    def assume(self, worker: Worker, residency: Residency) -> None:
        """Assume more weights than the run needs: preloads, or a load without a run."""
        worker.update_residency(residency)
        self._note(worker)

    def run_ended(self, worker: Worker, report: TaskReport, at: float) -> None:
        """A task of the run of `worker` ended. After the last one the run has ended, and its report corrects the
        assumed residency."""
        worker.totals.add(report.cost)
        self.totals.add(report.cost)
        if report.error is None:
            worker.failures = worker.external_losses = 0
        if worker.batch_mates:
            worker.task_id, *others = (name for name in worker.task_ids if name != report.task_id)
            worker.batch_mates = tuple(others)
            return
        worker.task_id = worker.expected_end = None
        self._close_pass(worker)
        worker.update_residency(report.residency)
        self._idle(worker, at)

    def nodes(self) -> set[NodeId]:
        """The machines of the workers that are up."""
        return {worker.spec.node for worker in self.workers.values() if worker.live and worker.spec is not None}

    def current(self, worker_id: WorkerId, incarnation: int) -> Worker | None:
        """The worker, if this is its current incarnation."""
        worker = self.workers.get(worker_id)
        return worker if worker is not None and worker.incarnation == incarnation else None

    def usable(self, status: WorkerState) -> list[Worker]:
        """The workers that are IDLE, or BUSY, and take tasks."""
        return [w for w in self.workers.values() if w.status is status and w.takes_tasks]

    def may_take(self, worker_id: WorkerId, needed_bytes: int) -> bool:
        """Whether the worker takes tasks, is not given up, and of known and sufficient memory; it may be busy or
        starting."""
        worker = self.workers.get(worker_id)
        return (
            worker is not None
            and worker.takes_tasks
            and worker.status not in (WorkerState.GIVEN_UP, WorkerState.DRAINED)
            and (worker.capacity_bytes or 0) >= needed_bytes
        )

    def largest(self) -> Worker | None:
        """Return the wanted worker with most memory that is not given up; None while the memory of one is unknown."""
        given_up = WorkerState.GIVEN_UP
        if any(w.capacity_bytes is None and w.wanted and w.status is not given_up for w in self.workers.values()):
            return None
        expected = [w for w in self.workers.values() if w.wanted and w.status is not given_up]
        return max(expected, key=lambda w: (w.capacity_bytes or 0, w.worker_id), default=None)

    def hopeless(self) -> str | None:
        """Return why no task can ever run: every wanted worker was given up. None otherwise."""
        for worker in self.workers.values():
            if worker.wanted and worker.status is not WorkerState.GIVEN_UP:
                return None
        wanted = [w for w in self.workers.values() if w.wanted]
        if not wanted:
            return None
        names = ", ".join(w.worker_id for w in wanted)
        return f"no worker is left: {names} failed {self._config.start_retry_limit} times in a row each"

    def _start(self, worker: Worker, incarnation: int, delay_seconds: float) -> None:
        worker.incarnation = self.incarnations[worker.worker_id] = incarnation
        self._out.append(StartWorker(worker.worker_id, incarnation, delay_seconds, worker.group))

    def _down(self, worker: Worker, reason: str = "it was replaced", cause: LossCause = LossCause.CRASH) -> None:
        worker.task_id = worker.expected_end = worker.loaded_at = worker.drain_deadline = None
        self._close_pass(worker)
        worker.batch_mates, worker.preloaded, worker.loading = (), {}, None
        worker.restart_by = None
        if worker.gang is not None:
            self.gang_losses.append(GangLoss(worker.gang, worker.worker_id, reason, cause))
            worker.gang = None
        self.cordons.restarts.pop(worker.worker_id, None)
        for queued in worker.begun:
            queued.may_have_started = True
        while worker.queue:
            self.returned.append(self.unqueue(worker))
        worker.update_residency(None)
        self._note(worker)

    def _idle(self, worker: Worker, at: float) -> None:
        """Its run is over; it ends if it is not wanted, unless it has queued tasks, which may have started."""
        worker.idle_since = at
        self._story.move(worker, WorkerState.IDLE)
        if not worker.wanted and not worker.queue:
            self._forget(worker)
        self._note(worker)

    def _note(self, worker: Worker) -> None:
        usable = worker.residency is not None and worker.wanted and worker.cordon is None
        # the rest of `Worker.takes_tasks`: this is called several times in each event
        self.worker_index.note(worker, usable and worker.restart_by is None and worker.held_for is None)

    def _forget(self, worker: Worker) -> None:
        if worker.live:
            self._out.append(EndWorker(worker.worker_id, worker.incarnation, worker.end_why))
            worker.update_residency(None)
        self._note(worker)
        self._story.move(worker, WorkerState.ENDED, "no longer wanted")
        del self.workers[worker.worker_id]
        self.cordons.restarts.pop(worker.worker_id, None)
        if worker.group:  # its id is never used again
            del self.incarnations[worker.worker_id]
            self.cordons.workers.pop(worker.worker_id, None)
