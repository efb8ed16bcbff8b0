"""Configurations of UNets and CLIP text models from the shapes of a checkpoint, and checks that components match.
Torch-free.

Knows which shape tells which size, and the few facts that no shape determines (heads, norm groups, end token). Builds
nothing. Keys have no component prefix.

Facts that shapes do not tell
1. SD1 attention has 8 heads at every width; SD2 and SDXL attention, with linear projections, has heads of 64.
2. Group norms have 32 groups, or a quarter of the narrowest width if that is fewer.
3. CLIP attention heads are 64 wide; a model narrower than that has one.
4. SDXL's micro-conditioning numbers are embedded in 256 each.
5. CLIP-L was trained with an approximation of GELU, open_clip's models with exact GELU.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from modelpool.pool.families.detection.vaes import VaeFacts
from modelpool.pool.families.parts.located_family import Architecture, LocatedFamily
from modelpool.pool.families.parts.two_stages import check_stage
from modelpool.pool.families.parts.unet_facts import MAX_NORM_GROUPS, NUMBER_WIDTH, SD1_HEADS, UNET_HEAD_WIDTH
from modelpool.pool.files.formats.safetensors_file import Shape
from modelpool.pool.models.components.common.spliced_vae import names_in_vae
from modelpool.pool.models.components.common.vae_compression import measured_folder_vae, measured_vae
from modelpool.pool.values.core.errors import UnknownArchitecture, counted
from modelpool.pool.values.core.family_facts import LatentFacts
from modelpool.pool.values.core.sampling_facts import ImageConcat, MicroConditioning
from modelpool.pool.values.specs.spec import Role

Config: TypeAlias = dict[str, Any]

#: count of micro-conditioning numbers
SIZE_NUMBERS: Mapping[MicroConditioning, int] = {MicroConditioning.SIZES: 6, MicroConditioning.AESTHETICS: 5}
CLIP_HEAD_WIDTH = 64
CLIP_END_TOKEN = 49407
CLIP_TOKENS = 49408
CLIP_POSITIONS = 77
#: red, green and blue
IMAGE_CHANNELS = 3


def unet_config(shapes: Mapping[str, Shape]) -> Config:
    """Return the arguments of `diffusers.UNet2DConditionModel` for the UNet of SD1, SD2, SDXL or a pruned one (SSD-1B,
    Vega, KOALA) with tensors of `shapes`, of any size.

    Raises UnknownArchitecture naming what it lacks.
    """
    down, up = unet_down_levels(shapes), unet_up_levels(shapes)
    channels = tuple(level[-1].channels for level in down)
    blocks = len(down[0])
    counts = [len(level) for level in down], [len(level) for level in up]
    if counts != ([blocks] * len(down), [blocks + 1] * len(down)):
        raise UnknownArchitecture(
            f"UNet: found levels of {counts[0]} blocks in the down path and {counts[1]} in the up path, expected the "
            "same at each level, and one more in the up path"
        )
    depths, up_depths = [_level_depth(level) for level in down], [_level_depth(level) for level in up]
    middle = _unet_middle(shapes)
    middle_depth = _count(shapes, r"middle_block\.1\.transformer_blocks\.(\d+)\.")
    if depths[-1] and middle_depth and _first(depths[-1]) != middle_depth:
        raise UnknownArchitecture(
            f"UNet: found {middle_depth} transformer blocks in the middle, expected {_first(depths[-1])} as at the "
            "last level"
        )
    attention = _first_attention(shapes)
    is_linear = len(shapes.get(f"{attention}proj_in.weight", ())) == 2
    config: Config = {
        "in_channels": _shape(shapes, "input_blocks.0.0.weight", 4)[1],
        "out_channels": _shape(shapes, "out.2.weight", 4)[0],
        "block_out_channels": channels,
        "layers_per_block": blocks,
        "cross_attention_dim": _shape(shapes, f"{attention}transformer_blocks.0.attn2.to_k.weight", 2)[1],
        "attention_head_dim": _unet_heads(
            channels, is_linear
        ),  # for historical reasons the argument is the number of heads
        "use_linear_projection": is_linear,
        "down_block_types": tuple("CrossAttnDownBlock2D" if depth else "DownBlock2D" for depth in depths),
        "up_block_types": tuple("CrossAttnUpBlock2D" if depth else "UpBlock2D" for depth in up_depths),
        # the middle block uses the first entry of the last level
        "transformer_layers_per_block": (*(depth or 1 for depth in depths[:-1]), depths[-1] or middle_depth or 1),
        "norm_num_groups": _norm_groups("UNet", channels),
    }
    if up_depths != depths[::-1]:
        config["reverse_transformer_layers_per_block"] = tuple(depth or 1 for depth in up_depths)
    if middle != "UNetMidBlock2DCrossAttn":
        config["mid_block_type"] = middle
    if "label_emb.0.0.weight" in shapes:
        # SDXL and its relatives have no attention at the first level; unCLIP reads an image instead of sizes
        if depths[0]:
            config["class_embed_type"] = "projection"
        else:
            config["addition_embed_type"] = "text_time"
            config["addition_time_embed_dim"] = NUMBER_WIDTH
        config["projection_class_embeddings_input_dim"] = _shape(shapes, "label_emb.0.0.weight", 2)[1]
    return config


def clip_text_config(shapes: Mapping[str, Shape]) -> Config:
    """Return the arguments of `transformers.CLIPTextConfig` for a CLIP-L text model with tensors of `shapes`, of any
    size.

    Raises UnknownArchitecture naming what it lacks.
    """
    config = _clip_config(
        _shape(shapes, "embeddings.token_embedding.weight", 2),
        _shape(shapes, "embeddings.position_embedding.weight", 2),
    )
    return {
        **config,
        "intermediate_size": _shape(shapes, "encoder.layers.0.mlp.fc1.weight", 2)[0],
        "num_hidden_layers": _count(shapes, r"encoder\.layers\.(\d+)\."),
        "hidden_act": "quick_gelu",
    }


def open_clip_text_config(shapes: Mapping[str, Shape]) -> Config:
    """Return the arguments of `transformers.CLIPTextConfig` for an open_clip text model (G or H) with tensors of
    `shapes`, of any size.

    Raises UnknownArchitecture naming what it lacks.
    """
    projection = _shape(shapes, "text_projection", 2)
    return {**open_clip_text_alone_config(shapes), "projection_dim": projection[1]}


def open_clip_text_alone_config(shapes: Mapping[str, Shape]) -> Config:
    """Return `open_clip_text_config` without a projection, which SD2 does not read."""
    config = _clip_config(_shape(shapes, "token_embedding.weight", 2), _shape(shapes, "positional_embedding", 2))
    return {
        **config,
        "intermediate_size": _shape(shapes, "transformer.resblocks.0.mlp.c_fc.weight", 2)[0],
        "num_hidden_layers": _count(shapes, r"transformer\.resblocks\.(\d+)\."),
        "hidden_act": "gelu",
    }


def projected_clip_text_config(shapes: Mapping[str, Shape]) -> Config:
    """Return the arguments of `transformers.CLIPTextConfig` for a CLIP text model with a projection (G or H), in the
    naming of transformers, with tensors of `shapes`, of any size. Raises UnknownArchitecture as `clip_text_config`
    does."""
    turned = shapes.get("text_projection")  # as open_clip stores it, and converters that keep its form
    projection = turned[::-1] if turned and len(turned) == 2 else _shape(shapes, "text_projection.weight", 2)
    return {**clip_text_config(shapes), "hidden_act": "gelu", "projection_dim": projection[0]}


def _clip_config(tokens: Shape, places: Shape) -> Config:
    """Return the arguments common to both namings, from the shapes of the two embedding tables."""
    (vocabulary, hidden), positions = tokens, places[0]
    if vocabulary < CLIP_TOKENS or positions < CLIP_POSITIONS:
        raise UnknownArchitecture(
            f"text encoder: found {vocabulary} tokens and {positions} positions, "
            f"expected {CLIP_TOKENS} and {CLIP_POSITIONS} of CLIP"
        )
    if hidden > CLIP_HEAD_WIDTH and hidden % CLIP_HEAD_WIDTH:
        raise UnknownArchitecture(f"text encoder: found width {hidden}, expected a multiple of {CLIP_HEAD_WIDTH}")
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "num_attention_heads": max(1, hidden // CLIP_HEAD_WIDTH),
        "max_position_embeddings": positions,
        "eos_token_id": CLIP_END_TOKEN,
    }


def check(family: LocatedFamily, shapes: Mapping[str, Shape]) -> None:
    """Check that the components of a checkpoint of `family` with tensors of `shapes` are complete and match each other.

    Raises UnknownArchitecture stating the missing part or the mismatch.
    """
    texts = {role: text_config(family, role, shapes) for role in family.text_encoders}
    folder_config = family.configs.get(Role.DIFFUSION_MODEL)
    unet = dict(folder_config) if folder_config else unet_config(family.bare_shapes_of(Role.DIFFUSION_MODEL, shapes))
    vae = vae_facts(family, shapes)
    if not vae.has_decoder:
        raise UnknownArchitecture(f"its VAE ({vae.title}) has no decoder, expected one")
    widths = [config["hidden_size"] for config in texts.values()]
    if sum(widths) != unet["cross_attention_dim"]:
        found = f"text encoder is {widths[0]}" if len(widths) == 1 else f"text encoders are {widths}"
        raise UnknownArchitecture(f"the {found} wide, expected {unet['cross_attention_dim']} for the UNet")
    numbers = SIZE_NUMBERS.get(family.sampling.size_conditions, 0)
    if numbers:
        pooled = sum(config["projection_dim"] for role, config in texts.items() if family.texts[role].gives_pooled)
        label_width = unet.get("projection_class_embeddings_input_dim", 0)
        if label_width != pooled + numbers * NUMBER_WIDTH:
            raise UnknownArchitecture(
                f"the UNet reads {label_width} vector inputs, expected {pooled} of the pooled text and "
                f"{numbers} times {NUMBER_WIDTH}"
            )
    channels, image_concat = vae.latent_channels, family.sampling.image_concat
    extra = 0 if image_concat is None else image_concat_channels(image_concat, channels, int(vae.decode_ratio))
    if not channels == unet["in_channels"] - extra == unet["out_channels"]:
        more = f", and {extra} for the input image" if extra else ""
        raise UnknownArchitecture(
            f"the UNet reads {unet['in_channels']} and writes {unet['out_channels']} channels, "
            f"expected the {channels} of the VAE{more}"
        )


def image_concat_channels(image_concat: ImageConcat, channels: int, downscale: int) -> int:
    """Return the concatenated channels of an input image, for latents of `channels` channels and cells of `downscale`
    pixels."""
    match image_concat:
        case ImageConcat.INPAINT:
            return 1 + channels
        case ImageConcat.INPAINT_BY_PIXEL:
            return channels + downscale**2
        case ImageConcat.LATENT | ImageConcat.NOISED_LATENT | ImageConcat.UNSCALED:
            return channels
        case ImageConcat.PIXELS:
            return IMAGE_CHANNELS
        case ImageConcat.DEPTH:
            return 1
        case ImageConcat.INSTEAD:
            return 0


def check_latents(family: LocatedFamily, shapes: Mapping[str, Shape]) -> None:
    """Check that the VAE of a checkpoint of `family` matches the latents of its diffusion model.
    Recognition has measured the model.

    Raises UnknownArchitecture stating what does not match.
    """
    if family.latent is not None:
        return
    check_stage(family, family.bare_shapes_of(Role.DIFFUSION_MODEL, shapes))
    vae, latent = vae_facts(family, shapes), family.latent_format
    if not vae.has_decoder:
        raise UnknownArchitecture(f"its VAE ({vae.title}) has no decoder, expected one")
    if vae.latent_formats and latent not in vae.latent_formats:
        raise UnknownArchitecture(
            f"its VAE is that of {vae.title}, with latents of {' or '.join(vae.latent_formats)}; expected one for "
            f"latents of {latent}"
        )


def text_config(family: LocatedFamily, role: Role, shapes: Mapping[str, Shape]) -> Config:
    """Return the configuration of a text encoder of a checkpoint of `family` with tensors of `shapes` (keys with
    prefixes)."""
    if role in family.configs:
        return dict(family.configs[role])
    bare = family.bare_shapes_of(role, shapes)
    match family.architectures[role]:
        case Architecture.OPEN_CLIP_TEXT:
            return open_clip_text_config(bare)
        case Architecture.OPEN_CLIP_TEXT_ALONE:
            return open_clip_text_alone_config(bare)
        case Architecture.CLIP_TEXT_PROJECTED:
            return projected_clip_text_config(bare)
        case _:
            return clip_text_config(bare)


def latent_facts(family: LocatedFamily, shapes: Mapping[str, Shape]) -> LatentFacts:
    """Return the latent facts of a checkpoint of `family` with tensors of `shapes` (keys with prefixes)."""
    if family.latent is not None:
        return family.latent
    return latents_with(family, vae_facts(family, shapes))


def latents_with(family: LocatedFamily, vae: VaeFacts) -> LatentFacts:
    """Return the latent facts of `family` with this VAE."""
    return LatentFacts(
        vae.latent_channels,
        int(vae.decode_ratio),
        family.scaling_factor,
        shift=family.latent_shift,
        means=family.latent_means,
        deviations=family.latent_deviations,
        vae=vae.name,
        # videos of some models are encoded and decoded by an image VAE
        dimensions=vae.dimensions if family.sampling.video is None else 3,
        frames_per_cell=vae.temporal_ratio,
        audio=family.sampling.audio,
        sound=None if family.sampling.video is None else family.sampling.video.sound,
    )


def vae_facts(family: LocatedFamily, shapes: Mapping[str, Shape]) -> VaeFacts:
    """Return the facts of the VAE of a checkpoint of `family`. Raises UnknownArchitecture if it is not supported."""
    own, folder_config = family.shapes_of(Role.VAE, shapes), family.configs.get(Role.VAE)
    bare = {name: own[key] for key, name in names_in_vae(family, own).items()}
    return (
        measured_vae(bare, family.latent_format) if folder_config is None else measured_folder_vae(folder_config, bare)
    )


@dataclass(frozen=True, slots=True)
class UnetBlock:
    """A residual block of a UNet: its channels, and the number of transformer blocks after it."""

    channels: int
    depth: int


def unet_down_levels(shapes: Mapping[str, Shape]) -> list[list[UnetBlock]]:
    """Return the residual blocks of a UNet's down path, level by level."""
    levels: list[list[UnetBlock]] = [[]]
    for i in range(1, _count(shapes, r"input_blocks\.(\d+)\.")):
        if f"input_blocks.{i}.0.op.weight" in shapes:
            levels.append([])
        else:
            levels[-1].append(_unet_block(shapes, f"input_blocks.{i}."))
    return _whole_levels(levels)


