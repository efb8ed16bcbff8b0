"""Trains the autoencoder of the example model: 64x64 images to 8x8 latents of 4 channels and back.

Knows the module's configuration, its training schedule and how to encode images. Does not know text or diffusion.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL
from torch.nn import functional

from examples.shapes import drawing
from scripts.shapes_training.muon import Muon

BASE_CHANNELS = 32
CONFIG: dict[str, Any] = {
    "block_out_channels": (32, 32, 64, 64),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 1,
    "norm_num_groups": min(32, BASE_CHANNELS // 4),
    "latent_channels": 4,
    "sample_size": drawing.SIDE_PIXELS,
}
CROP_PIXELS = 32
LEARNING_RATE = 2e-3
KL_WEIGHT = 1e-3
DECODER_NOISE = 0.03
DECODER_GAIN = 0.12
Log = Callable[[str, int, float], None]


def to_tensor(images: list[np.ndarray[Any, np.dtype[np.float32]]]) -> torch.Tensor:
    """Convert images [H, W, 3] in 0..1 to one tensor [N, 3, H, W] in -1..1, float32."""
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2) * 2 - 1


def training_images(count: int, rng: np.random.Generator) -> torch.Tensor:
    """Return images of every background and style, with one or two shapes: float32 [count, 3, 64, 64] in -1..1."""
    images = []
    for index in range(count):
        background: drawing.Background = "light" if index % 3 == 2 else "dark"
        scene = drawing.random_scene(rng, background, filled=index % 2 == 0, share_of_two=0.3)
        images.append(drawing.draw(scene))
    return to_tensor(images)


def reconstruction_loss(vae: AutoencoderKL, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode and decode with one sampled latent. Returns (loss to minimise, reconstruction term alone)."""
    posterior = vae.encode(images).latent_dist
    restored = vae.decode(posterior.sample()).sample
    reconstruction = functional.l1_loss(restored, images) + 2 * functional.mse_loss(restored, images)
    return reconstruction + KL_WEIGHT * posterior.kl().mean() / posterior.mean[0].numel(), reconstruction


def train(images: torch.Tensor, steps: int, seed: int, log: Log) -> AutoencoderKL:
    """Train a new module for a number of steps; return it in eval mode. Effects: log(stage, step, loss)."""
    torch.manual_seed(seed)
    vae = AutoencoderKL(**CONFIG).to(memory_format=torch.channels_last)
    optimiser = torch.optim.AdamW(vae.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0)
    for step in range(1, steps + 1):
        rate = LEARNING_RATE * min(1.0, step / 50) * max(0.01, 0.5 + 0.5 * float(np.cos(np.pi * step / steps)))
        for group in optimiser.param_groups:
            group["lr"] = rate
        # Crops first: the network is convolutional, they cost a quarter, and small full batches alone did not converge.
        cropped = step <= 0.8 * steps
        batch = crops(images) if cropped else whole(images)
        loss, reconstruction = reconstruction_loss(vae, batch)
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 0.5)
        optimiser.step()
        log("vae", step, reconstruction.item())
    return vae.eval().requires_grad_(False)


def polish(
    vae: AutoencoderKL,
    steps: int,
    highest: float,
    images: torch.Tensor,
    seed: int,
    log: Log,
) -> None:
    """Continue training with Muon, on crops, then on complete images.

    Effects: the module's weights; log(stage, step, loss).
    """
    torch.manual_seed(seed)
    inner = {
        name: parameter
        for name, parameter in vae.named_parameters()
        if parameter.ndim > 1 and not any(end in name for end in ("conv_in", "conv_out", "quant_conv"))
    }
    others = [parameter for name, parameter in vae.named_parameters() if name not in inner]
    muon = Muon(inner.values())
    adam = torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0)
    for step in range(1, steps + 1):
        rate = highest * min(1.0, step / 30) * (1.01 - step / steps)
        for group in adam.param_groups:
            group["lr"] = rate / 10
        batch = crops(images) if step <= 0.7 * steps else whole(images)
        loss, reconstruction = reconstruction_loss(vae, batch)
        vae.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 0.5)
        muon.step(rate)
        adam.step()
        log("vae polish", step, reconstruction.item())


def refine_decoder(
    vae: AutoencoderKL, latents: torch.Tensor, images: torch.Tensor, steps: int, highest: float, seed: int, log: Log
) -> None:
    """Train only the decoder, for sharper edges: the latents, and therefore the UNet, stay valid.

    Latents are the posterior means of the images, in the module's own scale; some noise models sampling
    errors, and a gain models guidance, which overshoots.
    Effects: weights of the decoder; log(stage, step, loss).
    """
    torch.manual_seed(seed)
    vae.decoder.requires_grad_(True).train()
    spread = float(latents.std())
    inner = [parameter for parameter in vae.decoder.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in vae.decoder.parameters() if parameter.ndim == 1]
    muon, adam = Muon(inner), torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0)
    for step in range(1, steps + 1):
        rate = highest * min(1.0, step / 30) * (1.01 - step / steps)
        for group in adam.param_groups:
            group["lr"] = rate / 10
        chosen = torch.randint(0, len(latents), (8,))
        gain = 1 + (torch.rand(8, 1, 1, 1) - 0.2) * DECODER_GAIN
        noisy = gain * latents[chosen] + torch.randn(8, *latents.shape[1:]) * spread * DECODER_NOISE
        restored = vae.decode(noisy).sample
        difference = restored - images[chosen]
        loss = difference.abs().mean() + 2 * difference.pow(2).mean()
        vae.decoder.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(vae.decoder.parameters(), 0.5)
        muon.step(rate)
        adam.step()
        log("decoder", step, loss.item())
    vae.eval().requires_grad_(False)


def whole(images: torch.Tensor) -> torch.Tensor:
    """Return a random batch of 8 complete images: float32 [8, 3, 64, 64]."""
    return images[torch.randint(0, len(images), (8,))].contiguous(memory_format=torch.channels_last)


def crops(images: torch.Tensor) -> torch.Tensor:
    """Return a random batch of 32 crops: float32 [32, 3, 32, 32]. Cost: a quarter of full images."""
    batch = images[torch.randint(0, len(images), (32,))]
    top, left = (8 * torch.randint(0, 5, (2,))).tolist()
    batch = batch[:, :, top : top + CROP_PIXELS, left : left + CROP_PIXELS]
    return batch.contiguous(memory_format=torch.channels_last)


@torch.no_grad()
def encode_all(vae: AutoencoderKL, images: torch.Tensor) -> torch.Tensor:
    """Return the posterior means of all images, unscaled: float32 [N, 4, 8, 8]."""
    return torch.cat([vae.encode(part).latent_dist.mean for part in torch.split(images, 128)])


@torch.no_grad()
def psnr_decibels(vae: AutoencoderKL, images: torch.Tensor) -> float:
    """Return the peak signal-to-noise ratio of encoding and decoding, over all images."""
    restored = torch.cat([vae.decode(part).sample for part in torch.split(encode_all(vae, images), 64)])
    return float(10 * torch.log10(4 / functional.mse_loss(restored.clamp(-1, 1), images)))
