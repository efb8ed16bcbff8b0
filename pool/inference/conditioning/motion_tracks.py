"""Tracks of points through a video that begins with an image: the latent of the image along them.

Sources: Wang et al. 2025 ("ATI: Any Trajectory Instruction for Controllable Video Generation"), and the code of its
authors (`patch_motion`); the code of Wan-Move (`replace_feature`). Both are models of Wan 2.1 that read the first frame
next to the latent, and its mask. Shape legend: B batch, C channels, T latent frames, H W cells, N tracks, F frames,
K nearest tracks.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from modelpool.pool.values.core.stage_params import TracksCondition

#: frames of a latent frame behind the first one, which are as many channels of the mask
_FRAMES = 4
#: pixels along a side of a cell
_PIXELS = 8
#: keeps the mean of no points finite. Source: ATI
_LEAST = 1e-5


def tracked_image(tracks: TracksCondition, image_BCTHW: Tensor) -> tuple[Tensor, Tensor]:
    """Return the input "image" of a model with `tracks`, for the prompt and for the negative prompt, from that without
    tracks: channels of the mask, and of the latent of the first frame and of grey behind it."""
    cells, height, width = image_BCTHW.shape[2:]
    points_FN2, visible_FN = _of_frames(tracks, 1 + (cells - 1) * _FRAMES)
    if tracks.method == "move":
        moved_BCTHW = image_BCTHW.clone()
        _copy_along(points_FN2[::_FRAMES], visible_FN[::_FRAMES], moved_BCTHW[:, _FRAMES:])
        return moved_BCTHW, image_BCTHW
    # coordinates: -1 to 1 along the short side
    sides = torch.tensor([width, height], dtype=torch.float32)
    placed_FN2 = (points_FN2 - sides * _PIXELS / 2) / float(min(width, height) * _PIXELS) * 2
    found = _blended(tracks, placed_FN2, visible_FN, image_BCTHW[:, _FRAMES:])
    return found, found


def _of_frames(tracks: TracksCondition, frames: int) -> tuple[Tensor, Tensor]:
    """Return the points of each track in each frame, in pixels, and where it is seen; behind its end it is not."""
    points_FN2 = torch.zeros(frames, len(tracks.points), 2)
    visible_FN = torch.zeros(frames, len(tracks.points))
    for number, track in enumerate(tracks.points):
        found_F3 = torch.tensor(track[:frames], dtype=torch.float32).reshape(-1, 3)
        points_FN2[: len(found_F3), number] = found_F3[:, :2]
        visible_FN[: len(found_F3), number] = found_F3[:, 2]
    return points_FN2, visible_FN


def _copy_along(points_TN2: Tensor, visible_TN: Tensor, latent_BCTHW: Tensor) -> None:
    """Copy the cell of the first frame, where each track begins, to the cells where it is in later latent frames. Where
    several tracks meet, the last one counts. A track that is not seen in the first frame has no such cell."""
    height, width = latent_BCTHW.shape[-2:]
    cells_TN2 = torch.div(points_TN2, _PIXELS, rounding_mode="floor").long()
    inside_TN = (cells_TN2 >= 0).all(-1) & (cells_TN2[..., 0] < width) & (cells_TN2[..., 1] < height) & (visible_TN > 0)
    first_BCHW = latent_BCTHW[:, :, 0].clone()
    for number in range(cells_TN2.shape[1]):
        if not inside_TN[0, number]:
            continue
        left, top = cells_TN2[0, number].tolist()
        for cell in torch.nonzero(inside_TN[1:, number]).flatten().add(1).tolist():
            x, y = cells_TN2[cell, number].tolist()
            latent_BCTHW[:, :, cell, y, x] = first_BCHW[:, :, top, left]


def _blended(tracks: TracksCondition, points_FN2: Tensor, visible_FN: Tensor, latent_BCTHW: Tensor) -> Tensor:
    """Return mask and latent, of which each later cell has the features of the points that are nearest to it, by
    weights that fall with the square of the distance."""
    cells, height, width = latent_BCTHW.shape[2:]
    sides = torch.tensor([width, height], dtype=torch.float32) / min(width, height)
    across, down = torch.linspace(-sides[0], sides[0], width), torch.linspace(-sides[1], sides[1], height)
    grid_HW2 = torch.stack(torch.meshgrid(down, across, indexing="ij")[::-1], dim=-1)
    # each later latent frame has the mean of the points in its frames
    seen_TN = visible_FN[1:].reshape(cells - 1, _FRAMES, -1).sum(1)
    sums_TN2 = (points_FN2 * visible_FN.unsqueeze(-1))[1:].reshape(cells - 1, _FRAMES, -1, 2).sum(1)
    means_TN2 = sums_TN2 / (seen_TN.unsqueeze(-1) + _LEAST)
    squares_THWN = (means_TN2[:, None, None] - grid_HW2[None, :, :, None]).pow(2).sum(-1)
    weights_THWN = torch.exp(-squares_THWN * tracks.temperature) * seen_TN.clamp(0, 1)[:, None, None]
    weights_THWK, nearest_THWK = torch.topk(weights_THWN, k=min(tracks.nearest, weights_THWN.shape[-1]), dim=-1)
    begins_N2 = (points_FN2[0] / sides).clamp(-1, 1)
    features_BCN = functional.grid_sample(
        latent_BCTHW[:, :, 0],
        begins_N2.expand(len(latent_BCTHW), 1, -1, -1),
        mode="bilinear",
        padding_mode="zeros",
        align_corners=False,
    ).squeeze(2)
    total_THW = weights_THWK.sum(-1)
    mixed_BCTHW = (features_BCN[:, :, nearest_THWK] * weights_THWK).sum(-1)
    mixed_BCTHW = mixed_BCTHW + latent_BCTHW[:, :, 1:] * (1 - total_THW.clamp(0, 1))
    mask_THW = torch.cat([torch.ones_like(latent_BCTHW[0, 0, :1]), total_THW])
    mask_BCTHW = mask_THW.expand(len(latent_BCTHW), _FRAMES, -1, -1, -1)
    return torch.cat([mask_BCTHW, torch.cat([latent_BCTHW[:, :, :1], mixed_BCTHW], dim=2)], dim=1)
