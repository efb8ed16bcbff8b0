"""Converts a diffusion model's output to the clean latent, for each kind of prediction. Pure arithmetic.

A noisy latent here is clean + sigma * noise. Models receive it scaled to unit variance, for clean latents with standard
deviation `sigma_data`. For flow models it is (1 - sigma) * clean + sigma * noise, and they receive it unscaled; between
two levels both kinds move by the same rule, (noisy - clean) / sigma for each sigma.

Sources: Salimans and Ho 2022 for velocity (v = noise * alpha - clean * sigma' at unit variance), in terms of
sigma = sigma' / alpha; Karras et al. 2022, table 1 ("EDM"), for other standard deviations than 1; Liu et al. 2022
("Rectified Flow") for the flow.
"""

from __future__ import annotations

import math

from torch import Tensor

from modelpool.pool.values.core.sampling_facts import Prediction


def input_scale(sigma: float, sigma_data: float = 1.0, prediction: Prediction = Prediction.NOISE) -> float:
    """Return the factor of a noisy latent before the model reads it: gives unit variance, or 1 for a flow."""
    if prediction is Prediction.FLOW:
        return 1.0
    return 1.0 / math.sqrt(sigma**2 + sigma_data**2)


def clean_latent(
    prediction: Prediction, x_BCHW: Tensor, predicted_BCHW: Tensor, sigma: float, sigma_data: float = 1.0
) -> Tensor:
    """Return the clean latent for a model's output `predicted_BCHW` for `x_BCHW` at noise level `sigma`."""
    match prediction:
        case Prediction.NOISE | Prediction.FLOW:
            return x_BCHW - predicted_BCHW * sigma
        case Prediction.VELOCITY:
            kept = _kept(sigma, sigma_data)
            return x_BCHW * kept - predicted_BCHW * (sigma * math.sqrt(kept))
        case Prediction.EDM:
            kept = _kept(sigma, sigma_data)
            return x_BCHW * kept + predicted_BCHW * (sigma * math.sqrt(kept))
        case Prediction.CLEAN:
            return predicted_BCHW


def prediction_of(
    prediction: Prediction, x_BCHW: Tensor, clean_BCHW: Tensor, sigma: float, sigma_data: float = 1.0
) -> Tensor:
    """Return the model's output for which `clean_latent` is `clean_BCHW`."""
    match prediction:
        case Prediction.NOISE | Prediction.FLOW:
            return (x_BCHW - clean_BCHW) * (1.0 / sigma)
        case Prediction.VELOCITY | Prediction.EDM:
            kept = _kept(sigma, sigma_data)
            sign = 1.0 if prediction is Prediction.VELOCITY else -1.0
            return (x_BCHW * kept - clean_BCHW) * (sign / (sigma * math.sqrt(kept)))
        case Prediction.CLEAN:
            return clean_BCHW


def noised(prediction: Prediction, clean: Tensor, noise: Tensor, sigma: float) -> Tensor:
    """Return `clean` with noise at level `sigma`, as in the training of models of this kind."""
    kept = clean * (1.0 - sigma) if prediction is Prediction.FLOW else clean
    return kept + noise * sigma


def _kept(sigma: float, sigma_data: float) -> float:
    """Return the factor of a noisy latent that best predicts the clean one without other knowledge."""
    return sigma_data**2 / (sigma**2 + sigma_data**2)
