"""Recovery after failed runs: retry rules and verdicts, measures against out-of-memory failures, quarantine.

`RULES` and `verdict` are the only authority on retries; Ray's own retries are off. `scheduler.model.oom_escalation`
decides about measures; `Recovery` applies both to tasks and workers. Quarantine refuses work for a while, because
running it took memory or workers away from all other work.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from modelpool.pool.values.core.errors import counted
from modelpool.pool.values.specs.spec import OomStep, RunError, RunErrorKind, TaskId, TaskSpec, WorkerId
from modelpool.scheduler.decisions.queue.demand import Demand
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.cost_classes import sizes_of
from modelpool.scheduler.model.jobs import Task, TaskStatus
from modelpool.scheduler.model.kept_states import KeptState
from modelpool.scheduler.model.messages import LossCause
from modelpool.scheduler.model.oom_escalation import (
    EscalationStep,
    EscalationTarget,
    MemoryFailure,
    join_steps,
    memory_story,
    next_step,
)
from modelpool.scheduler.model.story import Story
from modelpool.scheduler.model.workers import WorkerTable


class RetryRule(Enum):
    """Rule for a second attempt after a kind of error."""

    AGAIN = "again"  #: it may succeed as things are
    ESCALATE = "escalate"  #: it may succeed after a measure: `scheduler.model.oom_escalation`
    FAIL = "fail"  #: it would fail again


#: the rule for each kind of error, within the limits
RULES: Mapping[RunErrorKind, RetryRule] = {
    RunErrorKind.OUT_OF_VRAM: RetryRule.ESCALATE,  # the worker took all its measures
    RunErrorKind.OUT_OF_HOST_MEMORY: RetryRule.ESCALATE,
    RunErrorKind.WORKER_LOST: RetryRule.AGAIN,  # mostly not the task's fault; a limit stops a task that causes it
    RunErrorKind.INPUT_LOST: RetryRule.AGAIN,  # its inputs are computed again first
    RunErrorKind.FILE_UNAVAILABLE: RetryRule.AGAIN,  # on another machine: that one lacks the file
    RunErrorKind.BAD_INPUT: RetryRule.FAIL,
    RunErrorKind.CANCELLED: RetryRule.FAIL,  # not requested: see `verdict`
    RunErrorKind.GANG_BROKEN: RetryRule.AGAIN,  # another member's fault
    RunErrorKind.OUTPUT: RetryRule.FAIL,  # of a driver, which could not write the file; no run ends so
    RunErrorKind.INTERNAL: RetryRule.FAIL,  # a bug of modelpool: report it at once
}


class Verdict(Enum):
    """Decision about a task with a failed run."""

    AGAIN = "again"  #: run it again, and count the failure
    AGAIN_FREE = "again_free"  #: run it again, and count nothing: it was stopped on request, or is not the cause
    ESCALATE = "escalate"  #: count the failure, and take the next measure
    QUARANTINE = "quarantine"  #: its jobs fail, and equal work is refused for a while
    FAIL = "fail"  #: its jobs fail


def verdict(
    kind: RunErrorKind,
    stop_requested: bool,
    failures: int,
    max_attempts: int,
    crashes: int = 0,
    crash_limit: int = 1,
    is_shared: bool = False,
    is_external: bool = False,
) -> Verdict:
    """Decide about a run that ended with `kind`, while a live job needs the task.

    failures    failed runs of this task, including this one
    crashes     workers that were lost with it, including this one
    is_shared   it shared this run with others, which may be the cause: it is suspected only after a run alone
    is_external  nothing that it did can be the cause

    ESCALATE is not stopped by the limit here: its last measure, quarantine, follows from it.
    """
    if (kind is RunErrorKind.CANCELLED and stop_requested) or is_external:
        return Verdict.AGAIN_FREE
    match RULES[kind]:
        case RetryRule.ESCALATE:
            return Verdict.ESCALATE
        case RetryRule.AGAIN if kind is RunErrorKind.WORKER_LOST and crashes >= crash_limit and not is_shared:
            return Verdict.QUARANTINE
        case RetryRule.AGAIN if failures < max_attempts:
            return Verdict.AGAIN
        case _:
            return Verdict.FAIL


def blamed(error: RunError, stop_requested: bool, timed_out: bool = False) -> RunError:
    """Return `error`, or INTERNAL for a cancellation that was not requested, or WORKER_LOST if the run was stopped
    because it took too long: a hanging run and one that crashes its worker are handled alike."""
    if error.kind is not RunErrorKind.CANCELLED or stop_requested:
        return error
    if timed_out:
        return RunError(RunErrorKind.WORKER_LOST, "it took longer than run_timeout_seconds and was stopped")
    return RunError(RunErrorKind.INTERNAL, f"the run was cancelled without a request: {error.message}")


#: keys that are remembered, the oldest forgotten first
MOST_KEYS = 256


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason why work is refused, and until when.

    capacity_bytes  most memory of any worker at that time
    """

    until: float
    capacity_bytes: int
    kind: RunErrorKind
    reason: str


