"""Options that scale what parts of a model add to its tokens: attention of a UNet, and blocks of a transformer.

Blocks have the names that factors of LoRAs have (`pool.models.lora_names.blocks`).
Shape legend: B batch, L tokens, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from modelpool.pool.inference.sampling.step_clock import StepClock
from modelpool.pool.models.lora_names.blocks import MID
from modelpool.pool.values.core.errors import unusable_field
from modelpool.pool.values.core.run_options import AttentionScale, BlockFactors, BlockScale, RunOptions
from modelpool.pool.weights.options.transformer_options import BlockKey, Extra, Patch, ReplacePoint, TransformerOptions
from modelpool.pool.weights.patcher.blocks.diffusers_names import attentions_of, block_lists, unet_blocks

_UNET_GROUPS = {"input": "IN", "output": "OUT"}
_GROUPS = {"double_block": "D", "single_block": "S"}
#: another name of the first group, for models with blocks of one kind
_ALIAS = "B"
_POINTS = {"image": "attn1", "text": "attn2"}


def with_block_factors(
    transformer: TransformerOptions, options: RunOptions, module: nn.Module, clock: StepClock
) -> TransformerOptions:
    """Return `transformer` with the factors of `options`, which fit `module`. Replacements that it already has still
    run, inside."""
    if (attention := options.attention_scale) is not None:
        names = {key: name for key, name, _ in _attended_blocks(module)}
        image, text = (_patch(attention, factors, names, clock) for factors in (attention.image, attention.text))
        transformer = transformer.with_attn1_output_patch(image) if attention.image else transformer
        transformer = transformer.with_attn2_output_patch(text) if attention.text else transformer
    if (blocks := options.block_scale) is not None:
        table = transformer.patches_replace.get(ReplacePoint.DIT, {})
        for key, name in _transformer_blocks(module):
            factor = _factor(_plain_names(blocks.blocks), name)
            if factor != 1.0:
                transformer = transformer.with_block_replace(_scaled(table.get(key), factor, blocks, clock), *key)
    return transformer


def check_block_factors(options: RunOptions, module: nn.Module) -> None:
    """Raise UnusableField for a block that `module`, or its attention, does not have."""
    if (attention := options.attention_scale) is not None:
        for setting, point in _POINTS.items():
            known = [name for _, name, points in _attended_blocks(module) if point in points]
            _check(f"options.attention_scale.{setting}", getattr(attention, setting), known, "a block with attention")
    if (blocks := options.block_scale) is not None:
        known = [name for _, name in _transformer_blocks(module)]
        _check("options.block_scale.blocks", _plain_names(blocks.blocks), known, f"a block of {type(module).__name__}")


def _check(field: str, factors: BlockFactors, known: list[str], what: str) -> None:
    names = {*known, *(_group(name) for name in known)}
    for name, _ in factors:
        if name not in names:
            raise unusable_field(field, name, f"{what}: {', '.join(sorted(names)) or 'none'}")


def _patch(option: AttentionScale, factors: BlockFactors, names: Mapping[BlockKey, str], clock: StepClock) -> Patch:
    by_block = {key: _factor(factors, name) for key, name in names.items()}

    def scale(out_BLD: Tensor, extra: Extra) -> Tensor:
        factor = by_block[extra["block"]]
        return out_BLD if factor == 1.0 or not clock.acts(option) else out_BLD * factor

    return scale


def _scaled(below: Patch | None, factor: float, option: BlockScale, clock: StepClock) -> Patch:
    """Return a block with its change of the tokens multiplied by `factor`."""

    def block(values: dict[str, Any], context: Mapping[str, Callable[..., Any]]) -> dict[str, Any]:
        out = context["original_block"](values) if below is None else {**values, **below(values, context)}
        if not clock.acts(option):
            return out
        scaled = {
            name: before_BLD + (out[name] - before_BLD) * factor
            for name in ("img", "txt")
            if isinstance(before_BLD := values.get(name), Tensor) and isinstance(out.get(name), Tensor)
        }
        return {**out, **scaled}

    return block


def _factor(factors: BlockFactors, name: str) -> float:
    """Return the factor of a block: its own, else the factor of all blocks of its kind, else 1."""
    found = dict(factors)
    return found.get(name, found.get(_group(name), 1.0))


def _group(name: str) -> str:
    return name.rstrip("0123456789")


def _plain_names(factors: BlockFactors) -> BlockFactors:
    """Return factors of a transformer's blocks with "D" for "B"."""
    return tuple((f"D{name[1:]}" if _group(name) == _ALIAS else name, factor) for name, factor in factors)


def _attended_blocks(unet: nn.Module) -> Iterator[tuple[BlockKey, str, frozenset[str]]]:
    """Yield the key, the name and the attentions of each block of a UNet that has some."""
    for block in unet_blocks(unet):
        points = frozenset(name for layer in block.layers for _, name, _ in attentions_of(unet.get_submodule(layer)))
        if points:
            kind, number = block.key
            yield block.key, MID if kind == "middle" else f"{_UNET_GROUPS[kind]}{number:02}", points


def _transformer_blocks(module: nn.Module) -> Iterator[tuple[tuple[str, int], str]]:
    """Yield the key and the name of each block of a transformer."""
    numbers = dict.fromkeys(_GROUPS, 0)
    for kind, blocks in block_lists(module):
        for _ in blocks:
            yield (kind, numbers[kind]), f"{_GROUPS[kind]}{numbers[kind]:02}"
            numbers[kind] += 1
