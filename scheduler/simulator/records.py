"""Records of a simulation: every run, and totals over them. Counted by the simulated workers, not by the core."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from modelpool.pool.values.specs.spec import ComponentKey, JobId, RunCost, Stage, TaskId, WorkerId
from modelpool.pool.weights.plan.eviction_plan import Move


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """One attempt at one task. In a batch each task has its share of seconds and bytes.

    job_id           the first job that named the task
    model            the part of the key of the task's first component before its "/"
    loaded_at        when everything that it needs before it computes was there, or when it ended
    ended_at         when the worker finished or lost it; later than started_at + seconds for a share of a batch
    storage_bytes    read for it; without bytes that had been prefetched, or were being read for another run
    adapters         the LoRAs of its patch sets
    adapters_loaded  the `adapters` that were read for it, completely or in part
    batched          number of tasks that began together with it, including itself
    resident         every component was fully resident with the right patches
    """

    task_id: TaskId
    job_id: JobId
    model: str
    stage: Stage
    worker_id: WorkerId
    started_at: float
    loaded_at: float
    ended_at: float
    load_seconds: float
    run_seconds: float
    uploaded_bytes: int
    streamed_bytes: int
    storage_bytes: int
    patch_switches: int
    adapters: tuple[ComponentKey, ...]
    adapters_loaded: tuple[ComponentKey, ...]
    resident: bool
    batched: int
    ended_well: bool


def model_name(component: ComponentKey) -> str:
    """The model that a component belongs to: the part of its key before the first "/"."""
    return component.partition("/")[0]


@dataclass(slots=True)
class SimulationTotals:
    """Totals over the ended runs of the simulated workers. `preloaded_bytes` were preloaded during runs, for others;
    `reloads` are loads of components of which a copy had ended with a node that was given up; `pinned_bytes` and
    `pinned_seconds` are of loads of pinned weights without runs."""

    events: int = 0
    runs: int = 0
    uploaded_bytes: int = 0
    streamed_bytes: int = 0
    preloaded_bytes: int = 0
    storage_bytes: int = 0
    patch_switches: int = 0
    runs_resident: int = 0
    adapters_loaded: int = 0
    reloads: int = 0
    load_seconds: float = 0.0
    run_seconds: float = 0.0
    pinned_bytes: int = 0
    pinned_seconds: float = 0.0
    #: (worker, component) -> bytes loaded to it, except those that were loaded again with other patches
    cold_bytes: dict[tuple[WorkerId, ComponentKey], int] = field(default_factory=dict)

    def count(
        self,
        worker_id: WorkerId,
        cost: RunCost,
        adapters_loaded: Sequence[ComponentKey],
        cold: Iterable[Move],
    ) -> None:
        """Add one run, with its share of its batch."""
        self.runs += 1
        self.uploaded_bytes += cost.uploaded_bytes
        self.streamed_bytes += cost.streamed_bytes
        self.storage_bytes += cost.storage_bytes
        self.patch_switches += cost.patch_switches
        self.runs_resident += cost.resident
        self.adapters_loaded += len(adapters_loaded)
        self.load_seconds += cost.load_seconds
        self.run_seconds += cost.run_seconds
        for move in cold:
            key = (worker_id, move.component)
            self.cold_bytes[key] = self.cold_bytes.get(key, 0) + move.bytes


def shares(cost: RunCost, number: int) -> tuple[RunCost, ...]:
    """Divide `cost` of a batch among its `number` tasks, for their reports: what cannot be divided is the first
    one's."""
    if number == 1:
        return (cost,)
    shared: list[RunCost] = []
    for index in range(number):
        uploaded, streamed, storage, switches = (
            total // number + (total % number if index == 0 else 0)
            for total in (cost.uploaded_bytes, cost.streamed_bytes, cost.storage_bytes, cost.patch_switches)
        )
        shared.append(
            RunCost(
                load_seconds=cost.load_seconds / number,
                run_seconds=cost.run_seconds / number,
                uploaded_bytes=uploaded,
                streamed_bytes=streamed,
                peak_bytes=cost.peak_bytes,
                resident=cost.resident,
                patch_switches=switches,
                planned_bytes=cost.planned_bytes,
                working_bytes=cost.working_bytes,
                division=cost.division,
                oom_steps=cost.oom_steps,
                storage_bytes=storage,
                batched=number,
            )
        )
    return tuple(shared)
