"""What the controller knows of tasks beside what the core knows: the work, the result's reference, the last report.

An entry lives as long as someone may ask for it: while a job that is not resolved names it, while it runs, or while its
result is held. Decides nothing; the core says when a result goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from modelpool.actors.results.outcomes import TaskSummary
from modelpool.actors.wire.messages import ResultRef, RunRequest
from modelpool.pool.core.stage_params import Coming, EncodeWork, SampleWork, Work, control_key, lora_key, roles_of
from modelpool.pool.loading.file_parts import FilePart
from modelpool.pool.specs.spec import ComponentKey, JobId, JobSpec, Role, TaskId, TaskReport, TaskSpec
from modelpool.scheduler.tables.messages import RunTask, UploadAhead
from modelpool.scheduler.tables.placement_record import Why


@dataclass(slots=True)
class _Entry:
    spec: TaskSpec
    work: Work
    #: jobs that are not resolved and name it, in the order they came; the values are nothing
    jobs: dict[JobId, None] = field(default_factory=dict)
    running: bool = False
    #: set when a result was made, until the core releases it
    result: ResultRef | None = None
    #: of the run that made the result, and who the run is counted for
    report: TaskReport | None = None
    counted_for: JobId | None = None
    #: of the latest run
    why: Why | None = None


class TaskBook:
    """The tasks of a controller, by id."""

    def __init__(self, heard: Callable[[TaskSpec, TaskReport], None] = lambda task, report: None) -> None:
        """`heard` is told of every run that ended with a report."""
        self._heard = heard
        self._entries: dict[TaskId, _Entry] = {}
        self._given: dict[TaskId, ResultRef] = {}
        self._tasks_of: dict[JobId, tuple[TaskId, ...]] = {}
        #: where each component is that a task ever named, where it was last; a few hundred bytes each
        self._files: dict[ComponentKey, FilePart] = {}

    def __len__(self) -> int:
        return len(self._entries) + len(self._given)

    def add(self, job: JobSpec, works: Mapping[TaskId, Work], given: Mapping[TaskId, ResultRef]) -> None:
        """A job comes in. Equal tasks of several jobs are one entry."""
        self._given.update(given)
        self._tasks_of[job.job_id] = tuple(task.task_id for task in job.tasks)
        for task in job.tasks:
            entry = self._entries.setdefault(task.task_id, _Entry(task, works[task.task_id]))
            entry.jobs[job.job_id] = None
            self._note_files(task, works[task.task_id])

    def resolve(self, job_id: JobId) -> tuple[TaskSummary, ...]:
        """A job is resolved: what its tasks that have a result cost. Nothing needs them on its account any more."""
        summaries = []
        for task_id in self._tasks_of.pop(job_id, ()):
            entry = self._entries[task_id]
            if entry.report is not None:
                if entry.counted_for is None:
                    entry.counted_for = job_id
                summaries.append(_summary(entry, entry.report, shared=entry.counted_for != job_id))
            del entry.jobs[job_id]
            self._drop_unneeded(task_id)
        return tuple(summaries)

    def begin(self, command: RunTask, run: int) -> tuple[RunRequest, tuple[ResultRef, ...]]:
        """A task is sent to a worker: what to send. All its inputs are held; the core waits for that."""
        entry = self._entries[command.task_id]
        entry.running = True
        entry.why = command.why
        request = RunRequest(
            task=entry.spec,
            work=entry.work,
            attempt=command.attempt,
            run=run,
            fresh=command.fresh,
            needed_next=command.needed_next,
            rungs=command.rungs,
        )
        return request, tuple(self._held(need) for need in entry.spec.needs)

    def end(self, report: TaskReport, result: ResultRef) -> None:
        """A run ended with `report`; `result` is held when that has no error."""
        entry = self._entries[report.task_id]
        entry.running = False
        self._heard(entry.spec, report)
        if report.error is None:
            entry.result, entry.report, entry.counted_for = result, report, next(iter(entry.jobs), None)

    def abandon(self, task_id: TaskId) -> None:
        """A run was lost with its worker."""
        self._entries[task_id].running = False
        self._drop_unneeded(task_id)

    def settle(self, task_id: TaskId) -> None:
        """The core has dealt with the end of a run: drop the entry if that was the last anyone wanted of it."""
        self._drop_unneeded(task_id)

    def result(self, task_id: TaskId) -> ResultRef:
        """The reference to a result that is held."""
        return self._held(task_id)

    def release(self, task_id: TaskId) -> None:
        """The result is not needed any more. Ignores what is not held."""
        self._given.pop(task_id, None)
        if task_id in self._entries:
            self._entries[task_id].result = None
            self._drop_unneeded(task_id)

    def spec(self, task_id: TaskId) -> TaskSpec:
        """The task."""
        return self._entries[task_id].spec

    def coming(self, command: UploadAhead) -> Coming:
        """What a worker is told that is to bring weights ahead; without tasks that nobody wants any more."""
        known = [self._entries[task_id] for task_id in command.task_ids if task_id in self._entries]
        return Coming(tuple((entry.spec, entry.work) for entry in known), command.needed_next, command.kept)

    def file_parts(self, components: Iterable[ComponentKey]) -> tuple[FilePart, ...]:
        """Where these components are; those that no task ever named are left out."""
        return tuple(self._files[key] for key in components if key in self._files)

    def first_job(self, task_id: TaskId) -> JobId | None:
        """The first of the unresolved jobs that name the task; None when only cancelled ones did."""
        entry = self._entries.get(task_id)
        return next(iter(entry.jobs), None) if entry else None

    def _note_files(self, task: TaskSpec, work: Work) -> None:
        for use, role in zip(task.uses, roles_of(work, len(task.uses)), strict=True):
            if role is Role.CONTROLNET:
                self._files[use.component] = FilePart(_control_path(work, use.component))
                continue
            known = self._files.get(use.component)
            if known is None or known.path != work.model.path:
                self._files[use.component] = FilePart(work.model.path, role, work.model.assembly)
            if use.adapters and isinstance(work, (EncodeWork, SampleWork)):
                paths = {lora_key(lora): lora.path for lora in work.loras}
                for key in use.adapters:
                    self._files[key] = FilePart(paths[key])

    def _held(self, task_id: TaskId) -> ResultRef:
        if task_id in self._given:
            return self._given[task_id]
        result = self._entries[task_id].result
        assert result is not None, f"the result of {task_id} is needed and not held"
        return result

    def _drop_unneeded(self, task_id: TaskId) -> None:
        entry = self._entries.get(task_id)
        if entry is not None and not entry.jobs and not entry.running and entry.result is None:
            del self._entries[task_id]


def _control_path(work: Work, key: ComponentKey) -> str:
    """Where the ControlNet of this name is."""
    assert isinstance(work, SampleWork), f"{key} is used by {work}"
    return next(control.path for control in work.controls if control_key(control) == key)


def _summary(entry: _Entry, report: TaskReport, shared: bool) -> TaskSummary:
    cost = report.cost
    return TaskSummary(
        stage=entry.spec.stage,
        worker=report.worker_id,
        seconds=cost.load_seconds + cost.run_seconds,
        load_seconds=cost.load_seconds,
        resident=cost.resident,
        uploaded_bytes=cost.uploaded_bytes,
        streamed_bytes=cost.streamed_bytes,
        patch_switches=cost.patch_switches,
        shared=shared,
        divided="" if cost.division is None else cost.division.words,
        rungs=tuple(rung.value for rung in cost.rungs),
        why=entry.why,
        batched=cost.batched,
    )
