"""Images as a language model sees them: dispatches between the vision parts that it may have.

The states of an image are inserted among the tokens of a prompt; GLM-Image's states are its tokens. Shape legend: N
patches, P values of a patch, L states, D width of a state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from modelpool.pool.models.components.vision.glm import (
    GlmImageVision,
    empty_glm_patches,
    glm_grid,
    glm_patches,
    glm_tokens,
)
from modelpool.pool.models.components.vision.qwen import (
    empty_patches,
    form_of,
    grid_of,
    patches_of,
    read_patches,
    rows_of,
)
from modelpool.pool.models.text.image_tokens import ImageStates
from modelpool.pool.values.core.results import PixelArray


def seen_grid(module: nn.Module, size: tuple[int, int]) -> tuple[int, int]:
    """Return rows and columns of the states of an image of this width and height."""
    return glm_grid(size) if isinstance(module, GlmImageVision) else grid_of(size, form_of(module))


def seen_patches(module: nn.Module, pixels_HWC: PixelArray) -> Tensor:
    """Return the patches of an image, [N, P] in float32 on the CPU."""
    return glm_patches(pixels_HWC) if isinstance(module, GlmImageVision) else patches_of(pixels_HWC, form_of(module))


def seen_states(module: nn.Module, patches_NP: Tensor, size: tuple[int, int]) -> Tensor:
    """Return the states of an image of this width and height, [L, D], row by row."""
    grid = seen_grid(module, size)
    if isinstance(module, GlmImageVision):
        return glm_tokens(module, patches_NP, grid)
    return read_patches(module, patches_NP, grid)


def empty_seen_patches(module: nn.Module, size: tuple[int, int]) -> Tensor:
    """Return the patches of an image of this width and height, on the meta device."""
    return empty_glm_patches(size) if isinstance(module, GlmImageVision) else empty_patches(size, form_of(module))


def empty_seen(module: nn.Module, sizes: Sequence[tuple[int, int]], width: int) -> tuple[ImageStates, ...]:
    """Return the states of images of these widths and heights for a language model of this `width`, on the meta
    device."""
    wide = 1 if isinstance(module, GlmImageVision) else width * rows_of(module)
    grids = [seen_grid(module, size) for size in sizes]
    return tuple(ImageStates(torch.empty((math.prod(grid), wide), device="meta"), *grid) for grid in grids)
