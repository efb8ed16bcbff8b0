"""A core that does what a test wrote down: for each worker the runs in order, batches and fetches ahead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from modelpool.pool.values.specs.spec import (
    ComponentKey,
    ComponentSpec,
    ComponentUse,
    Role,
    Stage,
    TaskId,
    TaskSpec,
    WorkerId,
)
from modelpool.scheduler.model.messages import (
    BatchMate,
    Command,
    Event,
    Prefetch,
    RunEnded,
    RunTask,
    StartWorker,
    WorkersWanted,
    WorkerUp,
)


@dataclass(frozen=True)
class Step:
    """One run: its task, its mates, fetches ahead while it runs, and what the command says is needed next."""

    task: str
    batch_mates: tuple[str, ...] = ()
    prefetch: tuple[str, ...] = ()
    needed_next: tuple[str, ...] = ()


@dataclass
class Scripted:
    """Runs the steps of each worker one after the other, from when it is up. Jobs are never resolved."""

    steps: Mapping[str, Sequence[Step]]
    done: dict[WorkerId, int] = field(default_factory=dict)
    ended: list[RunEnded] = field(default_factory=list)
    left: dict[WorkerId, int] = field(default_factory=dict)

    def handle(self, event: Event) -> list[Command]:
        match event:
            case WorkersWanted(worker_ids=names):
                return [StartWorker(name, 1) for name in names]
            case WorkerUp(worker=spec):
                return self._next(spec.worker_id)
            case RunEnded(report=report):
                self.ended.append(event)
                self.left[report.worker_id] -= 1
                return self._next(report.worker_id) if self.left[report.worker_id] == 0 else []
            case _:
                return []

    def _next(self, worker_id: WorkerId) -> list[Command]:
        number = self.done.get(worker_id, 0)
        steps = self.steps.get(worker_id, ())
        if number == len(steps):
            return []
        self.done[worker_id] = number + 1
        step = steps[number]
        self.left[worker_id] = 1 + len(step.batch_mates)
        run = RunTask(
            worker_id,
            1,
            TaskId(step.task),
            0,
            needed_next=tuple(map(ComponentKey, step.needed_next)),
            batch_mates=tuple(BatchMate(TaskId(name), 0) for name in step.batch_mates),
        )
        ahead = Prefetch(worker_id, 1, tuple(map(ComponentKey, step.prefetch)))
        return [run, ahead] if step.prefetch else [run]


def component(key: str, size_bytes: int, role: Role = Role.DIFFUSION_MODEL) -> ComponentSpec:
    return ComponentSpec(ComponentKey(key), role, size_bytes, size_bytes)


def task(
    name: str,
    component: str,
    *,
    seconds: float = 10.0,
    activation_bytes: int = 0,
    passes: int = 1,
    adapters: Sequence[str] = (),
    patched_bytes: int = 0,
) -> TaskSpec:
    """A task with one component; with adapters its patch set has their names."""
    use = ComponentUse(
        ComponentKey(component),
        0,
        "+".join(adapters),
        patched_bytes,
        passes,
        tuple(ComponentKey(key) for key in adapters),
    )
    return TaskSpec(TaskId(name), Stage.SAMPLE, (use,), activation_bytes, seconds)
