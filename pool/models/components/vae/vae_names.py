"""Convert names in single files to names of diffusers' modules, for VAEs outside the latent diffusion naming.

TAESD, Stable Cascade's stage A, Sana, Oobleck (audio), Mochi, LTX-Video and Wan. Like
`pool.models.components.vae.ldm_names`: tensors are renamed, split and reshaped, unknown ones are dropped, and the order
of blocks is read off the keys, so that every size of a model converts.

Source: the key lists of the published files (tests/golden/vae_keys.json.gz) and of the modules.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch import Tensor

from modelpool.pool.families.detection.tiny_names import with_both_halves_names
from modelpool.pool.models.components.common.vae_configs import ltx_kinds
from modelpool.pool.models.components.vae.ldm_names import Rules, Tensors, renamed


def convert_taesd(tensors: Tensors) -> dict[str, Tensor]:
    """Convert TAESD in any of its layouts: the decoder counts its clamp as a layer, diffusers does not."""
    converted: dict[str, Tensor] = {}
    for key, tensor in with_both_halves_names(tensors).items():
        half, _, rest = key.partition(".")
        number, _, name = rest.partition(".")
        match half:
            case "taesd_encoder":
                converted[f"encoder.layers.{number}.{name}"] = tensor
            case "taesd_decoder":
                converted[f"decoder.layers.{int(number) - 1}.{name}"] = tensor
    return converted


def convert_cascade_a(tensors: Tensors) -> dict[str, Tensor]:
    """Convert Stable Cascade's stage A: only the codebook has another name."""
    return {key.replace("vquantizer.codebook.", "vquantizer.embedding."): tensor for key, tensor in tensors.items()}


_DC: Rules = (
    (r"^encoder\.project_in\.conv\.", "encoder.conv_in."),
    (r"^encoder\.project_out\.main\.op_list\.0\.conv\.", "encoder.conv_out."),
    (r"^decoder\.project_in\.main\.conv\.", "decoder.conv_in."),
    (r"^decoder\.project_out\.op_list\.0\.", "decoder.norm_out."),
    (r"^decoder\.project_out\.op_list\.2\.conv\.", "decoder.conv_out."),
    (r"^encoder\.stages\.(\d+)\.op_list\.", r"encoder.down_blocks.\1."),
    (r"^decoder\.stages\.(\d+)\.op_list\.", r"decoder.up_blocks.\1."),
    (r"\.main\.conv1\.conv\.", ".conv1."),
    (r"\.main\.conv2\.conv\.", ".conv2."),
    (r"\.main\.conv2\.norm\.", ".norm."),
    (r"\.main\.conv\.(?:conv\.)?(weight|bias)$", r".conv.\1"),
    (r"\.context_module\.main\.aggreg\.(\d+)\.0\.", r".attn.to_qkv_multiscale.\1.proj_in."),
    (r"\.context_module\.main\.aggreg\.(\d+)\.1\.", r".attn.to_qkv_multiscale.\1.proj_out."),
    (r"\.context_module\.main\.proj\.norm\.", ".attn.norm_out."),
    (r"\.context_module\.main\.proj\.conv\.", ".attn.to_out."),
    (r"\.local_module\.main\.inverted_conv\.conv\.", ".conv_out.conv_inverted."),
    (r"\.local_module\.main\.depth_conv\.conv\.", ".conv_out.conv_depth."),
    (r"\.local_module\.main\.point_conv\.conv\.", ".conv_out.conv_point."),
    (r"\.local_module\.main\.point_conv\.norm\.", ".conv_out.norm."),
)
_DC_QUERIES = ".context_module.main.qkv.conv.weight"


def convert_dc(tensors: Tensors) -> dict[str, Tensor]:
    """Convert Sana's: linear attention has convolutions with a kernel of one, which are matrices in diffusers."""
    converted: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        name = renamed(key.removesuffix(_DC_QUERIES), _DC)
        if key.endswith(_DC_QUERIES):
            for part, rows in zip("qkv", tensor.chunk(3), strict=True):
                converted[f"{name}.attn.to_{part}.weight"] = rows.reshape(rows.shape[:2])
        else:
            converted[name] = tensor.reshape(tensor.shape[:2]) if name.endswith(".attn.to_out.weight") else tensor
    return converted


