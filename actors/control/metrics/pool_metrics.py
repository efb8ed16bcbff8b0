"""`PoolMetrics`: counters and histograms of a pool, updated from the core's events and commands.

Pure: no clock and no I/O. `note` is called for every event, and does a few dictionary operations each time. Label sets
are bounded: stages, kinds of errors, causes and rules are fixed; groups are configured; workers are those that exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from modelpool.actors.control.metrics.families import Distribution, MetricFamily, counter, histogram
from modelpool.pool.values.specs.spec import ComponentKey, FileVerdict, JobId, RunErrorKind, Stage, TaskId, WorkerId
from modelpool.pool.weights.plan.eviction_plan import Residency
from modelpool.scheduler.decisions.queue.demand import Demand
from modelpool.scheduler.model.messages import (
    Command,
    EndWorker,
    Event,
    FilesJudged,
    LossCause,
    Outcome,
    ResolveJob,
    RunEnded,
    RunInGang,
    RunTask,
    StartFailed,
    StartWorker,
    StateKept,
    Submitted,
    TaskRevoked,
    WeightsLoaded,
    WorkerDown,
    WorkerUp,
)
from modelpool.scheduler.model.scaling_record import ScalingRule, ScalingWhy

#: the outcome of a task that succeeded; others are a `RunErrorKind`
_DONE = "succeeded"
#: what autoscaling does with nodes
_ACTIONS = ("requested", "given_up")
#: the ways that weights take, and the field of `RunCost` with the bytes
_PATHS = {
    "source_to_disk": "fetched_bytes",
    "node_to_disk": "peer_bytes",
    "disk_to_host": "storage_bytes",
    "host_to_gpu": "uploaded_bytes",
    "host_to_gpu_ahead": "ahead_bytes",
    "host_to_gpu_streamed": "streamed_bytes",
    "host_to_gpu_shared": "share_bytes",
    "gpu_to_gpu": "exchanged_bytes",
}


@dataclass(frozen=True, slots=True)
class _QueuedRun:
    """A run that a busy worker begins by itself."""

    task_id: TaskId
    attempt: int
    stage: Stage
    ready_at: float


class _Worker:
    """Counts of one incarnation of a worker.

    busy_since  start of the oldest of its current runs without a pause; meaningful while there are runs
    """

    __slots__ = ("busy_seconds", "busy_since", "held_bytes", "incarnation", "parts", "queue", "runs")

    def __init__(self, incarnation: int, busy_seconds: float) -> None:
        self.incarnation = incarnation
        self.runs: dict[TaskId, Stage] = {}
        #: runs among them with a result on another worker
        self.parts: set[TaskId] = set()
        self.busy_since = 0.0
        self.busy_seconds = busy_seconds
        self.held_bytes: dict[ComponentKey, int] = {}
        #: sent ahead: they begin in this order when the runs have ended, unless they are revoked
        self.queue: dict[TaskId, _QueuedRun] = {}

    def ended(self, task_id: TaskId, at: float) -> Stage | None:
        """Forget a run; return its stage, or None if it is unknown."""
        stage = self.runs.pop(task_id, None)
        if stage is not None and not self.runs:
            self.busy_seconds += at - self.busy_since
        return stage


class _StageMetrics:
    """Counts of the successful runs of one stage."""

    __slots__ = ("fetch", "hits", "load", "queue", "retries", "run", "runs")

    def __init__(self) -> None:
        self.queue, self.load, self.run, self.fetch = Distribution(), Distribution(), Distribution(), Distribution()
        self.runs = self.hits = self.retries = 0


class PoolMetrics:
    """The metrics of one controller, from its start."""

    def __init__(self, demand: Demand, groups: Iterable[str] = ()) -> None:
        """`demand` has the live jobs and tasks of the core; they are only read. `groups` are the names of the groups of
        nodes: their counters exist from the start, since Prometheus computes no increase for the first value that it
        sees."""
        self._live_jobs, self._live_tasks = demand.jobs, demand.tasks
        self._stages = {stage: _StageMetrics() for stage in Stage}
        self._tasks: dict[tuple[Stage, RunErrorKind | None], int] = {
            (stage, kind): 0 for stage in Stage for kind in (None, *RunErrorKind)
        }
        self._workers: dict[WorkerId, _Worker] = {}
        self._moved_bytes = dict.fromkeys(_PATHS, 0)
        self._patch_switches = self._evictions = self._evicted_bytes = 0
        self._submitted = self._checkpoints = self._wrong_files = 0
        self._submitted_at: dict[JobId, float] = {}
        #: by number of GPUs
        self._shared_runs: dict[int, int] = {}
        self._jobs = dict.fromkeys(Outcome, 0)
        self._job_seconds = {outcome: Distribution() for outcome in Outcome}
        self._starts = 0
        self._losses: dict[LossCause, int] = dict.fromkeys(LossCause, 0)
        self._start_failures: dict[LossCause, int] = dict.fromkeys(LossCause, 0)
        self._decisions: dict[tuple[str, ScalingRule, str], int] = {
            (group, rule, action): 0 for group in groups for rule in ScalingRule for action in _ACTIONS
        }
        handlers: dict[type, Callable[[Any], None]] = {
            RunEnded: self._run_ended,
            Submitted: self._job_submitted,
            WorkerUp: self._worker_up,
            WorkerDown: self._worker_down,
            StartFailed: self._start_failed,
            WeightsLoaded: self._weights_loaded,
            TaskRevoked: self._task_revoked,
            StateKept: self._state_kept,
            FilesJudged: self._files_judged,
        }
        self._of_event = handlers.get
        command_handlers: dict[type, Callable[[Any, float], None]] = {
            RunTask: self._run_sent,
            RunInGang: self._part_sent,
            ResolveJob: self._job_ended,
            StartWorker: self._worker_requested,
            EndWorker: self._worker_ended,
        }
        self._of_command = command_handlers.get

    def note(self, event: Event, commands: Sequence[Command]) -> None:
        """Count an event that the core has handled, and its commands."""
        handler = self._of_event(type(event))
        if handler is not None:
            handler(event)
        for command in commands:
            command_handler = self._of_command(type(command))
            if command_handler is not None:
                command_handler(command, event.at)

    def families(self, now: float) -> tuple[MetricFamily, ...]:
        """Return all counters and histograms at `now`, on the clock of the events."""
        return (*self._run_families(), *self._weight_families(), *self._job_families(), *self._worker_families(now))

    def _run_families(self) -> tuple[MetricFamily, ...]:
        """The runs of tasks, and where their time went."""
        stages = {stage.value: metrics for stage, metrics in self._stages.items()}
        return (
            counter(
                "modelpool_tasks_total",
                "Runs of tasks that ended, by stage and outcome: succeeded, or the kind of the error.",
                {
                    (stage.value, _DONE if kind is None else kind.value): count
                    for (stage, kind), count in self._tasks.items()
                },
                "stage",
                "outcome",
            ),
            counter(
                "modelpool_task_retries_total",
                "Runs that were not the first one of their task.",
                {(name,): metrics.retries for name, metrics in stages.items()},
                "stage",
            ),
            histogram(
                "modelpool_task_queue_seconds",
                "Time from when a task could start until it was sent to a worker.",
                [metrics.queue.sample(name) for name, metrics in stages.items()],
                "stage",
            ),
            histogram(
                "modelpool_task_load_seconds",
                "Time that a successful run took to move weights to the GPU.",
                [metrics.load.sample(name) for name, metrics in stages.items()],
                "stage",
            ),
            histogram(
                "modelpool_task_run_seconds",
                "Time of a successful run without the load.",
                [metrics.run.sample(name) for name, metrics in stages.items()],
                "stage",
            ),
            histogram(
                "modelpool_task_fetch_seconds",
                "Time until the files of a run were on the disk of its node; only runs that fetched something.",
                [metrics.fetch.sample(name) for name, metrics in stages.items()],
                "stage",
            ),
        )

    def _weight_families(self) -> tuple[MetricFamily, ...]:
        """What weights moved, and which had to."""
        stages = {stage.value: metrics for stage, metrics in self._stages.items()}
        return (
            counter(
                "modelpool_residency_total",
                "Successful runs by whether all their weights were on the GPU: hit or miss.",
                {
                    (name, result): count
                    for name, metrics in stages.items()
                    for result, count in (("hit", metrics.hits), ("miss", metrics.runs - metrics.hits))
                },
                "stage",
                "result",
            ),
            counter(
                "modelpool_moved_bytes_total",
                "Weights that were moved, by the way that they took.",
                {(path,): count for path, count in self._moved_bytes.items()},
                "path",
            ),
            counter(
                "modelpool_evictions_total",
                "Components of which nothing was left on a GPU after a run or a load.",
                {(): self._evictions},
            ),
            counter(
                "modelpool_evicted_bytes_total",
                "Weights that were on a GPU before a run or a load, and no longer after it.",
                {(): self._evicted_bytes},
            ),
            counter(
                "modelpool_patch_switches_total",
                "Components that were resident with other patches (LoRAs) than a run needed.",
                {(): self._patch_switches},
            ),
            counter(
                "modelpool_wrong_files_total",
                "Files of nodes that were found to be others than expected, by each worker.",
                {(): self._wrong_files},
            ),
            counter("modelpool_checkpoints_total", "States of sampling runs that were saved.", {(): self._checkpoints}),
            counter(
                "modelpool_shared_runs_total",
                "Sampling runs that several GPUs began to share, by their number.",
                {(str(gpus),): count for gpus, count in sorted(self._shared_runs.items())},
                "gpus",
            ),
        )

    def _job_families(self) -> tuple[MetricFamily, ...]:
        """The jobs."""
        return (
            counter("modelpool_jobs_submitted_total", "Jobs that entered the scheduler.", {(): self._submitted}),
            counter(
                "modelpool_jobs_total",
                "Jobs that ended, by outcome.",
                {(outcome.value,): count for outcome, count in self._jobs.items()},
                "outcome",
            ),
            histogram(
                "modelpool_job_seconds",
                "Time from the submission of a job to its end.",
                [seconds.sample(outcome.value) for outcome, seconds in self._job_seconds.items()],
                "outcome",
            ),
        )

    def _worker_families(self, now: float) -> tuple[MetricFamily, ...]:
        """The workers, and the nodes that autoscaling asked for."""
        return (
            counter("modelpool_worker_starts_total", "Workers that came up.", {(): self._starts}),
            counter(
                "modelpool_worker_start_failures_total",
                "Starts of workers that failed, by cause.",
                {(cause.name.lower(),): count for cause, count in self._start_failures.items()},
                "cause",
            ),
            counter(
                "modelpool_worker_losses_total",
                "Workers that were lost, by cause.",
                {(cause.name.lower(),): count for cause, count in self._losses.items()},
                "cause",
            ),
            counter(
                "modelpool_gpu_busy_seconds_total",
                "Time for which a worker had a task, loads included.",
                {
                    (worker_id,): worker.busy_seconds + (max(0.0, now - worker.busy_since) if worker.runs else 0.0)
                    for worker_id, worker in self._workers.items()
                },
                "worker",
            ),
            counter(
                "modelpool_scaling_nodes_total",
                "Nodes that autoscaling requested or gave up, by group and by the rule that decided.",
                {(group, rule.name.lower(), act): count for (group, rule, act), count in self._decisions.items()},
                "group",
                "rule",
                "action",
            ),
        )

    # ---- events ----------------------------------------------------------------------------------------------------

    def _run_ended(self, event: RunEnded) -> None:
        report = event.report
        worker = self._workers.get(report.worker_id)
        if worker is None or worker.incarnation != report.incarnation:
            return  # its loss was counted
        if report.task_id in worker.queue:
            self._begin_queued(worker, event.at)  # it ended before the core knew of its begin
        stage = worker.ended(report.task_id, event.at)
        is_part = report.task_id in worker.parts
        worker.parts.discard(report.task_id)
        if stage is None:
            return
        if not worker.runs:
            self._begin_queued(worker, event.at)
        error, cost = report.error, report.cost
        key = (stage, None if error is None else error.kind)
        if not is_part:  # the first worker of a gang counts for all
            self._tasks[key] = self._tasks.get(key, 0) + 1
        self._held(worker, report.residency)
        moved = self._moved_bytes
        if cost.uploaded_bytes:
            moved["host_to_gpu"] += cost.uploaded_bytes
        if cost.streamed_bytes:
            moved["host_to_gpu_streamed"] += cost.streamed_bytes
        if cost.share_bytes:
            moved["host_to_gpu_shared"] += cost.share_bytes
        if cost.exchanged_bytes:
            moved["gpu_to_gpu"] += cost.exchanged_bytes
        if cost.ahead_bytes:
            moved["host_to_gpu_ahead"] += cost.ahead_bytes
        if cost.storage_bytes:
            moved["disk_to_host"] += cost.storage_bytes
        if cost.fetched_bytes:
            moved["source_to_disk"] += cost.fetched_bytes
        if cost.peer_bytes:
            moved["node_to_disk"] += cost.peer_bytes
        self._patch_switches += cost.patch_switches
        if error is not None:
            if error.kind is RunErrorKind.WORKER_LOST:
                self._losses[LossCause.CRASH] += 1
        elif not is_part:
            metrics = self._stages[stage]
            metrics.runs += 1
            metrics.hits += cost.resident
            metrics.load.observe(cost.load_seconds)
            metrics.run.observe(cost.run_seconds)
            if cost.fetch_seconds:
                metrics.fetch.observe(cost.fetch_seconds)

    def _job_submitted(self, event: Submitted) -> None:
        job_id = event.job.job_id
        if job_id in self._live_jobs and job_id not in self._submitted_at:
            self._submitted += 1
            self._submitted_at[job_id] = event.at if event.submitted_at is None else event.submitted_at

    def _worker_up(self, event: WorkerUp) -> None:
        spec = event.worker
        before = self._workers.get(spec.worker_id)
        if before is not None:
            self._lose(before, event.at)
        worker = _Worker(spec.incarnation, 0.0 if before is None else before.busy_seconds)
        self._workers[spec.worker_id] = worker
        self._starts += 1
        if event.residency is not None:
            self._held(worker, event.residency)

    def _worker_down(self, event: WorkerDown) -> None:
        worker = self._workers.get(event.worker_id)
        if worker is not None and worker.incarnation == event.incarnation:
            self._losses[event.cause] += 1
            self._lose(worker, event.at)
            worker.held_bytes = {}

    def _start_failed(self, event: StartFailed) -> None:
        self._start_failures[event.cause] += 1

    def _weights_loaded(self, event: WeightsLoaded) -> None:
        worker = self._workers.get(event.worker_id)
        if worker is not None and worker.incarnation == event.incarnation:
            self._held(worker, event.residency)

    def _files_judged(self, event: FilesJudged) -> None:
        self._wrong_files += sum(file.verdict is not FileVerdict.RIGHT for file in event.files)

    def _state_kept(self, event: StateKept) -> None:
        self._checkpoints += 1

    # ---- commands --------------------------------------------------------------------------------------------------

    def _run_sent(self, command: RunTask, at: float) -> None:
        worker = self._workers.get(command.worker_id)
        if worker is None:
            return
        mates = [(mate.task_id, mate.attempt) for mate in command.batch_mates]
        for task_id, attempt in ((command.task_id, command.attempt), *mates):
            task = self._live_tasks[task_id]
            # what follows a run for its result can start when that one ends, and then does
            ready_at = inf if command.follows else at - task.queue_seconds
            run = _QueuedRun(task_id, attempt, task.spec.stage, ready_at)
            if command.queued:
                worker.queue[task_id] = run
            else:
                self._begin(worker, run, at)

    def _part_sent(self, command: RunInGang, at: float) -> None:
        """A worker gets its part of a shared run."""
        run = command.run
        worker = self._workers.get(run.worker_id)
        if not command.rank:
            gpus = len(command.members)
            self._shared_runs[gpus] = self._shared_runs.get(gpus, 0) + 1
            self._run_sent(run, at)
        elif worker is not None:
            worker.busy_since = at if not worker.runs else worker.busy_since
            worker.runs[run.task_id] = self._live_tasks[run.task_id].spec.stage
            worker.parts.add(run.task_id)

    def _begin(self, worker: _Worker, run: _QueuedRun, at: float) -> None:
        if not worker.runs:
            worker.busy_since = at
        worker.runs[run.task_id] = run.stage
        metrics = self._stages[run.stage]
        metrics.queue.observe(max(0.0, at - run.ready_at))
        if run.attempt > 1:
            metrics.retries += 1

    def _begin_queued(self, worker: _Worker, at: float) -> None:
        if worker.queue:
            self._begin(worker, worker.queue.pop(next(iter(worker.queue))), at)

    def _task_revoked(self, event: TaskRevoked) -> None:
        worker = self._workers.get(event.worker_id)
        if worker is None or worker.incarnation != event.incarnation:
            return
        if worker.queue.pop(event.task_id, None) is None:  # the run before it had ended: it seemed to begin
            worker.ended(event.task_id, event.at)
            if not worker.runs:
                self._begin_queued(worker, event.at)

    def _job_ended(self, command: ResolveJob, at: float) -> None:
        self._jobs[command.outcome] += 1
        submitted_at = self._submitted_at.pop(command.job_id, None)
        if submitted_at is None:  # it ended with its submission
            self._submitted += 1
            submitted_at = at
        self._job_seconds[command.outcome].observe(max(0.0, at - submitted_at))

    def _worker_requested(self, command: StartWorker, at: float) -> None:
        if command.why is not None:
            self._scaled(command.why)

    def _worker_ended(self, command: EndWorker, at: float) -> None:
        if command.why is not None:
            self._scaled(command.why)
        worker = self._workers.get(command.worker_id)
        if worker is not None and worker.incarnation == command.incarnation:
            if worker.runs:  # it hangs
                self._losses[LossCause.CRASH] += 1
            self._lose(worker, at)
            del self._workers[command.worker_id]

    def _scaled(self, why: ScalingWhy) -> None:
        key = (why.group, why.rule, _ACTIONS[why.nodes < 0])
        self._decisions[key] = self._decisions.get(key, 0) + abs(why.nodes)

    def _lose(self, worker: _Worker, at: float) -> None:
        """Count what an ended worker was running as lost; what it had not begun runs elsewhere."""
        worker.queue.clear()
        for task_id in tuple(worker.runs):
            stage = worker.ended(task_id, at)
            if stage is not None:
                self._tasks[stage, RunErrorKind.WORKER_LOST] += 1

    def _held(self, worker: _Worker, residency: Residency) -> None:
        """Note the weights on the GPU now, and count the evicted ones."""
        held = {entry.component: entry.resident_bytes for entry in residency.entries}
        before = worker.held_bytes
        if held != before:
            for component, held_bytes in before.items():
                left_bytes = held.get(component, 0)
                if left_bytes < held_bytes:
                    self._evicted_bytes += held_bytes - left_bytes
                    self._evictions += not left_bytes
            worker.held_bytes = held
