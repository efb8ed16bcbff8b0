"""What making images would do to one GPU's memory: plans for each stage in turn, without running anything.

Pure arithmetic over a job as it was cut, with the functions that cut, check and plan real runs, so that the figures are
theirs. Knows no file and no device; speeds are arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from modelpool.actors.graph.build_graph import CutJob
from modelpool.actors.graph.fits import NOTHING_KEPT, hungriest
from modelpool.pool.core.errors import does_not_fit
from modelpool.pool.core.expert_names import HIGH, LOW
from modelpool.pool.core.stage_params import SampleWork
from modelpool.pool.devices.vram_policy import ResidencyRules
from modelpool.pool.plan.plan_time import PlanSeconds, expected_seconds
from modelpool.pool.plan.residency import Residency, ResidencyPlan, needed_bytes, plan
from modelpool.pool.plan.residency_reasons import explain
from modelpool.pool.plan.streaming_order import ModuleBytes, choose_modules, pass_seconds
from modelpool.pool.specs.division import choose_division
from modelpool.pool.specs.spec import ComponentKey, ComponentSpec, Division, Role, Stage, TaskId, TaskSpec

#: images whose plans are made one by one; every later one does what the last of these does
PLANNED_IMAGES = 8
#: those of the policy "normal"
USUAL_RULES = ResidencyRules()


@dataclass(frozen=True, slots=True)
class Speeds:
    """How fast the GPU is taken to be.

    link_bytes_per_second  host to device
    overlaps               copies run beside computing
    ahead_bytes            how much is copied before it is needed, at most
    """

    link_bytes_per_second: float
    overlaps: bool
    ahead_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StageForecast:
    """One task on the GPU as the tasks before it left it.

    division        how it is divided; None when it is not
    weight_bytes    of its components, all of them resident
    resident_bytes  of them, while it runs
    streamed_bytes  that cross the bus during the run, over all passes
    planned_bytes   most memory in use at once
    seconds         expected, the division's slowdown included
    why             a sentence for each component that leaves or streams
    sampled_by      which diffusion model samples, of a job with several; empty for others
    """

    stage: Stage
    components: tuple[ComponentKey, ...]
    division: Division | None
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
    """Images made one after the other on one GPU, from an empty one.

    first            the stages of the first image
    again            those of a later image of the same texts: they are encoded already
    seconds          of all images
    bus_bytes        weights that cross the bus for all of them
    smallest_bytes   the least capacity that they run in, divided and (but for policies that do not) streamed as far as
                     can be
    whole_bytes      the capacity from which no run is divided
    resident_bytes   the capacity from which all weights stay on the GPU and nothing is divided; None where the policy
                     lets them leave however much there is
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
    cut: CutJob,
    capacity_bytes: int,
    speeds: Speeds,
    images: int = 1,
    modules: Modules | None = None,
    rules: ResidencyRules = USUAL_RULES,
) -> Forecast:
    """What `pictures` images of `cut`, which differ in their seeds, would do in `capacity_bytes` under `rules`.

    With `modules`, copies are hidden behind computing as the order of a pass allows it, and not as if each ran beside
    any other. Raises DoesNotFit when not even the most divided runs fit.
    """
    specs = {component.key: component for component in cut.components}
    residency, samplers = Residency(capacity_bytes), _samplers(cut)
    made: list[tuple[StageForecast, ...]] = []
    for number in range(min(images, PLANNED_IMAGES)):
        stages = []
        for task in cut.job.tasks:
            if number and task.stage is Stage.ENCODE:
                continue
            stage, residency = _stage(task, residency, specs, speeds, modules, rules)
            stages.append(replace(stage, sampled_by=samplers.get(task.task_id, "")))
        made.append(tuple(stages))
    times = [1] * (len(made) - 1) + [images - len(made) + 1]
    every = [(count, stage) for count, stages in zip(times, made, strict=True) for stage in stages]
    whole = whole_bytes(cut, rules)
    stays = rules.keeps_idle and rules.weights_share >= 1
    return Forecast(
        capacity_bytes=capacity_bytes,
        images=images,
        first=made[0],
        again=made[1] if images > 1 else (),
        seconds=sum(count * (stage.seconds.load_seconds + stage.seconds.run_seconds) for count, stage in every),
        bus_bytes=sum(count * (stage.upload_bytes + stage.streamed_bytes) for count, stage in every),
        smallest_bytes=needs_most(cut, rules)[1],
        whole_bytes=whole,
        resident_bytes=_resident_bytes(cut) if stays else None,
    )


def _samplers(cut: CutJob) -> dict[TaskId, str]:
    """What to call the diffusion model of each task that samples, where they differ."""
    works = {task_id: work for task_id, work in cut.works.items() if isinstance(work, SampleWork)}
    if len({work.model.name for work in works.values()}) > 1:
        return {task_id: work.model.name for task_id, work in works.items()}
    if len({work.low_noise for work in works.values()}) > 1:
        return {task_id: f"{LOW if work.low_noise else HIGH} noise" for task_id, work in works.items()}
    return {}


