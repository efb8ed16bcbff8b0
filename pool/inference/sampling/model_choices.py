"""Resolves the sampler, the schedule and the guidance of a run with the facts of its model. Pure functions of values;
torch-free."""

from __future__ import annotations

from modelpool.pool.inference.sampling.sampler_names import ALIGNED_SCHEDULE, SAMPLERS, resolve_sampling
from modelpool.pool.values.core.errors import unusable_field
from modelpool.pool.values.core.sampling_facts import Guidance, SamplingDefaults, SamplingFacts


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


def check_known_steps(facts: SamplingFacts, model: str, sampler: str, named: str, churns: bool = False) -> None:
    """Raise UnusableField for a `sampler` with other steps than `model` was distilled to; `named` is the user's name of
    it, `churns` whether it is to add noise before steps."""
    if facts.knows_steps and (sampler != "euler" or churns):
        found = f"{named} with s_churn" if sampler == "euler" else named
        expected = f"euler without s_churn: model {model!r} was distilled to its steps"
        raise unusable_field("sampler", found, expected)
