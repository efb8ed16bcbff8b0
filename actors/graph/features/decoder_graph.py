"""Builds the second stage of two-stage models (Stable Cascade: stage C, the prior, then stage B, the decoder).

Pure functions of values. Every error names a field of a request.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from modelpool.actors.graph.common.output_shape import output_plural
from modelpool.actors.graph.features.feature import Feature, FindFile, Line, RecipeSource, Section
from modelpool.actors.graph.features.recorded import FILE_NAME, LATER
from modelpool.actors.request.decoder_fields import Decoder
from modelpool.actors.request.field_errors import unsupported_field
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.families.parts.two_stages import prior_cells
from modelpool.pool.inference.sampling.sampler_names import resolve_sampling
from modelpool.pool.values.core.errors import UnusableField, counted, unusable_field
from modelpool.pool.values.core.sampling_facts import ModelDefaults, SamplingFacts
from modelpool.pool.values.core.stage_params import (
    GuidanceParams,
    ModelRef,
    OutputShape,
    PriorCondition,
    SampleParams,
    SamplingSchedule,
)

if TYPE_CHECKING:
    from modelpool.actors.graph.features.recipe import Recipe

#: the largest seed; the decoder uses the complement of the request's seed, so that its noise differs from the prior's
_LAST_SEED = 2**64 - 1


def check_decoder(request: GenerateRequest, facts: SamplingFacts) -> None:
    """Raise UnusableField for what models of `facts` do not support in two-stage generation."""
    if facts.is_decoder_stage:
        reason = "this model is a decoder; name the model that reads the prompt here, and this one in the field decoder"
        raise UnusableField(f"model: found {request.model!r}, {reason}")
    if not facts.is_prior_stage:
        if request.decoder is not None:
            reason = f"generates {output_plural(facts)} in one stage"
            raise unsupported_field("decoder", request.model, reason, request.decoder.model or None)
        return
    unsupported = {"image": request.image, "mask": request.mask}
    for name, value in unsupported.items():
        if value is not None:
            raise unsupported_field(name, request.model, "generates images from text only")
    if request.hires is not None and request.hires.via == "image":
        expected = f"'latent': model {request.model!r} cannot encode images"
        raise unusable_field("hires.via", "image", expected)


def with_own_sides(defaults: ModelDefaults) -> ModelDefaults:
    """Return the defaults of a model as they are in a workflow: two models that make one image are nodes there, and
    the latent of each has whole cells of its own."""
    facts = defaults.sampling
    if not facts.is_prior_stage and not facts.is_decoder_stage:
        return defaults
    return replace(defaults, sampling=replace(facts, side_multiple=0))


def check_decodes(model: str, facts: SamplingFacts) -> None:
    """Raise UnusableField for a latent of the driver, if another model decodes latents of this one: that model reads
    the text too."""
    if facts.is_prior_stage:
        expected = f"a result of sample(): latents of {model!r} are decoded by another model, which reads the text too"
        raise unusable_field("latent", "an array", expected)


def decoder_params(model: ModelRef, prior: SampleParams, decoder: Decoder | None, facts: SamplingFacts) -> SampleParams:
    """Return the sampling of the decoder `model` of `facts` on the result of `prior`: its defaults, and what `decoder`
    sets."""
    defaults = facts.defaults
    assert defaults is not None, "a decoder has sampling defaults"
    steps = None if decoder is None else decoder.steps
    sampler, schedule, seed = defaults.sampler, defaults.schedule, _LAST_SEED - prior.seed
    if decoder is not None and (decoder.sampler or decoder.schedule):
        sampler, schedule = resolve_sampling(decoder.sampler or sampler, decoder.schedule or schedule)
    if decoder is not None and decoder.seed is not None:
        seed = decoder.seed
    shape = OutputShape(prior.shape.width, prior.shape.height)
    return SampleParams(
        model,
        (),
        shape,
        SamplingSchedule(defaults.steps if steps is None else steps, sampler, schedule),
        GuidanceParams(_cfg(decoder)),
        seed,
        (PriorCondition(*prior_cells(shape.width, shape.height)),),
    )


def _cfg(decoder: Decoder | None) -> float:
    cfg = None if decoder is None else decoder.cfg
    return 1.0 if cfg is None else cfg


@dataclass(frozen=True, slots=True)
class RecipeDecoder:
    """The decoder of a two-stage model, as it was used."""

    model: str = field(metadata=FILE_NAME)
    sha256: str
    steps: int
    cfg: float
    seed: int | None = field(default=None, metadata=LATER)
    sampler: str = field(default="", metadata=LATER)
    schedule: str = field(default="", metadata=LATER)


def _recorded(source: RecipeSource) -> dict[str, Any]:
    run = next((sample for sample in source.samplings if sample.prior is not None), None)
    if run is None:
        return {}
    found = RecipeDecoder(run.model.name, run.model.sha256, run.schedule.steps, run.guidance.cfg)
    asked = source.request.decoder
    if asked is not None and asked.seed is not None:
        found = replace(found, seed=run.seed)
    if asked is not None and (asked.sampler or asked.schedule):
        found = replace(found, sampler=run.schedule.sampler, schedule=run.schedule.noise_schedule)
    return {"decoder": found}


def _restored(recipe: Recipe, find: FindFile) -> dict[str, Any]:
    if (decoder := recipe.decoder) is None:
        return {}
    found: dict[str, Any] = {"model": decoder.model, "steps": decoder.steps, "cfg": decoder.cfg}
    found |= {} if decoder.seed is None else {"seed": decoder.seed}
    if decoder.sampler:
        found |= {"sampler": decoder.sampler, "schedule": decoder.schedule or None}
    return {"decoder": found}


def _lines(recipe: Recipe) -> Iterator[Line]:
    if (decoder := recipe.decoder) is not None:
        how = "" if decoder.seed is None else f", seed {decoder.seed}"
        how += f", {' '.join((decoder.sampler, decoder.schedule))}" if decoder.sampler else ""
        parts = f"{counted(decoder.steps, 'step')}, guidance {decoder.cfg:g}{how}  (sha256 {decoder.sha256})"
        yield "decoder", f"{decoder.model}, {parts}"


DECODER = Feature(check_decoder, recipe=Section(_recorded, _restored, _lines))
