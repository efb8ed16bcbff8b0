"""Arguments of diffusers' VAE classes for images and audio, from the shapes of a single file. Torch-free.

Video is in `pool.models.components.common.vae_video_configs`. Keys have no prefix. A half that a file lacks is
configured like the existing one.

Facts that shapes do not tell: group norms have 32 groups, or a quarter of the narrowest width if that is fewer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from modelpool.pool.families.detection.tiny_names import ENCODER, half_numbers, with_both_halves_names
from modelpool.pool.files.formats.safetensors_file import Shape
from modelpool.pool.models.components.common.efficientnet_config import efficientnet_config
from modelpool.pool.values.core.errors import UnknownArchitecture, counted

Shapes = Mapping[str, Shape]
Config: TypeAlias = dict[str, Any]

MAX_NORM_GROUPS = 32


def shape_of(shapes: Shapes, *keys: str) -> Shape:
    """Return the shape of the first existing key of `keys`.

    Raises UnknownArchitecture if none exists, or it has no dimension.
    """
    for key in keys:
        if shapes.get(key):
            return shapes[key]
    raise UnknownArchitecture(f"VAE: found no {' or '.join(keys)}, required to infer a size")


def size_of(shapes: Shapes, key: str, index: int = 0) -> int:
    """Return size `index` of the tensor `key`. Raises UnknownArchitecture if it does not exist."""
    shape = shape_of(shapes, key)
    if index >= len(shape):
        raise UnknownArchitecture(f"VAE: tensor {key!r}: found shape {shape}, expected more than {index} dimensions")
    return shape[index]


def count(keys: Iterable[str], pattern: str) -> int:
    """Return how many numbers `pattern`'s group finds at the beginning of `keys`."""
    return len(_numbers(keys, pattern))


def count_all(keys: Iterable[str], pattern: str) -> int:
    """Return `count` for numbers from 0 without gaps.

    Raises UnknownArchitecture if one is missing: otherwise one key could request any number of layers.
    """
    numbers = _numbers(keys, pattern)
    missing = next((number for number in range(len(numbers)) if str(number) not in numbers), None)
    if missing is not None:
        raise UnknownArchitecture(
            f"VAE: found {counted(len(numbers), 'number')} in {pattern!r} without {missing}, expected all from 0 on"
        )
    return len(numbers)


def _numbers(keys: Iterable[str], pattern: str) -> set[str]:
    compiled = re.compile(pattern)
    return {found[1] for key in keys if (found := compiled.match(key)) is not None}


