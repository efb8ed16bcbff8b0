"""The guidance of particular models: APG, per-frame guidance, and first frames with noise; assembled for `run`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from modelpool.pool.conditioning.conditions import Condition
from modelpool.pool.conditioning.first_frame import (
    IMAGE_MASK,
    keep_image,
    noised_image,
    noises_image,
    with_leading_image,
)
from modelpool.pool.conditioning.micro_conditioning import IMAGE, ModelKwargs
from modelpool.pool.core.sampling_facts import CfgRescale, SamplingFacts
from modelpool.pool.core.stage_params import SampleParams
from modelpool.pool.guidance.apg import AdaptiveProjectedGuidance, GuidanceFn, cfg_steps, uses_apg
from modelpool.pool.guidance.per_frame_guidance import frame_guidance_scales
from modelpool.pool.sampling.partial_run import GuidanceMemory
from modelpool.pool.sampling.samplers import Denoise


@dataclass(frozen=True, slots=True, eq=False)
class GuiderConfig:
    """The guidance options of a run.

    cfg_rescale     CFG rescale
    strengths       guidance scale of each latent position, on the run's device; None if all are equal
    noises_image  the first frame is kept, and passed to the model with noise (`first_frame.noised_image`)
    cfg_steps     number of plain CFG steps of each image, before adaptive projected guidance; empty without APG
    leading_BCTHW       model input of the image that leads the video; None without one
    """

    cfg_rescale: CfgRescale = CfgRescale.NOTHING
    guidance_scales: Tensor | None = None
    noises_image: bool = False
    cfg_steps: tuple[int, ...] = ()
    leading_BCTHW: Tensor | None = None

    def initial_latent(self, x_BC: Tensor) -> Tensor:
        """Return the initial latent of the run, from the initial noise."""
        return x_BC if self.leading_BCTHW is None else with_leading_image(x_BC, self.leading_BCTHW)


DEFAULT_GUIDER = GuiderConfig()


def guider_config(
    facts: SamplingFacts, work: SampleParams, cond: Condition, count: int, cells: int, device: torch.device
) -> GuiderConfig:
    """Return the options of a run like `work` of `count` images by a model of `facts` on `device`. Their texts are
    `cond`, on the host; videos have `cells` latent frames."""
    return GuiderConfig(
        facts.cfg_rescale,
        frame_guidance_scales(facts.defaults, work.cfg, cells, device),
        work.imaged and noises_image(facts.video),
        cfg_steps(cond.model_kwargs, count) if uses_apg(facts.defaults) else (),
        cond.model_kwargs[IMAGE] if work.imaged and facts.video is not None and facts.video.leading else None,
    )


@dataclass(frozen=True, slots=True, eq=False)
class RunGuider:
    """The guidance of one run.

    denoiser_args  last arguments of `classifier_free.guided_denoiser`: guidance scales, guidance function, drawn inputs
    kept          wraps the guided `denoise` for the sampler
    """

    denoiser_args: tuple[Tensor | None, GuidanceFn | None, Callable[[], ModelKwargs] | None]
    kept: Callable[[Denoise], Denoise]


def run_guider(
    config: GuiderConfig,
    work: SampleParams,
    seeds: Sequence[int],
    cond: Condition,
    sigma_data: float,
    memory: GuidanceMemory | None = None,
) -> RunGuider:
    """Return the guidance of one run of images with `seeds`, whose texts are `cond`, on the device of the run. It
    resumes from `memory`, and updates it."""
    memory = memory or GuidanceMemory()
    guidance_fn: GuidanceFn | None = None
    if config.cfg_steps:
        guidance_fn = AdaptiveProjectedGuidance(work.cfg, config.cfg_steps, work.first_step, memory)
    if not config.noises_image:
        return RunGuider((config.guidance_scales, guidance_fn, None), lambda denoise: denoise)
    image_BCTHW, mask_B1THW = cond.model_kwargs[IMAGE], cond.model_kwargs[IMAGE_MASK]
    drawn_inputs = noised_image(image_BCTHW, seeds, sigma_data, memory)
    return RunGuider(
        (config.guidance_scales, guidance_fn, drawn_inputs),
        lambda denoise: keep_image(denoise, image_BCTHW, mask_B1THW),
    )
