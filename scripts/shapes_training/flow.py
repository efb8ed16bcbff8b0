"""Trains a small transformer of the kind of Flux on the latents of the example model, which stays as it is.

For benchmarks of what only transformers have. Knows the transformer's configuration, the loss and the text inputs.
Shape legend: N captions, B batch, L tokens, D text width, C channels, H W cells.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import FluxTransformer2DModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from modelpool.pool.families.definitions.flux import forward
from scripts.shapes_training import diffusion, evaluate, text

#: states of a caption that it reads, besides the one at its end
TOKENS = 12
CONFIG: dict[str, Any] = {
    "patch_size": 1,
    "in_channels": 16,
    "num_layers": 3,
    "num_single_layers": 5,
    "num_attention_heads": 4,
    "attention_head_dim": 32,
    "joint_attention_dim": text.WIDTH,
    "pooled_projection_dim": text.WIDTH,
    "guidance_embeds": False,
    "axes_dims_rope": (8, 12, 12),
}
BATCH = 48
LEARNING_RATE = 2e-3
SHARE_WITHOUT_CAPTION = 0.1


@torch.no_grad()
def text_inputs(model: evaluate.Model, captions: list[str], encode: text.Encode) -> tuple[Tensor, Tensor]:
    """Return what the transformer reads of `captions`: the first states [N, L, D], and the one at the end [N, D]."""
    rows_NL = text.token_rows(captions, encode)
    states_NLD = model.encoder(rows_NL).last_hidden_state
    ends_N = (rows_NL == text.END_TOKEN).int().argmax(dim=1)
    return states_NLD[:, :TOKENS], states_NLD[torch.arange(len(rows_NL)), ends_N]


def flow_loss(module: nn.Module, latents_BCHW: Tensor, context_BLD: Tensor, pooled_BD: Tensor) -> Tensor:
    """Return the mean squared error of the predicted noise - image, at shares of noise that are mostly near a half.

    Source: Esser et al. 2024 (SD3), section 3.1, logit-normal sampling.
    """
    share_B = torch.sigmoid(torch.randn(len(latents_BCHW)))
    noise_BCHW, share_B111 = torch.randn_like(latents_BCHW), share_B.view(-1, 1, 1, 1)
    noisy_BCHW = (1 - share_B111) * latents_BCHW + share_B111 * noise_BCHW
    found_BCHW = forward(module, noisy_BCHW, share_B, {"context": context_BLD, "pooled": pooled_BD})
    return nn.functional.mse_loss(found_BCHW, noise_BCHW - latents_BCHW)


def train(
    model: evaluate.Model, encode: text.Encode, images: int, steps: int, seed: int, log: diffusion.Log
) -> FluxTransformer2DModel:
    """Train from random weights on drawn images; return it in eval mode. Effects: log(stage, step, loss)."""
    examples = diffusion.make_examples(model.vae, images, np.random.default_rng(seed), evaluate.LATENT_SCALE)
    distinct = ["", *sorted(set(examples.captions))]
    contexts, pooled = text_inputs(model, distinct, encode)
    place = {caption: row for row, caption in enumerate(distinct)}
    caption_of = torch.tensor([place[caption] for caption in examples.captions])
    torch.manual_seed(seed)
    transformer = FluxTransformer2DModel(**CONFIG)

    def loss_of_step() -> Tensor:
        chosen = torch.randint(0, images, (BATCH,))
        rows = caption_of[chosen].clone()
        rows[torch.rand(BATCH) < SHARE_WITHOUT_CAPTION] = 0
        return flow_loss(transformer, examples.latents[chosen], contexts[rows], pooled[rows])

    diffusion.optimise(list(transformer.parameters()), loss_of_step, steps, LEARNING_RATE, "flow", log)
    return transformer.eval().requires_grad_(False)


def save(transformer: nn.Module, path: Path) -> None:
    """Write the weights in half precision."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: value.half().contiguous() for name, value in transformer.state_dict().items()}, path)


def load(path: Path) -> FluxTransformer2DModel:
    """Return the transformer of a file, in float32 and eval mode."""
    transformer = FluxTransformer2DModel(**CONFIG)
    transformer.load_state_dict({name: value.float() for name, value in load_file(path).items()})
    return transformer.eval().requires_grad_(False)
