"""Arguments of diffusers' ControlNets of UNets, from the shapes of their parameters. Torch-free; builds nothing.

Arguments that shapes do not determine are as in the UNets that ControlNets are copied from
(`pool.models.components.common.infer_config`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeAlias

from modelpool.pool.families.parts.unet_facts import MAX_NORM_GROUPS, NUMBER_WIDTH, SD1_HEADS, UNET_HEAD_WIDTH
from modelpool.pool.files.formats.safetensors_file import Shape
from modelpool.pool.values.core.errors import UnknownArchitecture

Config: TypeAlias = dict[str, Any]

#: head width of the attention among images. Source: the configuration of xinsir/controlnet-union-sdxl-1.0
UNION_HEAD_WIDTH = 40


def controlnet_config(shapes: Mapping[str, Shape]) -> Config:
    """Return the arguments of a ControlNet of SD1, SD2 or SDXL, of any size, with parameters of `shapes` (diffusers
    keys). Raises UnknownArchitecture naming a missing parameter."""
    levels = range(_count(shapes, r"down_blocks\.(\d+)\."))
    if not levels:
        raise UnknownArchitecture("ControlNet: found no down_blocks, expected at least one")
    channels = tuple(_shape(shapes, f"down_blocks.{i}.resnets.0.conv1.weight", 4)[0] for i in levels)
    depths = [_count(shapes, rf"down_blocks\.{i}\.attentions\.0\.transformer_blocks\.(\d+)\.") for i in levels]
    middle = _count(shapes, r"mid_block\.attentions\.0\.transformer_blocks\.(\d+)\.")
    attention = next((key for key in shapes if key.endswith("attentions.0.transformer_blocks.0.attn2.to_k.weight")), "")
    stem = attention.removesuffix("transformer_blocks.0.attn2.to_k.weight")
    is_linear = not attention or len(shapes.get(f"{stem}proj_in.weight", ())) == 2
    config: Config = {
        "in_channels": _shape(shapes, "conv_in.weight", 4)[1],
        "conditioning_channels": _shape(shapes, "controlnet_cond_embedding.conv_in.weight", 4)[1],
        "conditioning_embedding_out_channels": _image_channels(shapes),
        "block_out_channels": channels,
        "layers_per_block": _count(shapes, r"down_blocks\.0\.resnets\.(\d+)\."),
        "attention_head_dim": tuple(max(1, c // UNET_HEAD_WIDTH) for c in channels) if is_linear else SD1_HEADS,
        "use_linear_projection": is_linear,
        "down_block_types": tuple("CrossAttnDownBlock2D" if depth else "DownBlock2D" for depth in depths),
        "mid_block_type": "UNetMidBlock2DCrossAttn" if middle else "UNetMidBlock2D",
        # the middle block uses the last level's
        "transformer_layers_per_block": (*(depth or 1 for depth in depths[:-1]), depths[-1] or middle or 1),
        "norm_num_groups": min(MAX_NORM_GROUPS, max(1, min(channels) // 4)),
    }
    if attention:
        config["cross_attention_dim"] = _shape(shapes, attention, 2)[1]
    if "add_embedding.linear_1.weight" in shapes:
        config["addition_embed_type"] = "text_time"
        config["addition_time_embed_dim"] = NUMBER_WIDTH
        config["projection_class_embeddings_input_dim"] = _shape(shapes, "add_embedding.linear_1.weight", 2)[1]
    return config


def union_config(shapes: Mapping[str, Shape]) -> Config:
    """Return the arguments of `diffusers.ControlNetUnionModel`; as `controlnet_config`."""
    kinds, channels = _shape(shapes, "task_embedding", 2)
    plain = controlnet_config(shapes)
    del plain["mid_block_type"]  # the class has a single type, with attention
    return {
        **plain,
        "num_control_type": kinds,
        "num_trans_channel": channels,
        "num_trans_head": max(1, channels // UNION_HEAD_WIDTH),
        "num_trans_layer": _count(shapes, r"transformer_layes\.(\d+)\."),
        "num_proj_channel": _shape(shapes, "spatial_ch_projs.weight", 2)[0],
    }


def _image_channels(shapes: Mapping[str, Shape]) -> tuple[int, ...]:
    """Return the channels at each resolution of the control image's encoder: every second convolution halves it."""
    stem = "controlnet_cond_embedding"
    blocks = _count(shapes, rf"{stem}\.blocks\.(\d+)\.")
    first = _shape(shapes, f"{stem}.conv_in.weight", 4)[0]
    return (first, *(_shape(shapes, f"{stem}.blocks.{i}.weight", 4)[0] for i in range(1, blocks, 2)))


def _shape(shapes: Mapping[str, Shape], key: str, dimensions: int) -> Shape:
    if len(shapes.get(key, ())) != dimensions:
        found = f"shape {shapes[key]}" if key in shapes else "no such tensor"
        expected = f"expected a tensor with {dimensions} dimensions"
        raise UnknownArchitecture(f"ControlNet: {key}: found {found}, {expected}")
    return shapes[key]


def _count(shapes: Mapping[str, Shape], pattern: str) -> int:
    """Count the distinct numbers that `pattern` finds at the start of keys; a gap is detected later as a missing
    key."""
    compiled = re.compile(pattern)
    return len({match[1] for key in shapes if (match := compiled.match(key))})
