"""What follows a run that ended badly: the verdict is carried out, rungs are climbed, what does harm is quarantined.

Decisions are `scheduler.core.retry` and `scheduler.tables.oom_escalation`; here they meet tasks and workers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable

from modelpool.pool.specs.spec import RunError, RunErrorKind, Rung, TaskId, TaskSpec, WorkerId
from modelpool.scheduler.core.quarantine import Quarantine
from modelpool.scheduler.core.retry import Verdict, blamed, verdict
from modelpool.scheduler.queue.demand import Demand
from modelpool.scheduler.tables.config import SchedulerConfig
from modelpool.scheduler.tables.cost_classes import sizes_of
from modelpool.scheduler.tables.jobs import Task, TaskStatus
from modelpool.scheduler.tables.oom_escalation import Candidate, MemoryFailure, Step, joined, memory_story, next_step
from modelpool.scheduler.tables.story import Story
from modelpool.scheduler.tables.workers import Fleet

#: how long a task waits for the one worker that suits it best; then any will do
PIN_SECONDS = 120.0
#: kinds of work that are remembered to have run well
MOST_PROVEN = 1024
#: of workers, for what no memory would help
NO_CAPACITY_IS_ENOUGH = 1 << 62


#: what a task is not judged by when others had a part in the run. Of memory the worker has made sure that it is this
#: task that finds too little; a lost worker is counted for each, and shows the next time whose fault it was
BLAMED_ALONE = frozenset({RunErrorKind.BAD_INPUT, RunErrorKind.INTERNAL, RunErrorKind.INPUT_LOST})


class Recovery:
    """Deals with tasks whose run ended badly, and refuses work that did harm before."""

    def __init__(self, config: SchedulerConfig, story: Story, fleet: Fleet, demand: Demand) -> None:
        self._config = config
        self._story = story
        self._fleet = fleet
        self._demand = demand
        self.quarantine = Quarantine(config.quarantine_seconds)
        #: sizes of work that ran well, the last used last
        self._proven: OrderedDict[Hashable, None] = OrderedDict()
        #: tasks that were pinned to a worker; those that are so no more are dropped when that is next looked at
        self._pinned: dict[TaskId, Task] = {}

    def refusal(self, spec: TaskSpec, at: float) -> RunError | None:
        """Why the task is not taken in at present; None when it is."""
        entry = self.quarantine.refusal(_keys(spec), at) if len(self.quarantine) else None
        if entry is None:
            return None
        message = f"{spec.stage.value} task {spec.task_id} is refused for {entry.until - at:.0f} s more: {entry.reason}"
        return RunError(entry.kind, message, rungs=(Rung.QUARANTINE,))

    def ended_well(self, task: Task) -> None:
        """A run of such a task succeeded: whatever was held against its like is over."""
        sizes = (task.signature.sizes, task.spec.counted_bytes or task.spec.activation_bytes)
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

    def ended_badly(self, task: Task, error: RunError, at: float, was_shared: bool = False) -> None:
        """A run ended with an error, or with its worker: the task runs again, or its jobs fail. Where others had a part
        in the run (`was_shared`), it may have been their fault: then it runs again by itself."""
        stop_asked = task.status is TaskStatus.STOPPING
        error = blamed(error, stop_asked, task.timed_out_at is not None)
        worker_id, task.timed_out_at = task.worker_id, None
        assert worker_id is not None, f"{task.name} runs nowhere"
        self._demand.let_go(task)
        is_lost = error.kind is RunErrorKind.WORKER_LOST
        if is_lost:
            task.crashed += (worker_id,)
        if not task.demand:
            if is_lost:
                self._forgive_the_only_one(worker_id)
            self._demand.forget(task, error.kind.value)
            return
        task.alone = task.alone or (was_shared and error.kind is not RunErrorKind.CANCELLED)
        if was_shared and error.kind in BLAMED_ALONE:
            self._demand.requeue(task, f"{error.kind.value} on {worker_id}, in a run with others")
            return
        limits = self._config
        # where another worker can tell whose fault it was, one worker counts once
        others = self._others(task, at) if is_lost else []
        crashes = len(set(task.crashed)) if others else len(task.crashed)
        ruling = verdict(error.kind, stop_asked, task.failures + 1, limits.max_attempts, crashes, limits.crash_limit)
        if ruling is not Verdict.AGAIN_FREE:
            task.failures += 1
        note = f"{error.kind.value} on {worker_id}"
        match ruling:
            case Verdict.FAIL:
                if is_lost:
                    self._forgive_the_only_one(worker_id)
                self._demand.fail_task(task, self._final(task, worker_id, error))
            case Verdict.QUARANTINE:
                self._quarantine_crasher(task, worker_id, error, at)
            case Verdict.CLIMB:
                self._climb(task, worker_id, error, at)
            case _:
                if is_lost:  # whose fault it was shows soonest when it goes first, and elsewhere
                    task.goes_first = True
                if others:
                    self._pin(task, min(others, key=_soonest).worker_id, at)
                self._demand.requeue(task, note)
                if error.kind is RunErrorKind.INPUT_LOST:
                    self._demand.inputs_lost(task)

    def workers_changed(self) -> None:
        """Let go of tasks that wait for a worker that is not coming back, or not as large as it was; forget what was
        refused for want of memory that is there now."""
        self.quarantine.grown(max((w.capacity_bytes or 0 for w in self._fleet.workers.values() if w.live), default=0))
        for task in list(self._pinned.values()):
            if task.pinned_to is None or self._demand.tasks.get(task.name) is not task:
                del self._pinned[task.name]
            elif not self._fleet.may_take(task.pinned_to, task.signature.needed_bytes):
                self._story.note(task, f"waits for {task.pinned_to} no more")
                self._demand.unpin(task)

    def time_passed(self, at: float) -> float:
        """Let go of tasks that waited long enough for one worker. Returns when that is to be looked at again."""
        for task in [task for task in self._demand.pinned if task.pinned_until <= at]:
            self._story.note(task, f"waited {PIN_SECONDS:.0f} s for {task.pinned_to}, and waits for it no more")
            self._demand.unpin(task)
        return min((task.pinned_until for task in self._demand.pinned), default=float("inf"))

    # ---- from here on: how ------------------------------------------------------------------------------------------

    def _climb(self, task: Task, worker_id: WorkerId, error: RunError, at: float) -> None:
        """A run was out of memory: do what the next rung says."""
        worker = self._fleet.workers.get(worker_id)
        capacity_bytes = 0 if worker is None else worker.capacity_bytes or 0
        task.rungs = joined(task.rungs, error.rungs)
        task.memory_failures += (MemoryFailure(error.kind, worker_id, capacity_bytes, task.attempt, task.rungs),)
        if self.quarantine.refusal(_keys(task.spec), at) is not None:
            step = Step(Rung.QUARANTINE)  # its like went all the way up before
        else:
            candidates = self._candidates(task, at)
            left = self._config.max_attempts - task.failures
            step = next_step(task.memory_failures, candidates, task.rungs, left)
        if step.rung is Rung.QUARANTINE:
            self._quarantine_hungry(task, error, at)
            return
        note = f"{error.kind.value} on {worker_id}"
        if step.rung is not None:
            assert step.worker_id is not None, f"{step.rung.value}: where?"
            self._pin(task, step.worker_id, at, step.rung)
            note += f"; {step.rung.value}: {step.worker_id}"
        self._demand.requeue(task, note)

    def _candidates(self, task: Task, at: float) -> list[Candidate]:
        """Workers that are up and could take the task, and those that it failed on, which may be starting anew."""
        failed = {failure.worker_id for failure in task.memory_failures}
        return [
            Candidate(worker.worker_id, worker.capacity_bytes or 0, worker.wait_seconds(at) if worker.live else None)
            for worker in self._fleet.workers.values()
            if worker.live or worker.worker_id in failed
            if self._fleet.may_take(worker.worker_id, task.signature.needed_bytes)
        ]

    def _others(self, task: Task, at: float) -> list[Candidate]:
        """Workers that are up, could take the task, and were not lost with it."""
        return [
            c
            for c in self._candidates(task, at)
            if c.worker_id not in task.crashed and self._fleet.workers[c.worker_id].live
        ]

    def _pin(self, task: Task, worker_id: WorkerId, at: float, rung: Rung | None = None) -> None:
        """Let a task wait for one worker, for some time; `rung` is what that is for."""
        task.pinned_to, task.pinned_until = worker_id, at + PIN_SECONDS
        self._pinned[task.name] = task
        task.recycle_first, task.next_rung = rung is Rung.RECYCLE, rung

    def _forgive_the_only_one(self, worker_id: WorkerId) -> None:
        """A worker was lost with a task that nobody runs again: it may have been either's fault. While others are up a
        worker that is lost too often can be given up; the only one cannot, or a few bad tasks would end the pool."""
        others = (w for w in self._fleet.workers.values() if w.worker_id != worker_id)
        if not any(worker.live and worker.wanted for worker in others):
            self._fleet.forgive(worker_id)

    def _quarantine_hungry(self, task: Task, error: RunError, at: float) -> None:
        """No rung is left for a task that ran out of memory. Memory is a matter of sizes: what has the same is refused
        with it, unless it ran well before. Host memory is no matter of the sizes that are known here."""
        task.rungs += (Rung.QUARANTINE,)
        reason = memory_story(task.spec, task.memory_failures, task.signature.scratch_bytes, error.message)
        keys: tuple[Hashable, ...] = (task.name,)
        if error.kind is RunErrorKind.OUT_OF_VRAM and _sizes(task.spec) not in self._proven:
            keys = _keys(task.spec)
        known = [w.capacity_bytes or 0 for w in self._fleet.workers.values()]
        largest_bytes = max([*known, *(failure.capacity_bytes for failure in task.memory_failures)])
        final = RunError(error.kind, reason, error.traceback_text, task.rungs)
        self._quarantine(task, keys, largest_bytes, final, at)

    def _quarantine_crasher(self, task: Task, worker_id: WorkerId, error: RunError, at: float) -> None:
        """A task took too many workers down with it: it was not their fault. Only this very task is refused: what it
        is about may be what does it."""
        for crashed in task.crashed:
            self._fleet.forgive(crashed)
        message = (
            f"{self._final(task, worker_id, error).message}. It is quarantined: {len(task.crashed)} runs of it ended "
            f"with their worker lost or over time ({', '.join(task.crashed)})"
        )
        task.rungs += (Rung.QUARANTINE,)
        final = RunError(error.kind, message, error.traceback_text, task.rungs)
        self._quarantine(task, (task.name,), NO_CAPACITY_IS_ENOUGH, final, at)

    def _quarantine(
        self, task: Task, keys: Iterable[Hashable], capacity_bytes: int, error: RunError, at: float
    ) -> None:
        """Fail its jobs, and refuse work with these keys until a worker with more than `capacity_bytes` is up."""
        for key in keys:
            self.quarantine.add(key, at, capacity_bytes, error.kind, error.message)
        self._story.note(task, Rung.QUARANTINE.value)
        self._demand.fail_task(task, error)

    def _final(self, task: Task, worker_id: WorkerId, error: RunError) -> RunError:
        message = (
            f"{task.spec.stage.value} task {task.name} failed on {worker_id} in attempt {task.attempt} "
            f"({task.failures} of at most {self._config.max_attempts} failures): {error.message}"
        )
        return RunError(error.kind, message, error.traceback_text, joined(task.rungs, error.rungs))


def _keys(spec: TaskSpec) -> tuple[Hashable, ...]:
    return (spec.task_id, _sizes(spec))


def _sizes(spec: TaskSpec) -> Hashable:
    """What the memory that a task takes depends on: by counted figures, since corrected ones change from run to run."""
    return (sizes_of(spec), spec.counted_bytes or spec.activation_bytes)


def _soonest(candidate: Candidate) -> tuple[float, int, WorkerId]:
    wait_seconds = float("inf") if candidate.wait_seconds is None else candidate.wait_seconds
    return wait_seconds, -candidate.capacity_bytes, candidate.worker_id
