"""How diffusers' transformers for images are called: patches, positions, scale of time, sign of what comes out.

Each function is the `call` of an `Architecture` and does to its inputs what the pipeline of the model does.
Legend: B batch, C channels, H W cells of a latent, N patches, L tokens of text, D width of a token.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.embeddings import get_2d_rotary_pos_embed
from torch import Tensor, nn

from modelpool.pool.models.diffusion.architecture import Told
from modelpool.pool.models.diffusion.patchify import packed, patch_ids, text_mask, unpacked

#: flow models are told their sigma as a timestep of so many
TIMESTEPS = 1000
#: the first coordinate of an image to work from, where that of the image which is made is 0
FLUX_REFERENCE, FLUX_2_REFERENCE = 1, 10
#: pixels along a side of a cell of the latents of models that are told the size of their image
PIXELS_PER_CELL = 8
#: the size of the images that HunyuanDiT is told that it was made of, and cells along a side of its positions
HUNYUAN_DIT_PIXELS, HUNYUAN_DIT_CELLS = 1024, 64


def call_sd3(module: nn.Module, x_BCHW: Tensor, level_B: Tensor, told: Told) -> Tensor:
    """Stable Diffusion 3 and 3.5."""
    return sample_of(
        module(
            hidden_states=x_BCHW,
            timestep=level_B * TIMESTEPS,
            encoder_hidden_states=told["context"],
            pooled_projections=told["pooled"],
            return_dict=False,
        )
    )


def call_flux(module: nn.Module, x_BCHW: Tensor, level_B: Tensor, told: Told) -> Tensor:
    """Flux, its fill and control models, which read more channels than they give, and those that edit an image."""
    joined = torch.cat((x_BCHW, told["image"]), dim=1) if "image" in told else x_BCHW
    rows, ids = _flux_patches(joined, told)
    context = told["context"]
    out_BND = sample_of(
        module(
            hidden_states=rows,
            timestep=level_B,
            guidance=_guidance(module, told),
            pooled_projections=told["pooled"],
            encoder_hidden_states=context,
            txt_ids=context.new_zeros(context.shape[1], 3),
            img_ids=ids,
            return_dict=False,
        )
    )
    return unpacked(out_BND, *x_BCHW.shape[-2:])


def _flux_patches(x_BCHW: Tensor, told: Told) -> tuple[Tensor, Tensor]:
    """The rows that Flux reads, and their positions."""
    rows, ids = packed(x_BCHW), patch_ids(x_BCHW, 2)
    if "reference" in told:
        rows = torch.cat((rows, packed(told["reference"])), dim=1)
        ids = torch.cat((ids, patch_ids(told["reference"], 2, first=FLUX_REFERENCE)))
    return rows, ids


def _references(told: Told) -> list[Tensor]:
    """The images to work from, in order: "reference", "reference_2" and so on."""
    return [told[name] for name in sorted(name for name in told if name.startswith("reference"))]


def _guidance(module: Any, told: Told) -> Tensor | None:
    """The strength of guidance, for models that read it."""
    return told["guidance"] if module.config.guidance_embeds else None


def call_flux2(module: nn.Module, x_BCHW: Tensor, level_B: Tensor, told: Told) -> Tensor:
    """Flux 2: the cells of its latents are patches already; words have a coordinate of their own."""
    context, cells = told["context"], x_BCHW.shape[-2] * x_BCHW.shape[-1]
    rows, ids = x_BCHW.flatten(2).transpose(1, 2), patch_ids(x_BCHW, 1)
    for number, reference in enumerate(_references(told), start=1):
        rows = torch.cat((rows, reference.flatten(2).transpose(1, 2)), dim=1)
        ids = torch.cat((ids, patch_ids(reference, 1, first=number * FLUX_2_REFERENCE)))
    words = torch.arange(context.shape[1], device=context.device, dtype=ids.dtype)
    out_BND = sample_of(
        module(
            hidden_states=rows,
            timestep=level_B,
            guidance=_guidance(module, told),
            encoder_hidden_states=context,
            txt_ids=nn.functional.pad(words[:, None], (3, 0)),
            img_ids=nn.functional.pad(ids, (0, 1)),
            return_dict=False,
        )
    )
    return out_BND[:, :cells].transpose(1, 2).reshape(x_BCHW.shape)


def call_chroma(module: nn.Module, x_BCHW: Tensor, level_B: Tensor, told: Told) -> Tensor:
    """Chroma. The mask hides words, as the model was trained to have it; diffusers' pipeline makes numbers of it, which
    attention adds, so that it hides none.
    """
    context, rows = told["context"], packed(x_BCHW)
    mask = told.get("context_mask")
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


def call_qwen_image(module: nn.Module, x: Tensor, level_B: Tensor, told: Told) -> Tensor:
    """Qwen-Image, its editing models, which work from images, and the one that takes an image apart into layers.

    Layers are frames of video: the whole image first. A latent of one frame is taken for an image too.
    """
    config: Any = module.config
    frames = list(x.unbind(2)) if x.dim() == 5 else [x]
    rows = torch.cat([packed(frame) for frame in frames], dim=1)
    cells, shapes = rows.shape[1], [_patches(frame) for frame in frames]
    for told_so in _references(told):
        reference = told_so.squeeze(2) if told_so.dim() == 5 else told_so
        rows, shapes = torch.cat((rows, packed(reference)), dim=1), [*shapes, _patches(reference)]
    if config.use_layer3d_rope and "reference" not in told:
        raise KeyError("reference")  # its table of positions takes the last image for the one that is taken apart
    out_BND = sample_of(
        module(
            hidden_states=rows,
            timestep=level_B,
            encoder_hidden_states=told["context"],
            encoder_hidden_states_mask=told.get("context_mask"),
            img_shapes=[shapes] * x.shape[0],
            # whether the image has no transparency, which the pipeline never says
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


def call_z_image(module: nn.Module, x_BCHW: Tensor, level_B: Tensor, told: Told) -> Tensor:
    """Z-Image: time runs from noise to image, and so does what comes out; texts have lengths of their own."""
    context, mask = told["context"], told.get("context_mask")
    texts = list(context) if mask is None else [text[real] for text, real in zip(context, mask, strict=True)]
    out = module(list(x_BCHW.unsqueeze(2)), 1 - level_B, texts, return_dict=False)[0]
    return -torch.stack(list(out)).squeeze(2)


def call_lumina2(module: nn.Module, x_BCHW: Tensor, level_B: Tensor, told: Told) -> Tensor:
    """Lumina 2: time runs from noise to image, and so does what comes out."""
    return -sample_of(
        module(
            hidden_states=x_BCHW,
            timestep=1 - level_B,
            encoder_hidden_states=told["context"],
            encoder_attention_mask=text_mask(told, "context"),
            return_dict=False,
        )
    )


def call_aura_flow(module: nn.Module, x_BCHW: Tensor, level_B: Tensor, told: Told) -> Tensor:
    """AuraFlow: words that are not there are zeros."""
    context, mask = told["context"], told.get("context_mask")
    return sample_of(
        module(
            hidden_states=x_BCHW,
            encoder_hidden_states=context if mask is None else context * mask[..., None],
            timestep=level_B,
            return_dict=False,
        )
    )


def call_pixart(module: nn.Module, x_BCHW: Tensor, level_B: Tensor, told: Told) -> Tensor:
    """PixArt, which may say how sure it is beside what the noise is; alpha is told its image's size and ratio."""
    config: Any = module.config
    conditions: dict[str, Tensor | None] = {"resolution": None, "aspect_ratio": None}
    if config.use_additional_conditions:
        size = _size(x_BCHW, told)
        conditions = {"resolution": size, "aspect_ratio": size[:, :1] / size[:, 1:]}
    out = sample_of(
        module(
            hidden_states=x_BCHW,
            encoder_hidden_states=told["context"],
            encoder_attention_mask=text_mask(told, "context"),
            timestep=level_B,
            added_cond_kwargs=conditions,
            return_dict=False,
        )
    )
    return out[:, : x_BCHW.shape[1]]


