"""Call diffusers' UNets with inputs other than text: input images, frames.

Each function is the `call` of a `DiffusionArchitecture` and prepares the inputs as the model's pipeline does. The noisy
latent is already scaled for the model, and so is what is concatenated with it. Legend: B batch, C channels, T frames, H
W cells of a latent.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from modelpool.pool.families.parts.forward import ModelKwargs, sample_of


def call_unet(module: nn.Module, x_BCHW: Tensor, level_B: Tensor, kwargs: ModelKwargs) -> Tensor:
    """UNets for inpainting, editing by instruction, depth and upscaling: "image" is concatenated along channels.

    "noise_level" is the noise of an image to upscale; SDXL-like UNets read "pooled" and "numbers".
    """
    joined = torch.cat((x_BCHW, kwargs["image"]), dim=1) if "image" in kwargs else x_BCHW
    added = {"text_embeds": kwargs["pooled"], "time_ids": kwargs["numbers"]} if "numbers" in kwargs else None
    return sample_of(
        module(
            joined,
            level_B,
            encoder_hidden_states=kwargs["context"],
            class_labels=kwargs.get("noise_level"),
            added_cond_kwargs=added,
            return_dict=False,
        )
    )


def call_unet_video(module: nn.Module, x_BCTHW: Tensor, level_B: Tensor, kwargs: ModelKwargs) -> Tensor:
    """Stable Video Diffusion and SV3D: image latents ("image"), for one frame or for each, the image state
    ("image_context"), and "numbers": frame rate less one, amount of motion and noise on the image, or only the last;
    for SV3D p the noise, and height and direction of the view, per frame.

    `level_B` is a quarter of the logarithm of sigma.
    """
    frames = x_BCTHW.shape[2]
    image = kwargs["image"]
    image_BCTHW = image.unsqueeze(2) if image.dim() == x_BCTHW.dim() - 1 else image
    joined = torch.cat((x_BCTHW, image_BCTHW.expand(-1, -1, frames, -1, -1)), dim=1)
    out_BTCHW = sample_of(
        module(
            joined.transpose(1, 2),
            level_B,
            encoder_hidden_states=kwargs["image_context"],
            added_time_ids=kwargs["numbers"],
            return_dict=False,
        )
    )
    return out_BTCHW.transpose(1, 2)
