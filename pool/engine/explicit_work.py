"""Stage parameters for explicit control: what `encode`, `sample` and `decode` ask of a model, with its own defaults.

Only what a text and numbers determine. Models that read or make something else are refused with the call and the
family. Pure functions of values.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from modelpool.pool.families.control_video_models import takes_control_video, takes_face_video
from modelpool.pool.inference.sampling.model_choices import check_known_steps, resolve_guidance, resolve_schedule
from modelpool.pool.inference.sampling.noise import checked_seed
from modelpool.pool.inference.sampling.sampler_names import EXPLICIT_SCHEDULE, MAX_CFG, MAX_STEPS, MIN_CFG, OWN_STEPS
from modelpool.pool.values.core.argument_checks import checked_text, real_number, whole_number
from modelpool.pool.values.core.errors import UserError, unusable_field
from modelpool.pool.values.core.output_kinds import check_extent, fitting_frames, kind_of
from modelpool.pool.values.core.sampling_facts import ModelDefaults, SamplingFacts
from modelpool.pool.values.core.stage_params import (
    GuidanceParams,
    ModelRef,
    OutputShape,
    SampleParams,
    SamplingSchedule,
)
from modelpool.pool.values.core.written_tokens import WrittenTokens

#: maximum width and height of an image; as in `actors.request.requests`
MAX_SIZE = 16384
#: maximum frames of a video; as in `actors.request.requests`
MAX_FRAMES = 16384
#: of models without defaults of their own; as in `actors.request.requests`
USUAL_STEPS, USUAL_CFG, USUAL_SAMPLER = 20, 5.0, "euler"


@dataclass(frozen=True, slots=True)
class SampleNumbers:
    """The arguments of `LoadedModel.sample` that are numbers or names; None, or "" for the sampler, is the model's."""

    width: int | None
    height: int | None
    frames: int | None
    steps: int | None
    cfg: float | None
    sampler: str
    seed: int | None


def check_encodes(model: ModelRef, title: str, facts: SamplingFacts, *, writes: bool) -> None:
    """Raise UserError unless a text alone determines what the text encoders of `model` return; `writes`: the size and
    the seed of the image are known, too."""
    if facts.vision_use is not None and not facts.vision_use.is_model_input:
        raise _refused("encode", model, title, "reads an image together with the text")
    if facts.audio is not None:
        raise _refused("encode", model, title, "generates audio, whose length its text encoders read")
    if facts.writes_tokens and not writes:
        reason = "has a text encoder that writes tokens for an image of one size and seed"
        raise _refused("encode", model, title, reason, "generate(...) does that")


def check_samples(call: str, model: ModelRef, title: str, facts: SamplingFacts) -> None:
    """Raise UserError naming `call` and the family unless texts determine what `model` generates."""
    if reason := _other_input(facts) or _other_output(facts):
        raise _refused(call, model, title, reason)
    if facts.writes_tokens and call != "generate":
        reason = "reads tokens that its text encoder writes for an image of one size and seed"
        raise _refused(call, model, title, reason, "generate(...) does that")


def check_decodes(model: ModelRef, title: str, facts: SamplingFacts) -> None:
    """Raise UserError naming the family unless the VAE of `model` decodes latents to images or videos without sound."""
    if reason := _other_output(facts):
        raise _refused("decode", model, title, reason)


