"""What a request is made with where it leaves something open, by the model's own usual run.

Pure functions over values. Knows neither catalogs nor files.
"""

from __future__ import annotations

from typing import Any

from modelpool.actors.request.requests import GenerateRequest, resolve_sampling
from modelpool.pool.core.sampling_facts import Guidance, UsualRun
from modelpool.pool.sampling.names import SAMPLERS


def as_usual(request: GenerateRequest, usual: UsualRun | None) -> GenerateRequest:
    """`request` with the model's own steps, strength of guidance and sampler where it names none."""
    if usual is None:
        return request
    own: dict[str, Any] = {"steps": usual.steps, "cfg": usual.cfg, "sampler": usual.sampler}
    missing = {name: value for name, value in own.items() if name not in request.model_fields_set}
    return request.model_copy(update=missing) if missing else request


def usual_schedule(usual: UsualRun | None, sampler: str, schedule: str | None) -> tuple[str, str]:
    """The keys of sampler and schedule: what is named, and otherwise the model's own schedule, or the sampler's.

    Raises UnknownName.
    """
    name, found = resolve_sampling(sampler, schedule)
    if usual is None or schedule is not None or found != SAMPLERS[name].schedule:
        return name, found
    return name, usual.schedule


def guided(usual: UsualRun | None, cfg: float) -> tuple[float, float]:
    """How far a run goes from the negative prompt to the prompt, 1 where the model reads no negative prompt; and the
    number that a model is told instead, 0 for none."""
    match Guidance.CLASSIFIER_FREE if usual is None else usual.guidance:
        case Guidance.DISTILLED:
            return 1.0, cfg
        case Guidance.NONE:
            return 1.0, 0.0
        case _:
            return cfg, 0.0
