"""`LatentFormat`: how a diffusion model's latents follow from its VAE's latents. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LatentFormat:
    """One family's latents.

    channels    channels of a latent
    dimensions  dimensions of a latent after batch and channels: 1 for audio, 2 for images, 3 for video
    scale       factor from the VAE's latents (less the mean) to the model's
    mean        subtracted from each channel; one number for all channels, or one per channel
    std         divisor of each channel; one number for all channels, or one per channel
    tiny        the tiny autoencoder distilled for these latents; empty for none
    """

    channels: int
    dimensions: int = 2
    scale: float = 1.0
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    tiny: str = ""
