"""What runs of a few models do beside what all do: how two guesses become one, and how an image is told and kept.

Puts `late_projection`, `frame_strengths` and `beginnings` together for `run`; knows no model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from modelpool.pool.conditioning.conditions import Condition
from modelpool.pool.conditioning.first_frame import IMAGE_MASK, image_kept, led_latent, shaken_image, shakes_image
from modelpool.pool.conditioning.micro_conditioning import IMAGE, Extras
from modelpool.pool.core.sampling_facts import KeptLength, SamplingFacts
from modelpool.pool.core.stage_params import SampleWork
from modelpool.pool.guidance.apg import LateProjection, Lead, plain_steps, projects_late
from modelpool.pool.guidance.per_frame_guidance import frame_strengths
from modelpool.pool.sampling.samplers import Denoise


@dataclass(frozen=True, slots=True, eq=False)
class OwnWays:
    """Which of them a run has.

    kept_length     what is done to guided predictions
    strengths       of the guidance in each cell, on the run's device; None where all have the same
    shakes_image  the image that its texts are told of is kept, and told with noise (`beginnings.shaken_image`)
    plain_steps     how many steps each of its images is guided plainly, before `LateProjection` is more than that;
                    empty where it always is
    led_BCTHW       what is told of the image that leads its video; None where none does
    """

    kept_length: KeptLength = KeptLength.NOTHING
    strengths: Tensor | None = None
    shakes_image: bool = False
    plain_steps: tuple[int, ...] = ()
    led_BCTHW: Tensor | None = None

    def begun(self, x_BC: Tensor) -> Tensor:
        """What the run begins with, of what others begin with."""
        return x_BC if self.led_BCTHW is None else led_latent(x_BC, self.led_BCTHW)


PLAIN_WAYS = OwnWays()


def own_ways(
    facts: SamplingFacts, work: SampleWork, cond: Condition, count: int, cells: int, device: torch.device
) -> OwnWays:
    """Those of a run like `work` of `count` images by a model of `facts` on `device`. Their texts are `cond`, on the
    host; videos have so many `cells` of time."""
    return OwnWays(
        facts.kept_length,
        frame_strengths(facts.usual, work.cfg, cells, device),
        work.imaged and shakes_image(facts.video),
        plain_steps(cond.extras, count) if projects_late(facts.usual) else (),
        cond.extras[IMAGE] if work.imaged and facts.video is not None and facts.video.leading else None,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Guiding:
    """What a run does so.

    for_guidance  the last arguments of `guidance.guided_denoiser`: its strengths, lead and told_anew
    kept          makes of the guided `denoise` the one that samplers call
    """

    for_guidance: tuple[Tensor | None, Lead | None, Callable[[], Extras] | None]
    kept: Callable[[Denoise], Denoise]


def guiding(ways: OwnWays, work: SampleWork, seeds: Sequence[int], cond: Condition, sigma_data: float) -> Guiding:
    """For one run of images of `seeds`, whose texts are `cond`, on the device that it is on."""
    lead = LateProjection(work.cfg, ways.plain_steps, work.first_step) if ways.plain_steps else None
    if not ways.shakes_image:
        return Guiding((ways.strengths, lead, None), lambda denoise: denoise)
    image_BCTHW, mask_B1THW = cond.extras[IMAGE], cond.extras[IMAGE_MASK]
    told_anew = shaken_image(image_BCTHW, seeds, sigma_data)
    return Guiding((ways.strengths, lead, told_anew), lambda denoise: image_kept(denoise, image_BCTHW, mask_B1THW))
