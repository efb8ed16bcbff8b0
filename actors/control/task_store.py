"""`TaskStore`: the stage parameters, result references and last reports of the controller's tasks.

An entry exists as long as it may be needed: while an unresolved job names it, while it runs, or while its result is
held. The core decides when a result is released.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeAlias

from modelpool.actors.control.opened_catalog import PinnableModel
from modelpool.actors.graph.common.task_files import task_files
from modelpool.actors.outputs.results.outcomes import TaskSummary
from modelpool.actors.worker.wire.messages import (
    ExpectedFile,
    FetchOrder,
    LoadRequest,
    ResultRef,
    RunRequest,
    StateSaved,
)
from modelpool.pool.values.core.file_part import FilePart
from modelpool.pool.values.core.previews import PreviewWish
from modelpool.pool.values.core.remote_file import RemoteFile
from modelpool.pool.values.core.stage_params import (
    ControlRef,
    EmbeddingRef,
    EncodeParams,
    GligenRef,
    ImagePromptRef,
    LoraRef,
    ModelRef,
    OperationParams,
    PreloadRequest,
    SampleParams,
    StageParams,
    UpscaleParams,
    UpscalerRef,
)
from modelpool.pool.values.specs.spec import (
    ComponentKey,
    JobId,
    JobSpec,
    JudgedFile,
    NodeId,
    ReadFile,
    RunErrorKind,
    TaskId,
    TaskReport,
    TaskSpec,
    WorkerId,
    file_name,
)
from modelpool.scheduler.core.snapshot import model_of
from modelpool.scheduler.model.kept_states import task_of_state
from modelpool.scheduler.model.messages import LoadWeights, Preload, RunTask
from modelpool.scheduler.model.placement_record import Why

NO_FINGERPRINTS: Mapping[ReadFile, str] = MappingProxyType({})
#: a component, and a file that it is read from
CheckedFile: TypeAlias = tuple[ComponentKey, FilePart]
NOTHING_OWN: Mapping[TaskId, int] = MappingProxyType({})
#: other nodes that a run is referred to for its files; those learn of each other
MOST_PEERS = 16
#: lost runs of a task that are kept with their reason; the retry rules allow fewer
MOST_LOST = 16


@dataclass(slots=True)
class _Entry:
    spec: TaskSpec
    work: StageParams
    #: what it reads
    files: Mapping[ComponentKey, FilePart]
    #: unresolved jobs that name it, in order of arrival; a dict as an ordered set
    jobs: dict[JobId, None] = field(default_factory=dict)
    #: workers that run it
    running: int = 0
    #: set when there is a result, until the core releases it
    result: ResultRef | None = None
    #: the state that its next run resumes from, until the core releases it, and its steps done and total
    state: ResultRef | None = None
    steps: tuple[int, int] = (0, 0)
    #: numbers of GPUs that have computed the steps so far, one after the other: of that state, and with the latest run
    state_gpus: tuple[int, ...] = ()
    gpus: tuple[int, ...] = ()
    #: of the run that produced the result, and the job that the run is counted for
    report: TaskReport | None = None
    counted_for: JobId | None = None
    #: of the latest run
    why: Why | None = None
    #: display name of the node of the run that produced the result, the name of its device, and when its report came
    node: str = ""
    device: str = ""
    ended_at: float = 0.0
    #: runs that were lost with their worker, or that lacked the right files: the worker or its node, and the reason
    lost: tuple[str, ...] = ()

    def hold(self, state: ResultRef, report: TaskReport) -> None:
        """Hold the state with which a run ended, in place of one with no more steps: members of a gang end with
        several."""
        if self.state is None or report.step >= self.steps[0]:
            self.keep(state, (report.step, report.steps))

    def keep(self, state: ResultRef, steps: tuple[int, int]) -> None:
        """Hold a state of the latest run."""
        self.state, self.steps, self.state_gpus = state, steps, self.gpus

    def begin(self, gpus: int) -> None:
        """Note that a run begins on so many GPUs, from the state if there is one; of each of them once."""
        before = () if self.state is None else self.state_gpus
        self.gpus = before if before[-1:] == (gpus,) else (*before, gpus)

    def note_loss(self, reason: str) -> None:
        """Keep why a run was lost."""
        if len(self.lost) < MOST_LOST:
            self.lost = (*self.lost, reason)


class TaskStore:
    """The tasks of a controller, by id."""

    def __init__(
        self,
        on_report: Callable[[TaskSpec, TaskReport], None] = lambda task, report: None,
        node_of: Callable[[WorkerId, int], str] = lambda worker_id, incarnation: "",
        epoch: int = 0,
        wish_of: Callable[[TaskId], PreviewWish | None] = lambda task_id: None,
        on_ended: Callable[[TaskSpec, TaskReport], None] = lambda task, report: None,
    ) -> None:
        """`on_report` is called for every run that ended with a report; `node_of` names the node of a worker. `epoch`
        is the controller's; `wish_of` returns the previews that are wanted of a sampling task. `on_ended` is called as
        `on_report`, but for every run before the core handles its end: jobs that need it are not resolved."""
        self._on_ended = on_ended
        self._wish_of = wish_of
        self._on_report = on_report
        self._node_of = node_of
        self._epoch = epoch
        self._entries: dict[TaskId, _Entry] = {}
        self._inputs: dict[TaskId, ResultRef] = {}
        self._tasks_of: dict[JobId, tuple[TaskId, ...]] = {}
        #: the latest file of each component that a task named, until it is pruned; a few hundred bytes each
        self._files: dict[ComponentKey, FilePart] = {}
        #: of these, and of earlier files of the same components, what the controller's machine has
        self._fingerprints: dict[CheckedFile, str] = {}
        #: the weights of pinned models, by their components
        self._pinned: dict[tuple[ComponentKey, ...], PinnableModel] = {}
        #: whether any file was ever of a source
        self._has_remote = False
        #: addresses of the file servers, by node
        self.file_servers: dict[NodeId, str] = {}
        #: address of the catalog's file server; "" without one
        self.catalog_address = ""

    def __len__(self) -> int:
        return len(self._entries) + len(self._inputs)

    def add(
        self,
        job: JobSpec,
        works: Mapping[TaskId, StageParams],
        given: Mapping[TaskId, ResultRef],
        fingerprints: Mapping[ReadFile, str] = NO_FINGERPRINTS,
    ) -> None:
        """Add a job. Equal tasks of several jobs share one entry."""
        self._inputs.update(given)
        self._tasks_of[job.job_id] = tuple(task.task_id for task in job.tasks)
        for task in job.tasks:
            work, entry = works[task.task_id], self._entries.get(task.task_id)
            if entry is not None and (work is entry.work or work == entry.work):
                files = entry.files
            else:  # of a known task, too: a renamed copy of a file is the same file
                files = task_files(task, work)
                self._has_remote = self._has_remote or bool(remote_sets(work))
            if entry is None:
                entry = self._entries[task.task_id] = _Entry(task, work, files)
            entry.jobs[job.job_id] = None
            self._files.update(files)
            if fingerprints:
                self._note_fingerprints(files, fingerprints)

    def pin(self, weights: PinnableModel) -> None:
        """Keep what loads of a model outside of runs need."""
        self._pinned[weights.keys] = weights
        self._files.update(weights.parts)
        self._note_fingerprints(weights.parts, weights.fingerprints)

    def unpin(self, components: tuple[ComponentKey, ...]) -> None:
        """Forget a pinned model."""
        self._pinned.pop(components, None)

    def load_request(self, command: LoadWeights, run: int, checked: Container[CheckedFile] = ()) -> LoadRequest:
        """Return what to send for a load to a worker, which has `checked` these files."""
        weights = self._pinned[command.components]
        sets = (weights.model.files,) if weights.model.files else ()
        return LoadRequest(
            run=run,
            model=weights.model,
            roles=tuple(role for role, _ in weights.components),
            components=tuple(spec.key for _, spec in weights.components),
            kept=command.kept,
            files=self._expected_files(weights.parts, checked),
            fetch=self._fetch_order(sets, (), run),
            epoch=self._epoch,
        )

    def prune_files(self, kept: Container[ComponentKey]) -> None:
        """Forget the files of components that no task of an unresolved job uses, except those in `kept`."""
        used = {
            key
            for entry in self._entries.values()
            if entry.jobs or entry.running
            for use in entry.spec.uses
            for key in (use.component, *use.adapters)
        }
        used.update(key for components in self._pinned for key in components)
        self._files = {key: part for key, part in self._files.items() if key in used or key in kept}
        self._fingerprints = {file: known for file, known in self._fingerprints.items() if file[0] in self._files}

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

    def begin(
        self,
        command: RunTask,
        run: int,
        checked: Container[CheckedFile] = (),
        own: Mapping[TaskId, int] = NOTHING_OWN,
        gpus: int = 1,
    ) -> tuple[RunRequest, tuple[ResultRef, ...]]:
        """Mark a task as sent to a worker, one of `gpus` that share the run, which has `checked` these files; return
        what to send. The state if it resumes, and its inputs except those that runs of that worker make (`own`), are
        held; the core ensures that."""
        entry = self._entries[command.task_id]
        entry.running += 1
        entry.begin(gpus)
        entry.why = command.why
        request = RunRequest(
            task=entry.spec,
            work=entry.work,
            attempt=command.attempt,
            run=run,
            fresh=command.fresh,
            needed_next=command.needed_next,
            oom_steps=command.oom_steps,
            files=self._expected_files(entry.files, checked),
            resume=entry.state is not None,
            fetch=self._fetch_order(remote_sets(entry.work), command.needed_next, run) if self._has_remote else None,
            epoch=self._epoch,
            preview=self._wish_of(command.task_id) if isinstance(entry.work, SampleParams) else None,
            own=tuple([own.get(need, 0) for need in entry.spec.needs]) if own else (),
            provisional=command.provisional,
        )
        inputs = [self._held(need) for need in entry.spec.needs if need not in own]
        assert entry.state is not None or not command.resume, f"{command.task_id} resumes, and its state is not held"
        if entry.state is not None:  # the core need not know it yet: any state of a task will do
            inputs.append(entry.state)
        return request, tuple(inputs)

    def end(self, report: TaskReport, result: ResultRef, device: str = "") -> TaskSpec:
        """Note the end of a run on the device of that name; `result` is held if `report` has no error, as the state of
        the task if it has one. Returns the task, for `settle_ended` after the core has handled the report. Of a
        failure, `on_report` is called now: what it keeps and removes concerns the next run of the task."""
        entry = self._entries[report.task_id]
        entry.running -= 1
        if report.error is not None:
            self._on_report(entry.spec, report)
            if report.error.kind is RunErrorKind.FILE_UNAVAILABLE:
                node = self._node_of(report.worker_id, report.incarnation)
                entry.note_loss(f"{node or report.worker_id}: {report.error.message}")
        if report.error is None:
            entry.result, entry.report, entry.counted_for = result, report, next(iter(entry.jobs), None)
            entry.node = self._node_of(report.worker_id, report.incarnation)
            entry.device = device
            entry.ended_at = round(time.time(), 3)
        elif report.has_state:
            entry.hold(result, report)
        self._on_ended(entry.spec, report)
        return entry.spec

    def end_part(self, report: TaskReport, result: ResultRef) -> None:
        """Note the end of a part of a shared run of which another worker has the result; its state may be held."""
        entry = self._entries[report.task_id]
        entry.running -= 1
        if report.has_state:
            entry.hold(result, report)
            if entry.state is result:
                self._on_report(entry.spec, report)

    def keep_state(self, saved: StateSaved, state: ResultRef) -> bool:
        """Hold a state of a task, in place of an earlier one; return False if the task is not known."""
        entry = self._entries.get(saved.task_id)
        if entry is None:
            return False
        entry.keep(state, (saved.step, saved.steps))
        return True

    def steps_before(self, command: RunTask) -> tuple[int, int]:
        """Return the steps that are done when this run starts, and all of them; 0 and 0 if it does not resume."""
        entry = self._entries[command.task_id]
        return (0, 0) if entry.state is None else entry.steps

    def refuted(self, worker_id: WorkerId, incarnation: int, files: Iterable[JudgedFile]) -> None:
        """Note that the runs are lost in which a worker has made results with these files, which are not the expected
        ones."""
        reasons = {file.state: file.reason for file in files}
        node = self._node_of(worker_id, incarnation)
        for entry in self._entries.values():
            report = entry.report
            if report is not None and (report.worker_id, report.incarnation) == (worker_id, incarnation):
                reason = next((reasons[state] for state in report.unverified if state in reasons), None)
                if reason is not None:
                    entry.note_loss(f"{node or worker_id}: {reason}")

    def needs_state(self, task_id: TaskId) -> bool:
        """Return whether a task could start from a state, which it lacks."""
        entry = self._entries.get(task_id)
        return entry is not None and not entry.running and entry.state is None and entry.result is None

    def is_running(self, job_id: JobId) -> bool:
        """Return whether a task of the job runs, not counting those that run for an earlier job too."""
        entries = (self._entries[task_id] for task_id in self._tasks_of.get(job_id, ()))
        return any(entry.running and next(iter(entry.jobs), None) == job_id for entry in entries)

    def abandon(self, task_id: TaskId, reason: str = "") -> None:
        """Note that a run was lost with its worker; without a reason, the core ended the worker."""
        entry = self._entries[task_id]
        entry.running -= 1
        if reason:
            entry.note_loss(reason)
        self._drop_unneeded(task_id)

    def settle(self, task_id: TaskId) -> None:
        """Drop the entry after the core handled the end of a run, if nothing else needs it."""
        self._drop_unneeded(task_id)

    def settle_ended(self, task: TaskSpec, report: TaskReport) -> None:
        """As `settle`, for a run that ended with a report: the next one has been sent by now."""
        if report.error is None:
            self._on_report(task, report)
        self._drop_unneeded(task.task_id)

    def has_result(self, task_id: TaskId) -> bool:
        """Return whether the result of a task is held."""
        entry = self._entries.get(task_id)
        return entry is not None and entry.result is not None

    def result(self, task_id: TaskId) -> ResultRef:
        """Return the reference of a held result."""
        return self._held(task_id)

    def made_by(self, task_id: TaskId) -> tuple[WorkerId, int] | None:
        """Return the worker that made a result, and its incarnation; None for a result that a driver gave."""
        entry = self._entries.get(task_id)
        return None if entry is None or entry.report is None else (entry.report.worker_id, entry.report.incarnation)

    def result_bytes(self, task_id: TaskId) -> int:
        """Return the bytes of the arrays of a result; 0 for one that a driver gave."""
        entry = self._entries.get(task_id)
        return 0 if entry is None or entry.report is None else entry.report.result_bytes

    def find(self, task_id: TaskId) -> ResultRef | None:
        """Return the reference of a result or a state; None if it is not held."""
        owner = task_of_state(task_id)
        entry = self._entries.get(task_id if owner is None else owner)
        if entry is None:
            return self._inputs.get(task_id)
        return entry.result if owner is None else entry.state

    def replace(self, task_id: TaskId, ref: ResultRef, copy: ResultRef) -> None:
        """Hold `copy` of a result or a state in place of `ref`, if that is still held."""
        owner = task_of_state(task_id)
        if self.find(task_id) is not ref:
            return
        if task_id in self._inputs:
            self._inputs[task_id] = copy
        elif owner is None:
            self._entries[task_id].result = copy
        else:
            self._entries[owner].state = copy

    def release(self, task_id: TaskId) -> None:
        """Drop a result or a state. Ignores those that are not held."""
        owner = task_of_state(task_id)
        if owner is not None:
            if owner in self._entries:
                self._entries[owner].state = None
                self._drop_unneeded(owner)
            return
        self._inputs.pop(task_id, None)
        if task_id in self._entries:
            self._entries[task_id].result = None
            self._drop_unneeded(task_id)

    def files(self, task_id: TaskId) -> Iterable[CheckedFile]:
        """Return the components that the task uses, with its LoRAs, and their files."""
        return self._entries[task_id].files.items()

    def model_name(self, task_id: TaskId) -> str:
        """Return the name of the model that a task runs."""
        entry = self._entries[task_id]
        model = getattr(entry.work, "model", None)
        if isinstance(model, ModelRef):
            return model.name
        return model_of(entry.spec.uses[0].component) if entry.spec.uses else ""

    def spec(self, task_id: TaskId) -> TaskSpec:
        """Return the task."""
        return self._entries[task_id].spec

    def preload_request(self, command: Preload) -> PreloadRequest:
        """Return a worker's preload request, without tasks that are no longer needed."""
        known = [self._entries[task_id] for task_id in command.task_ids if task_id in self._entries]
        return PreloadRequest(tuple((entry.spec, entry.work) for entry in known), command.needed_next, command.kept)

    def file_parts(self, components: Iterable[ComponentKey]) -> tuple[FilePart, ...]:
        """Return the files of these components; those that are not known are left out."""
        return tuple(self._files[key] for key in components if key in self._files)

    def first_job(self, task_id: TaskId) -> JobId | None:
        """Return the first unresolved job that names the task; None if only cancelled ones did."""
        entry = self._entries.get(task_id)
        return next(iter(entry.jobs), None) if entry else None

    def jobs_of(self, task_id: TaskId) -> tuple[JobId, ...]:
        """Return the unresolved jobs that name the task, in order of arrival."""
        entry = self._entries.get(task_id)
        return () if entry is None else tuple(entry.jobs)

    def _fetch_order(
        self, sets: tuple[tuple[RemoteFile, ...], ...], needed_next: Iterable[ComponentKey], run: int
    ) -> FetchOrder | None:
        """Return the order for the files of sources that a run reads; None if all are local."""
        if not sets:
            return None
        soon = [file.sha256 for part in self.file_parts(needed_next) for file in part.files]
        servers = (*self.file_servers.values(), *filter(None, (self.catalog_address,)))
        first = run % len(servers) if len(servers) > MOST_PEERS else 0
        return FetchOrder(sets, (servers + servers)[first : first + MOST_PEERS], tuple(dict.fromkeys(soon)))

    def _note_fingerprints(self, files: Mapping[ComponentKey, FilePart], fingerprints: Mapping[ReadFile, str]) -> None:
        for key, part in files.items():
            known = fingerprints.get((key, file_name(part.sha256)))
            if known is not None:
                self._fingerprints[key, part] = known

    def _expected_files(
        self, files: Mapping[ComponentKey, FilePart], checked: Container[CheckedFile]
    ) -> tuple[ExpectedFile, ...]:
        """Return the `files` with a known fingerprint that are not `checked`."""
        known = self._fingerprints
        if not known:
            return ()
        return tuple(
            [ExpectedFile(*file, known[file]) for file in files.items() if file not in checked and file in known]
        )

    def _held(self, task_id: TaskId) -> ResultRef:
        if task_id in self._inputs:
            return self._inputs[task_id]
        result = self._entries[task_id].result
        assert result is not None, f"the result of {task_id} is needed and not held"
        return result

    def _drop_unneeded(self, task_id: TaskId) -> None:
        entry = self._entries.get(task_id)
        if entry is None or entry.jobs or entry.running:
            return
        if entry.result is None and entry.state is None:
            del self._entries[task_id]


