"""The encoder of images of Stable Cascade's stage C: an EfficientNet V2, and a convolution and a norm behind it.

Source: `EfficientNetEncoder` of Stability-AI/StableCascade (MIT), and the normalisation of pixels of its training code.
The file has no decoder: stage B makes the image.

Shape legend: B batch, C channels, H W height and width.
"""

from __future__ import annotations

from dataclasses import dataclass

from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from torch import Tensor, nn

from modelpool.pool.models.components.common.efficientnet import efficientnet

#: mean and deviation of each colour of ImageNet, from 0 to 1
_MEAN, _DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True, slots=True, eq=False)
class EncodedLatents:
    """What an encoder without a distribution returns."""

    latents: Tensor


class CascadeEncoder(ModelMixin, ConfigMixin):  # type: ignore[misc]
    """The encoder, with the layers that a file names `backbone` and `mapper`."""

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(
        self,
        in_channels: int,
        first_channels: int,
        stages: list[tuple[int, int, int, bool]],
        out_channels: int,
        latent_channels: int,
    ) -> None:
        super().__init__()
        self.backbone = efficientnet(in_channels, first_channels, stages, out_channels)
        # the norm makes the latents of natural images normal, and has no weights
        self.mapper = nn.Sequential(
            nn.Conv2d(out_channels, latent_channels, 1, bias=False), nn.BatchNorm2d(latent_channels, affine=False)
        )

    def encode(self, pixels_BCHW: Tensor) -> EncodedLatents:
        """Return the latents of pixels from -1 to 1, one cell for 32 pixels of a side."""
        mean, deviation = (pixels_BCHW.new_tensor(values).view(1, -1, 1, 1) for values in (_MEAN, _DEVIATION))
        x_BCHW = (pixels_BCHW * 0.5 + 0.5 - mean) / deviation
        return EncodedLatents(self.mapper(self.backbone(x_BCHW)))
