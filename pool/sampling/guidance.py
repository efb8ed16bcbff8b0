"""From a model that predicts noise to a `denoise` that a sampler can step with, guided by a text.

Knows how an eps-prediction model is asked (scaled input, timestep) and classifier-free guidance; knows no sampler and
no architecture.

Shape legend: B batch, C latent channels, H W latent height and width, L tokens, D text width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from pool.sampling.samplers import Denoise
from pool.sampling.schedules import SigmaTable

#: (x_BCHW float32 of unit variance, timestep_B float32, context_BLD) -> predicted noise_BCHW, in any float dtype
PredictNoise: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]


def guided_denoiser(
    predict_noise: PredictNoise, table: SigmaTable, cond_BLD: Tensor, uncond_BLD: Tensor | None, cfg: float
) -> Denoise:
    """A `denoise` that predicts noise for both texts and goes `cfg` times the way from `uncond_BLD` to `cond_BLD`.

    Both texts run as one batch, `uncond_BLD` first; apart if they differ in length, so that neither is padded with what
    the model was not trained on. With `cfg` 1 only `cond_BLD` runs, and `uncond_BLD` may be None. B is that of x_BCHW.
    """
    assert cfg == 1.0 or uncond_BLD is not None, f"cfg {cfg} needs the unconditional context"
    if cfg == 1.0 or uncond_BLD is None:
        contexts = [cond_BLD]
    elif uncond_BLD.shape == cond_BLD.shape:
        contexts = [torch.cat([uncond_BLD, cond_BLD])]
    else:
        contexts = [uncond_BLD, cond_BLD]

    def predict(x_BCHW: Tensor, timestep: float, context_BLD: Tensor) -> Tensor:
        batch = len(context_BLD)
        x_BCHW = x_BCHW.repeat(batch // len(x_BCHW), 1, 1, 1)
        timestep_B = torch.full((batch,), timestep, dtype=torch.float32, device=x_BCHW.device)
        return predict_noise(x_BCHW, timestep_B, context_BLD).to(x_BCHW.dtype)

    def denoise(x_BCHW: Tensor, sigma: float) -> Tensor:
        # times the inverse: dividing by a number may round differently on another device
        scaled_BCHW = x_BCHW * (1.0 / math.sqrt(sigma**2 + 1.0))
        timestep = table.timestep(sigma)
        noises = torch.cat([predict(scaled_BCHW, timestep, context) for context in contexts])
        if len(noises) == len(x_BCHW):
            return x_BCHW - noises * sigma
        uncond_BCHW, cond_BCHW = noises.chunk(2)
        return x_BCHW - (uncond_BCHW + (cond_BCHW - uncond_BCHW) * cfg) * sigma

    return denoise
