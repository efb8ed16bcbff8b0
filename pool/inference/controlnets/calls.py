"""Calls each class of diffusers' ControlNets and returns its residuals.

Each function prepares the inputs like the pipeline of the model. Does not know steps, several strengths, or where
weights are.

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

from modelpool.pool.families.parts.forward import TIMESTEPS
from modelpool.pool.families.parts.hunyuan_dit_inputs import module_kwargs
from modelpool.pool.families.parts.patches import packed, patch_ids
from modelpool.pool.inference.conditioning.micro_conditioning import (
    CONTEXT,
    GUIDANCE,
    IMAGE,
    MIDDLE,
    POOLED,
    SKIPS,
    ModelKwargs,
    Residuals,
)
from modelpool.pool.inference.guidance.call_model import as_input

#: arguments of diffusers' transformers for residuals of ControlNets
DOUBLE, SINGLE = "controlnet_block_samples", "controlnet_single_block_samples"
SD3_BLOCKS = "block_controlnet_hidden_states"
#: default distilled guidance of Flux dev: for its ControlNets with models that have none
FLUX_GUIDANCE = 3.5
#: Source: `ZImageControlNetModel.from_transformer`
_Z_IMAGE_SHARED = (
    *("t_scale", "t_embedder", "all_x_embedder", "cap_embedder", "rope_embedder", "noise_refiner", "context_refiner"),
    *("x_pad_token", "cap_pad_token"),
)
#: inputs of UNets that are numbers
_NUMBERS = frozenset({"time_ids"})
#: model input: the mask of a text
CONTEXT_MASK = f"{CONTEXT}_mask"


@dataclass(frozen=True, slots=True, eq=False)
class ControlInputs:
    """The inputs of a ControlNet in one call.

    x_BC         the noisy latent [B,C,H,W]; patch embeddings [B,N,D] for a ControlNet without a layer for them
    level_B      the diffusion model's time input, float32
    context_BLD  states of a text
    images_BC  control images, by `pool.inference.controlnets.controlnet_kinds.ControlKind.reads_latent`: pixels from 0
               to 1 or latents
    model_kwargs  other inputs of the diffusion model
    mode         mode of a ControlNet that has several
    model        the diffusion model, ready to run: some ControlNets use its first layers
    """

    x_BC: Tensor
    level_B: Tensor
    context_BLD: Tensor
    images_BC: Tensor
    model_kwargs: ModelKwargs
    strength: float = 1.0
    mode: int | None = None
    model: nn.Module | None = None

    def to(self, dtype: torch.dtype) -> ControlInputs:
        """Return the same in `dtype`, except numbers that half precision cannot represent, and masks."""
        return replace(
            self,
            x_BC=self.x_BC.to(dtype),
            context_BLD=self.context_BLD.to(dtype),
            images_BC=self.images_BC.to(dtype),
            model_kwargs={
                name: value if name in _NUMBERS else as_input(name, value, dtype)
                for name, value in self.model_kwargs.items()
                if name != IMAGE
            },
        )


ControlCall: TypeAlias = Callable[[nn.Module, ControlInputs], Residuals]


def call_unet_control(module: nn.Module, inputs: ControlInputs) -> Residuals:
    """Call a ControlNet of SD1, SD2 or SDXL: residuals of each skip connection of the UNet, and of its middle block."""
    config: Any = module.config
    skips, middle = module(
        inputs.x_BC,
        inputs.level_B,
        inputs.context_BLD,
        inputs.images_BC,
        conditioning_scale=inputs.strength,
        added_cond_kwargs=dict(inputs.model_kwargs) if config.addition_embed_type else None,
        return_dict=False,
    )
    return {SKIPS: tuple(skips), MIDDLE: (middle,)}


def call_union_control(module: nn.Module, inputs: ControlInputs) -> Residuals:
    """Call a ControlNet of SDXL with several modes: as `call_unet_control`."""
    config: Any = module.config
    assert inputs.mode is not None, "a union ControlNet requires a mode"
    kinds = torch.zeros(len(inputs.x_BC), config.num_control_type, device=inputs.x_BC.device)
    kinds[:, inputs.mode] = 1.0
    skips, middle = module(
        inputs.x_BC,
        inputs.level_B,
        inputs.context_BLD,
        [inputs.images_BC],
        control_type=kinds,
        control_type_idx=[inputs.mode],
        conditioning_scale=float(inputs.strength),
        added_cond_kwargs=dict(inputs.model_kwargs) if config.addition_embed_type else None,
        return_dict=False,
    )
    return {SKIPS: tuple(skips), MIDDLE: (middle,)}


def call_flux_control(module: nn.Module, inputs: ControlInputs) -> Residuals:
    """Call a ControlNet of Flux: residuals of the double-stream and of the single-stream blocks."""
    config: Any = module.config
    x_BCHW, context_BLD, guidance = inputs.x_BC, inputs.context_BLD, None
    if config.guidance_embeds:
        guidance = inputs.model_kwargs.get(GUIDANCE)
        guidance = torch.full_like(inputs.level_B, FLUX_GUIDANCE) if guidance is None else guidance
    image = inputs.images_BC
    doubles, singles = module(
        hidden_states=packed(x_BCHW),
        # pixels are from -1 to 1 here
        controlnet_cond=packed(image) if config.conditioning_embedding_channels is None else image * 2 - 1,
        controlnet_mode=None if inputs.mode is None else _mode(inputs.mode, x_BCHW),
        conditioning_scale=inputs.strength,
        timestep=inputs.level_B,
        guidance=guidance,
        pooled_projections=inputs.model_kwargs[POOLED],
        encoder_hidden_states=context_BLD,
        txt_ids=context_BLD.new_zeros(context_BLD.shape[1], 3),
        img_ids=patch_ids(x_BCHW, 2),
        return_dict=False,
    )
    return _present({DOUBLE: doubles, SINGLE: singles})


def _mode(mode: int, x_BCHW: Tensor) -> Tensor:
    return torch.full((len(x_BCHW), 1), mode, dtype=torch.long, device=x_BCHW.device)


def call_sd3_control(module: nn.Module, inputs: ControlInputs) -> Residuals:
    """Call a ControlNet of Stable Diffusion 3 or 3.5: residuals of the blocks. Inpainting ControlNets get no pooled
    text, regardless of their configuration, as in diffusers' StableDiffusion3ControlNetInpaintingPipeline."""
    config: Any = module.config
    pooled, is_zero = (
        inputs.model_kwargs[POOLED],
        config.force_zeros_for_pooled_projection or config.extra_conditioning_channels,
    )
    (residuals,) = module(
        hidden_states=inputs.x_BC,
        controlnet_cond=inputs.images_BC,
        conditioning_scale=inputs.strength,
        encoder_hidden_states=None if config.joint_attention_dim is None else inputs.context_BLD,
        pooled_projections=torch.zeros_like(pooled) if is_zero else pooled,
        timestep=inputs.level_B * TIMESTEPS,
        return_dict=False,
    )
    return _present({SD3_BLOCKS: residuals})