_WEIGHT_NORM: Rules = (
    (r"\.parametrizations\.weight\.original0$", ".weight_g"),
    (r"\.parametrizations\.weight\.original1$", ".weight_v"),
)
_UNIT: Rules = (
    (r"\.layers\.0\.(alpha|beta)$", r".snake1.\1"),
    (r"\.layers\.1\.(?=bias|weight)", ".conv1."),
    (r"\.layers\.2\.(alpha|beta)$", r".snake2.\1"),
    (r"\.layers\.3\.(?=bias|weight)", ".conv2."),
)


def convert_oobleck(tensors: Tensors) -> dict[str, Tensor]:
    """Convert Oobleck: sequences of units; parameters of activations are three-dimensional in diffusers."""
    last = {half: max((int(key.split(".")[2]) for key in tensors if key.startswith(f"{half}.layers.")), default=0)
            for half in ("encoder", "decoder")}  # fmt: skip
    converted: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        half, _, rest = renamed(key, _WEIGHT_NORM).partition(".layers.")
        if half in last and rest:
            number, _, name = rest.partition(".")
            place = _of_oobleck(half, int(number), last[half], name)
            snake = place.endswith(("alpha", "beta"))
            converted[f"{half}.{place}"] = tensor.reshape(1, -1, 1) if snake else tensor
    return converted


def _of_oobleck(half: str, number: int, last: int, name: str) -> str:
    """Return diffusers' name of the parameter `name` of layer `number` of a half."""
    if number == 0:
        return f"conv1.{name}"
    if number == last:
        return f"conv2.{name}"
    if number == last - 1:
        return f"snake1.{name}"
    _, _, inner = name.partition("layers.")
    place, _, rest = inner.partition(".")
    if half == "encoder":
        parts = {"0": "res_unit1", "1": "res_unit2", "2": "res_unit3", "3": "snake1", "4": "conv1"}
    else:
        parts = {"0": "snake1", "1": "conv_t1", "2": "res_unit1", "3": "res_unit2", "4": "res_unit3"}
    part = parts[place]
    return f"block.{number - 1}.{renamed(f'{part}.{rest}', _UNIT)}"


_SAME: Rules = (
    *_WEIGHT_NORM,
    (r"\.pre_norm\.", ".norm_attn."),
    (r"\.ff_norm\.", ".norm_ff."),
    (r"\.self_attn\.", ".attn."),
    (r"\.ff\.ff\.0\.proj\.", ".ff.proj_in."),
    (r"\.ff\.ff\.2\.", ".ff.proj_out."),
    (r"^bottleneck\.scaling_factor$", "bottleneck.scale"),
)


def convert_same(tensors: Tensors) -> dict[str, Tensor]:
    """Convert the autoencoder of Stable Audio 3: lists of levels, and a projection between transpositions."""
    levels = sum(key.startswith("encoder.") and key.endswith(".new_tokens") for key in tensors)
    first = {"encoder": 0, "decoder": 3}
    projections = {f"encoder.layers.{levels + 1}.": "encoder.proj.", "decoder.layers.1.": "decoder.proj."}
    converted: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        name = renamed(key, _SAME)
        place = next((place for place in projections if name.startswith(place)), None)
        if place is not None:
            name = projections[place] + name.removeprefix(place)
        elif level := re.match(r"(encoder|decoder)\.layers\.(\d+)\.", name):
            name = f"{level[1]}.blocks.{int(level[2]) - first[level[1]]}.{name[level.end() :]}"
        elif not name.startswith("bottleneck."):
            continue
        converted[name] = _differential_last(tensor) if name.endswith(".attn.to_qkv.weight") else tensor
    return converted


#: maps of a differential attention: queries and keys of both, and the values
_MAPS = 5


def _differential_last(rows: Tensor) -> Tensor:
    """Return the rows of queries, keys and values of an attention as diffusers has them: both queries, both keys,
    values. In files, the second query and key are last."""
    if rows.shape[0] != _MAPS * rows.shape[1]:
        return rows
    query, key, value, other_query, other_key = rows.chunk(_MAPS)
    return torch.cat((query, other_query, key, other_key, value))


