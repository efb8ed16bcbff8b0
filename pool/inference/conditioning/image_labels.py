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
from modelpool.pool.values.core.stage_params import FloatArray, SampleParams, SeenImages

#: levels of the noise on embeddings; a run has the least one unless it says more. Source: default of `noise_level` of
#: diffusers' StableUnCLIPImg2ImgPipeline
_LEVELS = 1000
#: the share of the levels of the noise on the sum of several embeddings. Source: default of `noise_augment_merge` of
#: ComfyUI
_MERGED_NOISE = 0.05
#: largest share of the signal that one level takes. Source: `max_beta` of the schedule of both
_MOST_TAKEN = 0.999
#: offset of the cosine schedule. Source: Nichol and Dhariwal 2021, section 3.2
_OFFSET = 0.008
#: longest period of the sinusoidal embedding
_MAX_PERIOD = 10000.0


def image_labels(works: Sequence[SampleParams], embeds: Sequence[FloatArray], facts: ImageLabels) -> dict[str, Tensor]:
    """Return the class labels of each image of a run by the name of the model input, [B, V], on the CPU in float32:
    each embedding of `embeds` [N, D] gets noise from separate random numbers (from the seed's complement). The
    noise is relative to the statistics of `facts`. Source: `noise_image_embeddings` of diffusers'
    StableUnCLIPImg2ImgPipeline.

    The labels of one image are multiplied by its strength. Several images are one embedding, the sum of theirs with
    their noise and strength, which gets noise once more."""
    rows = []
    for work, states_LD in zip(works, embeds, strict=True):
        states_ND = torch.from_numpy(states_LD.copy())
        seen = next(iter(work.all_of(SeenImages)), SeenImages((1.0,), (0.0,)))
        count, width = states_ND.shape
        extra = 1 if count > 1 else 0
        noise_ND = ImageNoise(image_noise_seed(work.seed)).draw((count + extra, width))
        levels = [round((_LEVELS - 1) * noise) for noise in seen.noises]
        noisy = [
            _noisy(states_ND[place : place + 1], level, noise_ND[place : place + 1], facts)
            for place, level in enumerate(levels)
        ]
        if count == 1:
            labels_1V = torch.cat([noisy[0], _sinusoids(levels[0], width)], dim=-1)
            rows.append(labels_1V * seen.strengths[0])
            continue
        merged_1D = torch.cat([each * factor for each, factor in zip(noisy, seen.strengths, strict=True)]).sum(
            0, keepdim=True
        )
        level = round((_LEVELS - 1) * _MERGED_NOISE)
        rows.append(torch.cat([_noisy(merged_1D, level, noise_ND[-1:], facts), _sinusoids(level, width)], dim=-1))
    return {CLASS_LABELS: torch.cat(rows)}


def pooled_images(works: Sequence[SampleParams], embeds: Sequence[FloatArray]) -> Tensor:
    """Return the embeddings of the images of each run as one in the place of its pooled text, [B, D], on the CPU: as
    `image_labels`, without statistics and without the noise level."""
    labels_BV = image_labels(works, embeds, ImageLabels())[CLASS_LABELS]
    return labels_BV[:, : labels_BV.shape[1] // 2]


def image_states(works: Sequence[SampleParams], embeds: Sequence[FloatArray]) -> Tensor:
    """Return the embeddings of the images of each run as states, [B, N, D], on the CPU: each with its strength."""
    strengths = [next(iter(work.all_of(SeenImages))).strengths for work in works]
    states = (torch.from_numpy(states_ND.copy()) for states_ND in embeds)
    return torch.stack(
        [each_ND * torch.tensor(factors)[:, None] for each_ND, factors in zip(states, strengths, strict=True)]
    )


def _noisy(states_1D: Tensor, level: int, noise_1D: Tensor, facts: ImageLabels) -> Tensor:
    """Return an embedding with noise of a level, relative to the statistics of `facts`."""
    mean_D, deviation_D = torch.tensor(facts.means or (0.0,)), torch.tensor(facts.deviations or (1.0,))
    kept = torch.tensor(_signal_share(level))  # float32, as in diffusers
    noisy_1D = kept.sqrt() * (states_1D - mean_D) / deviation_D + (1.0 - kept).sqrt() * noise_1D
    return noisy_1D * deviation_D + mean_D


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

    if level + 1 < _LEVELS:
        return height(level + 1) / height(0)
    return height(level) / height(0) * (1.0 - _MOST_TAKEN)


def _sinusoids(level: int, width: int) -> Tensor:
    """Return the sinusoidal embedding of a level, [1, D], cosines first."""
    half = width // 2
    angles_H = level * torch.exp(-math.log(_MAX_PERIOD) * torch.arange(half, dtype=torch.float32) / half)
    return torch.cat([torch.cos(angles_H), torch.sin(angles_H)])[None]
