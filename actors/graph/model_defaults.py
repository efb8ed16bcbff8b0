"""Fills in the fields that a request leaves out with the model's sampling defaults.

Pure functions of values. Knows neither catalogs nor files.
"""

from __future__ import annotations

from typing import Any

from modelpool.actors.request.requests import GenerateRequest, resolve_sampling
from modelpool.pool.core.sampling_facts import Guidance, SamplingDefaults
from modelpool.pool.sampling.names import SAMPLERS


def with_model_defaults(request: GenerateRequest, defaults: SamplingDefaults | None) -> GenerateRequest:
    """Return `request` with the model's default steps, guidance scale and sampler where it sets none."""
    if defaults is None:
        return request
    values: dict[str, Any] = {"steps": defaults.steps, "cfg": defaults.cfg, "sampler": defaults.sampler}
    missing = {name: value for name, value in values.items() if name not in request.model_fields_set}
    return request.model_copy(update=missing) if missing else request


def resolve_schedule(defaults: SamplingDefaults | None, sampler: str, schedule: str | None) -> tuple[str, str]:
    """Return the keys of sampler and schedule: those named, else the model's default schedule, else the sampler's.

    Raises UnknownName.
    """
    name, found = resolve_sampling(sampler, schedule)
    if defaults is None or schedule is not None or found != SAMPLERS[name].schedule:
        return name, found
    return name, defaults.schedule


def resolve_guidance(defaults: SamplingDefaults | None, cfg: float) -> tuple[float, float]:
    """Return the CFG scale (1 if the model reads no negative prompt), and the distilled guidance that is passed to the
    model (0 for none)."""
    match Guidance.CLASSIFIER_FREE if defaults is None else defaults.guidance:
        case Guidance.DISTILLED:
            return 1.0, cfg
        case Guidance.NONE:
            return 1.0, 0.0
        case _:
            return cfg, 0.0