def call_qwen_image_control(module: nn.Module, inputs: ControlInputs) -> Residuals:
    """Call a ControlNet of Qwen-Image: residuals of the blocks."""
    x_BCHW = inputs.x_BC
    residuals = module(
        hidden_states=packed(x_BCHW),
        controlnet_cond=packed(inputs.images_BC),
        conditioning_scale=inputs.strength,
        encoder_hidden_states=inputs.context_BLD,
        encoder_hidden_states_mask=inputs.model_kwargs.get(CONTEXT_MASK),
        timestep=inputs.level_B,
        img_shapes=[[(1, x_BCHW.shape[-2] // 2, x_BCHW.shape[-1] // 2)]] * len(x_BCHW),
        return_dict=False,
    )
    return _present({DOUBLE: residuals})


def call_hunyuan_dit_control(module: nn.Module, inputs: ControlInputs) -> Residuals:
    """Call a ControlNet of HunyuanDiT: residuals of the outputs of the first half of the blocks, which the second half
    reads as skip connections."""
    x_BCHW = inputs.x_BC
    (residuals,) = module(
        x_BCHW,
        inputs.level_B.to(x_BCHW.dtype),  # it computes in the dtype of its time input
        controlnet_cond=inputs.images_BC,
        conditioning_scale=inputs.strength,
        **module_kwargs(module, x_BCHW, {**inputs.model_kwargs, CONTEXT: inputs.context_BLD}),
        return_dict=False,
    )
    return _present({DOUBLE: residuals})


def call_z_image_control(module: nn.Module, inputs: ControlInputs) -> Residuals:
    """Call a ControlNet of Z-Image: residuals of some layers. Time runs from noise to image; texts may differ in
    length."""
    config: Any = module.config
    context, mask = inputs.context_BLD, inputs.model_kwargs.get(CONTEXT_MASK)
    texts = list(context) if mask is None else [text[real] for text, real in zip(context, mask, strict=True)]
    # a ControlNet that supports inpainting, used without
    hole = config.control_in_dim - inputs.images_BC.shape[1]
    image_BCHW = functional.pad(inputs.images_BC, (0, 0, 0, 0, 0, hole)) if hole else inputs.images_BC
    with _with_model_layers(module, inputs.model):
        residuals = module(
            list(inputs.x_BC.unsqueeze(2)),
            1 - inputs.level_B,
            texts,
            list(image_BCHW.unsqueeze(2)),
            conditioning_scale=inputs.strength,
        )
    return _present({DOUBLE: tuple(residuals.values())})


@contextmanager
def _with_model_layers(module: nn.Module, model: nn.Module | None) -> Iterator[None]:
    """Set the layers of `model` that `module` lacks, without registering them: their weights belong to the model."""
    assert model is not None, "Z-Image's ControlNets use layers of the model"
    try:
        for name in _Z_IMAGE_SHARED:
            module.__dict__[name] = getattr(model, name)
        yield
    finally:
        module.__dict__.update(dict.fromkeys(_Z_IMAGE_SHARED))


def _present(residuals: dict[str, Sequence[Tensor] | None]) -> Residuals:
    return {name: tuple(samples) for name, samples in residuals.items() if samples}
