"""Converters for layouts that diffusers builds but has no converter for, in the same form as its own.

Sources: the public key lists of the original and of the diffusers checkpoints of the same weights. Like diffusers'
converters, these functions only rename and cut tensors, so that `pool.keymaps.key_map` can trace them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayoutTable:
    """A transformer with numbered `blocks`, in the names of the original and of diffusers.

    outer    key prefixes outside of blocks; other keys are left out
    swapped  those of them whose halves are swapped: the original has shift before scale
    blocks   diffusers' name of the list of blocks
    block    modules of a block; one with several names is cut into equal parts. Others keep their names.
    """

    outer: tuple[tuple[str, str], ...]
    swapped: tuple[str, ...]
    blocks: str
    block: Mapping[str, tuple[str, ...]]


_PIXART = LayoutTable(
    outer=(
        ("x_embedder.proj.", "pos_embed.proj."),
        ("t_embedder.mlp.0.", "adaln_single.emb.timestep_embedder.linear_1."),
        ("t_embedder.mlp.2.", "adaln_single.emb.timestep_embedder.linear_2."),
        ("csize_embedder.mlp.0.", "adaln_single.emb.resolution_embedder.linear_1."),
        ("csize_embedder.mlp.2.", "adaln_single.emb.resolution_embedder.linear_2."),
        ("ar_embedder.mlp.0.", "adaln_single.emb.aspect_ratio_embedder.linear_1."),
        ("ar_embedder.mlp.2.", "adaln_single.emb.aspect_ratio_embedder.linear_2."),
        ("t_block.1.", "adaln_single.linear."),
        ("y_embedder.y_proj.fc1.", "caption_projection.linear_1."),
        ("y_embedder.y_proj.fc2.", "caption_projection.linear_2."),
        ("y_embedder.y_embedding", "caption_projection.y_embedding"),
        ("final_layer.linear.", "proj_out."),
        ("final_layer.scale_shift_table", "scale_shift_table"),
    ),
    swapped=(),
    blocks="transformer_blocks",
    block={
        "attn.qkv": ("attn1.to_q", "attn1.to_k", "attn1.to_v"),
        "attn.proj": ("attn1.to_out.0",),
        "cross_attn.q_linear": ("attn2.to_q",),
        "cross_attn.kv_linear": ("attn2.to_k", "attn2.to_v"),
        "cross_attn.proj": ("attn2.to_out.0",),
        "mlp.fc1": ("ff.net.0.proj",),
        "mlp.fc2": ("ff.net.2",),
    },
)
_SANA = LayoutTable(
    outer=(
        ("x_embedder.proj.", "patch_embed.proj."),
        ("t_embedder.mlp.0.", "time_embed.emb.timestep_embedder.linear_1."),
        ("t_embedder.mlp.2.", "time_embed.emb.timestep_embedder.linear_2."),
        ("t_block.1.", "time_embed.linear."),
        ("y_embedder.y_proj.fc1.", "caption_projection.linear_1."),
        ("y_embedder.y_proj.fc2.", "caption_projection.linear_2."),
        ("attention_y_norm.", "caption_norm."),
        ("final_layer.linear.", "proj_out."),
        ("final_layer.scale_shift_table", "scale_shift_table"),
    ),
    swapped=(),
    blocks="transformer_blocks",
    block={
        "attn.qkv": ("attn1.to_q", "attn1.to_k", "attn1.to_v"),
        "attn.q_norm": ("attn1.norm_q",),
        "attn.k_norm": ("attn1.norm_k",),
        "attn.proj": ("attn1.to_out.0",),
        "cross_attn.q_linear": ("attn2.to_q",),
        "cross_attn.kv_linear": ("attn2.to_k", "attn2.to_v"),
        "cross_attn.q_norm": ("attn2.norm_q",),
        "cross_attn.k_norm": ("attn2.norm_k",),
        "cross_attn.proj": ("attn2.to_out.0",),
        "mlp.inverted_conv.conv": ("ff.conv_inverted",),
        "mlp.depth_conv.conv": ("ff.conv_depth",),
        "mlp.point_conv.conv": ("ff.conv_point",),
    },
)
_HUNYUAN_DIT = LayoutTable(
    outer=(
        ("text_embedding_padding", "text_embedding_padding"),
        ("mlp_t5.0.", "text_embedder.linear_1."),
        ("mlp_t5.2.", "text_embedder.linear_2."),
        ("x_embedder.proj.", "pos_embed.proj."),
        ("t_embedder.mlp.0.", "time_extra_emb.timestep_embedder.linear_1."),
        ("t_embedder.mlp.2.", "time_extra_emb.timestep_embedder.linear_2."),
        ("pooler.", "time_extra_emb.pooler."),
        ("style_embedder.", "time_extra_emb.style_embedder."),
        ("extra_embedder.0.", "time_extra_emb.extra_embedder.linear_1."),
        ("extra_embedder.2.", "time_extra_emb.extra_embedder.linear_2."),
        ("final_layer.adaLN_modulation.1.", "norm_out.linear."),
        ("final_layer.linear.", "proj_out."),
    ),
    swapped=("final_layer.adaLN_modulation.1.",),
    blocks="blocks",
    block={
        "norm1": ("norm1.norm",),
        "default_modulation.1": ("norm1.linear",),
        # the original numbers the norms in the order of their creation, diffusers in the order of their use
        "norm2": ("norm3",),
        "norm3": ("norm2",),
        "attn1.Wqkv": ("attn1.to_q", "attn1.to_k", "attn1.to_v"),
        "attn1.q_norm": ("attn1.norm_q",),
        "attn1.k_norm": ("attn1.norm_k",),
        "attn1.out_proj": ("attn1.to_out.0",),
        "attn2.q_proj": ("attn2.to_q",),
        "attn2.kv_proj": ("attn2.to_k", "attn2.to_v"),
        "attn2.q_norm": ("attn2.norm_q",),
        "attn2.k_norm": ("attn2.norm_k",),
        "attn2.out_proj": ("attn2.to_out.0",),
        "mlp.fc1": ("ff.net.0.proj",),
        "mlp.fc2": ("ff.net.2",),
    },
)


def convert(layout: LayoutTable, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of an original checkpoint under diffusers' names."""
    converted: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        block = re.fullmatch(r"blocks\.(\d+)\.(.+)", key)
        if block is not None:
            converted |= _of_block(layout, f"{layout.blocks}.{block[1]}.", block[2], tensor)
            continue
        for old, new in layout.outer:
            if key.startswith(old):
                value = torch.cat(tensor.chunk(2)[::-1]) if old in layout.swapped else tensor
                converted[new + key.removeprefix(old)] = value
    return converted


def _of_block(layout: LayoutTable, prefix: str, key: str, tensor: Tensor) -> dict[str, Tensor]:
    module, _, end = key.rpartition(".")
    if module not in layout.block:
        return {prefix + key: tensor}
    names = layout.block[module]
    pieces = tensor.chunk(len(names)) if len(names) > 1 else (tensor,)
    return {f"{prefix}{name}.{end}": piece for name, piece in zip(names, pieces, strict=True)}


EXTRA_CONVERTERS: Mapping[str, Callable[[dict[str, Tensor]], Mapping[str, Tensor]]] = {
    "pixart": partial(convert, _PIXART),
    "hunyuan_dit": partial(convert, _HUNYUAN_DIT),
    "sana": partial(convert, _SANA),
}
