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


def guide_bounds(kwargs: ModelKwargs, cell_frames: int, causal: bool) -> Tensor:
    """Return the first frame of each leading cell of a guide, and the one behind its last, [B, K, 2]. An image is one
    frame. Of frames, each cell has `cell_frames`; but with `causal`, at frame 0, the first one has one, as in a video.

    Source: diffusers' LTX2ConditionPipeline and LTX2InContextPipeline."""
    import torch

    frames_BK = kwargs["guide_frames"]
    if "guide_cells" not in kwargs:
        return torch.stack((frames_BK, frames_BK + 1), dim=-1)
    cell_BK = kwargs["guide_cells"][..., 0]
    starts_BK = frames_BK + cell_BK.clamp(min=0) * cell_frames
    bounds = torch.stack((starts_BK, starts_BK + cell_frames), dim=-1)
    if causal:
        at_first = (frames_BK == 0).unsqueeze(-1)
        bounds = torch.where(at_first, (bounds + 1 - cell_frames).clamp(min=0), bounds)
    is_image = (cell_BK < 0).unsqueeze(-1)
    return torch.where(is_image, torch.stack((frames_BK, frames_BK + 1), dim=-1), bounds)


def read_tokens(value: Tensor, kwargs: ModelKwargs, dim: int = 1) -> Tensor:
    """Return the tokens along a dimension that a model of guided videos reads: all but those between the places of
    frames of a lower resolution ("guide_places")."""
    if "guide_places" not in kwargs:
        return value
    return value.index_select(dim, _read_places(value.shape[dim], kwargs).to(value.device))


def at_all_places(read_BNC: Tensor, tokens: int, kwargs: ModelKwargs) -> Tensor:
    """Return predictions at all places of a latent, zeros where the model has read nothing: the inverse of
    `read_tokens`."""
    if "guide_places" not in kwargs:
        return read_BNC
    batch, _, channels = read_BNC.shape
    found = read_BNC.new_zeros((batch, tokens, channels))
    return found.index_copy(1, _read_places(tokens, kwargs).to(read_BNC.device), read_BNC)


def _read_places(tokens: int, kwargs: ModelKwargs) -> Tensor:
    """Return the places that a model reads of a latent of so many: some of the leading cells, and all others. They are
    equal for all of a batch."""
    import torch

    places_N = kwargs["guide_places"][0]
    *_, height, width = kwargs["guide"].shape
    leading = kwargs["guide_frames"].shape[1] * height * width
    return torch.cat((places_N, torch.arange(leading, tokens, device=places_N.device)))


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
