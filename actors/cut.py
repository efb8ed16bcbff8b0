"""Cuts what a driver wants into tasks: pure functions of an order and a catalog.

Equal work gets equal ids, whoever asks, so that it is run once. A LoRA is named in the work of those stages only whose
weights it changes, so that the other stages are shared with jobs that do not use it. Knows no worker and no queue.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol, TypeAlias

from actors.orders import DecodeOrder, EncodeOrder, GivenLatent, Order, SampleOrder, order_for
from actors.recipe import Recipe, RecipeLora
from actors.requests import GenerateRequest, LoraChoice, resolve_sampling
from pool.errors import DoesNotFit, does_not_fit, format_bytes
from pool.residency import needed_bytes
from pool.spec import ComponentKey, ComponentSpec, ComponentUse, Division, JobId, JobSpec, Role, TaskId, TaskSpec
from pool.work import DecodeWork, EncodeWork, LoraRef, ModelRef, SampleWork, Work, stage_of, task_id, together_key

#: the components that one kind of work runs
Roles: TypeAlias = tuple[Role, ...]
#: all weights may stream
NOTHING_KEPT: Mapping[ComponentKey, int] = MappingProxyType({})


class Catalog(Protocol):
    """What cutting asks about models; `pool.catalog.Catalog` answers from files. All may raise UserError."""

    def find_model(self, name: str) -> ModelRef:
        """The checkpoint called `name`."""

    def find_lora(self, name: str, strength: float) -> LoraRef:
        """The LoRA called `name`."""

    def components(self, model: ModelRef) -> Mapping[Role, ComponentSpec]:
        """The sizes of the model's components."""

    def native_size(self, model: ModelRef) -> tuple[int, int]:
        """Width and height that the model was trained for."""

    def use(self, model: ModelRef, role: Role, loras: tuple[LoraRef, ...], passes: int = 1) -> ComponentUse:
        """What a run of one component needs."""

    def lora_spec(self, lora: LoraRef) -> ComponentSpec:
        """The size of a LoRA, as a component of its own."""

    def lora_warning(self, model: ModelRef, lora: LoraRef) -> str | None:
        """What to tell of a LoRA that is used in part only, with counts; None when all of it is used."""

    def touches(self, model: ModelRef, role: Role, lora: LoraRef) -> bool:
        """Whether the LoRA changes this component."""

    def text_tokens(self, text: str) -> int:
        """Tokens of `text` as a diffusion model reads it."""

    def ways(self, model: ModelRef, work: Work, context_tokens: Sequence[int] = ()) -> tuple[Division, ...]:
        """The ways to do it, the undivided one first, each needing less than the one before: device memory beside
        weights and scratch, as it was counted and as what runs took corrected it. Sampling reads texts of
        `context_tokens`."""

    def run_seconds(self, model: ModelRef, work: Work) -> float:
        """A first guess."""


@dataclass(frozen=True, slots=True)
class CutJob:
    """A job for the core, the work behind each of its tasks, and the sizes of the components that they name.

    warnings  what to tell whoever asked for it
    """

    job: JobSpec
    works: Mapping[TaskId, Work]
    components: tuple[ComponentSpec, ...]
    warnings: tuple[str, ...] = ()


def cut_request(request: GenerateRequest, job_id: JobId, catalog: Catalog) -> tuple[Recipe, CutJob]:
    """`request`, whose seed must be set, as a recipe (without versions) and a job. Raises UserError."""
    order = order_for(request)
    cutter = _Cutter(catalog)
    wanted = cutter.task_for(order)
    sample = next(work for work in cutter.works.values() if isinstance(work, SampleWork))
    loras = tuple(catalog.find_lora(lora.name, lora.strength) for lora in request.loras if lora.strength != 0)
    recipe = Recipe(
        model=sample.model.name,
        model_sha256=sample.model.sha256,
        prompt=request.prompt,
        negative=request.negative,
        loras=tuple(RecipeLora(lora.name, lora.sha256, lora.strength) for lora in loras),
        steps=sample.steps,
        cfg=sample.cfg,
        sampler=sample.sampler,
        schedule=sample.schedule,
        width=sample.width,
        height=sample.height,
        seed=sample.seed,
        warnings=tuple(cutter.warnings),
    )
    return recipe, cutter.cut_job(job_id, wanted)


def cut_order(order: Order, job_id: JobId, catalog: Catalog, given: frozenset[TaskId] = frozenset()) -> CutJob:
    """`order` as a job whose result is the root's; tasks whose results are `given` are left out. Raises UserError."""
    cutter = _Cutter(catalog)
    return cutter.cut_job(job_id, cutter.task_for(order), given)


def check_fits(job: JobSpec, capacity_bytes: int) -> None:
    """Raise DoesNotFit when a task of `job` cannot run with `capacity_bytes` of device memory, all streamed and divided
    as far as it can be. Of several such tasks the message names the one that needs most: a budget of that fits all.

    By what was counted: no correction refuses work that was possible before.
    """
    task, least_bytes = hungriest(job)
    if least_bytes > capacity_bytes:
        raise too_small(task, least_bytes, capacity_bytes)


def hungriest(job: JobSpec, kept_bytes: Mapping[ComponentKey, int] = NOTHING_KEPT) -> tuple[TaskSpec, int]:
    """The task of `job` that needs most when all streams and is divided as far as it can be, and the least memory that
    it runs in. Of the components in `kept_bytes` so many bytes are resident all the same."""

    def least_bytes(task: TaskSpec) -> int:
        staying_bytes = sum(kept_bytes.get(use.component, 0) for use in task.uses)
        return needed_bytes(task.uses, task.least_estimated_bytes) + staying_bytes

    task = max(job.tasks, key=least_bytes)
    return task, least_bytes(task)


