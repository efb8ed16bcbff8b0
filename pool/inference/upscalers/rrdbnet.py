"""`RRDBNet`: the network of ESRGAN, Real-ESRGAN, BSRGAN and ESRGAN+.

Sources: Wang et al., "ESRGAN: Enhanced Super-Resolution Generative Adversarial Networks" (2018), section 3.1: residual
in residual dense blocks without batch norms, residual scaling 0.2; Wang et al., "Real-ESRGAN" (2021), section 3.3:
pixel unshuffle before the same network for small factors; Rakotonirina and Rasoanaivo, "ESRGAN+" (2020), section 3.2:
two more residuals in a dense block. The noise of ESRGAN+ is for training only.

Shape legend: B batch, C channels, H W height and width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

#: factor of a residual before it is added. Source: ESRGAN, section 3.1
RESIDUAL_SCALING = 0.2
#: slope of the activation below 0. Source: the published networks
NEGATIVE_SLOPE = 0.2
_DENSE_CONVS = 5


class DenseBlock(nn.Module):
    """Five convolutions, each of which reads the block's input and the results of those before it."""

    def __init__(self, channels: int, growth: int, plus: bool) -> None:
        super().__init__()
        for place in range(_DENSE_CONVS):
            width = channels if place == _DENSE_CONVS - 1 else growth
            setattr(self, f"conv{place + 1}", nn.Conv2d(channels + place * growth, width, 3, padding=1))
        self.conv1x1 = nn.Conv2d(channels, growth, 1, bias=False) if plus else None

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return the input with the scaled residual."""
        known = [x_BCHW]
        for place in range(1, _DENSE_CONVS):
            made_BCHW = _activated(getattr(self, f"conv{place}")(torch.cat(known, 1)))
            if self.conv1x1 is not None and place == 2:
                made_BCHW = made_BCHW + self.conv1x1(x_BCHW)
            elif self.conv1x1 is not None and place == 4:
                made_BCHW = made_BCHW + known[2]
            known.append(made_BCHW)
        last: nn.Module = getattr(self, f"conv{_DENSE_CONVS}")
        residual_BCHW: Tensor = last(torch.cat(known, 1))
        return residual_BCHW * RESIDUAL_SCALING + x_BCHW


class ResidualDenseBlocks(nn.Module):
    """Three dense blocks in a residual."""

    def __init__(self, channels: int, growth: int, plus: bool) -> None:
        super().__init__()
        self.rdb1 = DenseBlock(channels, growth, plus)
        self.rdb2 = DenseBlock(channels, growth, plus)
        self.rdb3 = DenseBlock(channels, growth, plus)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return the input with the scaled residual."""
        residual_BCHW: Tensor = self.rdb3(self.rdb2(self.rdb1(x_BCHW)))
        return residual_BCHW * RESIDUAL_SCALING + x_BCHW


class RRDBNet(nn.Module):
    """Enlarges RGB images by 2 ** `doublings` / `unshuffle`.

    channels, growth  features of the trunk, and those that each convolution of a dense block adds
    blocks            residual in residual dense blocks
    doublings         convolutions after an enlargement by 2, nearest neighbour
    unshuffle         squares of this edge become channels at the beginning; 1 for none
    plus              the residuals of ESRGAN+
    """

    def __init__(
        self, channels: int, growth: int, blocks: int, doublings: int, unshuffle: int = 1, plus: bool = False
    ) -> None:
        super().__init__()
        self.unshuffle = unshuffle
        #: factor of both sides
        self.scale = 2**doublings // unshuffle
        self.conv_first = nn.Conv2d(3 * unshuffle**2, channels, 3, padding=1)
        self.body = nn.Sequential(*[ResidualDenseBlocks(channels, growth, plus) for _ in range(blocks)])
        self.conv_body = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv_up = nn.ModuleList([nn.Conv2d(channels, channels, 3, padding=1) for _ in range(doublings)])
        self.conv_hr = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv_last = nn.Conv2d(channels, 3, 3, padding=1)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Enlarge images with values from 0 to 1. Sides that are no multiple of `unshuffle` are reflected at their
        ends, and the result is cropped."""
        height, width = x_BCHW.shape[-2:]
        if self.unshuffle > 1:
            below, right = -height % self.unshuffle, -width % self.unshuffle
            if below or right:
                x_BCHW = functional.pad(x_BCHW, (0, right, 0, below), "reflect")
            x_BCHW = functional.pixel_unshuffle(x_BCHW, self.unshuffle)
        x_BCHW = self.conv_first(x_BCHW)
        x_BCHW = x_BCHW + self.conv_body(self.body(x_BCHW))
        for conv in self.conv_up:
            x_BCHW = _activated(conv(functional.interpolate(x_BCHW, scale_factor=2.0, mode="nearest")))
        made_BCHW: Tensor = self.conv_last(_activated(self.conv_hr(x_BCHW)))
        return made_BCHW[..., : height * self.scale, : width * self.scale]


def _activated(x: Tensor) -> Tensor:
    return functional.leaky_relu(x, NEGATIVE_SLOPE)
