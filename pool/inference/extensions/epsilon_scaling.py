"""Epsilon scaling: the noise of a guided prediction, divided by a factor.

Source: Ning et al. 2024 ("Elucidating the Exposure Bias in Diffusion Models"), section 4.4, uniform schedule.
Shape legend: B batch, C latent channels, H W cells.
"""

from __future__ import annotations

from torch import Tensor

from modelpool.pool.values.core.run_options import EpsilonScaling
from modelpool.pool.weights.options.model_options import Args, PostCfgFunction


def epsilon_scaling(option: EpsilonScaling) -> PostCfgFunction:
    """Return the function that scales the noise of a step: the difference of its latent and the clean one."""

    def scale(args: Args) -> Tensor:
        x_BCHW: Tensor = args["input"]
        scaled_BCHW: Tensor = x_BCHW - (x_BCHW - args["denoised"]) * (1.0 / option.factor)
        return scaled_BCHW

    return scale
