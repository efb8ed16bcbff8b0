"""Differential diffusion: a soft mask is regenerated part by part, the whiter the earlier.

Source: Levin and Fried 2023 ("Differential Diffusion: Giving Each Pixel Its Strength"), with the threshold of ComfyUI's
node: the share of the training steps of the run that are left.

Shape legend: B batch, H W latent height and width.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from modelpool.pool.inference.sampling.schedules import SigmaTable
from modelpool.pool.values.core.run_options import DifferentialMask
from modelpool.pool.weights.options.model_options import DenoiseMaskFunction


def mask_of_level(option: DifferentialMask, table: SigmaTable) -> DenoiseMaskFunction:
    """Return the function that returns the mask of a noise level: 1 where the mask is at least as white as the share of
    the training steps, between the first and the last level of the run, that are left."""

    def mask_at(sigma_B: Tensor, mask_B1HW: Tensor, run: dict[str, Any]) -> Tensor:
        sigmas = run["sigmas"]
        first, last = (table.timestep(float(level)) for level in (sigmas[0], max(float(sigmas[-1]), table.sigma_min)))
        now = table.timestep(float(sigma_B[0]))
        threshold = (now - last) / (first - last) if first != last else 0.0
        binary_B1HW = (mask_B1HW >= threshold).to(mask_B1HW.dtype)
        return binary_B1HW * option.strength + mask_B1HW * (1.0 - option.strength)

    return mask_at
