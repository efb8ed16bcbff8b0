"""Names inside diffusers' modules that options act on, and a self-test that they still have the same meaning.

Everything here is an attribute, an argument or an order of results that diffusers does not document. `self_test`
checks whether a version of diffusers is compatible.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import diffusers
import torch
from diffusers.models import transformers
from diffusers.models.attention import BasicTransformerBlock, JointTransformerBlock
from diffusers.models.attention_processor import Attention, AttnProcessor2_0
from diffusers.models.embeddings import get_1d_rotary_pos_embed
from diffusers.models.transformers import auraflow_transformer_2d
from diffusers.models.transformers.transformer_flux import (
    FluxAttention,
    FluxSingleTransformerBlock,
    FluxTransformerBlock,
)
from torch import Tensor, nn

#: lists of blocks of a transformer -> the name of its blocks in options
BLOCK_LISTS = {
    "joint_transformer_blocks": "double_block",
    "transformer_blocks": "double_block",
    "double_stream_blocks": "double_block",
    "blocks": "double_block",
    "layers": "double_block",
    "single_transformer_blocks": "single_block",
    "single_stream_blocks": "single_block",
}
#: argument names of a block: tokens of the image, tokens of the text, modulation, rotary positions
IMAGE_ARGUMENTS = ("hidden_states", "x")
TEXT_ARGUMENTS = ("encoder_hidden_states",)
VECTOR_ARGUMENTS = ("temb", "temb_mod", "temb_mod_img", "adaln_input", "embedded_timestep")
POSITION_ARGUMENTS = ("image_rotary_emb", "rotary_emb", "freqs_cis")
#: columns of `img_ids`: time, height, width
IDS_T, IDS_Y, IDS_X = 0, 1, 2

#: classes that make the rotary embeddings of a grid of patches, of Wan and of HunyuanVideo
_WAN_ROPES = frozenset({"WanRotaryPosEmbed"})
_HUNYUAN_ROPES = frozenset({"HunyuanVideoRotaryPosEmbed", "HunyuanVideo15RotaryPosEmbed"})
#: the base of Wan's frequencies, which its class does not keep
_WAN_THETA = 10000.0

#: blocks that return (text, image), and those that return (image, text)
TEXT_FIRST = frozenset(
    {
        "FluxTransformerBlock",
        "FluxSingleTransformerBlock",
        "Flux2TransformerBlock",
        "JointTransformerBlock",
        "ChromaTransformerBlock",
        "QwenImageTransformerBlock",
        "AuraFlowJointTransformerBlock",
    }
)
IMAGE_FIRST = frozenset(
    {
        "HunyuanVideoTransformerBlock",
        "HunyuanVideoSingleTransformerBlock",
        "MochiTransformerBlock",
        "CogVideoXBlock",
        "HiDreamBlock",
    }
)
#: blocks that return the result of a block inside them
_WRAPPED = {"HiDreamBlock": "HiDreamImageTransformerBlock"}


class NamesChangedError(RuntimeError):
    """The installed diffusers no longer has what the options act on."""


@dataclass(frozen=True, slots=True)
class UnetBlockInfo:
    """One block of a UNet, numbered as in the original implementation.

    key            ("input", n), ("middle", 0) or ("output", n)
    layers         names of its residual, attention and resampling layers, in execution order
    skip_channels  channels of the skip connection that an output block joins to its input; 0 for the others
    """

    key: tuple[str, int]
    layers: tuple[str, ...]
    skip_channels: int = 0


def is_unet(module: nn.Module) -> bool:
    """Whether `module` is a UNet of the Stable Diffusion kind."""
    return isinstance(module, diffusers.UNet2DConditionModel)


def unet_blocks(unet: nn.Module) -> tuple[UnetBlockInfo, ...]:
    """Return the blocks of `unet` in execution order.

    Input block 0 is the first convolution; each residual layer begins a block, which includes its attention and the
    up-sampling after it; each down-sampling is a separate block.
    """
    plain: Any = unet  # diffusers is not typed
    blocks, skips = [UnetBlockInfo(("input", 0), ("conv_in",))], [int(plain.conv_in.out_channels)]
    for i, down in enumerate(plain.down_blocks):
        for j, resnet in enumerate(down.resnets):
            blocks.append(UnetBlockInfo(("input", len(blocks)), tuple(_with_attention(down, f"down_blocks.{i}", j))))
            skips.append(int(resnet.out_channels))
        for j, sampler in enumerate(down.downsamplers or ()):
            blocks.append(UnetBlockInfo(("input", len(blocks)), (f"down_blocks.{i}.downsamplers.{j}",)))
            skips.append(int(sampler.out_channels))
    if plain.mid_block is not None:
        blocks.append(UnetBlockInfo(("middle", 0), tuple(_middle_layers(plain.mid_block))))
    number = 0
    for i, up in enumerate(plain.up_blocks):
        for j, _ in enumerate(up.resnets):
            layers = [*_with_attention(up, f"up_blocks.{i}", j)]
            if j == len(up.resnets) - 1:
                layers += [f"up_blocks.{i}.upsamplers.{k}" for k, _ in enumerate(up.upsamplers or ())]
            blocks.append(UnetBlockInfo(("output", number), tuple(layers), skips.pop()))
            number += 1
    return tuple(blocks)


def attentions_of(layer: nn.Module) -> Iterator[tuple[int, str, nn.Module]]:
    """Yield (transformer block, "attn1" or "attn2", the attention) of an attention layer of a UNet; nothing for other
    layers."""
    plain: Any = layer
    for index, block in enumerate(getattr(plain, "transformer_blocks", ())):
        for name in ("attn1", "attn2"):
            attention = getattr(block, name, None)
            if attention is not None:
                yield index, name, attention


def cross_attentions(unet: nn.Module) -> tuple[tuple[str, int, nn.Module], ...]:
    """Return each cross-attention of `unet` in execution order ("transformer_index" counts them): its name, its place
    in the order of modules, which adapters number their layers by, and the module."""
    order = {id(module): name for name, module in unet.named_modules() if name.endswith(".attn2")}
    places = {key: place for place, key in enumerate(order)}
    found = (
        attention
        for block in unet_blocks(unet)
        for layer in block.layers
        for _, name, attention in attentions_of(unet.get_submodule(layer))
        if name == "attn2"
    )
    return tuple((order[id(attention)], places[id(attention)], attention) for attention in found)


def attention_blocks(unet: nn.Module) -> tuple[nn.Module, ...]:
    """Return the block of each cross-attention of `unet`, in execution order. A block calls its `fuser` with the image
    and the "objs" of "gligen" among its `cross_attention_kwargs`, between its attentions."""
    return tuple(unet.get_submodule(name.removesuffix(".attn2")) for name, _, _ in cross_attentions(unet))


def joint_attention(block: nn.Module) -> nn.Module | None:
    """Return the attention of a block of Flux: `norm_q` returns the queries of the image (of all tokens in a single
    block), `to_out.0` of a double block gets the result for the image. None for other blocks."""
    attention = getattr(block, "attn", None)
    known = isinstance(block, FluxTransformerBlock | FluxSingleTransformerBlock)
    return attention if known and isinstance(attention, FluxAttention) else None


def is_plain_attention(attention: nn.Module) -> bool:
    """Whether `attention` only projects, multiplies and projects, so that a patched one omits nothing."""
    a: Any = attention
    return (
        isinstance(attention, Attention)
        and type(a.processor) is AttnProcessor2_0
        and a.group_norm is a.spatial_norm is a.norm_q is a.norm_k is a.norm_cross is a.added_kv_proj_dim is None
        and not a.residual_connection
        and a.rescale_output_factor == 1.0
    )


def block_lists(module: nn.Module) -> Iterator[tuple[str, nn.ModuleList]]:
    """Yield ("double_block" or "single_block", the blocks) of each list of blocks of a transformer, in execution
    order."""
    for name, kind in BLOCK_LISTS.items():
        blocks = getattr(module, name, None)
        if isinstance(blocks, nn.ModuleList) and len(blocks):
            yield kind, blocks


def modulated_input(block: nn.Module, tokens_BLD: Tensor, vector: Tensor) -> Tensor:
    """Return the input of the attention of `block`: its tokens, normalized and modulated by `vector`. The first norm of
    a block does so, except in those that add a table of their own to the vector (LTX-Video)."""
    plain: Any = block
    table = getattr(plain, "scale_shift_table", None)
    if table is None:
        modulated: Tensor = plain.norm1(tokens_BLD, emb=vector)[0]
        return modulated
    shift_BLD, scale_BLD = (table + vector.unflatten(2, (table.shape[0], -1))).unbind(2)[:2]
    normalized: Tensor = plain.norm1(tokens_BLD) * (1 + scale_BLD) + shift_BLD
    return normalized


@dataclass(frozen=True, slots=True)
class RopeSettings:
    """How a module makes rotary embeddings of a grid of patches.

    patch   cells of a patch in time, height and width
    widths  of the embedding of each of these axes
    theta   base of the frequencies
    dtype   in which they are computed
    is_4d   its results are [1, patches, 1, width], else [patches, width]
    """

    patch: tuple[int, int, int]
    widths: tuple[int, int, int]
    theta: float
    dtype: torch.dtype
    is_4d: bool


def rope_settings(rope: nn.Module) -> RopeSettings | None:
    """Return how the module `rope` makes its embeddings; None for an unknown class."""
    classes, plain = {base.__name__ for base in type(rope).__mro__}, cast(Any, rope)
    if classes & _WAN_ROPES:
        widths = (plain.t_dim, plain.h_dim, plain.w_dim)
        return RopeSettings(tuple(plain.patch_size), widths, _WAN_THETA, torch.float64, True)
    if classes & _HUNYUAN_ROPES:
        patch = (plain.patch_size_t, plain.patch_size, plain.patch_size)
        return RopeSettings(patch, tuple(plain.rope_dim), plain.theta, torch.float32, False)
    return None


def rotary_table(settings: RopeSettings, axis: int, positions_L: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of one axis at these positions, each [L, width], float32."""
    positions_L = positions_L.to(settings.dtype)
    made: tuple[Tensor, Tensor] = get_1d_rotary_pos_embed(
        settings.widths[axis], positions_L, settings.theta, use_real=True, freqs_dtype=settings.dtype
    )
    return made


