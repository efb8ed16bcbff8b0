"""The rays of a camera that moves, as models of video read them: for each pixel the Pluecker coordinates of its ray.

Source: `ray_condition` and the rearrangement of aigc-apps/VideoX-Fun, which are those of CameraCtrl (He et al. 2024).

Shape legend: B batch, F frames, N numbers of a camera, H W height and width in pixels.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

#: of a cell after the first, which has one frame
FRAMES = 4
#: of a camera: focal lengths and centre in pixels, and its place and turn in the first camera's space, by rows
NUMBERS = 16


def rays_of_cells(camera_BFN: Tensor, height: int, width: int) -> Iterator[Tensor]:
    """Yield the rays of each temporal cell, [B, 24, H, W]: six numbers of each of its four frames. The first cell has
    the first frame four times."""
    frames = camera_BFN.shape[1]
    for cell in range(1 + (frames - 1) // FRAMES):
        first = 1 + (cell - 1) * FRAMES
        places = [max(0, place) for place in range(first, first + FRAMES)]
        # channels: the first number of the four frames, then the second number of the four, and so on
        parts = [_rays(camera_BFN[:, place], height, width) for place in places]
        yield torch.stack(parts, dim=2).flatten(1, 2)


def _rays(camera_BN: Tensor, height: int, width: int) -> Tensor:
    """Return origin x direction, and the direction of length 1, of the ray of each pixel's middle, [B, 6, H, W]."""
    numbers_BN = camera_BN.float()
    across, along, x, y = (each[:, None, None] for each in numbers_BN[:, :4].unbind(1))
    pose_B34 = numbers_BN[:, 4:].unflatten(1, (3, 4))
    rows, columns = (torch.arange(n, device=camera_BN.device, dtype=torch.float32) + 0.5 for n in (height, width))
    shape = (len(camera_BN), height, width)
    parts = [
        ((columns[None, None, :] - x) / across).expand(shape),
        ((rows[None, :, None] - y) / along).expand(shape),
        torch.ones(shape, device=camera_BN.device),
    ]
    seen_BHW3 = torch.stack(parts, dim=-1)
    seen_BHW3 = seen_BHW3 / seen_BHW3.norm(dim=-1, keepdim=True)
    direction_BHW3 = torch.einsum("bij,bhwj->bhwi", pose_B34[:, :, :3], seen_BHW3)
    origin_BHW3 = pose_B34[:, None, None, :, 3].expand_as(direction_BHW3)
    rays_BHW6 = torch.cat([torch.linalg.cross(origin_BHW3, direction_BHW3), direction_BHW3], dim=-1)
    return rays_BHW6.movedim(-1, 1)
