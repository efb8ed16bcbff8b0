"""Micro-conditioning of SDXL (image sizes and aesthetic scores), the names of model inputs, and the call of UNets.

Knows the argument names of diffusers' UNets and the numbers that each kind of model was trained with.

Shape legend: B batch, V width of the pooled text, N numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from modelpool.pool.families.parts.unet_facts import NUMBER_WIDTH
from modelpool.pool.inference.conditioning.camera_view import VIEW, projected
from modelpool.pool.models.components.common.infer_config import SIZE_NUMBERS
from modelpool.pool.values.core.sampling_facts import MicroConditioning

#: model inputs other than latent, timestep and text, by name; each [B, ...]
ModelKwargs: TypeAlias = Mapping[str, Tensor]
NO_KWARGS: ModelKwargs = MappingProxyType({})
#: residuals of ControlNets, by argument name of the model's class in diffusers
Residuals: TypeAlias = Mapping[str, Sequence[Tensor]]
#: these arguments of UNets: residuals of the skip connections, and of the middle block
SKIPS, MIDDLE = "down_block_additional_residuals", "mid_block_additional_residual"
#: this argument of UNets: features of T2I-Adapters, added inside of the blocks of the first half
FEATURES = "down_intrablock_additional_residuals"

#: model input: latents and masks that are concatenated to the noisy latent
IMAGE = "image"

#: model input: the latent of an image that is read in place of the noisy one
IMAGE_LATENT = "image_latent"
#: the level at which it is read, and the states of the empty text that such models were trained with: begin and end.
#: Source: infer.py and `padding_type` of EnVision-Research/Lotus
ESTIMATE_LEVEL, ESTIMATE_TOKENS = 999, 2
#: class labels of a model that estimates something of an image, as Lotus: sines and cosines of its task, (1, 0).
#: Source: `task_emb` in infer.py of EnVision-Research/Lotus
ESTIMATES = (math.sin(1.0), 0.0, math.cos(1.0), 1.0)

#: model input: the pooled text of a UNet
POOLED_TEXT = "text_embeds"
#: model input: class labels of a UNet
CLASS_LABELS = "class_labels"

#: aesthetic scores of prompt and negative prompt, as used with SDXL's refiner.
#: Source: `aesthetic_score` and `negative_aesthetic_score` of diffusers' StableDiffusionXLImg2ImgPipeline
AESTHETIC_SCORE, NEGATIVE_AESTHETIC_SCORE = 6.0, 2.5


def micro_conditioning(
    conditions: MicroConditioning, pooled_BV: Tensor | None, width: int, height: int, is_negative: bool = False
) -> dict[str, Tensor]:
    """Return the inputs for an uncropped image of `width` by `height` pixels, float32; empty for models without
    micro-conditioning. Models with it read a pooled text."""
    if conditions is MicroConditioning.NONE:
        return {}
    assert pooled_BV is not None, "the text encoders of this model return no pooled text"
    numbers: Sequence[float] = (height, width, 0, 0, height, width)
    if conditions is MicroConditioning.AESTHETICS:
        numbers = (height, width, 0, 0, NEGATIVE_AESTHETIC_SCORE if is_negative else AESTHETIC_SCORE)
    numbers_N = torch.tensor(numbers, dtype=torch.float32, device=pooled_BV.device)
    return {POOLED_TEXT: pooled_BV, "time_ids": numbers_N.expand(len(pooled_BV), -1)}


def empty_micro_conditioning(
    conditions: MicroConditioning, model: nn.Module, batch: int, device: torch.device
) -> dict[str, Tensor]:
    """Return empty inputs for `batch` texts of `model`, for dry runs."""
    if conditions is MicroConditioning.NONE:
        return {}
    return micro_conditioning(conditions, torch.empty(batch, pooled_width(conditions, model), device=device), 1, 1)


def pooled_width(conditions: MicroConditioning, model: nn.Module) -> int:
    """Return the width of the pooled text of `model`; 0 for models without one."""
    if conditions is MicroConditioning.NONE:
        return 0
    width = int(model.config.projection_class_embeddings_input_dim)  # type: ignore[union-attr, arg-type] # not typed
    return width - SIZE_NUMBERS[conditions] * NUMBER_WIDTH


def call_unet(
    module: nn.Module,
    x_BCHW: Tensor,
    timestep_B: Tensor,
    context_BLD: Tensor,
    model_kwargs: ModelKwargs = NO_KWARGS,
    residuals: Residuals | None = None,
) -> Tensor:
    """Call a UNet of diffusers. Sizes stay float32: half precision cannot represent 2049. The input `IMAGE` is
    concatenated to the channels of the latent, unscaled; `IMAGE_LATENT` takes its place, with its level and text;
    `CLASS_LABELS` are the argument of that name; with `VIEW`, the context is from an image."""
    dtype = x_BCHW.dtype
    added = {name: value if name == "time_ids" else value.to(dtype) for name, value in model_kwargs.items()}
    if VIEW in added:
        del added[VIEW]
        context_BLD = projected(module, context_BLD, model_kwargs[VIEW])
    labels = {CLASS_LABELS: added.pop(CLASS_LABELS)} if CLASS_LABELS in added else {}
    if IMAGE_LATENT in added:
        x_BCHW, timestep_B = added.pop(IMAGE_LATENT), torch.full_like(timestep_B, ESTIMATE_LEVEL)
        context_BLD = context_BLD[:, :ESTIMATE_TOKENS]
    if IMAGE in added:
        x_BCHW = torch.cat([x_BCHW, added.pop(IMAGE)], dim=1)
    added_residuals: dict[str, Any] = {}
    if residuals is not None:
        if SKIPS in residuals:
            added_residuals = {SKIPS: tuple(residuals[SKIPS]), MIDDLE: residuals[MIDDLE][0]}
        if FEATURES in residuals:
            # a new list for each call: the UNet pops features from it
            added_residuals[FEATURES] = [each.expand(len(x_BCHW), -1, -1, -1) for each in residuals[FEATURES]]
    predicted_BCHW: Tensor = module(
        x_BCHW, timestep_B, context_BLD, added_cond_kwargs=added or None, return_dict=False, **labels, **added_residuals
    )[0]
    return predicted_BCHW


#: model inputs other than text states, by the names of `pool.models.components.diffusion.architecture`
CONTEXT, POOLED, GUIDANCE, SIZE, FRAME_RATE = "context", "pooled", "guidance", "size", "frame_rate"


SECONDS, IMAGE_CONTEXT, IMAGE_PLACES, STEP = "seconds", "image_context", "image_places", "step"
LYRICS, SILENCE, UNCONDITIONAL = "lyrics", "silence", "unconditional"
