"""As `image_calls`, for newer families.

Legend: B batch, C channels, H W cells of a latent, N patches, L tokens of text, D width of a token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from modelpool.pool.models.diffusion.architecture import Told
from modelpool.pool.models.diffusion.image_calls import TIMESTEPS, sample_of
from modelpool.pool.models.diffusion.patchify import packed, patch_ids, text_mask, unpacked

#: words and patches of Qwen-Image 2.1 stand in slots of the language model that reads them: so many patches in one
PATCHES_PER_SLOT = 4


def call_hunyuan_image(module: nn.Module, x: Tensor, level_B: Tensor, told: Told) -> Tensor:
    """Hunyuan Image 2.1: a second encoder has the words in quotation marks; the distilled one is told its next step.

    Its refiner reads latents of video, with the image to refine beside the noisy one.
    """
    config: Any = module.config
    second = {}
    if "context_2" in told:
        second = {
            "encoder_hidden_states_2": told["context_2"],
            "encoder_attention_mask_2": text_mask(told, "context_2"),
        }
    return sample_of(
        module(
            hidden_states=torch.cat((x, told["image"]), dim=1) if "image" in told else x,
            # it computes in the dtype of its time
            timestep=(level_B * TIMESTEPS).to(x.dtype),
            timestep_r=(told["next_level"] * TIMESTEPS).to(x.dtype) if config.use_meanflow else None,
            guidance=(told["guidance"] * TIMESTEPS).to(x.dtype) if config.guidance_embeds else None,
            encoder_hidden_states=told["context"],
            encoder_attention_mask=text_mask(told, "context"),
            **second,
            return_dict=False,
        )
    )


def call_sana(module: nn.Module, x_BCHW: Tensor, level_B: Tensor, told: Told) -> Tensor:
    """Sana."""
    config: Any = module.config
    out = sample_of(
        module(
            hidden_states=x_BCHW,
            encoder_hidden_states=told["context"],
            encoder_attention_mask=text_mask(told, "context"),
            timestep=level_B * TIMESTEPS * config.timestep_scale,
            return_dict=False,
        )
    )
    return out[:, : x_BCHW.shape[1]]


def call_ernie_image(module: nn.Module, x_BCHW: Tensor, level_B: Tensor, told: Told) -> Tensor:
    """Ernie Image: it is told how many words there are, the first ones of its texts."""
    return sample_of(
        module(
            hidden_states=x_BCHW,
            timestep=level_B * TIMESTEPS,
            text_bth=told["context"],
            text_lens=text_mask(told, "context").sum(dim=1),
            return_dict=False,
        )
    )


def call_krea2(module: nn.Module, x: Tensor, level_B: Tensor, told: Told) -> Tensor:
    """Krea 2: it reads several layers of its text encoder. A latent of one frame of video is taken too."""
    x_BCHW = x.squeeze(2) if x.dim() == 5 else x
    context = told["context"]
    places = torch.cat((x_BCHW.new_zeros(context.shape[1], 3, dtype=torch.float32), patch_ids(x_BCHW, 2)))
    out_BND = sample_of(
        module(
            hidden_states=packed(x_BCHW),
            encoder_hidden_states=context,
            timestep=level_B,
            position_ids=places,
            encoder_attention_mask=told.get("context_mask"),
            return_dict=False,
        )
    )
    return unpacked(out_BND, *x_BCHW.shape[-2:]).reshape(x.shape)


def call_qwen_image_21(module: nn.Module, x: Tensor, level_B: Tensor, told: Told) -> Tensor:
    """Qwen-Image 2.1: cells stand in the sequence after the words. A latent of one frame of video is taken too."""
    x_BCHW = x.squeeze(2) if x.dim() == 5 else x
    height, width = x_BCHW.shape[-2:]
    context, cells = told["context"], height * width
    in_slots = torch.arange(context.shape[1] + cells // PATCHES_PER_SLOT, device=context.device) >= context.shape[1]
    out_BND = sample_of(
        module(
            hidden_states=x_BCHW.flatten(2).transpose(1, 2),
            timestep=level_B,
            encoder_hidden_states=context,
            encoder_hidden_states_mask=told.get("context_mask"),
            img_shapes=[[(1, height, width)]] * x.shape[0],
            img_mask=in_slots.expand(x.shape[0], -1),
            return_dict=False,
        )
    )
    return out_BND[:, -cells:].transpose(1, 2).reshape(x.shape)
