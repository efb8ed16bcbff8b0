"""Forecasts the memory plan and the run time of images on one GPU, stage by stage, without running anything.

Pure arithmetic on a task graph, with the functions that check and plan real runs, so that the figures agree. Knows no
file and no device; speeds are arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from modelpool.actors.graph.common.task_collector import JobGraph
from modelpool.actors.graph.memory_fit import NOTHING_PINNED, largest_task
from modelpool.pool.devices.vram_policy import ResidencyRules
from modelpool.pool.values.core.errors import counted, does_not_fit
from modelpool.pool.values.core.expert_names import HIGH, LOW
from modelpool.pool.values.core.stage_params import DecodeParams, SampleParams, UpscaleParams, draws
from modelpool.pool.values.specs.execution_modes import choose_mode
from modelpool.pool.values.specs.spec import ComponentKey, ComponentSpec, ExecutionMode, Role, Stage, TaskId, TaskSpec
from modelpool.pool.weights.plan.eviction_plan import Residency, ResidencyPlan, needed_bytes, plan
from modelpool.pool.weights.plan.partial_loads import ModuleBytes, choose_modules, pass_seconds
from modelpool.pool.weights.plan.plan_time import PlanSeconds, expected_seconds
from modelpool.pool.weights.plan.residency_reasons import explain

#: images that are planned one by one; later ones repeat the last plan
PLANNED_IMAGES = 8
#: the rules of the policy "normal"
USUAL_RULES = ResidencyRules()


@dataclass(frozen=True, slots=True)
class Speeds:
    """Assumed speeds of the GPU.

    link_bytes_per_second  host to device
    overlaps               whether copies run while computing
    ahead_bytes            the most that is copied before it is needed
    """

    link_bytes_per_second: float
    overlaps: bool
    ahead_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StageForecast:
    """One task on the GPU in the state left by the tasks before it.

    division        how the run is split; None if it is not
    weight_bytes    of its components, all resident
    resident_bytes  of them, while it runs
    streamed_bytes  that cross the bus during the run, over all passes
    planned_bytes   peak memory
    seconds         expected, including the slowdown of the division
    why             one sentence for each component that is evicted or streamed
    sampled_by      the diffusion model that samples, if the job has several, the upscaler, or the part of a decode;
                    empty otherwise
    """

    stage: Stage
    components: tuple[ComponentKey, ...]
    division: ExecutionMode | None
    activation_bytes: int
    scratch_bytes: int
    weight_bytes: int
    resident_bytes: int
    upload_bytes: int
    streamed_bytes: int
    evicted: tuple[tuple[ComponentKey, int], ...]
    planned_bytes: int
    seconds: PlanSeconds
    why: tuple[str, ...]
    sampled_by: str = ""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Images generated one after the other on one GPU that is empty at first.

    first            the stages of the first image
    again            the stages of a later image with the same texts and another seed, without those that both share
    seconds          of all images
    bus_bytes        weights that cross the bus for all of them
    smallest_bytes   the least capacity that suffices, fully split and (unless the policy forbids it) fully streamed
    whole_bytes      the capacity from which no run is split
    resident_bytes   the capacity from which all weights stay resident and nothing is split; None if the policy evicts
                     them regardless of capacity
    """

    capacity_bytes: int
    images: int
    first: tuple[StageForecast, ...]
    again: tuple[StageForecast, ...]
    seconds: float
    bus_bytes: int
    smallest_bytes: int
    whole_bytes: int
    resident_bytes: int | None


#: the modules of a component in the order in which a pass uses them
Modules = Callable[[ComponentKey], Sequence[ModuleBytes]]


