"""`TaskStore`: the stage parameters, result references and last reports of the controller's tasks.

An entry exists as long as it may be needed: while an unresolved job names it, while it runs, or while its result is
held. The core decides when a result is released.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from modelpool.actors.results.outcomes import TaskSummary
from modelpool.actors.wire.messages import FetchOrder, ResultRef, RunRequest
from modelpool.pool.core.remote_file import RemoteFile
from modelpool.pool.core.stage_params import (
    ControlRef,
    EmbeddingRef,
    EncodeParams,
    LoraRef,
    ModelRef,
    PreloadRequest,
    SampleParams,
    StageParams,
    control_key,
    lora_key,
    roles_of,
)
from modelpool.pool.loading.file_parts import FilePart
from modelpool.pool.specs.spec import ComponentKey, JobId, JobSpec, NodeId, Role, TaskId, TaskReport, TaskSpec
from modelpool.scheduler.tables.messages import Preload, RunTask
from modelpool.scheduler.tables.placement_record import Why

#: other nodes that a run is referred to for its files; those learn of each other
MOST_PEERS = 16


@dataclass(slots=True)
class _Entry:
    spec: TaskSpec
    work: StageParams
    #: unresolved jobs that name it, in order of arrival; a dict as an ordered set
    jobs: dict[JobId, None] = field(default_factory=dict)
    running: bool = False
    #: set when there is a result, until the core releases it
    result: ResultRef | None = None
    #: of the run that produced the result, and the job that the run is counted for
    report: TaskReport | None = None
    counted_for: JobId | None = None
    #: of the latest run
    why: Why | None = None


class TaskStore:
    """The tasks of a controller, by id."""

    def __init__(self, on_report: Callable[[TaskSpec, TaskReport], None] = lambda task, report: None) -> None:
        """`on_report` is called for every run that ended with a report."""
        self._on_report = on_report
        self._entries: dict[TaskId, _Entry] = {}
        self._inputs: dict[TaskId, ResultRef] = {}
        self._tasks_of: dict[JobId, tuple[TaskId, ...]] = {}
        #: the latest file of each component that a task ever named; a few hundred bytes each
        self._files: dict[ComponentKey, FilePart] = {}
        #: whether any file was ever of a source
        self._has_remote = False
        #: addresses of the file servers, by node
        self.file_servers: dict[NodeId, str] = {}
        #: address of the catalog's file server; "" without one
        self.catalog_address = ""

    def __len__(self) -> int:
        return len(self._entries) + len(self._inputs)

    def add(self, job: JobSpec, works: Mapping[TaskId, StageParams], given: Mapping[TaskId, ResultRef]) -> None:
        """Add a job. Equal tasks of several jobs share one entry."""
        self._inputs.update(given)
        self._tasks_of[job.job_id] = tuple(task.task_id for task in job.tasks)
        for task in job.tasks:
            entry = self._entries.setdefault(task.task_id, _Entry(task, works[task.task_id]))
            entry.jobs[job.job_id] = None
            self._note_files(task, works[task.task_id])

    def resolve(self, job_id: JobId) -> tuple[TaskSummary, ...]:
        """Resolve a job; return the costs of its tasks that have a result. Its tasks are no longer needed for it."""
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
        """Mark a task as sent to a worker; return what to send. All its inputs are held; the core ensures that."""
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
            oom_steps=command.oom_steps,
            fetch=self._fetch_order(entry.work, command, run) if self._has_remote else None,
        )
        return request, tuple(self._held(need) for need in entry.spec.needs)

    def end(self, report: TaskReport, result: ResultRef) -> None:
        """Note the end of a run; `result` is held if `report` has no error."""
        entry = self._entries[report.task_id]
        entry.running = False
        self._on_report(entry.spec, report)
        if report.error is None:
            entry.result, entry.report, entry.counted_for = result, report, next(iter(entry.jobs), None)

    def abandon(self, task_id: TaskId) -> None:
        """Note that a run was lost with its worker."""
        self._entries[task_id].running = False
        self._drop_unneeded(task_id)

    def settle(self, task_id: TaskId) -> None:
        """Drop the entry after the core handled the end of a run, if nothing else needs it."""
        self._drop_unneeded(task_id)

    def result(self, task_id: TaskId) -> ResultRef:
        """Return the reference of a held result."""
        return self._held(task_id)

    def release(self, task_id: TaskId) -> None:
        """Drop a result. Ignores results that are not held."""
        self._inputs.pop(task_id, None)
        if task_id in self._entries:
            self._entries[task_id].result = None
            self._drop_unneeded(task_id)

    def spec(self, task_id: TaskId) -> TaskSpec:
        """Return the task."""
        return self._entries[task_id].spec

    def preload_request(self, command: Preload) -> PreloadRequest:
        """Return a worker's preload request, without tasks that are no longer needed."""
        known = [self._entries[task_id] for task_id in command.task_ids if task_id in self._entries]
        return PreloadRequest(tuple((entry.spec, entry.work) for entry in known), command.needed_next, command.kept)

    def file_parts(self, components: Iterable[ComponentKey]) -> tuple[FilePart, ...]:
        """Return the files of these components; those that no task ever named are left out."""
        return tuple(self._files[key] for key in components if key in self._files)

    def first_job(self, task_id: TaskId) -> JobId | None:
        """Return the first unresolved job that names the task; None if only cancelled ones did."""
        entry = self._entries.get(task_id)
        return next(iter(entry.jobs), None) if entry else None

    def _fetch_order(self, work: StageParams, command: RunTask, run: int) -> FetchOrder | None:
        """Return the files of sources that a run reads; None if all are local."""
        sets = remote_sets(work)
        if not sets:
            return None
        soon = [file.sha256 for part in self.file_parts(command.needed_next) for file in part.files]
        servers = (*self.file_servers.values(), *filter(None, (self.catalog_address,)))
        first = run % len(servers) if len(servers) > MOST_PEERS else 0
        return FetchOrder(sets, (servers + servers)[first : first + MOST_PEERS], tuple(dict.fromkeys(soon)))

    def _note_files(self, task: TaskSpec, work: StageParams) -> None:
        if not self._has_remote and remote_sets(work):
            self._has_remote = True
        for use, role in zip(task.uses, roles_of(work, len(task.uses)), strict=True):
            if role is Role.CONTROLNET:
                control = _control(work, use.component)
                self._files[use.component] = FilePart(control.path, files=control.files)
                continue
            known = self._files.get(use.component)
            if known is None or known.path != work.model.path:
                self._files[use.component] = FilePart(work.model.path, role, work.model.assembly, work.model.files)
            if use.adapters and isinstance(work, (EncodeParams, SampleParams)):
                loras = {lora_key(lora): lora for lora in work.loras}
                for key in use.adapters:
                    self._files[key] = FilePart(loras[key].path, files=loras[key].files)

    def _held(self, task_id: TaskId) -> ResultRef:
        if task_id in self._inputs:
            return self._inputs[task_id]
        result = self._entries[task_id].result
        assert result is not None, f"the result of {task_id} is needed and not held"
        return result

    def _drop_unneeded(self, task_id: TaskId) -> None:
        entry = self._entries.get(task_id)
        if entry is not None and not entry.jobs and not entry.running and entry.result is None:
            del self._entries[task_id]


def _control(work: StageParams, key: ComponentKey) -> ControlRef:
    """Return a ControlNet of a run."""
    assert isinstance(work, SampleParams), f"{key} is used by {work}"
    return next(control for control in work.controls if control_key(control) == key)


def remote_sets(work: StageParams) -> tuple[tuple[RemoteFile, ...], ...]:
    """Return the files of sources that a run reads, by model, LoRA, ControlNet and embedding."""
    refs: list[ModelRef | LoraRef | ControlRef | EmbeddingRef] = [work.model]
    if isinstance(work, (EncodeParams, SampleParams)):
        refs += work.loras
    if isinstance(work, SampleParams):
        refs += work.controls
    if isinstance(work, EncodeParams):
        refs += work.embeddings
    return tuple(dict.fromkeys(ref.files for ref in refs if ref.files))


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
        rungs=tuple(rung.value for rung in cost.oom_steps),
        why=entry.why,
        batched=cost.batched,
        fetch_seconds=cost.fetch_seconds,
        fetched_bytes=cost.fetched_bytes + cost.peer_bytes,
    )
