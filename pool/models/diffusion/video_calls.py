"""How diffusers' transformers for video are called: padding, masks, positions, frame rates, the scale of time.

Each function is the `call` of an `Architecture` and does to its inputs what the pipeline of the model does.
Legend: B batch, C channels, T H W cells of a latent, N patches, L tokens of text, D width of a token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from modelpool.pool.core.errors import unusable_field
from modelpool.pool.models.diffusion.architecture import Told
from modelpool.pool.models.diffusion.image_calls import TIMESTEPS, sample_of

#: tokens that Wan reads of every text, the rest zeros. Source: WanPipeline, and the attention of WanTransformer3DModel
WAN_TOKENS = 512
#: states of the vision encoder for one image, of which Wan's class reads two where it has places for two
WAN_IMAGES = 2
#: frames, height and width of what one latent cell of LTX-Video stands for. Source: LTXPipeline
LTX_CELL = (8, 32, 32)
#: the share of noise that Predict 2 is told of kept frames: sigma 0.0001. Source: Cosmos2VideoToWorldPipeline
COSMOS_KEPT_LEVEL = 0.0001 / 1.0001
#: tokens that stand for an image, and for none, in HunyuanVideo 1.5. Source: HunyuanVideo15Pipeline
HUNYUAN_15_IMAGE_TOKENS = 729


def config_of(module: nn.Module) -> Any:
    """The arguments that a module of diffusers was built with."""
    return module.config


def call_wan(module: nn.Module, x_BCTHW: Tensor, level_B: Tensor, told: Told) -> Tensor:
    """Wan 2.1 and 2.2 of 14B: latents and masks of images ("image") are joined to the channels."""
    joined = torch.cat((x_BCTHW, told["image"]), dim=1) if "image" in told else x_BCTHW
    return sample_of(
        module(
            hidden_states=joined,
            timestep=level_B * TIMESTEPS,
            encoder_hidden_states=padded_text(told, WAN_TOKENS),
            encoder_hidden_states_image=_images(module, told.get("image_context")),
            return_dict=False,
        )
    )


def call_wan_5b(module: nn.Module, x_BCTHW: Tensor, level_B: Tensor, told: Told) -> Tensor:
    """Wan 2.2 of 5B, which is told a level for each patch where an image is kept, and none there.

    The pipeline does so without an image too, with all levels alike: the same, with gigabytes of embedded levels.
    """
    if "image_mask" not in told:
        return call_wan(module, x_BCTHW, level_B, told)
    _, patch_high, patch_wide = config_of(module).patch_size
    kept = told["image_mask"].to(x_BCTHW.dtype)
    levels_BTHW = (1 - kept[:, 0, :, ::patch_high, ::patch_wide]) * (level_B * TIMESTEPS).reshape(-1, 1, 1, 1)
    out = sample_of(
        module(
            hidden_states=with_image(x_BCTHW, told),
            timestep=levels_BTHW.flatten(1),
            encoder_hidden_states=padded_text(told, WAN_TOKENS),
            return_dict=False,
        )
    )
    return towards_image(out, x_BCTHW, level_B, told)


def call_wan_vace(module: nn.Module, x_BCTHW: Tensor, level_B: Tensor, told: Told) -> Tensor:
    """Wan VACE: the latents and masks of the video to follow ("control") go through blocks of their own."""
    return sample_of(
        module(
            hidden_states=x_BCTHW,
            timestep=level_B * TIMESTEPS,
            encoder_hidden_states=padded_text(told, WAN_TOKENS),
            control_hidden_states=told["control"],
            return_dict=False,
        )
    )


def with_image(x_BCTHW: Tensor, told: Told) -> Tensor:
    """The latent with the image ("image") where one is kept ("image_mask")."""
    return torch.where(told["image_mask"].bool(), told["image"], x_BCTHW) if "image_mask" in told else x_BCTHW


def towards_image(predicted: Tensor, x_BCTHW: Tensor, level_B: Tensor, told: Told) -> Tensor:
    """The prediction of a flow, and where an image is kept the one whose clean latent is the image."""
    if "image_mask" not in told:
        return predicted
    level = level_B.reshape(-1, *[1] * (x_BCTHW.dim() - 1))
    leading = ((x_BCTHW - told["image"]) / level).to(predicted.dtype)
    return torch.where(told["image_mask"].bool(), leading, predicted)


def frame_rate(told: Told) -> float:
    """Frames a second, the same for all of a batch."""
    return float(told["frame_rate"].flatten()[0])


def _images(module: nn.Module, states_BLD: Tensor | None) -> Tensor | None:
    """States of one image as they are; of two, one after the other in the batch, where the class joins them."""
    embedder: Any = module.get_submodule("condition_embedder").image_embedder
    if states_BLD is None or embedder is None or embedder.pos_embed is None:
        return states_BLD if embedder is not None else None
    _, tokens, width = states_BLD.shape
    return states_BLD.reshape(-1, tokens // WAN_IMAGES, width)


def padded_text(told: Told, tokens: int) -> Tensor:
    """The states of the text with zeros in place of padding, and after it up to `tokens`.

    Raises UnusableField for a longer text.
    """
    context, mask = told["context"], told.get("context_mask")
    if context.shape[1] > tokens:
        raise unusable_field("context", context.shape[1], f"no more than {tokens} tokens")
    real = context if mask is None else torch.where(mask.bool().unsqueeze(-1), context, context.new_zeros(()))
    return F.pad(real, (0, 0, 0, tokens - context.shape[1]))


def mask_of(told: Told, name: str = "context") -> Tensor:
    """Which tokens of the text `name` are real, [B,L]; all where nothing else is told."""
    mask = told.get(f"{name}_mask")
    return torch.ones(told[name].shape[:2], dtype=torch.bool, device=told[name].device) if mask is None else mask.bool()


def call_hunyuan_video(module: nn.Module, x_BCTHW: Tensor, level_B: Tensor, told: Told) -> Tensor:
    """HunyuanVideo, SkyReels, and the model that goes on from an image ("image": its latents, and its mask)."""
    joined = torch.cat((x_BCTHW, told["image"]), dim=1) if "image" in told else x_BCTHW
    guidance = told.get("guidance")
    return sample_of(
        module(
            hidden_states=joined,
            timestep=level_B * TIMESTEPS,
            encoder_hidden_states=told["context"],
            encoder_attention_mask=mask_of(told).to(told["context"].dtype),
            pooled_projections=told["pooled"],
            # 16 bits do not hold so large a number with its last digits
            guidance=None if guidance is None else guidance.float() * TIMESTEPS,
            return_dict=False,
        )
    )


def call_hunyuan_video_15(module: nn.Module, x_BCTHW: Tensor, level_B: Tensor, told: Told) -> Tensor:
    """HunyuanVideo 1.5: latents and mask of an image ("image") and its states ("image_context"), zeros without one."""
    context = told["context"]
    config = config_of(module)
    more = config.in_channels - x_BCTHW.shape[1]
    image = told.get("image", x_BCTHW.new_zeros(1, 1, 1, 1, 1).expand(x_BCTHW.shape[0], more, *x_BCTHW.shape[2:]))
    none = context.new_zeros(context.shape[0], HUNYUAN_15_IMAGE_TOKENS, config.image_embed_dim)
    return sample_of(
        module(
            hidden_states=torch.cat((x_BCTHW, image), dim=1),
            timestep=level_B * TIMESTEPS,
            encoder_hidden_states=context,
            encoder_attention_mask=mask_of(told),
            encoder_hidden_states_2=told["context_2"],
            encoder_attention_mask_2=mask_of(told, "context_2"),
            image_embeds=told.get("image_context", none),
            return_dict=False,
        )
    )


def call_ltx(module: nn.Module, x_BCTHW: Tensor, level_B: Tensor, told: Told) -> Tensor:
    """LTX-Video: each cell is a patch, and where it stands in time depends on the frame rate."""
    _, _, frames, height, width = x_BCTHW.shape
    causal = config_of(module).get("causal_temporal_positioning", False)
    timestep = level_B * TIMESTEPS
    if "image_mask" in told:
        timestep = timestep.unsqueeze(-1) * (1 - told["image_mask"].to(timestep.dtype)[:, 0].flatten(1))
    out_BNC = sample_of(
        module(
            hidden_states=with_image(x_BCTHW, told).flatten(2).transpose(1, 2),
            encoder_hidden_states=told["context"],
            timestep=timestep,
            encoder_attention_mask=mask_of(told),
            num_frames=frames,
            height=height,
            width=width,
            rope_interpolation_scale=(LTX_CELL[0] / frame_rate(told), *LTX_CELL[1:]),
            video_coords=_ltx_places(x_BCTHW, frame_rate(told)) if causal else None,
            return_dict=False,
        )
    )
    return towards_image(out_BNC.transpose(1, 2).unflatten(2, (frames, height, width)), x_BCTHW, level_B, told)


def _ltx_places(x_BCTHW: Tensor, rate: float) -> Tensor:
    """Where each cell begins, [B,3,N], in seconds and pixels, where the first one stands for a single frame."""
    batch, _, frames, height, width = x_BCTHW.shape
    axes = [torch.arange(size, device=x_BCTHW.device) for size in (frames, height, width)]
    in_time, down, across = torch.meshgrid(*axes, indexing="ij")
    frame = (in_time * LTX_CELL[0] + 1 - LTX_CELL[0]).clamp(min=0)
    places = torch.stack((frame.float() * (1.0 / rate), (down * LTX_CELL[1]).float(), (across * LTX_CELL[2]).float()))
    return places.reshape(1, len(LTX_CELL), -1).expand(batch, -1, -1)


def call_mochi(module: nn.Module, x_BCTHW: Tensor, level_B: Tensor, told: Told) -> Tensor:
    """Mochi, which counts time from noise to clean, and predicts clean less noise."""
    return -sample_of(
        module(
            hidden_states=x_BCTHW,
            encoder_hidden_states=told["context"],
            timestep=(1 - level_B) * TIMESTEPS,
            encoder_attention_mask=mask_of(told),
            return_dict=False,
        )
    )


def call_cosmos(module: nn.Module, x_BCTHW: Tensor, level_B: Tensor, told: Told) -> Tensor:
    """The first Cosmos. The image to go on from ("image") is told as noisy, and as scaled, as the model is to see it.

    The module is `pool.models.diffusion.video_modules.CosmosTransformer3DModel`.
    """
    return sample_of(
        module(
            hidden_states=_with_masks(module, with_image(x_BCTHW, told), told),
            timestep=level_B,
            encoder_hidden_states=told["context"],
            fps=frame_rate(told),
            return_dict=False,
        )
    )


def call_cosmos_predict_2(module: nn.Module, x_BCTHW: Tensor, level_B: Tensor, told: Told) -> Tensor:
    """Cosmos Predict 2, a flow: frames of an image to go on from ("image") are told of next to no noise. A latent of
    one image is taken for one frame."""
    if x_BCTHW.dim() == 4:
        return call_cosmos_predict_2(module, x_BCTHW.unsqueeze(2), level_B, told).squeeze(2)
    timestep = level_B
    if _goes_on(module):
        timestep = level_B.reshape(-1, 1, 1, 1, 1).expand(-1, 1, x_BCTHW.shape[2], 1, 1)
        if "image_mask" in told:
            kept = told["image_mask"][..., :1, :1].to(timestep.dtype)
            timestep = kept * COSMOS_KEPT_LEVEL + (1 - kept) * timestep
    out = sample_of(
        module(
            hidden_states=_with_masks(module, with_image(x_BCTHW, told), told),
            timestep=timestep,
            encoder_hidden_states=told["context"],
            fps=frame_rate(told) if "frame_rate" in told else None,
            return_dict=False,
        )
    )
    return towards_image(out, x_BCTHW, level_B, told)


def _goes_on(module: nn.Module) -> bool:
    """Whether the model reads a channel that tells which frames are kept, beside the one for padding."""
    config = config_of(module)
    return bool(config.in_channels - config.out_channels > 1)


def _with_masks(module: nn.Module, x_BCTHW: Tensor, told: Told) -> Tensor:
    """The latent, the channel of kept frames where the model reads it, and the channel of padding: there is none."""
    nothing = torch.zeros_like(x_BCTHW[:, :1])
    if not _goes_on(module):
        return torch.cat((x_BCTHW, nothing), dim=1)
    return torch.cat((x_BCTHW, told["image_mask"].to(x_BCTHW) if "image_mask" in told else nothing, nothing), dim=1)
