"""`CompactNet`: the small networks of Real-ESRGAN for videos and drawings (SRVGGNetCompact).

Source: the published networks: convolutions with activations in a row, in the size of the input, then a pixel shuffle
whose result is added to the enlarged input.

Shape legend: B batch, C channels, H W height and width.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


class CompactNet(nn.Module):
    """Enlarges RGB images by `scale`.

    channels  features of the convolutions
    hidden    convolutions between the first and the last one
    """

    def __init__(self, channels: int, hidden: int, scale: int) -> None:
        super().__init__()
        self.scale = scale
        layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1), nn.PReLU(channels)]
        for _ in range(hidden):
            layers += [nn.Conv2d(channels, channels, 3, padding=1), nn.PReLU(channels)]
        self.body = nn.Sequential(*layers, nn.Conv2d(channels, 3 * scale**2, 3, padding=1))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Enlarge images with values from 0 to 1."""
        details_BCHW = functional.pixel_shuffle(self.body(x_BCHW), self.scale)
        return details_BCHW + functional.interpolate(x_BCHW, scale_factor=float(self.scale), mode="nearest")
