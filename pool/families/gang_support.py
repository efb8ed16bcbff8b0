"""Which runs several GPUs can share. Torch-free and pure: the graph asks before a task is queued, a worker before it
meets its gang."""

from __future__ import annotations

from modelpool.pool.values.core.sampling_facts import SamplingFacts
from modelpool.pool.values.core.sequence_plan import SequencePlan
from modelpool.pool.values.core.stage_params import (
    ADAPTIVE_SAMPLER,
    Condition,
    ControlVideoCondition,
    FaceCondition,
    ImageCondition,
    MaskCondition,
    ReferenceCondition,
    SampleParams,
    StartCondition,
)

#: conditions that act on the latent between the calls of the model
_OUTSIDE = (StartCondition, MaskCondition)


def text_groups(texts: int, degree: int) -> int:
    """Return in how many groups the members of a gang predict for `texts` texts: by texts first, in two groups at most;
    the members of each divide the tokens."""
    return 2 if texts > 1 and degree % 2 == 0 else 1


def gang_obstacle(facts: SamplingFacts, work: SampleParams, degree: int) -> str:
    """Return why `degree` GPUs cannot share a run of `work` by a model of `facts`, for users; "" if they can."""
    if degree == 1:
        return ""
    if work.batch_size > 1:
        return "a run with a fixed batch size is not divided"
    if work.options.names:
        return (
            f"{work.options.names[0]} acts inside of the model or counts its calls, which several GPUs do not support"
        )
    if any(lora.changes_in_run or lora.only for lora in work.loras):
        return "a LoRA that changes in the run, or is for one text, is not supported by several GPUs"
    if work.schedule.sampler == ADAPTIVE_SAMPLER:
        return f"the steps of sampler {ADAPTIVE_SAMPLER} are not shared"
    inside = [each for each in work.conditions if not isinstance(each, (*_OUTSIDE, *_read_by(facts.sequence)))]
    if inside:
        return f"{_NAMES.get(type(inside[0]).__name__, 'an input image of the model')} is not supported by several GPUs"
    if facts.has_unconditional:
        return "the model has a second model for predictions without a text"
    if facts.video is not None and facts.video.sound is not None and facts.sequence is None:
        return "its sound track is not divided"
    if degree // text_groups(work.texts, degree) > 1 and facts.sequence is None:
        most = "2, which divide the texts of guidance" if work.texts > 1 else "1"
        why = f", as {facts.not_divided}" if facts.not_divided else ""
        return f"the tokens of this family are not divided among GPUs{why}; expected at most {most}"
    return ""


def _read_by(plan: SequencePlan | None) -> tuple[type[Condition], ...]:
    """Return the conditions with which a plan holds."""
    if plan is None:
        return ()
    images = (ImageCondition,) if plan.reads_images else ()
    videos = (ControlVideoCondition, FaceCondition, ReferenceCondition) if plan.follows_videos else ()
    return (*images, *videos)


_NAMES = {
    "ControlRef": "a ControlNet",
    "ImagePromptRef": "an image prompt",
    "RegionParams": "a region with a prompt of its own",
    "ReferenceCondition": "a reference image",
    "PriorCondition": "a second stage",
    "ControlVideoCondition": "a control video",
    "FaceCondition": "a video of a face",
}
