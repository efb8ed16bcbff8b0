"""Trains the UNet and the text encoder of the example model together, on latents of drawn images.

Knows the UNet's configuration, SD1's noise schedule, the loss and the averaging of weights. Knows no LoRAs, no files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from torch import nn
from transformers import CLIPTextModel

from examples.shapes import drawing
from scripts.shapes_training import text
from scripts.shapes_training.vae import encode_all, to_tensor

BASE_CHANNELS = 48
CONFIG: dict[str, Any] = {
    "sample_size": 8,
    "block_out_channels": (48, 96),
    "layers_per_block": 1,
    "down_block_types": ("CrossAttnDownBlock2D",) * 2,
    "up_block_types": ("CrossAttnUpBlock2D",) * 2,
    "cross_attention_dim": text.WIDTH,
    "attention_head_dim": 8,  # diffusers' name for the number of heads, 8 in SD1
    "norm_num_groups": min(32, BASE_CHANNELS // 4),
}
BATCH = 32
LEARNING_RATE = 1.5e-3
SHARE_OF_TWO = 0.15
SHARE_WITHOUT_CAPTION = 0.1
LARGEST_LOSS_WEIGHT = 5.0
Log = Callable[[str, int, float], None]


@dataclass(frozen=True, slots=True)
class Examples:
    """Training pairs: latents float32 [N, 4, 8, 8] of unit variance, and the caption of each."""

    latents: torch.Tensor
    captions: tuple[str, ...]


def signal_shares() -> torch.Tensor:
    """SD1's cumulative alphas, float32 [1000] (scaled-linear betas 0.00085 to 0.012). Source: SD 1.x configuration."""
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
    return torch.cumprod(1 - betas, 0).float()


def make_examples(
    vae: AutoencoderKL,
    count: int,
    rng: np.random.Generator,
    latent_scale: float,
    background: drawing.Background = "dark",
    filled: bool = True,
) -> Examples:
    """Draw and encode training pairs of one style."""
    captions, latents = [], []
    for start in range(0, count, 256):
        scenes = [drawing.random_scene(rng, background, filled, SHARE_OF_TWO) for _ in range(min(256, count - start))]
        captions += [text.phrase(drawing.caption(scene), rng) for scene in scenes]
        latents.append(encode_all(vae, to_tensor([drawing.draw(scene) for scene in scenes])) * latent_scale)
    return Examples(torch.cat(latents), tuple(captions))


def noise_loss(unet: nn.Module, latents: torch.Tensor, context: torch.Tensor, alphas: torch.Tensor) -> torch.Tensor:
    """Mean squared error of the predicted noise, weighted to the noisy end, where colour and shape are decided."""
    timesteps = torch.randint(0, len(alphas), (len(latents),))
    alpha = alphas[timesteps].view(-1, 1, 1, 1)
    noise = torch.randn_like(latents)
    predicted = unet(alpha.sqrt() * latents + (1 - alpha).sqrt() * noise, timesteps, context).sample
    errors = (predicted - noise).pow(2).mean((1, 2, 3))
    weights = ((1 - alpha) / alpha).flatten().clamp(1, LARGEST_LOSS_WEIGHT)
    return torch.as_tensor((errors * weights).sum() / weights.sum())


class Averages:
    """Exponential moving averages of parameters; evaluation uses them, not the last step."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.means = [parameter.detach().clone() for parameter in self.parameters]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move the means towards the parameters; slower as steps pass."""
        decay = min(0.998, (1 + step) / (10 + step))
        for mean, parameter in zip(self.means, self.parameters, strict=True):
            mean.lerp_(parameter, 1 - decay)

    @torch.no_grad()
    def apply(self) -> None:
        """Overwrite the parameters with their means."""
        for parameter, mean in zip(self.parameters, self.means, strict=True):
            parameter.copy_(mean)


def learning_rate(step: int, steps: int, highest: float) -> float:
    """Linear warm-up over 100 steps, then a cosine down to one percent."""
    return highest * min(1.0, step / 100) * max(0.01, 0.5 + 0.5 * float(np.cos(np.pi * step / steps)))


def optimise(
    parameters: list[nn.Parameter],
    loss_of_step: Callable[[], torch.Tensor],
    steps: int,
    highest: float,
    stage: str,
    log: Log,
) -> None:
    """Run AdamW for a number of steps, then leave the averaged weights in place.

    Effects: parameters, log(stage, step, loss).
    """
    optimiser = torch.optim.AdamW(parameters, betas=(0.9, 0.99), weight_decay=0.0, fused=True)
    averages = Averages(parameters)
    for step in range(1, steps + 1):
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(step, steps, highest)
        loss = loss_of_step()
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        averages.update(step)
        log(stage, step, loss.item())
    averages.apply()


def train(
    examples: Examples, encode: text.Encode, steps: int, seed: int, log: Log
) -> tuple[UNet2DConditionModel, CLIPTextModel]:
    """Train UNet and text encoder from random weights; return both in eval mode. Effects: log(stage, step, loss)."""
    torch.manual_seed(seed)
    unet, encoder = UNet2DConditionModel(**CONFIG), text.new_encoder()
    distinct = ["", *sorted(set(examples.captions))]
    vocabulary = text.SmallVocabulary(encoder, text.token_rows(distinct, encode))
    position = {caption: index for index, caption in enumerate(distinct)}
    caption_of = torch.tensor([position[caption] for caption in examples.captions])
    alphas = signal_shares()

    def loss_of_step() -> torch.Tensor:
        chosen = torch.randint(0, len(caption_of), (BATCH,))
        captions = caption_of[chosen].clone()
        captions[torch.rand(BATCH) < SHARE_WITHOUT_CAPTION] = 0
        different, which = torch.unique(captions, return_inverse=True)
        context = encoder(vocabulary.small_rows[different]).last_hidden_state[which]
        return noise_loss(unet, examples.latents[chosen], context, alphas)

    optimise([*unet.parameters(), *encoder.parameters()], loss_of_step, steps, LEARNING_RATE, "text+unet", log)
    encoder = vocabulary.restore()
    return unet.eval().requires_grad_(False), encoder.eval().requires_grad_(False)