def call_hunyuan_dit(module: nn.Module, x_BCHW: Tensor, level_B: Tensor, told: Told) -> Tensor:
    """HunyuanDiT: it says how sure it is beside what the noise is, and is told sizes and one style."""
    beside = hunyuan_dit_told(module, x_BCHW, told)
    # it computes in the dtype of its time
    out = sample_of(module(x_BCHW, level_B.to(x_BCHW.dtype), **beside, return_dict=False))
    return out[:, : x_BCHW.shape[1]]


def hunyuan_dit_told(module: nn.Module, x_BCHW: Tensor, told: Told) -> dict[str, Any]:
    """What HunyuanDiT is told beside latents and time, and so are its ControlNets, by the names of their arguments."""
    config: Any = module.config
    height, width = (side // config.patch_size for side in x_BCHW.shape[-2:])
    size = _size(x_BCHW, told)
    made_of = size.new_full(size.shape, HUNYUAN_DIT_PIXELS)
    return {
        "encoder_hidden_states": told["context"],
        "text_embedding_mask": text_mask(told, "context"),
        "encoder_hidden_states_t5": told["context_2"],
        "text_embedding_mask_t5": text_mask(told, "context_2"),
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
    """Where an image of these sides lies in the square grid of positions that it just fits into: two corners."""
    scale = side / max(height, width)
    rows, columns = round(scale * height), round(scale * width)
    top, left = round((side - rows) / 2), round((side - columns) / 2)
    return (top, left), (top + rows, left + columns)


def _size(x_BCHW: Tensor, told: Told) -> Tensor:
    """Height and width in pixels of the image that is made, [B,2], as the model is told them."""
    if "size" in told:
        return told["size"].to(x_BCHW.dtype)
    pixels = [side * PIXELS_PER_CELL for side in x_BCHW.shape[-2:]]
    return torch.tensor(pixels, device=x_BCHW.device, dtype=x_BCHW.dtype).expand(x_BCHW.shape[0], 2)


def call_hidream(module: nn.Module, x_BCHW: Tensor, level_B: Tensor, told: Told) -> Tensor:
    """HiDream: what comes out runs from noise to image; it reads every layer of its second text encoder."""
    return -sample_of(
        module(
            hidden_states=x_BCHW,
            timesteps=level_B * TIMESTEPS,
            encoder_hidden_states_t5=told["context"],
            encoder_hidden_states_llama3=told["context_2"].transpose(0, 1),
            pooled_embeds=told["pooled"],
            return_dict=False,
        )
    )


def sample_of(result: Any) -> Tensor:
    """The one tensor that a module of diffusers gives."""
    sample: Tensor = result[0]
    return sample
