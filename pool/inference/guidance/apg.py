"""Adaptive projected guidance (APG): classifier-free guidance that drops the component of the guidance that is parallel
to the conditional prediction, in all steps or in late ones.

Implements the published variants of HunyuanImage, in late steps, and of ACE-Step; knows neither models nor samplers.

Sources: Sadat et al. 2024 (adaptive projected guidance), algorithm 1; `AdaptiveProjectedMixGuidance` of diffusers, and
Tencent-Hunyuan/HunyuanImage-2.1, for the constants; diffusers' AceStepPipeline for ACE-Step's.

Shape legend: B batch, C latent channels, H W latent height and width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from modelpool.pool.inference.conditioning.micro_conditioning import ModelKwargs
from modelpool.pool.inference.guidance.guiders import Guider, Predictions, classifier_free_guidance
from modelpool.pool.inference.sampling.partial_run import GuidanceMemory

#: steps with plain CFG at the start of the schedule: of an image, and of one with rendered text
CFG_STEPS, CFG_STEPS_WITH_TEXT = 6, 39
#: momentum of earlier differences, largest norm of the sum, and its factor
MOMENTUM, MAX_NORM, STRENGTH = -0.5, 10.0, 10.0
#: the same for ACE-Step, which has a norm for each channel
CHANNEL_MOMENTUM, CHANNEL_MAX_NORM = -0.75, 2.5
#: smallest norm of a vector with a direction
_SHORTEST = 1e-12
#: the model input for text that is rendered in the image; zeros, or missing, without such text
_WORDS = "context_2"


def cfg_steps(inputs: ModelKwargs, count: int) -> tuple[int, ...]:
    """Return the number of plain CFG steps of each of `count` images with these model `inputs`."""
    if _WORDS not in inputs:
        return (CFG_STEPS,) * count
    return tuple(CFG_STEPS_WITH_TEXT if text.any() else CFG_STEPS for text in inputs[_WORDS].ne(0))


def project(cond_BCHW: Tensor, uncond_BCHW: Tensor, differences_BCHW: Tensor) -> Tensor:
    """Return `uncond_BCHW` plus the component of `differences_BCHW` orthogonal to `cond_BCHW`, for each batch
    member."""
    sides = tuple(range(1, cond_BCHW.dim()))
    return uncond_BCHW + orthogonal_part(cond_BCHW, differences_BCHW, sides, MAX_NORM) * STRENGTH


def orthogonal_part(cond_BCHW: Tensor, differences_BCHW: Tensor, dims: tuple[int, ...], max_norm: float) -> Tensor:
    """Return the component of `differences_BCHW`, shortened to `max_norm`, that is orthogonal to `cond_BCHW`: as
    vectors along `dims`."""
    lengths = torch.linalg.vector_norm(differences_BCHW, dim=dims, keepdim=True)
    short_BCHW = differences_BCHW * (max_norm / lengths).clamp(max=1.0)
    norms = torch.linalg.vector_norm(cond_BCHW, dim=dims, keepdim=True).clamp(min=_SHORTEST)
    direction_BCHW = cond_BCHW / norms
    along = (short_BCHW * direction_BCHW).sum(dim=dims, keepdim=True)
    part_BCHW: Tensor = short_BCHW - direction_BCHW * along
    return part_BCHW


def accumulated(memory: GuidanceMemory, predicted: Predictions, sigma: float, momentum: float) -> Tensor:
    """Return the difference of the predictions at `sigma` plus `momentum` times the earlier levels', and keep it in
    `memory`."""
    if sigma != memory.level:
        memory.levels, memory.level, memory.before_BCHW = memory.levels + 1, sigma, memory.differences_BCHW
    difference_BCHW = predicted.cond - predicted.uncond
    if memory.before_BCHW is not None:
        difference_BCHW = difference_BCHW + memory.before_BCHW * momentum
    memory.differences_BCHW = difference_BCHW
    return difference_BCHW


class AdaptiveProjectedGuidance(Guider):
    """The guider of one run: plain CFG for the first steps of each image, then `project` guidance by the
    accumulated differences.

    Counts the noise levels at which it is called. Called again at the same level, it guides the new predictions with
    the same state. The state is in a `GuidanceMemory`, from which another run resumes.
    """

    def __init__(
        self, cfg: float, plain: Sequence[int], first_step: int = 0, memory: GuidanceMemory | None = None
    ) -> None:
        """`plain` is the `cfg_steps` of each image, `first_step` the number of skipped steps of the schedule."""
        self.scale, self._plain, self._first_step = cfg, tuple(plain), first_step
        self._memory = memory or GuidanceMemory()

    def combine(self, predicted: Predictions, sigma: float) -> Tensor:
        """Return the guided prediction at `sigma`."""
        memory, cond_BCHW, uncond_BCHW = self._memory, predicted.cond, predicted.uncond
        difference_BCHW = accumulated(memory, predicted, sigma, MOMENTUM)
        plain = [self._first_step + memory.levels - 1 < steps for steps in self._plain]
        if all(plain):
            return classifier_free_guidance(cond_BCHW, uncond_BCHW, self.scale)
        guided_BCHW = project(cond_BCHW, uncond_BCHW, difference_BCHW)
        if not any(plain):
            return guided_BCHW
        plain_BCHW = classifier_free_guidance(cond_BCHW, uncond_BCHW, self.scale)
        # chosen on the host: a mask would have to be copied to the device, which waits for all of its work
        return torch.stack([(plain_BCHW if is_plain else guided_BCHW)[n] for n, is_plain in enumerate(plain)])


class ChannelProjectedGuidance(Guider):
    """The guider of one run of ACE-Step: in every step the prediction for the prompt plus the orthogonal part of the
    accumulated differences, for each channel along its length. It has the state of `AdaptiveProjectedGuidance`."""

    def __init__(self, cfg: float, memory: GuidanceMemory | None = None) -> None:
        self.scale, self._memory = cfg, memory or GuidanceMemory()

    def combine(self, predicted: Predictions, sigma: float) -> Tensor:
        """Return the guided prediction at `sigma`."""
        difference_BCL = accumulated(self._memory, predicted, sigma, CHANNEL_MOMENTUM)
        part_BCL = orthogonal_part(predicted.cond, difference_BCL, (-1,), CHANNEL_MAX_NORM)
        return predicted.cond + part_BCL * (self.scale - 1.0)
