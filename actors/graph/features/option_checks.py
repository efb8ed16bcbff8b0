"""Checks that a model's family supports the options of a request, and that they can act together. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from modelpool.actors.graph.features.feature import Feature, FindFile, Line, RecipeSource, Section
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.families.option_support import families_with, family_name, supported_options
from modelpool.pool.inference.sampling.model_choices import resolve_guidance
from modelpool.pool.values.core.errors import UnusableField
from modelpool.pool.values.core.run_options import RunOptions
from modelpool.pool.values.core.sampling_facts import SamplingFacts

if TYPE_CHECKING:
    from modelpool.actors.graph.features.recipe import Recipe

#: options that combine the predictions with and without guidance
_GUIDANCE = ("cfg_zero", "rescale_cfg", "cfg_norm", "fresca", "apg", "tcfg", "perp_neg", "cfg_override", "sound")
#: options that compute the guided prediction, and ones that change two predictions before that
_WHOLE_GUIDANCE, _OF_TWO_PREDICTIONS = ("cfg_zero", "apg", "perp_neg"), ("fresca", "tcfg")
#: options of which a run has at most one
_CACHES = ("deepcache", "fbcache", "teacache", "kv_cache")
#: options that change what blocks add in some calls only, which the keys and values of other calls do not have
_OF_BLOCKS = ("slg", "block_scale")

#: why a family lacks an option, where that is no matter of its architecture alone
_REASONS = {"teacache": "no known coefficients of TeaCache were published for it"}


def check_options(request: GenerateRequest, facts: SamplingFacts) -> None:
    """Raise UnusableField, naming the option, for one that the family does not support or that cannot act."""
    if request.options is None:
        return
    supported = supported_options(facts)
    experts = "" if facts.low_noise is None else " with two experts"
    for name, _ in request.options.used():
        if name not in supported:
            why = f" ({_REASONS[name]})" if name in _REASONS else ""
            raise UnusableField(
                f"options.{name}: not supported by model {request.model!r} of the family {family_name(facts)}"
                f"{experts}{why}; families with this option: {', '.join(families_with(name)) or 'none'}"
            )
    for problem in _problems(request, request.options, facts):
        raise UnusableField(problem)


def _problems(request: GenerateRequest, options: RunOptions, facts: SamplingFacts) -> Iterator[str]:
    cfg = request.cfg
    if "cfg" not in request.model_fields_set and facts.defaults is not None:
        cfg = facts.defaults.cfg
    for name in _GUIDANCE:
        if getattr(options, name) is not None and resolve_guidance(facts.defaults, cfg)[0] == 1:
            yield f"options.{name}: found cfg {cfg:g}, expected guidance: a cfg other than 1"
    guided = [name for name in _WHOLE_GUIDANCE if getattr(options, name) is not None]
    if len(guided) > 1:
        expected = "one of them: each computes the guided prediction"
        yield f"options.{guided[-1]}: found together with {guided[0]}, expected {expected}"
    if options.perp_neg is not None:
        for name in _OF_TWO_PREDICTIONS:
            if getattr(options, name) is not None:
                yield f"options.perp_neg: found together with {name}, expected one of them: it is for two predictions"
    if options.deep_shrink is not None:
        yield from _other_sizes(request, options)
    caches = [name for name in _CACHES if getattr(options, name) is not None]
    if len(caches) > 1:
        yield f"options.{caches[1]}: found together with {caches[0]}, expected one cache"
    for name in _CACHES if options.windows is not None else ():
        if getattr(options, name) is not None:
            yield f"options.windows: found together with {name}, which compares calls of steps, expected one of them"
    for name in _OF_BLOCKS if options.kv_cache is not None else ():
        if getattr(options, name) is not None:
            yield f"options.kv_cache: found together with {name}, which changes blocks, expected one of them"
    if options.tiled is None:
        return
    for name, is_set in (
        ("controls", bool(request.controls)),
        ("regions", bool(request.regions)),
        ("image_prompts.mask", any(each.masks for each in request.image_prompts)),
        ("options.sag", options.sag is not None),
        ("options.deepcache", options.deepcache is not None),
    ):
        if is_set:
            yield f"options.tiled: found together with {name}, which acts on the whole latent, expected one of them"


def _other_sizes(request: GenerateRequest, options: RunOptions) -> Iterator[str]:
    """Yield what expects features of the usual sizes, next to deep shrink."""
    for name, is_set in (
        ("controls", bool(request.controls)),
        ("image_prompts.mask", any(each.masks for each in request.image_prompts)),
        *((f"options.{name}", getattr(options, name) is not None) for name in ("sag", "hypertile", "deepcache")),
    ):
        if is_set:
            yield (
                f"options.deep_shrink: found together with {name}, which reads features of the usual sizes, expected "
                "one of them"
            )


def _recorded(source: RecipeSource) -> dict[str, Any]:
    return {"options": source.sample.options.settings()}


def _restored(recipe: Recipe, find: FindFile) -> dict[str, Any]:
    return {"options": recipe.options or None}


def _lines(recipe: Recipe) -> Iterator[Line]:
    for name, settings in recipe.options.items():
        yield f"option {name}", ", ".join(f"{setting} {value}" for setting, value in settings.items())


OPTIONS = Feature(check_options, recipe=Section(_recorded, _restored, _lines))
