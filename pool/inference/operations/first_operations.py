"""Scaling of latents and images as operations: the methods that `torch.nn.functional.interpolate` has.

Shape legend: T frames (1 for a single image), C channels, H W height and width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from modelpool.pool.inference.operations.operation import (
    IMAGE,
    LATENT,
    MAX_SIDE,
    Inputs,
    Operation,
    Size,
    Sizes,
    need,
    need_one_of,
)
from modelpool.pool.values.core.stage_params import ImagePixels, Latent, Result, VideoFrames

#: how values between pixels are computed
METHODS = ("nearest-exact", "bilinear", "area", "bicubic")


@dataclass(frozen=True, slots=True)
class Scaling:
    """A size in pixels or cells, and the method; `crop` cuts off the sides that are too long, at the centre, before the
    value is scaled, so that nothing is stretched."""

    width: int
    height: int
    method: str = "bilinear"
    crop: bool = False

    def __post_init__(self) -> None:
        for name in ("width", "height"):
            need(name, getattr(self, name), 1, MAX_SIDE)
        need_one_of("method", self.method, METHODS)


def _scaled_size(name: str) -> Any:
    def size(params: Scaling, sizes: Sizes) -> Size:
        return replace(sizes[name], width=params.width, height=params.height)

    return size


def _scaled(values_TCHW: Any, params: Scaling) -> Any:
    """Return float32 values scaled."""
    import torch  # when it runs: who plans work needs no torch
    from torch.nn import functional

    tensor = torch.from_numpy(np.ascontiguousarray(values_TCHW, dtype=np.float32))
    if params.crop:
        height, width = tensor.shape[-2:]
        kept_width = min(width, max(1, round(height * params.width / params.height)))
        kept_height = min(height, max(1, round(width * params.height / params.width)))
        left, top = (width - kept_width) // 2, (height - kept_height) // 2
        tensor = tensor[..., top : top + kept_height, left : left + kept_width]
    corners = {"align_corners": False} if params.method in ("bilinear", "bicubic") else {}
    size = params.height, params.width
    return functional.interpolate(tensor, size=size, mode=params.method, **corners).numpy()


def _latent_upscale(params: Scaling, inputs: Inputs) -> Result:
    latent: Latent = inputs["samples"]
    values = latent.samples_CHW
    if values.ndim == 4:  # of a video: C T H W
        return replace(latent, samples_CHW=np.ascontiguousarray(_scaled(values.swapaxes(0, 1), params).swapaxes(0, 1)))
    return replace(latent, samples_CHW=_scaled(values[None], params)[0])


def _image_scale(params: Scaling, inputs: Inputs) -> Result:
    image: ImagePixels | VideoFrames = inputs["image"]
    frames_THWC = image.pixels_HWC[None] if isinstance(image, ImagePixels) else image.frames_THWC
    made = _scaled(frames_THWC.transpose(0, 3, 1, 2), params).transpose(0, 2, 3, 1)
    pixels_THWC = np.ascontiguousarray(np.rint(np.clip(made, 0, 255)).astype(np.uint8))
    if isinstance(image, ImagePixels):
        return ImagePixels(pixels_THWC[0])
    return replace(image, frames_THWC=pixels_THWC)


FIRST_OPERATIONS: Mapping[str, Operation] = MappingProxyType(
    {
        each.name: each
        for each in (
            Operation("latent_upscale", Scaling, {"samples": LATENT}, LATENT, _latent_upscale, _scaled_size("samples")),
            Operation("image_scale", Scaling, {"image": IMAGE}, IMAGE, _image_scale, _scaled_size("image")),
        )
    }
)
