"""Convert latents to rows of patches and back, and build patch positions, sizes and text masks, for several models.

Torch-free to import.

Legend: B batch, C channels, H W cells of a latent, N patches, L tokens of text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from modelpool.pool.families.parts.forward import ModelKwargs

if TYPE_CHECKING:
    from torch import Tensor, nn


#: pixels along a side of a latent cell
_PIXELS_PER_CELL = 8


def packed(x_BCHW: Tensor) -> Tensor:
    """Return patches of 2x2 cells as rows, [B,N,4C]; the values of one channel are adjacent."""
    b, c, h, w = x_BCHW.shape
    return x_BCHW.reshape(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(b, h * w // 4, c * 4)


def unpacked(x_BND: Tensor, height: int, width: int) -> Tensor:
    """Return the latent of `height` times `width` cells in the first rows of `x_BND`: the inverse of `packed`."""
    b, _, d = x_BND.shape
    rows = x_BND[:, : height * width // 4]
    x = rows.reshape(b, height // 2, width // 2, d // 4, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return x.reshape(b, d // 4, height, width)


def patch_ids(x_BCHW: Tensor, side: int, *, first: float = 0) -> Tensor:
    """Return the positions of the patches of `side` times `side` cells, [N,3]: `first`, row and column."""
    import torch

    rows, columns = x_BCHW.shape[-2] // side, x_BCHW.shape[-1] // side
    grid = torch.meshgrid(
        torch.arange(rows, device=x_BCHW.device), torch.arange(columns, device=x_BCHW.device), indexing="ij"
    )
    return torch.stack((torch.full_like(grid[0], first), *grid), dim=-1).reshape(rows * columns, 3).float()


def references(kwargs: ModelKwargs) -> list[Tensor]:
    """Return the reference images in order: "reference", "reference_2" and so on."""
    return [kwargs[name] for name in sorted(name for name in kwargs if name.startswith("reference"))]


def output_size(x_BCHW: Tensor, kwargs: ModelKwargs) -> Tensor:
    """Return height and width of the output in pixels, [B,2], for models that read it: from cells of 8x8 pixels if the
    inputs have none."""
    import torch

    if "size" in kwargs:
        return kwargs["size"].to(x_BCHW.dtype)
    pixels = [side * _PIXELS_PER_CELL for side in x_BCHW.shape[-2:]]
    return torch.tensor(pixels, device=x_BCHW.device, dtype=x_BCHW.dtype).expand(x_BCHW.shape[0], 2)


def text_mask(kwargs: ModelKwargs, name: str) -> Tensor:
    """Return the mask of real tokens of the states `name`, [B,L], for models that require one."""
    import torch

    mask = kwargs.get(f"{name}_mask")
    states = kwargs[name]
    return torch.ones(states.shape[:2], dtype=torch.bool, device=states.device) if mask is None else mask


def one_length_at_a_time(
    call: Callable[[nn.Module, Tensor, Tensor, Tensor, Tensor], Tensor],
    module: nn.Module,
    x: Tensor,
    level_B: Tensor,
    kwargs: ModelKwargs,
) -> Tensor:
    """Return the predictions of `call` (module, latent, level, text states, pooled text) for a model without a mask:
    texts of different lengths run one after the other."""
    import torch

    mask = kwargs.get("context_mask")
    if mask is None:
        return call(module, x, level_B, kwargs["context"], kwargs["pooled"])
    predictions = [
        call(
            module,
            x[row : row + 1],
            level_B[row : row + 1],
            kwargs["context"][row : row + 1, : int(mask[row].sum())],
            kwargs["pooled"][row : row + 1],
        )
        for row in range(len(x))
    ]
    return torch.cat(predictions)
