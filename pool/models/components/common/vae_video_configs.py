"""Arguments of diffusers' video VAE classes, from the shapes of a single file. Torch-free.

Keys have no prefix. Facts that no shape determines (dimensions that a fold halves, and its shortcut) are stated at each
family.
"""

from __future__ import annotations

import math
import re

from modelpool.pool.models.components.common.vae_configs import (
    Config,
    Shapes,
    count,
    diffusers_levels,
    ltx_kinds,
    norm_groups,
    shape_of,
    size_of,
)
from modelpool.pool.values.core.errors import UnknownArchitecture


def hunyuan_video_config(shapes: Shapes) -> Config:
    """The arguments of `diffusers.AutoencoderKLHunyuanVideo`."""
    widths = _widths(shapes, "encoder.down")
    return {
        "latent_channels": size_of(shapes, "decoder.conv_in.conv.weight", 1),
        "block_out_channels": widths,
        "layers_per_block": count(shapes, r"encoder\.down\.0\.block\.(\d+)\."),
        "down_block_types": ("HunyuanVideoDownBlock3D",) * len(widths),
        "up_block_types": ("HunyuanVideoUpBlock3D",) * len(widths),
        "norm_num_groups": norm_groups(widths),
        "spatial_compression_ratio": 2 ** count(shapes, r"encoder\.down\.(\d+)\.downsample\."),
        "mid_block_add_attention": any(".mid.attn_1." in key for key in shapes),
    }


def hunyuan_video_15_config(shapes: Shapes) -> Config:
    """Return the arguments of `diffusers.AutoencoderKLHunyuanVideo15`, and of HunyuanImage's refiner."""
    widths = _widths(shapes, "encoder.down")
    folds = [size_of(shapes, f"decoder.up.{i}.upsample.conv.conv.weight") for i in range(len(widths) - 1)]
    going_up = tuple(reversed(widths))
    # a spatial fold produces 4 channels per output channel, a spatio-temporal one 8
    in_time = sum(fold == 8 * after for fold, after in zip(folds, going_up[1:], strict=True))
    return {
        "latent_channels": size_of(shapes, "decoder.conv_in.conv.weight", 1),
        "block_out_channels": widths,
        "layers_per_block": count(shapes, r"encoder\.down\.0\.block\.(\d+)\."),
        "spatial_compression_ratio": 2 ** len(folds),
        "temporal_compression_ratio": 2**in_time,
    }


def cosmos_config(shapes: Shapes) -> Config:
    """Return the arguments of `diffusers.AutoencoderKLCosmos`: a patch is 4 pixels and frames, folds double that."""
    decoder = [
        size_of(shapes, f"decoder.up.{i}.block.0.conv1.0.conv3d.weight")
        for i in range(count(shapes, r"decoder\.up\.(\d+)\."))
    ]
    encoder = [
        size_of(shapes, f"encoder.down.{i}.block.0.conv1.0.conv3d.weight")
        for i in range(count(shapes, r"encoder\.down\.(\d+)\."))
    ]
    in_space = count(shapes, r"encoder\.down\.(\d+)\.downsample\.conv1\.")
    in_time = count(shapes, r"encoder\.down\.(\d+)\.downsample\.conv2\.")
    patch = round((size_of(shapes, "encoder.conv_in.0.conv3d.weight", 1) / 3) ** (1 / 3))
    return {
        "latent_channels": size_of(shapes, "decoder.conv_in.0.conv3d.weight", 1),
        "encoder_block_out_channels": (size_of(shapes, "encoder.conv_in.0.conv3d.weight"), *encoder),
        "decode_block_out_channels": (*decoder, size_of(shapes, "decoder.conv_in.0.conv3d.weight")),
        "num_layers": count(shapes, r"encoder\.down\.0\.block\.(\d+)\."),
        "patch_size": patch,
        # the published ones have attention in the middle only
        "attention_resolutions": (),
        "spatial_compression_ratio": patch * 2**in_space,
        "temporal_compression_ratio": patch * 2**in_time,
    }


def mochi_config(shapes: Shapes) -> Config:
    """Return the arguments of `diffusers.AutoencoderKLMochi`; a missing half is configured like the existing one."""
    decoder = _mochi_decoder(shapes)
    encoder = _mochi_encoder(shapes)
    widths, layers, temporal, spatial, latent_channels = decoder or encoder or _no_mochi()
    return {
        "latent_channels": latent_channels,
        "decoder_block_out_channels": widths,
        "encoder_block_out_channels": encoder[0] if encoder else widths,
        "layers_per_block": encoder[1] if encoder else layers,
        "temporal_expansions": encoder[2] if encoder else temporal,
        "spatial_expansions": encoder[3] if encoder else spatial,
        "add_attention_block": (False, *(True,) * len(widths)),
    }


