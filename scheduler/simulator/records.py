"""What a simulation writes down: every run, and sums over them. Counted by the simulated workers, not by the core."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from modelpool.pool.plan.residency import Move
from modelpool.pool.specs.spec import ComponentKey, JobId, RunCost, Stage, TaskId, WorkerId


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """One attempt at one task, as it went. Of tasks that ran in one batch each has its share of seconds and bytes.

    job_id           the first job that named the task
    model            what the key of the task's first component says before its "/"
    loaded_at        when what it needs before it computes was there, or when it ended
    ended_at         when the worker was done with it, or lost; later than started_at + seconds for a share of a batch
    storage_bytes    read for it; not those that had been fetched ahead, or were on their way for another
    adapters         those that its patch sets are made of
    adapters_loaded  those of them that were read for it, wholly or in part
    batched          tasks that began together with it, itself among them
    resident         every component was there, whole and with the right patches
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
    """The model that a component belongs to: what its key says before the first "/"."""
    return component.partition("/")[0]


@dataclass(slots=True)
class SimulationTotals:
    """What the simulated workers did in the runs that are over. `beside_bytes` were brought beside runs, for others."""

    events: int = 0
    runs: int = 0
    uploaded_bytes: int = 0
    streamed_bytes: int = 0
    beside_bytes: int = 0
    storage_bytes: int = 0
    patch_switches: int = 0
    runs_resident: int = 0
    adapters_loaded: int = 0
    load_seconds: float = 0.0
    run_seconds: float = 0.0
    #: (worker, component) -> bytes brought to it, but for those that came again with other patches
    cold_bytes: dict[tuple[WorkerId, ComponentKey], int] = field(default_factory=dict)

    def count(
        self,
        worker_id: WorkerId,
        cost: RunCost,
        adapters_loaded: Sequence[ComponentKey],
        cold: Iterable[Move],
    ) -> None:
        """Take in one run, with its share of what its batch did."""
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
    """`cost` of a batch as the `number` of its tasks report it: what cannot be divided is the first one's."""
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
                rungs=cost.rungs,
                storage_bytes=storage,
                batched=number,
            )
        )
    return tuple(shared)
