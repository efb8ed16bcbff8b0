"""Fills in the fields that a request leaves out with the model's sampling defaults.

Pure functions of values. Knows neither catalogs nor files.
"""

from __future__ import annotations

from typing import Any

from modelpool.actors.graph.common.output_shape import format_of, missing_extent, quality_of
from modelpool.actors.graph.features.control_video_graph import video_size
from modelpool.actors.graph.features.expert_graph import expert_defaults
from modelpool.actors.graph.features.image_concat_graph import image_size, size_like_reference
from modelpool.actors.graph.features.music_graph import music_defaults
from modelpool.actors.graph.features.reference_graph import reference_mode
from modelpool.actors.graph.features.schedule_guidance import shift_default
from modelpool.actors.request.requests import GenerateRequest, resolve_sampling
from modelpool.pool.inference.sampling.sampler_names import OWN_STEPS
from modelpool.pool.values.core.sampling_facts import ModelDefaults, SamplingDefaults
from modelpool.pool.values.core.stage_params import ModelRef

#: fields that other noise levels follow from
_LEVEL_FIELDS = frozenset({"steps", "schedule", "sigmas", "shift", "hires"})


def with_defaults(request: GenerateRequest, model: ModelRef, defaults: ModelDefaults) -> GenerateRequest:
    """Return `request`, which `model` supports, with every field that it leaves out filled in: sampling, sizes that
    follow its images, options of experts and references, file format. ControlNets, image prompts and regions of
    strength 0 have no effect and are left out."""
    facts = defaults.sampling
    file_format = format_of(request.format, request.model, facts)
    fields: dict[str, Any] = {
        **sampling_defaults(request, facts.defaults),
        **expert_defaults(request, facts),
        **size_like_reference(request, defaults),
        **video_size(request, facts),
        **image_size(request, facts),
        **missing_extent(request, defaults),
        **reference_mode(request, facts, model),
        **shift_default(request, facts),
        **music_defaults(request, facts),
        "format": file_format,
        "quality": quality_of(request.quality, file_format),
    }
    for name in ("controls", "image_prompts", "regions"):
        if parts := getattr(request, name):
            fields[name] = tuple(part for part in parts if part.strength != 0)
    return request.model_copy(update=fields)


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
