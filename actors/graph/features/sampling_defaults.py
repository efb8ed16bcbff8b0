"""The fields that every request has: model, texts, guidance scale and seed; and the sampling defaults of a model. Pure
functions of values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from modelpool.actors.graph.features.feature import Feature, FindFile, Line, RecipeSource, Section
from modelpool.actors.request.requests import GenerateRequest, resolve_sampling
from modelpool.pool.inference.sampling.sampler_names import OWN_STEPS
from modelpool.pool.values.core.errors import counted
from modelpool.pool.values.core.sampling_facts import ModelDefaults, SamplingDefaults
from modelpool.pool.values.core.stage_params import EncodeParams, ModelRef

if TYPE_CHECKING:
    from modelpool.actors.graph.features.recipe import Recipe


#: fields that other noise levels follow from
_LEVEL_FIELDS = frozenset({"steps", "schedule", "sigmas", "shift", "hires"})
_SAME = ("model", "prompt", "negative", "cfg", "seed")


def sampling_defaults(request: GenerateRequest, defaults: SamplingDefaults | None) -> dict[str, Any]:
    """Return the model's default steps, guidance scale, sampler and negative prompt where `request` sets none; and the
    levels of a model that has its own, if `request` sets nothing that they depend on."""
    if defaults is None:
        return {}
    values = {"steps": defaults.steps, "cfg": defaults.cfg, "sampler": defaults.sampler}
    values |= {"negative": defaults.negative} if defaults.negative else {}
    found: dict[str, Any] = {name: value for name, value in values.items() if name not in request.model_fields_set}
    if defaults.sigmas and not request.model_fields_set & _LEVEL_FIELDS and not _has_own_steps(request, defaults):
        found["sigmas"] = defaults.sigmas
    return found


def _has_own_steps(request: GenerateRequest, defaults: SamplingDefaults) -> bool:
    """Return whether the sampler of `request` chooses the noise levels itself."""
    sampler = request.sampler if "sampler" in request.model_fields_set else defaults.sampler
    return resolve_sampling(sampler, None)[0] in OWN_STEPS


def _defaults(request: GenerateRequest, model: ModelRef, defaults: ModelDefaults) -> dict[str, Any]:
    return sampling_defaults(request, defaults.sampling.defaults)


def _recorded(source: RecipeSource) -> dict[str, Any]:
    request, sample = source.request, source.sample
    return {
        "model": sample.model.name,
        "model_sha256": sample.model.sha256,
        "prompt": request.prompt,
        "negative": request.negative,
        "cfg": sample.guidance.distilled or sample.guidance.cfg,
        "seed": sample.seed,
        "warnings": source.graph.warnings,
    }


def _restored(recipe: Recipe, find: FindFile) -> dict[str, Any]:
    return {name: getattr(recipe, name) for name in _SAME}


def _text_lines(recipe: Recipe) -> Iterator[Line]:
    yield "prompt", recipe.prompt
    yield "negative", recipe.negative
    yield "model", f"{recipe.model}  (sha256 {recipe.model_sha256})"


def _sampler_lines(recipe: Recipe) -> Iterator[Line]:
    yield "sampler", f"{recipe.sampler}, {recipe.schedule} schedule, {counted(recipe.steps, 'step')}"
    yield "guidance", f"{recipe.cfg:g}"


def _recorded_clip(source: RecipeSource) -> dict[str, Any]:
    texts = (stage for stage in source.stages if isinstance(stage, EncodeParams))
    embeddings = {(each.name, each.sha256) for stage in texts for each in stage.embeddings}
    return {"embeddings": tuple(sorted(embeddings)), "clip_skip": source.request.clip_skip}


def _restored_clip(recipe: Recipe, find: FindFile) -> dict[str, Any]:
    return {"clip_skip": recipe.clip_skip}


def _clip_lines(recipe: Recipe) -> Iterator[Line]:
    for name, sha256 in recipe.embeddings:
        yield f"embedding {name}", f"(sha256 {sha256})"
    if recipe.clip_skip:
        yield "clip skip", str(recipe.clip_skip)


#: model, texts, guidance scale and seed
BASE = Feature(defaults=_defaults, recipe=Section(_recorded, _restored, _text_lines))
#: the lines of the sampler (`NOISE` has its fields), and of the guidance
SAMPLER = Feature(recipe=Section(lines=_sampler_lines))
#: textual inversions, and layers of CLIP that are skipped
CLIP = Feature(recipe=Section(_recorded_clip, _restored_clip, _clip_lines))
