"""The inputs that HunyuanDiT and its ControlNets share. Torch-free to import."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from modelpool.pool.families.parts.forward import ModelKwargs, config_of
from modelpool.pool.families.parts.patches import output_size, text_mask

if TYPE_CHECKING:
    from torch import Tensor, nn

#: tokens that it reads of its first text encoder; the rest of its padding embeddings is for the second
TOKENS = 77
#: original image size that it reads, and cells along a side of its positions
_PIXELS, _CELLS = 1024, 64


def module_kwargs(module: nn.Module, x_BCHW: Tensor, kwargs: ModelKwargs) -> dict[str, Any]:
    """Return the inputs of HunyuanDiT and its ControlNets other than latent and time, by argument name."""
    import torch
    from diffusers.models.embeddings import get_2d_rotary_pos_embed

    config = config_of(module)
    height, width = (side // config.patch_size for side in x_BCHW.shape[-2:])
    size = output_size(x_BCHW, kwargs)
    original_size = size.new_full(size.shape, _PIXELS)
    return {
        "encoder_hidden_states": kwargs["context"],
        "text_embedding_mask": text_mask(kwargs, "context"),
        "encoder_hidden_states_t5": kwargs["context_2"],
        "text_embedding_mask_t5": text_mask(kwargs, "context_2"),
        "image_meta_size": torch.cat((original_size, size, torch.zeros_like(size)), dim=1),
        "style": x_BCHW.new_zeros(x_BCHW.shape[0], dtype=torch.long),
        "image_rotary_emb": get_2d_rotary_pos_embed(
            config.attention_head_dim,
            _middle_of_grid(height, width, _CELLS // config.patch_size),
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
