"""Resolves the sampler, the schedule and the guidance of a run with the model's defaults. Pure functions of values."""

from __future__ import annotations

from collections.abc import Iterator

from modelpool.actors.request.requests import GenerateRequest, resolve_sampling
from modelpool.pool.core.errors import unusable_field
from modelpool.pool.core.sampling_facts import Guidance, Prediction, SamplingDefaults, SamplingFacts
from modelpool.pool.sampling.names import ALIGNED_SCHEDULE, NOT_FOR_FLOWS, SAMPLERS


def resolve_schedule(facts: SamplingFacts, sampler: str, schedule: str | None) -> tuple[str, str]:
    """Return the keys of sampler and schedule: those named, else the model's default schedule, else the sampler's.

    Raises UnknownName, and UnusableField for a schedule that was not published for the model.
    """
    name, found = resolve_sampling(sampler, schedule)
    if found == ALIGNED_SCHEDULE:
        if not facts.aligned_schedule:
            expected = "another schedule: Align Your Steps was published for SD1, SDXL and Stable Video Diffusion"
            raise unusable_field("schedule", schedule or sampler, expected)
        return name, facts.aligned_schedule
    if facts.defaults is None or schedule is not None or found != SAMPLERS[name].schedule:
        return name, found
    return name, facts.defaults.schedule


def sampler_warnings(request: GenerateRequest, facts: SamplingFacts) -> Iterator[str]:
    """Yield the warning for a sampler that does not suit models of `facts`."""
    name, _ = resolve_sampling(request.sampler, request.schedule)
    if facts.prediction is Prediction.FLOW and name in NOT_FOR_FLOWS:
        other = "Euler CFG++" if name.endswith("_cfg_pp") else "DPM++ 2M"
        yield (
            f"sampler {SAMPLERS[name].display}: model {request.model!r} predicts a flow, with which this sampler often "
            f"renders wrong images; {other} suits it"
        )


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
