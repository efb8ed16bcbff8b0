"""Which runs several GPUs can share. Torch-free and pure: the graph asks before a task is queued, a worker before it
meets its gang.

Members that divide the texts each call the model as one worker does, so all that acts in a call for one text is
possible. What needs the complete image inside of the model is refused where members divide the tokens.
"""

from __future__ import annotations

from modelpool.pool.values.core.sampling_facts import SamplingFacts
from modelpool.pool.values.core.sequence_plan import SequencePlan
from modelpool.pool.values.core.stage_params import (
    ADAPTIVE_SAMPLER,
    ControlRef,
    ControlVideoCondition,
    FaceCondition,
    ImageCondition,
    ImagePromptRef,
    MaskCondition,
    MaskedImageCondition,
    ReferenceCondition,
    RegionParams,
    SampleCondition,
    SampleParams,
    StartCondition,
    TracksCondition,
)

#: conditions that act on the latent between the calls of the model, and texts of their own
_OUTSIDE = (StartCondition, MaskCondition, RegionParams)
#: options that change predictions
_BETWEEN_CALLS = ("rescale_cfg", "cfg_zero", "apg", "tcfg", "perp_neg", "epsilon_scaling", "cfg_override")


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
    if work.schedule.sampler == ADAPTIVE_SAMPLER:
        return f"sampler {ADAPTIVE_SAMPLER} chooses its steps by a sum over the latent, in which GPUs may differ"
    if facts.has_unconditional:
        return "the model has a second model for predictions without a text"
    if facts.video is not None and facts.video.sound is not None and facts.sequence is None:
        return "its sound track is not divided"
    groups = text_groups(work.texts, degree)
    if groups > 1 and work.options.sag is not None:
        return "sag reads the attention of a prediction that another GPU makes, which several GPUs do not support"
    if degree == groups:
        return ""
    if facts.sequence is None:
        most = "2, which divide the texts of guidance" if work.texts > 1 else "1"
        why = f", as {facts.not_divided}" if facts.not_divided else ""
        return f"the tokens of this family are not divided among GPUs{why}; expected at most {most}"
    return _token_obstacle(facts.sequence, work)


def _token_obstacle(plan: SequencePlan, work: SampleParams) -> str:
    """Return why tokens cannot be divided by `plan` in a run of `work`; "" if they can."""
    possible: dict[type[SampleCondition], bool] = {
        ImageCondition: plan.reads_images,
        MaskedImageCondition: plan.reads_images,
        TracksCondition: plan.reads_images,
        ControlVideoCondition: plan.follows_videos,
        FaceCondition: plan.follows_videos,
        ReferenceCondition: plan.reads_references or plan.follows_videos,
        ControlRef: plan.reads_controls,
        ImagePromptRef: plan.reads_prompts,
    }
    for each in work.conditions:
        if not isinstance(each, _OUTSIDE) and not possible.get(type(each), False):
            name = _NAMES.get(type(each).__name__, "an input image of the model")
            return f"{name} is not supported by GPUs that divide the tokens of this family"
    if any(control.is_blockwise for control in work.controls):
        return "a ControlNet behind each block is not supported by GPUs that divide the tokens"
    if any(prompt.masks for prompt in work.image_prompts):
        return "the masks of an image prompt are not supported by GPUs that divide the tokens"
    if work.options.kv_cache is not None:
        return "kv_cache keeps the keys and values of all tokens, which GPUs that divide the tokens do not have"
    if work.options.windows is not None:
        return "windows calls the model for a part of the frames, which GPUs that divide the tokens do not support"
    inside = [name for name in work.options.names if name not in _BETWEEN_CALLS]
    if inside and not plan.takes_options:
        return f"{inside[0]} acts inside of the model, which GPUs that divide the tokens of this family do not support"
    return ""


_NAMES = {
    "ControlRef": "a ControlNet",
    "ImagePromptRef": "an image prompt",
    "GligenRef": "a text in a box",
    "TracksCondition": "a track of points",
    "ReferenceCondition": "a reference image",
    "PriorCondition": "a second stage",
    "ControlVideoCondition": "a control video",
    "FaceCondition": "a video of a face",
    "KeptSoundCondition": "audio that is kept",
    "VoiceCondition": "audio of a voice",
}
