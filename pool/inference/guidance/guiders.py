"""The interface of guiders, which combine the predictions of a step, and the ones that need no state, with scales for
each frame of a video, too.

Shape legend: B batch, C latent channels, T latent frames, H W latent height and width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from modelpool.pool.families.parts.audio_tracks import SoundTrack, joined
from modelpool.pool.inference.guidance.cfg_rescale import rescale, rescale_by_part, rescale_to_deviation
from modelpool.pool.inference.sampling.predictions import clean_latent, prediction_of
from modelpool.pool.values.core.sampling_facts import CfgRescale, Guidance, Prediction

#: one of so many steps, rounded up, is one of the last, in which some models are guided less. Source: the presets of
#: Ideogram 4 for 48, 20 and 12 steps have 3, 2 and 1 of these
LAST_STEPS_SHARE = 16
#: added to a square, so that a zero prediction has no direction. Source: the guider of diffusers
_SMALLEST_SQUARE = 1e-8


@dataclass(frozen=True, slots=True, eq=False)
class Predictions:
    """The predictions of one step for the prompt and the negative prompt, [B, C, H, W], both in the model's prediction
    type or both as clean latents. `base`: the one for an empty text, for guiders that read it; `without_image`: the one
    without the image that guides."""

    cond: Tensor
    uncond: Tensor
    base: Tensor | None = None
    without_image: Tensor | None = None


class Guider(ABC):
    """Combines the predictions of a step to the guided one."""

    #: the guidance scale: 1 evaluates the model for the prompt only
    scale: float
    #: whether it reads the prediction for an empty text, the last of the regions of its run
    reads_base: bool = False

    @abstractmethod
    def combine(self, predicted: Predictions, sigma: float) -> Tensor:
        """Return the guided prediction at noise level `sigma`, in the model's prediction type."""

    def combine_at(self, x_BCHW: Tensor, predicted: Predictions, sigma: float) -> Tensor:
        """Return `combine` of predictions for `x_BCHW`, which some kinds of guidance depend on."""
        return self.combine(predicted, sigma)

    def combine_clean(self, x_BCHW: Tensor, clean: Predictions, sigma: float) -> Tensor:
        """Return the guided clean latent of `x_BCHW` from clean predictions, by way of the model's prediction type."""
        predicted = Predictions(*((x_BCHW - one) * (1.0 / sigma) for one in (clean.cond, clean.uncond)))
        combined: Tensor = x_BCHW - self.combine(predicted, sigma) * sigma
        return combined

    def guide_by_image(self, guided_BCHW: Tensor, uncond_BCHW: Tensor, without_image_BCHW: Tensor) -> Tensor:
        """Return a prediction that is guided by text, with guidance by an image: from the predictions for the negative
        prompt with and without the image."""
        raise NotImplementedError(f"{type(self).__name__} does not guide by an image")