def unet_up_levels(shapes: Mapping[str, Shape]) -> list[list[UnetBlock]]:
    """Return the residual blocks of a UNet's up path, level by level, the lowest resolution first."""
    levels: list[list[UnetBlock]] = [[]]
    for i in range(count := _count(shapes, r"output_blocks\.(\d+)\.")):
        levels[-1].append(_unet_block(shapes, f"output_blocks.{i}."))
        if i + 1 < count and any(f"output_blocks.{i}.{place}.conv.weight" in shapes for place in (1, 2)):
            levels.append([])
    return _whole_levels(levels)


def _unet_block(shapes: Mapping[str, Shape], stem: str) -> UnetBlock:
    own = [key for key in shapes if key.startswith(stem)]
    depth = _count(own, rf"{re.escape(stem)}1\.transformer_blocks\.(\d+)\.")
    return UnetBlock(_shape(shapes, f"{stem}0.out_layers.3.weight", 4)[0], depth)


def _whole_levels(levels: list[list[UnetBlock]]) -> list[list[UnetBlock]]:
    if not all(levels):
        raise UnknownArchitecture("UNet: found a level without residual blocks, expected at least one at each")
    return levels


def _level_depth(level: Sequence[UnetBlock]) -> int | tuple[int, ...]:
    """Return the transformer blocks after each residual block of a level: one number if all are equal."""
    depths = tuple(block.depth for block in level)
    if len({block.channels for block in level}) > 1 or (0 in depths and any(depths)):
        raise UnknownArchitecture(
            f"UNet: found a level of blocks with {[block.channels for block in level]} channels and {list(depths)} "
            "transformer blocks, expected equal channels, and attention after each block or after none"
        )
    return depths[0] if len(set(depths)) == 1 else depths


