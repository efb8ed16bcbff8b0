"""Class labels of a UNet from the embedding of an image (unCLIP): the embedding with a little noise, and the sinusoidal
embedding of the noise level.

Shape legend: B batch, D width of an embedding, V width of the labels, twice that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from modelpool.pool.inference.conditioning.micro_conditioning import CLASS_LABELS
from modelpool.pool.inference.sampling.noise import ImageNoise, image_noise_seed
from modelpool.pool.values.core.sampling_facts import ImageLabels, SamplingFacts
from modelpool.pool.values.core.stage_params import FloatArray, SampleParams

#: the least level of the noise on embeddings, of 1000. Source: default of `noise_level` of diffusers'
#: StableUnCLIPImg2ImgPipeline
_NOISE_LEVEL, _LEVELS = 0, 1000
#: offset of the cosine schedule. Source: Nichol and Dhariwal 2021, section 3.2
_OFFSET = 0.008
#: longest period of the sinusoidal embedding
_MAX_PERIOD = 10000.0


def image_labels(works: Sequence[SampleParams], embeds: Sequence[FloatArray], facts: ImageLabels) -> dict[str, Tensor]:
    """Return the class labels of each image of a run by the name of the model input, [B, V], on the CPU in float32:
    each embedding of `embeds` [1, D] gets noise from separate random numbers (from the seed's complement). The
    noise is relative to the statistics of `facts`. Source: `noise_image_embeddings` of diffusers'
    StableUnCLIPImg2ImgPipeline."""
    rows = []
    for work, states_LD in zip(works, embeds, strict=True):
        states_1D = torch.from_numpy(states_LD.copy())
        noise_1D = ImageNoise(image_noise_seed(work.seed)).draw(states_1D.shape)
        mean_D, deviation_D = torch.tensor(facts.means or (0.0,)), torch.tensor(facts.deviations or (1.0,))
        kept = torch.tensor(_signal_share(_NOISE_LEVEL))  # float32, as in diffusers
        noisy_1D = kept.sqrt() * (states_1D - mean_D) / deviation_D + (1.0 - kept).sqrt() * noise_1D
        rows.append(torch.cat([noisy_1D * deviation_D + mean_D, _sinusoids(_NOISE_LEVEL, states_1D.shape[-1])], dim=-1))
    return {CLASS_LABELS: torch.cat(rows)}


def empty_image_labels(facts: SamplingFacts, model: nn.Module, batch: int, device: torch.device) -> dict[str, Tensor]:
    """Return empty labels of `batch` texts of `model`, for dry runs; nothing for models without labels."""
    if facts.image_labels is None:
        return {}
    config: Any = model.config  # diffusers is not typed
    width = int(config.projection_class_embeddings_input_dim)
    return {CLASS_LABELS: torch.empty((batch, width), dtype=torch.float32, device=device)}


def _signal_share(level: int) -> float:
    """Return the variance of the signal at a level of the cosine schedule."""

    def height(step: int) -> float:
        return math.cos((step / _LEVELS + _OFFSET) / (1.0 + _OFFSET) * math.pi / 2.0) ** 2

    return height(level + 1) / height(0)


def _sinusoids(level: int, width: int) -> Tensor:
    """Return the sinusoidal embedding of a level, [1, D], cosines first."""
    half = width // 2
    angles_H = level * torch.exp(-math.log(_MAX_PERIOD) * torch.arange(half, dtype=torch.float32) / half)
    return torch.cat([torch.cos(angles_H), torch.sin(angles_H)])[None]
