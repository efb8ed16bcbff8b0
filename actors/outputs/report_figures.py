"""Figures of a batch report, from the entries of a manifest and, if there is one, the event log of the pool.

Entries are written by every version of modelpool, and may be edited: tasks that cannot be read are counted and left
out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveInt, TypeAdapter, ValidationError

from modelpool.actors.graph.features.recipe import Recipe
from modelpool.actors.outputs.entries import ManifestEntry
from modelpool.actors.request.labels import NO_LABELS, Labels
from modelpool.scheduler.model.messages import EndWorker, Outcome, ResolveJob, StartWorker, WorkerDown
from modelpool.scheduler.simulator.record.event_log import LogEntry

SECONDS_PER_HOUR = 3600.0
#: last moment that can be written as a date, in seconds since the epoch
LATEST_SECONDS = 250_000_000_000.0


class ReportTask(BaseModel):
    """One task of an output, as the manifest lists it (`actors.outputs.results.outcomes.TaskSummary`)."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)

    stage: str
    worker: str = ""
    node: str = ""
    device: str = ""
    seconds: NonNegativeFloat = 0.0
    load_seconds: NonNegativeFloat = 0.0
    fetch_seconds: NonNegativeFloat = 0.0
    resident: bool = False
    uploaded_bytes: int = 0
    streamed_bytes: int = 0
    patch_switches: int = 0
    shared: bool = False
    divided: str = ""
    rungs: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    resumed: str = ""
    why: str | None = None
    batched: PositiveInt = 1
    ended_at: float = Field(0.0, ge=0.0, le=LATEST_SECONDS)


_TASKS = TypeAdapter(tuple[ReportTask, ...])


@dataclass(frozen=True, slots=True)
class ReportOutput:
    """One output of the folder; `run` is the number of the run of the batch that wrote it."""

    file: str
    recipe: Recipe
    job_id: str
    seconds: float
    tasks: tuple[ReportTask, ...]
    labels: Labels = NO_LABELS
    run: int = 0

    @property
    def own_tasks(self) -> tuple[ReportTask, ...]:
        """The tasks that ran for it, without tasks that earlier jobs ran."""
        return tuple(task for task in self.tasks if not task.shared)