class ClassifierFreeGuidance(Guider):
    """Classifier-free guidance. Source: Ho and Salimans 2022, equation 6, with a scale of 1 for no guidance."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    @property
    def scales(self) -> float | Tensor:
        """The guidance scale, or one for each latent position."""
        return self.scale

    def combine(self, predicted: Predictions, sigma: float) -> Tensor:
        """Return the prediction for the negative prompt plus the scaled difference to that for the prompt."""
        return classifier_free_guidance(predicted.cond, predicted.uncond, self.scales)

    def combine_clean(self, x_BCHW: Tensor, clean: Predictions, sigma: float) -> Tensor:
        """The same, since it is linear."""
        return classifier_free_guidance(clean.cond, clean.uncond, self.scales)


class EasedGuidance(ClassifierFreeGuidance):
    """Classifier-free guidance with a smaller scale in the last steps."""

    def __init__(self, scale: float, last_scale: float, is_late: Callable[[], bool]) -> None:
        """`is_late` returns whether this step is one of the last."""
        super().__init__(scale)
        self._last_scale, self._is_late = last_scale, is_late

    @property
    def scales(self) -> float:
        """The guidance scale of this step."""
        return min(self.scale, self._last_scale) if self._is_late() else self.scale


class RescaledGuidance(Guider):
    """Classifier-free guidance with CFG rescale."""

    def __init__(self, scale: float, mode: CfgRescale) -> None:
        self.scale = scale
        self._plain, self._mode = ClassifierFreeGuidance(scale), mode

    def combine(self, predicted: Predictions, sigma: float) -> Tensor:
        """Return the guided prediction, scaled to the norm of that for the prompt."""
        return rescale(self._plain.combine(predicted, sigma), predicted.cond, self._mode)

    def combine_clean(self, x_BCHW: Tensor, clean: Predictions, sigma: float) -> Tensor:
        """The same on the difference to `x_BCHW`, a multiple of the predicted noise."""
        combined_BCHW = self._plain.combine_clean(x_BCHW, clean, sigma)
        rescaled: Tensor = x_BCHW - rescale(x_BCHW - combined_BCHW, x_BCHW - clean.cond, self._mode)
        return rescaled


class TextAndImageGuidance(Guider):
    """Guidance by text, as another guider makes it, and by an image, each with its scale. Source: Brooks et al. 2023
    (InstructPix2Pix), equation 3; `nested` as HiDream E1 has it, HiDream-ai/HiDream-E1."""

    def __init__(self, inner: Guider, image_scale: float, nested: bool = False) -> None:
        self.scale, self.reads_base = inner.scale, inner.reads_base
        self._inner, self._image_scale, self._nested = inner, image_scale, nested

    def combine(self, predicted: Predictions, sigma: float) -> Tensor:
        """Return the prediction that is guided by text."""
        return self._inner.combine(predicted, sigma)

    def combine_at(self, x_BCHW: Tensor, predicted: Predictions, sigma: float) -> Tensor:
        """Return the prediction for `x_BCHW` that is guided by text."""
        return self._inner.combine_at(x_BCHW, predicted, sigma)

    def combine_clean(self, x_BCHW: Tensor, clean: Predictions, sigma: float) -> Tensor:
        """Return the clean latent that is guided by text."""
        return self._inner.combine_clean(x_BCHW, clean, sigma)

    def guide_by_image(self, guided_BCHW: Tensor, uncond_BCHW: Tensor, without_image_BCHW: Tensor) -> Tensor:
        """Guidance by text started at the negative prompt, which is read with the image."""
        if self._nested:
            return without_image_BCHW + (guided_BCHW - without_image_BCHW) * self._image_scale
        return guided_BCHW + (uncond_BCHW - without_image_BCHW) * (self._image_scale - 1.0)


class ImageAndTextGuidance(Guider):
    """Guidance by an image, as another guider makes it of the predictions for the negative prompt with and without the
    image, and the difference that the prompt makes, with its scale. With classifier-free guidance by the image, this is
    `TextAndImageGuidance`; with changed guidance, the change acts on it. "regular" of DualCFGGuider."""

    def __init__(self, scale: float, by_image: Guider) -> None:
        self.scale = scale
        self._by_image = by_image

    def combine(self, predicted: Predictions, sigma: float) -> Tensor:
        """Return the guided prediction."""
        return self._by_image.combine(self._of_image(predicted), sigma) + self._of_text(predicted)

    def combine_at(self, x_BCHW: Tensor, predicted: Predictions, sigma: float) -> Tensor:
        """Return the guided prediction for `x_BCHW`."""
        return self._by_image.combine_at(x_BCHW, self._of_image(predicted), sigma) + self._of_text(predicted)

    def combine_clean(self, x_BCHW: Tensor, clean: Predictions, sigma: float) -> Tensor:
        """Return the guided clean latent."""
        return self._by_image.combine_clean(x_BCHW, self._of_image(clean), sigma) + self._of_text(clean)

    def guide_by_image(self, guided_BCHW: Tensor, uncond_BCHW: Tensor, without_image_BCHW: Tensor) -> Tensor:
        """The prediction is guided by the image already."""
        return guided_BCHW

    def _of_image(self, predicted: Predictions) -> Predictions:
        assert predicted.without_image is not None, "guidance by an image has a prediction without it"
        return Predictions(predicted.uncond, predicted.without_image)

    def _of_text(self, predicted: Predictions) -> Tensor:
        return (predicted.cond - predicted.uncond) * self.scale


class DeviationRescaledGuidance(Guider):
    """Another guidance, with its result scaled to the standard deviation of the prediction for the prompt."""

    def __init__(self, inner: Guider, factor: float, prediction: Prediction, sigma_data: float) -> None:
        self.scale, self.reads_base = inner.scale, inner.reads_base
        self._inner, self._factor = inner, factor
        self._prediction, self._sigma_data = prediction, sigma_data

    def combine(self, predicted: Predictions, sigma: float) -> Tensor:
        """Return the guided prediction, scaled."""
        return rescale_to_deviation(self._inner.combine(predicted, sigma), predicted.cond, self._factor)

    def combine_at(self, x_BCHW: Tensor, predicted: Predictions, sigma: float) -> Tensor:
        """Return the guided prediction for `x_BCHW`, scaled."""
        return rescale_to_deviation(self._inner.combine_at(x_BCHW, predicted, sigma), predicted.cond, self._factor)

    def combine_clean(self, x_BCHW: Tensor, clean: Predictions, sigma: float) -> Tensor:
        """The same on the predictions that `clean` follow from."""
        how = self._prediction, x_BCHW
        cond, uncond, base = (
            None if each is None else prediction_of(*how, each, sigma, self._sigma_data)
            for each in (clean.cond, clean.uncond, clean.base)
        )
        assert cond is not None, "it is always there"
        assert uncond is not None, "it is always there"
        guided_BCHW = self.combine_at(x_BCHW, replace(clean, cond=cond, uncond=uncond, base=base), sigma)
        return clean_latent(*how, guided_BCHW, sigma, self._sigma_data)


class NormedGuidance(Guider):
    """Another guidance, with its clean latent scaled down to the length of the one for the prompt at each position."""

    def __init__(self, inner: Guider, strength: float, prediction: Prediction, sigma_data: float) -> None:
        self.scale, self.reads_base = inner.scale, inner.reads_base
        self._inner, self._strength = inner, strength
        self._prediction, self._sigma_data = prediction, sigma_data

    def combine(self, predicted: Predictions, sigma: float) -> Tensor:
        """Return the guided prediction, not scaled: that depends on the latent."""
        return self._inner.combine(predicted, sigma)

    def combine_at(self, x_BCHW: Tensor, predicted: Predictions, sigma: float) -> Tensor:
        """Return the guided prediction for `x_BCHW`, scaled."""
        how = self._prediction, x_BCHW
        guided = clean_latent(*how, self._inner.combine_at(x_BCHW, predicted, sigma), sigma, self._sigma_data)
        cond = clean_latent(*how, predicted.cond, sigma, self._sigma_data)
        return prediction_of(*how, self._scaled(guided, cond), sigma, self._sigma_data)

    def combine_clean(self, x_BCHW: Tensor, clean: Predictions, sigma: float) -> Tensor:
        """Return the guided clean latent, scaled."""
        return self._scaled(self._inner.combine_clean(x_BCHW, clean, sigma), clean.cond)

    def _scaled(self, guided_BCHW: Tensor, cond_BCHW: Tensor) -> Tensor:
        lengths, wanted = (torch.linalg.vector_norm(each, dim=1, keepdim=True) for each in (guided_BCHW, cond_BCHW))
        scaled_BCHW: Tensor = guided_BCHW * (wanted / (lengths + _SMALLEST_SQUARE)).clamp(max=1.0) * self._strength
        return scaled_BCHW


class FrequencyGuidance(Guider):
    """Another guidance of the prediction for the negative prompt and the difference to the one for the prompt, of which
    low and high spatial frequencies have a factor each (`FrequencyScale`).

    The factors act on a linear transform of the difference, so that they are the same in every prediction type."""

    def __init__(self, inner: Guider, low: float, high: float, cutoff: int) -> None:
        self.scale = inner.scale
        self._inner, self._low, self._high, self._cutoff = inner, low, high, cutoff

    def combine(self, predicted: Predictions, sigma: float) -> Tensor:
        """Return the guided prediction."""
        return self._inner.combine(self._scaled(predicted), sigma)

    def combine_at(self, x_BCHW: Tensor, predicted: Predictions, sigma: float) -> Tensor:
        """Return the guided prediction for `x_BCHW`."""
        return self._inner.combine_at(x_BCHW, self._scaled(predicted), sigma)

    def combine_clean(self, x_BCHW: Tensor, clean: Predictions, sigma: float) -> Tensor:
        """Return the guided clean latent."""
        return self._inner.combine_clean(x_BCHW, self._scaled(clean), sigma)

    def _scaled(self, predicted: Predictions) -> Predictions:
        difference_BCHW = predicted.cond - predicted.uncond
        spectrum = torch.fft.fftn(difference_BCHW.float(), dim=(-2, -1))
        high, wide = difference_BCHW.shape[-2:]
        rows, columns = (self._is_low(side, difference_BCHW.device) for side in (high, wide))
        factors_HW = torch.where(rows[:, None] & columns, self._low, self._high)
        scaled_BCHW = torch.fft.ifftn(spectrum * factors_HW, dim=(-2, -1)).real.to(difference_BCHW.dtype)
        return Predictions(predicted.uncond + scaled_BCHW, predicted.uncond)

    def _is_low(self, side: int, device: torch.device) -> Tensor:
        """Return for each index of the transform along a side whether its frequency is at least -cutoff and less than
        cutoff."""
        frequencies = torch.arange(side, device=device)
        frequencies = torch.where(frequencies < (side + 1) // 2, frequencies, frequencies - side)
        return (frequencies >= -self._cutoff) & (frequencies < self._cutoff)


class SoundGuidance(Guider):
    """Guidance of videos with an audio track, each with its scale, for flows. A share of either clean latent is scaled
    to the standard deviation of that for the prompt. Source: diffusers' LTX2Pipeline."""

    def __init__(self, scale: float, track: SoundTrack) -> None:
        self.scale = scale
        self._track = track

    def combine(self, predicted: Predictions, sigma: float) -> Tensor:
        """Return the guided prediction, not scaled: that depends on the latent."""
        return self._by_part(predicted, 0.0)

    def combine_at(self, x_BCHW: Tensor, predicted: Predictions, sigma: float) -> Tensor:
        """Return the guided prediction for `x_BCHW`."""
        clean = Predictions(*(x_BCHW - one * sigma for one in (predicted.cond, predicted.uncond)))
        return (x_BCHW - self.combine_clean(x_BCHW, clean, sigma)) * (1.0 / sigma)

    def combine_clean(self, x_BCHW: Tensor, clean: Predictions, sigma: float) -> Tensor:
        """Return the guided clean latent."""
        return self._by_part(clean, self._track.facts.rescale)

    def _by_part(self, predicted: Predictions, rescaled: float) -> Tensor:
        track = self._track
        scales = self.scale, track.facts.cfg
        video, sound = (
            classifier_free_guidance(cond, uncond, scale)
            for cond, uncond, scale in zip(*map(track.parted, (predicted.cond, predicted.uncond)), scales, strict=True)
        )
        guided_BCTHW = joined(video, sound, track.rest(predicted.cond))
        return rescale_by_part(guided_BCTHW, predicted.cond, track, rescaled) if rescaled else guided_BCTHW


