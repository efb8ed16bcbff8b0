"""Call diffusers' image transformers: patches, positions, time scale, sign of the output.

Each function is the `call` of a `DiffusionArchitecture` and prepares the inputs as the model's pipeline does. Legend: B
batch, C channels, H W cells of a latent, N patches, L tokens of text, D width of a token.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.embeddings import get_2d_rotary_pos_embed
from torch import Tensor, nn

from modelpool.pool.families.parts.forward import TIMESTEPS, ModelKwargs, sample_of
from modelpool.pool.families.parts.patches import packed, patch_ids, text_mask, unpacked

#: first position coordinate of a reference image; that of the output is 0
FLUX_REFERENCE, FLUX_2_REFERENCE = 1, 10
#: pixels along a side of a latent cell, for models with image size conditioning
PIXELS_PER_CELL = 8
#: original image size passed to HunyuanDiT, and cells along a side of its positions
HUNYUAN_DIT_PIXELS, HUNYUAN_DIT_CELLS = 1024, 64


def call_sd3(module: nn.Module, x_BCHW: Tensor, level_B: Tensor, kwargs: ModelKwargs) -> Tensor:
    """Stable Diffusion 3 and 3.5."""
    return sample_of(
        module(
            hidden_states=x_BCHW,
            timestep=level_B * TIMESTEPS,
            encoder_hidden_states=kwargs["context"],
            pooled_projections=kwargs["pooled"],
            return_dict=False,
        )
    )


def call_flux(module: nn.Module, x_BCHW: Tensor, level_B: Tensor, kwargs: ModelKwargs) -> Tensor:
    """Flux, its fill and control models (more input than output channels), and its editing models."""
    joined = torch.cat((x_BCHW, kwargs["image"]), dim=1) if "image" in kwargs else x_BCHW
    rows, ids = _flux_patches(joined, kwargs)
    context = kwargs["context"]
    out_BND = sample_of(
        module(
            hidden_states=rows,
            timestep=level_B,
            guidance=_guidance(module, kwargs),
            pooled_projections=kwargs["pooled"],
            encoder_hidden_states=context,
            txt_ids=context.new_zeros(context.shape[1], 3),
            img_ids=ids,
            return_dict=False,
        )
    )
    return unpacked(out_BND, *x_BCHW.shape[-2:])


def _flux_patches(x_BCHW: Tensor, kwargs: ModelKwargs) -> tuple[Tensor, Tensor]:
    """Return the rows that Flux reads, and their positions."""
    rows, ids = packed(x_BCHW), patch_ids(x_BCHW, 2)
    if "reference" in kwargs:
        rows = torch.cat((rows, packed(kwargs["reference"])), dim=1)
        ids = torch.cat((ids, patch_ids(kwargs["reference"], 2, first=FLUX_REFERENCE)))
    return rows, ids


def _references(kwargs: ModelKwargs) -> list[Tensor]:
    """Return the reference images in order: "reference", "reference_2" and so on."""
    return [kwargs[name] for name in sorted(name for name in kwargs if name.startswith("reference"))]


def _guidance(module: Any, kwargs: ModelKwargs) -> Tensor | None:
    """Return the guidance scale, for models that read it."""
    return kwargs["guidance"] if module.config.guidance_embeds else None


def call_flux2(module: nn.Module, x_BCHW: Tensor, level_B: Tensor, kwargs: ModelKwargs) -> Tensor:
    """Flux 2: each cell of its latents is a patch; words have a coordinate of their own."""
    context, cells = kwargs["context"], x_BCHW.shape[-2] * x_BCHW.shape[-1]
    rows, ids = x_BCHW.flatten(2).transpose(1, 2), patch_ids(x_BCHW, 1)
    for number, reference in enumerate(_references(kwargs), start=1):
        rows = torch.cat((rows, reference.flatten(2).transpose(1, 2)), dim=1)
        ids = torch.cat((ids, patch_ids(reference, 1, first=number * FLUX_2_REFERENCE)))
    words = torch.arange(context.shape[1], device=context.device, dtype=ids.dtype)
    out_BND = sample_of(
        module(
            hidden_states=rows,
            timestep=level_B,
            guidance=_guidance(module, kwargs),
            encoder_hidden_states=context,
            txt_ids=nn.functional.pad(words[:, None], (3, 0)),
            img_ids=nn.functional.pad(ids, (0, 1)),
            return_dict=False,
        )
    )
    return out_BND[:, :cells].transpose(1, 2).reshape(x_BCHW.shape)


def call_chroma(module: nn.Module, x_BCHW: Tensor, level_B: Tensor, kwargs: ModelKwargs) -> Tensor:
    """Chroma. The mask hides words, as in training; diffusers' pipeline converts it to floats that attention adds, so
    that it hides none."""
    context, rows = kwargs["context"], packed(x_BCHW)
    mask = kwargs.get("context_mask")
    if mask is not None:
        mask = torch.cat((mask, mask.new_ones(rows.shape[:2])), dim=1)
    out_BND = sample_of(
        module(
            hidden_states=rows,
            timestep=level_B,
            encoder_hidden_states=context,
            txt_ids=context.new_zeros(context.shape[1], 3),
            img_ids=patch_ids(x_BCHW, 2),
            attention_mask=mask,
            return_dict=False,
        )
    )
    return unpacked(out_BND, *x_BCHW.shape[-2:])


def call_qwen_image(module: nn.Module, x: Tensor, level_B: Tensor, kwargs: ModelKwargs) -> Tensor:
    """Qwen-Image, its editing models (reference images), and the model that splits an image into layers.

    Layers are frames of a video, the complete image first. A latent of one frame is accepted as an image.
    """
    config: Any = module.config
    frames = list(x.unbind(2)) if x.dim() == 5 else [x]
    rows = torch.cat([packed(frame) for frame in frames], dim=1)
    cells, shapes = rows.shape[1], [_patches(frame) for frame in frames]
    for told_so in _references(kwargs):
        reference = told_so.squeeze(2) if told_so.dim() == 5 else told_so
        rows, shapes = torch.cat((rows, packed(reference)), dim=1), [*shapes, _patches(reference)]
    if config.use_layer3d_rope and "reference" not in kwargs:
        raise KeyError("reference")  # its position table treats the last image as the one to split
    out_BND = sample_of(
        module(
            hidden_states=rows,
            timestep=level_B,
            encoder_hidden_states=kwargs["context"],
            encoder_hidden_states_mask=kwargs.get("context_mask"),
            img_shapes=[shapes] * x.shape[0],
            # # whether the image has no transparency, which the pipeline never sets
            additional_t_cond=_zeros(x) if config.use_additional_t_cond else None,
            return_dict=False,
        )
    )
    parts = out_BND[:, :cells].chunk(len(frames), dim=1)
    return torch.stack([unpacked(part, *x.shape[-2:]) for part in parts], dim=2).reshape(x.shape)


def _zeros(x: Tensor) -> Tensor:
    return torch.zeros(x.shape[0], dtype=torch.long, device=x.device)


def _patches(x_BCHW: Tensor) -> tuple[int, int, int]:
    return 1, x_BCHW.shape[-2] // 2, x_BCHW.shape[-1] // 2


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


def call_hidream(module: nn.Module, x_BCHW: Tensor, level_B: Tensor, kwargs: ModelKwargs) -> Tensor:
    """HiDream: the output runs from noise to image; reads every layer of its second text encoder."""
    return -sample_of(
        module(
            hidden_states=x_BCHW,
            timesteps=level_B * TIMESTEPS,
            encoder_hidden_states_t5=kwargs["context"],
            encoder_hidden_states_llama3=kwargs["context_2"].transpose(0, 1),
            pooled_embeds=kwargs["pooled"],
            return_dict=False,
        )
    )
