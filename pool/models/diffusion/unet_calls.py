"""How diffusers' UNets are called that read something beside a text: images to work on, frames.

Each function is the `call` of an `Architecture` and does to its inputs what the pipeline of the model does. The noisy
latent comes scaled as the model is to see it; what is joined to its channels is told as it is to be seen.
Legend: B batch, C channels, T frames, H W cells of a latent.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from modelpool.pool.models.diffusion.architecture import Told
from modelpool.pool.models.diffusion.image_calls import sample_of


def call_unet(module: nn.Module, x_BCHW: Tensor, level_B: Tensor, told: Told) -> Tensor:
    """UNets that inpaint, follow an instruction, read depth or upscale: "image" is joined to the channels.

    "noise_level" tells how noisy an image to upscale is; "pooled" and "numbers" are told to those of SDXL's kind.
    """
    joined = torch.cat((x_BCHW, told["image"]), dim=1) if "image" in told else x_BCHW
    added = {"text_embeds": told["pooled"], "time_ids": told["numbers"]} if "numbers" in told else None
    return sample_of(
        module(
            joined,
            level_B,
            encoder_hidden_states=told["context"],
            class_labels=told.get("noise_level"),
            added_cond_kwargs=added,
            return_dict=False,
        )
    )


def call_unet_video(module: nn.Module, x_BCTHW: Tensor, level_B: Tensor, told: Told) -> Tensor:
    """Stable Video Diffusion and SV3D: latents of the image ("image"), for one frame or for each, its state
    ("image_context"), and "numbers": frame rate less one, amount of motion and noise on the image, or the last alone;
    SV3D p for each frame the noise, and height and direction of the view.
    `level_B` is a quarter of the logarithm of sigma.
    """
    frames = x_BCTHW.shape[2]
    image = told["image"]
    image_BCTHW = image.unsqueeze(2) if image.dim() == x_BCTHW.dim() - 1 else image
    joined = torch.cat((x_BCTHW, image_BCTHW.expand(-1, -1, frames, -1, -1)), dim=1)
    out_BTCHW = sample_of(
        module(
            joined.transpose(1, 2),
            level_B,
            encoder_hidden_states=told["image_context"],
            added_time_ids=told["numbers"],
            return_dict=False,
        )
    )
    return out_BTCHW.transpose(1, 2)
