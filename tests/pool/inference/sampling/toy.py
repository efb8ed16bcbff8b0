"""A diffusion model in closed form: latents with numbers that are independent draws from a mixture of two Gaussians.

The best guess of the clean latent is a formula, and so is the way of every number along the probability flow: in one
dimension the flow keeps quantiles, so x at one noise level and x at another have the same cumulative probability.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

#: (mean, share) of each Gaussian; both have the same deviation
MIXTURE = ((-1.0, 0.4), (0.7, 0.6))
DEVIATION = 0.3


def denoise(x: Tensor, sigma: float) -> Tensor:
    """E[clean | clean + sigma * noise = x], in the dtype of x."""
    variance = DEVIATION**2 + sigma**2
    logits = [math.log(share) - (x - mean) ** 2 / (2 * variance) for mean, share in MIXTURE]
    predictions = [mean + (x - mean) * (DEVIATION**2 / variance) for mean, _ in MIXTURE]
    return (torch.softmax(torch.stack(logits), dim=0) * torch.stack(predictions)).sum(dim=0)


class Recorded:
    """A model that remembers where it was called and what it predicted; without guidance it predicts the same."""

    def __init__(self, model: Callable[[Tensor, float], Tensor] = denoise) -> None:
        self._model, self.levels, self.predictions = model, list[float](), list[Tensor]()

    def __call__(self, x: Tensor, sigma: float) -> Tensor:
        self.levels.append(sigma)
        self.predictions.append(self._model(x, sigma))
        return self.predictions[-1]

    def last(self) -> Tensor:
        """What it predicted last."""
        return self.predictions[-1]


def exact(x: Tensor, sigma: float, sigma_next: float) -> Tensor:
    """Where the probability flow takes float64 `x` from `sigma` to `sigma_next`: the equal quantile, by bisection."""
    target = _cumulative(x, sigma)
    low, high = torch.full_like(x, -100.0), torch.full_like(x, 100.0)
    for _ in range(80):
        middle = (low + high) / 2
        below = _cumulative(middle, sigma_next) < target
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return (low + high) / 2


def no_noise() -> Tensor:
    """For samplers that must not draw any."""
    raise AssertionError("this sampler draws no noise")


def unheard(done: int, steps: int) -> None:
    """An `on_step` that nobody listens to."""


def _cumulative(x: Tensor, sigma: float) -> Tensor:
    deviation = (DEVIATION**2 + sigma**2) ** 0.5
    parts = [share * torch.special.ndtr((x - mean) / deviation) for mean, share in MIXTURE]
    return torch.stack(parts).sum(dim=0)