def too_small(task: TaskSpec, least_bytes: int, given_bytes: int, beside: str = "") -> DoesNotFit:
    """What to say where `task`, the hungriest, does not fit. `beside` names what takes memory beside the run."""
    names = " with ".join(use.component for use in task.uses)
    activations = format_bytes(task.least_estimated_bytes)
    detail = f"of these {activations} activations, the rest for the largest layer{beside}"
    return does_not_fit(f"to {task.stage.value} with {names}", least_bytes, given_bytes, detail)


class _Cutter:
    """Collects the tasks of one job; every task after the ones it needs."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._tasks: dict[TaskId, TaskSpec] = {}
        self._components: dict[ComponentKey, ComponentSpec] = {}
        self.works: dict[TaskId, Work] = {}
        self.warnings: dict[str, None] = {}

    def cut_job(self, job_id: JobId, wanted: TaskId, given: frozenset[TaskId] = frozenset()) -> CutJob:
        """What `wanted` depends on, up to what is given: by the driver, or because no task here makes it."""
        needed: set[TaskId] = set()
        read: dict[TaskId, None] = {}
        reached = [wanted]
        while reached:
            task_id = reached.pop()
            needed.add(task_id)
            for need in self._tasks[task_id].needs:
                if need in given or need not in self._tasks:
                    read[need] = None
                else:
                    reached.append(need)
        tasks = tuple(task for task in self._tasks.values() if task.task_id in needed)
        keys = (key for task in tasks for use in task.uses for key in (use.component, *use.adapters))
        components = {key: self._components[key] for key in keys}
        works = {task.task_id: self.works[task.task_id] for task in tasks}
        job = JobSpec(job_id, tasks, wanted, tuple(read))
        return CutJob(job, MappingProxyType(works), tuple(components.values()), tuple(self.warnings))

    def task_for(self, order: Order) -> TaskId:
        match order:
            case EncodeOrder():
                return self._encode(order)
            case SampleOrder():
                return self._sample(order)[0]
            case DecodeOrder():
                return self._decode(order)

    def _encode(self, order: EncodeOrder) -> TaskId:
        model = self._catalog.find_model(order.model)
        roles = tuple(role for role in self._catalog.components(model) if role.is_text_encoder)
        loras = self._loras(model, roles, order.loras)
        return self._add(EncodeWork(model, loras, order.text), roles, loras)

    def _sample(self, order: SampleOrder) -> tuple[TaskId, SampleWork]:
        model = self._catalog.find_model(order.model)
        roles = (Role.DIFFUSION_MODEL,)
        loras = self._loras(model, roles, order.loras)
        width, height = self._catalog.native_size(model)
        sampler, schedule = resolve_sampling(order.sampler, order.schedule)
        work = SampleWork(
            model=model,
            loras=loras,
            width=order.width or width,
            height=order.height or height,
            steps=order.steps,
            cfg=order.cfg,
            sampler=sampler,
            schedule=schedule,
            seed=order.seed,
        )
        texts = (order.positive,) if order.negative is None else (order.positive, order.negative)
        needs = tuple(self._encode(text) for text in texts)
        lengths = tuple(self._catalog.text_tokens(text.text) for text in texts)
        return self._add(work, roles, loras, needs, work.steps, lengths), work

    def _decode(self, order: DecodeOrder) -> TaskId:
        model = self._catalog.find_model(order.model)
        latent = order.latent
        if isinstance(latent, GivenLatent):
            need, width, height = latent.task_id, latent.width, latent.height
        else:
            need, sample = self._sample(latent)
            width, height = sample.width, sample.height
        return self._add(DecodeWork(model, width, height), (Role.VAE,), (), (need,))

    def _loras(self, model: ModelRef, roles: Roles, choices: Iterable[LoraChoice]) -> tuple[LoraRef, ...]:
        """Those of `choices` that change one of these components."""
        found = [self._catalog.find_lora(lora.name, lora.strength) for lora in choices if lora.strength != 0]
        for lora in found:
            problem = self._catalog.lora_warning(model, lora)
            if problem is not None:
                self.warnings[f"LoRA {lora.name!r} on model {model.name!r}: {problem}"] = None
        return tuple(lora for lora in found if any(self._catalog.touches(model, role, lora) for role in roles))

    def _add(
        self,
        work: Work,
        roles: Roles,
        loras: tuple[LoraRef, ...],
        needs: tuple[TaskId, ...] = (),
        passes: int = 1,
        context_tokens: tuple[int, ...] = (),
    ) -> TaskId:
        """The id of the task that does `work`; the task is new unless equal work is there already."""
        new = task_id(work, needs)
        if new not in self._tasks:
            uses = tuple(self._use(work.model, role, loras, passes) for role in roles)
            specs = self._catalog.components(work.model)
            for sized in (*(specs[role] for role in roles), *(self._catalog.lora_spec(lora) for lora in loras)):
                self._components[sized.key] = sized
            self.works[new] = work
            whole, *divided = self._catalog.ways(work.model, work, context_tokens)
            self._tasks[new] = TaskSpec(
                task_id=new,
                stage=stage_of(work),
                uses=uses,
                activation_bytes=whole.activation_bytes,
                run_seconds=self._catalog.run_seconds(work.model, work),
                needs=needs,
                divisions=tuple(divided),
                counted_bytes=whole.counted_bytes,
                together=together_key(work, context_tokens),
            )
        return new

    def _use(self, model: ModelRef, role: Role, loras: tuple[LoraRef, ...], passes: int) -> ComponentUse:
        """What a run needs of one component, with those of `loras` that change it."""
        own = tuple(lora for lora in loras if self._catalog.touches(model, role, lora))
        return self._catalog.use(model, role, own, passes)
