"""Inpainting: samples the masked part of an image; outside the mask, the latent is kept at every noise level.

Shape legend: B batch, C latent channels, H W latent height and width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from modelpool.pool.inference.sampling.predictions import noised
from modelpool.pool.inference.sampling.samplers import Denoise
from modelpool.pool.values.core.errors import unusable_field
from modelpool.pool.values.core.sampling_facts import Prediction
from modelpool.pool.weights.options.model_options import ModelOptions


@dataclass(frozen=True, slots=True, eq=False)
class Inpainting:
    """The latent to keep, and the mask.

    latent_BCHW        the image to keep, in the model's scale, float32
    denoise_mask_B1HW  1 where it is regenerated, 0 where it is kept, mixed in between; may have C channels

    Both may have a B of 1 for any batch.
    """

    latent_BCHW: Tensor
    denoise_mask_B1HW: Tensor

    def fitting(self, shape_BCHW: Sequence[int]) -> Inpainting:
        """Return itself; raises UnusableField unless both have the sizes of a latent of this shape."""
        _check("latent_BCHW of inpainting", self.latent_BCHW, shape_BCHW, shape_BCHW[1:2])
        _check_mask("denoise_mask_B1HW of inpainting", self.denoise_mask_B1HW, shape_BCHW)
        return self

    def to(self, device: torch.device) -> Inpainting:
        """Return the same on `device`."""
        return Inpainting(self.latent_BCHW.to(device), self.denoise_mask_B1HW.to(device))


def masked_denoiser(
    denoise: Denoise,
    kept: Inpainting,
    noise_BCHW: Tensor,
    sigmas: Tensor,
    options: ModelOptions,
    prediction: Prediction = Prediction.NOISE,
) -> Denoise:
    """Return `denoise`, restricted to the mask of `kept`.

    Before each prediction, the kept latent is restored at its noise level, with the run's initial noise `noise_BCHW`;
    after it, without noise. The options' `denoise_mask_function`, if set, returns the mask for each noise level.
    Raises UnusableField for shapes that do not fit the latent: of `kept` here, of the function's result when it runs.
    """
    kept = kept.fitting(noise_BCHW.shape)
    function = options.denoise_mask_function

    def mask_at(sigma: float) -> Tensor:
        if function is None:
            return kept.denoise_mask_B1HW
        sigma_B = torch.full((len(noise_BCHW),), sigma, dtype=torch.float32, device=noise_BCHW.device)
        mask = function(sigma_B, kept.denoise_mask_B1HW, {"model": denoise, "sigmas": sigmas})
        _check_mask("result of denoise_mask_function", mask, noise_BCHW.shape)
        return mask

    def masked(x_BCHW: Tensor, sigma: float) -> Tensor:
        mask = mask_at(sigma)
        noisy_BCHW = noised(prediction, kept.latent_BCHW, noise_BCHW, sigma)
        prediction_BCHW = denoise(x_BCHW * mask + noisy_BCHW * (1.0 - mask), sigma)
        return prediction_BCHW * mask + kept.latent_BCHW * (1.0 - mask)

    return masked


def _check_mask(name: str, mask: Tensor, shape_BCHW: Sequence[int]) -> None:
    _check(name, mask, shape_BCHW, (1, shape_BCHW[1]))


def _check(name: str, tensor: Tensor, shape_BCHW: Sequence[int], channels: Sequence[int]) -> None:
    batch, _, height, width = shape_BCHW
    found = tuple(tensor.shape)
    if len(found) != 4 or found[0] not in (1, batch) or found[1] not in channels or found[2:] != (height, width):
        expected = f"({batch}, {' or '.join(str(c) for c in dict.fromkeys(channels))}, {height}, {width})"
        raise unusable_field(f"shape of {name}", found, f"{expected}, the latent's")