def remote_sets(work: StageParams) -> tuple[tuple[RemoteFile, ...], ...]:
    """Return the files of sources that a run reads, by model or upscaler, LoRA, ControlNet, image prompt adapter,
    GLIGEN model and embedding."""
    if isinstance(work, OperationParams):
        return ()
    refs: list[ModelRef | LoraRef | ControlRef | ImagePromptRef | GligenRef | EmbeddingRef | UpscalerRef]
    refs = [work.model]
    if isinstance(work, (EncodeParams, SampleParams)):
        refs += work.loras
    if isinstance(work, SampleParams):
        refs += work.controls
        refs += work.image_prompts
        refs += work.all_of(GligenRef)
    if isinstance(work, UpscaleParams) and work.vae is not None:
        refs.append(work.vae)
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
        node=entry.node,
        fetch_seconds=cost.fetch_seconds,
        fetched_bytes=cost.fetched_bytes + cost.peer_bytes,
        device=entry.device,
        lost=entry.lost,
        resumed=f"after step {cost.steps_before} of {cost.steps}" if cost.steps_before else "",
        ended_at=entry.ended_at,
        gpus=_gpus_used(entry, cost.steps_before) if isinstance(entry.work, SampleParams) else (),
    )


def _gpus_used(entry: _Entry, steps_before: int) -> tuple[int, ...]:
    """Return the numbers of GPUs on which the steps of a result were computed, if its bytes depend on them."""
    if not isinstance(entry.work, SampleParams) or not entry.work.gpus:
        return ()
    # without numbers of the state: it has resumed from one of an earlier controller
    return (0, *entry.gpus) if steps_before and not entry.state_gpus else entry.gpus
