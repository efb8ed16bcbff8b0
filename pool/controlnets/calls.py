"""How each class of diffusers' ControlNets is called, and what it says to the model that it speaks to.

Each function does to its inputs what the pipeline of the model does. Does not know steps, strengths of several, nor
where weights are.

Shape legend: B batch, C channels, H W height and width of a latent (of an image, for pixels), N patches, L tokens, D
width of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from modelpool.pool.conditioning.micro_conditioning import (
    CONTEXT,
    GUIDANCE,
    IMAGE,
    MIDDLE,
    POOLED,
    SKIPS,
    Extras,
    Residuals,
)
from modelpool.pool.guidance.call_model import as_told
from modelpool.pool.models.diffusion.image_calls import TIMESTEPS, hunyuan_dit_told
from modelpool.pool.models.diffusion.patchify import packed, patch_ids

#: what diffusers' transformers take from ControlNets, by the names of their arguments
DOUBLE, SINGLE = "controlnet_block_samples", "controlnet_single_block_samples"
SD3_BLOCKS = "block_controlnet_hidden_states"
#: how strongly Flux dev is usually told to follow a text: for its ControlNets beside models that are not told
FLUX_GUIDANCE = 3.5
#: Source: `ZImageControlNetModel.from_transformer`
_Z_IMAGE_LENT = (
    *("t_scale", "t_embedder", "all_x_embedder", "cap_embedder", "rope_embedder", "noise_refiner", "context_refiner"),
    *("x_pad_token", "cap_pad_token"),
)
#: numbers that UNets are told
_NUMBERS = frozenset({"time_ids"})
#: under which name a text's mask is told
CONTEXT_MASK = f"{CONTEXT}_mask"


@dataclass(frozen=True, slots=True, eq=False)
class Heard:
    """What a ControlNet is told in one call.

    x_BC         the noisy latent [B,C,H,W]; rows of patches [B,N,D] for one that has no layer of its own for them
    level_B      as the diffusion model is told it, float32
    context_BLD  states of a text
    images_BC  its images, as `pool.controlnets.kinds.ControlKind.reads_latent` says: pixels from 0 to 1 or latents
    told         what the diffusion model is told beside the text
    mode         of one that has several, which
    model        the diffusion model, ready to run: some have its first layers do what they have none for
    """

    x_BC: Tensor
    level_B: Tensor
    context_BLD: Tensor
    images_BC: Tensor
    told: Extras
    strength: float = 1.0
    mode: int | None = None
    model: nn.Module | None = None

    def to(self, dtype: torch.dtype) -> Heard:
        """The same in `dtype`, but for numbers that half precision has no digits for, and masks."""
        return replace(
            self,
            x_BC=self.x_BC.to(dtype),
            context_BLD=self.context_BLD.to(dtype),
            images_BC=self.images_BC.to(dtype),
            told={
                name: value if name in _NUMBERS else as_told(name, value, dtype)
                for name, value in self.told.items()
                if name != IMAGE
            },
        )


ControlCall: TypeAlias = Callable[[nn.Module, Heard], Residuals]


def call_unet_control(module: nn.Module, heard: Heard) -> Residuals:
    """Of SD1, SD2 and SDXL: what it adds to each skip connection of the UNet, and to its middle."""
    config: Any = module.config
    skips, middle = module(
        heard.x_BC,
        heard.level_B,
        heard.context_BLD,
        heard.images_BC,
        conditioning_scale=heard.strength,
        added_cond_kwargs=dict(heard.told) if config.addition_embed_type else None,
        return_dict=False,
    )
    return {SKIPS: tuple(skips), MIDDLE: (middle,)}


def call_union_control(module: nn.Module, heard: Heard) -> Residuals:
    """Of SDXL, trained for several kinds of images: as `call_unet_control`."""
    config: Any = module.config
    assert heard.mode is not None, "a union is told a mode"
    kinds = torch.zeros(len(heard.x_BC), config.num_control_type, device=heard.x_BC.device)
    kinds[:, heard.mode] = 1.0
    skips, middle = module(
        heard.x_BC,
        heard.level_B,
        heard.context_BLD,
        [heard.images_BC],
        control_type=kinds,
        control_type_idx=[heard.mode],
        conditioning_scale=float(heard.strength),
        added_cond_kwargs=dict(heard.told) if config.addition_embed_type else None,
        return_dict=False,
    )
    return {SKIPS: tuple(skips), MIDDLE: (middle,)}


def call_flux_control(module: nn.Module, heard: Heard) -> Residuals:
    """Of Flux: what it adds behind the blocks of two streams, and behind those of one."""
    config: Any = module.config
    x_BCHW, context_BLD, guidance = heard.x_BC, heard.context_BLD, None
    if config.guidance_embeds:
        guidance = heard.told.get(GUIDANCE)
        guidance = torch.full_like(heard.level_B, FLUX_GUIDANCE) if guidance is None else guidance
    image = heard.images_BC
    doubles, singles = module(
        hidden_states=packed(x_BCHW),
        # pixels go from -1 to 1 here
        controlnet_cond=packed(image) if config.conditioning_embedding_channels is None else image * 2 - 1,
        controlnet_mode=None if heard.mode is None else _mode(heard.mode, x_BCHW),
        conditioning_scale=heard.strength,
        timestep=heard.level_B,
        guidance=guidance,
        pooled_projections=heard.told[POOLED],
        encoder_hidden_states=context_BLD,
        txt_ids=context_BLD.new_zeros(context_BLD.shape[1], 3),
        img_ids=patch_ids(x_BCHW, 2),
        return_dict=False,
    )
    return _there({DOUBLE: doubles, SINGLE: singles})


def _mode(mode: int, x_BCHW: Tensor) -> Tensor:
    return torch.full((len(x_BCHW), 1), mode, dtype=torch.long, device=x_BCHW.device)


def call_sd3_control(module: nn.Module, heard: Heard) -> Residuals:
    """Of Stable Diffusion 3 and 3.5: what it adds behind the blocks. Those that are told a hole are told no pooled
    text, whatever their configuration says, as in diffusers' StableDiffusion3ControlNetInpaintingPipeline."""
    config: Any = module.config
    pooled, is_zero = heard.told[POOLED], config.force_zeros_for_pooled_projection or config.extra_conditioning_channels
    (said,) = module(
        hidden_states=heard.x_BC,
        controlnet_cond=heard.images_BC,
        conditioning_scale=heard.strength,
        encoder_hidden_states=None if config.joint_attention_dim is None else heard.context_BLD,
        pooled_projections=torch.zeros_like(pooled) if is_zero else pooled,
        timestep=heard.level_B * TIMESTEPS,
        return_dict=False,
    )
    return _there({SD3_BLOCKS: said})


