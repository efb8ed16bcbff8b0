"""Fills in the fields that a request leaves out with the defaults of its features.

Pure functions of values. Knows neither catalogs nor files.
"""

from __future__ import annotations

from typing import Any

from modelpool.actors.graph.all_features import DEFAULTS_ORDER
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.sampling_facts import ModelDefaults
from modelpool.pool.values.core.stage_params import ModelRef


def with_defaults(request: GenerateRequest, model: ModelRef, defaults: ModelDefaults) -> GenerateRequest:
    """Return `request`, which `model` supports, with every field that it leaves out filled in: sampling, sizes that
    follow its images, options of experts and references, file format. ControlNets, image prompts and regions of
    strength 0 have no effect and are left out."""
    fields: dict[str, Any] = {}
    for feature in DEFAULTS_ORDER:
        fields |= feature.defaults(request, model, defaults)
    for name in ("controls", "image_prompts", "regions"):
        if parts := getattr(request, name):
            fields[name] = tuple(part for part in parts if part.strength != 0)
    return request.model_copy(update=fields)
