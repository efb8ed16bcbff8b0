"""Convert the names of latent diffusion autoencoders in single files to names of diffusers' modules; plain ones also
back.

Many VAEs use the names of the first: levels are `encoder.down.N.block.M` and `decoder.up.N.block.M`, and attention is a
convolution with a kernel of one. Like diffusers' own converters, these functions only rename, split and reshape
tensors, so that `pool.weights.keymaps.key_map` can trace them. Unknown tensors are dropped.

Source: the key lists of the published files (tests/golden/vae_keys.json.gz) and of the modules.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from modelpool.pool.files.formats.safetensors_file import Shape

Tensors = Mapping[str, Tensor]
Rules = Sequence[tuple[str, str]]

_PARTS = ("encoder.", "decoder.", "quant_conv.", "post_quant_conv.")
_LEVEL = re.compile(r"^(encoder\.down|decoder\.up)\.(\d+)\.(.+)$")
_BLOCK = re.compile(r"^block\.(\d+)\.(.+)$")

_MIDDLE: Rules = ((r"\.mid\.block_1\.", ".mid_block.resnets.0."), (r"\.mid\.block_2\.", ".mid_block.resnets.1."))
_COMMON: Rules = (
    *_MIDDLE,
    (r"\.block\.(\d+)\.", r".resnets.\1."),
    (r"\.nin_shortcut\.", ".conv_shortcut."),
    (r"\.downsample\.", ".downsamplers.0."),
    (r"\.upsample\.", ".upsamplers.0."),
)
_ATTENTION: Rules = (
    (r"\.mid\.attn_1\.norm\.", ".mid_block.attentions.0.group_norm."),
    (r"\.mid\.attn_1\.([qkv])\.", r".mid_block.attentions.0.to_\1."),
    (r"\.mid\.attn_1\.proj_out\.", ".mid_block.attentions.0.to_out.0."),
    (r"\.norm_out\.", ".conv_norm_out."),
)
_TEMPORAL: Rules = (
    (r"\.time_stack\.in_layers\.0\.", ".temporal_res_block.norm1."),
    (r"\.time_stack\.in_layers\.2\.", ".temporal_res_block.conv1."),
    (r"\.time_stack\.out_layers\.0\.", ".temporal_res_block.norm2."),
    (r"\.time_stack\.out_layers\.3\.", ".temporal_res_block.conv2."),
    (r"\.mix_factor$", ".time_mixer.mix_factor"),
    (r"^decoder\.conv_out\.time_mix_conv\.", "decoder.time_conv_out."),
    (r"^(decoder\..*resnets\.\d+)\.(norm1|conv1|norm2|conv2|conv_shortcut)\.", r"\1.spatial_res_block.\2."),
)
_SEPARABLE: Rules = (
    (r"\.conv3d\.", "."),
    (r"\.mid\.attn_1\.0\.", ".mid_block.attentions.0."),
    (r"\.mid\.attn_1\.1\.", ".mid_block.temp_attentions.0."),
    (r"\.attn\.(\d+)\.0\.", r".attentions.\1."),
    (r"\.attn\.(\d+)\.1\.", r".temp_attentions.\1."),
    (r"attentions\.(\d+)\.([qkv])\.", r"attentions.\1.to_\2."),
    (r"attentions\.(\d+)\.proj_out\.", r"attentions.\1.to_out.0."),
    (r"(conv1|conv2|conv_in|conv_out)\.0\.", r"\1.conv_s."),
    (r"(conv1|conv2|conv_in|conv_out)\.1\.", r"\1.conv_t."),
)


def renamed(key: str, rules: Rules) -> str:
    """Apply each of `rules` (pattern, replacement) to `key`, in order."""
    for pattern, replacement in rules:
        key = re.sub(pattern, replacement, key)
    return key


def convert_kl(tensors: Tensors) -> dict[str, Tensor]:
    """Convert autoencoders of Stable Diffusion and Flux, and HunyuanVideo's, with one more level in convolutions."""
    return _converted(tensors, (*_COMMON, *_ATTENTION), _flat_attention)


