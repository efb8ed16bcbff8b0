"""What a simulation writes down: every run, and sums over them. Counted by the simulated workers, not by the core."""

from __future__ import annotations

from dataclasses import dataclass, field

from pool.spec import ComponentKey, JobId, RunCost, Stage, TaskId, WorkerId


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """One attempt at one task, as it went. Of tasks that ran in one batch each has its share of seconds and bytes.

    job_id           the first job that named the task
    model            what the key of the task's first component says before its "/"
    ended_at         when the worker was done with it, or lost; later than started_at + seconds for a share of a batch
    adapters         those that its patch sets are made of
    adapters_loaded  those of them that had to come from storage
    resident         every component was there, whole and with the right patches
    """

    task_id: TaskId
    job_id: JobId
    model: str
    stage: Stage
    worker_id: WorkerId
    started_at: float
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
    """What the simulated workers did, as planned when each run began."""

    events: int = 0
    runs: int = 0
    uploaded_bytes: int = 0
    streamed_bytes: int = 0
    storage_bytes: int = 0
    patch_switches: int = 0
    runs_resident: int = 0
    adapters_loaded: int = 0
    load_seconds: float = 0.0
    run_seconds: float = 0.0
    #: (worker, component) -> bytes brought to it, but for those that came again with other patches
    cold_bytes: dict[tuple[WorkerId, ComponentKey], int] = field(default_factory=dict)

    def count(self, cost: RunCost) -> None:
        """Take in what one command to run costs, all its mates together."""
        self.runs += cost.batched
        self.uploaded_bytes += cost.uploaded_bytes
        self.streamed_bytes += cost.streamed_bytes
        self.storage_bytes += cost.storage_bytes
        self.patch_switches += cost.patch_switches
        self.runs_resident += cost.batched if cost.resident else 0
        self.load_seconds += cost.load_seconds
        self.run_seconds += cost.run_seconds


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
