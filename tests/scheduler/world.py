"""A small world for the scheduler's tests: components of a few bytes, jobs over them, and a shell that keeps count.

`Shell` does what `scheduler.state` asks of a shell, in a dictionary instead of a cluster, and asserts at every command
that the core keeps its side: what it starts is free, what it reads is held, what it resolves was not resolved before.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from pool.division import choose_division
from pool.outlook import Outlook
from pool.residency import Residency, needed_bytes, plan
from pool.spec import (
    ComponentKey,
    ComponentSpec,
    ComponentUse,
    Division,
    JobId,
    JobSpec,
    Role,
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
from scheduler.config import SchedulerConfig
from scheduler.invariants import validate
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
    ResultLost,
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


def encode(prompt: str, activation_bytes: int = 1, patch: str = "", run_seconds: float = 1.0) -> TaskSpec:
    use = ComponentUse(TEXT, 1, patch, 2 if patch else 0)
    return TaskSpec(TaskId(f"e:{prompt}{patch}"), Stage.ENCODE, (use,), activation_bytes, run_seconds)


def sample(
    *needs: TaskId, model: ComponentKey = PAINT, seed: int = 0, activation_bytes: int = 4, patch: str = "",
    run_seconds: float = 10.0, divisions: tuple[Division, ...] = (),
) -> TaskSpec:  # fmt: skip
    use = ComponentUse(model, 2, patch, 5 if patch else 0, passes=4)
    parts = "/" if divisions else ""
    task_id = TaskId(f"s:{model}{patch}:{seed}:{activation_bytes}{parts}:{'+'.join(needs)}")
    return TaskSpec(task_id, Stage.SAMPLE, (use,), activation_bytes, run_seconds, needs, divisions)


def decode(need: TaskId, activation_bytes: int = 2, run_seconds: float = 2.0) -> TaskSpec:
    return TaskSpec(TaskId(f"d:{need}"), Stage.DECODE, (ComponentUse(VAE, 1),), activation_bytes, run_seconds, (need,))


def picture(
    job_id: str, prompt: str = "cat", model: ComponentKey = PAINT, seed: int = 0, priority: int = 0, patch: str = "",
    activation_bytes: int = 4,
) -> JobSpec:  # fmt: skip
    """Encode, sample and decode of one picture."""
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

    command: RunTask
    residency: Residency
    stop_asked: bool = False


@dataclass
class Shell:
    """Executes commands, keeps count, and checks the core's side of the contract after every event."""

    config: SchedulerConfig = field(default_factory=lambda: SchedulerConfig(story_length=None))
    at: float = 0.0
    jobs: dict[JobId, JobSpec] = field(default_factory=dict)
    resolved: dict[JobId, ResolveJob] = field(default_factory=dict)
    cancelled: set[JobId] = field(default_factory=set)
    held: set[TaskId] = field(default_factory=set)
    #: live workers with what is on them
    up: dict[WorkerId, tuple[int, Residency]] = field(default_factory=dict)
    starting: dict[tuple[WorkerId, int], StartWorker] = field(default_factory=dict)
    started: set[tuple[WorkerId, int]] = field(default_factory=set)
    running: dict[WorkerId, Running] = field(default_factory=dict)
    #: reports of runs that were answered, or whose worker was lost
    old: list[TaskReport] = field(default_factory=list)
    tasks: dict[TaskId, TaskSpec] = field(default_factory=dict)
    #: when Ticks are due that were asked for
    ticks: list[float] = field(default_factory=list)

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
        commands = self.state.handle(event)
        for command in commands:
            self._carry_out(command)
        validate(self.state)
        assert set(self.state.demand.results.held) == self.held, "the core believes in other results than the shell"
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

    def come_up(self, name: str, capacity_bytes: int = ROOMY, link: float = 4.0) -> list[Command]:
        """Answer the StartWorker that is on its way."""
        key = next(k for k in self.starting if k[0] == name)
        return self.introduce(name, key[1], capacity_bytes, link)

    def introduce(self, name: str, incarnation: int, capacity_bytes: int = ROOMY, link: float = 4.0) -> list[Command]:
        """Let a WorkerUp arrive, asked for or not."""
        worker_id = WorkerId(name)
        self.starting.pop((worker_id, incarnation), None)
        latest = self.state.fleet.incarnations.get(worker_id, 0)
        if worker_id in self.state.fleet.workers and incarnation >= latest:
            self._gone(worker_id)
            self.up[worker_id] = (incarnation, Residency(capacity_bytes))
        return self.feed(WorkerUp(self.tick(), WorkerSpec(worker_id, incarnation, capacity_bytes, link)))

    def fail_start(self, name: str) -> list[Command]:
        key = next(k for k in self.starting if k[0] == name)
        del self.starting[key]
        return self.feed(StartFailed(self.tick(), key[0], key[1], "out of luck"))

    def lose(self, name: str) -> list[Command]:
        incarnation, _ = self.up[WorkerId(name)]
        self._gone(WorkerId(name))
        return self.feed(WorkerDown(self.tick(), WorkerId(name), incarnation, "power cut"))

    def submit(self, job: JobSpec) -> list[Command]:
        self.held.update(job.given)
        self.jobs.setdefault(job.job_id, job)
        self.tasks.update((task.task_id, task) for task in job.tasks)
        return self.feed(Submitted(self.tick(), job))

    def cancel(self, job_id: str) -> list[Command]:
        self.cancelled.add(JobId(job_id))
        return self.feed(CancelAsked(self.tick(), JobId(job_id)))

    def finish(
        self, name: str, kind: RunErrorKind | None = None, residency: Residency | None = None,
        cost: RunCost | None = None, result_bytes: int = 1, rungs: tuple[Rung, ...] = (),
    ) -> list[Command]:  # fmt: skip
        """Let the run on this worker end."""
        worker_id = WorkerId(name)
        run = self.running.pop(worker_id)
        command = run.command
        after = run.residency if residency is None else residency
        self.up[worker_id] = (command.incarnation, after)
        error = None if kind is None else RunError(kind, f"it ended as {kind.value}", "", rungs)
        report = TaskReport(
            command.task_id,
            command.attempt,
            worker_id,
            command.incarnation,
            after,
            cost or RunCost(),
            error,
            result_bytes,
        )
        self.old.append(report)
        return self.report(report)

    def report(self, report: TaskReport) -> list[Command]:
        """Let a report arrive, whatever its age."""
        if report.error is None:
            self.held.add(report.task_id)
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

    def _carry_out(self, command: Command) -> None:
        match command:
            case StartWorker():
                key = (command.worker_id, command.incarnation)
                assert all(inc < command.incarnation for w, inc in self.started if w == command.worker_id), command
                assert command.worker_id not in self.up, f"{command}: it is up"
                assert not any(w == command.worker_id for w, _ in self.starting), f"{command}: one is on its way"
                self.started.add(key)
                self.starting[key] = command
            case EndWorker():
                if self.up.get(command.worker_id, (0,))[0] == command.incarnation:
                    run = self.running.get(command.worker_id)
                    assert run is None or run.stop_asked, f"{command}: nobody asked it to stop"
                    self._gone(command.worker_id)
            case RunTask():
                self._run(command)
            case StopTask():
                run = self.running[command.worker_id]
                expected = replace(run.command, why=None, needed_next=(), fresh=False, rungs=())
                asked = RunTask(command.worker_id, command.incarnation, command.task_id, command.attempt)
                assert expected == asked, f"{command}: it runs {expected}"
                assert not run.stop_asked, f"{command}: for the second time"
                run.stop_asked = True
            case ReleaseResult():
                assert command.task_id in self.held, f"{command}: nobody holds it"
                self.held.discard(command.task_id)
            case LookAgain():
                assert command.after_seconds > 0, command
                due = self.at + command.after_seconds
                assert all(due < other for other in self.ticks), f"{command}: one comes by then already"
                self.ticks.append(due)
            case ResolveJob():
                self._resolve(command)

    def _run(self, command: RunTask) -> None:
        incarnation, residency = self.up[command.worker_id]
        assert incarnation == command.incarnation, f"{command}: that incarnation is gone"
        assert command.worker_id not in self.running, f"{command}: it is busy"
        assert not any(r.command.task_id == command.task_id for r in self.running.values()), f"{command}: it runs"
        spec = self.tasks[command.task_id]
        assert self.held.issuperset(spec.needs), f"{command}: its inputs are not held"
        assert command.task_id not in self.held, f"{command}: its result is there"
        assert command.why is not None, f"{command}: no reason"
        before = Residency(residency.capacity_bytes) if command.fresh else residency
        way = choose_division(spec, residency.capacity_bytes - needed_bytes(spec.uses, 0))
        assert len(set(command.needed_next)) == len(command.needed_next), f"{command}: told twice"
        after = plan(before, spec.uses, SPECS, way.activation_bytes, outlook=Outlook(command.needed_next)).after
        assert self.state.fleet.workers[command.worker_id].residency == after, f"{command}: other weights are assumed"
        self.running[command.worker_id] = Running(command, after)

    def _resolve(self, command: ResolveJob) -> None:
        job = self.jobs[command.job_id]
        assert command.job_id not in self.resolved, f"{command}: for the second time"
        assert (command.error is not None) == (command.outcome is Outcome.FAILED), command
        if command.outcome is Outcome.SUCCEEDED:
            assert command.result == job.wanted, command
            assert command.result in self.held, f"{command}: its result is gone"
        else:
            assert command.result is None, command
        if command.outcome is Outcome.CANCELLED:
            assert command.job_id in self.cancelled, f"{command}: nobody asked"
        self.resolved[command.job_id] = command

    def _gone(self, worker_id: WorkerId) -> None:
        """The worker and what it ran; its report may still be on the way."""
        self.up.pop(worker_id, None)
        run = self.running.pop(worker_id, None)
        if run is not None:
            command = run.command
            self.old.append(
                TaskReport(
                    command.task_id, command.attempt, worker_id, command.incarnation, run.residency, result_bytes=1
                )
            )


def _report(
    run: RunTask, after: Residency, cost: RunCost | None = None, error: RunError | None = None, result_bytes: int = 1
) -> TaskReport:
    return TaskReport(
        run.task_id, run.attempt, run.worker_id, run.incarnation, after, cost or RunCost(), error, result_bytes
    )
