"""Simulated cluster: the same core in virtual time, driven by a heap of events. Contains no policy.

Works with any core that answers events with commands: the scheduler of this pool, or one of its peers
(`benchmarks.lab`). Simulated workers plan their residency with a `WorkerMemory`, by default
`pool.weights.plan.eviction_plan.plan` as on real workers, and convert its bytes to seconds; they divide runs as real
ones do (`pool.values.specs.execution_modes`), with the same slowdown. No randomness: variation is passed in
(`Disturbances`), so a run is a function of its arguments.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

from modelpool.pool.values.specs.spec import (
    ComponentKey,
    ComponentSpec,
    JobId,
    RunCost,
    RunError,
    RunErrorKind,
    Stage,
    TaskId,
    TaskReport,
    TaskSpec,
    WorkerId,
)
from modelpool.pool.weights.plan.eviction_plan import Move, Residency
from modelpool.pool.weights.plan.preload_plan import NOTHING_TO_PRELOAD
from modelpool.scheduler.model.gang_times import prior_seconds
from modelpool.scheduler.model.kept_states import task_of_state
from modelpool.scheduler.model.messages import (
    BatchMate,
    CancelRequested,
    Command,
    ComponentsKnown,
    Cordoned,
    DisruptionsAllowed,
    DropWeights,
    EndWorker,
    Event,
    FilesJudged,
    LoadWeights,
    LossCause,
    NodeDraining,
    Outcome,
    PinComponents,
    Prefetch,
    Preload,
    PruneComponents,
    ReleaseResult,
    Remembered,
    ResolveJob,
    RestartRequested,
    ResultLost,
    RevokeTask,
    RunEnded,
    RunInGang,
    RunLink,
    RunTask,
    ScheduleTick,
    StartFailed,
    StartWorker,
    StateKept,
    StopTask,
    Submitted,
    TaskRevoked,
    Tick,
    Uncordoned,
    WeightsLoaded,
    WorkerDown,
    WorkersWanted,
    WorkerUp,
)
from modelpool.scheduler.simulator.batches import BatchRun, RunningBatch, RunSpan, half_loaded
from modelpool.scheduler.simulator.eviction_policies import PlannedMemory, WorkerMemory
from modelpool.scheduler.simulator.faults import Disturbances
from modelpool.scheduler.simulator.hosts import SimulatedNode, StorageReads
from modelpool.scheduler.simulator.machines import Machine, Machines, SimulatedGpu, SimulatedLoad, SimulatedWork
from modelpool.scheduler.simulator.node_supply import NodeSupply
from modelpool.scheduler.simulator.records import SimulatedRun, SimulationTotals, model_name, shares
from modelpool.scheduler.simulator.simulated_gangs import (
    NOTICE_SECONDS,
    GangPart,
    GangSeconds,
    SimulatedGangs,
    members_besides,
)

__all__ = ["RESULT_BYTES", "Core", "SimulatedGpu", "SimulatedNode", "VirtualCluster"]

#: sizes that fill a result cache about as real conditionings, latents and images do
RESULT_BYTES: Mapping[Stage, int] = {
    Stage.ENCODE: 1 << 20,
    Stage.SAMPLE: 1 << 18,
    Stage.DECODE: 3 << 20,
    Stage.OPERATE: 3 << 20,
}
#: size of the state of a sampling run: the latent and an earlier prediction
STATE_BYTES = 2 << 18


class Core(Protocol):
    """The deciding core: events in, commands out, under the rules that `scheduler.core.state` states for its shell."""

    def handle(self, event: Event) -> list[Command]:
        """Apply the event; return the commands, in order."""


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
        checkpoint_seconds: float | None = None,
        supply: NodeSupply | None = None,
        gang_seconds: GangSeconds = prior_seconds,
    ) -> None:
        """With `checkpoint_seconds`, sampling runs save their state that often, at the end of a step. `supply` provides
        the nodes of groups, `gang_seconds` the times of runs on several GPUs. Raises UnusableField if a GPU is on a
        machine that is not in `nodes`, or a name is used twice."""
        self.core = core
        self.now = 0.0
        self.totals = SimulationTotals()
        #: every ended run, in order of the ends
        self.runs: list[SimulatedRun] = []
        self.submitted: dict[JobId, Submitted] = {}
        self.outcomes: dict[JobId, Outcome] = {}
        self.errors: dict[JobId, RunError] = {}
        #: seconds from submission to resolution
        self.latency_seconds: dict[JobId, float] = {}
        self.held: set[TaskId] = set()
        #: tasks with a state that is held: the steps done
        self.states: dict[TaskId, int] = {}
        #: steps that were computed, by task
        self.steps_computed: dict[TaskId, int] = {}
        #: every command with its time
        self.commands: list[tuple[float, Command]] = []
        self._machines = Machines(gpus, nodes, memory or PlannedMemory(), patch_switch_seconds)
        self._disturbances = disturbances or Disturbances()
        self._gangs = SimulatedGangs(gang_seconds)
        self._checkpoint_seconds = checkpoint_seconds
        self.supply = supply or NodeSupply()
        #: pending starts of workers of groups, with the number of the event that ends each
        self._starting: dict[WorkerId, int] = {}
        #: component -> copies that ended with a node that was given up, and were not loaded again since
        self._given_up: dict[ComponentKey, int] = {}
        self._components: dict[ComponentKey, ComponentSpec] = {}
        #: each task with the first job that named it
        self._tasks: dict[TaskId, tuple[TaskSpec, JobId]] = {}
        self._heap: list[tuple[float, int, Event]] = []
        self._posted = 0
        #: of the latest start of each worker of a group
        self._incarnations: dict[WorkerId, int] = {}

    @property
    def gpus(self) -> tuple[SimulatedGpu, ...]:
        """All GPUs, live or not."""
        return tuple(self._machines.gpus.values())

    @property
    def storage(self) -> StorageReads:
        """Bytes read from the storage of all machines so far, including prefetches. May be more than runs read: a
        prefetch belongs to no run."""
        return self._machines.storage(self.now)

    @property
    def residencies(self) -> dict[WorkerId, Residency]:
        """The residency of each live worker, after its current run if there is one."""
        return {worker_id: machine.residency_after for worker_id, machine in self._machines.live.items()}

    def start(self, components: Iterable[ComponentSpec], at: float = 0.0) -> None:
        """Announce sizes and request every worker."""
        self.post(ComponentsKnown(at, tuple(components)))
        self.post(WorkersWanted(at, tuple(self._machines.gpus)))  # also begins the evaluations of groups

    def post(self, event: Event) -> int:
        """Schedule `event` at its time; events of one time keep the order of posting. Returns its number."""
        self._posted += 1
        heapq.heappush(self._heap, (event.at, self._posted, event))
        return self._posted

    def lose(self, worker_id: WorkerId, at: float) -> None:
        """Lose the incarnation of the worker that is live at that time."""
        self.post(WorkerDown(at, worker_id, _WHICHEVER, "lost in the simulation"))

    def run(self, after_each: Callable[[CoreT_co], None] | None = None) -> None:
        """Run until no events are left; `after_each` is called with the core after every event."""
        while self._heap:
            at, number, event = heapq.heappop(self._heap)
            actual = self._happen(at, event, number)
            if actual is None:
                continue
            self.now = at
            self.totals.events += 1
            if isinstance(actual, RunEnded):
                self._start_queued(actual.report.worker_id)
            for command in self.core.handle(actual):
                self.commands.append((self.now, command))
                self._execute(command)
            self.supply.sweep(at)
            if after_each is not None:
                after_each(self.core)

    def _happen(self, at: float, event: Event, number: int) -> Event | None:
        """Apply the event to the simulated cluster; None if another event has superseded it."""
        match event:
            case RunEnded():
                return self._end_run(at, event, number)
            case WorkerUp(worker=spec):
                if self._starting.get(spec.worker_id, number) != number:
                    return None  # its start was withdrawn
                self._starting.pop(spec.worker_id, None)
                self._machines.up(spec)
            case StartFailed():
                if self._starting.get(event.worker_id, number) != number:
                    return None
                self._starting.pop(event.worker_id, None)
                self.supply.leave(event.worker_id)
            case NodeDraining():
                return self._drain(event)
            case WorkerDown():
                machine = self._machines.live.get(event.worker_id)
                if machine is None or event.incarnation not in (_WHICHEVER, machine.incarnation):
                    return None
                self._gone(at, machine)
                return WorkerDown(event.at, event.worker_id, machine.incarnation, event.reason, event.cause)
            case Submitted(job=job):
                self.submitted.setdefault(job.job_id, event)
                for task in job.tasks:
                    first = self._tasks.get(task.task_id)
                    self._tasks[task.task_id] = (task, job.job_id if first is None else first[1])
                self.held.update(job.given)
            case ComponentsKnown(components=components):
                self._components.update((spec.key, spec) for spec in components)
            case StateKept():
                return self._checkpoint(event, number)
            case WeightsLoaded():
                machine = self._machines.live.get(event.worker_id)
                if machine is None or machine.load is None or machine.load.number != number:
                    return None  # the worker was lost, or a run ended the load earlier
                self._end_load(at, machine, machine.load)
                return replace(event, residency=machine.residency)
            case ResultLost(task_id=task_id):
                owner = task_of_state(task_id)
                if owner is None:
                    self.held.discard(task_id)
                else:
                    self.states.pop(owner, None)
            case PruneComponents() | CancelRequested() | WorkersWanted() | PinComponents():
                pass
            case FilesJudged() | Remembered() | Tick() | DisruptionsAllowed():
                pass
            case Cordoned() | Uncordoned() | RestartRequested():
                pass
        return event

    def _end_run(self, at: float, event: RunEnded, number: int) -> RunEnded | None:
        """End a run of the simulated cluster; None if it ended earlier."""
        report = event.report
        machine = self._machines.live.get(report.worker_id)
        batch = None if machine is None else machine.batch
        run = None if batch is None else batch.runs.get(BatchMate(report.task_id, report.attempt))
        if machine is None or batch is None or run is None or run.number != number:
            return None  # the worker was lost, or the run stopped earlier
        batch.share(at)
        if report.has_state:
            batch.cut(at, [run], machine.host.stop(at, report.worker_id))
            met_seconds = min(run.cost.meeting_seconds, run.load_seconds)
            cost = replace(
                run.cost,
                load_seconds=run.load_seconds - met_seconds,
                run_seconds=run.run_seconds + met_seconds,
                meeting_seconds=met_seconds,
            )
            report = replace(report, cost=cost)
            self.states[report.task_id] = max(report.step, self.states.get(report.task_id, 0))
        if not batch.rank:
            self._count_steps(at, run, report.step if report.has_state else None)
        del batch.runs[run.member]
        if not batch.runs:
            came_bytes = machine.settle(at)
            self.totals.preloaded_bytes += came_bytes
            machine.batch = None
            if came_bytes or machine.residency is not report.residency:
                cost = replace(report.cost, ahead_bytes=came_bytes)
                report = replace(report, residency=machine.residency, cost=cost)
        self._record(at, batch, run, report)
        if report.error is None and not batch.rank:
            self.held.add(report.task_id)
        return RunEnded(event.at, report)

    def _execute(self, command: Command) -> None:
        match command:
            case RunTask(enters=True) if self._machines.live[command.worker_id].batch is not None:
                self._join_run(command)
            case RunTask(queued=True):
                self._machines.live[command.worker_id].queue.append(command)
            case RunTask():
                self._start_run(command)
            case RunInGang():
                self._start_part(command)
            case RevokeTask():
                self._revoke(command)
            case ReleaseResult(task_id=task_id):
                owner = task_of_state(task_id)
                if owner is None:
                    self.held.discard(task_id)
                else:
                    self.states.pop(owner, None)
            case ResolveJob():
                assert command.job_id not in self.outcomes, f"{command.job_id} was resolved twice"
                assert command.result is None or command.result in self.held, f"{command.job_id}: no such result"
                self.outcomes[command.job_id] = command.outcome
                self.latency_seconds[command.job_id] = self.now - self.submitted[command.job_id].at
                if command.error is not None:
                    self.errors[command.job_id] = command.error
            case StartWorker():
                self._start_worker(command)
            case StopTask(keep_state=True):
                self._pause_run(command)
            case StopTask():
                self._stop_run(command)
            case ScheduleTick():
                self.post(Tick(self.now + command.after_seconds))
            case Prefetch():
                self._prefetch(command)
            case Preload():
                self._preload(command)
            case LoadWeights():
                self._start_load(command)
            case DropWeights():
                machine = self._machines.live.get(command.worker_id)
                if machine is not None and machine.batch is None and machine.load is None:
                    machine.residency = Residency(machine.residency.capacity_bytes)
            case EndWorker():
                machine = self._machines.live.get(command.worker_id)
                if machine is not None and machine.incarnation == command.incarnation:
                    if command.why is not None:
                        for entry in machine.residency.entries:
                            self._given_up[entry.component] = self._given_up.get(entry.component, 0) + 1
                    self._gone(self.now, machine)
                elif command.worker_id in self._starting:
                    self._starting[command.worker_id] = _WITHDRAWN
                    self.supply.leave(command.worker_id)

    def _drain(self, event: NodeDraining) -> Event | None:
        """A notice of the provider; at its deadline the node is taken back, with its workers."""
        if event.at < event.deadline:
            return event if self.supply.exists(event.node) or not self.supply.groups else None
        taken = self.supply.taken_back(event.node, event.at)
        if taken is not None:
            for worker_id in sorted(taken[0]):
                if worker_id in self._starting:
                    self._starting[worker_id] = self.post(
                        StartFailed(event.at, worker_id, self._incarnations[worker_id], "its node is gone", taken[1])
                    )
                else:
                    self.post(WorkerDown(event.at, worker_id, _WHICHEVER, "its node is gone", taken[1]))
        return None

    def _start_in_group(self, command: StartWorker) -> None:
        """Start a worker on a node of its group, new or not."""
        worker_id, at = command.worker_id, self.now + command.delay_seconds
        self._incarnations[worker_id] = command.incarnation
        placed = self.supply.place(worker_id, command.group, self.now)
        if placed is None:
            reason = f"no node of {command.group} within {self.supply.conditions.timeout_seconds:.0f} s"
            failed = StartFailed(
                at + self.supply.conditions.timeout_seconds,
                worker_id,
                command.incarnation,
                reason,
                LossCause.NODE_LOST,
            )
            self._starting[worker_id] = self.post(failed)
            return
        node, is_new = placed
        if is_new:
            self._machines.add_node(self.supply.machine(node))
            if node.reclaim is not None:
                end = node.launched_at + node.reclaim.after_seconds
                if node.reclaim.notice_seconds:
                    notice_at = max(node.launched_at, end - node.reclaim.notice_seconds)
                    self.post(NodeDraining(notice_at, node.node, end, "taken back by the provider"))
                self.post(NodeDraining(end, node.node, end, "taken back by the provider"))
        gpu = self.supply.gpu(node, worker_id)
        self._machines.add_gpu(gpu)
        if self._disturbances.start_fails(command):
            failed = StartFailed(at + gpu.start_seconds, worker_id, command.incarnation, "simulated failure")
            self._starting[worker_id] = self.post(failed)
            return
        up_at = max(node.ready_at, at + (gpu.start_seconds if command.incarnation > 1 else 0.0))
        self._starting[worker_id] = self.post(WorkerUp(up_at, self._machines.spec(worker_id, command.incarnation)))

    def _start_worker(self, command: StartWorker) -> None:
        if command.group:
            self._start_in_group(command)
            return
        gpu = self._machines.gpus[command.worker_id]
        at = self.now + command.delay_seconds + gpu.start_seconds
        if self._disturbances.start_fails(command):
            self.post(StartFailed(at, command.worker_id, command.incarnation, "simulated failure"))
            return
        self.post(WorkerUp(at, self._machines.spec(command.worker_id, command.incarnation)))

    def _start_run(self, command: RunTask, has_lost_inputs: bool = False) -> None:
        """Start a run. Without its inputs it fails, and takes as long."""
        machine = self._machines.live[command.worker_id]
        members = (BatchMate(command.task_id, command.attempt), *command.batch_mates)
        tasks = [self._tasks[member.task_id][0] for member in members]
        assert machine.incarnation == command.incarnation, f"{command} goes to a worker that is gone"
        assert machine.batch is None, f"{command} goes to a worker that is busy"
        if machine.load is not None and machine.load.ends_at > self.now:
            self._cut_load(machine, machine.load)
        unheld = [need for task in tasks for need in task.needs if need not in self.held]
        assert has_lost_inputs or not unheld, f"{command} reads {unheld}, which are not held"
        assert all(task.uses == tasks[0].uses for task in tasks), f"{command}: mates with other weights"
        first_step, steps = 0, _steps_of(tasks[0])
        if command.resume:
            found = {self.states.get(member.task_id) for member in members}
            assert None not in found, f"{command} resumes, and no state is held"
            assert len(found) == 1, f"{command}: mates at different steps"
            first_step = found.pop() or 0
            tasks = [replace(task, run_seconds=task.run_seconds * (steps - first_step) / steps) for task in tasks]
        work = self._machines.work(self.now, command, tasks, self._components, self._disturbances.run_factor(command))
        kind = RunErrorKind.INPUT_LOST if has_lost_inputs else self._disturbances.run_error(command)
        hangs = self._disturbances.run_hangs(command)
        batch = machine.batch = RunningBatch(self.now, work.cost.load_seconds, work.cost.run_seconds, work.moves)
        if command.is_open:
            batch.rows, batch.step_seconds = tasks[0].batch_size, work.cost.run_seconds / max(1, steps - first_step)
        span = RunSpan(self.now, batch.loaded_at, work.cost.run_seconds, first_step, steps)
        # bytes from storage arrive for every run that waits for them, whichever requested them first
        reported_cost = work.cost
        if work.waited_bytes:
            reported_cost = replace(work.cost, storage_bytes=work.cost.storage_bytes + work.waited_bytes)
        parts = max(len(members), tasks[0].batch_size)  # padding is charged to nobody
        costs = zip(shares(reported_cost, parts), shares(work.cost, parts), strict=True)
        for index, (member, task, (reported, charged)) in enumerate(zip(members, tasks, costs, strict=False)):
            report = TaskReport(
                task_id=member.task_id,
                attempt=member.attempt,
                worker_id=command.worker_id,
                incarnation=command.incarnation,
                residency=work.moves.after,
                cost=reported,
                error=None if kind is None else RunError(kind, "simulated failure"),
                result_bytes=RESULT_BYTES[task.stage] if kind is None else 0,
            )
            number = _HANGS if hangs else self.post(RunEnded(batch.ends_at, report))
            loaded, cold = (work.adapters_loaded, _cold(work)) if index == 0 else ((), ())
            batch.runs[member] = BatchRun(member, report, charged, loaded, cold, number, span)
            if self._checkpoint_seconds is not None and steps and not hangs:
                self._post_checkpoint(span, report)

    def _join_run(self, command: RunTask) -> None:
        """Let a task join the pass of its worker."""
        machine, (task, _) = self._machines.live[command.worker_id], self._tasks[command.task_id]
        batch, member = machine.batch, BatchMate(command.task_id, command.attempt)
        assert machine.incarnation == command.incarnation, f"{command} goes to a worker that is gone"
        assert batch is not None, f"{command} joins nothing"
        others = [self._tasks[other.task_id][0] for other in batch.runs]
        assert len(others) < batch.rows, f"{command} finds no free row"
        assert {other.pass_key for other in others} == {task.pass_key}, (
            f"{command}: others in the pass are of another kind"
        )
        assert self.held.issuperset(task.needs), f"{command} reads what is not held"
        first_step, steps = 0, _steps_of(task)
        if command.resume:
            first_step = self.states[command.task_id]
            task = replace(task, run_seconds=task.run_seconds * (steps - first_step) / steps)
        seconds = self._machines.row_seconds(command, task, self._disturbances.run_factor(command))
        span = batch.join(self.now, seconds, first_step, steps)
        kind, hangs = self._disturbances.run_error(command), self._disturbances.run_hangs(command)
        cost = shares(RunCost(run_seconds=seconds, resident=True), batch.rows)[0]
        report = TaskReport(
            task_id=member.task_id,
            attempt=member.attempt,
            worker_id=command.worker_id,
            incarnation=command.incarnation,
            residency=batch.moves.after,
            cost=cost,
            error=None if kind is None else RunError(kind, "simulated failure"),
            result_bytes=RESULT_BYTES[task.stage] if kind is None else 0,
        )
        number = _HANGS if hangs else self.post(RunEnded(span.ends_at, report))
        batch.runs[member] = BatchRun(member, report, cost, (), (), number, span)
        if self._checkpoint_seconds is not None and steps and not hangs:
            self._post_checkpoint(span, report)

    def _start_part(self, command: RunInGang) -> None:
        """One member of a gang gets its part of a run, which starts with the last of them."""
        run = command.run
        machine, task = self._machines.live[run.worker_id], self._tasks[run.task_id][0]
        assert machine.incarnation == run.incarnation, f"{command} goes to a worker that is gone"
        assert machine.batch is None, f"{command} goes to a worker that is busy"
        assert self.held.issuperset(task.needs), f"{command} reads what is not held"
        assert not run.resume or run.task_id in self.states, f"{command} resumes, and no state is held"
        if machine.load is not None and machine.load.ends_at > self.now:
            self._cut_load(machine, machine.load)
        steps = task.uses[0].passes if task.stage is Stage.SAMPLE and task.uses else 0
        first_step = self.states[run.task_id] if run.resume else 0
        remaining = (steps - first_step) / steps if steps else 1.0
        task = replace(task, run_seconds=task.run_seconds * remaining)
        factor = self._disturbances.run_factor(run)
        work = self._machines.work(self.now, run, [task], self._components, factor, len(command.members))
        parts = self._gangs.join(GangPart(command, machine, work))
        if not parts:
            return
        kinds = [self._disturbances.run_error(part.command.run) for part in parts]
        is_hanging = any(self._disturbances.run_hangs(part.command.run) for part in parts)
        for part, cost, kind in zip(parts, self._gangs.costs(parts, task, remaining), kinds, strict=True):
            if kind is None and any(kinds):
                kind = RunErrorKind.GANG_BROKEN
            batch = part.machine.batch = RunningBatch(
                self.now,
                cost.load_seconds + cost.meeting_seconds,
                cost.run_seconds - cost.meeting_seconds,
                part.work.moves,
                gang=command.members,
                rank=part.command.rank,
            )
            span = RunSpan(self.now, batch.loaded_at, batch.run_seconds, first_step, steps)
            one = part.command.run
            report = TaskReport(
                task_id=one.task_id,
                attempt=one.attempt,
                worker_id=one.worker_id,
                incarnation=one.incarnation,
                residency=part.work.moves.after,
                cost=cost,
                error=None if kind is None else RunError(kind, "simulated failure"),
                result_bytes=RESULT_BYTES[task.stage] if kind is None and not part.command.rank else 0,
            )
            member = BatchMate(one.task_id, one.attempt)
            number = _HANGS if is_hanging else self.post(RunEnded(batch.ends_at, report))
            batch.runs[member] = BatchRun(
                member, report, cost, part.work.adapters_loaded, _cold(part.work), number, span
            )
            if self._checkpoint_seconds is not None and steps and not is_hanging and not part.command.rank:
                self._post_checkpoint(span, report)

    def _break_gang(self, at: float, lost: Machine, batch: RunningBatch) -> None:
        """The other members of a gang notice that one is lost, and end with the state of the last complete step."""
        for member in members_besides(batch.gang, lost):
            machine = self._machines.live.get(member.worker_id)
            other = None if machine is None else machine.batch
            if machine is None or other is None or other.gang != batch.gang:
                continue
            for run in other.runs.values():
                if run.leaving:
                    continue
                run.leaving, span = True, run.span
                step = 0 if not span.steps or at < span.loaded_at else span.next_step(at)[0] - 1
                step = step if step > span.first_step else 0
                error = RunError(RunErrorKind.GANG_BROKEN, f"{lost.gpu.worker_id} does not answer")
                report = replace(
                    run.report, error=error, result_bytes=STATE_BYTES if step else 0, step=step, steps=span.steps
                )
                run.number = self.post(RunEnded(at + NOTICE_SECONDS, report))

    def _start_queued(self, worker_id: WorkerId) -> None:
        """Start the next queued task of a worker after its run. One that follows a run without a result does not
        start."""
        machine = self._machines.live.get(worker_id)
        if machine is None or machine.batch is not None:
            return
        while machine.queue:
            command = machine.queue.pop(0)
            if self.held.issuperset(command.follows):
                break
            self.post(TaskRevoked(self.now, worker_id, command.incarnation, command.task_id, command.attempt))
        else:
            return
        has_lost = command.resume and command.task_id not in self.states
        has_lost = has_lost or any(need not in self.held for need in self._tasks[command.task_id][0].needs)
        resume = command.resume and not has_lost
        self._start_run(replace(command, queued=False, link=RunLink.NONE, resume=resume, follows=()), has_lost)

    def _revoke(self, command: RevokeTask) -> None:
        """Take back a queued task of a worker: it has not started."""
        machine = self._machines.live.get(command.worker_id)
        wanted = (command.incarnation, command.task_id, command.attempt)
        for place, queued in enumerate(() if machine is None else machine.queue):
            if machine is not None and (queued.incarnation, queued.task_id, queued.attempt) == wanted:
                del machine.queue[place]
                self.post(
                    TaskRevoked(self.now, command.worker_id, command.incarnation, command.task_id, command.attempt)
                )
                return

    def _stop_run(self, command: StopTask) -> None:
        """Stop that run now: a simulated step takes no time. Its mates continue. The last one leaves the residency that
        the elapsed seconds allow."""
        machine = self._machines.live.get(command.worker_id)
        if machine is None or machine.batch is None or machine.incarnation != command.incarnation:
            return
        batch, member = machine.batch, BatchMate(command.task_id, command.attempt)
        run = batch.runs.get(member)
        if run is None or run.leaving or run.number == _HANGS:
            return
        run.leaving = True
        others = [other for other in batch.runs.values() if not other.leaving]
        if others:
            batch.hand_over(run, others[0])
            self._pause_batch(batch)
        else:
            unread = machine.host.stop(self.now, command.worker_id)
            batch.cut(self.now, [run], unread)
            if batch.load_part(self.now) < 1.0:  # otherwise nothing was preloaded during it
                machine.residency = half_loaded(batch.moves, batch.load_part(self.now), self._components)
            self.totals.preloaded_bytes += machine.settle(self.now)
        error = RunError(RunErrorKind.CANCELLED, "stopped")
        report = TaskReport(
            command.task_id, command.attempt, command.worker_id, command.incarnation, machine.residency, error=error
        )
        run.number = self.post(RunEnded(self.now, report))

    def _pause_run(self, command: StopTask) -> None:
        """Stop that run with its state at the end of its step, once all tasks of the batch should stop. Stages without
        steps, and runs in their last step, continue to their end."""
        machine = self._machines.live.get(command.worker_id)
        if machine is None or machine.batch is None or machine.incarnation != command.incarnation:
            return
        batch = machine.batch
        run = batch.runs.get(BatchMate(command.task_id, command.attempt))
        if run is None or run.leaving or run.pausing or run.number == _HANGS or not run.span.steps:
            return
        run.pausing = True
        if batch.rows:
            self._pause(run)
        else:
            self._pause_batch(batch)

    def _pause_batch(self, batch: RunningBatch) -> None:
        """End the batch at its next step, if all of its tasks should stop and any with its state."""
        if not all(other.pausing or other.leaving for other in batch.runs.values()):
            return
        for other in batch.runs.values():
            if not other.leaving:
                self._pause(other)

    def _pause(self, run: BatchRun) -> None:
        """End a run at its next step with its state, unless that is its last."""
        span = run.span
        step, at = span.next_step(self.now)
        if step < span.steps:
            error = RunError(RunErrorKind.CANCELLED, f"stopped after step {step} of {span.steps}")
            report = replace(run.report, error=error, result_bytes=STATE_BYTES, step=step, steps=span.steps)
            run.number = self.post(RunEnded(at, report))

    def _post_checkpoint(self, span: RunSpan, report: TaskReport) -> None:
        """Schedule the next checkpoint of a run, if it is still running by then."""
        assert self._checkpoint_seconds is not None, "no checkpoints"
        step, at = span.next_step(max(self.now, span.loaded_at) + self._checkpoint_seconds)
        if step < span.steps:
            worker_id, incarnation, task_id = report.worker_id, report.incarnation, report.task_id
            self.post(StateKept(at, worker_id, incarnation, task_id, report.attempt, step, span.steps, STATE_BYTES))

    def _checkpoint(self, event: StateKept, number: int) -> StateKept | None:
        """Hold the state of a run that is still running, and schedule its next checkpoint."""
        machine = self._machines.live.get(event.worker_id)
        if machine is None or machine.batch is None or machine.incarnation != event.incarnation:
            return None
        run = machine.batch.runs.get(BatchMate(event.task_id, event.attempt))
        if run is None or run.leaving:
            return None
        self.now = event.at
        self.states[event.task_id] = event.step
        self._post_checkpoint(run.span, run.report)
        return event

    def _count_steps(self, at: float, run: BatchRun, stopped_at: int | None) -> None:
        """Count the steps that a run computed completely until now."""
        span = run.span
        if not span.steps:
            return
        done = stopped_at
        if done is None:
            done = span.steps if run.report.error is None and at >= span.ends_at else span.next_step(at)[0] - 1
        task_id = run.report.task_id
        self.steps_computed[task_id] = self.steps_computed.get(task_id, 0) + max(0, done - span.first_step)

    def _prefetch(self, command: Prefetch) -> None:
        machine = self._machines.live.get(command.worker_id)
        if machine is not None and machine.incarnation == command.incarnation:
            known = [key for key in command.components if key in self._components]
            machine.host.fetch(self.now, [(key, self._components[key].upload_bytes) for key in known])

    def _preload(self, command: Preload) -> None:
        machine = self._machines.live.get(command.worker_id)
        if machine is not None and machine.incarnation == command.incarnation:
            self.totals.preloaded_bytes += machine.settle(self.now)
            tasks = [self._tasks[task_id][0] for task_id in command.task_ids]
            self._machines.start_preload(self.now, command, tasks, self._components)

    def _start_load(self, command: LoadWeights) -> None:
        machine = self._machines.live[command.worker_id]
        assert machine.batch is None, f"{command} goes to a worker that is busy"
        assert machine.load is None, f"{command} goes to a worker that is loading"
        load = self._machines.start_load(self.now, command, self._components)
        ended = WeightsLoaded(load.ends_at, command.worker_id, command.incarnation, machine.residency)
        machine.load = replace(load, number=self.post(ended))

    def _end_load(self, at: float, machine: Machine, load: SimulatedLoad) -> None:
        """What has arrived until now stays."""
        uploaded_bytes = load.uploaded_bytes(at)
        machine.residency = load.plan.after(machine.residency, uploaded_bytes)
        machine.load = None
        self.totals.pinned_bytes += uploaded_bytes
        self.totals.pinned_seconds += at - load.began_at

    def _cut_load(self, machine: Machine, load: SimulatedLoad) -> None:
        """A run ends the load of its worker, which is answered at once."""
        self._end_load(self.now, machine, load)
        machine.host.stop(self.now, machine.gpu.worker_id)
        ended = WeightsLoaded(self.now, machine.gpu.worker_id, machine.incarnation, machine.residency)
        machine.load = SimulatedLoad(NOTHING_TO_PRELOAD, self.now, self.now, self.post(ended))

    def _gone(self, at: float, machine: Machine) -> None:
        """The worker is lost, and its runs with it."""
        worker_id, batch = machine.gpu.worker_id, machine.batch
        unread = machine.host.stop(at, worker_id)
        if batch is not None:
            if batch.gang:
                self._break_gang(at, machine, batch)
            batch.share(at)
            batch.cut(at, batch.runs.values(), unread)
            for run in batch.runs.values():
                self._count_steps(at, run, None)
                error = RunError(RunErrorKind.WORKER_LOST, "its worker is gone")
                self._record(at, batch, run, replace(run.report, error=error))
        del self._machines.live[worker_id]
        self.supply.leave(worker_id)

    def _record(self, at: float, batch: RunningBatch, run: BatchRun, report: TaskReport) -> None:
        """Record the run. One that was cut short took the elapsed seconds."""
        spec, job_id = self._tasks[report.task_id]
        cost = run.cost
        if (cost.load_seconds, cost.run_seconds) != (run.load_seconds, run.run_seconds):
            cost = replace(cost, load_seconds=run.load_seconds, run_seconds=run.run_seconds)
        self.totals.count(report.worker_id, cost, run.adapters_loaded, run.cold)
        for move in run.cold if self._given_up else ():
            if self._given_up.get(move.component):
                self._given_up[move.component] -= 1
                self.totals.reloads += 1
        self.runs.append(
            SimulatedRun(
                task_id=report.task_id,
                job_id=job_id,
                model=model_name(spec.uses[0].component) if spec.uses else "",
                stage=spec.stage,
                worker_id=report.worker_id,
                started_at=run.span.began_at,
                loaded_at=min(run.span.loaded_at, at),
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


def _steps_of(task: TaskSpec) -> int:
    """The steps of a sampling task; 0 for other stages."""
    return task.uses[0].passes if task.stage is Stage.SAMPLE and task.uses else 0


def _cold(work: SimulatedWork) -> tuple[Move, ...]:
    """Arriving bytes that were not there with other patches."""
    return tuple(move for move in work.moves.upload if move.component not in work.moves.switched)


#: means the incarnation that is live when the loss happens
_WHICHEVER = -1
#: means the event of a run that never ends
_HANGS = -1
#: means the event of a start that was withdrawn
_WITHDRAWN = -1