def text_comes_first(block: nn.Module) -> bool | None:
    """Whether a block that returns two results returns the text's first; None if unknown."""
    names = {base.__name__ for base in type(block).__mro__}
    if names & TEXT_FIRST:
        return True
    return False if names & IMAGE_FIRST else None


def self_test() -> None:
    """Check arguments and results of the classes that options act on. Raises NamesChangedError naming those that
    differ."""
    problems = [f"{c.__name__} returns {order}" for c, first, order in _known_results() if order != _ORDERS[first]]
    arguments = set(inspect.signature(Attention.forward).parameters)
    if not {"hidden_states", "encoder_hidden_states", "attention_mask"} <= arguments:
        problems.append(f"Attention.forward takes {sorted(arguments)}")
    block = BasicTransformerBlock(8, 2, 4, cross_attention_dim=8)
    for _, name, attention in attentions_of(nn.ModuleDict({"transformer_blocks": nn.ModuleList([block])})):
        if not is_plain_attention(attention):
            problems.append(f"{name} of BasicTransformerBlock is not a plain attention")
    problems += _fuser_problems(block)
    for kind in (FluxTransformerBlock, FluxSingleTransformerBlock):
        joint = joint_attention(kind(8, 2, 4))
        if joint is None or not {"norm_q", "to_q"} <= {name for name, _ in joint.named_children()}:
            problems.append(f"{kind.__name__} has no attention with normalized queries")
    problems += _rope_problems()
    if problems:
        raise NamesChangedError("diffusers differs from what options act on: " + "; ".join(problems))