def forecast(
    graph: JobGraph,
    capacity_bytes: int,
    speeds: Speeds,
    images: int = 1,
    modules: Modules | None = None,
    rules: ResidencyRules = USUAL_RULES,
) -> Forecast:
    """Forecast `images` images of `graph`, which differ in their seeds, in `capacity_bytes` under `rules`.

    With `modules`, copies overlap with computing only as the order of a pass permits; otherwise any copy may overlap
    with any computation. Raises DoesNotFit if not even fully split runs fit.
    """
    specs = {component.key: component for component in graph.components}
    residency, samplers, own = Residency(capacity_bytes), _samplers(graph), _of_one_seed(graph)
    made: list[tuple[StageForecast, ...]] = []
    for number in range(min(images, PLANNED_IMAGES)):
        stages = []
        for task in graph.job.tasks:
            if number and task.stage is Stage.ENCODE and task.task_id not in own:
                continue
            stage, residency = _stage(task, residency, specs, speeds, modules, rules)
            stages.append(replace(stage, sampled_by=samplers.get(task.task_id, "")))
        made.append(tuple(stages))
    times = [1] * (len(made) - 1) + [images - len(made) + 1]
    every = [(count, stage) for count, stages in zip(times, made, strict=True) for stage in stages]
    whole = whole_bytes(graph, rules)
    stays = rules.keeps_idle and rules.weights_share >= 1
    return Forecast(
        capacity_bytes=capacity_bytes,
        images=images,
        first=made[0],
        again=made[1] if images > 1 else (),
        seconds=sum(count * (stage.seconds.load_seconds + stage.seconds.run_seconds) for count, stage in every),
        bus_bytes=sum(count * (stage.upload_bytes + stage.streamed_bytes) for count, stage in every),
        smallest_bytes=needs_most(graph, rules)[1],
        whole_bytes=whole,
        resident_bytes=_resident_bytes(graph) if stays else None,
    )


def _of_one_seed(graph: JobGraph) -> set[TaskId]:
    """Return the tasks that images with other seeds do not share: those that draw, and those that read their
    results."""
    found: set[TaskId] = set()
    for task in graph.job.tasks:
        if draws(graph.works[task.task_id]) or not found.isdisjoint(task.needs):
            found.add(task.task_id)
    return found


def _samplers(graph: JobGraph) -> dict[TaskId, str]:
    """Name the diffusion model of each task that samples, if they differ, the upscaler of each that enlarges, and the
    parts of a decode."""
    decodes = {task: work for task, work in graph.works.items() if isinstance(work, DecodeParams) and work.parts}
    enlarged = {
        task: f"part {work.part} of {work.parts}" if work.part else f"join of {counted(work.parts, 'part')}"
        for task, work in decodes.items()
    }
    enlarged |= {task: work.model.name for task, work in graph.works.items() if isinstance(work, UpscaleParams)}
    works = {task_id: work for task_id, work in graph.works.items() if isinstance(work, SampleParams)}
    if len({work.model.name for work in works.values()}) > 1:
        return enlarged | {task_id: work.model.name for task_id, work in works.items()}
    if len({work.schedule.low_noise for work in works.values()}) > 1:
        names = {task_id: f"{LOW if work.schedule.low_noise else HIGH} noise" for task_id, work in works.items()}
        return enlarged | names
    return enlarged


def needs_most(graph: JobGraph, rules: ResidencyRules = USUAL_RULES) -> tuple[TaskSpec, int]:
    """Return the task that needs the most memory under `rules`, and the least capacity that every task runs in."""
    return largest_task(graph.job, NOTHING_PINNED if rules.may_stream else _weights(graph))


def whole_bytes(graph: JobGraph, rules: ResidencyRules = USUAL_RULES) -> int:
    """Return the least capacity that every task runs in without being split."""
    kept = NOTHING_PINNED if rules.may_stream else _weights(graph)
    return max(
        needed_bytes(task.uses, task.activation_bytes) + sum(kept.get(use.component, 0) for use in task.uses)
        for task in graph.job.tasks
    )


def _resident_bytes(graph: JobGraph) -> int:
    return whole_bytes(graph) + sum(_weights(graph).values())


def _weights(graph: JobGraph) -> dict[ComponentKey, int]:
    """Return the weights that stay on the GPU; LoRAs are read, and merged into the weights that they change."""
    return {component.key: component.weight_bytes for component in graph.components if component.role is not Role.LORA}