class Quarantine:
    """Keys of refused work, each for a configured time."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._entries: OrderedDict[Hashable, Refusal] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, key: Hashable, at: float, capacity_bytes: int, kind: RunErrorKind, reason: str) -> None:
        """Refuse `key` from now on; `capacity_bytes` is the most memory that a worker of the pool has."""
        self._entries.pop(key, None)
        self._entries[key] = Refusal(at + self._seconds, capacity_bytes, kind, reason)
        if len(self._entries) > MOST_KEYS:
            self._entries.popitem(last=False)

    def refusal(self, keys: Iterable[Hashable], at: float) -> Refusal | None:
        """The refusal of the first of `keys` that is refused; None if none is."""
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None and at < entry.until:
                return entry
            self._entries.pop(key, None)
        return None

    def lift(self, key: Hashable) -> None:
        """Stop refusing work with this key: it succeeded."""
        self._entries.pop(key, None)

    def grown(self, capacity_bytes: int) -> None:
        """A worker with this much memory is up: drop refusals that were for lack of it."""
        for key in [k for k, entry in self._entries.items() if entry.capacity_bytes < capacity_bytes]:
            del self._entries[key]


#: how long a task waits for the one worker that suits it best; then any will do
PIN_SECONDS = 120.0
#: kinds of work that are remembered as successful
MOST_PROVEN = 1024
#: capacity for refusals that more memory would not lift
NO_CAPACITY_IS_ENOUGH = 1 << 62


#: runs of one task that may find its files unavailable without counting as failures: more than the machines of most
#: clusters, each of which finds out once
MOST_UNAVAILABLE_RUNS = 1024
#: kinds of error that do not count for a task that shared its run. For memory, the worker has verified that this task
#: finds too little; a lost worker counts for each task, and the next run identifies the cause
BLAMED_ALONE = frozenset({RunErrorKind.BAD_INPUT, RunErrorKind.INTERNAL, RunErrorKind.INPUT_LOST})


class Recovery:
    """Handles tasks with failed runs, and refuses work that did harm before."""

    def __init__(self, config: SchedulerConfig, story: Story, worker_table: WorkerTable, demand: Demand) -> None:
        self._config = config
        self._story = story
        self._worker_table = worker_table
        self._demand = demand
        self.quarantine = Quarantine(config.quarantine_seconds)
        #: sizes of work that succeeded, the last used last
        self._proven: OrderedDict[Hashable, None] = OrderedDict()
        #: tasks that were pinned to a worker; unpinned ones are dropped at the next check
        self._pinned: dict[TaskId, Task] = {}

    def refusal(self, spec: TaskSpec, at: float) -> RunError | None:
        """Return why the task is refused at present; None if it is not."""
        entry = self.quarantine.refusal(_keys(spec), at) if len(self.quarantine) else None
        if entry is None:
            return None
        message = f"{spec.stage.value} task {spec.task_id} is refused for {entry.until - at:.0f} s more: {entry.reason}"
        return RunError(entry.kind, message, oom_steps=(OomStep.QUARANTINE,))

    def ended_well(self, task: Task) -> None:
        """A run of such a task succeeded: lift the quarantine of equal work."""
        sizes = (task.cost_class.sizes, task.spec.counted_bytes or task.spec.activation_bytes)
        try:
            self._proven.move_to_end(sizes)
        except KeyError:
            self._proven[sizes] = None
            if len(self._proven) > MOST_PROVEN:
                self._proven.popitem(last=False)
        task.timed_out_at = None
        if len(self.quarantine):
            for key in _keys(task.spec):
                self.quarantine.lift(key)

    def ended_badly(
        self,
        task: Task,
        error: RunError,
        at: float,
        was_shared: bool = False,
        cause: LossCause = LossCause.CRASH,
        may_have_ended: bool = False,
        may_pin: bool = True,
    ) -> None:
        """A run ended with an error, or with its worker by `cause`: run the task again, or fail its jobs. If it shared
        the run with others (`was_shared`), those may be the cause: then it runs again alone. If it `may_have_ended`
        before its worker was lost, in a call with others, that is no failure. With `may_pin`, the task of a lost worker
        waits for another one, which shows whether it was the cause."""
        stop_requested = task.status is TaskStatus.STOPPING or task.pause_requested_at is not None
        error = blamed(error, stop_requested, task.timed_out_at is not None)
        worker_id, task.timed_out_at = task.worker_id, None
        assert worker_id is not None, f"{task.name} runs nowhere"
        self._demand.left_worker(task)
        is_lost = error.kind is RunErrorKind.WORKER_LOST
        is_suspect = is_lost and not cause.is_external
        if is_suspect:
            task.crashed += (worker_id,)
        if not task.demand:
            if is_suspect:
                self._forgive_the_only_one(worker_id)
            self._demand.forget(task, error.kind.value)
            return
        if error.kind is RunErrorKind.INPUT_LOST and task.kept is not None:
            # the state or another input: without the state, the next run shows
            self._demand.drop_state(task)
            self._demand.requeue(task, f"its state, or another input, was lost before it could resume on {worker_id}")
            return
        task.alone = task.alone or (was_shared and error.kind is not RunErrorKind.CANCELLED)
        if was_shared and error.kind in BLAMED_ALONE:
            self._demand.requeue(task, f"{error.kind.value} on {worker_id}, in a run with others")
            return
        others = self._others(task, at) if is_suspect else []
        # if another worker could tell the cause, failures on one worker count once
        crashes = len(set(task.crashed)) if others else len(task.crashed)
        ruling = verdict(
            error.kind,
            stop_requested,
            task.failures + 1,
            self._config.max_attempts,
            crashes,
            self._config.crash_limit,
            is_shared=was_shared,
            is_external=self._is_external(task, worker_id, error.kind, is_lost and cause.is_external),
        )
        if may_have_ended and is_lost:
            ruling = Verdict.AGAIN_FREE
        if ruling is not Verdict.AGAIN_FREE:
            task.failures += 1
        note = f"{error.kind.value} on {worker_id}" + (f", {cause.value}" if is_lost else "")
        match ruling:
            case Verdict.FAIL:
                if is_suspect:
                    self._forgive_the_only_one(worker_id)
                self._demand.fail_task(task, self._final(task, worker_id, error))
            case Verdict.QUARANTINE:
                self._quarantine_crasher(task, worker_id, error, at)
            case Verdict.ESCALATE:
                self._escalate(task, worker_id, error, at)
            case _:
                if is_lost:  # going first and elsewhere shows soonest whether the task is the cause
                    task.goes_first = True
                if others and may_pin:
                    self._pin(task, min(others, key=_soonest).worker_id, at)
                self._demand.requeue(task, note)
                if error.kind is RunErrorKind.INPUT_LOST:
                    self._demand.inputs_lost(task)

    def _is_external(self, task: Task, worker_id: WorkerId, kind: RunErrorKind, lost_externally: bool) -> bool:
        """Whether the cause of an error is outside of the task, so that the limits of its failures do not count it.
        Lost results have a limit per job (`scheduler.decisions.queue.demand`), and unavailable files fail a job when no
        machine is left."""
        if kind is RunErrorKind.FILE_UNAVAILABLE:
            task.unavailable += 1
            worker = self._worker_table.workers.get(worker_id)
            has_node = worker is not None and worker.spec is not None and bool(worker.spec.node)
            return has_node and task.unavailable <= MOST_UNAVAILABLE_RUNS
        return bool(task.spec.needs) if kind is RunErrorKind.INPUT_LOST else lost_externally

    def stopped(self, task: Task, kept: KeptState) -> None:
        """A run was stopped with its state: the task resumes from it. Not a failure."""
        worker_id, task.timed_out_at = task.worker_id, None
        self._demand.left_worker(task)
        self._demand.set_state(task, kept)
        note = f"stopped after step {kept.step} of {kept.steps} on {worker_id}"
        if task.demand:
            self._demand.requeue(task, note)
        else:
            self._demand.forget(task, note)

    def does_not_count(self, task: Task, note: str) -> None:
        """A run ended that read a file, or a result, which is not the expected one: whatever came of it is dropped. Not
        a failure of the task."""
        self._demand.drop_state(task)
        self.came_back(task, None, note)

    def came_back(self, task: Task, ready_at: float | None, note: str) -> None:
        """A queued task, ready since `ready_at`, was revoked, or its worker was lost before it started. Not a
        failure."""
        self._demand.left_worker(task)
        task.ready_at, task.timed_out_at = ready_at, None
        if task.demand:
            self._demand.requeue(task, note)
        else:
            self._demand.forget(task, note)

    def workers_changed(self) -> None:
        """Unpin tasks if their worker is not coming back, or is smaller than before; drop refusals for lack of memory
        that is available now."""
        self.quarantine.grown(
            max((w.capacity_bytes or 0 for w in self._worker_table.workers.values() if w.live), default=0)
        )
        for task in list(self._pinned.values()):
            if task.pinned_to is None or self._demand.tasks.get(task.name) is not task:
                del self._pinned[task.name]
            elif not self._worker_table.may_take(task.pinned_to, task.cost_class.needed_bytes):
                self._story.note(task, f"no longer waits for {task.pinned_to}")
                self._demand.unpin(task)

    def time_passed(self, at: float) -> float:
        """Unpin tasks that waited long enough for one worker. Returns when to check again."""
        for task in [task for task in self._demand.pinned if task.pinned_until <= at]:
            self._story.note(task, f"waited {PIN_SECONDS:.0f} s for {task.pinned_to}, and no longer waits for it")
            self._demand.unpin(task)
        return min((task.pinned_until for task in self._demand.pinned), default=float("inf"))

    # ---- internal steps ---------------------------------------------------------------------------------------------

    def _escalate(self, task: Task, worker_id: WorkerId, error: RunError, at: float) -> None:
        """A run was out of memory: take the next measure."""
        worker = self._worker_table.workers.get(worker_id)
        capacity_bytes = 0 if worker is None else worker.capacity_bytes or 0
        task.oom_steps = join_steps(task.oom_steps, error.oom_steps)
        task.memory_failures += (MemoryFailure(error.kind, worker_id, capacity_bytes, task.attempt, task.oom_steps),)
        if self.quarantine.refusal(_keys(task.spec), at) is not None:
            step = EscalationStep(OomStep.QUARANTINE)  # equal work was escalated to the end before
        else:
            candidates = self._candidates(task, at)
            left = self._config.max_attempts - task.failures
            step = next_step(task.memory_failures, candidates, task.oom_steps, left)
        if step.oom_step is OomStep.QUARANTINE:
            self._quarantine_out_of_memory(task, error, at)
            return
        note = f"{error.kind.value} on {worker_id}"
        if step.oom_step is not None and 1 in task.degrees:
            assert step.worker_id is not None, f"{step.oom_step.value}: no worker"
            self._pin(task, step.worker_id, at, step.oom_step)
            note += f"; {step.oom_step.value}: {step.worker_id}"
        self._demand.requeue(task, note)

    def _candidates(self, task: Task, at: float) -> list[EscalationTarget]:
        """Workers that are up and could take the task, and those that it failed on, which may be restarting."""
        failed = {failure.worker_id for failure in task.memory_failures}
        return [
            EscalationTarget(
                worker.worker_id, worker.capacity_bytes or 0, worker.wait_seconds(at) if worker.live else None
            )
            for worker in self._worker_table.workers.values()
            if worker.live or worker.worker_id in failed
            if self._worker_table.may_take(worker.worker_id, task.cost_class.needed_bytes)
        ]

    def _others(self, task: Task, at: float) -> list[EscalationTarget]:
        """Workers that are up, could take the task, and were not lost with it."""
        return [
            c
            for c in self._candidates(task, at)
            if c.worker_id not in task.crashed and self._worker_table.workers[c.worker_id].live
        ]

    def _pin(self, task: Task, worker_id: WorkerId, at: float, oom_step: OomStep | None = None) -> None:
        """Make a task wait for one worker, for a limited time; `oom_step` is the purpose."""
        task.pinned_to, task.pinned_until = worker_id, at + PIN_SECONDS
        self._pinned[task.name] = task
        task.recycle_first, task.next_oom_step = oom_step is OomStep.RECYCLE, oom_step

    def _forgive_the_only_one(self, worker_id: WorkerId) -> None:
        """A worker was lost with a task that does not run again: either may be the cause. While others are up a worker
        that is lost too often can be given up; the only one cannot, or a few bad tasks would end the pool."""
        others = (w for w in self._worker_table.workers.values() if w.worker_id != worker_id)
        if not any(worker.live and worker.takes_tasks for worker in others):
            self._worker_table.forgive(worker_id)

    def _quarantine_out_of_memory(self, task: Task, error: RunError, at: float) -> None:
        """No measure is left for a task that ran out of memory. Memory depends on sizes: work of equal sizes is refused
        too, unless it succeeded before. Host memory does not depend on the sizes that are known here."""
        task.oom_steps += (OomStep.QUARANTINE,)
        reason = memory_story(task.spec, task.memory_failures, task.cost_class.scratch_bytes, error.message)
        keys: tuple[Hashable, ...] = (task.name,)
        if error.kind is RunErrorKind.OUT_OF_VRAM and _sizes(task.spec) not in self._proven:
            keys = _keys(task.spec)
        known = [w.capacity_bytes or 0 for w in self._worker_table.workers.values()]
        largest_bytes = max([*known, *(failure.capacity_bytes for failure in task.memory_failures)])
        final = RunError(error.kind, reason, error.traceback_text, task.oom_steps)
        self._quarantine(task, keys, largest_bytes, final, at)

    def _quarantine_crasher(self, task: Task, worker_id: WorkerId, error: RunError, at: float) -> None:
        """A task took too many workers down. Only this very task is refused: its content may be the cause."""
        for crashed in task.crashed:
            self._worker_table.forgive(crashed)
        message = (
            f"{self._final(task, worker_id, error).message}. It is quarantined: {counted(len(task.crashed), 'run')} "
            f"of it ended "
            f"with their worker lost or over time ({', '.join(task.crashed)})"
        )
        task.oom_steps += (OomStep.QUARANTINE,)
        final = RunError(error.kind, message, error.traceback_text, task.oom_steps)
        self._quarantine(task, (task.name,), NO_CAPACITY_IS_ENOUGH, final, at)

    def _quarantine(
        self, task: Task, keys: Iterable[Hashable], capacity_bytes: int, error: RunError, at: float
    ) -> None:
        """Fail its jobs, and refuse work with these keys until a worker with more than `capacity_bytes` is up."""
        for key in keys:
            self.quarantine.add(key, at, capacity_bytes, error.kind, error.message)
        self._story.note(task, OomStep.QUARANTINE.value)
        self._demand.fail_task(task, error)

    def _final(self, task: Task, worker_id: WorkerId, error: RunError) -> RunError:
        message = (
            f"{task.spec.stage.value} task {task.name} failed on {worker_id} in attempt {task.attempt} "
            f"({task.failures} of at most {self._config.max_attempts} failures): {error.message}"
        )
        return RunError(error.kind, message, error.traceback_text, join_steps(task.oom_steps, error.oom_steps))


def _keys(spec: TaskSpec) -> tuple[Hashable, ...]:
    return (spec.task_id, _sizes(spec))


def _sizes(spec: TaskSpec) -> Hashable:
    """The sizes that a task's memory depends on, by computed figures: corrected ones change from run to run."""
    return (sizes_of(spec), spec.counted_bytes or spec.activation_bytes)


def _soonest(candidate: EscalationTarget) -> tuple[float, int, WorkerId]:
    wait_seconds = float("inf") if candidate.wait_seconds is None else candidate.wait_seconds
    return wait_seconds, -candidate.capacity_bytes, candidate.worker_id