def needs_most(cut: CutJob, rules: ResidencyRules = USUAL_RULES) -> tuple[TaskSpec, int]:
    """The hungriest task of `cut` under `rules`, and the least capacity that it and every other one runs in."""
    return hungriest(cut.job, NOTHING_KEPT if rules.may_stream else _weights(cut))


def whole_bytes(cut: CutJob, rules: ResidencyRules = USUAL_RULES) -> int:
    """The least capacity that every task of `cut` runs in undivided."""
    kept = NOTHING_KEPT if rules.may_stream else _weights(cut)
    return max(
        needed_bytes(task.uses, task.activation_bytes) + sum(kept.get(use.component, 0) for use in task.uses)
        for task in cut.job.tasks
    )


def _resident_bytes(cut: CutJob) -> int:
    return whole_bytes(cut) + sum(_weights(cut).values())


def _weights(cut: CutJob) -> dict[ComponentKey, int]:
    """Of what rests on the GPU; LoRAs are read, and go into the weights that they change."""
    return {component.key: component.weight_bytes for component in cut.components if component.role is not Role.LORA}


def _stage(
    task: TaskSpec,
    now: Residency,
    specs: Mapping[ComponentKey, ComponentSpec],
    speeds: Speeds,
    modules: Modules | None,
    rules: ResidencyRules,
) -> tuple[StageForecast, Residency]:
    """One task on `now`, and what is resident after it: decisions as `pool.vram.vram_manager` and
    `pool.engine.task_runner` make
    them with nothing else in use. Raises DoesNotFit."""
    scratch_bytes = needed_bytes(task.uses, 0)
    keys = tuple(use.component for use in task.uses)
    weight_bytes = sum(specs[key].weight_bytes for key in keys)
    way = choose_division(task, now.capacity_bytes - scratch_bytes - (0 if rules.may_stream else weight_bytes))
    run_bytes = scratch_bytes + way.activation_bytes
    allowed_bytes = int(max(0, now.capacity_bytes - run_bytes) * rules.weights_share)
    capped = replace(now, capacity_bytes=min(now.capacity_bytes, run_bytes + allowed_bytes))
    decided = plan(capped, task.uses, specs, way.activation_bytes)
    if decided.streamed_bytes and not rules.may_stream:
        names, detail = " with ".join(keys), "with all weights resident: the policy is not to stream any"
        raise does_not_fit(names, weight_bytes + run_bytes, now.capacity_bytes, detail)
    held = [decided.after.of(key) for key in keys]
    stage = StageForecast(
        stage=task.stage,
        components=keys,
        division=None if way.batch == way.tile == 0 else way,
        activation_bytes=way.activation_bytes,
        scratch_bytes=scratch_bytes,
        weight_bytes=weight_bytes,
        resident_bytes=sum(entry.resident_bytes for entry in held if entry is not None),
        upload_bytes=decided.upload_bytes,
        streamed_bytes=decided.streamed_bytes,
        evicted=tuple((move.component, move.bytes) for move in decided.evict),
        planned_bytes=decided.after.used_bytes + run_bytes,
        seconds=_seconds(task, decided, way, speeds, modules),
        why=_why(capped, task, specs, way, rules),
    )
    staying = decided.after.entries
    if not rules.keeps_idle:
        staying = tuple(entry for entry in staying if entry.component not in keys)
    return stage, replace(now, entries=staying)


def _why(
    now: Residency, task: TaskSpec, specs: Mapping[ComponentKey, ComponentSpec], way: Division, rules: ResidencyRules
) -> tuple[str, ...]:
    if rules.weights_share == 0:
        return tuple(f"{use.component} streams: the policy keeps no weights on the GPU" for use in task.uses)
    return tuple(str(reason) for reason in explain(now, task.uses, specs, way.activation_bytes))


def _seconds(
    task: TaskSpec, decided: ResidencyPlan, way: Division, speeds: Speeds, modules: Modules | None
) -> PlanSeconds:
    """Expected seconds, compared with an undivided run with all weights resident."""
    divided_seconds = task.run_seconds * way.slowdown
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
    """A run of `passes` passes through `modules`, of which those that are not resident stream."""
    entry = after.of(component)
    resident = choose_modules(modules, entry.resident_bytes if entry is not None else 0, frozenset())
    flops = sum(module.flops for module in modules)
    if flops == 0 or resident_run_seconds <= 0:
        return resident_run_seconds
    flops_per_second = flops * passes / resident_run_seconds
    return passes * pass_seconds(modules, resident, speeds.link_bytes_per_second, flops_per_second, speeds.ahead_bytes)