def _stage(
    task: TaskSpec,
    now: Residency,
    specs: Mapping[ComponentKey, ComponentSpec],
    speeds: Speeds,
    modules: Modules | None,
    rules: ResidencyRules,
) -> tuple[StageForecast, Residency]:
    """Plan one task on `now`; return it with the residency after it. Decides as `pool.weights.vram.vram_manager` and
    `pool.engine.task_runner` do if nothing else is in use. Raises DoesNotFit.
    """
    scratch_bytes = needed_bytes(task.uses, 0)
    keys = tuple(use.component for use in task.uses)
    weight_bytes = sum(specs[key].weight_bytes for key in keys)
    division = choose_mode(task, now.capacity_bytes - scratch_bytes - (0 if rules.may_stream else weight_bytes))
    run_bytes = scratch_bytes + division.activation_bytes
    allowed_bytes = int(max(0, now.capacity_bytes - run_bytes) * rules.weights_share)
    capped = replace(now, capacity_bytes=min(now.capacity_bytes, run_bytes + allowed_bytes))
    decided = plan(capped, task.uses, specs, division.activation_bytes)
    if decided.streamed_bytes and not rules.may_stream:
        names, detail = " with ".join(keys), "with all weights resident: the policy does not allow streaming"
        raise does_not_fit(names, weight_bytes + run_bytes, now.capacity_bytes, detail)
    held = [decided.after.of(key) for key in keys]
    stage = StageForecast(
        stage=task.stage,
        components=keys,
        division=None if division.batch == division.tile == 0 else division,
        activation_bytes=division.activation_bytes,
        scratch_bytes=scratch_bytes,
        weight_bytes=weight_bytes,
        resident_bytes=sum(entry.resident_bytes for entry in held if entry is not None),
        upload_bytes=decided.upload_bytes,
        streamed_bytes=decided.streamed_bytes,
        evicted=tuple((move.component, move.bytes) for move in decided.evict),
        planned_bytes=decided.after.used_bytes + run_bytes,
        seconds=_seconds(task, decided, division, speeds, modules),
        why=_why(capped, task, specs, division, rules),
    )
    staying = decided.after.entries
    if not rules.keeps_idle:
        staying = tuple(entry for entry in staying if entry.component not in keys)
    return stage, replace(now, entries=staying)


def _why(
    now: Residency,
    task: TaskSpec,
    specs: Mapping[ComponentKey, ComponentSpec],
    division: ExecutionMode,
    rules: ResidencyRules,
) -> tuple[str, ...]:
    if rules.weights_share == 0:
        return tuple(f"{use.component} streams: the policy keeps no weights on the GPU" for use in task.uses)
    return tuple(str(reason) for reason in explain(now, task.uses, specs, division.activation_bytes))


def _seconds(
    task: TaskSpec, decided: ResidencyPlan, division: ExecutionMode, speeds: Speeds, modules: Modules | None
) -> PlanSeconds:
    """Return the expected seconds, compared with an unsplit run with all weights resident."""
    divided_seconds = task.run_seconds * division.slowdown
    rough = expected_seconds(decided, divided_seconds, speeds.link_bytes_per_second, speeds.overlaps)
    run_seconds = rough.run_seconds
    if modules is not None and speeds.overlaps and decided.streamed_bytes:
        fine = sum(
            _streamed_run_seconds(
                modules(use.component), decided.after, use.component, use.passes, divided_seconds, speeds
            )
            for use in task.uses
        )
        run_seconds = max(run_seconds, fine)
    return PlanSeconds(rough.load_seconds, run_seconds, task.run_seconds)


def _streamed_run_seconds(
    modules: Sequence[ModuleBytes],
    after: Residency,
    component: ComponentKey,
    passes: int,
    resident_run_seconds: float,
    speeds: Speeds,
) -> float:
    """Return the seconds of `passes` passes through `modules`, streaming those that are not resident."""
    entry = after.of(component)
    resident = choose_modules(modules, entry.resident_bytes if entry is not None else 0, frozenset())
    flops = sum(module.flops for module in modules)
    if flops == 0 or resident_run_seconds <= 0:
        return resident_run_seconds
    flops_per_second = flops * passes / resident_run_seconds
    return passes * pass_seconds(modules, resident, speeds.link_bytes_per_second, flops_per_second, speeds.ahead_bytes)
