"""The interface of guiders, which combine the predictions of a step, and the ones that need no state.

Shape legend: B batch, C latent channels, H W latent height and width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from modelpool.pool.core.sampling_facts import CfgRescale
from modelpool.pool.guidance.cfg_rescale import rescale


@dataclass(frozen=True, slots=True, eq=False)
class Predictions:
    """The predictions of one step for the prompt and the negative prompt, [B, C, H, W], both in the model's prediction
    type or both as clean latents."""

    cond: Tensor
    uncond: Tensor


class Guider(ABC):
    """Combines the predictions of a step to the guided one."""

    #: the guidance scale: 1 evaluates the model for the prompt only
    scale: float

    @abstractmethod
    def combine(self, predicted: Predictions, sigma: float) -> Tensor:
        """Return the guided prediction at noise level `sigma`, in the model's prediction type."""

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


class TextAndImageGuidance(ClassifierFreeGuidance):
    """Guidance by text and by an image, each with its scale. Source: Brooks et al. 2023 (InstructPix2Pix),
    equation 3."""

    def __init__(self, scale: float, image_scale: float) -> None:
        super().__init__(scale)
        self._image_scale = image_scale

    def guide_by_image(self, guided_BCHW: Tensor, uncond_BCHW: Tensor, without_image_BCHW: Tensor) -> Tensor:
        """Guidance by text started at the negative prompt, which is read with the image."""
        return guided_BCHW + (uncond_BCHW - without_image_BCHW) * (self._image_scale - 1.0)


def classifier_free_guidance(cond_BCHW: Tensor, uncond_BCHW: Tensor, scales: float | Tensor) -> Tensor:
    """Return `uncond_BCHW` plus `scales` times the difference to `cond_BCHW`."""
    return uncond_BCHW + (cond_BCHW - uncond_BCHW) * scales
