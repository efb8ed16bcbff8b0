"""Guided predictions that have the length again which the prompt's own has: some models were published with it.

Sources: the pipelines of diffusers for Qwen-Image (patches) and Lumina 2 (rows).

Shape legend: B batch, C latent channels, H W latent height and width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from modelpool.pool.core.sampling_facts import KeptLength


def with_length_of(guided_BCHW: Tensor, own_BCHW: Tensor, kept: KeptLength) -> Tensor:
    """`guided_BCHW`, each part of it as long as that of `own_BCHW`."""
    match kept:
        case KeptLength.NOTHING:
            return guided_BCHW
        case KeptLength.ROWS:
            dims: tuple[int, ...] = (-1,)
            own, guided = own_BCHW, guided_BCHW
        case KeptLength.PATCHES:
            dims = (1, 3, 5)
            own, guided = _patches(own_BCHW), _patches(guided_BCHW)
    lengths = torch.linalg.vector_norm(own, dim=dims, keepdim=True)
    guided_lengths = torch.linalg.vector_norm(guided, dim=dims, keepdim=True)
    kept_BCHW: Tensor = (guided * (lengths / guided_lengths)).reshape(guided_BCHW.shape)
    return kept_BCHW


def _patches(x_BCHW: Tensor) -> Tensor:
    """[B, C, rows, 2, columns, 2], by patches of two by two cells."""
    b, c, h, w = x_BCHW.shape
    return x_BCHW.reshape(b, c, h // 2, 2, w // 2, 2)
