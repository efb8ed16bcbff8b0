"""Call diffusers' image transformers: patches, positions, time scale, sign of the output.

Each function is the `call` of a `DiffusionArchitecture` and prepares the inputs as the model's pipeline does. Legend: B
batch, C channels, H W cells of a latent, N patches, L tokens of text, D width of a token.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.embeddings import get_2d_rotary_pos_embed
from torch import Tensor, nn

from modelpool.pool.families.parts.forward import ModelKwargs, sample_of
from modelpool.pool.families.parts.patches import text_mask

#: pixels along a side of a latent cell, for models with image size conditioning
PIXELS_PER_CELL = 8
#: original image size passed to HunyuanDiT, and cells along a side of its positions
HUNYUAN_DIT_PIXELS, HUNYUAN_DIT_CELLS = 1024, 64


def _zeros(x: Tensor) -> Tensor:
    return torch.zeros(x.shape[0], dtype=torch.long, device=x.device)


def call_pixart(module: nn.Module, x_BCHW: Tensor, level_B: Tensor, kwargs: ModelKwargs) -> Tensor:
    """PixArt: drops the predicted variance; alpha reads the image's size and aspect ratio."""
    config: Any = module.config
    conditions: dict[str, Tensor | None] = {"resolution": None, "aspect_ratio": None}
    if config.use_additional_conditions:
        size = _size(x_BCHW, kwargs)
        conditions = {"resolution": size, "aspect_ratio": size[:, :1] / size[:, 1:]}
    out = sample_of(
        module(
            hidden_states=x_BCHW,
            encoder_hidden_states=kwargs["context"],
            encoder_attention_mask=text_mask(kwargs, "context"),
            timestep=level_B,
            added_cond_kwargs=conditions,
            return_dict=False,
        )
    )
    return out[:, : x_BCHW.shape[1]]


def call_hunyuan_dit(module: nn.Module, x_BCHW: Tensor, level_B: Tensor, kwargs: ModelKwargs) -> Tensor:
    """HunyuanDiT: drops the predicted variance; reads sizes and a style."""
    extra = hunyuan_dit_kwargs(module, x_BCHW, kwargs)
    # # it computes in the dtype of the timestep
    out = sample_of(module(x_BCHW, level_B.to(x_BCHW.dtype), **extra, return_dict=False))
    return out[:, : x_BCHW.shape[1]]


def hunyuan_dit_kwargs(module: nn.Module, x_BCHW: Tensor, kwargs: ModelKwargs) -> dict[str, Any]:
    """Return the inputs of HunyuanDiT and its ControlNets other than latent and time, by argument name."""
    config: Any = module.config
    height, width = (side // config.patch_size for side in x_BCHW.shape[-2:])
    size = _size(x_BCHW, kwargs)
    made_of = size.new_full(size.shape, HUNYUAN_DIT_PIXELS)
    return {
        "encoder_hidden_states": kwargs["context"],
        "text_embedding_mask": text_mask(kwargs, "context"),
        "encoder_hidden_states_t5": kwargs["context_2"],
        "text_embedding_mask_t5": text_mask(kwargs, "context_2"),
        "image_meta_size": torch.cat((made_of, size, torch.zeros_like(size)), dim=1),
        "style": _zeros(x_BCHW),
        "image_rotary_emb": get_2d_rotary_pos_embed(
            config.attention_head_dim,
            _middle_of_grid(height, width, HUNYUAN_DIT_CELLS // config.patch_size),
            (height, width),
            device=x_BCHW.device,
            output_type="pt",
        ),
    }


def _middle_of_grid(height: int, width: int, side: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the corners of an image of these sides, centred in the smallest square position grid that holds it."""
    scale = side / max(height, width)
    rows, columns = round(scale * height), round(scale * width)
    top, left = round((side - rows) / 2), round((side - columns) / 2)
    return (top, left), (top + rows, left + columns)


def _size(x_BCHW: Tensor, kwargs: ModelKwargs) -> Tensor:
    """Return height and width of the output in pixels, [B,2]."""
    if "size" in kwargs:
        return kwargs["size"].to(x_BCHW.dtype)
    pixels = [side * PIXELS_PER_CELL for side in x_BCHW.shape[-2:]]
    return torch.tensor(pixels, device=x_BCHW.device, dtype=x_BCHW.dtype).expand(x_BCHW.shape[0], 2)
