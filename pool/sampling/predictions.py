"""What a diffusion model's answer says of the clean latent, by what it was trained to predict. Pure arithmetic.

A noisy latent here is clean + sigma * noise. Models are shown it at unit variance, for clean latents whose deviation is
`sigma_data`. For models that predict the flow it is (1 - sigma) * clean + sigma * noise, and they are shown it as it
is; along the way from one level to the next both kinds move by the same rule, (noisy - clean) / sigma for each sigma.

Sources: Salimans and Ho 2022 for velocity (v = noise * alpha - clean * sigma' at unit variance), in terms of
sigma = sigma' / alpha; Karras et al. 2022, table 1 ("EDM"), for the scales at another deviation than 1; Liu et al. 2022
("Rectified Flow") for the flow.
"""

from __future__ import annotations

import math

from torch import Tensor

from modelpool.pool.core.sampling_facts import Prediction


def input_scale(sigma: float, sigma_data: float = 1.0, prediction: Prediction = Prediction.NOISE) -> float:
    """What a noisy latent is multiplied with before the model sees it: to have unit variance, or 1 for a flow."""
    if prediction is Prediction.FLOW:
        return 1.0
    return 1.0 / math.sqrt(sigma**2 + sigma_data**2)


def clean_latent(
    prediction: Prediction, x_BCHW: Tensor, predicted_BCHW: Tensor, sigma: float, sigma_data: float = 1.0
) -> Tensor:
    """The clean latent that a model means by its answer to `x_BCHW` at noise level `sigma`."""
    match prediction:
        case Prediction.NOISE | Prediction.FLOW:
            return x_BCHW - predicted_BCHW * sigma
        case Prediction.VELOCITY:
            kept = _kept(sigma, sigma_data)
            return x_BCHW * kept - predicted_BCHW * (sigma * math.sqrt(kept))
        case Prediction.EDM:
            kept = _kept(sigma, sigma_data)
            return x_BCHW * kept + predicted_BCHW * (sigma * math.sqrt(kept))


def noised(prediction: Prediction, clean: Tensor, noise: Tensor, sigma: float) -> Tensor:
    """`clean` with noise at level `sigma`, as a model that predicts so was trained to see it."""
    kept = clean * (1.0 - sigma) if prediction is Prediction.FLOW else clean
    return kept + noise * sigma


def _kept(sigma: float, sigma_data: float) -> float:
    """How much of a noisy latent is the best guess of the clean one that knows nothing else."""
    return sigma_data**2 / (sigma**2 + sigma_data**2)
