"""Guidance by the directions of predictions: adaptive projected guidance with its published settings (APG), away from
the perpendicular part of the negative prompt (Perp-Neg), and from a negative prediction without its tangential part
(TCFG).

They act on clean latents, on differences of them to the noisy latent, or on differences of predictions, so that they
are the same for models of every prediction type.

Sources: Sadat et al. 2024 ("Eliminating Oversaturation and Artifacts of High Guidance Scales in Diffusion Models"),
algorithm 1; Armandpour et al. 2023 ("Re-imagine the Negative Prompt Algorithm"), section 4; Kwon et al. 2025 ("TCFG:
Tangential Damping Classifier-free Guidance"), section 4.

Shape legend: B batch, C latent channels, H W latent height and width.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from modelpool.pool.inference.guidance.apg import accumulated, orthogonal_part
from modelpool.pool.inference.guidance.guiders import Guider, Predictions
from modelpool.pool.inference.sampling.partial_run import GuidanceMemory
from modelpool.pool.inference.sampling.predictions import clean_latent, prediction_of
from modelpool.pool.values.core.run_options import ProjectedGuidance
from modelpool.pool.values.core.sampling_facts import Prediction


class CleanGuidance(Guider):
    """A guider of clean latents, for models of every prediction type."""

    def __init__(self, scale: float, prediction: Prediction, sigma_data: float) -> None:
        self.scale = scale
        self._prediction, self._sigma_data = prediction, sigma_data

    def combine(self, predicted: Predictions, sigma: float) -> Tensor:
        """Not there: the guided prediction depends on the latent."""
        raise NotImplementedError(f"{type(self).__name__} guides clean latents: combine_at, combine_clean")

    def combine_at(self, x_BCHW: Tensor, predicted: Predictions, sigma: float) -> Tensor:
        """Return the guided prediction for `x_BCHW`."""
        how = self._prediction, x_BCHW
        clean = (clean_latent(*how, each, sigma, self._sigma_data) for each in (predicted.cond, predicted.uncond))
        return prediction_of(*how, self.combine_clean(x_BCHW, Predictions(*clean), sigma), sigma, self._sigma_data)

    @abstractmethod
    def combine_clean(self, x_BCHW: Tensor, clean: Predictions, sigma: float) -> Tensor:
        """Return the guided clean latent of `x_BCHW`."""


class DirectionalGuidance(CleanGuidance):
    """The prediction for the prompt, plus the accumulated differences to the one for the negative prompt, shortened,
    with a factor for the part along the prediction for the prompt."""

    def __init__(
        self, scale: float, option: ProjectedGuidance, prediction: Prediction, sigma_data: float, memory: GuidanceMemory
    ) -> None:
        """It resumes from `memory`, and updates it."""
        super().__init__(scale, prediction, sigma_data)
        self._option, self._memory = option, memory

    def combine_clean(self, x_BCHW: Tensor, clean: Predictions, sigma: float) -> Tensor:
        """Return the guided clean latent."""
        option, sides = self._option, tuple(range(1, clean.cond.dim()))
        difference_BCHW = accumulated(self._memory, clean, sigma, option.momentum)
        if option.norm:
            lengths = torch.linalg.vector_norm(difference_BCHW, dim=sides, keepdim=True)
            difference_BCHW = difference_BCHW * (option.norm / lengths).clamp(max=1.0)
        across_BCHW = orthogonal_part(clean.cond, difference_BCHW, sides, torch.inf)
        along_BCHW = difference_BCHW - across_BCHW
        return clean.cond + (across_BCHW + along_BCHW * option.eta) * (self.scale - 1.0)


class PerpendicularGuidance(Guider):
    """Guidance from the prediction for an empty text: to the one for the prompt, and away from the part of the one for
    the negative prompt that is perpendicular to it.

    It depends on differences of predictions alone, so that it is the same in every prediction type."""

    reads_base = True

    def __init__(self, scale: float, negative: float) -> None:
        """`negative` is the weight of the negative prompt."""
        self.scale, self._negative = scale, negative

    def combine(self, predicted: Predictions, sigma: float) -> Tensor:
        """Return the guided prediction."""
        assert predicted.base is not None, "the run predicts for an empty text"
        sides = tuple(range(1, predicted.cond.dim()))
        to_BCHW, away_BCHW = predicted.cond - predicted.base, predicted.uncond - predicted.base
        across_BCHW = orthogonal_part(to_BCHW, away_BCHW, sides, torch.inf)
        return predicted.base + (to_BCHW - across_BCHW * self._negative) * self.scale

    def combine_clean(self, x_BCHW: Tensor, clean: Predictions, sigma: float) -> Tensor:
        """The same."""
        return self.combine(clean, sigma)


class TangentialGuidance(CleanGuidance):
    """Another guidance, with the negative prediction without its part across the main direction of both predictions:
    the first right singular vector of the two as rows."""

    def __init__(self, inner: Guider, strength: float, prediction: Prediction, sigma_data: float) -> None:
        """`strength` is the share of the part across that is removed."""
        super().__init__(inner.scale, prediction, sigma_data)
        self._inner, self._strength = inner, strength

    def combine_clean(self, x_BCHW: Tensor, clean: Predictions, sigma: float) -> Tensor:
        """Return the guided clean latent."""
        along_BCHW = x_BCHW - along_main(x_BCHW - clean.cond, x_BCHW - clean.uncond)
        damped_BCHW = torch.lerp(clean.uncond, along_BCHW, self._strength)
        return self._inner.combine_clean(x_BCHW, Predictions(clean.cond, damped_BCHW), sigma)


def along_main(cond_BCHW: Tensor, uncond_BCHW: Tensor) -> Tensor:
    """Return the part of `uncond_BCHW` along the main direction of both, for each batch member.

    The direction is a sum of the two, weighted by the first eigenvector of their 2 x 2 products. Its angle is known: no
    decomposition of vectors with the length of a latent is needed."""
    sides = tuple(range(1, cond_BCHW.dim()))
    one, two = cond_BCHW.float(), uncond_BCHW.float()
    ones, both, twos = ((left * right).sum(sides, keepdim=True) for left, right in ((one, one), (one, two), (two, two)))
    angle = 0.5 * torch.atan2(2.0 * both, ones - twos)
    main_BCHW = one * torch.cos(angle) + two * torch.sin(angle)
    part_BCHW: Tensor = main_BCHW * torch.sin(angle)
    return part_BCHW.to(uncond_BCHW.dtype)
