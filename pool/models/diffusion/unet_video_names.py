"""Convert the names in Stable Video Diffusion's file to those of diffusers' video UNet.

Latent diffusion's names, with a temporal residual block and temporal transformer blocks next to each spatial one. Like
`pool.families.modules.mochi`: tensors are renamed, and the order of blocks is read off the keys.

Source: the key lists of the published files (tests/golden/detection_keys.json.gz) and those of the module.
"""

from __future__ import annotations

import re

from torch import Tensor

_OUTER = (
    ("time_embed.0.", "time_embedding.linear_1."),
    ("time_embed.2.", "time_embedding.linear_2."),
    ("label_emb.0.0.", "add_embedding.linear_1."),
    ("label_emb.0.2.", "add_embedding.linear_2."),
    ("input_blocks.0.0.", "conv_in."),
    ("out.0.", "conv_norm_out."),
    ("out.2.", "conv_out."),
)
_RESIDUAL = (
    ("in_layers.0.", "norm1."),
    ("in_layers.2.", "conv1."),
    ("emb_layers.1.", "time_emb_proj."),
    ("out_layers.0.", "norm2."),
    ("out_layers.3.", "conv2."),
    ("skip_connection.", "conv_shortcut."),
)
_ATTENTION = (
    ("time_stack.", "temporal_transformer_blocks."),
    ("time_pos_embed.0.", "time_pos_embed.linear_1."),
    ("time_pos_embed.2.", "time_pos_embed.linear_2."),
)


def convert_unet_video(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert Stable Video Diffusion and SV3D."""
    places = _places(tensors)
    converted: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        outer = next((ours + key.removeprefix(theirs) for theirs, ours in _OUTER if key.startswith(theirs)), None)
        if outer is not None:
            converted[outer] = tensor
            continue
        found = re.fullmatch(r"((?:input_blocks|output_blocks)\.\d+\.\d+|middle_block\.\d+)\.(.+)", key)
        if found is not None and found[1] in places:
            converted[_of_block(places[found[1]], found[2])] = tensor
    return converted


def _of_block(place: str, name: str) -> str:
    if ".resnets." in place:
        if name.startswith("time_mixer."):
            return f"{place}.{name}"
        half = "temporal_res_block" if name.startswith("time_stack.") else "spatial_res_block"
        return f"{place}.{half}.{_renamed(name.removeprefix('time_stack.'), _RESIDUAL)}"
    if ".attentions." in place:
        return f"{place}.{_renamed(name, _ATTENTION)}"
    return f"{place}.{name.removeprefix('op.').removeprefix('conv.')}" if "samplers." in place else f"{place}.{name}"


def _renamed(name: str, rules: tuple[tuple[str, str], ...]) -> str:
    return next((ours + name.removeprefix(theirs) for theirs, ours in rules if name.startswith(theirs)), name)


def _places(tensors: dict[str, Tensor]) -> dict[str, str]:
    """Return diffusers' name of each part of a block, by the name in the file: "input_blocks.1.0" and so on."""
    places = {"middle_block.0": "mid_block.resnets.0", "middle_block.2": "mid_block.resnets.1"}
    places["middle_block.1"] = "mid_block.attentions.0"
    level, layer = 0, 0
    for number in range(1, _blocks(tensors, "input_blocks")):
        stem = f"input_blocks.{number}"
        if f"{stem}.0.op.weight" in tensors:
            places[f"{stem}.0"] = f"down_blocks.{level}.downsamplers.0.conv"
            level, layer = level + 1, 0
            continue
        places[f"{stem}.0"] = f"down_blocks.{level}.resnets.{layer}"
        places[f"{stem}.1"] = f"down_blocks.{level}.attentions.{layer}"
        layer += 1
    level, layer = 0, 0
    for number in range(_blocks(tensors, "output_blocks")):
        stem = f"output_blocks.{number}"
        places[f"{stem}.0"] = f"up_blocks.{level}.resnets.{layer}"
        places[f"{stem}.1"] = f"up_blocks.{level}.attentions.{layer}"
        layer += 1
        for part in ("1", "2"):
            if f"{stem}.{part}.conv.weight" in tensors:
                places[f"{stem}.{part}"] = f"up_blocks.{level}.upsamplers.0.conv"
                level, layer = level + 1, 0
    return places


def _blocks(tensors: dict[str, Tensor], beginning: str) -> int:
    return len({key.split(".")[1] for key in tensors if key.startswith(beginning + ".")})
