"""Writes a workload as lines of text and reads it back: one JSON object per line.

    {"modelpool_trace": 1, "name": "nightly"}                                       the first line
    {"component": "sdxl/vae", "role": "vae", "weight_bytes": 1, "upload_bytes": 1}  a component
    {"kind": 0, "stage": "decode", "uses": [...], ...}                              the costs of tasks of one kind
    {"at": 1.5, "job": "a", "tasks": [["id", 0, "id of a task it needs"]], ...}     a job, its tasks by kind
    {"model": "sdxl", "step_seconds": 0.1, ...}                                     a model, for the short form
    {"at": 1.5, "model": "sdxl", "loras": ["x"], "steps": 20, "user": "ann"}        a job in the short form

Lines refer only to earlier lines; jobs are in order of time. Tasks with one name in several jobs are one task: they
have equal needs and uses. A deadline counts from `at` in the short form; in the long form it is a time like `at`, and
not before it. Times go up to 1e12, durations up to 1e9 seconds. A job with `"others_follow": 1` starts with the next
job of the trace: they were submitted as one pack. Reads and writes no files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from modelpool.pool.values.core.errors import UserError, missing_value
from modelpool.pool.values.specs.spec import (
    UNPATCHED,
    ComponentKey,
    ComponentSpec,
    ComponentUse,
    ExecutionMode,
    JobId,
    JobSpec,
    Role,
    Stage,
    TaskId,
    TaskSpec,
    UserId,
)
from modelpool.scheduler.model.jobs import problem_with
from modelpool.scheduler.model.messages import Submitted
from modelpool.scheduler.simulator.workloads.fields import LATEST, MOST_SECONDS, MOST_STEPS, Fields
from modelpool.scheduler.simulator.workloads.models import InventedModel
from modelpool.scheduler.simulator.workloads.short_form import model_of, short_job
from modelpool.scheduler.simulator.workloads.workload import Workload

VERSION = 1
#: the slowdown of a divided run is at least 1 and less than this
MOST_SLOWDOWN = 1000.0


def to_lines(workload: Workload) -> Iterator[str]:
    """Return the lines of a trace, without line ends. The line of a task kind comes before the first job that uses
    it."""
    yield _text({"modelpool_trace": VERSION, "name": workload.name})
    for spec in workload.components:
        sizes = {"weight_bytes": spec.weight_bytes, "upload_bytes": spec.upload_bytes}
        yield _text({"component": spec.key, "role": spec.role.value, **sizes})
    kinds: dict[TaskSpec, int] = {}
    for submitted in workload.jobs:
        for kind in map(_kind_of, submitted.job.tasks):
            if kind not in kinds:
                kinds[kind] = len(kinds)
                yield _text({"kind": kinds[kind], **_kind_values(kind)})
        yield _text(_job_values(submitted, kinds))


def from_lines(lines: Iterable[str]) -> Workload:
    """Parse these lines. Empty lines are skipped.

    Raises UserError, naming line and field, for unknown fields and versions, numbers out of range, unknown or repeated
    names, and jobs that are not well formed.
    """
    reader = _Reader()
    for number, line in enumerate(lines, start=1):
        if line.strip():
            reader.read(number, line)
    return reader.workload()


def _kind_of(task: TaskSpec) -> TaskSpec:
    """The properties that tasks of one kind have in common: everything except their names."""
    return replace(task, task_id=TaskId(""), needs=())


@dataclass(slots=True)
class _Reader:
    """The content of the lines read so far."""

    name: str | None = None
    components: dict[ComponentKey, ComponentSpec] = field(default_factory=dict)
    kinds: dict[int, TaskSpec] = field(default_factory=dict)
    models: dict[str, InventedModel] = field(default_factory=dict)
    jobs: dict[JobId, Submitted] = field(default_factory=dict)
    #: each task with the job that named it first
    tasks: dict[TaskId, tuple[TaskSpec, JobId]] = field(default_factory=dict)
    last_at: float = 0.0

    def read(self, number: int, line: str) -> None:
        """Read one more line."""
        fields = Fields.of_line(number, line)
        if self.name is None:
            version = fields.whole("modelpool_trace", 0)
            if version != VERSION:
                raise fields.problem("modelpool_trace", version, f"{VERSION}, the only supported version")
            self.name = fields.text("name", "")
        elif "at" in fields:
            self._read_job(number, fields)
        elif "component" in fields:
            self._add(fields, _component(fields))
        elif "kind" in fields:
            self._read_kind(fields)
        elif "model" in fields:
            self._read_model(fields)
        else:
            raise fields.problem("", ", ".join(fields.names), "a line with component, kind, model, or at")
        fields.end()

    def workload(self) -> Workload:
        """The complete workload."""
        if self.name is None:
            raise missing_value("line 1", '{"modelpool_trace": 1, "name": ...}')
        return Workload(self.name, tuple(self.components.values()), tuple(self.jobs.values()))

    def _add(self, fields: Fields, spec: ComponentSpec) -> None:
        if spec.key in self.components:
            raise fields.problem("component", spec.key, "each component once")
        self.components[spec.key] = spec

    def _read_kind(self, fields: Fields) -> None:
        kind = fields.whole("kind", 0)
        if kind in self.kinds:
            raise fields.problem("kind", kind, "each number once")
        self.kinds[kind] = TaskSpec(
            task_id=TaskId(""),
            stage=fields.one_of("stage", {stage.value: stage for stage in Stage}),
            uses=tuple(self._use(use) for use in fields.objects("uses")),
            activation_bytes=fields.whole("activation_bytes", 0),
            run_seconds=fields.number("run_seconds", 0.0, most=MOST_SECONDS),
            divisions=tuple(_division(division) for division in fields.objects("divisions")),
            counted_bytes=fields.whole("counted_bytes", 0, 0),
            together=fields.text("together", ""),
            batch_size=fields.whole("batch_size", 1, 1),
            pass_key=fields.text("pass_key", ""),
            is_kept=bool(fields.whole("is_kept", 0, 0)),
            degrees=_degrees(fields),
        )

    def _use(self, fields: Fields) -> ComponentUse:
        use = ComponentUse(
            component=ComponentKey(fields.text("component")),
            scratch_bytes=fields.whole("scratch_bytes", 0, 0),
            patch_digest=fields.text("patch_digest", UNPATCHED),
            patched_bytes=fields.whole("patched_bytes", 0, 0),
            passes=fields.whole("passes", 1, 1, MOST_STEPS),
            adapters=tuple(ComponentKey(name) for name in fields.texts("adapters")),
        )
        for name, key in [("component", use.component), *(("adapters", key) for key in use.adapters)]:
            if key not in self.components:
                raise fields.problem(name, key, "a component of an earlier line")
        fields.end()
        return use

    def _read_model(self, fields: Fields) -> None:
        model = model_of(fields)
        if model.name in self.models:
            raise fields.problem("model", model.name, "each model once")
        for spec in model.components:
            self._add(fields, spec)
        self.models[model.name] = model

    def _read_job(self, number: int, fields: Fields) -> None:
        at = fields.number("at", 0.0, most=LATEST)
        if at < self.last_at:
            raise fields.problem("at", at, f"{self.last_at} or later: jobs are in order of time")
        if "model" in fields:
            job, adapters = short_job(number, fields, self.models, at)
            for spec in adapters:
                self.components.setdefault(spec.key, spec)
        else:
            job = self._job(fields, at)
        if job.job_id in self.jobs:
            raise fields.problem("job", job.job_id, "each job once")
        if complaint := problem_with(job, self.components):
            raise fields.problem("tasks", job.job_id, f"a well-formed job ({complaint})")
        for task in job.tasks:
            known, first = self.tasks.setdefault(task.task_id, (task, job.job_id))
            if _does(known) != _does(task):
                expected = f"the same stage, needs and components as in job {first}: tasks of one name are one task"
                raise fields.problem("tasks", task.task_id, expected)
        others_follow = bool(fields.whole("others_follow", 0, 0, 1))
        self.jobs[job.job_id] = Submitted(at, job, others_follow=others_follow)
        self.last_at = at

    def _job(self, fields: Fields, at: float) -> JobSpec:
        return JobSpec(
            job_id=JobId(fields.text("job")),
            tasks=tuple(self._task(fields, f"tasks[{i}]", row) for i, row in enumerate(fields.items("tasks"))),
            wanted=TaskId(fields.text("wanted")),
            given=tuple(TaskId(name) for name in fields.texts("given")),
            priority=fields.whole("priority", -(2**31), 0, 2**31),
            user=UserId(fields.text("user", "")),
            deadline=fields.number_or_none("deadline", at, LATEST + MOST_SECONDS),
            batch=fields.text("batch", ""),
        )

    def _task(self, fields: Fields, place: str, row: object) -> TaskSpec:
        if not isinstance(row, list) or len(row) < 2:
            raise fields.problem(place, row, "[id, number of its kind, ids of the tasks that it needs ...]")
        task_id, kind, *needs = row
        if isinstance(kind, bool) or not isinstance(kind, int) or kind not in self.kinds:
            raise fields.problem(f"{place}[1]", kind, "the number of a kind of an earlier line")
        names = [TaskId(fields.as_text(f"{place}[{i}]", name)) for i, name in enumerate(needs, start=2)]
        return replace(self.kinds[kind], task_id=TaskId(fields.as_text(f"{place}[0]", task_id)), needs=tuple(names))


def _does(task: TaskSpec) -> tuple[object, ...]:
    """The identity of a task. Its costs may be known better in a later job."""
    uses = [(use.component, use.patch_digest, use.adapters) for use in task.uses]
    return task.stage, task.needs, uses


def _component(fields: Fields) -> ComponentSpec:
    return ComponentSpec(
        ComponentKey(fields.text("component")),
        fields.one_of("role", {role.value: role for role in Role}),
        fields.whole("weight_bytes", 1),
        fields.whole("upload_bytes", 1),
    )


def _division(fields: Fields) -> ExecutionMode:
    division = ExecutionMode(
        activation_bytes=fields.whole("activation_bytes", 0),
        batch=fields.whole("batch", 0, 0),
        tile=fields.whole("tile", 0, 0),
        slowdown=fields.number("slowdown", 1.0, 1.0, MOST_SLOWDOWN),
        counted_bytes=fields.whole("counted_bytes", 0, 0),
    )
    fields.end()
    return division


def _degrees(fields: Fields) -> tuple[int, ...]:
    """The numbers of GPUs that may share a run; one if there are none on the line."""
    found = fields.items("degrees")
    degrees = tuple(value for value in found if isinstance(value, int) and not isinstance(value, bool) and value >= 1)
    if len(degrees) < len(found) or list(degrees) != sorted(set(degrees)):
        raise fields.problem("degrees", found, "whole numbers of GPUs from 1, in rising order")
    return degrees or (1,)


def _kind_values(kind: TaskSpec) -> dict[str, object]:
    """Its fields on a line, without defaults."""
    values: dict[str, object] = {
        "stage": kind.stage.value,
        "uses": [_use_values(use) for use in kind.uses],
        "activation_bytes": kind.activation_bytes,
        "run_seconds": kind.run_seconds,
    }
    divisions = [_division_values(division) for division in kind.divisions]
    rest = {"divisions": divisions, "counted_bytes": kind.counted_bytes, "together": kind.together}
    rest["batch_size"] = kind.batch_size if kind.batch_size > 1 else 0
    rest["pass_key"] = kind.pass_key
    rest["is_kept"] = int(kind.is_kept)
    rest["degrees"] = list(kind.degrees) if kind.degrees != (1,) else []
    return values | {name: value for name, value in rest.items() if value}


def _division_values(division: ExecutionMode) -> dict[str, object]:
    values: dict[str, object] = {"activation_bytes": division.activation_bytes, "slowdown": division.slowdown}
    rest = {"batch": division.batch, "tile": division.tile, "counted_bytes": division.counted_bytes}
    return values | {name: value for name, value in rest.items() if value}


def _use_values(use: ComponentUse) -> dict[str, object]:
    values: dict[str, object] = {"component": use.component, "scratch_bytes": use.scratch_bytes}
    if use.passes != 1:
        values["passes"] = use.passes
    rest = {"patch_digest": use.patch_digest, "patched_bytes": use.patched_bytes, "adapters": use.adapters}
    return values | {name: value for name, value in rest.items() if value}


def _job_values(submitted: Submitted, kinds: dict[TaskSpec, int]) -> dict[str, object]:
    job = submitted.job
    values: dict[str, object] = {"at": submitted.at, "job": job.job_id}
    rest = {"user": job.user, "priority": job.priority, "batch": job.batch, "given": job.given}
    values |= {name: value for name, value in rest.items() if value}
    if job.deadline is not None:
        values["deadline"] = job.deadline
    if submitted.others_follow:
        values["others_follow"] = 1
    tasks = [[task.task_id, kinds[_kind_of(task)], *task.needs] for task in job.tasks]
    return values | {"tasks": tasks, "wanted": job.wanted}


def _text(values: dict[str, object]) -> str:
    try:
        return json.dumps(values, allow_nan=False)
    except ValueError as error:
        raise UserError(f"{values}: {error}; expected finite numbers, which a trace can hold") from None
