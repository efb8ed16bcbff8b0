"""What a diffusion model's answer says of the clean latent, by what it was trained to predict. Pure arithmetic.

A noisy latent here is clean + sigma * noise. Models are shown it at unit variance. Source: Salimans and Ho 2022 for
velocity (v = noise * alpha - clean * sigma' at unit variance), in terms of sigma = sigma' / alpha.
"""

from __future__ import annotations

import math

from torch import Tensor

from pool.checkpoints.families import Prediction


def input_scale(sigma: float) -> float:
    """What a noisy latent is multiplied with to have unit variance."""
    return 1.0 / math.sqrt(sigma**2 + 1.0)


def clean_latent(prediction: Prediction, x_BCHW: Tensor, predicted_BCHW: Tensor, sigma: float) -> Tensor:
    """The clean latent that a model means by its answer to `x_BCHW` at noise level `sigma`."""
    match prediction:
        case Prediction.NOISE:
            return x_BCHW - predicted_BCHW * sigma
        case Prediction.VELOCITY:
            kept = 1.0 / (sigma**2 + 1.0)
            return x_BCHW * kept - predicted_BCHW * (sigma * math.sqrt(kept))