def sample_work(model: ModelRef, defaults: ModelDefaults, numbers: SampleNumbers, step: int) -> SampleParams:
    """Return the sampling parameters of `numbers` for `model`, all checked, with its defaults. `step` is the number of
    pixels that widths and heights are multiples of. Raises UnusableField and UnknownName."""
    facts = defaults.sampling
    own = facts.defaults
    named = checked_text("sampler", numbers.sampler, "the name of a sampler, such as 'euler'")
    named = named or (USUAL_SAMPLER if own is None else own.sampler)
    sampler, schedule = resolve_schedule(facts, named, None)
    check_known_steps(facts, model.name, sampler, named)
    sigmas = () if own is None or numbers.steps is not None or sampler in OWN_STEPS else own.sigmas
    expected = f"a number from {MIN_CFG:g} (no guidance) to {MAX_CFG:g}"
    own_cfg = USUAL_CFG if own is None else own.cfg
    cfg = real_number("cfg", own_cfg if numbers.cfg is None else numbers.cfg, expected, MIN_CFG, MAX_CFG)
    own_steps = len(sigmas) or (USUAL_STEPS if own is None else own.steps)
    return SampleParams(
        model,
        (),
        _shape(model, defaults, numbers, step),
        SamplingSchedule(
            whole_number(
                "steps",
                own_steps if numbers.steps is None else numbers.steps,
                f"a whole number from 1 to {MAX_STEPS}",
                1,
                MAX_STEPS,
            ),
            sampler,
            EXPLICIT_SCHEDULE if sigmas else schedule,
            sigmas=sigmas,
        ),
        GuidanceParams(*resolve_guidance(own, cfg)),
        secrets.randbits(64) if numbers.seed is None else checked_seed(numbers.seed),
    )


def written_tokens(work: SampleParams, facts: SamplingFacts) -> WrittenTokens | None:
    """Return the tokens that the text encoder of a model of `facts` writes for the image of `work`; None for none."""
    return WrittenTokens(work.shape.width, work.shape.height, work.seed) if facts.writes_tokens else None


def _shape(model: ModelRef, defaults: ModelDefaults, numbers: SampleNumbers, step: int) -> OutputShape:
    video = defaults.sampling.video
    width = _checked_side("width", numbers.width, defaults.width, step)
    height = _checked_side("height", numbers.height, defaults.height, step)
    if video is None:
        if numbers.frames is not None:
            raise unusable_field(
                "frames", numbers.frames, f"no value: model {model.name!r} generates images, not videos"
            )
        return OutputShape(width, height)
    asked = video.frames if numbers.frames is None else numbers.frames
    frames = whole_number("frames", asked, f"a whole number from 1 to {MAX_FRAMES}", 1, MAX_FRAMES)
    frames = fitting_frames(frames, model.name, video)
    check_extent((width, height), frames, model.name, defaults)
    return OutputShape(width, height, frames, video.rate, leading=video.leading)


def _checked_side(field: str, pixels: int | None, own: int, step: int) -> int:
    expected = f"a multiple of {step} from {step} to {MAX_SIZE}"
    found = whole_number(field, own if pixels is None else pixels, expected, step, MAX_SIZE)
    if found % step:
        raise unusable_field(field, found, expected)
    return found


def _other_input(facts: SamplingFacts) -> str:
    """Return what a model of `facts` reads besides texts, in words; empty for nothing."""
    begins = None if facts.video is None else facts.video.begins
    if facts.is_decoder_stage:
        return "is the second of two stages, and reads the latent of the first"
    if facts.is_prior_stage:
        return "is the first of two stages, whose latent another model decodes"
    if facts.low_noise is not None:
        return "consists of two diffusion models, one for each range of noise"
    if takes_control_video(facts) or takes_face_video(facts):
        return "follows a control video"
    reads_image = facts.image_concat is not None or facts.image_labels is not None or facts.vision_use is not None
    reads_image = reads_image or facts.needs_reference or facts.takes_view or not facts.reads_text
    if reads_image or (begins is not None and begins.is_required):
        return "reads an image besides the text"
    return ""


def _other_output(facts: SamplingFacts) -> str:
    """Return what a model of `facts` generates instead of an image or a silent video, in words; empty for neither."""
    if kind_of(facts) == "audio":
        return "generates audio"
    if kind_of(facts) == "layers":
        return "generates the layers of an image"
    return "generates videos with an audio track" if facts.video is not None and facts.video.sound is not None else ""


def _refused(
    call: str, model: ModelRef, title: str, reason: str, instead: str = "use a pool (modelpool.ModelPool)"
) -> UserError:
    return UserError(
        f"{call}: model {model.name!r} ({title}) {reason}, which {call}(...) of explicit control does not do; {instead}"
    )
