"""FreeU: scales the features of the deepest levels of a UNet and the low frequencies of their skip connections.

Source: Si et al. 2023 ("FreeU: Free Lunch in Diffusion U-Net"), equations 3 to 7; version 1 is from diffusers.

Shape legend: B batch, C channels, H W cells.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from modelpool.pool.values.core.run_options import FreeU
from modelpool.pool.weights.options.transformer_options import Extra, Patch
from modelpool.pool.weights.patcher.blocks.diffusers_names import unet_blocks

#: frequencies on each side of the lowest that count as low
_LOW = 1


def freeu_patch(option: FreeU, unet: nn.Module) -> Patch:
    """Return the output block patch of `option` for `unet`."""
    plain: Any = unet
    width = int(plain.config.block_out_channels[0])
    levels: dict[object, tuple[float, float]]
    if option.levels == "channels":
        levels = {4 * width: (option.b1, option.s1), 2 * width: (option.b2, option.s2)}
    else:
        factors = {"up_blocks.0": (option.b1, option.s1), "up_blocks.1": (option.b2, option.s2)}
        blocks = [block for block in unet_blocks(unet) if block.key[0] == "output"]
        levels = {block.key: factors[name] for block in blocks if (name := block.layers[0][:11]) in factors}

    def patch(h_BCHW: Tensor, skip_BCHW: Tensor, extra: Extra) -> tuple[Tensor, Tensor]:
        factors = levels.get(h_BCHW.shape[1] if option.levels == "channels" else extra["block"])
        if factors is None:
            return h_BCHW, skip_BCHW
        backbone, skip = factors
        return scaled_features(h_BCHW, backbone, option.version), low_frequencies_scaled(skip_BCHW, skip)

    return patch


def scaled_features(h_BCHW: Tensor, factor: float, version: int) -> Tensor:
    """Return `h_BCHW` with the first half of its channels scaled: by `factor`, or in version 2 by up to `factor`, as
    far as the mean over the channels is high at a position."""
    half = h_BCHW.shape[1] // 2
    scale: Tensor | float = factor
    if version == 2:
        mean_B1HW = h_BCHW.mean(1, keepdim=True)
        least, most = mean_B1HW.amin((1, 2, 3), keepdim=True), mean_B1HW.amax((1, 2, 3), keepdim=True)
        scale = (mean_B1HW - least) / (most - least).clamp(min=torch.finfo(h_BCHW.dtype).tiny) * (factor - 1.0) + 1.0
    return torch.cat([h_BCHW[:, :half] * scale, h_BCHW[:, half:]], dim=1)


def low_frequencies_scaled(x_BCHW: Tensor, factor: float) -> Tensor:
    """Return `x_BCHW` with its lowest frequencies scaled by `factor`; computed in float32."""
    spectrum = torch.fft.fftshift(torch.fft.fftn(x_BCHW.float(), dim=(-2, -1)), dim=(-2, -1))
    row, column = (side // 2 for side in x_BCHW.shape[-2:])
    scale_HW = torch.ones(x_BCHW.shape[-2:], device=x_BCHW.device)
    scale_HW[max(0, row - _LOW) : row + _LOW, max(0, column - _LOW) : column + _LOW] = factor
    filtered = torch.fft.ifftn(torch.fft.ifftshift(spectrum * scale_HW, dim=(-2, -1)), dim=(-2, -1)).real
    typed: Tensor = filtered.to(x_BCHW.dtype)
    return typed
