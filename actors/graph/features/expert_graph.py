"""Builds the two runs of models with a high-noise and a low-noise expert: checks, defaults, and which runs which steps.

Pure functions of values. Every error names a field of a request.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from modelpool.actors.graph.common.output_shape import duration_of
from modelpool.actors.graph.common.sampling_runs import SamplingRun
from modelpool.actors.graph.features.feature import Feature, FindFile, Line, RecipeSource, Section
from modelpool.actors.graph.features.schedule_guidance import schedule_of
from modelpool.actors.request.field_errors import unsupported_field
from modelpool.actors.request.low_noise_fields import LowNoiseRun
from modelpool.actors.request.requests import GenerateRequest, LoraChoice
from modelpool.pool.values.core.errors import counted
from modelpool.pool.values.core.expert_names import HIGH, LOW, expert_named
from modelpool.pool.values.core.sampling_facts import ModelDefaults, SamplingFacts
from modelpool.pool.values.core.stage_params import ModelRef

if TYPE_CHECKING:
    from modelpool.actors.graph.features.recipe import Recipe


def check_low_noise(request: GenerateRequest, facts: SamplingFacts) -> None:
    """Raise UnusableField for fields that only models with two experts support."""
    if facts.low_noise is None and request.low_noise is not None:
        value = _said(request.low_noise)
        raise unsupported_field("low_noise", request.model, _one_model(facts), value)
    check_expert_loras(request.loras, request.model, facts)


def check_expert_loras(loras: Iterable[LoraChoice], model: str, facts: SamplingFacts) -> None:
    """Raise UnusableField for LoRAs that name an expert, if `model` has a single diffusion model."""
    for lora in loras:
        if lora.noise and facts.low_noise is None:
            raise unsupported_field("loras.noise", model, _one_model(facts), lora.noise)


def expert_defaults(request: GenerateRequest, model: ModelRef, defaults: ModelDefaults) -> dict[str, LowNoiseRun]:
    """Return the options of the low-noise expert, all filled in; nothing for a model without experts. `request` has no
    other defaults yet."""
    experts = defaults.sampling.low_noise
    if experts is None:
        return {}
    options = request.low_noise or LowNoiseRun()
    cfg = request.cfg if "cfg" in request.model_fields_set else experts.cfg
    run = LowNoiseRun(
        cfg=cfg if options.cfg is None else options.cfg,
        boundary=experts.boundary if options.boundary is None else options.boundary,
    )
    return {"low_noise": run}


def expert_runs(run: SamplingRun) -> tuple[SamplingRun, ...]:
    """Return the runs of the two experts for one pass, in their order; a single run if one expert does all steps, or
    if the model has no experts. Raises UnusableField for a size or a length that the model does not generate."""
    experts = run.facts.low_noise
    if experts is None:
        return (run,)
    options = run.request.low_noise or LowNoiseRun()
    boundary = experts.boundary if options.boundary is None else options.boundary
    low = replace(run, low_noise=True, cfg=run.cfg if options.cfg is None else options.cfg)
    switch = _steps_above(run, boundary)
    if switch <= run.first_step:
        return (low,)
    if switch >= run.steps:
        return (run,)
    return replace(run, switch=switch), replace(low, switch=switch)


def expert_lora_warnings(runs: Sequence[SamplingRun]) -> Iterator[str]:
    """Yield warnings about LoRAs with names that suggest another expert than they are applied to, and about LoRAs for
    an expert that runs no step: `runs` are the runs of one pass."""
    running = {LOW if run.low_noise else HIGH for run in runs}
    for lora in runs[0].request.loras:
        if not lora.has_effect:
            continue
        expert = expert_named(lora.name)
        suggestion = f"{lora.name}:{lora.strength:g}:{expert}"
        if expert and not lora.noise:
            yield f"LoRA {lora.name!r} is applied to both experts; {suggestion!r} applies it to one, for {expert} noise"
        elif expert and expert != lora.noise:
            yield (
                f"LoRA {lora.name!r} is applied to the {lora.noise}-noise expert, but its name suggests the other one "
                f"({suggestion!r})"
            )
        if lora.noise and lora.noise not in running:
            yield (
                f"LoRA {lora.name!r} is for the {lora.noise}-noise expert, which runs none of the "
                f"{counted(runs[0].steps, 'step')}"
            )


def _one_model(facts: SamplingFacts) -> str:
    from modelpool.pool.families.two_experts import TWO_EXPERTS  # all families, which drivers do not need

    reason = "has a single diffusion model for all noise levels"
    if facts.model in TWO_EXPERTS:
        reason += ". If it is one of two experts, `modelpool models assemble --low-noise` combines them into one model"
    return reason


def _steps_above(run: SamplingRun, boundary: float) -> int:
    """Return how many steps of the schedule start at or above the noise level `boundary`. Source: diffusers'
    WanPipeline, which compares timesteps as 32-bit floats."""
    from modelpool.pool.inference.guidance.call_model import patches_of  # torch, which drivers do not need
    from modelpool.pool.inference.sampling.schedules import levels_of, sigma_table

    frames, size = duration_of(run.request, run.model.name, run.facts).frames, run.size(run.scale)
    noise = run.facts.noise.shifted_by(run.request.shift or 0.0)
    table = sigma_table(noise, patches_of(run.facts, *size, frames), run.steps)
    levels = levels_of(schedule_of(run), table)
    return int((levels[:-1] >= boundary).sum())


def _said(run: LowNoiseRun) -> str:
    set_fields = {name: value for name, value in run.model_dump().items() if value is not None}
    return ", ".join(f"{name} {value:g}" for name, value in set_fields.items()) or "no value"


@dataclass(frozen=True, slots=True)
class RecipeLowNoise:
    """The low-noise expert as it was run: the noise level below which it took over, and its guidance scale."""

    boundary: float
    cfg: float


def _recorded(source: RecipeSource) -> dict[str, Any]:
    run = source.request.low_noise
    if run is None or run.boundary is None or run.cfg is None:
        return {}
    return {"low_noise": RecipeLowNoise(run.boundary, run.cfg)}


def _restored(recipe: Recipe, find: FindFile) -> dict[str, Any]:
    run = recipe.low_noise
    return {} if run is None else {"low_noise": {"cfg": run.cfg, "boundary": run.boundary}}


def _lines(recipe: Recipe) -> Iterator[Line]:
    if recipe.low_noise is not None:
        yield "low noise", f"below {recipe.low_noise.boundary:g}, guidance {recipe.low_noise.cfg:g}"


EXPERTS = Feature(check_low_noise, expert_defaults, Section(_recorded, _restored, _lines))