_Mochi = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...], int]


def _no_mochi() -> _Mochi:
    raise UnknownArchitecture("VAE: found neither layers nor blocks of a Mochi VAE, expected one of its halves")


def _mochi_encoder(shapes: Shapes) -> _Mochi | None:
    half = "encoder.layers." if "encoder.layers.0.weight" in shapes else "layers."
    if f"{half}0.weight" not in shapes:
        return None
    pattern = re.escape(half)
    folds = sorted({int(m[1]) for key in shapes if (m := re.match(rf"{pattern}(\d+)\.layers\.", key))})
    last = max(int(m[1]) for key in shapes if (m := re.match(rf"{pattern}(\d+)\.", key)))
    if not folds:
        raise UnknownArchitecture("VAE: found no level of Mochi's encoder, expected at least one")
    kernels = [shape_of(shapes, f"{half}{i}.layers.0.weight") for i in folds]
    output = "encoder.output_proj.weight" if half.startswith("encoder.") else "output_proj.weight"
    return (
        (size_of(shapes, f"{half}0.weight"), *(kernel[0] for kernel in kernels)),
        (folds[0] - 1, *(count(shapes, rf"{pattern}{i}\.layers\.(\d+)\.") - 1 for i in folds), last - folds[-1]),
        tuple(kernel[2] for kernel in kernels),
        tuple(kernel[3] for kernel in kernels),
        size_of(shapes, output) // 2,
    )