_HALVES = ("encoder.", "decoder.")
_STACK: Rules = (
    (r"\.stack\.0\.", ".norm1.norm_layer."),
    (r"\.stack\.2\.", ".conv1.conv."),
    (r"\.stack\.3\.", ".norm2.norm_layer."),
    (r"\.stack\.5\.", ".conv2.conv."),
)
_MOCHI_ENDS: Rules = (
    (r"^encoder\.layers\.0\.(?=weight|bias)", "encoder.proj_in."),
    (r"^encoder\.output_norm\.", "encoder.norm_out.norm_layer."),
    (r"^encoder\.output_proj\.", "encoder.proj_out."),
    (r"^decoder\.output_proj\.", "decoder.proj_out."),
    (r"^decoder\.blocks\.0\.0\.", "decoder.conv_in."),
)


def convert_mochi(tensors: Tensors) -> dict[str, Tensor]:
    """Convert Mochi: the published halves are separate files, or one file with a prefix for each."""
    alone = "encoder." if any(key.startswith("layers.") for key in tensors) else "decoder."
    whole = {key if key.startswith(_HALVES) else alone + key: tensor for key, tensor in tensors.items()}
    levels = sorted({int(m[1]) for key in whole if (m := re.match(r"encoder\.layers\.(\d+)\.layers\.", key))})
    last = max((int(m[1]) for key in whole if (m := re.match(r"decoder\.blocks\.(\d+)\.", key))), default=0)
    converted: dict[str, Tensor] = {}
    for key, tensor in whole.items():
        name = renamed(key, _MOCHI_ENDS)
        if name == key and (found := re.match(r"(encoder\.layers|decoder\.blocks)\.(\d+)\.(.+)", key)) is not None:
            place = _mochi_encoder if found[1] == "encoder.layers" else _mochi_decoder
            name = place(int(found[2]), found[3], levels, last)
        converted |= _mochi_parts(renamed(name, _STACK), tensor)
    return converted


def _mochi_encoder(number: int, rest: str, levels: list[int], last: int) -> str:
    if not levels or number < levels[0]:
        return f"encoder.block_in.resnets.{number - 1}.{rest}"
    if number > levels[-1]:
        return _with_attention("encoder.block_out", number - levels[-1] - 1, rest)
    _, place, name = rest.split(".", 2)
    block = f"encoder.down_blocks.{number - levels[0]}"
    return f"{block}.conv_in.conv.{name}" if place == "0" else _with_attention(block, int(place) - 1, name)


def _with_attention(block: str, number: int, rest: str) -> str:
    if rest.startswith("attn_block.norm."):
        return f"{block}.norms.{number}.norm_layer.{rest.rpartition('.')[2]}"
    if rest.startswith("attn_block.attn."):
        return f"{block}.attentions.{number}.{rest.removeprefix('attn_block.attn.')}"
    return f"{block}.resnets.{number}.{rest}"


def _mochi_decoder(number: int, rest: str, levels: list[int], last: int) -> str:
    if number == 0:
        place, _, name = rest.partition(".")
        return f"decoder.block_in.resnets.{int(place) - 1}.{name}"
    if number == last:
        return f"decoder.block_out.resnets.{rest}"
    return f"decoder.up_blocks.{number - 1}.{rest.replace('blocks.', 'resnets.', 1)}"


