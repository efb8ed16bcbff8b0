"""Options that act on the self-attention of a UNet: the perturbation of PAG, the attention that SAG reads, and the
tiles of HyperTile. One function replaces each attention that any of them needs.

Shape legend: B batch, L tokens, D model width, H heads, E width of one head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from modelpool.pool.inference.conditioning.conditions import COND, UNCOND
from modelpool.pool.inference.sampling.step_clock import StepClock
from modelpool.pool.values.core.errors import unusable_field
from modelpool.pool.values.core.run_options import HyperTile, RunOptions, SelfAttention
from modelpool.pool.weights.options.transformer_options import Extra, Patch, ReplacePoint, TransformerOptions
from modelpool.pool.weights.patcher.blocks.diffusers_names import UnetBlockInfo, attentions_of, unet_blocks

#: the fact of a model call that names the option that guides by it
PERTURBED = "perturbed"
#: pixels along a side of a cell of the latent
_CELL_PIXELS = 8


@dataclass(slots=True, eq=False)
class AttendedTokens:
    """The tokens of the middle block that got more than their share of the attention in the last step.

    attended_BL  of the negative prompt, or of the prompt if that is the only one; float32, 1 for attended tokens
    """

    attended_BL: Tensor | None = None


def with_unet_attention(
    transformer: TransformerOptions, options: RunOptions, unet: nn.Module, clock: StepClock, attended: AttendedTokens
) -> TransformerOptions:
    """Return `transformer` with the self-attention that `options` need in `unet`. Replacements that it already has
    still run, inside."""
    table = transformer.patches_replace.get(ReplacePoint.ATTN1, {})
    for block in unet_blocks(unet):
        is_middle = _is_middle(block) and (options.pag is not None or options.sag is not None)
        if not _attends(block, unet) or not (is_middle or options.hypertile is not None):
            continue
        below = {key: patch for key, patch in table.items() if key[:2] == block.key} or {block.key: _attend}
        for key, patch in below.items():
            number = key[2] if len(key) == 3 else None
            function = _replacement(patch, options, clock, attended, is_middle)
            transformer = transformer.with_attn1_replace(function, *block.key, number)
    return transformer


def check_attention(options: RunOptions, unet: nn.Module) -> None:
    """Raise UnusableField for a UNet without the attention that one of `options` perturbs or reads."""
    for name in ("pag", "sag"):
        if getattr(options, name) is not None and not any(
            _is_middle(block) and _attends(block, unet) for block in unet_blocks(unet)
        ):
            raise unusable_field(f"options.{name}", "a UNet without attention in the middle", "one that has it")


def _is_middle(block: UnetBlockInfo) -> bool:
    return block.key[0] == "middle"


def _attends(block: UnetBlockInfo, unet: nn.Module) -> bool:
    """Whether `block` has self-attention."""
    return any(name == "attn1" for layer in block.layers for _, name, _ in attentions_of(unet.get_submodule(layer)))


def _replacement(
    below: Patch, options: RunOptions, clock: StepClock, attended: AttendedTokens, is_middle: bool
) -> Patch:
    def attend(q_BLD: Tensor, k_BLD: Tensor, v_BLD: Tensor, extra: Extra) -> Tensor:
        perturbed = extra.get(PERTURBED)
        if is_middle and perturbed == "pag":
            return v_BLD
        if is_middle and perturbed is None and options.sag is not None and _will_read(options, options.sag, clock):
            _remember(attended, q_BLD, k_BLD, extra)
        if options.hypertile is not None:
            return in_tiles(below, q_BLD, k_BLD, v_BLD, extra, options.hypertile)
        out_BLD: Tensor = below(q_BLD, k_BLD, v_BLD, extra)
        return out_BLD

    return attend


def _will_read(options: RunOptions, sag: SelfAttention, clock: StepClock) -> bool:
    """Whether SAG reads the attention of this step: in this step, or with DeepCache in one that does not compute it."""
    return clock.acts(sag) or (options.deepcache is not None and clock.now < sag.end * clock.schedule.steps)


def _attend(q_BLD: Tensor, k_BLD: Tensor, v_BLD: Tensor, extra: Extra) -> Tensor:
    q, k, v = (_heads(t, extra["n_heads"]) for t in (q_BLD, k_BLD, v_BLD))
    out_BHLE = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    return out_BHLE.transpose(1, 2).reshape(q_BLD.shape).to(q_BLD.dtype)


def _heads(x_BLD: Tensor, heads: int) -> Tensor:
    """Return [B, H, L, E]."""
    heads_BHLE: Tensor = x_BLD.unflatten(-1, (heads, -1)).transpose(1, 2)
    return heads_BHLE


def _remember(attended: AttendedTokens, q_BLD: Tensor, k_BLD: Tensor, extra: Extra) -> None:
    """Note the attended tokens, if this is the first transformer block of the middle and the call has the text that SAG
    reads. Source: Hong et al. 2023, equation 13: the attention that a token gets from all, averaged over the heads."""
    members = extra["members"]
    wanted = UNCOND if extra["has_negative"] else COND
    if extra["block_index"] != 0 or wanted not in members:
        return
    place = members.index(wanted)
    q_BHLE, k_BHLE = (_heads(t.chunk(len(members))[place].float(), extra["n_heads"]) for t in (q_BLD, k_BLD))
    scores_BHLL = torch.softmax(q_BHLE @ k_BHLE.transpose(-1, -2) * q_BHLE.shape[-1] ** -0.5, dim=-1)
    attended.attended_BL = (scores_BHLL.mean(1).sum(1) > 1.0).float()


def in_tiles(
    attend: Callable[..., Tensor], q_BLD: Tensor, k_BLD: Tensor, v_BLD: Tensor, extra: Extra, option: HyperTile
) -> Tensor:
    """Return `attend` within each tile of the image; over the whole image on levels below `option.depth`, and where a
    tile is as large as the image."""
    height, width = extra["original_shape"][-2:]
    level = _level(q_BLD.shape[1], height, width, option.depth)
    if level is None:
        return attend(q_BLD, k_BLD, v_BLD, extra)
    height, width = height >> level, width >> level
    least = option.tile // _CELL_PIXELS
    rows, columns = height // smallest_tile(height, least), width // smallest_tile(width, least)
    if rows * columns == 1:
        return attend(q_BLD, k_BLD, v_BLD, extra)
    sizes = rows, height // rows, columns, width // columns
    out = attend(*(_tiles(x_BLD, *sizes) for x_BLD in (q_BLD, k_BLD, v_BLD)), extra)
    joined = out.unflatten(0, (-1, rows, columns)).unflatten(3, (height // rows, width // columns)).transpose(2, 3)
    out_BLD: Tensor = joined.reshape(q_BLD.shape)
    return out_BLD


def smallest_tile(side: int, least: int) -> int:
    """Return the smallest divisor of `side` that is at least `least`, or `side`."""
    return next((size for size in range(min(least, side), side) if side % size == 0), side)


def _tiles(x_BLD: Tensor, rows: int, high: int, columns: int, wide: int) -> Tensor:
    """Return the tokens of each tile: [B * rows * columns, tokens of a tile, D]."""
    tiles_BLD: Tensor = x_BLD.unflatten(1, (rows, high, columns, wide)).transpose(2, 3)
    return tiles_BLD.reshape(-1, high * wide, x_BLD.shape[-1])


def _level(tokens: int, height: int, width: int, depth: int) -> int | None:
    """Return how often the latent was halved to have so many tokens; None if more than `depth` times, or not
    evenly."""
    for level in range(depth + 1):
        if height % (1 << level) == 0 and width % (1 << level) == 0 and (height >> level) * (width >> level) == tokens:
            return level
    return None


def map_of(attended_BL: Tensor, height: int, width: int) -> Tensor:
    """Return attended tokens as an image of the latent's size, [B, 1, height, width]."""
    rows, columns = height, width
    while rows * columns > attended_BL.shape[1]:
        rows, columns = math.ceil(rows / 2), math.ceil(columns / 2)
    assert rows * columns == attended_BL.shape[1], f"{attended_BL.shape[1]} tokens of {height} x {width} cells"
    map_B1HW = attended_BL.unflatten(1, (rows, columns))[:, None]
    return torch.nn.functional.interpolate(map_B1HW, (height, width))
