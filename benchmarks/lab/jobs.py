"""Jobs of the baseline policies, and which results are still needed."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from modelpool.pool.values.specs.spec import ComponentKey, ComponentSpec, JobSpec, Role, Stage, TaskId, TaskSpec
from modelpool.pool.weights.plan.eviction_plan import needed_bytes
from modelpool.scheduler.model.messages import Command, ReleaseResult
from modelpool.scheduler.simulator.records import model_name


@dataclass(slots=True, eq=False)
class PeerJob:
    """A job that is not resolved."""

    job: JobSpec
    #: in order of arrival
    number: int
    arrived_at: float
    #: the model that policies route by
    model: str
    #: the smallest memory that all its tasks run in
    needed_bytes: int
    completed: set[TaskId] = field(default_factory=set)
    attempts: int = 0
    cancelled: bool = False

    @property
    def next_task(self) -> TaskSpec | None:
        """The first task whose result does not exist; None if all exist."""
        for task in self.job.tasks:
            if task.task_id not in self.completed:
                return task
        return None


def peer_job(job: JobSpec, number: int, at: float, specs: Mapping[ComponentKey, ComponentSpec]) -> PeerJob:
    """Create the record of a job on arrival."""
    least_bytes = max(needed_bytes(task.uses, task.least_activation_bytes) for task in job.tasks) if job.tasks else 0
    return PeerJob(job, number, at, model_of(job, specs), least_bytes)


def model_of(job: JobSpec, specs: Mapping[ComponentKey, ComponentSpec]) -> str:
    """The base model of a job: that of the diffusion model which its first sample task uses. LoRAs do not count."""
    ordered = sorted(job.tasks, key=lambda task: task.stage is not Stage.SAMPLE)
    for task in ordered:
        for use in task.uses:
            if use.component in specs and specs[use.component].role is Role.DIFFUSION_MODEL:
                return model_name(use.component)
    return next((model_name(use.component) for task in ordered for use in task.uses), "")


class PeerResults:
    """Reference counts of results. Unreferenced ones are released; commands go to `out`."""

    def __init__(self, out: list[Command]) -> None:
        self._out = out
        self._holders: Counter[TaskId] = Counter()

    def hold(self, task_id: TaskId) -> None:
        """Add a reader."""
        self._holders[task_id] += 1

    def let_go(self, task_ids: Iterable[TaskId]) -> None:
        """Remove a reader of each of them."""
        for task_id in task_ids:
            self._holders[task_id] -= 1
            if self._holders[task_id] <= 0:
                del self._holders[task_id]
                self._out.append(ReleaseResult(task_id))

    def lost(self, task_id: TaskId) -> None:
        """The result no longer exists."""
        self._holders.pop(task_id, None)

    def __contains__(self, task_id: TaskId) -> bool:
        return task_id in self._holders


class EncodeCache:
    """The last `size` results of encode tasks, of the complete pool (scope "") or of each worker."""

    def __init__(self, size: int, results: PeerResults) -> None:
        self._size = size
        self._results = results
        self._kept: dict[str, OrderedDict[TaskId, None]] = {}

    def has(self, scope: str, task_id: TaskId) -> bool:
        """Whether it is cached; if so, it becomes the most recently used."""
        kept = self._kept.get(scope)
        if kept is None or task_id not in kept:
            return False
        kept.move_to_end(task_id)
        return True

    def keep(self, scope: str, task_id: TaskId) -> None:
        """Add a new result."""
        if self._size == 0:
            return
        kept = self._kept.setdefault(scope, OrderedDict())
        if task_id not in kept:
            kept[task_id] = None
            self._results.hold(task_id)
        if len(kept) > self._size:
            oldest, _ = kept.popitem(last=False)
            self._results.let_go((oldest,))

    def lost(self, task_id: TaskId) -> None:
        """The result no longer exists."""
        for kept in self._kept.values():
            kept.pop(task_id, None)
