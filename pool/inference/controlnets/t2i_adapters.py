"""T2I-Adapters: arguments from shapes, key names, the call, and the UNets that one fits.

A T2I-Adapter reads only its image, so it is called once in a run. Its features are added inside of the first half of a
UNet.

Shape legend: B batch, C channels, H W height and width.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from modelpool.pool.files.formats.safetensors_file import Shape
from modelpool.pool.inference.conditioning.micro_conditioning import FEATURES, Residuals
from modelpool.pool.inference.controlnets.calls import ControlInputs
from modelpool.pool.inference.controlnets.config import Config
from modelpool.pool.values.core.errors import UnknownArchitecture

Shapes: TypeAlias = Mapping[str, Shape]

#: kinds of `diffusers.T2IAdapter`: for SD1 and SD2, for SDXL, and the small one for SD1 and SD2
FULL, FULL_XL, LIGHT = "full_adapter", "full_adapter_xl", "light_adapter"
#: the UNets that each kind is for, for display
TITLES: Mapping[str, str] = {FULL: "Stable Diffusion 1 and 2", FULL_XL: "Stable Diffusion XL"}
#: pixels per cell of the first features. Source: TencentARC/t2i-adapter-canny-sdxl-1.0 (XL), t2iadapter_canny_sd15v2
_XL_FACTOR = 16
#: pixels per latent cell of UNets, along one side
_CELL = 8
#: luminance of RGB in 65,536ths, rounded to whole values. Source: ITU-R BT.601, as Pillow's mode "L" computes it
_LUMA, _LUMA_ONE = (19_595.0, 38_470.0, 7_471.0), 65_536.0
_BLOCK = re.compile(r"^body\.(\d+)\.")
_FLAT = re.compile(r"^body\.(\d+)\.(block[12]|in_conv)\.")


def t2i_adapter_config(shapes: Shapes) -> Config:
    """Return the arguments of `diffusers.T2IAdapter` with parameters of `shapes`. Raises UnknownArchitecture."""
    blocks = sorted({int(match[1]) for key in shapes if (match := re.match(r"^adapter\.body\.(\d+)\.", key))})
    resnets = {key.split(".")[4] for key in shapes if key.startswith("adapter.body.0.resnets.")}
    first = shapes.get("adapter.conv_in.weight")
    if first is None:
        channels = [_shape(shapes, f"adapter.body.{n}.out_conv.weight")[0] for n in blocks[:-1]]
        colors, factor = _colors(_shape(shapes, "adapter.body.0.in_conv.weight")[1])
        kind = LIGHT
    else:
        channels = [_shape(shapes, f"adapter.body.{n}.resnets.0.block1.weight")[0] for n in blocks]
        colors, factor = _colors(first[1])
        kind = FULL_XL if factor == _XL_FACTOR else FULL
    return {
        "in_channels": colors,
        "channels": channels,
        "num_res_blocks": len(resnets),
        "downscale_factor": factor,
        "adapter_type": kind,
    }


def _colors(channels: int) -> tuple[int, int]:
    """Return the image channels and the pixels along one side of a cell, of which `channels` is the product."""
    for colors in (3, 1):
        side = math.isqrt(channels // colors)
        if colors * side**2 == channels:
            return colors, side
    raise UnknownArchitecture(f"T2I-Adapter: found {channels} input channels, expected 1 or 3 for each pixel of a cell")


def _shape(shapes: Shapes, key: str) -> Shape:
    if len(shapes.get(key, ())) != 4:
        raise UnknownArchitecture(f"T2I-Adapter: {key}: found {shapes.get(key)}, expected a convolution")
    return shapes[key]


def t2i_names(shapes: Shapes) -> Callable[[dict[str, Tensor]], Mapping[str, Tensor]]:
    """Return the converter to diffusers' names for a file with these shapes: in the naming of TencentARC, which numbers
    the residual blocks of all sizes consecutively, or of diffusers. Source: diffusers' script
    `convert_original_t2i_adapter.py`."""
    if any(key.startswith("adapter.") for key in shapes):
        return lambda tensors: tensors
    if any(key.startswith("body.0.body.") for key in shapes):
        return _light_to_diffusers
    return _full_to_diffusers


def _light_to_diffusers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    renamed = {key: re.sub(r"\.body\.(\d+)\.", r".resnets.\1.", key) for key in tensors}
    return {f"adapter.{renamed[key]}": tensor for key, tensor in tensors.items()}


def _full_to_diffusers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    count = 1 + max(int(match[1]) for key in tensors if (match := _BLOCK.match(key)))
    each = _blocks_per_size(tensors, count)

    def named(key: str) -> str:
        match = _FLAT.match(key)
        if match is None:
            return f"adapter.{key}"
        size, place = divmod(int(match[1]), each)
        rest = key[match.end() :]
        if match[2] == "in_conv":
            return f"adapter.body.{size}.in_conv.{rest}"
        return f"adapter.body.{size}.resnets.{place}.{match[2]}.{rest}"

    return {named(key): tensor for key, tensor in tensors.items()}


def _blocks_per_size(tensors: Mapping[str, Tensor], count: int) -> int:
    """Return the number of residual blocks of each size: a change of width starts a size."""
    starts = [int(match[1]) for key in tensors if (match := _FLAT.match(key)) and match[2] == "in_conv"]
    # without any change of width, as in all published adapters
    return min(starts) if starts else min(2, count)


def call_t2i_adapter(module: nn.Module, inputs: ControlInputs) -> Residuals:
    """Return the features of the images, from the finest to the coarsest."""
    config: Any = module.config
    images_BCHW = inputs.images_BC
    if config.in_channels == 1:
        images_BCHW = _grey(images_BCHW.float()).to(images_BCHW.dtype)
    edge = [-side % config.downscale_factor for side in images_BCHW.shape[-2:]]
    if any(edge):
        images_BCHW = functional.pad(images_BCHW, (0, edge[1], 0, edge[0]), mode="replicate")
    return {FEATURES: tuple(each * inputs.strength for each in module(images_BCHW))}


def _grey(images_BCHW: Tensor) -> Tensor:
    """Return the luminance of images from 0 to 1."""
    weights = torch.tensor(_LUMA, device=images_BCHW.device)[:, None, None]
    values_BCHW = ((images_BCHW * 255).round() * weights).sum(dim=1, keepdim=True)
    return (values_BCHW / _LUMA_ONE + 0.5).floor() / 255


def title_of(config: Mapping[str, Any]) -> str:
    """Return the models that an adapter of these arguments is for, for display."""
    return TITLES.get(config["adapter_type"], TITLES[FULL])


def feature_sizes(config: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Return the channels of each of its features, and their latent cells along one side."""
    first, channels = config["downscale_factor"] // _CELL, list(config["channels"])
    if config["adapter_type"] == FULL_XL:
        return [(width, first * (1 if place < 2 else 2)) for place, width in enumerate(channels)]
    if config["adapter_type"] == LIGHT:
        channels.append(channels[-1])
    return [(width, first * 2**place) for place, width in enumerate(channels)]


def sizes_read(unet: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Return the same for the features that a UNet of diffusers with this configuration reads: one in each block of its
    first half, and one in its middle block. A block without attention reads it after its downsampling."""
    widths, kinds = list(unet["block_out_channels"]), list(unet["down_block_types"])
    last = len(widths) - 1
    found = [
        (width, 2 ** min(last, place + (0 if kind.startswith("CrossAttn") else 1)))
        for place, (width, kind) in enumerate(zip(widths, kinds, strict=True))
    ]
    return [*found, (widths[last], 2**last)]
