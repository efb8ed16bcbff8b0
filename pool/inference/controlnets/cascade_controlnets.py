"""ControlNets of Stable Cascade's stage C: an EfficientNet V2 reads the image, and projections of its result are added
before some residual blocks of the model.

Source: `ControlNet` of Stability-AI/StableCascade (MIT), and the configurations of its ControlNets. A ControlNet reads
its image alone, so it is called once in a run.

Shape legend: B batch, C channels, H W height and width.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from torch import Tensor, nn
from torch.nn import functional

from modelpool.pool.files.formats.safetensors_file import Shape
from modelpool.pool.inference.conditioning.micro_conditioning import Residuals
from modelpool.pool.inference.controlnets.calls import ControlInputs
from modelpool.pool.inference.controlnets.config import Config
from modelpool.pool.inference.pixels.image_ops import HALF, covering_exact
from modelpool.pool.models.components.common.efficientnet import efficientnet
from modelpool.pool.models.components.common.efficientnet_config import efficientnet_config
from modelpool.pool.values.core.errors import UnknownArchitecture, UnusableField, counted
from modelpool.pool.values.core.stage_params import PixelArray
from modelpool.pool.weights.options.run_context import current_run
from modelpool.pool.weights.patcher.blocks.overlays import Overlays

#: residual blocks of stage C, first to last, before which the projections are added, and the number of its blocks.
#: Source: `controlnet_blocks` of the configurations
CONTROLLED_BLOCKS, BLOCKS = (0, 4, 8, 12, 51, 55, 59, 63), 64
#: the name of the projections among what a call returns: the model has no argument for them
BEFORE_BLOCKS = "before_blocks"
#: channels of a control image that is inpainted: colours, and the mask
WITH_MASK = 4
#: Source: `ControlNet` of Stability-AI/StableCascade
_SLOPE = 0.2
_PROJECTION = re.compile(r"^projections\.(\d+)\.")


class CascadeControlNet(ModelMixin, ConfigMixin):  # type: ignore[misc]
    """A ControlNet with the layers that a file names `backbone` and `projections`."""

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(
        self,
        in_channels: int,
        first_channels: int,
        stages: list[tuple[int, int, int, bool]],
        out_channels: int,
        dim: int,
    ) -> None:
        super().__init__()
        self.backbone = efficientnet(in_channels, first_channels, stages, out_channels)
        self.projections = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(out_channels, out_channels, 1, bias=False),
                nn.LeakyReLU(_SLOPE),
                nn.Conv2d(out_channels, dim, 1, bias=False),
            )
            for _ in CONTROLLED_BLOCKS
        )

    def forward(self, images_BCHW: Tensor) -> tuple[Tensor, ...]:
        """Return the residuals before each of `CONTROLLED_BLOCKS`, one cell for 32 pixels of a side."""
        x_BCHW = self.backbone(images_BCHW)
        return tuple(projection(x_BCHW) for projection in self.projections)


def cascade_control_config(shapes: Mapping[str, Shape]) -> Config:
    """Return the arguments of `CascadeControlNet` with parameters of `shapes`. Raises UnknownArchitecture."""
    count = len({match[1] for key in shapes if (match := _PROJECTION.match(key))})
    if count != len(CONTROLLED_BLOCKS):
        expected = f"{len(CONTROLLED_BLOCKS)}, for the blocks {', '.join(map(str, CONTROLLED_BLOCKS))} of stage C"
        raise UnknownArchitecture(
            f"ControlNet of Stable Cascade: found {counted(count, 'projection')}, expected {expected}"
        )
    return {**efficientnet_config(shapes, "backbone."), "dim": shapes["projections.0.2.weight"][0]}


def call_cascade_control(module: Any, inputs: ControlInputs) -> Residuals:
    """Return the states that are added before the blocks."""
    images_BCHW = inputs.images_BC
    if module.config.in_channels == 1:
        images_BCHW = images_BCHW.mean(dim=1, keepdim=True)
    return {BEFORE_BLOCKS: tuple(each * inputs.strength for each in module(images_BCHW))}


def control_image(
    name: str, pixels_HWC: PixelArray, mask_HW: PixelArray | None, size: tuple[int, int], channels: int
) -> Tensor:
    """Return the image that the ControlNet `name` reads, [C,H,W] from 0 to 1, in a size, by the nearest pixels. One for
    inpainting has `channels` for colours and the mask: an image with the mask as its alpha channel, or an image and a
    mask, which makes it white there. Raises UnusableField for an image without one, and for an alpha channel that
    another ControlNet would not read."""
    image_CHW = torch.from_numpy(covering_exact(pixels_HWC, *size).copy()).permute(2, 0, 1).float() / 255
    if mask_HW is not None:
        hidden_HW = torch.from_numpy(np.asarray(covering_exact(mask_HW, *size) >= HALF))
        return torch.cat((image_CHW[:3].masked_fill(hidden_HW, 1.0), hidden_HW[None].float()))
    has_mask = len(image_CHW) == WITH_MASK
    if has_mask != (channels == WITH_MASK):
        found, expected = ("an", "no") if has_mask else ("no", "an")
        why = "a mask in `controls.mask`, or as the alpha channel of its image" if expected == "an" else "colours alone"
        raise UnusableField(f"controls.image: found {found} alpha channel; ControlNet {name!r} reads {why}")
    return image_CHW


#: (number of a projection, input of the block before which it is added) -> the new input
Added: TypeAlias = Callable[[int, Tensor], Tensor]


@contextmanager
def before_blocks(model: nn.Module, added: Added) -> Iterator[None]:
    """Have `added` change the input of each of `CONTROLLED_BLOCKS` of `model`, in its run inside of the block of
    code."""
    run = current_run(model)
    assert run is not None, "the model of a run is the current one"
    overlays = Overlays(run)

    def before(number: int) -> Callable[..., Any]:
        def forward(original: Callable[..., Any], x_BCHW: Tensor, *args: Any, **kwargs: Any) -> Any:
            return original(added(number, x_BCHW), *args, **kwargs)

        return forward

    try:
        blocks = residual_blocks(model)
        for number, place in enumerate(CONTROLLED_BLOCKS):
            overlays.put(blocks[place], before(number))
        yield
    finally:
        overlays.remove()


def with_projection(x_BCHW: Tensor, projection_BCHW: Tensor) -> Tensor:
    """Return the input of a block with a projection, which is scaled to its size."""
    # bilinear, in the precision in which it is on every device
    scaled = functional.interpolate(
        projection_BCHW.float(), size=x_BCHW.shape[-2:], mode="bilinear", align_corners=True
    )
    return x_BCHW + scaled.to(x_BCHW.dtype)


def residual_blocks(model: Any) -> Sequence[nn.Module]:
    """Return the residual blocks of stage C in the order in which they run."""
    levels = (*model.down_blocks, *model.up_blocks)
    return [block for level in levels for block in level if hasattr(block, "depthwise")]