def _fuser_problems(block: BasicTransformerBlock) -> Iterator[str]:
    """Yield a problem if a block of a UNet does not call its fuser."""
    seen: list[object] = []

    def fuser(x_BLD: Tensor, objects: object) -> Tensor:
        seen.append(objects)
        return x_BLD

    block.__dict__["fuser"] = fuser
    x_BLD = torch.zeros(1, 2, 8)
    block(x_BLD, encoder_hidden_states=x_BLD, cross_attention_kwargs={"gligen": {"objs": "tokens"}})
    if seen != ["tokens"]:
        yield "BasicTransformerBlock does not call its fuser"


def _rope_problems() -> Iterator[str]:
    """Yield the classes that embed a small grid differently from `rotary_table`."""
    axes = (4, 4, 4)
    ropes: tuple[nn.Module, ...] = (
        transformers.transformer_wan.WanRotaryPosEmbed(12, (1, 2, 2), 8),
        transformers.transformer_hunyuan_video.HunyuanVideoRotaryPosEmbed(2, 1, list(axes), 256.0),
        transformers.transformer_hunyuan_video15.HunyuanVideo15RotaryPosEmbed(2, 1, list(axes), 256.0),
    )
    for rope in ropes:
        settings = rope_settings(rope)
        cosines, _ = rope(torch.zeros(1, 1, 2, 4, 6))
        if settings is None or settings.widths != axes or settings.patch != (1, 2, 2):
            yield f"{type(rope).__name__} has other settings"
            continue
        last, _ = rotary_table(settings, 2, torch.arange(3.0))
        if not torch.equal(cosines.reshape(2, 2, 3, -1)[1, 1, :, 8:], last):
            yield f"{type(rope).__name__} makes other embeddings"


