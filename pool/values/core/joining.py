"""Which sampling tasks may share a forward pass at different steps, each with its own schedule, sampler and guidance.

Torch-free. Such tasks have a fixed batch size: a pass has that many rows, and each row is computed as in any other pass
of that many. `pool.engine.open_pass` runs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from modelpool.pool.values.core.sampling_facts import CfgRescale, Guidance, SamplingFacts
from modelpool.pool.values.core.stage_params import (
    GuidanceParams,
    SampleParams,
    SamplingSchedule,
    StageParams,
    batch_key,
    why_alone,
)

#: guidance methods that normalise predictions
_NORMALISING = frozenset({Guidance.PROJECTED_LATE, Guidance.PROJECTED})


def why_single(work: StageParams, facts: SamplingFacts) -> str:
    """Return why `work`, of a model of `facts`, has no batch size above 1, for users; "" if its bytes in passes of one
    size depend on nothing else."""
    if isinstance(work, SampleParams) and facts.routes_tokens:
        return "its experts compute the tokens of all images of a pass together, which rounds by how many chose each"
    if isinstance(work, SampleParams) and facts.scales_inputs:
        return "NVFP4 layers of its file have no scale of their inputs, and scale them by all images of a pass"
    return why_alone(work)


def why_not_joining(work: StageParams, facts: SamplingFacts) -> str:
    """Return why `work`, of a model of `facts`, joins no running pass, for users; "" if it may.

    What sums over an image outside of the model rounds by the number of images in the run, and a row of a pass is a run
    of one image. What changes the model or its inputs at a step does so for all rows.
    """
    if not isinstance(work, SampleParams):
        return "only sampling has steps"
    if reason := why_single(work, facts):
        return reason
    if not work.steps_run:
        return "it has no step"
    if work.conditions:
        kind = type(work.conditions[0]).__name__
        return f"its inputs other than texts ({kind}) are of one step or one size"
    if not work.options.is_empty:
        return f"option {work.options.names[0]} acts on all images of a pass at one step"
    if any(lora.changes_in_run or lora.only for lora in work.loras):
        return "a LoRA that changes in a run changes the weights for all images of a pass"
    guidance = None if facts.defaults is None else facts.defaults.guidance
    if guidance in _NORMALISING or facts.cfg_rescale is not CfgRescale.NOTHING:
        return "its guidance normalises predictions, which rounds by the number of images"
    if facts.video is not None and facts.video.sound is not None:
        return "the guidance of its audio normalises predictions, which rounds by the number of images"
    if facts.reads_lyrics:
        return "its model prepares the texts of all images at once, before the first step"
    return ""


def pass_key(work: StageParams, facts: SamplingFacts, context_tokens: Sequence[int] = ()) -> str:
    """Return the key that tasks with a fixed batch size must share to run in one pass at different steps: as
    `batch_key`, but for sampler, schedule, number of steps and guidance scales. Empty: it joins no pass."""
    if not isinstance(work, SampleParams) or work.batch_size <= 1 or why_not_joining(work, facts):
        return ""
    # a prediction for one text and one for two are calls of different sizes
    guidance = GuidanceParams(2.0 if work.reads_negative else 1.0)
    schedule = SamplingSchedule(1, "any", "any", low_noise=work.schedule.low_noise)
    return batch_key(replace(work, guidance=guidance, schedule=schedule), context_tokens)
