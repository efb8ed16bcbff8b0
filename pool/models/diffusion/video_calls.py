"""Call diffusers' video transformers: padding, masks, positions, frame rates, time scale.

Each function is the `call` of a `DiffusionArchitecture` and prepares the inputs as the model's pipeline does. Legend: B
batch, C channels, T H W cells of a latent, N patches, L tokens of text, D width of a token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from modelpool.pool.core.errors import unusable_field
from modelpool.pool.families.parts.forward import TIMESTEPS, ModelKwargs, config_of, sample_of
from modelpool.pool.families.parts.video import frame_rate, towards_image, with_image

#: tokens that Wan reads of every text, padded with zeros. Source: WanPipeline, and the attention of
#: WanTransformer3DModel
WAN_TOKENS = 512
#: images whose vision states Wan's class reads, if it has positions for two
WAN_IMAGES = 2
#: share of noise of kept frames in Predict 2: sigma 0.0001. Source: Cosmos2VideoToWorldPipeline
COSMOS_KEPT_LEVEL = 0.0001 / 1.0001
#: image tokens of HunyuanVideo 1.5, also without an image. Source: HunyuanVideo15Pipeline
HUNYUAN_15_IMAGE_TOKENS = 729


def call_wan(module: nn.Module, x_BCTHW: Tensor, level_B: Tensor, kwargs: ModelKwargs) -> Tensor:
    """Wan 2.1 and 2.2 14B: latents and masks of images ("image") are concatenated along channels."""
    joined = torch.cat((x_BCTHW, kwargs["image"]), dim=1) if "image" in kwargs else x_BCTHW
    return sample_of(
        module(
            hidden_states=joined,
            timestep=level_B * TIMESTEPS,
            encoder_hidden_states=padded_text(kwargs, WAN_TOKENS),
            encoder_hidden_states_image=_images(module, kwargs.get("image_context")),
            return_dict=False,
        )
    )


def call_wan_5b(module: nn.Module, x_BCTHW: Tensor, level_B: Tensor, kwargs: ModelKwargs) -> Tensor:
    """Wan 2.2 5B: with a kept image, each patch has its own level, zero where the image is kept.

    Without an image, the pipeline passes equal levels for all patches: the same result, with gigabytes of embedded
    levels.
    """
    if "image_mask" not in kwargs:
        return call_wan(module, x_BCTHW, level_B, kwargs)
    _, patch_high, patch_wide = config_of(module).patch_size
    kept = kwargs["image_mask"].to(x_BCTHW.dtype)
    levels_BTHW = (1 - kept[:, 0, :, ::patch_high, ::patch_wide]) * (level_B * TIMESTEPS).reshape(-1, 1, 1, 1)
    out = sample_of(
        module(
            hidden_states=with_image(x_BCTHW, kwargs),
            timestep=levels_BTHW.flatten(1),
            encoder_hidden_states=padded_text(kwargs, WAN_TOKENS),
            return_dict=False,
        )
    )
    return towards_image(out, x_BCTHW, level_B, kwargs)


def call_wan_vace(module: nn.Module, x_BCTHW: Tensor, level_B: Tensor, kwargs: ModelKwargs) -> Tensor:
    """Wan VACE: blocks of their own read the latents and masks of the control video ("control")."""
    return sample_of(
        module(
            hidden_states=x_BCTHW,
            timestep=level_B * TIMESTEPS,
            encoder_hidden_states=padded_text(kwargs, WAN_TOKENS),
            control_hidden_states=kwargs["control"],
            return_dict=False,
        )
    )


def _images(module: nn.Module, states_BLD: Tensor | None) -> Tensor | None:
    """Return the states of one image unchanged; those of two along the batch, as the class expects."""
    embedder: Any = module.get_submodule("condition_embedder").image_embedder
    if states_BLD is None or embedder is None or embedder.pos_embed is None:
        return states_BLD if embedder is not None else None
    _, tokens, width = states_BLD.shape
    return states_BLD.reshape(-1, tokens // WAN_IMAGES, width)


def padded_text(kwargs: ModelKwargs, tokens: int) -> Tensor:
    """Return the text states with zeros for padding, padded to `tokens`.

    Raises UnusableField for a longer text.
    """
    context, mask = kwargs["context"], kwargs.get("context_mask")
    if context.shape[1] > tokens:
        raise unusable_field("context", context.shape[1], f"no more than {tokens} tokens")
    real = context if mask is None else torch.where(mask.bool().unsqueeze(-1), context, context.new_zeros(()))
    return F.pad(real, (0, 0, 0, tokens - context.shape[1]))


def mask_of(kwargs: ModelKwargs, name: str = "context") -> Tensor:
    """Return the mask of real tokens of the text `name`, [B,L]; all if no mask is passed."""
    mask = kwargs.get(f"{name}_mask")
    return (
        torch.ones(kwargs[name].shape[:2], dtype=torch.bool, device=kwargs[name].device)
        if mask is None
        else mask.bool()
    )


def call_hunyuan_video(module: nn.Module, x_BCTHW: Tensor, level_B: Tensor, kwargs: ModelKwargs) -> Tensor:
    """HunyuanVideo, SkyReels, and the image-to-video model ("image": image latents and mask)."""
    joined = torch.cat((x_BCTHW, kwargs["image"]), dim=1) if "image" in kwargs else x_BCTHW
    guidance = kwargs.get("guidance")
    return sample_of(
        module(
            hidden_states=joined,
            timestep=level_B * TIMESTEPS,
            encoder_hidden_states=kwargs["context"],
            encoder_attention_mask=mask_of(kwargs).to(kwargs["context"].dtype),
            pooled_projections=kwargs["pooled"],
            # # 16 bits cannot represent the exact number
            guidance=None if guidance is None else guidance.float() * TIMESTEPS,
            return_dict=False,
        )
    )


def call_hunyuan_video_15(module: nn.Module, x_BCTHW: Tensor, level_B: Tensor, kwargs: ModelKwargs) -> Tensor:
    """HunyuanVideo 1.5: latents and mask of an image ("image") and its states ("image_context"), zeros without one."""
    context = kwargs["context"]
    config = config_of(module)
    more = config.in_channels - x_BCTHW.shape[1]
    image = kwargs.get("image", x_BCTHW.new_zeros(1, 1, 1, 1, 1).expand(x_BCTHW.shape[0], more, *x_BCTHW.shape[2:]))
    none = context.new_zeros(context.shape[0], HUNYUAN_15_IMAGE_TOKENS, config.image_embed_dim)
    return sample_of(
        module(
            hidden_states=torch.cat((x_BCTHW, image), dim=1),
            timestep=level_B * TIMESTEPS,
            encoder_hidden_states=context,
            encoder_attention_mask=mask_of(kwargs),
            encoder_hidden_states_2=kwargs["context_2"],
            encoder_attention_mask_2=mask_of(kwargs, "context_2"),
            image_embeds=kwargs.get("image_context", none),
            return_dict=False,
        )
    )


def call_cosmos(module: nn.Module, x_BCTHW: Tensor, level_B: Tensor, kwargs: ModelKwargs) -> Tensor:
    """The first Cosmos. The first-frame image ("image") has the noise and scale that the model expects.

    The module is `pool.models.diffusion.video_modules.CosmosTransformer3DModel`.
    """
    return sample_of(
        module(
            hidden_states=_with_masks(module, with_image(x_BCTHW, kwargs), kwargs),
            timestep=level_B,
            encoder_hidden_states=kwargs["context"],
            fps=frame_rate(kwargs),
            return_dict=False,
        )
    )


def call_cosmos_predict_2(module: nn.Module, x_BCTHW: Tensor, level_B: Tensor, kwargs: ModelKwargs) -> Tensor:
    """Cosmos Predict 2, a flow: first-frame cells ("image") have almost no noise. An image latent is accepted as one
    frame."""
    if x_BCTHW.dim() == 4:
        return call_cosmos_predict_2(module, x_BCTHW.unsqueeze(2), level_B, kwargs).squeeze(2)
    timestep = level_B
    if _goes_on(module):
        timestep = level_B.reshape(-1, 1, 1, 1, 1).expand(-1, 1, x_BCTHW.shape[2], 1, 1)
        if "image_mask" in kwargs:
            kept = kwargs["image_mask"][..., :1, :1].to(timestep.dtype)
            timestep = kept * COSMOS_KEPT_LEVEL + (1 - kept) * timestep
    out = sample_of(
        module(
            hidden_states=_with_masks(module, with_image(x_BCTHW, kwargs), kwargs),
            timestep=timestep,
            encoder_hidden_states=kwargs["context"],
            fps=frame_rate(kwargs) if "frame_rate" in kwargs else None,
            return_dict=False,
        )
    )
    return towards_image(out, x_BCTHW, level_B, kwargs)


def _goes_on(module: nn.Module) -> bool:
    """Return whether the model reads a channel that marks kept frames, in addition to the padding channel."""
    config = config_of(module)
    return bool(config.in_channels - config.out_channels > 1)


def _with_masks(module: nn.Module, x_BCTHW: Tensor, kwargs: ModelKwargs) -> Tensor:
    """Return the latent, the channel of kept frames if the model reads it, and the padding channel, all zeros."""
    nothing = torch.zeros_like(x_BCTHW[:, :1])
    if not _goes_on(module):
        return torch.cat((x_BCTHW, nothing), dim=1)
    return torch.cat((x_BCTHW, kwargs["image_mask"].to(x_BCTHW) if "image_mask" in kwargs else nothing, nothing), dim=1)