_ORDERS = {
    True: ("encoder_hidden_states", "hidden_states"),
    False: ("hidden_states", "encoder_hidden_states"),
}


def _known_results() -> Iterator[tuple[type, bool, tuple[str, ...]]]:
    places = (
        transformers.transformer_flux,
        transformers.transformer_flux2,
        transformers.transformer_chroma,
        transformers.transformer_qwenimage,
        transformers.transformer_hunyuan_video,
        transformers.transformer_mochi,
        transformers.transformer_hidream_image,
        transformers.cogvideox_transformer_3d,
        auraflow_transformer_2d,
    )
    for names, first in ((TEXT_FIRST, True), (IMAGE_FIRST, False)):
        for name in sorted(names - {JointTransformerBlock.__name__}):
            inner = _WRAPPED.get(name, name)
            found = next((getattr(place, inner) for place in places if hasattr(place, inner)), None)
            if found is None:
                raise NamesChangedError(f"diffusers has no {inner} where it was")
            yield found, first, _result_names(found)
    yield JointTransformerBlock, True, _result_names(JointTransformerBlock)


def _result_names(block: type) -> tuple[str, ...]:
    """Return the names in the last `return` of a block's forward."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(block.forward))))  # type: ignore[attr-defined]
    returns = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return)]
    last = returns[-1] if returns else None
    return tuple(n.id for n in last.elts if isinstance(n, ast.Name)) if isinstance(last, ast.Tuple) else ()


def repeated_block_names(module: nn.Module) -> frozenset[str]:
    """Return the class names of the blocks that diffusers would compile in `module`; empty if it names none."""
    return frozenset(getattr(module, "_repeated_blocks", None) or ())


def _with_attention(block: Any, place: str, index: int) -> Iterator[str]:
    yield f"{place}.resnets.{index}"
    attentions = getattr(block, "attentions", None)
    if attentions is not None and attentions[index] is not None:
        yield f"{place}.attentions.{index}"


def _middle_layers(block: Any) -> Iterator[str]:
    yield "mid_block.resnets.0"
    for index, _ in enumerate(block.resnets[1:]):
        attentions = getattr(block, "attentions", None)
        if attentions is not None and attentions[index] is not None:
            yield f"mid_block.attentions.{index}"
        yield f"mid_block.resnets.{index + 1}"
