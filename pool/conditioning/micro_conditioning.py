"""What a diffusion model is told beside its text: a pooled text, and numbers about the image.

Knows the names under which diffusers' UNets take them and which numbers each kind of model was trained with; runs
nothing.

Shape legend: B batch, V width of the pooled text, N numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from modelpool.pool.core.sampling_facts import SizeConditions
from modelpool.pool.models.common.infer_config import NUMBER_WIDTH, SIZE_NUMBERS

#: inputs of a model beside latent, timestep and text, by name; each [B, ...]
Extras: TypeAlias = Mapping[str, Tensor]
NO_EXTRAS: Extras = MappingProxyType({})
#: what ControlNets add to a model, by the name of the argument that its class in diffusers takes it by
Residuals: TypeAlias = Mapping[str, Sequence[Tensor]]
#: those arguments of UNets: what is added to each skip connection, and to the middle
SKIPS, MIDDLE = "down_block_additional_residuals", "mid_block_additional_residual"

#: the name under which a model is told latents and masks that go beside the noisy latent
IMAGE = "image"

#: how pleasing the image should be, and what it should be unlike; the values that SDXL's refiner is used with.
#: Source: `aesthetic_score` and `negative_aesthetic_score` of diffusers' StableDiffusionXLImg2ImgPipeline
AESTHETIC_SCORE, NEGATIVE_AESTHETIC_SCORE = 6.0, 2.5


def extras_of(
    conditions: SizeConditions, pooled_BV: Tensor | None, width: int, height: int, is_negative: bool = False
) -> dict[str, Tensor]:
    """The extras of an image of `width` by `height` pixels that is not cropped, float32; empty for models that are
    told nothing. Models that are told something read a pooled text."""
    if conditions is SizeConditions.NONE:
        return {}
    assert pooled_BV is not None, "the text encoders of this model give no pooled text"
    numbers: Sequence[float] = (height, width, 0, 0, height, width)
    if conditions is SizeConditions.AESTHETICS:
        numbers = (height, width, 0, 0, NEGATIVE_AESTHETIC_SCORE if is_negative else AESTHETIC_SCORE)
    numbers_N = torch.tensor(numbers, dtype=torch.float32, device=pooled_BV.device)
    return {"text_embeds": pooled_BV, "time_ids": numbers_N.expand(len(pooled_BV), -1)}


def empty_extras(conditions: SizeConditions, model: nn.Module, batch: int, device: torch.device) -> dict[str, Tensor]:
    """Extras without values for so many texts of `model`, for dry runs."""
    if conditions is SizeConditions.NONE:
        return {}
    return extras_of(conditions, torch.empty(batch, pooled_width(conditions, model), device=device), 1, 1)


def pooled_width(conditions: SizeConditions, model: nn.Module) -> int:
    """The width of the pooled text that `model` is told; 0 for models that are told none."""
    if conditions is SizeConditions.NONE:
        return 0
    width = int(model.config.projection_class_embeddings_input_dim)  # type: ignore[union-attr, arg-type] # not typed
    return width - SIZE_NUMBERS[conditions] * NUMBER_WIDTH


def call_unet(
    module: nn.Module,
    x_BCHW: Tensor,
    timestep_B: Tensor,
    context_BLD: Tensor,
    extras: Extras = NO_EXTRAS,
    residuals: Residuals | None = None,
) -> Tensor:
    """One call of a UNet of diffusers. Sizes stay float32: in half precision 2049 is no number. What is told under
    `IMAGE` is joined to the channels of the latent, as it is."""
    dtype = x_BCHW.dtype
    added = {name: value if name == "time_ids" else value.to(dtype) for name, value in extras.items()}
    if IMAGE in added:
        x_BCHW = torch.cat([x_BCHW, added.pop(IMAGE)], dim=1)
    beside: dict[str, Any] = {}
    if residuals is not None:
        beside = {SKIPS: tuple(residuals[SKIPS]), MIDDLE: residuals[MIDDLE][0]}
    predicted_BCHW: Tensor = module(
        x_BCHW, timestep_B, context_BLD, added_cond_kwargs=added or None, return_dict=False, **beside
    )[0]
    return predicted_BCHW


#: what a model is told of a text beside its states, in the spelling of `pool.models.diffusion.architecture`
CONTEXT, POOLED, GUIDANCE, SIZE, FRAME_RATE = "context", "pooled", "guidance", "size", "frame_rate"


SECONDS, IMAGE_CONTEXT = "seconds", "image_context"
