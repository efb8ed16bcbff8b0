"""`TaskCollector`: the tasks of one job and what running them needs, from a catalog. Equal work is one task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from modelpool.actors.graph.common.graph_catalog import GraphCatalog
from modelpool.actors.graph.common.task_files import file_names
from modelpool.pool.families.gang_support import gang_obstacle
from modelpool.pool.families.parts.written_image import tokens_written
from modelpool.pool.values.core.errors import UnusableField, unusable_field
from modelpool.pool.values.core.joining import pass_key, why_single
from modelpool.pool.values.core.stage_params import (
    DecodeParams,
    EmbeddingRef,
    EncodeParams,
    GligenRef,
    LoraRef,
    ModelRef,
    OperationParams,
    OutputShape,
    SampleParams,
    StageParams,
    UpscaleParams,
    batch_key,
    embedding_key,
    encoders_run,
    role_of,
    stage_of,
    task_id,
    why_alone,
)
from modelpool.pool.values.specs.gang import ANY_GPUS, DEGREES
from modelpool.pool.values.specs.spec import (
    ComponentKey,
    ComponentSpec,
    ComponentUse,
    ExecutionMode,
    JobId,
    JobSpec,
    ReadFile,
    Role,
    TaskId,
    TaskSpec,
)
from modelpool.pool.values.specs.wire_value import WireValue, evolve

#: size of a row of a textual inversion: 2,048 numbers of 4 bytes at most, for SDXL
EMBEDDING_ROW_BYTES = 8192
#: first estimate of joining the tiles of a decode on one core of a host: 0.2 s for an image of 4096 by 4096 pixels
_PRIOR_SECONDS, _PRIOR_SECONDS_PER_VALUE = 0.005, 4e-9
_NO_ID = TaskId("")
#: a first estimate of the time of an operation on the CPU
OPERATION_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class JobGraph(WireValue):
    """A job for the core, the work of each of its tasks, and the sizes of the components that they name.

    warnings      messages for the user
    fingerprints  of the files of components (`pool.models.loading.file_fingerprint`), as far as they could be read;
                  equal components may be in several of them
    nodes         of a workflow: the nodes that each task serves, in order; empty for other jobs
    batch_gain    of a chosen batch size: the images of its passes in a second, as a multiple of single ones; 0 if that
                  was not measured
    """

    job: JobSpec
    works: Mapping[TaskId, StageParams]
    components: tuple[ComponentSpec, ...]
    warnings: tuple[str, ...] = ()
    fingerprints: Mapping[ReadFile, str] = field(default_factory=dict)
    nodes: Mapping[TaskId, tuple[str, ...]] = field(default_factory=dict)
    batch_gain: float = 0.0
    #: the last task of each node, once it was asked for
    _last_tasks: dict[str, TaskId] = field(default_factory=dict, repr=False, compare=False)

    def nodes_of(self, task_id: TaskId) -> tuple[str, ...]:
        """Return the nodes that a task serves. Of a job without a workflow, one that is its stage, a dot, and its place
        among the tasks of this stage."""
        if self.nodes:
            return self.nodes.get(task_id, ())
        stages = {task.task_id: task.stage for task in self.job.tasks}
        if task_id not in stages:
            return ()
        alike = [each for each, stage in stages.items() if stage is stages[task_id]]
        return (f"{stages[task_id].value}.{alike.index(task_id)}",)

    def nodes_ended_by(self, task_id: TaskId) -> tuple[str, ...]:
        """Return the nodes that a task serves and no later one does. The tasks are gone through once for all calls."""
        if self.nodes and not self._last_tasks:
            for task in self.job.tasks:
                self._last_tasks.update(dict.fromkeys(self.nodes.get(task.task_id, ()), task.task_id))
        return tuple(name for name in self.nodes_of(task_id) if self._last_tasks.get(name, task_id) == task_id)


def result_values(shape: OutputShape) -> int:
    """Return the numbers of an image or video of `shape`: three for each pixel."""
    return 3 * shape.width * shape.height * max(1, shape.frames)


class RunsAlone(UnusableField):
    """A batch size of a request with work that runs alone. `reason` says why it does."""

    reason = ""


def runs_alone(problem: UnusableField, reason: str) -> RunsAlone:
    """Return `problem` as a RunsAlone with its reason."""
    found = RunsAlone(str(problem))
    found.reason = reason
    return found


class TaskCollector:
    """Collects the tasks of one job, each after the tasks that it needs."""

    def __init__(self, catalog: GraphCatalog, batch_size: int = 1, keeps: bool = False) -> None:
        """Images are sampled in forward passes of `batch_size`, as in `SampleParams`; usual texts are encoded so, and
        small images decoded. `keeps`: all results are worth keeping for later jobs."""
        self._keeps = keeps
        self._catalog = catalog
        self._batch_size = batch_size
        self._tasks: dict[TaskId, TaskSpec] = {}
        self._works: dict[TaskId, StageParams] = {}
        self._components: dict[ComponentKey, ComponentSpec] = {}
        #: the node that adds tasks; "" without a workflow
        self.node = ""
        #: nodes by the tasks that they have; dicts as ordered sets
        self._nodes: dict[TaskId, dict[str, None]] = {}
        self._likes: dict[tuple[object, ...], TaskSpec] = {}

    def add(
        self, work: StageParams, needs: Mapping[str, TaskId], context_tokens: Sequence[int] = (), gpus: int = 0
    ) -> TaskId:
        """Return the id of the task that does `work` on these inputs; sampling reads texts of `context_tokens`, and is
        shared by `gpus`, as in `SampleParams`. Raises RunsAlone for a batch size of work that does, as a run of
        several GPUs, and UnusableField for GPUs that cannot share a run."""
        work, batch_size = self._of_batch(work)
        work, degrees = self._of_gpus(work, gpus)
        new = task_id(work, needs)
        if new not in self._tasks:
            self._works[new] = work
            like = self._task_like(work, context_tokens, batch_size, degrees)
            self._tasks[new] = evolve(like, task_id=new, needs=tuple(needs.values()), input_names=tuple(needs))
        if self.node:
            self._nodes.setdefault(new, {})[self.node] = None
        return new

    def _task_like(
        self, work: StageParams, context_tokens: Sequence[int], batch_size: int, degrees: tuple[int, ...]
    ) -> TaskSpec:
        """Return a task of `work`, without its id and inputs. In a workflow, many tasks differ in nothing else, or in
        seeds: estimates take most of the time of a graph."""
        if not self._keeps:
            return self._priced(work, context_tokens, batch_size, degrees)
        key = (
            evolve(work, seed=0) if isinstance(work, SampleParams) else work,
            tuple(context_tokens),
            batch_size,
            degrees,
        )
        if key not in self._likes:
            self._likes[key] = self._priced(work, context_tokens, batch_size, degrees)
        return self._likes[key]

    def _priced(
        self, work: StageParams, context_tokens: Sequence[int], batch_size: int, degrees: tuple[int, ...]
    ) -> TaskSpec:
        uses = self._uses(work)  # refuses models that do not fit together, which a dry run would trip over
        (whole, *divided), run_seconds = self._modes_and_seconds(work, context_tokens)
        if batch_size > 1:  # a part of a pass would have other bits
            whole, divided = whole.times(batch_size), []
        return TaskSpec(
            task_id=_NO_ID,
            stage=stage_of(work),
            uses=uses,
            activation_bytes=whole.activation_bytes,
            run_seconds=run_seconds * batch_size,
            divisions=tuple(divided),
            counted_bytes=whole.counted_bytes,
            together=batch_key(work, context_tokens),
            options=work.measured_apart if isinstance(work, EncodeParams | SampleParams | DecodeParams) else (),
            batch_size=batch_size,
            pass_key=self._pass_key(work, context_tokens),
            degrees=degrees,
            is_kept=self._keeps,
            file_names=file_names(uses, work),
        )

    def text_batch(self, work: EncodeParams, is_usual: bool) -> int:
        """Return the batch size of an encode, as in `EncodeParams`; `is_usual` as in `TokenizedPrompt`. A text that is
        not usual runs alone: few are as long, and its pass would be padding."""
        return self._batch_size if self._batch_size > 1 and is_usual and not why_alone(work) else 0

    def __contains__(self, task_id: TaskId) -> bool:
        return task_id in self._tasks

    def _of_gpus(self, work: StageParams, gpus: int) -> tuple[StageParams, tuple[int, ...]]:
        """Return `work` with its GPUs, and the numbers of them that may share its run."""
        if not gpus or not isinstance(work, SampleParams):
            return work, (1,)
        facts = self._catalog.model_defaults(work.model).sampling
        if gpus != ANY_GPUS:
            if obstacle := gang_obstacle(facts, work, gpus):
                found = unusable_field("gpus", gpus, f"fewer: {obstacle}")
                raise runs_alone(found, "several GPUs share its run") if work.batch_size > 1 else found
            return evolve(work, gpus=gpus), (gpus,)
        degrees = tuple(degree for degree in DEGREES if not gang_obstacle(facts, work, degree))
        return (work if degrees == (1,) else evolve(work, gpus=ANY_GPUS)), degrees

    def _of_batch(self, work: StageParams) -> tuple[StageParams, int]:
        """Return `work` with the batch size of its forward passes, and that size."""
        if isinstance(work, EncodeParams):
            return work, max(1, work.batch_size)
        if self._batch_size == 1 or not isinstance(work, SampleParams | DecodeParams):
            return work, 1
        if isinstance(work, DecodeParams) and not work.gains_in_passes:
            return work, 1
        if reason := why_single(work, self._catalog.model_defaults(work.model).sampling):
            raise runs_alone(unusable_field("batch", self._batch_size, f"1: {reason}"), reason)
        return evolve(work, batch_size=self._batch_size), self._batch_size

    def _pass_key(self, work: StageParams, context_tokens: Sequence[int]) -> str:
        """Return the key of tasks that may share passes with `work` at other steps."""
        if not isinstance(work, SampleParams) or work.batch_size <= 1:
            return ""
        return pass_key(work, self._catalog.model_defaults(work.model).sampling, context_tokens)

    def job(self, job_id: JobId, wanted: TaskId, given: frozenset[TaskId], warnings: Sequence[str]) -> JobGraph:
        """Return the tasks that `wanted` depends on, except those in `given` and those that the driver provides."""
        needed: set[TaskId] = set()
        inputs: dict[TaskId, None] = {}
        reached = [wanted]
        while reached:
            task_id = reached.pop()
            if task_id in needed:  # else graphs with doubling paths would be walked path by path
                continue
            needed.add(task_id)
            for need in self._tasks[task_id].needs:
                if need in given or need not in self._tasks:
                    inputs[need] = None
                else:
                    reached.append(need)
        tasks = tuple(task for task in self._tasks.values() if task.task_id in needed)
        keys = (key for task in tasks for use in task.uses for key in (use.component, *use.adapters))
        components = {key: self._components[key] for key in keys}
        works = {task.task_id: self._works[task.task_id] for task in tasks}
        job = JobSpec(job_id, tasks, wanted, tuple(inputs))
        nodes = {task.task_id: tuple(self._nodes[task.task_id]) for task in tasks if task.task_id in self._nodes}
        return JobGraph(job, MappingProxyType(works), tuple(components.values()), tuple(warnings), nodes=nodes)

    def _modes_and_seconds(
        self, work: StageParams, context_tokens: Sequence[int]
    ) -> tuple[tuple[ExecutionMode, ...], float]:
        """Return the execution modes of `work`, and a first estimate of its run time."""
        if isinstance(work, OperationParams):
            return (ExecutionMode(0),), OPERATION_SECONDS
        if isinstance(work, UpscaleParams):
            return self._catalog.upscalers.execution_modes(work), self._catalog.upscalers.run_seconds(work)
        if isinstance(work, DecodeParams) and work.joins:
            return (ExecutionMode(0),), _PRIOR_SECONDS + result_values(work.shape) * _PRIOR_SECONDS_PER_VALUE
        modes = self._catalog.execution_modes(work.model, work, context_tokens)
        return modes, self._catalog.run_seconds(work.model, work)

    def _uses(self, work: StageParams) -> tuple[ComponentUse, ...]:
        """Return what a run of `work` needs of each component that it uses; note their sizes."""
        if isinstance(work, OperationParams):
            return ()
        if isinstance(work, UpscaleParams):
            spec, use = self._catalog.upscalers.needs(work)
            self._components[spec.key] = spec
            if work.vae is None:
                return (use,)
            vae = self._catalog.components(work.vae)[Role.VAE]
            self._components[vae.key] = vae
            return use, self._use(work.vae, Role.VAE, (), 1)
        if isinstance(work, DecodeParams) and work.joins:
            return ()
        specs = self._catalog.components(work.model)
        roles: Sequence[Role] = [role_of(work)]
        if isinstance(work, EncodeParams):
            encoders = [role for role in specs if role.is_text_encoder]
            roles = encoders_run(work, encoders, self._catalog.model_defaults(work.model).sampling)
        loras = work.loras if isinstance(work, EncodeParams | SampleParams) else ()
        controls, passes = (work.controls, work.steps_run) if isinstance(work, SampleParams) else ((), 1)
        if isinstance(work, EncodeParams) and work.writes is not None:
            passes = tokens_written(work.writes, len(work.seen))
        # one that reads several images occurs once
        files = {control.content: control for control in controls}
        controlnets = [self._catalog.controls.use_with(work.model, control, passes) for control in files.values()]
        prompts = {one.content: one for one in work.image_prompts} if isinstance(work, SampleParams) else {}
        adapters = [self._catalog.image_prompts.use_with(work.model, prompt) for prompt in prompts.values()]
        gligens = work.all_of(GligenRef) if isinstance(work, SampleParams) else ()
        boxes = [self._catalog.gligens.use_with(work.model, gligen, passes) for gligen in gligens]
        attached = [*controlnets, *adapters, *boxes]
        loaded = (*(specs[role] for role in roles), *(spec for spec, _ in attached))
        for sized in (*loaded, *(self._catalog.lora_spec(lora) for lora in loras)):
            self._components[sized.key] = sized
        own = [self._use(work.model, role, loras, passes) for role in roles]
        if isinstance(work, EncodeParams) and work.embeddings:
            own[0] = replace(own[0], adapters=(*own[0].adapters, *map(self._embedding, work.embeddings)))
        return (*own, *(use for _, use in attached))

    def _embedding(self, embedding: EmbeddingRef) -> ComponentKey:
        """Return the key of a textual inversion, which is read like a LoRA; note its size."""
        key, size_bytes = embedding_key(embedding), max(1, embedding.rows) * EMBEDDING_ROW_BYTES
        self._components[key] = ComponentSpec(key, Role.LORA, size_bytes, size_bytes)
        return key

    def _use(self, model: ModelRef, role: Role, loras: tuple[LoraRef, ...], passes: int) -> ComponentUse:
        """Return what a run needs of one component, with the `loras` that change it."""
        changing = tuple(lora for lora in loras if self._catalog.touches(model, role, lora))
        return self._catalog.use(model, role, changing, passes)