def _mochi_decoder(shapes: Shapes) -> _Mochi | None:
    half = "decoder.blocks." if "decoder.blocks.0.0.weight" in shapes else "blocks."
    if f"{half}0.0.weight" not in shapes:
        return None
    pattern = re.escape(half)
    levels = count(shapes, rf"{pattern}(\d+)\.blocks\.")
    widths = [size_of(shapes, f"{half}{i}.proj.weight", 1) for i in range(1, levels + 1)]
    last = size_of(shapes, f"{half}{levels + 1}.0.stack.0.weight")
    layers = (
        count(shapes, rf"{pattern}{levels + 1}\.(\d+)\."),
        *(count(shapes, rf"{pattern}{i}\.blocks\.(\d+)\.") for i in range(levels, 0, -1)),
        count(shapes, rf"{pattern}0\.(\d+)\.") - 1,
    )
    factors = [size_of(shapes, f"{half}{i}.proj.weight") // after
               for i, after in zip(range(1, levels + 1), [*widths[1:], last], strict=True)]  # fmt: skip
    # each fold doubles the sides; the remaining channel factor is time
    temporal = tuple(factor // 4 for factor in reversed(factors))
    return (
        (last, *reversed(widths)), layers, temporal, (2,) * levels, size_of(shapes, f"{half}0.0.weight", 1),
    )  # fmt: skip


def ltx_config(shapes: Shapes) -> Config:
    """Return the arguments of `diffusers.AutoencoderKLLTXVideo`, for all versions of LTX-Video.

    Folds that keep channels (up since 0.9.1, down since 0.9.5) have a shortcut.
    """
    up, factors = _ltx_decoder(shapes)
    timed = "decoder.last_scale_shift_table" in shapes
    config: Config = {
        "latent_channels": size_of(shapes, "decoder.conv_in.conv.weight", 1),
        "patch_size": math.isqrt(size_of(shapes, "encoder.conv_in.conv.weight", 1) // 3),
        "timestep_conditioning": timed,
        "decoder_block_out_channels": tuple(
            width * factor for width, factor in zip(reversed(up["widths"]), reversed(factors), strict=True)
        ),
        "decoder_layers_per_block": tuple(reversed((up["middle"], *up["layers"]))),
        "decoder_spatio_temporal_scaling": tuple(reversed(up["folds"])),
        "decoder_inject_noise": tuple(reversed(up["noise"])),
        "upsample_residual": tuple(factor > 1 for factor in reversed(factors)),
        "upsample_factor": tuple(reversed(factors)),
    }
    kinds = ltx_kinds(shapes, "encoder.down_blocks.")
    groups = [number for number, kind in enumerate(kinds) if kind == "group"]
    widths = [_ltx_width(shapes, f"encoder.down_blocks.{number}.") for number in groups]
    layers = [count(shapes, rf"encoder\.down_blocks\.{number}\.res_blocks\.(\d+)\.") for number in groups]
    folds = [number + 1 < len(kinds) and kinds[number + 1] == "fold" for number in groups[:-1]]
    folded = "encoder.down_blocks.1.conv.conv.weight" in shapes
    down = {
        "block_out_channels": tuple(widths if folded else widths[:-1]),
        "layers_per_block": tuple(layers),
        "spatio_temporal_scaling": tuple(folds),
        "down_block_types": (("LTXVideo095DownBlock3D" if folded else "LTXVideoDownBlock3D"),) * len(folds),
        "downsample_type": ("conv",) * len(folds),
    }
    if folded:
        down["downsample_type"] = tuple(
            _fold_type(size_of(shapes, f"encoder.down_blocks.{number + 1}.conv.conv.weight"), after)
            for number, after in zip(groups[:-1], widths[1:], strict=True)
        )
    return config | down


def ltx2_config(shapes: Shapes) -> Config:
    """Return the arguments of `diffusers.AutoencoderKLLTX2Video`: as LTX-Video since 0.9.5. Source for the decoder,
    which is not causal: diffusers' scripts/convert_ltx2_to_diffusers.py."""
    config = ltx_config(shapes)
    levels, folds = len(config["decoder_block_out_channels"]), config["downsample_type"]
    return config | {
        # the first convolution is as wide as a latent
        "block_out_channels": config["block_out_channels"][1:],
        "down_block_types": ("LTX2VideoDownBlock3D",) * len(config["down_block_types"]),
        "upsample_type": ("spatiotemporal",) * levels,
        "decoder_causal": False,
        # the class counts all folds for both
        "spatial_compression_ratio": config["patch_size"] * 2 ** sum(fold != "temporal" for fold in folds),
        "temporal_compression_ratio": 2 ** sum(fold != "spatial" for fold in folds),
    }


_FOLDS = {2: "temporal", 4: "spatial", 8: "spatiotemporal"}


def _fold_type(folded: int, after: int) -> str:
    """Return the dimensions that a fold of `folded` channels to `after` halves."""
    if after % folded or after // folded not in _FOLDS:
        raise UnknownArchitecture(f"VAE: found {folded} channels that become {after}, expected a fold by 2, 4 or 8")
    return _FOLDS[after // folded]


def _ltx_decoder(shapes: Shapes) -> tuple[Config, list[int]]:
    """Return the decoder's levels, in the order of use, and the channels that each fold joins in one."""
    beginning = "decoder.up_blocks."
    kinds = ltx_kinds(shapes, beginning)
    found: Config = {"widths": [], "layers": [], "folds": [], "noise": [], "middle": 0}
    factors: list[int] = []
    fold: int | None = None
    for number, kind in enumerate(kinds):
        block = f"{beginning}{number}."
        if kind == "fold":
            after, before = shape_of(shapes, f"{block}conv.conv.weight")[:2]
            fold = max(1, 8 * before // after)
        if kind != "group":
            continue
        layers = count(shapes, rf"{re.escape(block)}res_blocks\.(\d+)\.")
        found["noise"].append(f"{block}res_blocks.0.per_channel_scale1" in shapes)
        if number == 0:
            found["middle"] = layers
            continue
        found["widths"].append(_ltx_width(shapes, block))
        found["layers"].append(layers)
        found["folds"].append(fold is not None)
        factors.append(fold or 1)
        fold = None
    return found, factors


def _ltx_width(shapes: Shapes, block: str) -> int:
    return size_of(shapes, f"{block}res_blocks.0.conv2.conv.weight")


def cogvideox_config(shapes: Shapes) -> Config:
    """Return the arguments of `diffusers.AutoencoderKLCogVideoX`, for a file in diffusers' naming or in the original
    naming. No shape determines the frames of a cell: they are the published four."""
    if any(key.startswith("decoder.mid.") for key in shapes):
        widths, layers = _widths(shapes, "encoder.down"), count(shapes, r"encoder\.down\.0\.block\.(\d+)\.")
    else:
        widths, _, layers = diffusers_levels(shapes, "conv2.conv")
    return {
        "block_out_channels": widths,
        "layers_per_block": layers,
        "latent_channels": size_of(shapes, "decoder.conv_in.conv.weight", 1)
        if "decoder.conv_in.conv.weight" in shapes
        else size_of(shapes, "encoder.conv_out.conv.weight") // 2,
        "down_block_types": ("CogVideoXDownBlock3D",) * len(widths),
        "up_block_types": ("CogVideoXUpBlock3D",) * len(widths),
        "norm_num_groups": norm_groups(widths),
    }


def allegro_config(shapes: Shapes) -> Config:
    """Return the arguments of `diffusers.AutoencoderKLAllegro`, for a file in diffusers' naming. A missing half halves
    time at the levels of the existing one."""
    widths, _, layers = diffusers_levels(shapes, "conv2")
    levels = range(len(widths))
    down = [f"encoder.down_blocks.{i}.temp_convs_down.conv1.2.weight" in shapes for i in levels]
    up = [f"decoder.up_blocks.{i}.temp_conv_up.conv1.2.weight" in shapes for i in levels]
    has_decoder = "decoder.conv_in.weight" in shapes
    return {
        "block_out_channels": widths,
        "layers_per_block": layers,
        "latent_channels": size_of(shapes, "decoder.conv_in.weight", 1)
        if has_decoder
        else size_of(shapes, "encoder.conv_out.weight") // 2,
        "down_block_types": ("AllegroDownBlock3D",) * len(widths),
        "up_block_types": ("AllegroUpBlock3D",) * len(widths),
        "temporal_downsample_blocks": tuple(down if any(down) else reversed(up)),
        "temporal_upsample_blocks": tuple(up if any(up) else reversed(down)),
        "temporal_compression_ratio": 2 ** sum(up if any(up) else down),
        "norm_num_groups": norm_groups(widths),
    }


def wan21_config(shapes: Shapes) -> Config:
    """The arguments of `diffusers.AutoencoderKLWan` for Wan 2.1 and Qwen-Image."""
    base = size_of(shapes, "encoder.conv1.weight")
    folds = sorted({int(m[1]) for key in shapes if (m := re.match(r"encoder\.downsamples\.(\d+)\.resample\.", key))})
    per_level = folds[0] if folds else count(shapes, r"encoder\.downsamples\.(\d+)\.")
    first_of_levels = [0, *(fold + 1 for fold in folds)]
    widths = [size_of(shapes, f"encoder.downsamples.{first}.residual.6.weight") for first in first_of_levels]
    return {
        "base_dim": base,
        "decoder_base_dim": size_of(shapes, "decoder.head.0.gamma"),
        "z_dim": size_of(shapes, "decoder.conv1.weight", 1),
        "dim_mult": [width // base for width in widths],
        "num_res_blocks": per_level,
        "temperal_downsample": [f"encoder.downsamples.{fold}.time_conv.weight" in shapes for fold in folds],
        "scale_factor_spatial": 2 ** len(folds),
    }


def qwen_image_layered_config(shapes: Shapes) -> Config:
    """The arguments of `diffusers.AutoencoderKLWan` for Qwen-Image layered: Wan 2.1's with transparency."""
    channels = size_of(shapes, "encoder.conv1.weight", 1)
    return {**wan21_config(shapes), "in_channels": channels, "out_channels": size_of(shapes, "decoder.head.2.weight")}


def wan22_config(shapes: Shapes) -> Config:
    """The arguments of `diffusers.AutoencoderKLWan` for Wan 2.2."""
    base = size_of(shapes, "encoder.conv1.weight")
    levels = count(shapes, r"encoder\.downsamples\.(\d+)\.")
    widths = [size_of(shapes, f"encoder.downsamples.{i}.downsamples.0.residual.6.weight") for i in range(levels)]
    per_level = count((key for key in shapes if ".residual." in key), r"encoder\.downsamples\.0\.downsamples\.(\d+)\.")
    in_time = [f"encoder.downsamples.{i}.downsamples.{per_level}.time_conv.weight" in shapes for i in range(levels - 1)]
    channels = size_of(shapes, "encoder.conv1.weight", 1)
    patch = math.isqrt(channels // 3)
    return {
        "base_dim": base,
        "decoder_base_dim": size_of(shapes, "decoder.head.0.gamma"),
        "z_dim": size_of(shapes, "decoder.conv1.weight", 1),
        "dim_mult": [width // base for width in widths],
        "num_res_blocks": per_level,
        "temperal_downsample": in_time,
        "is_residual": True,
        "in_channels": channels,
        "out_channels": channels,
        "patch_size": patch,
        "scale_factor_spatial": patch * 2 ** (levels - 1),
    }


def qwen_image_21_config(shapes: Shapes) -> Config:
    """The arguments of `diffusers.AutoencoderKLQwenImage21`: Wan 2.2's without patches and with transparency."""
    config = wan22_config(shapes)
    levels = len(config["dim_mult"])
    return {
        **config,
        "out_channels": size_of(shapes, "decoder.head.2.weight"),
        "patch_size": None,
        "scale_factor_spatial": 2 ** (levels - 1),
    }


def _widths(shapes: Shapes, half: str) -> tuple[int, ...]:
    """Return the width of each level of the encoder, finest first."""
    levels = count(shapes, rf"{re.escape(half)}\.(\d+)\.")
    if not levels:
        raise UnknownArchitecture(f"VAE: found no {half} blocks, expected at least one level")
    return tuple(size_of(shapes, f"{half}.{i}.block.0.conv2.conv.weight") for i in range(levels))