def call_qwen_image_control(module: nn.Module, heard: Heard) -> Residuals:
    """Of Qwen-Image: what it adds behind the blocks."""
    x_BCHW = heard.x_BC
    said = module(
        hidden_states=packed(x_BCHW),
        controlnet_cond=packed(heard.images_BC),
        conditioning_scale=heard.strength,
        encoder_hidden_states=heard.context_BLD,
        encoder_hidden_states_mask=heard.told.get(CONTEXT_MASK),
        timestep=heard.level_B,
        img_shapes=[[(1, x_BCHW.shape[-2] // 2, x_BCHW.shape[-1] // 2)]] * len(x_BCHW),
        return_dict=False,
    )
    return _there({DOUBLE: said})


def call_hunyuan_dit_control(module: nn.Module, heard: Heard) -> Residuals:
    """Of HunyuanDiT: what it adds to the outputs of the first half of the blocks, which the second half reads again."""
    x_BCHW = heard.x_BC
    (said,) = module(
        x_BCHW,
        heard.level_B.to(x_BCHW.dtype),  # it computes in the dtype of its time
        controlnet_cond=heard.images_BC,
        conditioning_scale=heard.strength,
        **hunyuan_dit_told(module, x_BCHW, {**heard.told, CONTEXT: heard.context_BLD}),
        return_dict=False,
    )
    return _there({DOUBLE: said})


def call_z_image_control(module: nn.Module, heard: Heard) -> Residuals:
    """Of Z-Image: what it adds behind some layers. Time runs from noise to image; texts have own lengths."""
    config: Any = module.config
    context, mask = heard.context_BLD, heard.told.get(CONTEXT_MASK)
    texts = list(context) if mask is None else [text[real] for text, real in zip(context, mask, strict=True)]
    # those that may be told a hole too, and are not
    hole = config.control_in_dim - heard.images_BC.shape[1]
    image_BCHW = functional.pad(heard.images_BC, (0, 0, 0, 0, 0, hole)) if hole else heard.images_BC
    with _lent(module, heard.model):
        said = module(
            list(heard.x_BC.unsqueeze(2)),
            1 - heard.level_B,
            texts,
            list(image_BCHW.unsqueeze(2)),
            conditioning_scale=heard.strength,
        )
    return _there({DOUBLE: tuple(said.values())})


@contextmanager
def _lent(module: nn.Module, model: nn.Module | None) -> Iterator[None]:
    """`module` with the layers of `model` that it has none of its own for. Not as parts of it: their weights are the
    model's."""
    assert model is not None, "Z-Image's ControlNets borrow layers of the model"
    try:
        for name in _Z_IMAGE_LENT:
            module.__dict__[name] = getattr(model, name)
        yield
    finally:
        module.__dict__.update(dict.fromkeys(_Z_IMAGE_LENT))


def _there(said: dict[str, Sequence[Tensor] | None]) -> Residuals:
    return {name: tuple(samples) for name, samples in said.items() if samples}