def _mochi_parts(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Split fused queries, keys and values, and rename the output projection."""
    attention, _, kind = name.rpartition(".qkv.")
    if attention:
        return {f"{attention}.to_{x}.{kind}": part for x, part in zip("qkv", tensor.chunk(3), strict=True)}
    return {re.sub(r"(attentions\.\d+)\.out\.", r"\1.to_out.0.", name): tensor}


_LTX_INSIDE: Rules = (
    (r"\.res_blocks\.", ".resnets."),
    (r"\.conv_shortcut\.", ".conv_shortcut.conv."),
    (r"\.norm3\.norm\.", ".norm3."),
    (r"^decoder\.last_time_embedder\.", "decoder.time_embedder."),
    (r"^decoder\.last_scale_shift_table$", "decoder.scale_shift_table"),
)
_LTX_STATISTICS = {
    "per_channel_statistics.mean-of-means": "latents_mean",
    "per_channel_statistics.std-of-means": "latents_std",
}


def convert_ltx(tensors: Tensors) -> dict[str, Tensor]:
    """Convert LTX-Video of every version: each half is one list of block groups, folds and widening blocks."""
    beginnings = dict(ltx_places(tensors))
    converted: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        if key in _LTX_STATISTICS:
            converted[_LTX_STATISTICS[key]] = tensor
        elif key.startswith(("encoder.", "decoder.")):
            block = re.match(r"(encoder\.down_blocks|decoder\.up_blocks)\.\d+\.", key)
            name = beginnings[block[0]] + key.removeprefix(block[0]) if block else key
            converted[renamed(name, _LTX_INSIDE)] = tensor
    return converted


def ltx_places(keys: Tensors | dict[str, tuple[int, ...]]) -> Iterator[tuple[str, str]]:
    """Yield each block's key prefix in an LTX-Video file, and its prefix in diffusers.

    A group of blocks opens a level of the encoder, and ends one of the decoder, where folds and widening blocks come
    first; the encoder's last group and the decoder's first are its middle.
    """
    for half, blocks in (("encoder", "down_blocks"), ("decoder", "up_blocks")):
        kinds = ltx_kinds(keys, f"{half}.{blocks}.")
        level = -1 if half == "encoder" else 0
        for number, kind in enumerate(kinds):
            middle = number == (len(kinds) - 1 if half == "encoder" else 0)
            level += half == "encoder" and kind == "group" and not middle
            inner = {"group": "", "fold": "downsamplers.0." if half == "encoder" else "upsamplers.0."}
            widened = "conv_out." if half == "encoder" else "conv_in."
            place = "mid_block." if middle else f"{blocks}.{level}.{inner.get(kind, widened)}"
            yield f"{half}.{blocks}.{number}.", f"{half}.{place}"
            level += half == "decoder" and kind == "group" and not middle


_WAN: Rules = (
    (r"^conv1\.", "quant_conv."),
    (r"^conv2\.", "post_quant_conv."),
    (r"^(encoder|decoder)\.conv1\.", r"\1.conv_in."),
    (r"\.middle\.0\.", ".mid_block.resnets.0."),
    (r"\.middle\.1\.", ".mid_block.attentions.0."),
    (r"\.middle\.2\.", ".mid_block.resnets.1."),
    (r"\.head\.0\.", ".norm_out."),
    (r"\.head\.2\.", ".conv_out."),
    (r"\.residual\.0\.", ".norm1."),
    (r"\.residual\.2\.", ".conv1."),
    (r"\.residual\.3\.", ".norm2."),
    (r"\.residual\.6\.", ".conv2."),
    (r"\.shortcut\.", ".conv_shortcut."),
)


def convert_wan21(tensors: Tensors) -> dict[str, Tensor]:
    """Convert Wan 2.1 and Qwen-Image: diffusers keeps the encoder's blocks in one list, and the decoder's by levels."""
    resamplers = sorted(
        {int(m[1]) for key in tensors if (m := re.match(r"decoder\.upsamples\.(\d+)\.resample\.", key))}
    )
    converted: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        name = key.replace("encoder.downsamples.", "encoder.down_blocks.")
        if (found := re.match(r"decoder\.upsamples\.(\d+)\.(.+)", key)) is not None:
            number = int(found[1])
            level = sum(end < number for end in resamplers)
            first = resamplers[level - 1] + 1 if level else 0
            place = "upsamplers.0" if number in resamplers else f"resnets.{number - first}"
            name = f"decoder.up_blocks.{level}.{place}.{found[2]}"
        converted[renamed(name, _WAN)] = tensor
    return converted


_WAN_22: Rules = (
    (
        r"^encoder\.downsamples\.(\d+)\.downsamples\.\d+\.(resample|time_conv)\.",
        r"encoder.down_blocks.\1.downsampler.\2.",
    ),
    (r"^decoder\.upsamples\.(\d+)\.upsamples\.\d+\.(resample|time_conv)\.", r"decoder.up_blocks.\1.upsampler.\2."),
    (r"^encoder\.downsamples\.(\d+)\.downsamples\.(\d+)\.", r"encoder.down_blocks.\1.resnets.\2."),
    (r"^decoder\.upsamples\.(\d+)\.upsamples\.(\d+)\.", r"decoder.up_blocks.\1.resnets.\2."),
)


def convert_wan22(tensors: Tensors) -> dict[str, Tensor]:
    """Convert Wan 2.2: nested levels, as in diffusers."""
    return {renamed(key, (*_WAN_22, *_WAN)): tensor for key, tensor in tensors.items()}
