"""Selects the guider of a run by the model, and holds the first frame of a video in its latent."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from modelpool.pool.families.parts.audio_tracks import SoundTrack, guided_track
from modelpool.pool.inference.conditioning.conditions import Condition
from modelpool.pool.inference.conditioning.first_frame import (
    IMAGE_MASK,
    keep_image,
    noised_image,
    noises_image,
    with_leading_image,
)
from modelpool.pool.inference.conditioning.micro_conditioning import IMAGE, ModelKwargs
from modelpool.pool.inference.guidance.apg import AdaptiveProjectedGuidance, ChannelProjectedGuidance, cfg_steps
from modelpool.pool.inference.guidance.direction_guiders import (
    DirectionalGuidance,
    PerpendicularGuidance,
    TangentialGuidance,
)
from modelpool.pool.inference.guidance.guiders import (
    LAST_STEPS_SHARE,
    PER_FRAME,
    ClassifierFreeGuidance,
    DeviationRescaledGuidance,
    EasedGuidance,
    FrequencyGuidance,
    Guider,
    ImageAndTextGuidance,
    NormedGuidance,
    PerFrameGuidance,
    RescaledGuidance,
    SoundGuidance,
    TextAndImageGuidance,
    ZeroStarGuidance,
    frame_guidance_scales,
)
from modelpool.pool.inference.guidance.scale_spans import SwitchedGuidance, acting_levels
from modelpool.pool.inference.sampling.partial_run import GuidanceMemory
from modelpool.pool.inference.sampling.samplers import Denoise
from modelpool.pool.inference.sampling.schedules import SigmaTable
from modelpool.pool.values.core.run_options import CfgOverride
from modelpool.pool.values.core.sampling_facts import CfgRescale, FirstFrameMode, Guidance, SamplingFacts
from modelpool.pool.values.core.stage_params import SampleParams


def guider_of(
    facts: SamplingFacts,
    work: SampleParams,
    cond: Condition,
    shape_BC: tuple[int, ...],
    device: torch.device,
    memory: GuidanceMemory,
    step: Callable[[], int] = lambda: 0,
    table: SigmaTable | None = None,
) -> Guider:
    """Return the guider of a run like `work` by a model of `facts` on `device`, for latents of `shape_BC`. Their texts
    are `cond`. It resumes from `memory`, and updates it. `step` returns the step of the schedule that is computed,
    `table` has the noise levels of the training."""
    if work.guidance.without_image:
        by_text = replace(work, guidance=replace(work.guidance, image_cfg=0.0))
        inner = guider_of(facts, by_text, cond, shape_BC, device, memory, step, table)
        if work.guidance.nested or type(inner) is ClassifierFreeGuidance:
            return TextAndImageGuidance(inner, work.guidance.image_cfg, work.guidance.nested)
        of_image = replace(by_text, guidance=replace(by_text.guidance, cfg=work.guidance.image_cfg))
        by_image = guider_of(facts, of_image, cond, shape_BC, device, memory, step, table)
        return ImageAndTextGuidance(work.guidance.cfg, by_image)
    if (override := work.options.cfg_override) is not None:
        plain = replace(work, options=replace(work.options, cfg_override=None))
        other = replace(plain, guidance=replace(plain.guidance, cfg=override.cfg))
        if facts.defaults is not None:
            facts = replace(facts, defaults=replace(facts.defaults, last_cfg=0.0))
        usual, own = (guider_of(facts, each, cond, shape_BC, device, memory, step) for each in (plain, other))
        return SwitchedGuidance(usual, own, _acts(override, facts, work.schedule.steps, step, table))
    zero, rescaled = work.options.cfg_zero, work.options.rescale_cfg
    guider = _guider_of_model(facts, work, cond, shape_BC, device, memory, step)
    if zero is not None:
        guider = ZeroStarGuidance(work.guidance.cfg, lambda: step() < zero.zero_steps)
    kind = facts.prediction, facts.noise.sigma_data
    if (projected := work.options.apg) is not None:
        guider = DirectionalGuidance(work.guidance.cfg, projected, *kind, memory)
    if (negative := work.options.perp_neg) is not None:
        guider = PerpendicularGuidance(work.guidance.cfg, negative.scale)
    if (damping := work.options.tcfg) is not None:
        guider = TangentialGuidance(guider, damping.strength, *kind)
    if (frequencies := work.options.fresca) is not None:
        guider = FrequencyGuidance(guider, frequencies.low, frequencies.high, frequencies.cutoff)
    if rescaled is not None:
        guider = DeviationRescaledGuidance(guider, rescaled.factor, *kind)
    if (norm := work.options.cfg_norm) is not None:
        guider = NormedGuidance(guider, norm.strength, *kind)
    return guider


def _acts(
    override: CfgOverride, facts: SamplingFacts, steps: int, step: Callable[[], int], table: SigmaTable | None
) -> Callable[[float], bool]:
    """Return whether another scale acts at a noise level, in the step that is computed."""
    if override.shares_of == "steps" or table is None:
        return lambda sigma: override.acts(step(), steps)
    low, high = acting_levels(override, facts.noise, table)
    return lambda sigma: low <= sigma <= high


def _guider_of_model(
    facts: SamplingFacts,
    work: SampleParams,
    cond: Condition,
    shape_BC: tuple[int, ...],
    device: torch.device,
    memory: GuidanceMemory,
    step: Callable[[], int],
) -> Guider:
    guidance = None if facts.defaults is None else facts.defaults.guidance
    if guidance in PER_FRAME:
        return PerFrameGuidance(
            work.guidance.cfg, frame_guidance_scales(guidance, work.guidance.cfg, shape_BC[2], device)
        )
    if guidance is Guidance.PROJECTED_LATE:
        plain = cfg_steps(cond.model_kwargs, shape_BC[0])
        return AdaptiveProjectedGuidance(work.guidance.cfg, plain, work.schedule.first_step, memory)
    if guidance is Guidance.PROJECTED:
        return ChannelProjectedGuidance(work.guidance.cfg, memory)
    track = SoundTrack.of(facts.video, work.shape.frames, work.shape.frame_rate, work.shape.leading)
    if track is not None and track.facts.cfg:  # 0: guided as the frames are
        # without guidance of frames there is none of audio; with isolation, it is scaled after that
        own = guided_track(track, work.options.sound).facts
        cfg = own.cfg if work.guidance.cfg != 1 else 1.0
        rescaled = own.rescale if work.options.isolation is None else 0.0
        return SoundGuidance(work.guidance.cfg, replace(track, facts=replace(track.facts, cfg=cfg, rescale=rescaled)))
    if facts.cfg_rescale is not CfgRescale.NOTHING:
        return RescaledGuidance(work.guidance.cfg, facts.cfg_rescale)
    if facts.defaults is not None and facts.defaults.last_cfg:
        late = work.schedule.steps - math.ceil(work.schedule.steps / LAST_STEPS_SHARE)
        return EasedGuidance(work.guidance.cfg, facts.defaults.last_cfg, lambda: step() >= late)
    return ClassifierFreeGuidance(work.guidance.cfg)


@dataclass(frozen=True, slots=True, eq=False)
class FirstFrame:
    """How the image of a video is held in the latent, besides being a model input.

    is_kept         predictions are replaced by the image where it is kept, and the model reads it with noise
                    (`first_frame.noised_image`)
    leading_BCTHW   model input of an image that leads the video, of which the initial latent has a part; None if none
    """

    is_kept: bool = False
    leading_BCTHW: Tensor | None = None

    @classmethod
    def of(cls, facts: SamplingFacts, work: SampleParams, cond: Condition) -> FirstFrame:
        """Return the first frame of a run like `work` with texts `cond` by a model of `facts`."""
        begins = None if facts.video is None else facts.video.begins
        leads = work.image is not None and begins is FirstFrameMode.LEADING_CELL
        return cls(work.image is not None and noises_image(facts.video), cond.model_kwargs[IMAGE] if leads else None)

    def initial_latent(self, x_BC: Tensor) -> Tensor:
        """Return the initial latent of the run, from the initial noise."""
        return x_BC if self.leading_BCTHW is None else with_leading_image(x_BC, self.leading_BCTHW)

    def drawn_inputs(
        self, cond: Condition, seeds: Sequence[int], sigma_data: float, memory: GuidanceMemory
    ) -> Callable[[], ModelKwargs] | None:
        """Return a function that returns the image with new noise, for each prediction of images with `seeds`; None if
        the image is not kept. It continues after the calls that `memory` counts, and counts its own there."""
        return noised_image(cond.model_kwargs[IMAGE], seeds, sigma_data, memory) if self.is_kept else None

    def keep(self, denoise: Denoise, cond: Condition) -> Denoise:
        """Return `denoise` with the image in its results where it is kept; `cond` are the texts on the device."""
        if not self.is_kept:
            return denoise
        return keep_image(denoise, cond.model_kwargs[IMAGE], cond.model_kwargs[IMAGE_MASK])


NO_FIRST_FRAME = FirstFrame()
