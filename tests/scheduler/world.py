"""A small world for the scheduler's tests: components of a few bytes, jobs over them, and a shell that keeps count.

`Shell` does what `scheduler.core.state` asks of a shell, in a dictionary instead of a cluster, and asserts at every
command that the core keeps its side: what it starts is free, what it reads is held, what it resolves was not resolved
before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf

from modelpool.pool.values.specs.eviction_hints import EvictionHints
from modelpool.pool.values.specs.execution_modes import choose_mode
from modelpool.pool.values.specs.spec import (
    ANY_FILE,
    NO_NODE,
    NO_WORKER,
    ComponentKey,
    ComponentSpec,
    ComponentUse,
    ExecutionMode,
    FileVerdict,
    JobId,
    JobSpec,
    JudgedFile,
    NodeId,
    OomStep,
    Role,
    RunCost,
    RunError,
    RunErrorKind,
    Stage,
    TaskId,
    TaskReport,
    TaskSpec,
    WorkerId,
    WorkerSpec,
)
from modelpool.pool.weights.plan.eviction_plan import Residency, Resident, needed_bytes, plan
from modelpool.pool.weights.plan.preload_plan import RunningLease, plan_preload
from modelpool.scheduler.core.invariants import validate
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.kept_states import state_id, task_of_state
from modelpool.scheduler.model.messages import (
    BatchMate,
    CancelRequested,
    Command,
    ComponentsKnown,
    CopyResult,
    Cordoned,
    DropWeights,
    EndWorker,
    Event,
    FilesJudged,
    LoadWeights,
    LossCause,
    NodeDraining,
    Outcome,
    PinComponents,
    Preload,
    ReleaseResult,
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

TEXT, PAINT, DRAW, VAE = (ComponentKey(k) for k in ("text", "paint", "draw", "vae"))
COMPONENTS = (
    ComponentSpec(TEXT, Role.TEXT_ENCODER, 4, 4),
    ComponentSpec(PAINT, Role.DIFFUSION_MODEL, 12, 6),
    ComponentSpec(DRAW, Role.DIFFUSION_MODEL, 10, 10),
    ComponentSpec(VAE, Role.VAE, 3, 3),
)
SPECS = {spec.key: spec for spec in COMPONENTS}
#: holds everything at once
ROOMY = 64
#: of every sampling run
STEPS = 4


def encode(
    prompt: str, activation_bytes: int = 1, patch: str = "", run_seconds: float = 1.0, batch_size: int = 1
) -> TaskSpec:
    use = ComponentUse(TEXT, 1, patch, 2 if patch else 0)
    together = "e" if batch_size == 1 else f"e{batch_size}"
    task_id = TaskId(f"{together}:{prompt}{patch}")
    return TaskSpec(
        task_id, Stage.ENCODE, (use,), activation_bytes, run_seconds, together=together, batch_size=batch_size
    )


def sample(
    *needs: TaskId, model: ComponentKey = PAINT, seed: int = 0, activation_bytes: int = 4, patch: str = "",
    run_seconds: float = 10.0, divisions: tuple[ExecutionMode, ...] = (), batch_size: int = 1,
    degrees: tuple[int, ...] = (1,),
) -> TaskSpec:  # fmt: skip
    use = ComponentUse(model, 2, patch, 5 if patch else 0, passes=STEPS)
    parts = "/" if divisions else ""
    together = "s" if batch_size == 1 else f"s{batch_size}" if run_seconds == 10.0 else f"s{batch_size} {run_seconds}"
    shared = "" if degrees == (1,) else f"x{'x'.join(map(str, degrees))}"
    task_id = TaskId(f"{together}:{model}{patch}:{seed}:{activation_bytes}{parts}{shared}:{'+'.join(needs)}")
    return TaskSpec(
        *(task_id, Stage.SAMPLE, (use,), activation_bytes, run_seconds, needs, divisions),
        together=together, batch_size=batch_size, degrees=degrees,
        pass_key=f"p{batch_size}{model}{patch}" if batch_size > 1 else "",
    )  # fmt: skip


def decode(need: TaskId, activation_bytes: int = 2, run_seconds: float = 2.0) -> TaskSpec:
    task_id, use = TaskId(f"d:{need}"), ComponentUse(VAE, 1)
    return TaskSpec(task_id, Stage.DECODE, (use,), activation_bytes, run_seconds, (need,), together="d")


def image(
    job_id: str, prompt: str = "cat", model: ComponentKey = PAINT, seed: int = 0, priority: int = 0, patch: str = "",
    activation_bytes: int = 4,
) -> JobSpec:  # fmt: skip
    """Encode, sample and decode of one image."""
    first = encode(prompt, patch=patch)
    second = sample(first.task_id, model=model, seed=seed, patch=patch, activation_bytes=activation_bytes)
    third = decode(second.task_id)
    return JobSpec(JobId(job_id), (first, second, third), third.task_id, priority=priority)


def alone(job_id: str, task: TaskSpec, priority: int = 0, given: tuple[TaskId, ...] = ()) -> JobSpec:
    """A job of one task."""
    return JobSpec(JobId(job_id), (task,), task.task_id, given, priority)


@dataclass(slots=True)
class Running:
    """A run that the shell owes an answer for."""

    #: as if the task ran alone
    command: RunTask
    residency: Residency
    stop_requested: bool = False
    #: asked to stop with its state
    pause_requested: bool = False
    #: how many tasks its run began with
    together: int = 1
    #: the others of them that have not ended
    others: list[Running] = field(default_factory=list)
    #: whether all that it reads is what was expected: results, its state, and files
    is_right: bool = True
    #: a file that it reads was changed meanwhile, or is not the expected one
    is_doomed: bool = False
    #: its place in the gang that shares the run; None if it runs alone
    rank: int | None = None
    #: the members of that gang
    degree: int = 1

    @property
    def members(self) -> list[Running]:
        """All of its run that have not ended."""
        return [self, *self.others]


@dataclass
class Shell:
    """Executes commands, keeps count, and checks the core's side of the contract after every event."""

    config: SchedulerConfig = field(default_factory=lambda: SchedulerConfig(story_length=None))
    at: float = 0.0
    jobs: dict[JobId, JobSpec] = field(default_factory=dict)
    resolved: dict[JobId, ResolveJob] = field(default_factory=dict)
    cancelled: set[JobId] = field(default_factory=set)
    held: set[TaskId] = field(default_factory=set)
    #: the steps after which the states were saved that are held, by task
    states: dict[TaskId, int] = field(default_factory=dict)
    #: results that were to be copied
    copied: list[TaskId] = field(default_factory=list)
    #: live workers with their weights
    up: dict[WorkerId, tuple[int, Residency]] = field(default_factory=dict)
    starting: dict[tuple[WorkerId, int], StartWorker] = field(default_factory=dict)
    started: set[tuple[WorkerId, int]] = field(default_factory=set)
    #: starts that were ended; their answers may still come
    given_up: set[tuple[WorkerId, int]] = field(default_factory=set)
    running: dict[WorkerId, Running] = field(default_factory=dict)
    #: tasks that busy workers start after their runs, in order; none is empty
    queued: dict[WorkerId, list[RunTask]] = field(default_factory=dict)
    #: those of them that the core asked back, without an answer so far; none is empty
    asked_back: dict[WorkerId, list[RunTask]] = field(default_factory=dict)
    #: those that will not start, of which the core does not know yet
    revoked: list[RunTask] = field(default_factory=list)
    #: results that live workers made and still have
    made: dict[WorkerId, set[TaskId]] = field(default_factory=dict)
    #: of each worker that has come up
    nodes: dict[WorkerId, NodeId] = field(default_factory=dict)
    #: loads that the shell owes an answer for; of a worker that is up
    loading: dict[WorkerId, LoadWeights] = field(default_factory=dict)
    #: reports of members of gangs that have no result: all but the first members
    parts: list[TaskReport] = field(default_factory=list)
    #: reports of runs that were answered, or with a worker that was lost
    old: list[TaskReport] = field(default_factory=list)
    tasks: dict[TaskId, TaskSpec] = field(default_factory=dict)
    #: those of the latest event
    _commands: list[Command] = field(default_factory=list)
    #: when Ticks are due that were asked for
    ticks: list[float] = field(default_factory=list)
    #: whether workers begin tasks while they decode
    overlaps_decode: bool = False
    #: whether workers know no hash of a file before they `judge` it; otherwise they know all of them at once
    verifies: bool = False
    #: files that are not the expected ones, by machine
    bad: set[tuple[NodeId, ComponentKey]] = field(default_factory=set)
    #: by worker and component: the number of the state of the file, and whether the worker has judged it
    files: dict[tuple[WorkerId, ComponentKey], tuple[int, bool]] = field(default_factory=dict)
    #: results, and states of tasks, that are not what was expected
    wrong: set[TaskId] = field(default_factory=set)
    wrong_states: set[TaskId] = field(default_factory=set)
    #: states of files that workers had used before they were changed
    changed: list[tuple[WorkerId, int, JudgedFile]] = field(default_factory=list)
    #: workers and machines that the operator has cordoned or drained
    cordoned: set[str] = field(default_factory=set)
    #: workers, machines, and restarts: when runs there must have ended
    leave_by: dict[str, float] = field(default_factory=dict)
    #: results that drivers provided
    provided: set[TaskId] = field(default_factory=set)
    _states_seen: int = 0
    #: workers that the core believed to be idle before the latest event
    _idle_before: set[WorkerId] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.state = SchedulerState(self.config)
        self.feed(ComponentsKnown(self.tick(), COMPONENTS))

    def tick(self, seconds: float = 1.0) -> float:
        """Let time pass; the new time."""
        self.at += seconds
        return self.at

    @property
    def tick_due(self) -> float | None:
        """When the next Tick comes; None when none was asked for."""
        return min(self.ticks, default=None)

    def tick_comes(self) -> list[Command]:
        """The first of the Ticks that were asked for."""
        due = min(self.ticks)
        self.ticks.remove(due)
        self.at = max(self.at, due)
        return self.feed(Tick(self.at))

    def feed(self, event: Event) -> list[Command]:
        """Hand an event to the core, check and carry out what it says, check the core."""
        workers = self.state.worker_table.workers.values()
        self._idle_before = {worker.worker_id for worker in workers if worker.is_idle and worker.loading is None}
        commands = self._commands = self.state.handle(event)
        for command in commands:
            sent = command.run if isinstance(command, RunInGang) else command
            assert not isinstance(sent, RunTask | LoadWeights) or not self.is_kept_off(sent.worker_id), command
            self._execute(command)
        for command in commands:
            sent = command.run if isinstance(command, RunInGang) else command
            if isinstance(sent, RunTask) and not sent.queued:
                believed = self.state.worker_table.workers[sent.worker_id].residency
                assert believed == self.running[sent.worker_id].residency, f"{sent}: other weights"
        validate(self.state)
        assert set(self.state.demand.results.held) == self.held, "the core believes in other results than the shell"
        kept = {name: task.kept.step for name, task in self.state.demand.tasks.items() if task.kept is not None}
        assert kept == self.states, "the core believes in other states than the shell"
        assert set(self.state.demand.jobs) == set(self.jobs) - set(self.resolved), "other jobs are live"
        return commands

    # ---- what a driver and a cluster do --------------------------------------------------------------------------

    def want(self, *names: str) -> list[Command]:
        return self.feed(WorkersWanted(self.tick(), tuple(WorkerId(n) for n in names)))

    def workers(self, **capacities: int) -> None:
        """Have exactly these workers, and all of them up."""
        self.want(*capacities)
        for name, capacity_bytes in capacities.items():
            if WorkerId(name) not in self.up:
                self.come_up(name, capacity_bytes)

    def come_up(
        self, name: str, capacity_bytes: int = ROOMY, link: float = 4.0, node: str = "",
        entries: tuple[Resident, ...] | None = None, device: str = "",
    ) -> list[Command]:  # fmt: skip
        """Answer the StartWorker that is on its way; with `entries`, by a worker of an earlier controller that holds
        these weights."""
        key = next(k for k in self.starting if k[0] == name)
        return self.introduce(name, key[1], capacity_bytes, link, node, entries, device)

    def introduce(
        self, name: str, incarnation: int, capacity_bytes: int = ROOMY, link: float = 4.0, node: str = "",
        entries: tuple[Resident, ...] | None = None, device: str = "",
    ) -> list[Command]:  # fmt: skip
        """Let a WorkerUp arrive, asked for or not."""
        worker_id = WorkerId(name)
        self.starting.pop((worker_id, incarnation), None)
        latest = self.state.worker_table.incarnations.get(worker_id, 0)
        if worker_id in self.state.worker_table.workers and incarnation >= latest:
            self._gone(worker_id)
            self.up[worker_id] = (incarnation, Residency(capacity_bytes, entries or ()))
            self.nodes[worker_id] = NodeId(node)
        spec = WorkerSpec(
            worker_id, incarnation, capacity_bytes, link, device, NodeId(node), overlaps_decode=self.overlaps_decode
        )
        residency = None if entries is None else Residency(capacity_bytes, entries)
        return self.feed(WorkerUp(self.tick(), spec, residency))

    def fail_start(self, name: str) -> list[Command]:
        key = next(k for k in self.starting if k[0] == name)
        del self.starting[key]
        return self.feed(StartFailed(self.tick(), key[0], key[1], "out of luck"))

    def lose(self, name: str, cause: LossCause = LossCause.CRASH) -> list[Command]:
        incarnation, _ = self.up[WorkerId(name)]
        self._gone(WorkerId(name))
        return self.feed(WorkerDown(self.tick(), WorkerId(name), incarnation, "power cut", cause))

    def drain(self, node: str, seconds: float) -> list[Command]:
        """A notice that the machine ends after this time."""
        return self.feed(NodeDraining(self.tick(), NodeId(node), self.at + seconds, "spot notice"))

    def cordon(self, place: str, seconds: float | None = None) -> list[Command]:
        """An operator cordons a worker or a machine; with `seconds` it is drained by then."""
        at = self.tick()
        node, worker_id = (NodeId(place), NO_WORKER) if place.startswith("n") else (NO_NODE, WorkerId(place))
        self.cordoned.add(place)
        self.leave_by[place] = inf if seconds is None else at + seconds
        return self.feed(Cordoned(at, node, worker_id, None if seconds is None else at + seconds))

    def is_kept_off(self, worker_id: WorkerId) -> bool:
        """Whether an operator wants nothing new on a worker."""
        spec = self.state.worker_table.workers[worker_id].spec
        return worker_id in self.cordoned or (spec is not None and spec.node in self.cordoned)

    def is_time_up(self, worker_id: WorkerId) -> bool:
        """Whether the deadline has passed by which the operator wants the runs of a worker to have ended."""
        # the core may have forgotten one that is not wanted any more
        places = (worker_id, self.nodes.get(worker_id, NodeId("")), f"restart {worker_id}")
        return any(self.leave_by.get(place, inf) <= self.at for place in places)

    def may_share(self, task_id: TaskId) -> bool:
        """Whether several workers may share the run of a task."""
        return self.tasks[task_id].degrees != (1,)

    def _is_left_alone(self, run: Running) -> bool:
        """Whether another member of the gang of a run has ended."""
        now = [one.command for one in self.running.values() if one.rank is not None]
        number = (run.command.task_id, run.command.attempt)
        return run.rank is not None and [(one.task_id, one.attempt) for one in now].count(number) < run.degree

    @property
    def is_deadline_next(self) -> bool:
        """Whether an operator's deadline passes with the next event: whatever that is, it ends what runs there."""
        return any(self.at < due <= self.at + 1.0 for due in self.leave_by.values())

    def uncordon(self, place: str) -> list[Command]:
        self.cordoned.discard(place)
        return self.feed(Uncordoned(self.tick(), NodeId(place), WorkerId(place)))

    def restart(self, name: str, seconds: float = 30.0) -> list[Command]:
        at, worker = self.tick(), self.state.worker_table.workers.get(WorkerId(name))
        if worker is not None and worker.live and worker.wanted:  # else the order is ignored, and an earlier one stands
            self.leave_by[f"restart {name}"] = at + seconds
        return self.feed(RestartRequested(at, WorkerId(name), at + seconds))

    def lacks(self, name: str, *components: ComponentKey) -> list[Command]:
        """Let the run there end because its machine lacks these files."""
        run = self.running[WorkerId(name)]
        self._tell_earlier(run.command)
        if self.running.get(WorkerId(name)) is not run:
            return []  # those events took time, and a deadline by which it had to end passed
        del self.running[WorkerId(name)]
        files = dict(self.tasks[run.command.task_id].files)
        error = RunError(
            RunErrorKind.FILE_UNAVAILABLE,
            f"/models/{components[0]}: no such file",
            components=components,
            file_names=tuple(files.get(key, ANY_FILE) for key in components),
        )
        report = _report(run.command, self.up[WorkerId(name)][1], RunCost(), error)
        self.up[WorkerId(name)] = (run.command.incarnation, report.residency)
        self._start_queued(WorkerId(name))
        self.old.append(report)
        return self.report(report)

    def replace_file(self, node: str, component: ComponentKey, is_bad: bool) -> None:
        """Somebody writes a file of a machine, the expected one or another. Runs that read it notice at their end."""
        (self.bad.add if is_bad else self.bad.discard)((NodeId(node), component))
        for worker_id in self.up:
            if self._node_of(worker_id) == node:
                known = self.files.pop((worker_id, component), None)
                if known is not None and not known[1]:
                    file = JudgedFile(known[0], FileVerdict.CHANGED, (component,), f"/models/{component}")
                    self.changed.append((worker_id, self.up[worker_id][0], file))
                run = self.running.get(worker_id)
                for member in [] if run is None else run.members:
                    if component in self._read_by(member.command.task_id):
                        member.is_doomed = True

    def judge(self, name: str) -> list[Command]:
        """A worker has found out about all the files that it has used."""
        worker_id, node = WorkerId(name), self._node_of(name)
        told = [file for known, _, file in self.changed if known == name]
        self.changed = [one for one in self.changed if one[0] != name]
        for (other, component), (number, is_judged) in list(self.files.items()):
            if other == name and not is_judged:
                verdict = FileVerdict.DIFFERS if (node, component) in self.bad else FileVerdict.RIGHT
                told.append(JudgedFile(number, verdict, (component,), f"/models/{component}", "a1", "b2"))
                self.files[worker_id, component] = (number, True)
        if not told:
            return []
        return self.feed(FilesJudged(self.tick(), worker_id, self.up[worker_id][0], tuple(told)))

    def _node_of(self, name: str) -> NodeId:
        worker = self.state.worker_table.workers.get(WorkerId(name))
        return NodeId("") if worker is None or worker.spec is None else worker.spec.node

    def _read_by(self, task_id: TaskId) -> tuple[ComponentKey, ...]:
        return tuple(use.component for use in self.tasks[task_id].uses)

    def _began(self, run: Running) -> Running:
        """A run begins: whether what it reads is right is decided now, and the worker looks at its files."""
        task_id, worker_id = run.command.task_id, run.command.worker_id
        node = self._node_of(worker_id)
        read = self._read_by(task_id)
        is_bad = any((node, key) in self.bad for key in read)
        state_is_wrong = run.command.resume and task_id in self.wrong_states
        run.is_right = not is_bad and not state_is_wrong and self.wrong.isdisjoint(self.tasks[task_id].needs)
        for key in read if node and self.verifies else ():
            if (worker_id, key) not in self.files:
                self._states_seen += 1
                self.files[worker_id, key] = (self._states_seen, False)
            elif self.files[worker_id, key][1] and (node, key) in self.bad:
                run.is_doomed = True
        return run

    def unverified(self, command: RunTask) -> tuple[int, ...]:
        """The states of files that a run has read, without known hashes."""
        found = [self.files.get((command.worker_id, key)) for key in self._read_by(command.task_id)]
        return tuple(known[0] for known in found if known is not None and not known[1])

    def revoke(self, name: str, place: int = 0) -> None:
        """Take back a task that the core asked back: it will not start. The core does not know yet."""
        asked = self.asked_back[WorkerId(name)]
        command = asked[place % len(asked)]
        _remove(self.asked_back, command)
        _remove(self.queued, command)
        self.revoked.append(command)

    def tell_revoked(self, place: int = 0) -> list[Command]:
        """Tell the core of a task that was taken back."""
        command = self.revoked.pop(place % len(self.revoked))
        return self.feed(
            TaskRevoked(self.tick(), command.worker_id, command.incarnation, command.task_id, command.attempt)
        )

    def _start_queued(self, worker_id: WorkerId) -> None:
        """The run of the worker ended: it starts its next task, whether the core asked that back or not. Ends are told
        in order: if the core believes in a revoked run before the one that ended, it hears of that first."""
        while worker_id in self.queued:
            command = self.queued[worker_id][0]
            _remove(self.queued, command)
            _remove(self.asked_back, command)
            if not self.made.get(worker_id, set()).issuperset(command.follows):
                self.revoked.append(command)
                continue
            self.running[worker_id] = self._began(
                Running(replace(command, queued=False, link=RunLink.NONE, follows=()), self._after(command))
            )
            return

    def _tell_earlier(self, ended: RunTask) -> None:
        """The core hears of revocations before the end of a run that it does not believe in before."""
        while True:
            worker = self.state.worker_table.workers[ended.worker_id]
            found = [place for place, one in enumerate(self.revoked) if one.task_id == worker.task_id]
            if worker.incarnation != ended.incarnation or ended.task_id in worker.task_ids or not found:
                return
            self.tell_revoked(found[0])

    def _after(self, command: RunTask) -> Residency:
        """The weights after the load of a queued task; as before it if it does not fit there any more, or lacks a
        file."""
        spec, now = self.tasks[command.task_id], self.up[command.worker_id][1]
        task, worker = self.state.demand.tasks[command.task_id], self.state.worker_table.workers[command.worker_id]
        node = self.state.costs.nodes.of(worker.spec) if self.state.costs.nodes.lacking else None
        is_missing = node is not None and node.unavailable_of(task.cost_class.files, self.at) is not None
        if is_missing or task.cost_class.needed_bytes > now.capacity_bytes:
            return now
        return plan(now, spec.uses, SPECS, _way(spec, now.capacity_bytes).activation_bytes).after

    def submit_together(self, jobs: Sequence[JobSpec]) -> list[Command]:
        """Submit jobs that follow each other at once; return the commands of all."""
        *first, last = jobs
        return [command for job in first for command in self.submit(job, others_follow=True)] + self.submit(last)

    def submit(
        self, job: JobSpec, waited_seconds: float | None = None, *, others_follow: bool = False
    ) -> list[Command]:
        """Submit a job, which may have waited outside of the core before."""
        self.held.update(job.given)
        self.provided.update(job.given)
        self.wrong.difference_update(job.given)
        self.jobs.setdefault(job.job_id, job)
        self.tasks.update((task.task_id, task) for task in job.tasks)
        now = self.at if self.state.others_follow else self.tick()
        submitted_at = None if waited_seconds is None else now - waited_seconds
        return self.feed(Submitted(now, job, submitted_at, others_follow))

    def pin(self, components: tuple[ComponentKey, ...], replicas: int) -> list[Command]:
        return self.feed(PinComponents(self.tick(), components, replicas))

    def loaded(self, name: str, residency: Residency | None = None, error: RunError | None = None) -> list[Command]:
        """Let the load on this worker end, with this on the GPU, by default all that was planned. During a run, and
        after one, that is not the residency."""
        command = self.loading.pop(WorkerId(name))
        incarnation, now = self.up[WorkerId(name)]
        assert incarnation == command.incarnation
        if residency is None:
            uses = [ComponentUse(key, 0) for key in command.components]
            residency = plan_preload(now, RunningLease(frozenset(command.kept), 0), uses, SPECS, 0).after(now)
        worker = self.state.worker_table.workers[WorkerId(name)]
        is_believed = worker.is_idle and worker.loading is not None and worker.loading.runs == worker.totals.runs
        if is_believed:
            self.up[WorkerId(name)] = (incarnation, residency)
        return self.feed(WeightsLoaded(self.tick(), WorkerId(name), incarnation, residency, error))

    def cancel(self, job_id: str) -> list[Command]:
        self.cancelled.add(JobId(job_id))
        return self.feed(CancelRequested(self.tick(), JobId(job_id)))

    def finish(
        self, name: str, kind: RunErrorKind | None = None, residency: Residency | None = None,
        cost: RunCost | None = None, result_bytes: int = 1, oom_steps: tuple[OomStep, ...] = (), place: int = 0,
        step: int = 0,
    ) -> list[Command]:  # fmt: skip
        """Let the run on this worker end; of a run of several tasks only the one in this place, unless the worker is
        lost with it."""
        worker_id = WorkerId(name)
        self._tell_earlier(self.running[worker_id].command)
        members = self.running.pop(worker_id).members
        run = members.pop(place % len(members))
        command = run.command
        files: tuple[ComponentKey, ...] = ()
        if kind is None and run.is_doomed:
            kind, files = RunErrorKind.FILE_UNAVAILABLE, self._read_by(command.task_id)
        if kind is None and command.task_id not in self.provided and not run.rank:
            (self.wrong.discard if run.is_right else self.wrong.add)(command.task_id)
        if step:
            (self.wrong_states.discard if run.is_right else self.wrong_states.add)(command.task_id)
        after = run.residency if residency is None else residency
        if kind is RunErrorKind.WORKER_LOST:
            self.old += [_report(other.command, other.residency) for other in members]
            members = []
        if members:  # the last of them tells the GPU's weights
            members[0].others = members[1:]
            self.running[worker_id] = members[0]
        else:
            self.up[worker_id] = (command.incarnation, after)
            if kind is RunErrorKind.WORKER_LOST:
                self._unqueue(worker_id)
            if kind is None and not run.rank:
                self.made.setdefault(worker_id, set()).add(command.task_id)
            self._start_queued(worker_id)
        error = None if kind is None else RunError(kind, f"it ended as {kind.value}", "", oom_steps, files)
        told = cost or RunCost()
        told = replace(told, batched=run.together) if told.batched == 1 else told
        report = replace(_report(command, after, told, error, result_bytes), step=step, steps=STEPS if step else 0)
        report = replace(report, unverified=self.unverified(command))
        self.old.append(report)
        if run.rank:
            self.parts.append(report)
        return self.report(report)

    def pause(self, name: str) -> list[Command]:
        """Have the core ask the run of this worker to stop with its state."""
        worker = self.state.worker_table.workers[WorkerId(name)]
        self.state.preemption.pause(worker, "for a test", self.at)
        return self.feed_nothing()

    def feed_nothing(self) -> list[Command]:
        """An event without consequences of its own."""
        return self.feed(ComponentsKnown(self.at, COMPONENTS))

    def stop_at(self, name: str, step: int, place: int = 0) -> list[Command]:
        """Let a run of this worker end with its state after `step` of `STEPS`."""
        run = self.running[WorkerId(name)].members[place % len(self.running[WorkerId(name)].members)]
        assert run.pause_requested, f"nobody asked {run.command.task_id} to stop with its state"
        return self.finish(name, RunErrorKind.CANCELLED, place=place, step=step)

    def save(self, name: str, step: int) -> list[Command]:
        """Let the state of the run on this worker arrive, which continues."""
        run = self.running[WorkerId(name)]
        command = run.command
        if command.provisional or self.unverified(command) or run.is_doomed:
            return []  # its worker saves none
        (self.wrong_states.discard if run.is_right else self.wrong_states.add)(command.task_id)
        self.states[command.task_id] = step
        return self.feed(
            StateKept(
                self.tick(), command.worker_id, command.incarnation, command.task_id, command.attempt, step, STEPS, 1
            )
        )

    def lose_state(self, task_id: TaskId) -> list[Command]:
        self.states.pop(task_id, None)
        return self.feed(ResultLost(self.tick(), state_id(task_id)))

    def report(self, report: TaskReport) -> list[Command]:
        """Let a report arrive, whatever its age."""
        if report.error is None and not any(part is report for part in self.parts):
            self.held.add(report.task_id)
        if report.has_state:
            # a late report may bring a state that is older than the one that is held
            # and members of a gang end at different steps
            self.states[report.task_id] = max(report.step, self.states.get(report.task_id, 0))
        return self.feed(RunEnded(self.tick(), report))

    def lose_result(self, task_id: TaskId) -> list[Command]:
        self.held.discard(task_id)
        return self.feed(ResultLost(self.tick(), task_id))

    def on(self, name: str) -> TaskId | None:
        """The task that runs there."""
        run = self.running.get(WorkerId(name))
        return None if run is None else run.command.task_id

    def outcome(self, job_id: str) -> Outcome | None:
        """How the job ended; None while it is live."""
        ended = self.resolved.get(JobId(job_id))
        return None if ended is None else ended.outcome

    def error(self, job_id: str) -> RunError:
        """Why the job failed."""
        error = self.resolved[JobId(job_id)].error
        assert error is not None
        return error

    # ---- carrying out ---------------------------------------------------------------------------------------------

    def _execute(self, command: Command) -> None:
        match command:
            case StartWorker():
                key = (command.worker_id, command.incarnation)
                assert all(inc < command.incarnation for w, inc in self.started if w == command.worker_id), command
                assert command.worker_id not in self.up, f"{command}: it is up"
                pending = [one for one in self.starting if one[0] == command.worker_id]
                assert self.given_up.issuperset(pending), f"{command}: one is on its way"
                self.started.add(key)
                self.starting[key] = command
            case EndWorker():
                self.given_up.add((command.worker_id, command.incarnation))
                if self.up.get(command.worker_id, (0,))[0] == command.incarnation:
                    run = self.running.get(command.worker_id)
                    members = [] if run is None else run.members
                    # the core may believe in a run that was revoked, and end the worker because that one does not stop
                    is_mistaken = any(one.worker_id == command.worker_id for one in self.revoked)
                    is_asked = is_mistaken or all(one.stop_requested or self._is_left_alone(one) for one in members)
                    is_asked = is_asked or self.is_time_up(command.worker_id)
                    assert is_asked, f"{command}: nobody asked them to stop"
                    self._gone(command.worker_id)
            case RunTask():
                self._run(command)
            case RunInGang():
                self._run_in_gang(command)
            case RevokeTask():
                if self._is_revoked(command.worker_id, command.task_id):
                    return  # it does not start, which the core hears anyway
                found = (command.incarnation, command.task_id, command.attempt)
                queue = {(c.incarnation, c.task_id, c.attempt): c for c in self.queued.get(command.worker_id, ())}
                begun = self.running.get(command.worker_id)
                if begun is not None and begun.command.task_id == command.task_id:
                    believed = self.state.worker_table.workers[command.worker_id].task_id
                    assert believed is not None, f"{command}: it runs that"
                    assert self._is_revoked(command.worker_id, believed), f"{command}: it runs that"
                    return  # the core believes that one before it runs, which was revoked: this one started instead
                assert found in queue, f"{command}: it has {list(queue)} next"
                asked = self.asked_back.setdefault(command.worker_id, [])
                assert queue[found] not in asked, f"{command}: for the second time"
                asked.append(queue[found])
            case StopTask():
                if self._is_revoked(command.worker_id, command.task_id):
                    return  # the core believes that it started
                run = next(r for r in self.running[command.worker_id].members if r.command.task_id == command.task_id)
                expected = replace(
                    run.command, why=None, needed_next=(), fresh=False, oom_steps=(), resume=False, provisional=False,
                    link=RunLink.NONE,
                )  # fmt: skip
                asked = RunTask(command.worker_id, command.incarnation, command.task_id, command.attempt)
                assert expected == asked, f"{command}: it runs {expected}"
                assert not run.stop_requested, f"{command}: for the second time"
                assert not (command.keep_state and run.pause_requested), f"{command}: for the second time"
                run.pause_requested = run.pause_requested or command.keep_state
                run.stop_requested = not command.keep_state
            case Preload():
                self._bring(command)
            case LoadWeights():
                incarnation, residency = self.up[command.worker_id]
                assert incarnation == command.incarnation, f"{command}: that incarnation is gone"
                assert command.worker_id not in self.running, f"{command}: it is busy"
                assert command.worker_id not in self.loading, f"{command}: it loads already"
                assert not set(command.kept) & set(command.components), f"{command}: both kept and loaded"
                assert {entry.component for entry in residency.entries} >= set(command.kept), command
                self.loading[command.worker_id] = command
            case DropWeights():
                incarnation, residency = self.up[command.worker_id]
                assert incarnation == command.incarnation, f"{command}: that incarnation is gone"
                if command.worker_id in self._idle_before:
                    self.up[command.worker_id] = (incarnation, Residency(residency.capacity_bytes))
            case CopyResult():
                owner = task_of_state(command.task_id)
                assert (command.task_id in self.held) if owner is None else (owner in self.states), command
                self.copied.append(command.task_id)
            case ReleaseResult():
                owner = task_of_state(command.task_id)
                if owner is None:
                    is_part = any(
                        part.task_id == command.task_id for part in self.parts
                    )  # a late end of a part has none
                    assert is_part or command.task_id in self.held, f"{command}: nobody holds it"
                    self.held.discard(command.task_id)
                else:
                    assert owner in self.states, f"{command}: nobody holds it"
                    del self.states[owner]
            case ScheduleTick():
                assert command.after_seconds > 0, command
                due = self.at + command.after_seconds
                assert all(due < other for other in self.ticks), f"{command}: one comes by then already"
                self.ticks.append(due)
            case ResolveJob():
                self._resolve(command)

    def _is_revoked(self, worker_id: WorkerId, task_id: TaskId) -> bool:
        """Whether the core believes by mistake that the worker has, or runs, this task."""
        incarnation = self.up[worker_id][0]
        return any((c.worker_id, c.incarnation, c.task_id) == (worker_id, incarnation, task_id) for c in self.revoked)

    def _run(self, command: RunTask, is_part: bool = False) -> None:
        incarnation, residency = self.up[command.worker_id]
        assert incarnation == command.incarnation, f"{command}: that incarnation is gone"
        if command.queued:
            believed = self.state.worker_table.workers[command.worker_id].task_id
            is_mistaken = believed is not None and self._is_revoked(command.worker_id, believed)
            assert is_mistaken or command.worker_id in self.running, f"{command}: after nothing"
            queue = self.queued.get(command.worker_id, [])
            if command.joins and queue:
                assert queue[-1].incarnation == command.incarnation, f"{command}: joins nothing"
                assert queue[-1] in self._commands, f"{command}: joins a call that was sent before"
            assert (command.batch_mates, command.fresh, command.needed_next) == ((), False, ()), command
            self._check_start(BatchMate(command.task_id, command.attempt), command)
            self.queued[command.worker_id] = [*queue, command]
            if command.worker_id not in self.running:
                self._start_queued(command.worker_id)
            return
        if command.enters:
            self._enter(command)
            return
        assert command.worker_id not in self.running, f"{command}: it is busy"
        assert not command.is_open or self.tasks[command.task_id].pass_key, f"{command}: nothing can join"
        assert command.why is not None, f"{command}: no reason"
        members = [BatchMate(command.task_id, command.attempt), *command.batch_mates]
        assert len({batch_mate.task_id for batch_mate in members}) == len(members), command
        for batch_mate in () if is_part else members:
            self._check_start(batch_mate, command)
        spec = self.tasks[command.task_id]
        assert len(members) <= (spec.batch_size if spec.batch_size > 1 else self.config.batch_limit), command
        before = Residency(residency.capacity_bytes) if command.fresh else residency
        mode = choose_mode(spec, residency.capacity_bytes - needed_bytes(spec.uses, 0))
        assert len(set(command.needed_next)) == len(command.needed_next), f"{command}: told twice"
        hints = EvictionHints(command.needed_next)
        moves = plan(before, spec.uses, SPECS, mode.activation_bytes, hints=hints)
        if command.batch_mates:
            assert not mode.tile, f"{command}: in parts"
            assert not mode.batch, f"{command}: in parts"
            shared_bytes = spec.multiple(len(members)) * mode.activation_bytes
            shared = plan(before, spec.uses, SPECS, shared_bytes, hints=hints)
            assert shared == moves, f"{command}: mates cost {shared} instead of {moves}"
        alone = replace(command, batch_mates=())
        runs = [
            Running(replace(alone, task_id=m.task_id, attempt=m.attempt), moves.after, together=len(members))
            for m in members
        ]
        runs = [self._began(run) for run in runs]
        runs[0].others = runs[1:]
        self.running[command.worker_id] = runs[0]

    def _enter(self, command: RunTask) -> None:
        """A task joins the pass that its worker runs."""
        run, spec = self.running[command.worker_id], self.tasks[command.task_id]
        assert all(one.command.is_open for one in run.members), f"{command}: joins what nobody may join"
        keys = {self.tasks[one.command.task_id].pass_key for one in run.members}
        assert keys == {spec.pass_key} != {""}, f"{command}: joins {keys}"
        assert len(run.members) < spec.batch_size, f"{command}: finds no row"
        assert not all(one.stop_requested or one.pause_requested for one in run.members), f"{command}: they all stop"
        assert command.worker_id not in self.queued, f"{command}: others are behind the pass"
        assert (command.batch_mates, command.fresh, command.needed_next, command.queued) == ((), False, (), False)
        self._check_start(BatchMate(command.task_id, command.attempt), command)
        run.others.append(self._began(Running(command, run.residency, together=1 + len(run.members))))

    def _run_in_gang(self, command: RunInGang) -> None:
        """One part of a shared run: the first as a run of its own, the others with the same inputs."""
        run, place = command.run, command.members[command.rank]
        assert (run.worker_id, run.incarnation) == (place.worker_id, place.incarnation), f"{command}: another's part"
        assert len({member.worker_id for member in command.members}) == len(command.members), command
        assert len(command.members) in self.tasks[run.task_id].degrees, f"{command}: too many, or too few"
        assert len({self._node_of(member.worker_id) for member in command.members}) == 1, f"{command}: on two machines"
        assert (run.queued, run.batch_mates, run.joins, run.follows) == (False, (), False, ()), command
        if command.rank:
            others = [self.running[member.worker_id] for member in command.members[: command.rank]]
            assert all(one.command.task_id == run.task_id for one in others), f"{command}: the first ones run others"
            assert all(one.command.attempt == run.attempt for one in others), f"{command}: another attempt"
        self._run(run, is_part=command.rank > 0)
        self.running[run.worker_id].rank, self.running[run.worker_id].degree = command.rank, len(command.members)

    def _bring(self, command: Preload) -> None:
        """Weights come beside a run, as far as its time goes. Tasks that are told of wait; what the run holds stays."""
        core_runs = self.state.worker_table.workers[command.worker_id].task_id
        if core_runs is not None and self._is_revoked(command.worker_id, core_runs):
            return  # for a run that the core believes in
        run, worker = self.running[command.worker_id], self.state.worker_table.workers[command.worker_id]
        assert run.command.incarnation == command.incarnation, f"{command}: that incarnation is gone"
        assert command.task_ids, f"{command}: for nothing"
        assert len(set(command.task_ids)) == len(command.task_ids), f"{command}: told twice"
        spec, capacity_bytes = self.tasks[run.command.task_id], run.residency.capacity_bytes
        working_bytes = _way(spec, capacity_bytes).activation_bytes * spec.multiple(run.together) + needed_bytes(
            spec.uses, 0
        )
        assert worker.loaded_at is not None, f"{command}: beside a run that streams"
        assert worker.expected_end is not None, f"{command}: beside a run of unknown length"
        at, hints, there = max(self.at, worker.loaded_at), EvictionHints(command.needed_next), run.residency
        kept = {use.component for use in spec.uses}.union(command.kept)
        for task_id in command.task_ids:
            task = self.tasks[task_id]
            assert not self.state.demand.tasks[task_id].on_worker, f"{command}: {task_id} runs"
            held = RunningLease(frozenset(kept), working_bytes)
            ahead = plan_preload(there, held, task.uses, SPECS, _way(task, capacity_bytes).activation_bytes, hints)
            at += ahead.switches * self.config.patch_switch_seconds
            there = ahead.after(there, int((worker.expected_end - at) * worker.link_bytes_per_second))
            at += ahead.upload_bytes / worker.link_bytes_per_second
            kept.update(use.component for use in task.uses)
        assert there != run.residency, f"{command}: nothing comes of it"
        for use in spec.uses:
            assert there.of(use.component) == run.residency.of(use.component), f"{command}: the run needs that"
        for member in run.members:
            member.residency = there

    def _check_start(self, batch_mate: BatchMate, command: RunTask) -> None:
        """A task may start, by itself or in the run of `command`."""
        spec, first = self.tasks[batch_mate.task_id], self.tasks[command.task_id]
        step = self.states.get(batch_mate.task_id) if command.resume else None
        assert command.resume == (batch_mate.task_id in self.states), f"{command}: {batch_mate} has another state"
        assert not command.resume or step == self.states[command.task_id], f"{command}: {batch_mate} is at another step"
        # others than the first of an earlier gang may still be at it when the result was lost
        assert not any(
            one.command.task_id == batch_mate.task_id and not one.rank
            for r in self.running.values()
            for one in r.members
        ), command
        assert all(one.task_id != batch_mate.task_id for queue in self.queued.values() for one in queue), command
        line = [one.command for r in self.running.values() for one in r.members]
        line += self.queued.get(command.worker_id, [])
        in_front = {one.task_id for one in (*line, *self.revoked) if one.worker_id == command.worker_id}
        assert command.queued or not command.follows, f"{command}: follows nothing"
        assert set(command.follows) == set(spec.needs) - self.held, f"{command}: inputs of {batch_mate} are not held"
        assert in_front.issuperset(command.follows), f"{command}: {in_front} are in front of it"
        assert batch_mate.task_id not in self.held, f"{command}: the result of {batch_mate} is there"
        assert (spec.uses, spec.activation_bytes, spec.together, spec.run_seconds) == (
            first.uses, first.activation_bytes, first.together, first.run_seconds,
        ), f"{command}: {batch_mate} does not go with it"  # fmt: skip

    def _resolve(self, command: ResolveJob) -> None:
        job = self.jobs[command.job_id]
        assert command.job_id not in self.resolved, f"{command}: for the second time"
        assert (command.error is not None) == (command.outcome is Outcome.FAILED), command
        if command.outcome is Outcome.SUCCEEDED:
            assert command.result == job.wanted, command
            assert command.result in self.held, f"{command}: its result is gone"
            assert command.result not in self.wrong, f"{command}: its result is wrong"
        else:
            assert command.result is None, command
        if command.outcome is Outcome.CANCELLED:
            assert command.job_id in self.cancelled, f"{command}: nobody asked"
        self.resolved[command.job_id] = command

    def _unqueue(self, worker_id: WorkerId) -> None:
        """The worker is gone: its next task will not start there, and nobody says so."""
        self.queued.pop(worker_id, None)
        self.asked_back.pop(worker_id, None)

    def _gone(self, worker_id: WorkerId) -> None:
        """The worker and what it ran; its report may still be on the way."""
        self.up.pop(worker_id, None)
        self.made.pop(worker_id, None)
        self.loading.pop(worker_id, None)
        self.files = {key: known for key, known in self.files.items() if key[0] != worker_id}
        self.changed = [one for one in self.changed if one[0] != worker_id]
        self._unqueue(worker_id)
        run = self.running.pop(worker_id, None)
        self.old += [_report(one.command, one.residency) for one in ([] if run is None else run.members)]
        if run is not None and run.rank:
            self.parts.append(self.old[-1])


def _remove(commands: dict[WorkerId, list[RunTask]], command: RunTask) -> None:
    """Take a command out of its worker's, if it is there."""
    found = [one for one in commands.get(command.worker_id, ()) if one is not command]
    if found:
        commands[command.worker_id] = found
    else:
        commands.pop(command.worker_id, None)


def _way(task: TaskSpec, capacity_bytes: int) -> ExecutionMode:
    return choose_mode(task, capacity_bytes - needed_bytes(task.uses, 0))


def _report(
    run: RunTask, after: Residency, cost: RunCost | None = None, error: RunError | None = None, result_bytes: int = 1
) -> TaskReport:
    return TaskReport(
        run.task_id, run.attempt, run.worker_id, run.incarnation, after, cost or RunCost(), error, result_bytes
    )
