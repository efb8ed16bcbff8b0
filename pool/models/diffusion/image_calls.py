"""Call diffusers' image transformers that have no module in `pool.families.modules`; see `DiffusionArchitecture`.

Legend: B batch, C channels, H W cells of a latent, N patches, L tokens of text, D width of a token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from modelpool.pool.families.parts.forward import TIMESTEPS, ModelKwargs, sample_of
from modelpool.pool.families.parts.patches import packed, patch_ids, text_mask, unpacked

#: patches of Qwen-Image 2.1 per slot of the language model that reads words and patches
PATCHES_PER_SLOT = 4


def call_sana(module: nn.Module, x_BCHW: Tensor, level_B: Tensor, kwargs: ModelKwargs) -> Tensor:
    """Sana."""
    config: Any = module.config
    out = sample_of(
        module(
            hidden_states=x_BCHW,
            encoder_hidden_states=kwargs["context"],
            encoder_attention_mask=text_mask(kwargs, "context"),
            timestep=level_B * TIMESTEPS * config.timestep_scale,
            return_dict=False,
        )
    )
    return out[:, : x_BCHW.shape[1]]


def call_ernie_image(module: nn.Module, x_BCHW: Tensor, level_B: Tensor, kwargs: ModelKwargs) -> Tensor:
    """Ernie Image: reads the number of words, which come first in the text states."""
    return sample_of(
        module(
            hidden_states=x_BCHW,
            timestep=level_B * TIMESTEPS,
            text_bth=kwargs["context"],
            text_lens=text_mask(kwargs, "context").sum(dim=1),
            return_dict=False,
        )
    )


def call_krea2(module: nn.Module, x: Tensor, level_B: Tensor, kwargs: ModelKwargs) -> Tensor:
    """Krea 2: reads several layers of its text encoder. A latent of one video frame is accepted."""
    x_BCHW = x.squeeze(2) if x.dim() == 5 else x
    context = kwargs["context"]
    places = torch.cat((x_BCHW.new_zeros(context.shape[1], 3, dtype=torch.float32), patch_ids(x_BCHW, 2)))
    out_BND = sample_of(
        module(
            hidden_states=packed(x_BCHW),
            encoder_hidden_states=context,
            timestep=level_B,
            position_ids=places,
            encoder_attention_mask=kwargs.get("context_mask"),
            return_dict=False,
        )
    )
    return unpacked(out_BND, *x_BCHW.shape[-2:]).reshape(x.shape)


def call_qwen_image_21(module: nn.Module, x: Tensor, level_B: Tensor, kwargs: ModelKwargs) -> Tensor:
    """Qwen-Image 2.1: cells follow the words in the sequence. A latent of one video frame is accepted."""
    x_BCHW = x.squeeze(2) if x.dim() == 5 else x
    height, width = x_BCHW.shape[-2:]
    context, cells = kwargs["context"], height * width
    in_slots = torch.arange(context.shape[1] + cells // PATCHES_PER_SLOT, device=context.device) >= context.shape[1]
    out_BND = sample_of(
        module(
            hidden_states=x_BCHW.flatten(2).transpose(1, 2),
            timestep=level_B,
            encoder_hidden_states=context,
            encoder_hidden_states_mask=kwargs.get("context_mask"),
            img_shapes=[[(1, height, width)]] * x.shape[0],
            img_mask=in_slots.expand(x.shape[0], -1),
            return_dict=False,
        )
    )
    return out_BND[:, -cells:].transpose(1, 2).reshape(x.shape)
