"""The same core under virtual time: a heap of events instead of a cluster. Holds no policy of its own.

Any core will do that answers events with commands: the scheduler of this pool, or one of its peers (`benchmarks.lab`).
Simulated workers keep their residency by a `WorkerMemory`, which for this pool is `pool.plan.residency.plan`, as on
real workers, and charge its bytes as seconds; they divide runs as real ones do (`pool.specs.division`), and charge what
that adds. Knows no chance: what varies is handed in (`Disturbances`), so a run is a function of its arguments.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

from modelpool.pool.plan.residency import Move, Residency
from modelpool.pool.specs.spec import (
    ComponentKey,
    ComponentSpec,
    JobId,
    RunError,
    RunErrorKind,
    Stage,
    TaskId,
    TaskReport,
    TaskSpec,
    WorkerId,
)
from modelpool.scheduler.simulator.batches import Batch, Run, half_loaded
from modelpool.scheduler.simulator.eviction_policies import PlannedMemory, WorkerMemory
from modelpool.scheduler.simulator.faults import Disturbances
from modelpool.scheduler.simulator.hosts import SimulatedNode, StorageReads
from modelpool.scheduler.simulator.machines import Machine, Machines, SimulatedGpu, Work
from modelpool.scheduler.simulator.records import SimulatedRun, SimulationTotals, model_name, shares
from modelpool.scheduler.tables.messages import (
    CancelAsked,
    Command,
    ComponentsKnown,
    EndWorker,
    Event,
    LookAgain,
    Mate,
    Outcome,
    Prefetch,
    ReleaseResult,
    ResolveJob,
    RunEnded,
    RunTask,
    StartFailed,
    StartWorker,
    StopTask,
    Submitted,
    Tick,
    UploadAhead,
    WorkerDown,
    WorkersWanted,
    WorkerUp,
)

__all__ = ["RESULT_BYTES", "Core", "SimulatedGpu", "SimulatedNode", "VirtualCluster"]

#: sizes that fill a result cache about as real conditionings, latents and images do
RESULT_BYTES: Mapping[Stage, int] = {Stage.ENCODE: 1 << 20, Stage.SAMPLE: 1 << 18, Stage.DECODE: 3 << 20}


class Core(Protocol):
    """Whoever decides: events in, commands out, under the rules that `scheduler.core.state` states for its shell."""

    def handle(self, event: Event) -> list[Command]:
        """Take in what happened; return what is to be done, in order."""


CoreT_co = TypeVar("CoreT_co", bound=Core, covariant=True)


class VirtualCluster(Generic[CoreT_co]):
    """A core and simulated workers. Post events, then `run`."""

    def __init__(
        self,
        core: CoreT_co,
        gpus: Iterable[SimulatedGpu],
        nodes: Iterable[SimulatedNode] = (),
        memory: WorkerMemory | None = None,
        disturbances: Disturbances | None = None,
        patch_switch_seconds: float = 0.05,
    ) -> None:
        """Raises UnusableField when a GPU is on a machine that is not among `nodes`, or one name stands for two."""
        self.core = core
        self.now = 0.0
        self.totals = SimulationTotals()
        #: every run that is over, in the order in which they ended
        self.runs: list[SimulatedRun] = []
        self.submitted: dict[JobId, Submitted] = {}
        self.outcomes: dict[JobId, Outcome] = {}
        self.errors: dict[JobId, RunError] = {}
        #: seconds from submission to resolution
        self.latency_seconds: dict[JobId, float] = {}
        self.held: set[TaskId] = set()
        #: every command with the time it was given
        self.commands: list[tuple[float, Command]] = []
        self._machines = Machines(gpus, nodes, memory or PlannedMemory(), patch_switch_seconds)
        self._disturbances = disturbances or Disturbances()
        self._components: dict[ComponentKey, ComponentSpec] = {}
        #: each task with the first job that named it
        self._tasks: dict[TaskId, tuple[TaskSpec, JobId]] = {}
        self._heap: list[tuple[float, int, Event]] = []
        self._posted = 0

    @property
    def gpus(self) -> tuple[SimulatedGpu, ...]:
        """The GPUs that there are, live or not."""
        return tuple(self._machines.gpus.values())

    @property
    def storage(self) -> StorageReads:
        """What has come from the storage of all machines until now, fetched ahead or not. It may be more than runs
        read: what was fetched ahead is nobody's."""
        return self._machines.storage(self.now)

    @property
    def residencies(self) -> dict[WorkerId, Residency]:
        """What is on the GPU of each live worker, or will be when its run ends."""
        return {worker_id: machine.residency_after for worker_id, machine in self._machines.live.items()}

    def start(self, components: Iterable[ComponentSpec], at: float = 0.0) -> None:
        """Announce sizes and ask for every worker."""
        self.post(ComponentsKnown(at, tuple(components)))
        self.post(WorkersWanted(at, tuple(self._machines.gpus)))

    def post(self, event: Event) -> int:
        """Let `event` happen at its time; events of one time in the order posted. Returns its number."""
        self._posted += 1
        heapq.heappush(self._heap, (event.at, self._posted, event))
        return self._posted

    def lose(self, worker_id: WorkerId, at: float) -> None:
        """Let whatever incarnation of the worker is live at that time be lost."""
        self.post(WorkerDown(at, worker_id, _WHICHEVER, "lost in the simulation"))

    def run(self, after_each: Callable[[CoreT_co], None] | None = None) -> None:
        """Until nothing is left to happen; `after_each` sees the core after every event."""
        while self._heap:
            at, number, event = heapq.heappop(self._heap)
            actual = self._happen(at, event, number)
            if actual is None:
                continue
            self.now = at
            self.totals.events += 1
            for command in self.core.handle(actual):
                self.commands.append((self.now, command))
                self._execute(command)
            if after_each is not None:
                after_each(self.core)

    def _happen(self, at: float, event: Event, number: int) -> Event | None:
        """What the event does to the simulated world; None when it is overtaken by another."""
        match event:
            case RunEnded(report=report):
                machine = self._machines.live.get(report.worker_id)
                batch = None if machine is None else machine.batch
                run = None if batch is None else batch.runs.get(Mate(report.task_id, report.attempt))
                if machine is None or batch is None or run is None or run.number != number:
                    return None  # the worker was lost, or the run stopped earlier
                batch.share(at)
                del batch.runs[run.member]
                if not batch.runs:
                    came_bytes = machine.settle(at)
                    self.totals.beside_bytes += came_bytes
                    machine.batch = None
                    cost = replace(report.cost, ahead_bytes=came_bytes)
                    report = replace(report, residency=machine.residency, cost=cost)
                self._record(at, batch, run, report)
                if report.error is None:
                    self.held.add(report.task_id)
                return RunEnded(event.at, report)
            case WorkerUp(worker=spec):
                self._machines.up(spec)
            case WorkerDown():
                machine = self._machines.live.get(event.worker_id)
                if machine is None or event.incarnation not in (_WHICHEVER, machine.incarnation):
                    return None
                self._gone(at, machine)
                return WorkerDown(event.at, event.worker_id, machine.incarnation, event.reason)
            case Submitted(job=job):
                self.submitted.setdefault(job.job_id, event)
                for task in job.tasks:
                    first = self._tasks.get(task.task_id)
                    self._tasks[task.task_id] = (task, job.job_id if first is None else first[1])
                self.held.update(job.given)
            case ComponentsKnown(components=components):
                self._components.update((spec.key, spec) for spec in components)
            case CancelAsked() | WorkersWanted() | StartFailed() | Tick():
                pass
            case _:
                self.held.discard(event.task_id)
        return event

    def _execute(self, command: Command) -> None:
        match command:
            case RunTask():
                self._start_run(command)
            case ReleaseResult(task_id=task_id):
                self.held.discard(task_id)
            case ResolveJob():
                assert command.job_id not in self.outcomes, f"{command.job_id} was resolved twice"
                assert command.result is None or command.result in self.held, f"{command.job_id}: no such result"
                self.outcomes[command.job_id] = command.outcome
                self.latency_seconds[command.job_id] = self.now - self.submitted[command.job_id].at
                if command.error is not None:
                    self.errors[command.job_id] = command.error
            case StartWorker():
                self._start_worker(command)
            case StopTask():
                self._stop_run(command)
            case LookAgain():
                self.post(Tick(self.now + command.after_seconds))
            case Prefetch():
                self._prefetch(command)
            case UploadAhead():
                self._upload_ahead(command)
            case EndWorker():
                machine = self._machines.live.get(command.worker_id)
                if machine is not None and machine.incarnation == command.incarnation:
                    self._gone(self.now, machine)

    def _start_worker(self, command: StartWorker) -> None:
        gpu = self._machines.gpus[command.worker_id]
        at = self.now + command.delay_seconds + gpu.start_seconds
        if self._disturbances.start_fails(command):
            self.post(StartFailed(at, command.worker_id, command.incarnation, "the simulation says so"))
            return
        self.post(WorkerUp(at, self._machines.spec(command.worker_id, command.incarnation)))

    def _start_run(self, command: RunTask) -> None:
        machine = self._machines.live[command.worker_id]
        members = (Mate(command.task_id, command.attempt), *command.mates)
        tasks = [self._tasks[member.task_id][0] for member in members]
        assert machine.incarnation == command.incarnation, f"{command} goes to a worker that is gone"
        assert machine.batch is None, f"{command} goes to a worker that is busy"
        unheld = [need for task in tasks for need in task.needs if need not in self.held]
        assert not unheld, f"{command} reads {unheld}, which nobody holds"
        assert all(task.uses == tasks[0].uses for task in tasks), f"{command}: mates of other weights"
        work = self._machines.work(self.now, command, tasks, self._components, self._disturbances.run_factor())
        kind = self._disturbances.run_error(command)
        hangs = self._disturbances.run_hangs(command)
        batch = machine.batch = Batch(self.now, work.cost.load_seconds, work.cost.run_seconds, work.moves)
        # who waits for bytes from storage sees them come, whoever asked for them first
        seen = replace(work.cost, storage_bytes=work.cost.storage_bytes + work.waited_bytes)
        costs = zip(shares(seen, len(members)), shares(work.cost, len(members)), strict=True)
        for index, (member, task, (told, own)) in enumerate(zip(members, tasks, costs, strict=True)):
            report = TaskReport(
                task_id=member.task_id,
                attempt=member.attempt,
                worker_id=command.worker_id,
                incarnation=command.incarnation,
                residency=work.moves.after,
                cost=told,
                error=None if kind is None else RunError(kind, "the simulation says so"),
                result_bytes=RESULT_BYTES[task.stage] if kind is None else 0,
            )
            number = _HANGS if hangs else self.post(RunEnded(batch.ends_at, report))
            loaded, cold = (work.adapters_loaded, _cold(work)) if index == 0 else ((), ())
            batch.runs[member] = Run(member, report, own, loaded, cold, number)

    def _stop_run(self, command: StopTask) -> None:
        """That run ends now: a step of the simulation takes no time. Its mates go on. The last one leaves what the
        seconds have bought."""
        machine = self._machines.live.get(command.worker_id)
        if machine is None or machine.batch is None or machine.incarnation != command.incarnation:
            return
        batch, member = machine.batch, Mate(command.task_id, command.attempt)
        run = batch.runs.get(member)
        if run is None or run.leaving or run.number == _HANGS:
            return
        run.leaving = True
        others = [other for other in batch.runs.values() if not other.leaving]
        if others:
            batch.hand_over(run, others[0])
        else:
            unread = machine.host.stop(self.now, command.worker_id)
            batch.cut(self.now, [run], unread)
            if batch.load_part(self.now) < 1.0:  # then nothing came beside it
                machine.residency = half_loaded(batch.moves, batch.load_part(self.now), self._components)
            self.totals.beside_bytes += machine.settle(self.now)
        error = RunError(RunErrorKind.CANCELLED, "stopped")
        report = TaskReport(
            command.task_id, command.attempt, command.worker_id, command.incarnation, machine.residency, error=error
        )
        run.number = self.post(RunEnded(self.now, report))

    def _prefetch(self, command: Prefetch) -> None:
        machine = self._machines.live.get(command.worker_id)
        if machine is not None and machine.incarnation == command.incarnation:
            known = [key for key in command.components if key in self._components]
            machine.host.fetch(self.now, [(key, self._components[key].upload_bytes) for key in known])

    def _upload_ahead(self, command: UploadAhead) -> None:
        machine = self._machines.live.get(command.worker_id)
        if machine is not None and machine.incarnation == command.incarnation:
            self.totals.beside_bytes += machine.settle(self.now)
            tasks = [self._tasks[task_id][0] for task_id in command.task_ids]
            self._machines.bring_ahead(self.now, command, tasks, self._components)

    def _gone(self, at: float, machine: Machine) -> None:
        """The worker is no more, and what ran there has come to nothing."""
        worker_id, batch = machine.gpu.worker_id, machine.batch
        unread = machine.host.stop(at, worker_id)
        if batch is not None:
            batch.share(at)
            batch.cut(at, batch.runs.values(), unread)
            for run in batch.runs.values():
                error = RunError(RunErrorKind.WORKER_LOST, "its worker is gone")
                self._record(at, batch, run, replace(run.report, error=error))
        del self._machines.live[worker_id]

    def _record(self, at: float, batch: Batch, run: Run, report: TaskReport) -> None:
        """Keep what the run was. One that was cut short took the seconds that it had."""
        spec, job_id = self._tasks[report.task_id]
        cost = replace(run.cost, load_seconds=run.load_seconds, run_seconds=run.run_seconds)
        self.totals.count(report.worker_id, cost, run.adapters_loaded, run.cold)
        self.runs.append(
            SimulatedRun(
                task_id=report.task_id,
                job_id=job_id,
                model=model_name(spec.uses[0].component) if spec.uses else "",
                stage=spec.stage,
                worker_id=report.worker_id,
                started_at=batch.began_at,
                loaded_at=min(batch.loaded_at, at),
                ended_at=at,
                load_seconds=cost.load_seconds,
                run_seconds=cost.run_seconds,
                uploaded_bytes=cost.uploaded_bytes,
                streamed_bytes=cost.streamed_bytes,
                storage_bytes=cost.storage_bytes,
                patch_switches=cost.patch_switches,
                adapters=tuple(dict.fromkeys(key for use in spec.uses for key in use.adapters)),
                adapters_loaded=run.adapters_loaded,
                resident=cost.resident,
                batched=cost.batched,
                ended_well=report.error is None,
            )
        )


def _cold(work: Work) -> tuple[Move, ...]:
    """What arrives that was not there with other patches."""
    return tuple(move for move in work.moves.upload if move.component not in work.moves.switched)


#: stands for the incarnation that is live when the loss happens
_WHICHEVER = -1
#: stands for the event of a run that never ends
_HANGS = -1
