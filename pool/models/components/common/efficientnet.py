"""EfficientNet V2 under the names of torchvision's state dict, from the table of its paper (Tan and Le, 2021): the
encoder of images of Stable Cascade's stage C, and the first part of its ControlNets.

Batch norms use the statistics of their file. Residual branches are never dropped: there is no training here.

Shape legend: B batch, C channels, H W height and width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from modelpool.pool.models.components.common.efficientnet_config import FIRST_STRIDE, STAGE_STRIDES

#: Source: torchvision's `efficientnet_v2_s`
_EPSILON = 1e-3
#: input channels of a block for each channel of its squeeze. Source: torchvision's `MBConv`
_SQUEEZE = 4
#: colours of an image. A first convolution for other channels replaces torchvision's, and has no padding. Source:
#: `ControlNet` of Stability-AI/StableCascade
_COLOURS = 3


def efficientnet(
    in_channels: int, first_channels: int, stages: list[tuple[int, int, int, bool]], out_channels: int
) -> nn.Sequential:
    """Return the layers before the classifier. Each of `stages` has channels, blocks, expansion, and whether its blocks
    have one convolution instead of a depthwise one with squeeze and excitation."""
    padding = 1 if in_channels == _COLOURS else 0
    parts: list[nn.Module] = [_layer(in_channels, first_channels, 3, FIRST_STRIDE, padding=padding)]
    width = first_channels
    for (out, count, expansion, is_fused), stride in zip(stages, STAGE_STRIDES, strict=True):
        made = []
        for place in range(count):
            kind = _fused if is_fused else _depthwise
            before = width if place == 0 else out
            made.append(_Block(kind(before, out, expansion, stride if place == 0 else 1), before, out, stride, place))
        parts.append(nn.Sequential(*made))
        width = out
    return nn.Sequential(*parts, _layer(width, out_channels, 1))


def _layer(
    before: int, out: int, kernel: int, stride: int = 1, *, groups: int = 1, padding: int | None = None,
    is_active: bool = True,
) -> nn.Sequential:  # fmt: skip
    """Return a convolution, its norm, and its activation."""
    edge = kernel // 2 if padding is None else padding
    convolution = nn.Conv2d(before, out, kernel, stride, edge, groups=groups, bias=False)
    norm = nn.BatchNorm2d(out, eps=_EPSILON)
    return nn.Sequential(convolution, norm, nn.SiLU()) if is_active else nn.Sequential(convolution, norm)


def _fused(before: int, out: int, expansion: int, stride: int) -> list[nn.Module]:
    if expansion == 1:
        return [_layer(before, out, 3, stride)]
    wide = before * expansion
    return [_layer(before, wide, 3, stride), _layer(wide, out, 1, is_active=False)]


def _depthwise(before: int, out: int, expansion: int, stride: int) -> list[nn.Module]:
    wide = before * expansion
    return [
        _layer(before, wide, 1),
        _layer(wide, wide, 3, stride, groups=wide),
        _SqueezeExcitation(wide, max(1, before // _SQUEEZE)),
        _layer(wide, out, 1, is_active=False),
    ]


class _SqueezeExcitation(nn.Module):
    """Scales channels by their means over the image."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Conv2d(channels, squeezed, 1), nn.Conv2d(squeezed, channels, 1)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return the scaled channels."""
        means = functional.adaptive_avg_pool2d(x_BCHW, 1)
        scales = torch.sigmoid(self.fc2(functional.silu(self.fc1(means))))
        scaled: Tensor = scales * x_BCHW
        return scaled


class _Block(nn.Module):
    """A block, with a residual connection where its result has the size of its input."""

    def __init__(self, layers: list[nn.Module], before: int, out: int, stride: int, place: int) -> None:
        super().__init__()
        self.block = nn.Sequential(*layers)
        self._is_residual = before == out and (stride == 1 or place > 0)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return the result of the block."""
        made: Tensor = self.block(x_BCHW)
        return made + x_BCHW if self._is_residual else made
