"""Measures the exported files: loads them with diffusers' converters, samples, and reads the images with the checker.

Uses only the files, so that it detects a wrong export. Does not know how they were trained.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from diffusers.loaders import single_file_utils
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import nn
from transformers import CLIPTextModel

from examples.shapes.checker import Reading, matches, read_image
from examples.shapes.drawing import all_captions
from scripts.shapes_training import diffusion, text, vae

LATENT_SCALE = 0.18215  # SD1's constant
Denoise = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Sampler = Callable[[Denoise, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Model:
    """The three modules of a single file, float32, eval mode."""

    unet: UNet2DConditionModel
    vae: AutoencoderKL
    encoder: CLIPTextModel


def load_model(path: Path) -> Model:
    """Load a single file strictly: every tensor has a parameter and every parameter a tensor."""
    tensors = {name: value.float() for name, value in load_file(path).items()}
    unet = UNet2DConditionModel(**diffusion.CONFIG)
    unet.load_state_dict(single_file_utils.convert_ldm_unet_checkpoint(dict(tensors), dict(unet.config)))
    autoencoder = AutoencoderKL(**vae.CONFIG)
    autoencoder.load_state_dict(single_file_utils.convert_ldm_vae_checkpoint(dict(tensors), dict(autoencoder.config)))
    encoder = text.new_encoder()
    named = single_file_utils.convert_ldm_clip_checkpoint(dict(tensors))
    prefix = "text_model." if any(name.startswith("text_model.") for name in encoder.state_dict()) else ""
    encoder.load_state_dict(
        {
            prefix + name.removeprefix("text_model."): value
            for name, value in named.items()
            if not name.endswith("position_ids")
        }
    )
    return Model(*(module.eval().requires_grad_(False) for module in (unet, autoencoder, encoder)))


def merge_lora(model: Model, path: Path, strength: float) -> int:
    """Add a kohya LoRA file to the weights. Returns the number of changed layers. Effects: the model's weights."""
    tensors = {name: value.float() for name, value in load_file(path).items()}
    roots: dict[str, nn.Module] = {"lora_unet": model.unet, "lora_te_text_model": model.encoder}
    names = {
        f"{prefix}_{path.removeprefix('text_model.').replace('.', '_')}": layer
        for prefix, root in roots.items()
        for path, layer in root.named_modules()
    }
    layers = sorted({name.split(".", 1)[0] for name in tensors})
    for name in layers:
        down, up = tensors[f"{name}.lora_down.weight"], tensors[f"{name}.lora_up.weight"]
        scale = float(tensors[f"{name}.alpha"]) / down.shape[0] * strength
        weight = names[name].weight
        assert isinstance(weight, torch.Tensor)
        weight.data += (up.flatten(1) @ down.flatten(1)).reshape(weight.shape) * scale
    return len(layers)


def noise_levels() -> torch.Tensor:
    """Return the sigma of each training timestep, float64 [1000], ascending."""
    alphas = diffusion.signal_shares().double()
    return ((1 - alphas) / alphas).sqrt()


def evenly_spaced(steps: int) -> torch.Tensor:
    """Sigmas at evenly spaced timesteps from the last to the first, then 0: float32 [steps + 1]."""
    places = torch.linspace(999, 0, steps, dtype=torch.float64)
    levels = noise_levels()
    low = places.floor().long()
    logs = levels.log()
    between = logs[low].lerp(logs[(low + 1).clamp(max=999)], places - low)
    return torch.cat([between.exp(), torch.zeros(1, dtype=torch.float64)]).float()


def karras(steps: int) -> torch.Tensor:
    """Sigmas spaced as Karras et al. (2022), rho 7, between the schedule's ends, then 0: float32 [steps + 1]."""
    levels = noise_levels()
    high, low = levels[-1] ** (1 / 7), levels[0] ** (1 / 7)
    ramp = torch.linspace(0, 1, steps, dtype=torch.float64)
    return torch.cat([(high + ramp * (low - high)) ** 7, torch.zeros(1, dtype=torch.float64)]).float()


