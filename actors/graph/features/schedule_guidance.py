"""The sampler of a request, its noise and its schedule of noise levels; the guidance of a run. Pure functions of
values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from modelpool.actors.graph.common.sampling_runs import SamplingRun
from modelpool.actors.graph.features.feature import Feature, FindFile, Line, RecipeSource, Section
from modelpool.actors.graph.features.recorded import LATER, as_json
from modelpool.actors.request.field_errors import unsupported_field
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.inference.sampling.model_choices import check_known_steps, resolve_schedule
from modelpool.pool.inference.sampling.sampler_names import (
    EXPLICIT_SCHEDULE,
    NOISY,
    NOT_FOR_FLOWS,
    OWN_STEPS,
    READS_CHURN,
    READS_ETA,
    SAMPLERS,
    SCHEDULES,
    SD_LEVELS,
    draws_noise,
)
from modelpool.pool.values.core.errors import unusable_field
from modelpool.pool.values.core.sampling_facts import (
    ModelDefaults,
    NoiseKind,
    Prediction,
    SamplingFacts,
)
from modelpool.pool.values.core.stage_params import ModelRef, SamplingSchedule

if TYPE_CHECKING:
    from modelpool.actors.graph.features.recipe import Recipe

#: kinds of noise of which the levels of `SD_LEVELS` are; runs of flows refuse them
_KINDS_OF_SD_LEVELS = (NoiseKind.SCALED_LINEAR, NoiseKind.LINEAR, NoiseKind.FLOW)
#: the schedule with settings, its fields of a request and their settings, and the usual value of both
_BETA, _USUAL_SHAPE = "beta", 0.6
_BETA_FIELDS = {"beta_alpha": "alpha", "beta_beta": "beta"}


def schedule_of(run: SamplingRun) -> SamplingSchedule:
    """Return the schedule of `run`, without the steps that it skips. Raises UserError for names, as
    `resolve_schedule`."""
    request = run.request
    sampler, schedule = resolve_schedule(run.facts, request.sampler, request.schedule)
    return SamplingSchedule(
        *(run.steps, sampler, EXPLICIT_SCHEDULE if request.sigmas else schedule),
        switch=run.switch,
        low_noise=run.low_noise,
        eta=request.eta,
        s_noise=request.s_noise,
        s_churn=request.s_churn,
        sigmas=request.sigmas,
        shift=request.shift or 0.0,
        settings=_beta_settings(request) if schedule == _BETA and not request.sigmas else (),
    )


def _beta_settings(request: GenerateRequest) -> tuple[tuple[str, float], ...]:
    """Return the settings of schedule beta that `request` has."""
    values = ((setting, getattr(request, name)) for name, setting in _BETA_FIELDS.items())
    return tuple((setting, value) for setting, value in values if value is not None)


def check_schedule(run: SamplingRun, sampler: str) -> None:
    """Raise UnusableField for a sampler that cannot run the schedule of `run`, and for another number of steps than
    listed levels."""
    request = run.request
    others = f"any but {', '.join(sorted(OWN_STEPS))}"
    if request.sigmas and run.steps != len(request.sigmas):
        raise unusable_field("steps", run.steps, f"{len(request.sigmas)}, the number of sigmas, in each run")
    if request.sigmas and sampler in OWN_STEPS:
        expected = f"a sampler that steps through them: {others}"
        raise unusable_field("sampler", f"{request.sampler} with sigmas", expected)
    check_known_steps(run.facts, run.model.name, sampler, request.sampler, bool(request.s_churn))
    if run.switch and sampler in OWN_STEPS:
        raise unusable_field("sampler", request.sampler, f"a sampler whose steps two experts can share: {others}")


def check_shift(request: GenerateRequest, facts: SamplingFacts) -> None:
    """Raise UnusableField for a shift if the model's noise levels do not follow from one."""
    if request.shift is None or facts.noise.takes_shift:
        return
    is_flow = facts.prediction is Prediction.FLOW
    reason = "was trained with levels of its own" if is_flow else "predicts no flow: its levels come from a table"
    raise unsupported_field("shift", request.model, reason, request.shift)


def shift_default(request: GenerateRequest, facts: SamplingFacts) -> dict[str, None]:
    """Return no shift for one that is the model's own: the same image is the same task."""
    is_own = facts.noise.shift_by_size is None and request.shift == facts.noise.shift
    return {"shift": None} if is_own else {}