class ZeroStarGuidance(Guider):
    """CFG-Zero*: guidance from the part of the negative prediction that is parallel to the positive one; zero in the
    first steps. Source: Fan et al. 2025 ("CFG-Zero*: Improved Classifier-Free Guidance for Flow Matching Models"),
    equation 12 and section 4.2."""

    def __init__(self, scale: float, is_zero: Callable[[], bool]) -> None:
        """`is_zero` returns whether the prediction of this step is zero."""
        self.scale, self._is_zero = scale, is_zero

    def combine(self, predicted: Predictions, sigma: float) -> Tensor:
        """Return the guided prediction."""
        cond_BCHW, uncond_BCHW = predicted.cond, predicted.uncond
        if self._is_zero():
            return torch.zeros_like(cond_BCHW)
        sides = tuple(range(1, cond_BCHW.dim()))
        products = (cond_BCHW * uncond_BCHW).sum(sides, keepdim=True)
        parallel_BCHW = uncond_BCHW * (products / ((uncond_BCHW**2).sum(sides, keepdim=True) + _SMALLEST_SQUARE))
        return classifier_free_guidance(cond_BCHW, parallel_BCHW, self.scale)


def classifier_free_guidance(cond_BCHW: Tensor, uncond_BCHW: Tensor, scales: float | Tensor) -> Tensor:
    """Return `uncond_BCHW` plus `scales` times the difference to `cond_BCHW`."""
    return uncond_BCHW + (cond_BCHW - uncond_BCHW) * scales