def _first(depth: int | tuple[int, ...]) -> int:
    return depth if isinstance(depth, int) else depth[0]


def _unet_middle(shapes: Mapping[str, Shape]) -> str | None:
    """Return diffusers' name of a UNet's middle block: two residual blocks around attention, one alone, or None."""
    parts = _count(shapes, r"middle_block\.(\d+)\.")
    if not parts:
        return None
    attends = "middle_block.1.transformer_blocks.0.attn2.to_k.weight" in shapes
    if not (parts == 3 and attends) and parts != 1:
        raise UnknownArchitecture(
            f"UNet: found a middle of {parts} parts {'with' if attends else 'without'} attention, expected residual "
            "blocks before and after attention, one residual block alone, or no middle"
        )
    return "UNetMidBlock2DCrossAttn" if attends else "UNetMidBlock2D"


def _first_attention(shapes: Mapping[str, Shape]) -> str:
    """Return the key prefix of a UNet's first attention."""
    found = (key for key in shapes if key.endswith(".1.transformer_blocks.0.attn2.to_k.weight"))
    key = next(found, "middle_block.1.transformer_blocks.0.attn2.to_k.weight")
    return key.removesuffix("transformer_blocks.0.attn2.to_k.weight")


def _unet_heads(channels: tuple[int, ...], is_linear: bool) -> int | tuple[int, ...]:
    """Return the attention heads at each width."""
    if not is_linear:
        if any(width % SD1_HEADS for width in channels):
            raise UnknownArchitecture(f"UNet: found widths {channels}, expected multiples of {SD1_HEADS} (the heads)")
        return SD1_HEADS
    if any(width > UNET_HEAD_WIDTH and width % UNET_HEAD_WIDTH for width in channels):
        raise UnknownArchitecture(f"UNet: found widths {channels}, expected multiples of {UNET_HEAD_WIDTH} (a head)")
    return tuple(max(1, width // UNET_HEAD_WIDTH) for width in channels)


def _norm_groups(what: str, channels: tuple[int, ...]) -> int:
    groups = min(MAX_NORM_GROUPS, min(channels) // 4)
    if not groups or any(width % groups for width in channels):
        raise UnknownArchitecture(f"{what}: found widths {channels}, expected multiples of {groups or 4}")
    return groups


def _shape(shapes: Mapping[str, Shape], key: str, dimensions: int) -> Shape:
    if key not in shapes:
        raise UnknownArchitecture(f"missing tensor {key!r}")
    if len(shapes[key]) != dimensions:
        raise UnknownArchitecture(f"tensor {key!r}: found shape {shapes[key]}, expected {dimensions} dimensions")
    return shapes[key]


def _count(keys: Iterable[str], pattern: str) -> int:
    """Return how many numbers, from 0, `pattern` finds at the beginning of keys.

    Raises UnknownArchitecture if one is missing: the module has all of them, and otherwise one key could request any
    number of layers.
    """
    compiled = re.compile(pattern)
    found = {match[1] for key in keys if (match := compiled.match(key))}
    missing = next((number for number in range(len(found)) if str(number) not in found), None)
    if missing is not None:
        raise UnknownArchitecture(
            f"found {counted(len(found), 'number')} in {pattern!r} without {missing}, expected all from 0 on"
        )
    return len(found)


def whole_numbers(value: Any) -> Iterator[int]:
    """Yield the whole numbers in an argument of a class: it, or those in its lists."""
    if isinstance(value, int):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from whole_numbers(part)