def sampler_warnings(request: GenerateRequest, facts: SamplingFacts) -> Iterator[str]:
    """Yield warnings for a sampler or a schedule that does not suit models of `facts`, and for fields that the sampler
    and its guidance do not read."""
    name, schedule = resolve_schedule(facts, request.sampler, request.schedule)
    yield from _unread_noise_fields(request, name)
    if request.cfg == 1 and request.image_cfg not in (None, 1):
        yield f"image_cfg {request.image_cfg:g}: it is not read with cfg 1, which is no guidance by the text"
    if request.shift is not None and request.sigmas:
        yield f"shift {request.shift:g}: it does not change the noise levels, which the request lists"
    for field_name in _BETA_FIELDS if schedule != _BETA or request.sigmas else ():
        if (value := getattr(request, field_name)) is not None:
            levels = "listed noise levels do" if request.sigmas else f"schedule {SCHEDULES[schedule]} does"
            yield f"{field_name} {value:g}: {levels} not read it, schedule {SCHEDULES[_BETA]} does"
    if not request.sigmas and schedule in SD_LEVELS and facts.noise.kind not in _KINDS_OF_SD_LEVELS:
        yield (
            f"schedule {SCHEDULES[schedule]}: it starts at noise level 14.6, as Stable Diffusion 1 and XL do, and "
            f"model {request.model!r} has other levels: images are often wrong; karras, beta or kl_optimal suit it"
        )
    if facts.prediction is Prediction.FLOW and name in NOT_FOR_FLOWS:
        other = "Euler CFG++" if name.endswith("_cfg_pp") else "DPM++ 2M"
        yield (
            f"sampler {SAMPLERS[name].display}: model {request.model!r} predicts a flow, with which this sampler often "
            f"renders wrong images; {other} suits it"
        )


def _unread_noise_fields(request: GenerateRequest, name: str) -> Iterator[str]:
    """Yield a warning for each noise field that is set and has no effect."""
    title, eta = SAMPLERS[name].display, request.eta
    if eta is not None and name not in READS_ETA and (eta or name in NOISY):
        reason = "it always draws the same share of noise" if name in NOISY else "it draws no noise again"
        yield f"eta {eta:g}: sampler {title} does not read it: {reason}"
    if request.s_churn and name not in READS_CHURN:
        readers = ", ".join(SAMPLERS[each].display for each in sorted(READS_CHURN))
        yield f"s_churn {request.s_churn:g}: sampler {title} does not read it, but {readers} do"
    if request.s_noise != 1.0 and not draws_noise(name, eta, request.s_churn):
        needed = "eta" if name in READS_ETA else "s_churn" if name in READS_CHURN else ""
        reason = f"without {needed}, sampler {title} draws no noise" if needed else f"sampler {title} draws no noise"
        yield f"s_noise {request.s_noise:g}: {reason}"


@dataclass(frozen=True, slots=True)
class RecipeNoise:
    """The noise that the sampler drew in its steps, and the settings of the schedule, where they differ from the
    defaults. The names are the fields of a request."""

    eta: float | None = None
    s_noise: float = 1.0
    s_churn: float = 0.0
    beta_alpha: float | None = field(default=None, metadata=LATER)
    beta_beta: float | None = field(default=None, metadata=LATER)


def _recorded(source: RecipeSource) -> dict[str, Any]:
    schedule = source.sample.schedule
    beta = {name: dict(schedule.settings).get(setting) for name, setting in _BETA_FIELDS.items()}
    noise = RecipeNoise(schedule.eta, schedule.s_noise, schedule.s_churn, **beta)
    return {
        "sampler": schedule.sampler,
        "schedule": schedule.noise_schedule,
        "steps": schedule.steps,
        "noise": None if noise == RecipeNoise() else noise,
        "sigmas": schedule.sigmas,
        "shift": schedule.shift,
    }


def _restored(recipe: Recipe, find: FindFile) -> dict[str, Any]:
    noise = {} if recipe.noise is None else as_json(recipe.noise)
    return {
        "sampler": recipe.sampler,
        "schedule": None if recipe.sigmas else recipe.schedule,
        "steps": recipe.steps,
        "sigmas": recipe.sigmas or None,
        "shift": recipe.shift or None,
        **noise,
    }


def _lines(recipe: Recipe) -> Iterator[Line]:
    if (noise := recipe.noise) is not None:
        eta = "the sampler's" if noise.eta is None else f"{noise.eta:g}"
        beta = ((setting, getattr(noise, name)) for name, setting in _BETA_FIELDS.items())
        settings = "".join(f", {setting} of the schedule {value:g}" for setting, value in beta if value is not None)
        yield "noise", f"eta {eta}, s_noise {noise.s_noise:g}, s_churn {noise.s_churn:g}{settings}"
    if recipe.shift:
        yield "shift", f"{recipe.shift:g}"
    if recipe.sigmas:
        yield "sigmas", ", ".join(f"{level:g}" for level in recipe.sigmas)


def _defaults(request: GenerateRequest, model: ModelRef, defaults: ModelDefaults) -> dict[str, None]:
    usual: dict[str, None] = {name: None for name in _BETA_FIELDS if getattr(request, name) == _USUAL_SHAPE}
    return {**shift_default(request, defaults.sampling), **usual}


NOISE = Feature(check_shift, _defaults, Section(_recorded, _restored, _lines))
