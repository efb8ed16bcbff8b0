"""What can be asked of models that are two diffusion models, one for much noise and one for little, and of all others;
and which of the two makes which steps.

Functions over values. Every complaint names a field of a request.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from modelpool.actors.graph.model_defaults import usual_schedule
from modelpool.actors.graph.orders import LowNoiseOrder, SampleOrder
from modelpool.actors.request.low_noise_fields import LowNoiseRun
from modelpool.actors.request.requests import GenerateRequest, LoraChoice
from modelpool.pool.core.errors import unusable_field
from modelpool.pool.core.expert_names import HIGH, LOW, half_named
from modelpool.pool.core.sampling_facts import SamplingFacts
from modelpool.pool.families.expert_pairs import PAIRS
from modelpool.pool.specs.spec import Role


@dataclass(frozen=True, slots=True)
class Half:
    """What one of two models does of a run, as `SampleWork` has it."""

    switch: int = 0
    low_noise: bool = False

    @property
    def role(self) -> Role:
        """The model."""
        return Role.DIFFUSION_MODEL_2 if self.low_noise else Role.DIFFUSION_MODEL

    @property
    def noise(self) -> str:
        """The model, as LoRAs name the one that they are for."""
        return LOW if self.low_noise else HIGH


#: a run of a model that is one
WHOLE = Half()


def check_low_noise(request: GenerateRequest, facts: SamplingFacts) -> None:
    """Raise UnusableField for what only models that are two can be asked, where `facts` are of another."""
    if facts.low_noise is None and request.low_noise is not None:
        raise unusable_field("low_noise", _said(request.low_noise), _one_model(request.model, facts))
    check_halves(request.loras, request.model, facts)


def check_halves(loras: Iterable[LoraChoice], model: str, facts: SamplingFacts) -> None:
    """Raise UnusableField for LoRAs that are for one of two models, where `facts` are of a `model` that is one."""
    for lora in loras:
        if lora.noise and facts.low_noise is None:
            raise unusable_field("loras.noise", lora.noise, _one_model(model, facts))


def as_usual_pair(request: GenerateRequest, facts: SamplingFacts) -> GenerateRequest:
    """`request` with all that is said of the second model's run, its own where nothing is; as it is for a model that is
    one. Before the request is given the model's usual strength."""
    usual = facts.low_noise
    if usual is None:
        return request
    said = request.low_noise or LowNoiseRun()
    other = request.cfg if "cfg" in request.model_fields_set else usual.cfg
    run = LowNoiseRun(
        cfg=other if said.cfg is None else said.cfg,
        boundary=usual.boundary if said.boundary is None else said.boundary,
    )
    return request.model_copy(update={"low_noise": run})


def halves(
    order: SampleOrder, facts: SamplingFacts, size: tuple[int, int], frames: int
) -> Iterator[tuple[SampleOrder, Half]]:
    """What each of two models makes of `order`, a video of so many `frames` of this width and height, in their order;
    one alone where the levels of noise are such."""
    assert facts.low_noise is not None, "a model that is one has no halves"
    said = order.low_noise or LowNoiseOrder(facts.low_noise.boundary, order.cfg)
    switch = _steps_above(order, facts, said.boundary, size, frames)
    high, low = replace(order, low_noise=None), replace(order, low_noise=None, cfg=said.cfg)
    if switch <= order.first_step:
        yield _guided(low), Half(low_noise=True)
    elif switch >= order.steps:
        yield _guided(high), WHOLE
    else:
        yield _guided(high), Half(switch)
        yield _guided(low), Half(switch, low_noise=True)


def hints(order: SampleOrder, made: Collection[Half]) -> Iterator[str]:
    """What to tell of LoRAs whose names speak of another model than they are used on, and of those that are for a model
    that makes no step: `made` are the runs of `order`."""
    running = {half.noise for half in made}
    for lora in order.loras:
        if not lora.strength:
            continue
        half = half_named(lora.name)
        told = f"{lora.name}:{lora.strength:g}:{half}"
        if half and not lora.noise:
            yield f"LoRA {lora.name!r} is used on both models; {told!r} uses it on that for {half} noise alone"
        elif half and half != lora.noise:
            yield f"LoRA {lora.name!r} is used on the model for {lora.noise} noise; {told!r} is what its name speaks of"
        if lora.noise and lora.noise not in running:
            yield f"LoRA {lora.name!r} is for {lora.noise} noise, and its model makes none of {order.steps} steps"


def _one_model(model: str, facts: SamplingFacts) -> str:
    expected = f"nothing: model {model!r} is one diffusion model, for all noise"
    if facts.model in PAIRS:
        expected += ". It may be one of two: `modelpool models assemble --low-noise` makes a model of both"
    return expected


def _steps_above(order: SampleOrder, facts: SamplingFacts, boundary: float, size: tuple[int, int], frames: int) -> int:
    """How many steps of the schedule begin with at least so much noise. Source: diffusers' WanPipeline, which compares
    timesteps as floats of 32 bits."""
    from modelpool.pool.guidance.call_model import patches_of  # torch, which a driver does without
    from modelpool.pool.sampling.schedules import make_sigmas, sigma_table

    table = sigma_table(facts.noise, patches_of(facts, *size, frames), order.steps)
    _, schedule = usual_schedule(facts.usual, order.sampler, order.schedule)
    levels = make_sigmas(schedule, order.steps, table)[:-1]
    return int((levels >= boundary).sum())


def _guided(order: SampleOrder) -> SampleOrder:
    return replace(order, negative=None) if order.cfg == 1 else order


def _said(run: LowNoiseRun) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in run.model_dump().items() if value is not None) or "one"
