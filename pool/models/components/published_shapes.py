"""Names and shapes of a component's tensors in published single files, from the parameters of its module.

The inverse of the converters in `pool.models.components.common.diffusers_private`, for the UNets of latent diffusion
and their text encoders, vision encoders and VAEs. Parameters without a name here are dropped: the code that writes a
file checks it with the converter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from modelpool.pool.families.parts.located_family import Architecture
from modelpool.pool.files.formats.safetensors_file import Shape
from modelpool.pool.models.components.common.open_clip_names import OPEN_CLIP_TEXT, OPEN_CLIP_VISION
from modelpool.pool.models.components.vae.ldm_names import kl_shapes

_TEXT_LEVEL = "text_model."
#: parts of a UNet outside of its blocks
_UNET_ENDS: Mapping[str, str] = MappingProxyType(
    {
        "time_embedding.linear_1": "time_embed.0",
        "time_embedding.linear_2": "time_embed.2",
        "add_embedding.linear_1": "label_emb.0.0",
        "add_embedding.linear_2": "label_emb.0.2",
        "class_embedding.linear_1": "label_emb.0.0",
        "class_embedding.linear_2": "label_emb.0.2",
        "conv_in": "input_blocks.0.0",
        "conv_norm_out": "out.0",
        "conv_out": "out.2",
    }
)
#: parts of a residual block
_RESIDUAL: Mapping[str, str] = MappingProxyType(
    {
        "norm1": "in_layers.0",
        "conv1": "in_layers.2",
        "time_emb_proj": "emb_layers.1",
        "norm2": "out_layers.0",
        "conv2": "out_layers.3",
        "conv_shortcut": "skip_connection",
    }
)
_MIDDLE: Mapping[tuple[str, int], int] = MappingProxyType({("resnets", 0): 0, ("attentions", 0): 1, ("resnets", 1): 2})
_IN_BLOCK = re.compile(r"(?:(down|up)_blocks\.(\d+)|mid_block)\.(\w+)\.(\d+)\.(.+)")
_FIRST_RESIDUAL = re.compile(r"down_blocks\.0\.resnets\.(\d+)\.")


def published_shapes(architecture: Architecture, shapes: Mapping[str, Shape], prefix: str) -> dict[str, Shape]:
    """Return the tensors of a published file for a component of `architecture`, keys with `prefix`, from the `shapes`
    of its module's parameters. Empty for other architectures."""
    match architecture:
        case Architecture.LDM_UNET:
            found = _unet_shapes(shapes)
        case Architecture.VAE:
            found = kl_shapes(shapes)
        case Architecture.CLIP_TEXT:
            found = {_TEXT_LEVEL + name.removeprefix(_TEXT_LEVEL): shape for name, shape in shapes.items()}
        case Architecture.OPEN_CLIP_TEXT | Architecture.OPEN_CLIP_TEXT_ALONE:
            found = OPEN_CLIP_TEXT.shapes(shapes)
        case Architecture.VISION_MODEL:
            found = OPEN_CLIP_VISION.shapes(shapes)
        case _:
            found = {}
    return {prefix + key: shape for key, shape in found.items()}


def _unet_shapes(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    blocks = len({match[1] for name in shapes if (match := _FIRST_RESIDUAL.match(name))})
    attended = {name.split(".")[1] for name in shapes if name.startswith("up_blocks.") and ".attentions." in name}
    return {key: shape for name, shape in shapes.items() for key in _unet_key(name, blocks, attended)}


def _unet_key(name: str, blocks: int, attended: set[str]) -> Iterator[str]:
    """Yield the key of a UNet's parameter, if it has one: each down level has `blocks` residual blocks, each up level
    one more, and the up levels `attended` have attention."""
    found = _IN_BLOCK.fullmatch(name)
    if found is None:
        part, _, kind = name.rpartition(".")
        if part in _UNET_ENDS:
            yield f"{_UNET_ENDS[part]}.{kind}"
        return
    path, level, part, number, rest = found[1], found[2], found[3], int(found[4]), found[5]
    if path is None:
        if (part, number) in _MIDDLE:
            yield from _part_key(f"middle_block.{_MIDDLE[part, number]}", part, rest)
        return
    first = int(level) * (blocks + 1)
    match part:
        case "resnets" | "attentions":
            block = f"input_blocks.{first + number + 1}" if path == "down" else f"output_blocks.{first + number}"
            yield from _part_key(f"{block}.{0 if part == 'resnets' else 1}", part, rest)
        case "downsamplers":
            yield f"input_blocks.{first + blocks + 1}.0.op.{rest.removeprefix('conv.')}"
        case "upsamplers":  # after the last residual block of its level, and its attention
            yield f"output_blocks.{first + blocks}.{2 if level in attended else 1}.{rest}"


def _part_key(place: str, part: str, rest: str) -> Iterator[str]:
    """Yield the key of `rest` in a residual block, or in attention, which has equal names in both."""
    if part == "attentions":
        yield f"{place}.{rest}"
        return
    name, _, kind = rest.rpartition(".")
    if name in _RESIDUAL:
        yield f"{place}.{_RESIDUAL[name]}.{kind}"
