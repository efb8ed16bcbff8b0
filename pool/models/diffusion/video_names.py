"""Convert published names to those of diffusers' video transformers, where diffusers' converters do not suffice.

Like diffusers' own, these functions only rename and split tensors, so that `pool.keymaps.key_map` can trace them. They
work for every size. Sources: the key lists of the published files (tests/golden/detection_keys.json.gz) and those of
the modules.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from modelpool.pool.models.diffusion.key_maps import layout_converter

#: Wan's position embedding for the states of first and last frame, which the converter ignores
_WAN_POSITIONS = ("img_emb.emb_pos", "condition_embedder.image_embedder.pos_embed")


def convert_wan(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert Wan 2.1 and 2.2. The convolution for a reference image (`ref_conv`) does not exist in diffusers'
    class."""
    theirs, ours = _WAN_POSITIONS
    converted = layout_converter("wan")({key: x for key, x in tensors.items() if not key.startswith("ref_conv.")})
    return {ours if key == theirs else key: tensor for key, tensor in converted.items()}


_MOCHI_OUTER = (
    ("pos_frequencies", "pos_frequencies"),
    ("x_embedder.proj.", "patch_embed.proj."),
    ("t_embedder.mlp.0.", "time_embed.timestep_embedder.linear_1."),
    ("t_embedder.mlp.2.", "time_embed.timestep_embedder.linear_2."),
    ("t5_y_embedder.", "time_embed.pooler."),
    ("t5_yproj.", "time_embed.caption_proj."),
    ("final_layer.mod.", "norm_out.linear."),
    ("final_layer.linear.", "proj_out."),
)
#: a block's modules and their new names; several names split the tensor into equal parts
_MOCHI_BLOCK: dict[str, tuple[str, ...]] = {
    "mod_x": ("norm1.linear",),
    "mod_y": ("norm1_context.linear",),
    "attn.qkv_x": ("attn1.to_q", "attn1.to_k", "attn1.to_v"),
    "attn.qkv_y": ("attn1.add_q_proj", "attn1.add_k_proj", "attn1.add_v_proj"),
    "attn.q_norm_x": ("attn1.norm_q",),
    "attn.k_norm_x": ("attn1.norm_k",),
    "attn.q_norm_y": ("attn1.norm_added_q",),
    "attn.k_norm_y": ("attn1.norm_added_k",),
    "attn.proj_x": ("attn1.to_out.0",),
    "attn.proj_y": ("attn1.to_add_out",),
    "mlp_x.w1": ("ff.net.0.proj",),
    "mlp_x.w2": ("ff.net.2",),
    "mlp_y.w1": ("ff_context.net.0.proj",),
    "mlp_y.w2": ("ff_context.net.2",),
}
#: modules whose halves are swapped: gate and value, shift and scale
_MOCHI_SWAPPED = ("mlp_x.w1", "mlp_y.w1", "final_layer.mod")


def convert_mochi(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert Mochi. diffusers' converter handles exactly 48 blocks."""
    blocks = [int(m[1]) for key in tensors if (m := re.match(r"blocks\.(\d+)\.", key)) is not None]
    last = max(blocks, default=0)
    converted: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        found = re.fullmatch(r"blocks\.(\d+)\.(.+)\.(weight|bias)", key)
        if found is None:
            for theirs, ours in _MOCHI_OUTER:
                if key.startswith(theirs):
                    converted[ours + key.removeprefix(theirs)] = _swapped(key, tensor)
            continue
        number, module, end = int(found[1]), found[2], found[3]
        names = _MOCHI_BLOCK.get(module, ())
        if module == "mod_y" and number == last:  # the text path ends here, with a different norm
            names = ("norm1_context.linear_1",)
        parts = tensor.chunk(len(names)) if len(names) > 1 else (_swapped(module, tensor),)
        for name, part in zip(names, parts, strict=True) if names else ():
            converted[f"transformer_blocks.{number}.{name}.{end}"] = part
    return converted


def _swapped(key: str, tensor: Tensor) -> Tensor:
    return torch.cat(tensor.chunk(2)[::-1]) if key.startswith(_MOCHI_SWAPPED) else tensor
