"""What a diffusion model's answer says of the clean latent, by what it was trained to predict. Pure arithmetic.

A noisy latent here is clean + sigma * noise. Models are shown it at unit variance, for clean latents whose deviation is
`sigma_data`. Sources: Salimans and Ho 2022 for velocity (v = noise * alpha - clean * sigma' at unit variance), in terms
of sigma = sigma' / alpha; Karras et al. 2022, table 1 ("EDM"), for the scales at another deviation than 1.
"""

from __future__ import annotations

import math

from torch import Tensor

from pool.checkpoints.families import Prediction


def input_scale(sigma: float, sigma_data: float = 1.0) -> float:
    """What a noisy latent is multiplied with to have unit variance."""
    return 1.0 / math.sqrt(sigma**2 + sigma_data**2)


def clean_latent(
    prediction: Prediction, x_BCHW: Tensor, predicted_BCHW: Tensor, sigma: float, sigma_data: float = 1.0
) -> Tensor:
    """The clean latent that a model means by its answer to `x_BCHW` at noise level `sigma`."""
    match prediction:
        case Prediction.NOISE:
            return x_BCHW - predicted_BCHW * sigma
        case Prediction.VELOCITY:
            kept = _kept(sigma, sigma_data)
            return x_BCHW * kept - predicted_BCHW * (sigma * math.sqrt(kept))
        case Prediction.EDM:
            kept = _kept(sigma, sigma_data)
            return x_BCHW * kept + predicted_BCHW * (sigma * math.sqrt(kept))


def _kept(sigma: float, sigma_data: float) -> float:
    """How much of a noisy latent is the best guess of the clean one that knows nothing else."""
    return sigma_data**2 / (sigma**2 + sigma_data**2)