#: the inverse of `_COMMON` and `_ATTENTION`
_BACK: Rules = (
    (r"^encoder\.down_blocks\.", "encoder.down."),
    (r"\.mid_block\.resnets\.0\.", ".mid.block_1."),
    (r"\.mid_block\.resnets\.1\.", ".mid.block_2."),
    (r"\.mid_block\.attentions\.0\.group_norm\.", ".mid.attn_1.norm."),
    (r"\.mid_block\.attentions\.0\.to_([qkv])\.", r".mid.attn_1.\1."),
    (r"\.mid_block\.attentions\.0\.to_out\.0\.", ".mid.attn_1.proj_out."),
    (r"\.resnets\.", ".block."),
    (r"\.conv_shortcut\.", ".nin_shortcut."),
    (r"\.downsamplers\.0\.", ".downsample."),
    (r"\.upsamplers\.0\.", ".upsample."),
    (r"\.conv_norm_out\.", ".norm_out."),
)
_LEVEL_UP = re.compile(r"^decoder\.up_blocks\.(\d+)\.")


def kl_shapes(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the single-file tensors of an image autoencoder, without prefix, from which `convert_kl` produces
    parameters of `shapes`."""
    deepest = max((int(match[1]) for name in shapes if (match := _LEVEL_UP.match(name))), default=0)
    found: dict[str, Shape] = {}
    for name, shape in shapes.items():
        level = _LEVEL_UP.match(name)
        key = name if level is None else f"decoder.up.{deepest - int(level[1])}.{name[level.end() :]}"
        is_flat = ".attentions." in name and len(shape) == 2
        found[renamed(key, _BACK)] = (*shape, 1, 1) if is_flat else shape
    return found


def convert_flux2(tensors: Tensors) -> dict[str, Tensor]:
    """Convert Flux 2: in some files the convolutions at the latent are in the halves; latent statistics are tensors
    too."""
    to_top = ((r"^encoder\.quant_conv\.", "quant_conv."), (r"^decoder\.post_quant_conv\.", "post_quant_conv."))
    moved = {renamed(key, to_top): tensor for key, tensor in tensors.items()}
    return convert_kl(moved) | {key: x for key, x in tensors.items() if key.startswith("bn.")}


#: names of attention parts in folders that older versions of diffusers wrote
_OLDER: Rules = (
    (r"(attentions\.\d+)\.query\.", r"\1.to_q."),
    (r"(attentions\.\d+)\.key\.", r"\1.to_k."),
    (r"(attentions\.\d+)\.value\.", r"\1.to_v."),
    (r"(attentions\.\d+)\.proj_attn\.", r"\1.to_out.0."),
)


def convert_diffusers(tensors: Tensors) -> dict[str, Tensor]:
    """Convert files in the naming of any diffusers version."""
    return {renamed(key, _OLDER): tensor for key, tensor in tensors.items()}


def convert_kl_temporal(tensors: Tensors) -> dict[str, Tensor]:
    """Convert Stable Video Diffusion: each block of the decoder is a spatial and a temporal one."""
    return _converted(tensors, (*_COMMON, *_ATTENTION, *_TEMPORAL), _flat_attention)


def convert_cogvideox(tensors: Tensors) -> dict[str, Tensor]:
    """Convert CogVideoX of the original code; files of others have diffusers' names."""
    if not any(key.startswith("decoder.mid.") for key in tensors):
        return dict(tensors)
    return _converted(tensors, _COMMON, lambda key, x: x)


def convert_cosmos(tensors: Tensors) -> dict[str, Tensor]:
    """Convert Cosmos: each convolution is a spatial and a temporal one; the module computes wavelets and statistics."""
    own = {key: x for key, x in tensors.items() if "patcher3d." not in key}
    return _converted(own, (*_SEPARABLE, *_COMMON), lambda key, x: x)


def convert_hunyuan_image(tensors: Tensors) -> dict[str, Tensor]:
    """Convert HunyuanImage 2.1: blocks and folds of all levels in one list, up levels in the order of use."""
    first = _firsts(tensors)
    converted: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        if not key.startswith(_PARTS):
            continue
        if (level := _LEVEL.match(key)) is not None:
            half, number, rest = level[1], int(level[2]), level[3]
            block = _BLOCK.match(rest)
            place = int(block[1]) if block else first[half, number + 1] - first[half, number] - 1
            name = block[2].replace("nin_shortcut.", "conv_shortcut.") if block else rest.partition(".")[2]
            converted[f"{half}_blocks.{first[half, number] + place}.{name}"] = tensor
        else:
            converted[renamed(key, (*_MIDDLE, *_HUNYUAN_ATTENTION, (r"proj_out", "proj")))] = tensor
    return converted


_HUNYUAN_ATTENTION: Rules = (
    (r"\.mid\.attn_1\.([qkv])\.", r".mid_block.attentions.0.to_\1."),
    (r"\.mid\.attn_1\.", ".mid_block.attentions.0."),
)


def convert_hunyuan_video_15(tensors: Tensors) -> dict[str, Tensor]:
    """Convert HunyuanVideo 1.5 and HunyuanImage's refiner: up levels in the order of use."""
    rules = (*_COMMON, *_HUNYUAN_ATTENTION)
    named = {_levels_renamed(key, 0): tensor for key, tensor in tensors.items() if key.startswith(_PARTS)}
    return {renamed(key, rules): tensor for key, tensor in named.items()}


def _firsts(tensors: Tensors) -> dict[tuple[str, int], int]:
    """Return where each level begins in the list of all blocks and folds, by half and level."""
    sizes: dict[tuple[str, int], int] = {}
    for key in tensors:
        if (level := _LEVEL.match(key)) is not None:
            place = level[1], int(level[2])
            block = _BLOCK.match(level[3])
            sizes.setdefault(place, 0)
            if block is not None:
                sizes[place] = max(sizes[place], int(block[1]) + 1)
    first: dict[tuple[str, int], int] = {}
    for half in ("encoder.down", "decoder.up"):
        total, level_number = 0, 0
        while (half, level_number) in sizes:
            first[half, level_number] = total
            folds = any(key.startswith((f"{half}.{level_number}.downsample.", f"{half}.{level_number}.upsample."))
                        for key in tensors)  # fmt: skip
            total += sizes[half, level_number] + folds
            level_number += 1
        first[half, level_number] = total
    return first


def _converted(tensors: Tensors, rules: Rules, shaped: Callable[[str, Tensor], Tensor]) -> dict[str, Tensor]:
    """Rename by `rules`, with up levels counted from the other end, and reshape each tensor with `shaped`."""
    deepest = max((int(m[2]) for key in tensors if (m := _LEVEL.match(key)) and m[1] == "decoder.up"), default=0)
    converted: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        if key.startswith(_PARTS):
            name = renamed(_levels_renamed(key, deepest), rules)
            converted[name] = shaped(name, tensor)
    return converted


def _levels_renamed(key: str, deepest: int) -> str:
    """Return `key` with its level in diffusers' names; up levels count down from `deepest`, unless that is 0."""
    level = _LEVEL.match(key)
    if level is None:
        return key
    number = int(level[2])
    if level[1] == "decoder.up" and deepest:
        number = deepest - number
    return f"{level[1]}_blocks.{number}.{level[3]}"


def _flat_attention(name: str, tensor: Tensor) -> Tensor:
    """Convert attention projections: linear layers in diffusers, convolutions with a kernel of one in the files."""
    if ".attentions." in name and name.endswith(".weight") and tensor.dim() > 2:
        return tensor.reshape(tensor.shape[:2])
    return tensor
