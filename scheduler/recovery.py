"""What follows a run that ended badly: the verdict is carried out, rungs are climbed, what does harm is quarantined.

Decisions are `scheduler.retry` and `scheduler.rungs`; here they meet tasks and workers.
"""

from __future__ import annotations

from pool.spec import RunError, RunErrorKind, Rung, TaskId, TaskSpec, WorkerId
from scheduler.config import SchedulerConfig
from scheduler.costs import SignatureKey, signature_key
from scheduler.demand import Demand
from scheduler.jobs import Task, TaskStatus
from scheduler.quarantine import Quarantine
from scheduler.retry import Verdict, blamed, verdict
from scheduler.rungs import Candidate, MemoryFailure, Step, joined, memory_story, next_step
from scheduler.story import Story
from scheduler.workers import Fleet


class Recovery:
    """Deals with tasks whose run ended badly, and refuses work that did harm before."""

    def __init__(self, config: SchedulerConfig, story: Story, fleet: Fleet, demand: Demand) -> None:
        self._config = config
        self._story = story
        self._fleet = fleet
        self._demand = demand
        self.quarantine = Quarantine(config.quarantine_seconds)

    def refusal(self, spec: TaskSpec, at: float) -> RunError | None:
        """Why the task is not taken in at present; None when it is."""
        entry = self.quarantine.refusal(_keys(spec), at) if len(self.quarantine) else None
        if entry is None:
            return None
        message = f"{spec.stage.value} task {spec.task_id} is refused for {entry.until - at:.0f} s more: {entry.reason}"
        return RunError(entry.kind, message, rungs=(Rung.QUARANTINE,))

    def ended_well(self, task: Task) -> None:
        """A run of such a task succeeded: whatever was held against its like is over."""
        task.signature.proven = True
        task.timed_out_at = None
        if len(self.quarantine):
            for key in _keys(task.spec):
                self.quarantine.lift(key)

    def ended_badly(self, task: Task, error: RunError, at: float) -> None:
        """A run ended with an error, or with its worker: the task runs again, or its jobs fail."""
        stop_asked = task.status is TaskStatus.STOPPING
        error = blamed(error, stop_asked, task.timed_out_at is not None)
        worker_id, task.timed_out_at = task.worker_id, None
        assert worker_id is not None, f"{task.name} runs nowhere"
        self._demand.let_go(task)
        if error.kind is RunErrorKind.WORKER_LOST:
            task.crashed.append(worker_id)
        if not task.demand:
            self._demand.forget(task, error.kind.value)
            return
        limits = self._config
        ruling = verdict(
            error.kind, stop_asked, task.failures + 1, limits.max_attempts, len(task.crashed), limits.crash_limit
        )
        if ruling is not Verdict.AGAIN_FREE:
            task.failures += 1
        note = f"{error.kind.value} on {worker_id}"
        match ruling:
            case Verdict.FAIL:
                self._demand.fail_task(task, self._final(task, worker_id, error))
            case Verdict.QUARANTINE:
                self._quarantine_crasher(task, worker_id, error, at)
            case Verdict.CLIMB:
                self._climb(task, worker_id, error, at)
            case _:
                if error.kind is RunErrorKind.WORKER_LOST:  # whose fault it was shows soonest when it goes first
                    task.passed = limits.limit_of(task.spec.stage)
                self._demand.requeue(task, note)
                if error.kind is RunErrorKind.INPUT_LOST:
                    self._demand.inputs_lost(task)

    def workers_changed(self) -> None:
        """Let go of tasks that wait for a worker that is not coming back, or not as large as it was."""
        self.quarantine.grown(max((w.capacity_bytes or 0 for w in self._fleet.workers.values() if w.live), default=0))
        for task in list(self._demand.tasks.values()):
            if task.pinned_to is not None and not self._fleet.may_take(task.pinned_to, task.signature.needed_bytes):
                self._story.note(task, f"waits for {task.pinned_to} no more")
                self._demand.unpin(task)

    # ---- from here on: how ------------------------------------------------------------------------------------------

    def _climb(self, task: Task, worker_id: WorkerId, error: RunError, at: float) -> None:
        """A run was out of memory: do what the next rung says."""
        worker = self._fleet.workers.get(worker_id)
        capacity_bytes = 0 if worker is None else worker.capacity_bytes or 0
        task.rungs = joined(task.rungs, error.rungs)
        task.memory_failures.append(MemoryFailure(error.kind, worker_id, capacity_bytes, task.attempt, task.rungs))
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
            task.rungs += (step.rung,)
            task.pinned_to, task.recycle_first = step.worker_id, step.rung is Rung.RECYCLE
            note += f"; {step.rung.value}: {step.worker_id}"
        self._demand.requeue(task, note)

    def _candidates(self, task: Task, at: float) -> list[Candidate]:
        return [
            Candidate(worker.worker_id, worker.capacity_bytes or 0, worker.wait_seconds(at) if worker.live else None)
            for worker in self._fleet.workers.values()
            if self._fleet.may_take(worker.worker_id, task.signature.needed_bytes)
        ]

    def _quarantine_hungry(self, task: Task, error: RunError, at: float) -> None:
        """No rung is left for a task that ran out of memory. Memory is a matter of sizes: what has the same is refused
        with it, unless it ran well before."""
        task.rungs += (Rung.QUARANTINE,)
        reason = memory_story(task.spec, task.memory_failures, task.signature.scratch_bytes, error.message)
        key = task.name if task.signature.proven else signature_key(task.spec)
        self._quarantine(task, key, RunError(error.kind, reason, error.traceback_text, task.rungs), at)

    def _quarantine_crasher(self, task: Task, worker_id: WorkerId, error: RunError, at: float) -> None:
        """A task took too many workers down with it: it was not their fault. Only this very task is refused: what it
        is about may be what does it."""
        for crashed in task.crashed:
            self._fleet.forgive(crashed)
        message = (
            f"{self._final(task, worker_id, error).message}. It is quarantined: {len(task.crashed)} workers were lost "
            f"while they ran it ({', '.join(task.crashed)})"
        )
        task.rungs += (Rung.QUARANTINE,)
        self._quarantine(task, task.name, RunError(error.kind, message, error.traceback_text, task.rungs), at)

    def _quarantine(self, task: Task, key: TaskId | SignatureKey, error: RunError, at: float) -> None:
        """Fail its jobs, and refuse work with this key."""
        largest = self._fleet.largest()
        capacity_bytes = max(
            [0 if largest is None else largest.capacity_bytes or 0, *(f.capacity_bytes for f in task.memory_failures)]
        )
        self.quarantine.add(key, at, capacity_bytes, error.kind, error.message)
        self._story.note(task, Rung.QUARANTINE.value)
        self._demand.fail_task(task, error)

    def _final(self, task: Task, worker_id: WorkerId, error: RunError) -> RunError:
        message = (
            f"{task.spec.stage.value} task {task.name} failed on {worker_id} in attempt {task.attempt} "
            f"({task.failures} of at most {self._config.max_attempts} failures): {error.message}"
        )
        return RunError(error.kind, message, error.traceback_text, joined(task.rungs, error.rungs))


def _keys(spec: TaskSpec) -> tuple[TaskId | SignatureKey, ...]:
    return (spec.task_id, signature_key(spec))