def euler(denoise: Denoise, x: torch.Tensor, sigmas: torch.Tensor) -> torch.Tensor:
    """Euler steps along the probability flow."""
    for now, after in itertools.pairwise(sigmas):
        x = x + (x - denoise(x, now)) / now * (after - now)
    return x


def dpmpp_2m(denoise: Denoise, x: torch.Tensor, sigmas: torch.Tensor) -> torch.Tensor:
    """DPM-Solver++ of second order, multistep. Source: Lu et al. (2022), algorithm 2, data prediction."""
    before: tuple[torch.Tensor, torch.Tensor] | None = None  # (clean image, log step) of the previous step
    for now, after in itertools.pairwise(sigmas):
        clean = denoise(x, now)
        if after == 0:
            return clean
        step = (now / after).log()
        mixed = clean
        if before is not None:
            weight = step / before[1] / 2
            mixed = (1 + weight) * clean - weight * before[0]
        x = after / now * x - torch.expm1(-step) * mixed
        before = (clean, step)
    return x


@torch.no_grad()
def generate(
    model: Model,
    encode: text.Encode,
    captions: Sequence[str],
    seeds: Sequence[int],
    sampler: Sampler,
    sigmas: torch.Tensor,
    guidance: float = 4.0,
) -> NDArray[np.uint8]:
    """Generate one image for each (caption, seed) pair: uint8 [N, 64, 64, 3]. Noise depends only on the seed."""
    levels = noise_levels().log()
    tokens = text.token_rows([*captions, *[""] * len(captions)], encode)
    context = model.encoder(tokens).last_hidden_state
    noise = [torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(seed)) for seed in seeds]

    def denoise(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        place = (levels - sigma.log()).abs().argmin()
        scaled = torch.cat([x, x]) / (1 + sigma**2).sqrt()
        wanted, empty = model.unet(scaled, place, context).sample.chunk(2)
        return torch.as_tensor(x - sigma * (empty + guidance * (wanted - empty)))

    latents = sampler(denoise, torch.stack(noise) * (1 + sigmas[0] ** 2).sqrt(), sigmas)
    images = model.vae.decode(latents / LATENT_SCALE).sample.clamp(-1, 1)
    return np.asarray(((images.permute(0, 2, 3, 1) + 1) * 127.5).round().to(torch.uint8))


SAMPLERS: Mapping[str, tuple[Sampler, torch.Tensor]] = {
    "Euler, 20 steps": (euler, evenly_spaced(20)),
    "DPM++ 2M Karras, 20 steps": (dpmpp_2m, karras(20)),
}


@dataclass(frozen=True, slots=True)
class Score:
    """Shares of correct images of one setting: subject (colour and shape), style, and both."""

    images: int
    subject: float
    style: float
    both: float


def measure(
    model: Model, encode: text.Encode, sampler: str, seeds: int, background: str = "dark", filled: bool = True
) -> tuple[Score, NDArray[np.uint8], list[tuple[str, int, Reading]]]:
    """Evaluate every colour x shape x seed. Returns score, images (caption by caption, seed by seed) and failures."""
    pairs = [(caption, seed) for caption in all_captions() for seed in range(seeds)]
    method, sigmas = SAMPLERS[sampler]
    parts = []
    for start in range(0, len(pairs), 45):
        captions, numbers = zip(*pairs[start : start + 45], strict=True)
        parts.append(generate(model, encode, captions, numbers, method, sigmas))
    images = np.concatenate(parts)
    readings = [read_image(image) for image in images]
    subject = [matches(reading, caption) for reading, (caption, _) in zip(readings, pairs, strict=True)]
    style = [reading.background == background and reading.filled == filled for reading in readings]
    both = [one and other for one, other in zip(subject, style, strict=True)]
    failures = [(*pair, reading) for pair, reading, right in zip(pairs, readings, both, strict=True) if not right]

    def share(hits: list[bool]) -> float:
        return sum(hits) / len(hits)

    return Score(len(pairs), share(subject), share(style), share(both)), images, failures
