"""Names and layouts of the SD1 single file (LDM) for the modules of diffusers and transformers.

Knows only names and the three reshapes between linear and 1x1 convolution. Does not know values or files.
Source: the key names of published SD 1.x checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

UNET_PREFIX = "model.diffusion_model."
VAE_PREFIX = "first_stage_model."
TEXT_PREFIX = "cond_stage_model.transformer.text_model."

RESNET_PARTS = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
UNET_ENDS = {
    "conv_in": "input_blocks.0.0",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
}
VAE_ATTENTION_PARTS = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}


def unet_name(name: str, resnets_per_block: int) -> str:
    """Return the LDM name of a parameter of UNet2DConditionModel. Raises ValueError for a name not in SD1's UNet."""
    path, kind = name.rsplit(".", 1)
    if path in UNET_ENDS:
        return f"{UNET_ENDS[path]}.{kind}"
    found = re.fullmatch(r"(down_blocks|up_blocks)\.(\d+)\.(\w+)\.(\d+)\.(.+)", name)
    if found:
        side, block, part, index, rest = found[1], int(found[2]), found[3], int(found[4]), found[5]
        if side == "down_blocks":
            first = 1 + (resnets_per_block + 1) * block
            if part == "downsamplers":
                return f"input_blocks.{first + resnets_per_block}.0.{rest.replace('conv', 'op')}"
            return f"input_blocks.{first + index}.{_inside(part, rest)}"
        first = (resnets_per_block + 1) * block
        if part == "upsamplers":
            return f"output_blocks.{first + resnets_per_block}.2.{rest}"
        return f"output_blocks.{first + index}.{_inside(part, rest)}"
    found = re.fullmatch(r"mid_block\.(resnets|attentions)\.(\d)\.(.+)", name)
    if found:
        place = 1 if found[1] == "attentions" else 2 * int(found[2])
        return f"middle_block.{place}.{_inside(found[1], found[3]).split('.', 1)[1]}"
    raise ValueError(f"parameter {name!r}: found no place for it in the SD1 UNet layout")


def _inside(part: str, rest: str) -> str:
    if part == "attentions":
        return f"1.{rest}"
    layer, kind = rest.rsplit(".", 1)
    return f"0.{RESNET_PARTS[layer]}.{kind}"


def vae_name(name: str, blocks: int) -> str:
    """Return the LDM name of a parameter of AutoencoderKL with that number of resolution blocks."""
    name = name.replace("conv_norm_out", "norm_out").replace("conv_shortcut", "nin_shortcut")
    name = re.sub(r"downsamplers\.0", "downsample", name)
    name = re.sub(r"upsamplers\.0", "upsample", name)
    name = re.sub(r"down_blocks\.(\d+)\.", r"down.\1.", name)
    name = re.sub(r"up_blocks\.(\d+)\.", lambda found: f"up.{blocks - 1 - int(found[1])}.", name)
    name = re.sub(r"mid_block\.resnets\.(\d)", lambda found: f"mid.block_{int(found[1]) + 1}", name)
    found = re.fullmatch(r"(.*)mid_block\.attentions\.0\.(.+)\.(weight|bias)", name)
    if found:
        return f"{found[1]}mid.attn_1.{VAE_ATTENTION_PARTS[found[2]]}.{found[3]}"
    return re.sub(r"resnets\.(\d+)", r"block.\1", name)


def single_file(
    unet: Mapping[str, torch.Tensor],
    vae: Mapping[str, torch.Tensor],
    encoder: Mapping[str, torch.Tensor],
    resnets_per_block: int,
    vae_blocks: int,
) -> dict[str, torch.Tensor]:
    """Return all tensors of the single file, float16 (position_ids int64 [1, 77]), from three state dicts."""
    found = {UNET_PREFIX + unet_name(name, resnets_per_block): value.half() for name, value in unet.items()}
    for name, value in vae.items():
        place = vae_name(name, vae_blocks)
        is_attention = ".mid.attn_1." in place and value.ndim == 2  # 1x1 convolutions in the file
        found[VAE_PREFIX + place] = (value[:, :, None, None] if is_attention else value).half()
    for name, value in encoder.items():
        found[TEXT_PREFIX + name.removeprefix("text_model.")] = value.half()
    positions = found[f"{TEXT_PREFIX}embeddings.position_embedding.weight"].shape[0]
    found[f"{TEXT_PREFIX}embeddings.position_ids"] = torch.arange(positions)[None]
    return {name: value.contiguous() for name, value in sorted(found.items())}
