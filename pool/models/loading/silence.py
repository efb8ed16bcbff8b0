"""The latent of silence that a model of music reads, computed with its autoencoder if its file has none.

ACE-Step 1.5 is published with it in a file of its own, which single files with all components lack. An autoencoder of
convolutions makes equal cells of silence, except for some at the start.

Shape legend: L cells, C latent channels.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from modelpool.pool.families.parts.inner_models import COMPANION, SILENCE
from modelpool.pool.models.components.vae.build_vae import MissingHalf
from modelpool.pool.models.loading.build_checkpoint import Checkpoint
from modelpool.pool.values.core.errors import UnknownArchitecture
from modelpool.pool.values.specs.spec import Role

#: encoded cells, of which the first half is kept: both ends are others than the cells between them
_CELLS = 32


def has_silence(module: torch.nn.Module) -> bool:
    """Return whether a diffusion model of music has the latent of silence."""
    return getattr(module.get_submodule(COMPANION), SILENCE) is not None


def silence_latent(checkpoint: Checkpoint) -> Tensor:
    """Return the latent of silence by the VAE of `checkpoint`, [1,L,C] on the host; its last cell is repeated. Takes a
    second or a few. Raises UnknownArchitecture for a VAE without its encoder."""
    vae: Any = checkpoint.build(Role.VAE).module.float()
    if isinstance(vae.encoder, MissingHalf):
        wanted = f"{SILENCE} of the model, or a VAE with its encoder, which makes it"
        raise UnknownArchitecture(f"{checkpoint.header.path}: found no latent of silence, expected {wanted}")
    samples = _CELLS * math.prod(vae.config.downsampling_ratios)
    with torch.no_grad():
        silence_1CL: Tensor = vae.encode(torch.zeros(1, vae.config.audio_channels, samples)).latent_dist.mode()
    return silence_1CL[..., : _CELLS // 2].transpose(1, 2).contiguous()