def norm_groups(widths: Iterable[int]) -> int:
    """Return the groups of the group norms of a VAE with levels of `widths`."""
    return max(1, min(MAX_NORM_GROUPS, min(widths) // 4))


def ltx_kinds(keys: Iterable[str], beginning: str) -> list[str]:
    """Return the kind of each block of one half, in order: a "group" of residual blocks, a "fold" or a block that
    "widens"."""
    keys = frozenset(keys)
    numbers = {int(key.removeprefix(beginning).partition(".")[0]) for key in keys if key.startswith(beginning)}
    kinds = []
    for number in range(len(numbers)):
        block = f"{beginning}{number}."
        if any(key.startswith(f"{block}res_blocks.") for key in keys):
            kinds.append("group")
        else:
            kinds.append("widens" if f"{block}conv1.conv.weight" in keys else "fold")
    return kinds


def kl_config(shapes: Shapes) -> Config:
    """Return the arguments of `diffusers.AutoencoderKL`."""
    return _kl_config(shapes, *_ldm_levels(shapes), _has_middle_attention(shapes))


def _kl_config(shapes: Shapes, widths: tuple[int, ...], blocks: int, has_attention: bool) -> Config:
    return {
        "block_out_channels": widths,
        "layers_per_block": blocks,
        "latent_channels": _ldm_latent_channels(shapes),
        "down_block_types": ("DownEncoderBlock2D",) * len(widths),
        "up_block_types": ("UpDecoderBlock2D",) * len(widths),
        "use_quant_conv": "quant_conv.weight" in shapes,
        "use_post_quant_conv": "post_quant_conv.weight" in shapes,
        "mid_block_add_attention": has_attention,
        "norm_num_groups": norm_groups(widths),
    }


def diffusers_levels(
    shapes: Shapes, convolution: str, number_of: Callable[[Iterable[str], str], int] = count_all
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Return the widths of the levels of the encoder and of the decoder of a file in diffusers' naming, and the
    residual blocks of a level of the encoder; the second `convolution` of a block tells its width. If a file lacks the
    encoder, its levels are the decoder's, from the finest to the coarsest. Raises UnknownArchitecture for no level."""
    down, up = (
        tuple(
            size_of(shapes, f"{half}.{i}.resnets.0.{convolution}.weight")
            for i in range(number_of(shapes, rf"{re.escape(half)}\.(\d+)\."))
        )
        for half in ("encoder.down_blocks", "decoder.up_blocks")
    )
    widths = down or tuple(reversed(up))
    if not widths:
        raise UnknownArchitecture("VAE: found no encoder.down_blocks and no decoder.up_blocks, expected a level")
    blocks = number_of(shapes, r"encoder\.down_blocks\.0\.resnets\.(\d+)\.")
    return widths, up, blocks or number_of(shapes, r"decoder\.up_blocks\.0\.resnets\.(\d+)\.") - 1


def diffusers_kl_config(shapes: Shapes) -> Config:
    """Return the arguments of `diffusers.AutoencoderKL` or `AutoencoderKLFlux2`, for a file in diffusers' naming."""
    widths, up, blocks = diffusers_levels(shapes, "conv2", count)
    config = _kl_config(shapes, widths, blocks, any(".mid_block.attentions." in key for key in shapes))
    if "bn.running_mean" in shapes:
        side = math.isqrt(size_of(shapes, "bn.running_mean") // config["latent_channels"])
        config["patch_size"] = (side, side)
        if up and up != tuple(reversed(widths)):
            config["decoder_block_out_channels"] = tuple(reversed(up))
    return config


def flux2_config(shapes: Shapes) -> Config:
    """Return the arguments of `diffusers.AutoencoderKLFlux2`; its decoder may be narrower than its encoder."""
    config = kl_config(shapes)
    folded = size_of(shapes, "bn.running_mean")
    side = math.isqrt(folded // config["latent_channels"])
    config["patch_size"] = (side, side)
    config["use_quant_conv"] |= "encoder.quant_conv.weight" in shapes
    config["use_post_quant_conv"] |= "decoder.post_quant_conv.weight" in shapes
    decoder = _half_widths(shapes, "decoder.up.")
    if decoder and decoder != config["block_out_channels"]:
        config["decoder_block_out_channels"] = decoder
    return config


def kl_temporal_config(shapes: Shapes) -> Config:
    """The arguments of `diffusers.AutoencoderKLTemporalDecoder`."""
    widths, blocks = _ldm_levels(shapes)
    return {
        "block_out_channels": widths,
        "layers_per_block": blocks,
        "latent_channels": _ldm_latent_channels(shapes),
        "down_block_types": ("DownEncoderBlock2D",) * len(widths),
    }


def hunyuan_image_config(shapes: Shapes) -> Config:
    """The arguments of `diffusers.AutoencoderKLHunyuanImage`."""
    widths, blocks = _ldm_levels(shapes)
    folds = max(count(shapes, r"encoder\.down\.(\d+)\.downsample\."), count(shapes, r"decoder\.up\.(\d+)\.upsample\."))
    return {
        "in_channels": 3,
        "out_channels": 3,
        "latent_channels": _ldm_latent_channels(shapes),
        "block_out_channels": widths,
        "layers_per_block": blocks,
        "spatial_compression_ratio": 2**folds,
        "sample_size": 384,
    }


def dc_config(shapes: Shapes) -> Config:
    """Return the arguments of `diffusers.AutoencoderDC`, for models with norms by root mean square only. A half that
    the file lacks mirrors the other. Raises UnknownArchitecture for batch norms."""
    if any(key.endswith(".running_mean") for key in shapes):
        raise UnknownArchitecture("VAE: found batch norms, expected norms by root mean square, as Sana's has")
    encoder, decoder = _dc_half(shapes, "encoder"), _dc_half(shapes, "decoder")
    halves = {"encoder": encoder or decoder, "decoder": decoder or encoder}
    scaling: dict[str, str] = {}
    if len(encoder.get("block_out_channels", ())) > 1:
        folds = _dc_folds(shapes, "encoder", encoder, encoder["block_out_channels"][1])
        scaling["downsample_block_type"] = "pixel_unshuffle" if folds else "conv"
    if len(decoder.get("block_out_channels", ())) > 1:
        folds = _dc_folds(shapes, "decoder", decoder, decoder["block_out_channels"][0])
        scaling["upsample_block_type"] = "pixel_shuffle" if folds else "interpolate"
    latent = size_of(shapes, "decoder.project_in.main.conv.weight", 1) if decoder else 0
    heads = (key for key in shapes if key.endswith(".aggreg.0.1.weight"))
    head = next((size_of(shapes, key, 1) for key in heads), 0)
    return {
        "latent_channels": latent or size_of(shapes, "encoder.project_out.main.op_list.0.conv.weight"),
        **{f"{half}_{name}": values for half, found in halves.items() for name, values in found.items()},
        **({"attention_head_dim": head} if head else {}),
        **scaling,
    }


def _dc_half(shapes: Shapes, half: str) -> Config:
    """Return kind, width, number and attention kernels of the blocks of each stage of a half; empty if there is
    none."""
    types: list[str] = []
    widths: list[int] = []
    layers: list[int] = []
    kernels: list[tuple[int, ...]] = []
    for stage in range(count_all(shapes, rf"{half}\.stages\.(\d+)\.")):
        beginning = rf"{re.escape(f'{half}.stages.{stage}.op_list.')}(\d+)\."
        plain = _numbers(shapes, rf"{beginning}main\.conv2\.conv\.weight")
        attending = _numbers(shapes, rf"{beginning}context_module\.")
        if bool(plain) == bool(attending):
            raise UnknownArchitecture(f"VAE: found {half}.stages.{stage} of both kinds or none, expected one kind")
        block = f"{half}.stages.{stage}.op_list.{min(plain or attending)}"
        end = "main.conv2.conv.weight" if plain else "local_module.main.point_conv.conv.weight"
        scales = count_all(shapes, rf"{re.escape(block)}\.context_module\.main\.aggreg\.(\d+)\.")
        types.append("ResBlock" if plain else "EfficientViTBlock")
        widths.append(size_of(shapes, f"{block}.{end}"))
        layers.append(len(plain or attending))
        kernels.append(
            tuple(size_of(shapes, f"{block}.context_module.main.aggreg.{i}.0.weight", 2) for i in range(scales))
        )
    if not widths:
        return {}
    return {
        "block_types": tuple(types),
        "block_out_channels": tuple(widths),
        "layers_per_block": tuple(layers),
        "qkv_multiscales": tuple(kernels),
    }


def _dc_folds(shapes: Shapes, half: str, found: Config, width: int) -> bool:
    """Return whether the first stage of a half changes sides by folding pixels into channels: its convolution has other
    rows than the `width` beyond it."""
    place = found["layers_per_block"][0] if half == "encoder" else 0
    key = f"{half}.stages.0.op_list.{place}.main.conv"
    return shape_of(shapes, f"{key}.weight", f"{key}.conv.weight")[0] != width


def taesd_config(shapes: Shapes) -> Config:
    """The arguments of `diffusers.AutoencoderTiny`. A half that the file lacks mirrors the other."""
    shapes = with_both_halves_names(shapes)
    encoder = _tiny_stages(shapes, "taesd_encoder.")
    decoder = _tiny_stages(shapes, "taesd_decoder.")
    stages = len(decoder) or len(encoder)
    wide = shape_of(shapes, "taesd_decoder.1.weight", "taesd_encoder.0.weight")[0]
    key = "taesd_decoder.1.weight"
    last = max(half_numbers(shapes, ENCODER), default=0)
    return {
        "latent_channels": size_of(shapes, key, 1) if key in shapes else size_of(shapes, f"{ENCODER}{last}.weight"),
        "num_encoder_blocks": encoder or tuple(reversed(decoder)),
        "num_decoder_blocks": decoder or tuple(reversed(encoder)),
        "encoder_block_out_channels": (wide,) * stages,
        "decoder_block_out_channels": (wide,) * stages,
    }


def _tiny_stages(shapes: Shapes, half: str) -> tuple[int, ...]:
    """Return how many blocks each stage of a half of TAESD has: stages end at the convolutions between."""
    numbers = half_numbers(shapes, half)
    stages = [0]
    # the first convolution opens the first stage, the last one closes the last
    for number in numbers[1:-1]:
        if any(key.startswith(f"{half}{number}.conv.") for key in shapes):
            stages[-1] += 1
        elif half == "taesd_encoder." or stages[-1]:
            stages.append(0)
    return tuple(stage for stage in stages if stage) if numbers else ()


def cascade_a_config(shapes: Shapes) -> Config:
    """The arguments of diffusers' `PaellaVQModel`."""
    tokens, channels = shape_of(shapes, "vquantizer.codebook.weight")
    levels = (count(shapes, r"down_blocks\.(\d+)\.") - 1 + 1) // 2
    up_blocks = count(shapes, r"up_blocks\.(\d+)\.")
    return {
        "levels": levels,
        # in addition to the first convolution, one at each up step, and a block of each level after the first
        "bottleneck_blocks": up_blocks - 1 - 2 * (levels - 1),
        "embed_dim": size_of(shapes, "up_blocks.0.0.weight"),
        "latent_channels": channels,
        "num_vq_embeddings": tokens,
        "up_down_scale_factor": math.isqrt(size_of(shapes, "in_block.1.weight", 1) // 3),
        "scale_factor": 0.43,
    }


def cascade_c_config(shapes: Shapes) -> Config:
    """The arguments of `pool.models.components.vae.cascade_encoder.CascadeEncoder`."""
    found = efficientnet_config(shapes, "backbone.")
    return {**found, "latent_channels": size_of(shapes, "mapper.0.weight")}


def oobleck_config(shapes: Shapes) -> Config:
    """Return the arguments of `diffusers.AutoencoderOobleck`, for weight norms in either naming."""
    narrow, audio_channels = _oobleck(shapes, "encoder.layers.0")[:2]
    blocks = count(shapes, r"encoder\.layers\.(\d+)\.layers\.")
    folds = [_oobleck(shapes, f"encoder.layers.{i + 1}.layers.4") for i in range(blocks)]
    return {
        "encoder_hidden_size": narrow,
        "downsampling_ratios": [kernel // 2 for _, _, kernel in folds],
        "channel_multiples": [width // narrow for width, _, _ in folds],
        "decoder_channels": _oobleck(shapes, f"decoder.layers.{blocks + 2}")[1],
        "decoder_input_channels": _oobleck(shapes, "decoder.layers.0")[1],
        "audio_channels": audio_channels,
        "sampling_rate": 44100,
    }


#: stride of a level of the autoencoder of Stable Audio 3, which no shape determines; layers from which on it is the
#: large one, which has other activations in its last layers, and how many. Source: model_config.json of
#: stabilityai/SAME-S, SAME-L
_SAME_STRIDE, _SAME_LARGE, _SAME_SINES = 16, 12, 8
#: width of its layers, as a multiple of an argument of its class
_SAME_MULTIPLE = 6


def same_config(shapes: Shapes) -> Config:
    """Return the arguments of `diffusers.AutoencoderSAME`."""
    levels = count(shapes, r"encoder\.layers\.(\d+)\.new_tokens$")
    widths = [shape_of(shapes, f"encoder.layers.{level}.new_tokens")[2] for level in range(levels)]
    depths = [count(shapes, rf"encoder\.layers\.{level}\.transformers\.(\d+)\.") for level in range(levels)]
    block = "encoder.layers.0.transformers.0."
    whole = all(width % _SAME_MULTIPLE == 0 for width in widths)
    channels = math.gcd(*widths) // _SAME_MULTIPLE if whole else math.gcd(*widths)
    return {
        "audio_channels": 2,
        "patch_size": _oobleck(shapes, "encoder.layers.0.mapping")[1] // 2,
        "encoder_channels": channels,
        "encoder_c_mults": [width // channels for width in widths],
        "encoder_strides": [_SAME_STRIDE] * levels,
        "encoder_transformer_depths": depths,
        "latent_dim": shape_of(shapes, "bottleneck.scaling_factor")[1],
        "use_differential_attention": shape_of(shapes, f"{block}self_attn.to_qkv.weight")[0] == 5 * widths[0],
        "dim_heads": shape_of(shapes, f"{block}self_attn.q_norm.gamma")[0],
        "ff_mult": shape_of(shapes, f"{block}ff.ff.2.weight")[1] // widths[0],
        "decoder_sinusoidal_blocks": [_SAME_SINES if depth >= _SAME_LARGE else 0 for depth in depths],
        "sampling_rate": 44100,
    }


def _oobleck(shapes: Shapes, layer: str) -> tuple[int, int, int]:
    shape = shape_of(shapes, f"{layer}.weight_v", f"{layer}.parametrizations.weight.original1")
    if len(shape) != 3:
        raise UnknownArchitecture(f"VAE: layer {layer}: found a weight of shape {shape}, expected three dimensions")
    return shape[0], shape[1], shape[2]


def _ldm_levels(shapes: Shapes) -> tuple[tuple[int, ...], int]:
    """Return the width of each level, finest first, and the number of blocks per level in the down path."""
    widths = _half_widths(shapes, "encoder.down.") or _half_widths(shapes, "decoder.up.")
    if not widths:
        raise UnknownArchitecture("VAE: found no encoder.down and no decoder.up blocks, expected at least one level")
    for half in ("encoder.down.", "decoder.up."):
        part, found = f"{half.partition('.')[0]}.", len(_half_widths(shapes, half))
        if found != len(widths) and any(key.startswith(part) for key in shapes):
            raise UnknownArchitecture(f"VAE: found {found} {half[:-1]} blocks, expected {len(widths)}")
    down = count_all(shapes, r"encoder\.down\.0\.block\.(\d+)\.")
    return widths, down or count_all(shapes, r"decoder\.up\.0\.block\.(\d+)\.") - 1


def _half_widths(shapes: Shapes, half: str) -> tuple[int, ...]:
    """Return the width of each level of a half; () if the file has none."""
    levels = count_all(shapes, rf"{re.escape(half)}(\d+)\.")
    return tuple(
        shape_of(shapes, f"{half}{i}.block.0.conv2.weight", f"{half}{i}.block.0.conv2.conv.weight")[0]
        for i in range(levels)
    )


def _ldm_latent_channels(shapes: Shapes) -> int:
    key = "decoder.conv_in.weight"
    return size_of(shapes, key, 1) if key in shapes else size_of(shapes, "encoder.conv_out.weight") // 2


def _has_middle_attention(shapes: Shapes) -> bool:
    return any(".mid.attn_1." in key for key in shapes)
