"""Builds the two runs of models with a high-noise and a low-noise expert: checks, defaults, and which runs which steps.

Pure functions of values. Every error names a field of a request.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from modelpool.actors.graph.model_defaults import resolve_schedule
from modelpool.actors.graph.orders import LowNoiseOrder, SampleOrder
from modelpool.actors.request.field_errors import unsupported_field
from modelpool.actors.request.low_noise_fields import LowNoiseRun
from modelpool.actors.request.requests import GenerateRequest, LoraChoice
from modelpool.pool.core.expert_names import HIGH, LOW, expert_named
from modelpool.pool.core.sampling_facts import SamplingFacts
from modelpool.pool.families.two_experts import TWO_EXPERTS
from modelpool.pool.specs.spec import Role


@dataclass(frozen=True, slots=True)
class ExpertRun:
    """The part of a run that one of two experts does, as `SampleParams` has it."""

    switch: int = 0
    low_noise: bool = False

    @property
    def role(self) -> Role:
        """The diffusion model that runs."""
        return Role.DIFFUSION_MODEL_2 if self.low_noise else Role.DIFFUSION_MODEL

    @property
    def noise(self) -> str:
        """The expert, by the name that LoRAs use."""
        return LOW if self.low_noise else HIGH


#: the run of a model with a single diffusion model
SINGLE_MODEL = ExpertRun()


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


def with_expert_defaults(request: GenerateRequest, facts: SamplingFacts) -> GenerateRequest:
    """Return `request` with all options of the low-noise expert filled in; unchanged for a model without experts.
    Call it before the model's other defaults are filled in."""
    defaults = facts.low_noise
    if defaults is None:
        return request
    options = request.low_noise or LowNoiseRun()
    cfg = request.cfg if "cfg" in request.model_fields_set else defaults.cfg
    run = LowNoiseRun(
        cfg=cfg if options.cfg is None else options.cfg,
        boundary=defaults.boundary if options.boundary is None else options.boundary,
    )
    return request.model_copy(update={"low_noise": run})


def expert_runs(
    order: SampleOrder, facts: SamplingFacts, size: tuple[int, int], frames: int
) -> Iterator[tuple[SampleOrder, ExpertRun]]:
    """Yield the runs of the two experts for `order`, a video of `frames` of this width and height, in their order; a
    single run if one expert does all steps."""
    assert facts.low_noise is not None, "a model without experts has a single run"
    options = order.low_noise or LowNoiseOrder(facts.low_noise.boundary, order.cfg)
    switch = _steps_above(order, facts, options.boundary, size, frames)
    high, low = replace(order, low_noise=None), replace(order, low_noise=None, cfg=options.cfg)
    if switch <= order.first_step:
        yield _guided(low), ExpertRun(low_noise=True)
    elif switch >= order.steps:
        yield _guided(high), SINGLE_MODEL
    else:
        yield _guided(high), ExpertRun(switch)
        yield _guided(low), ExpertRun(switch, low_noise=True)


def expert_lora_warnings(order: SampleOrder, runs: Collection[ExpertRun]) -> Iterator[str]:
    """Yield warnings about LoRAs whose names suggest another expert than they are applied to, and about LoRAs for an
    expert that runs no step: `runs` are the runs of `order`."""
    running = {expert.noise for expert in runs}
    for lora in order.loras:
        if not lora.strength:
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
                f"LoRA {lora.name!r} is for the {lora.noise}-noise expert, which runs none of the {order.steps} steps"
            )


def _one_model(facts: SamplingFacts) -> str:
    reason = "has a single diffusion model for all noise levels"
    if facts.model in TWO_EXPERTS:
        reason += ". If it is one of two experts, `modelpool models assemble --low-noise` combines them into one model"
    return reason


def _steps_above(order: SampleOrder, facts: SamplingFacts, boundary: float, size: tuple[int, int], frames: int) -> int:
    """Return how many steps of the schedule start at or above the noise level `boundary`. Source: diffusers'
    WanPipeline, which compares timesteps as 32-bit floats."""
    from modelpool.pool.guidance.call_model import patches_of  # torch, which drivers do not need
    from modelpool.pool.sampling.schedules import make_sigmas, sigma_table

    table = sigma_table(facts.noise, patches_of(facts, *size, frames), order.steps)
    _, schedule = resolve_schedule(facts.defaults, order.sampler, order.schedule)
    levels = make_sigmas(schedule, order.steps, table)[:-1]
    return int((levels >= boundary).sum())


def _guided(order: SampleOrder) -> SampleOrder:
    return replace(order, negative=None) if order.cfg == 1 else order


def _said(run: LowNoiseRun) -> str:
    set_fields = {name: value for name, value in run.model_dump().items() if value is not None}
    return ", ".join(f"{name} {value:g}" for name, value in set_fields.items()) or "no value"