@dataclass(slots=True)
class RunTotals:
    """Sums over runs."""

    runs: int = 0
    hits: int = 0
    seconds: float = 0.0
    load_seconds: float = 0.0
    fetch_seconds: float = 0.0
    uploaded_bytes: int = 0
    streamed_bytes: int = 0
    patch_switches: int = 0

    def add(self, task: ReportTask) -> None:
        """Count one run."""
        self.runs += 1
        self.hits += task.resident
        self.seconds += task.seconds
        self.load_seconds += task.load_seconds
        self.fetch_seconds += task.fetch_seconds
        self.uploaded_bytes += task.uploaded_bytes
        self.streamed_bytes += task.streamed_bytes
        self.patch_switches += task.patch_switches

    def add_totals(self, other: RunTotals) -> None:
        """Add the sums of other runs."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(frozen=True, slots=True)
class PoolRecord:
    """What the event log says.

    failed     jobs that failed, with the reason
    cancelled  jobs that were cancelled
    losses     workers that were lost, with the reason
    scaling    decisions of autoscaling, as sentences
    seconds    from the first to the last event
    """

    failed: tuple[tuple[str, str], ...] = ()
    cancelled: int = 0
    losses: tuple[tuple[str, str], ...] = ()
    scaling: tuple[str, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class ReportFigures:
    """All figures of a report.

    groups      outputs by model and LoRAs, the largest group first
    by_stage    totals by the name of the group and the stage
    by_worker   totals by worker and its device
    damaged     files that are missing or damaged, with the reason
    unreadable  entries whose tasks cannot be read
    failed      jobs that failed and have no output, with the reason
    noted_jobs  their ids, as far as they are known: the event log has them, too
    failed_at   when jobs failed, in seconds since the epoch, as far as that is known
    """

    groups: Mapping[str, Sequence[ReportOutput]]
    totals: RunTotals
    by_stage: Mapping[tuple[str, str], RunTotals]
    by_worker: Mapping[tuple[str, str], RunTotals]
    damaged: tuple[tuple[str, str], ...] = ()
    unreadable: int = 0
    record: PoolRecord | None = None
    failed: tuple[tuple[str, str], ...] = ()
    noted_jobs: frozenset[str] = frozenset()
    failed_at: tuple[float, ...] = ()

    @property
    def all_failed(self) -> tuple[tuple[str, str], ...]:
        """The jobs that failed, each once, with the reason."""
        recorded = () if self.record is None else self.record.failed
        return (*self.failed, *(each for each in recorded if each[0] not in self.noted_jobs))

    @property
    def outputs(self) -> int:
        """Number of outputs."""
        return sum(map(len, self.groups.values()))

    def cost(self, price_per_hour: float) -> float:
        """Return the price of the GPU time of all runs, fetches included."""
        return (self.totals.seconds + self.totals.fetch_seconds) / SECONDS_PER_HOUR * price_per_hour


@dataclass(slots=True)
class _Sums:
    totals: RunTotals = field(default_factory=RunTotals)
    by_stage: dict[tuple[str, str], RunTotals] = field(default_factory=dict)
    by_worker: dict[tuple[str, str], RunTotals] = field(default_factory=dict)


def report_figures(
    entries: Iterable[ManifestEntry],
    damaged: Iterable[tuple[str, str]] = (),
    record: PoolRecord | None = None,
    failed: Iterable[tuple[str, str]] = (),
    noted_jobs: frozenset[str] = frozenset(),
    failed_at: Iterable[float] = (),
) -> ReportFigures:
    """Return the figures of the outputs that `entries` list, and of the jobs that `failed`, of which `noted_jobs` are
    the ids and `failed_at` the times."""
    groups: dict[str, list[ReportOutput]] = {}
    sums, unreadable = _Sums(), 0
    for entry in sorted(entries, key=lambda entry: (entry.run, entry.index)):
        tasks = _tasks_of(entry.fields)
        unreadable += tasks is None
        fields = entry.fields
        seconds, job_id = fields.get("seconds"), fields.get("job_id")
        output = ReportOutput(
            entry.file,
            entry.recipe,
            job_id if isinstance(job_id, str) else "",
            float(seconds) if isinstance(seconds, int | float) else 0.0,
            tasks or (),
            entry.labels,
            entry.run,
        )
        name = group_name(entry.recipe)
        groups.setdefault(name, []).append(output)
        for task in output.own_tasks:
            sums.totals.add(task)
            sums.by_stage.setdefault((name, task.stage), RunTotals()).add(task)
            sums.by_worker.setdefault((task.worker, task.device), RunTotals()).add(task)
    ordered = dict(sorted(groups.items(), key=lambda item: (-len(item[1]), item[0])))
    by_worker = dict(sorted(sums.by_worker.items()))
    return ReportFigures(
        groups=ordered,
        totals=sums.totals,
        by_stage=sums.by_stage,
        by_worker=by_worker,
        damaged=tuple(damaged),
        unreadable=unreadable,
        record=record,
        failed=tuple(failed),
        noted_jobs=noted_jobs,
        failed_at=tuple(failed_at),
    )


def group_name(recipe: Recipe) -> str:
    """Return the model and the LoRAs of a recipe, for users."""
    loras = [f"{lora.name} {lora.strength:g}" for lora in recipe.loras]
    return f"{recipe.model} with {', '.join(loras)}" if loras else recipe.model


def read_record(entries: Iterable[LogEntry]) -> PoolRecord:
    """Summarise an event log. Raises UserError for lines that no recorder wrote."""
    failed: list[tuple[str, str]] = []
    losses: list[tuple[str, str]] = []
    scaling: list[str] = []
    cancelled = 0
    first_at = last_at = None
    for entry in entries:
        first_at = entry.event.at if first_at is None else first_at
        last_at = entry.event.at
        if isinstance(entry.event, WorkerDown):
            losses.append((entry.event.worker_id, f"{entry.event.cause.value}: {entry.event.reason}"))
        for command in entry.commands:
            if isinstance(command, ResolveJob):
                cancelled += command.outcome is Outcome.CANCELLED
                if command.outcome is Outcome.FAILED:
                    failed.append((command.job_id, "" if command.error is None else command.error.message))
            elif isinstance(command, StartWorker | EndWorker) and command.why is not None:
                scaling.append(command.why.words)
    seconds = 0.0 if first_at is None or last_at is None else last_at - first_at
    return PoolRecord(tuple(failed), cancelled, tuple(losses), tuple(scaling), seconds)


def _tasks_of(fields: Mapping[str, Any]) -> tuple[ReportTask, ...] | None:
    try:
        return _TASKS.validate_python(fields.get("tasks", ()))
    except ValidationError:
        return None
