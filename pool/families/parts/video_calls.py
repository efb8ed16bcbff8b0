"""What the calls of several video models share: kept frames of an image, and frame rates. Torch-free to import.

Legend: B batch, C channels, T H W cells of a latent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from modelpool.pool.families.parts.forward import ModelKwargs

if TYPE_CHECKING:
    from torch import Tensor

#: models that animate a character: channels of the mask of the kept part, and pixels along a side of a face
MASK_CHANNELS, FACE_SIDE = 4, 512
#: pixels along a side of a cell, of models with learned positions (CogVideoX)
_CELL_PIXELS = 8


def joined(x_BCTHW: Tensor, kwargs: ModelKwargs) -> Tensor:
    """Return the latent, concatenated along channels with the video to follow ("followed") and the image ("image"), if
    there are."""
    import torch

    more = [kwargs[name] for name in ("followed", "image") if name in kwargs]
    return torch.cat((x_BCTHW, *more), dim=1) if more else x_BCTHW


def with_image(x_BCTHW: Tensor, kwargs: ModelKwargs) -> Tensor:
    """Return the latent with the image ("image") where it is kept ("image_mask")."""
    import torch

    return torch.where(kwargs["image_mask"].bool(), kwargs["image"], x_BCTHW) if "image_mask" in kwargs else x_BCTHW


def towards_image(predicted: Tensor, x_BCTHW: Tensor, level_B: Tensor, kwargs: ModelKwargs) -> Tensor:
    """Return the prediction of a flow; where an image is kept, the one with the image as clean latent."""
    import torch

    if "image_mask" not in kwargs:
        return predicted
    level = level_B.reshape(-1, *[1] * (x_BCTHW.dim() - 1))
    leading = ((x_BCTHW - kwargs["image"]) / level).to(predicted.dtype)
    return torch.where(kwargs["image_mask"].bool(), leading, predicted)


def with_guides(x_BCTHW: Tensor, kwargs: ModelKwargs) -> Tensor:
    """Return the latent as a model of guided videos reads it: where an image guides it ("guide"), as much of that as
    its strength says ("guide_mask")."""
    return (x_BCTHW + (kwargs["guide"] - x_BCTHW) * kwargs["guide_mask"]).to(x_BCTHW.dtype)


def guided_timestep(timestep_B: Tensor, kwargs: ModelKwargs) -> Tensor:
    """Return the timestep of each token, [B, N]: lower where an image guides."""
    return timestep_B.unsqueeze(-1) * (1 - kwargs["guide_mask"].to(timestep_B.dtype)[:, 0].flatten(1))


def from_guided(predicted: Tensor, x_BCTHW: Tensor, read_BCTHW: Tensor, level_B: Tensor) -> Tensor:
    """Return the prediction of a flow for the latent, from the one for what the model has read of it: the clean latent
    that both mean is the same."""
    level = level_B.reshape(-1, *[1] * (x_BCTHW.dim() - 1))
    return predicted + ((x_BCTHW - read_BCTHW) / level).to(predicted.dtype)


def frame_rate(kwargs: ModelKwargs) -> float:
    """Return the frames per second, the same for all of a batch."""
    return float(kwargs["frame_rate"].flatten()[0])


def fixed_extent(own: Any) -> tuple[int, int, int] | None:
    """Return width, height and frames of the only videos that a model of the configuration `own` has positions for;
    None if it has them for all."""
    if not getattr(own, "use_learned_positional_embeddings", False):
        return None
    return own.sample_width * _CELL_PIXELS, own.sample_height * _CELL_PIXELS, own.sample_frames
