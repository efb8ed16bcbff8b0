"""Arguments of diffusers' UNets with inputs other than text, from recognised sizes and parameter shapes. Torch-free.

Facts that shapes do not tell are constants, with their source.
"""

from __future__ import annotations

from typing import Any

from modelpool.pool.core.errors import UnknownArchitecture
from modelpool.pool.detection.layouts.shape_sizes import Config
from modelpool.pool.families.parts.forward import Arguments, Shapes
from modelpool.pool.models.common.infer_config import MAX_NORM_GROUPS, NUMBER_WIDTH, SD1_HEADS, UNET_HEAD_WIDTH


def unet_config(found: Config, shapes: Shapes) -> Arguments:
    """Return the arguments of `diffusers.UNet2DConditionModel`.

    Raises UnknownArchitecture for a UNet with different down and up paths: it was pruned.
    """
    widths = _widths(shapes, "conv1")
    levels = range(len(widths))
    depths = [_count(shapes, f"down_blocks.{level}.attentions.0.transformer_blocks.") for level in levels]
    up_depths = [_count(shapes, f"up_blocks.{level}.attentions.0.transformer_blocks.") for level in reversed(levels)]
    middle = _count(shapes, "mid_block.attentions.0.transformer_blocks.")
    if up_depths != depths or not middle:
        raise UnknownArchitecture(
            f"UNet: found {depths} transformer blocks in the down path, {middle} in the middle and {up_depths} in the "
            "up path, expected equal paths and some in the middle"
        )
    labels = shapes.get("class_embedding.weight")
    linear = bool(found["use_linear_in_transformer"])
    config: Arguments = {
        "in_channels": shapes["conv_in.weight"][1],
        "out_channels": shapes["conv_out.weight"][0],
        "block_out_channels": widths,
        "layers_per_block": _count(shapes, "down_blocks.0.resnets."),
        "cross_attention_dim": found["context_dim"],
        # # for historical reasons the argument is the number of heads; the x4 upscaler has as many as Stable
        # Diffusion 1. Source: x4-upscaling.yaml of Stability-AI/stablediffusion
        "attention_head_dim": _heads(widths) if linear and not labels else SD1_HEADS,
        "use_linear_projection": linear,
        "down_block_types": tuple("CrossAttnDownBlock2D" if depth else "DownBlock2D" for depth in depths),
        "up_block_types": tuple("CrossAttnUpBlock2D" if depth else "UpBlock2D" for depth in reversed(depths)),
        "transformer_layers_per_block": (*(depth or 1 for depth in depths[:-1]), depths[-1] or middle),
        "only_cross_attention": tuple(_reads_text_alone(shapes, level, widths) for level in levels),
        "norm_num_groups": max(1, min(MAX_NORM_GROUPS, min(widths) // 4)),
    }
    if labels:
        config["num_class_embeds"] = labels[0]
    if "add_embedding.linear_1.weight" in shapes:
        config["addition_embed_type"] = "text_time"
        config["addition_time_embed_dim"] = NUMBER_WIDTH
        config["projection_class_embeddings_input_dim"] = shapes["add_embedding.linear_1.weight"][1]
    return config


def unet_video_config(found: Config, shapes: Shapes) -> Arguments:
    """The arguments of `diffusers.UNetSpatioTemporalConditionModel`."""
    sizes: dict[str, Any] = dict(found)
    widths = _widths(shapes, "spatial_res_block.conv1")
    depths = [_count(shapes, f"down_blocks.{level}.attentions.0.transformer_blocks.") for level in range(len(widths))]
    return {
        "in_channels": sizes["in_channels"],
        "out_channels": sizes["out_channels"],
        "block_out_channels": widths,
        "layers_per_block": _count(shapes, "down_blocks.0.resnets."),
        "cross_attention_dim": sizes["context_dim"],
        "num_attention_heads": _heads(widths),
        "transformer_layers_per_block": tuple(depth or 1 for depth in depths),
        "addition_time_embed_dim": NUMBER_WIDTH,
        "projection_class_embeddings_input_dim": sizes["adm_in_channels"],
        "down_block_types": tuple(_spatio_temporal("Down", depth) for depth in depths),
        "up_block_types": tuple(_spatio_temporal("Up", depth) for depth in reversed(depths)),
    }


def _spatio_temporal(path: str, depth: int) -> str:
    return f"{'CrossAttn' if depth else ''}{path}BlockSpatioTemporal"


def _widths(shapes: Shapes, convolution: str) -> tuple[int, ...]:
    levels = _count(shapes, "down_blocks.")
    return tuple(shapes[f"down_blocks.{level}.resnets.0.{convolution}.weight"][0] for level in range(levels))


def _count(shapes: Shapes, beginning: str) -> int:
    """Return how many numbers follow `beginning`."""
    return len({key.removeprefix(beginning).partition(".")[0] for key in shapes if key.startswith(beginning)})


def _heads(widths: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(max(1, width // UNET_HEAD_WIDTH) for width in widths)


def _reads_text_alone(shapes: Shapes, level: int, widths: tuple[int, ...]) -> bool:
    """Return whether the second attention of a level reads the text, by the width of its keys.

    Ambiguous if the text is as wide as the level; no published model has such a level.
    """
    keys = shapes.get(f"down_blocks.{level}.attentions.0.transformer_blocks.0.attn1.to_k.weight")
    return keys is not None and keys[1] != widths[level]