#: the lowest guidance scale of a video: no guidance
MIN_GUIDANCE = 1.0


#: the kinds of guidance with a scale for each frame
PER_FRAME = frozenset({Guidance.RISING_WITH_FRAMES, Guidance.RISING_AND_FALLING})


class PerFrameGuidance(ClassifierFreeGuidance):
    """Classifier-free guidance with a scale for each latent frame, of which `scale` is the largest."""

    def __init__(self, scale: float, scales_11T11: Tensor) -> None:
        super().__init__(scale)
        self._scales_11T11 = scales_11T11

    @property
    def scales(self) -> Tensor:
        """The guidance scale of each latent frame."""
        return self._scales_11T11


def frame_guidance_scales(guidance: Guidance, most: float, cells: int, device: torch.device) -> Tensor:
    """Return the guidance scale of each of `cells` latent frames, [1, 1, T, 1, 1] on `device`, at most `most`, for one
    of the kinds `PER_FRAME`.

    Sources: diffusers, StableVideoDiffusionPipeline; TrianglePredictionGuider of Stability-AI/generative-models.
    """
    assert guidance in PER_FRAME, f"{guidance} has one scale"
    if guidance is Guidance.RISING_WITH_FRAMES:
        scales_T = torch.linspace(MIN_GUIDANCE, most, cells)
    else:
        position_T = torch.linspace(0.0, 1.0, cells)
        scales_T = MIN_GUIDANCE + (most - MIN_GUIDANCE) * 2.0 * (position_T - (position_T + 0.5).floor()).abs()
    return scales_T[None, None, :, None, None].to(device)
