"""Options that skip blocks of a transformer: skip layer guidance, First Block Cache and TeaCache. One function replaces
each block.

A cache has a state for each group of texts that the model reads together, in one run. Sources: First Block Cache of
ParaAttention, as in diffusers; Liu et al. 2024 ("TeaCache"), equations 5 to 7, with the coefficients that its authors
published for a family (`pool.families.teacache_facts`). Shape legend: B batch, L tokens, D model width.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from modelpool.pool.families.parts.teacache import TeaCacheFacts
from modelpool.pool.families.teacache_facts import TEACACHE_FACTS, teacache_facts
from modelpool.pool.inference.extensions.unet_attention import PERTURBED
from modelpool.pool.inference.sampling.step_clock import StepClock
from modelpool.pool.values.core.errors import unusable_field
from modelpool.pool.values.core.run_options import FirstBlockCache, RunOptions, SkipLayers, TeaCache
from modelpool.pool.weights.options.transformer_options import BlockKey, Patch, ReplacePoint, TransformerOptions
from modelpool.pool.weights.patcher.blocks.diffusers_names import block_lists, modulated_input

Values = dict[str, Any]
#: fact of a call in a gang of which the members divide the tokens: returns the sum of a tensor over them
ACROSS = "across_members"
#: pixels along a side of a cell of the latents of models with coefficients for some sizes
_CELL_PIXELS = 8


@dataclass(slots=True, eq=False)
class CacheState:
    """What a cache remembers of one group of texts.

    reference    the tensor, of an earlier step, from which change is measured
    skipped      what the skipped blocks added to the tokens of the image, when they last ran
    before       the tokens of the image before these blocks, in the current call
    after        the same after them, if they are skipped in the current call
    accumulated  change since they last ran
    skips        they are skipped in the current call
    """

    reference: Tensor | None = None
    skipped: Tensor | None = None
    before: Tensor | None = None
    after: Tensor | None = None
    accumulated: float = 0.0
    skips: bool = False


@dataclass(slots=True, eq=False)
class BlockCache(ABC):
    """Decides in the first block of a call whether the others are skipped."""

    clock: StepClock
    states: dict[object, CacheState] = field(default_factory=dict)

    def state(self, values: Values) -> CacheState:
        """Return the state of the texts of this call."""
        extra = values["transformer_options"]
        key = (extra.get("members"), extra.get(PERTURBED))
        return self.states.setdefault(key, CacheState())

    def first(self, values: Values, run: Callable[[Values], Values]) -> Values:
        """Return the result of the first block, or of all if they are skipped."""
        state = self.state(values)
        out, may_skip = self.measured(values, run, state)
        state.skips = may_skip and state.skipped is not None
        if state.skips:
            assert state.skipped is not None, "nothing was skipped"
            result = _with_image(values if out is None else {**values, **out}, state.skipped)
            state.after = _image(result)
            return result
        state.accumulated = 0.0
        state.before = _image(values) if out is None else _image(out)
        return run(values) if out is None else out

    def last(self, out: Values, values: Values) -> None:
        """Remember what the blocks added, from the result of the last one."""
        state = self.state(values)
        assert state.before is not None, "the first block has not run"
        state.skipped, state.before = _image(out, len_of=state.before) - state.before, None

    def last_skipped(self, values: Values) -> Values:
        """Return `values` as they leave the last block of a call that skips: without what a ControlNet has added after
        earlier blocks, since what the skipped blocks added includes it."""
        state = self.state(values)
        assert state.after is not None, "the first block has not run"
        tokens_BLD, image_BLD, state.after = values["img"], state.after, None
        text = tokens_BLD.shape[1] - image_BLD.shape[1]
        return {**values, "img": torch.cat([tokens_BLD[:, :text], image_BLD], dim=1) if text else image_BLD}

    @abstractmethod
    def measured(
        self, values: Values, run: Callable[[Values], Values], state: CacheState
    ) -> tuple[Values | None, bool]:
        """Return the result of the first block if it had to run, and whether the change is small enough to skip."""


@dataclass(slots=True, eq=False, kw_only=True)
class FirstBlocks(BlockCache):
    """First Block Cache: compares what the first block adds with what it added when all blocks last ran."""

    option: FirstBlockCache

    def measured(
        self, values: Values, run: Callable[[Values], Values], state: CacheState
    ) -> tuple[Values | None, bool]:
        """The first block runs in every step."""
        before = _image(values)
        out = run(values)
        added, reference = _image(out) - before, state.reference
        acts = reference is not None and self.clock.acts(self.option)
        if acts and reference is not None and _relative_change(added, reference, values) <= self.option.threshold:
            return out, True
        state.reference = added
        return out, False


@dataclass(slots=True, eq=False, kw_only=True)
class ModulatedInputs(BlockCache):
    """TeaCache: accumulates the change of the modulated input of the first block, or of what modulates it, from step
    to step. `published` has at least one element, by rising pixels."""

    option: TeaCache
    block: nn.Module
    published: Sequence[TeaCacheFacts]

    def measured(
        self, values: Values, run: Callable[[Values], Values], state: CacheState
    ) -> tuple[Values | None, bool]:
        """No block runs in a step that is skipped."""
        facts = self._facts(values)
        found = values["vec"] if facts.of_vector else modulated_input(self.block, _image(values), values["vec"])
        before, state.reference = state.reference, found
        clock = self.clock
        begins = clock.now < clock.first + facts.first_steps
        if before is None or begins or clock.now == clock.last or not clock.acts(self.option):
            return None, False
        state.accumulated += polynomial(facts.coefficients, _relative_change(found, before, values))
        return None, state.accumulated < (self.option.threshold or facts.threshold)

    def _facts(self, values: Values) -> TeaCacheFacts:
        """Return the facts of the first size that the frames of this call do not exceed."""
        pixels = math.prod(values["transformer_options"]["original_shape"][-2:]) * _CELL_PIXELS**2
        return next(facts for facts in self.published if pixels <= facts.most_pixels)


def polynomial(coefficients: Sequence[float], value: float) -> float:
    """Return the polynomial with these coefficients, highest power first, at `value`."""
    total = 0.0
    for coefficient in coefficients:
        total = total * value + coefficient
    return total


def with_block_runs(
    transformer: TransformerOptions, options: RunOptions, module: nn.Module, row: str, clock: StepClock
) -> TransformerOptions:
    """Return `transformer` with the blocks of `module`, a model of the row `row`, as `options` say. Replacements that
    it already has still run, inside."""
    blocks = [((kind, number), block) for kind, found in block_lists(module) for number, block in enumerate(found)]
    cache: BlockCache | None = None
    if options.fbcache is not None:
        cache = FirstBlocks(clock, option=options.fbcache)
    elif options.teacache is not None:
        published = teacache_facts(row, len(blocks))
        cache = ModulatedInputs(clock, option=options.teacache, block=blocks[0][1], published=published)
    table = transformer.patches_replace.get(ReplacePoint.DIT, {})
    for key, _ in blocks:
        is_skipped = options.slg is not None and key[1] in _skipped(options.slg, key[0])
        if is_skipped or cache is not None:
            places = key == blocks[0][0], key == blocks[-1][0]
            function = _replacement(table.get(key), is_skipped, cache, *places)
            transformer = transformer.with_block_replace(function, *key)
    return transformer


def unknown_blocks(option: SkipLayers, module: nn.Module) -> tuple[BlockKey, ...]:
    """Return the blocks that `option` names and `module` lacks."""
    known = {(kind, number) for kind, found in block_lists(module) for number in range(len(found))}
    named = [(kind, number) for kind in ("double_block", "single_block") for number in _skipped(option, kind)]
    return tuple(key for key in named if key not in known)


def check_published(module: nn.Module, row: str) -> None:
    """Raise UnusableField if no coefficients of TeaCache were published for `module`, a model of the row `row`."""
    blocks = sum(len(found) for _, found in block_lists(module))
    if not teacache_facts(row, blocks):
        sizes = ", ".join(str(facts.blocks) for facts in TEACACHE_FACTS.get(row, ()))
        found = f"{type(module).__name__} of the family {row} with {blocks} blocks"
        expected = "one for which coefficients of TeaCache were published"
        raise unusable_field("options.teacache", found, f"{expected}: {sizes} blocks" if sizes else expected)


def _skipped(option: SkipLayers, kind: str) -> tuple[int, ...]:
    return option.layers if kind == "double_block" else option.single


def _replacement(
    below: Patch | None, is_skipped: bool, cache: BlockCache | None, is_first: bool, is_last: bool
) -> Patch:
    def block(values: Values, context: Mapping[str, Callable[[Values], Values]]) -> Values:
        original = context["original_block"]

        def run(at: Values) -> Values:
            if is_skipped and at["transformer_options"].get(PERTURBED) == "slg":
                return at
            return original(at) if below is None else {**at, **below(at, context)}

        if cache is None:
            return run(values)
        if is_first:
            out = cache.first(values, run)
        elif cache.state(values).skips:
            return cache.last_skipped(values) if is_last else values
        else:
            out = run(values)
        if is_last and not cache.state(values).skips:
            cache.last({**values, **out}, values)
        return out

    return block


def _image(values: Values, len_of: Tensor | None = None) -> Tensor:
    """Return the tokens of the image; the last ones if text tokens are before them, of the length of `len_of`."""
    tokens_BLD: Tensor = values["img"]
    if "text_tokens" in values:
        return tokens_BLD[:, values["text_tokens"] :]
    return tokens_BLD if len_of is None else tokens_BLD[:, tokens_BLD.shape[1] - len_of.shape[1] :]


def _with_image(values: Values, added_BLD: Tensor) -> Values:
    """Return `values` with `added_BLD` added to the tokens of the image."""
    tokens_BLD = _image(values) + added_BLD
    if "text_tokens" in values:
        tokens_BLD = torch.cat([values["img"][:, : values["text_tokens"]], tokens_BLD], dim=1)
    return {**values, "img": tokens_BLD}


def _relative_change(tokens: Tensor, reference: Tensor, values: Values) -> float:
    """Return the mean absolute difference as a share of the mean of `reference`; of the tokens of all members of a
    gang, so that all of them skip the same blocks."""
    across = values["transformer_options"].get(ACROSS)
    if across is None:
        return float((tokens - reference).abs().mean() / reference.abs().mean())
    difference, whole = across(
        torch.stack([each.to(torch.float32).abs().sum() for each in (tokens - reference, reference)])
    ).tolist()
    return float(difference / whole)
