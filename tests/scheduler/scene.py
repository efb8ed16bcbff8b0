"""A scene for tests of placements: workers, idle or busy, with their weights, and tasks that wait."""

from __future__ import annotations

from modelpool.pool.values.specs.spec import ComponentKey, NodeId, TaskSpec, WorkerId, WorkerSpec
from modelpool.pool.weights.plan.eviction_plan import Residency, Resident
from modelpool.scheduler.decisions.costs.cost_model import Costs
from modelpool.scheduler.decisions.placement.placement_query import PlacementDecision, PlacementQuery
from modelpool.scheduler.decisions.placement.registry import PLACEMENTS
from modelpool.scheduler.decisions.queue.backlog import Backlog
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.jobs import Task
from modelpool.scheduler.model.worker_index import WorkerIndex
from modelpool.scheduler.model.workers import Worker, WorkerState
from tests.scheduler.world import COMPONENTS

AT = 100.0


class Scene:
    """Workers, idle or busy, and ready tasks."""

    def __init__(self, **config: int | str) -> None:
        self.config = SchedulerConfig(patch_switch_seconds=0.5, **config)  # type: ignore[arg-type]
        self.costs = Costs(0.5)
        self.costs.know(COMPONENTS)
        self.backlog = Backlog()
        self.backlog.at = AT
        self.where = WorkerIndex()
        self.workers: list[Worker] = []
        self.tasks = 0
        self.switch_seconds = 100.0
        self.wait_factor = 20.0

    def worker(
        self,
        name: str,
        *entries: Resident,
        capacity: int = 64,
        free_in: float = 0.0,
        link: float = 1.0,
        device: str = "",
        node: str = "",
        disk: float = 0.0,
    ) -> Worker:
        """One that is idle, or that should be free in so many seconds; on a machine with such a disk, if it has a
        name."""
        worker = Worker(WorkerId(name), 1, WorkerState.BUSY if free_in else WorkerState.IDLE)
        worker.spec = WorkerSpec(
            WorkerId(name), 1, capacity, link, device, node=NodeId(node), storage_bytes_per_second=disk
        )
        worker.link_bytes_per_second = link
        worker.update_residency(Residency(capacity, entries))
        worker.expected_end = AT + free_in if free_in else None
        self.workers.append(worker)
        self.backlog.set_capacities(tuple(sorted({w.capacity_bytes or 0 for w in self.workers})))
        return worker

    def task(
        self, spec: TaskSpec, priority: int = 0, passed: float = 0.0, waited: float = 0.0, batch: str = ""
    ) -> Task:
        """One that waits, since so many seconds."""
        self.tasks += 1
        task = Task(spec, self.costs.acquire(spec), (self.tasks, 0), batch)
        task.passed = passed
        task.set_priority(priority)
        self.backlog.add(task)
        task.ready_at = AT - waited
        return task

    def query(self) -> PlacementQuery:
        """What a placement is shown now."""
        for worker in self.workers:
            self.where.note(worker, True)
        return PlacementQuery(
            AT,
            self.backlog,
            self.where,
            self.costs,
            self.config,
            self.switch_seconds,
            self.wait_factor,
            self.switch_seconds,
        )

    def ask(self) -> PlacementDecision | None:
        """What the placement of the configuration starts."""
        return PLACEMENTS[self.config.placement](self.query())

    def decision(self) -> tuple[Task, str]:
        """The task that it starts, and where."""
        choice = self.ask()
        assert choice is not None
        return choice.task, choice.worker.worker_id


def whole(component: ComponentKey, digest: str = "") -> Resident:
    """All of it, with these patches."""
    spec = next(c for c in COMPONENTS if c.key == component)
    return Resident(component, spec.weight_bytes, digest, 5 if digest else 0)
