"""The same core under virtual time: a heap of events instead of a cluster. Holds no policy of its own.

Simulated workers keep their residency with `pool.residency.plan`, as real ones do, and charge its bytes as seconds;
they divide runs as real ones do (`pool.division`), and charge what that adds.
Knows no chance: what varies is handed in (`Disturbances`), so a run is a function of its arguments.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from pool.division import choose_division
from pool.outlook import NO_OUTLOOK, Outlook
from pool.residency import Residency, ResidencyPlan, needed_bytes, plan
from pool.spec import (
    ComponentKey,
    ComponentSpec,
    Division,
    JobId,
    RunCost,
    RunError,
    RunErrorKind,
    Rung,
    Stage,
    TaskId,
    TaskReport,
    TaskSpec,
    WorkerId,
    WorkerSpec,
)
from scheduler.messages import (
    CancelAsked,
    Command,
    ComponentsKnown,
    EndWorker,
    Event,
    LookAgain,
    Outcome,
    ReleaseResult,
    ResolveJob,
    RunEnded,
    RunTask,
    StartFailed,
    StartWorker,
    StopTask,
    Submitted,
    Tick,
    WorkerDown,
    WorkersWanted,
    WorkerUp,
)
from scheduler.state import SchedulerState

#: sizes that fill a result cache about as real conditionings, latents and pictures do
RESULT_BYTES: Mapping[Stage, int] = {Stage.ENCODE: 1 << 20, Stage.SAMPLE: 1 << 18, Stage.DECODE: 3 << 20}


@dataclass(frozen=True, slots=True)
class SimulatedGpu:
    """What a simulated worker runs on. `speed` divides the prior run seconds of a task."""

    worker_id: WorkerId
    capacity_bytes: int
    link_bytes_per_second: float
    speed: float = 1.0
    start_seconds: float = 1.0


@dataclass(frozen=True, slots=True)
class Disturbances:
    """What goes wrong or varies, as functions of what is going on. By default nothing does.

    start_fails  this start comes to nothing
    run_factor   called once a run, in order: its seconds are multiplied by this
    run_error    how this run ends, None for well
    run_hangs    this run never ends by itself, nor when it is asked to stop
    """

    start_fails: Callable[[StartWorker], bool] = lambda command: False
    run_factor: Callable[[], float] = lambda: 1.0
    run_error: Callable[[RunTask], RunErrorKind | None] = lambda command: None
    run_hangs: Callable[[RunTask], bool] = lambda command: False


@dataclass(slots=True)
class _Run:
    """A task on a simulated worker."""

    command: RunTask
    report: TaskReport
    #: identifies its event on the heap; a newer number replaces it
    number: int


@dataclass(slots=True)
class _Machine:
    """A live simulated worker."""

    gpu: SimulatedGpu
    incarnation: int
    residency: Residency
    run: _Run | None = None


@dataclass(slots=True)
class SimulationTotals:
    """What the simulated workers did; counted by them, not by the core."""

    events: int = 0
    runs: int = 0
    uploaded_bytes: int = 0
    streamed_bytes: int = 0
    patch_switches: int = 0
    runs_resident: int = 0
    load_seconds: float = 0.0
    run_seconds: float = 0.0
    #: (worker, component) -> bytes brought to it, but for those that came again with other patches
    cold_bytes: dict[tuple[WorkerId, ComponentKey], int] = field(default_factory=dict)


class VirtualCluster:
    """A `SchedulerState` and simulated workers. Post events, then `run`."""

    def __init__(
        self,
        state: SchedulerState,
        gpus: Iterable[SimulatedGpu],
        disturbances: Disturbances | None = None,
        patch_switch_seconds: float = 0.05,
    ) -> None:
        self.state = state
        self.now = 0.0
        self.totals = SimulationTotals()
        self.outcomes: dict[JobId, Outcome] = {}
        self.errors: dict[JobId, RunError] = {}
        #: seconds from submission to resolution
        self.latency_seconds: dict[JobId, float] = {}
        self.held: set[TaskId] = set()
        #: every command with the time it was given
        self.commands: list[tuple[float, Command]] = []
        self._gpus = {gpu.worker_id: gpu for gpu in gpus}
        self._disturbances = disturbances or Disturbances()
        self._patch_switch_seconds = patch_switch_seconds
        self._components: dict[ComponentKey, ComponentSpec] = {}
        self._tasks: dict[TaskId, TaskSpec] = {}
        self._submitted_at: dict[JobId, float] = {}
        self._machines: dict[WorkerId, _Machine] = {}
        self._heap: list[tuple[float, int, Event]] = []
        self._posted = 0

    def start(self, components: Iterable[ComponentSpec], at: float = 0.0) -> None:
        """Announce sizes and ask for every worker."""
        self.post(ComponentsKnown(at, tuple(components)))
        self.post(WorkersWanted(at, tuple(self._gpus)))

    def post(self, event: Event) -> int:
        """Let `event` happen at its time; events of one time in the order posted. Returns its number."""
        self._posted += 1
        heapq.heappush(self._heap, (event.at, self._posted, event))
        return self._posted

    def lose(self, worker_id: WorkerId, at: float) -> None:
        """Let whatever incarnation of the worker is live at that time be lost."""
        self.post(WorkerDown(at, worker_id, _WHICHEVER, "lost in the simulation"))

    def run(self, after_each: Callable[[SchedulerState], None] | None = None) -> None:
        """Until nothing is left to happen; `after_each` sees the state after every event."""
        while self._heap:
            self.now, number, event = heapq.heappop(self._heap)
            actual = self._happen(event, number)
            if actual is None:
                continue
            self.totals.events += 1
            for command in self.state.handle(actual):
                self.commands.append((self.now, command))
                self._execute(command)
            if after_each is not None:
                after_each(self.state)

    def _happen(self, event: Event, number: int) -> Event | None:
        """What the event does to the simulated world; None when it is overtaken by another."""
        match event:
            case RunEnded(report=report):
                machine = self._machines.get(report.worker_id)
                if machine is None or machine.run is None or machine.run.number != number:
                    return None  # the worker was lost, or the run stopped earlier
                machine.run = None
                if report.error is None:
                    self.held.add(report.task_id)
            case WorkerUp(worker=spec):
                gpu = self._gpus[spec.worker_id]
                self._machines[spec.worker_id] = _Machine(gpu, spec.incarnation, Residency(spec.capacity_bytes))
            case WorkerDown():
                machine = self._machines.get(event.worker_id)
                if machine is None or event.incarnation not in (_WHICHEVER, machine.incarnation):
                    return None
                del self._machines[event.worker_id]
                return WorkerDown(event.at, event.worker_id, machine.incarnation, event.reason)
            case Submitted(job=job):
                self._submitted_at.setdefault(job.job_id, event.at)
                self._tasks.update((task.task_id, task) for task in job.tasks)
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
                self.latency_seconds[command.job_id] = self.now - self._submitted_at[command.job_id]
                if command.error is not None:
                    self.errors[command.job_id] = command.error
            case StartWorker():
                self._start_worker(command)
            case StopTask():
                self._stop_run(command)
            case LookAgain():
                self.post(Tick(self.now + command.after_seconds))
            case EndWorker():
                machine = self._machines.get(command.worker_id)
                if machine is not None and machine.incarnation == command.incarnation:
                    del self._machines[command.worker_id]

    def _start_worker(self, command: StartWorker) -> None:
        gpu = self._gpus[command.worker_id]
        at = self.now + command.delay_seconds + gpu.start_seconds
        if self._disturbances.start_fails(command):
            self.post(StartFailed(at, command.worker_id, command.incarnation, "the simulation says so"))
            return
        spec = WorkerSpec(
            gpu.worker_id, command.incarnation, gpu.capacity_bytes, gpu.link_bytes_per_second, "simulated"
        )
        self.post(WorkerUp(at, spec))

    def _start_run(self, command: RunTask) -> None:
        machine = self._machines[command.worker_id]
        spec = self._tasks[command.task_id]
        assert machine.incarnation == command.incarnation, f"{command} goes to a worker that is gone"
        assert machine.run is None, f"{command} goes to a worker that is busy"
        unheld = [need for need in spec.needs if need not in self.held]
        assert not unheld, f"{command} reads {unheld}, which nobody holds"
        before = Residency(machine.gpu.capacity_bytes) if command.fresh else machine.residency
        way = choose_division(spec, machine.gpu.capacity_bytes - needed_bytes(spec.uses, 0))
        outlook = Outlook(command.needed_next) if command.needed_next else NO_OUTLOOK
        moves = plan(before, spec.uses, self._components, way.activation_bytes, outlook=outlook)
        machine.residency = moves.after
        cost = self._cost(machine.gpu, spec, moves, way, command.rungs)
        self._count(command.worker_id, moves, cost)
        kind = self._disturbances.run_error(command)
        report = TaskReport(
            task_id=command.task_id,
            attempt=command.attempt,
            worker_id=command.worker_id,
            incarnation=command.incarnation,
            residency=moves.after,
            cost=cost,
            error=None if kind is None else RunError(kind, "the simulation says so"),
            result_bytes=RESULT_BYTES[spec.stage] if kind is None else 0,
        )
        hangs = self._disturbances.run_hangs(command)
        ends = RunEnded(self.now + cost.load_seconds + cost.run_seconds, report)
        machine.run = _Run(command, report, _HANGS if hangs else self.post(ends))

    def _stop_run(self, command: StopTask) -> None:
        """The run ends now: a step of the simulation takes no time."""
        machine = self._machines.get(command.worker_id)
        if machine is None or machine.run is None or machine.incarnation != command.incarnation:
            return
        run = machine.run
        if (run.command.task_id, run.command.attempt) != (command.task_id, command.attempt) or run.number == _HANGS:
            return
        error = RunError(RunErrorKind.CANCELLED, "stopped")
        report = TaskReport(
            command.task_id, command.attempt, command.worker_id, command.incarnation, run.report.residency, error=error
        )
        run.number = self.post(RunEnded(self.now, report))

    def _cost(
        self, gpu: SimulatedGpu, spec: TaskSpec, moves: ResidencyPlan, way: Division, rungs: tuple[Rung, ...]
    ) -> RunCost:
        load_seconds = moves.upload_bytes / gpu.link_bytes_per_second
        load_seconds += len(moves.switched) * self._patch_switch_seconds
        run_seconds = spec.run_seconds * way.slowdown / gpu.speed * self._disturbances.run_factor()
        return RunCost(
            load_seconds=load_seconds,
            run_seconds=run_seconds + moves.streamed_bytes / gpu.link_bytes_per_second,
            uploaded_bytes=moves.upload_bytes,
            streamed_bytes=moves.streamed_bytes,
            peak_bytes=moves.after.used_bytes + way.activation_bytes,
            resident=moves.all_resident,
            patch_switches=len(moves.switched),
            division=way if way in spec.divisions else None,
            rungs=rungs,
        )

    def _count(self, worker_id: WorkerId, moves: ResidencyPlan, cost: RunCost) -> None:
        totals = self.totals
        totals.runs += 1
        totals.uploaded_bytes += cost.uploaded_bytes
        totals.streamed_bytes += cost.streamed_bytes
        totals.patch_switches += cost.patch_switches
        totals.runs_resident += cost.resident
        totals.load_seconds += cost.load_seconds
        totals.run_seconds += cost.run_seconds
        for move in moves.upload:
            if move.component not in moves.switched:
                key = (worker_id, move.component)
                totals.cold_bytes[key] = totals.cold_bytes.get(key, 0) + move.bytes


#: stands for the incarnation that is live when the loss happens
_WHICHEVER = -1
#: stands for the event of a run that never ends
_HANGS = -1
