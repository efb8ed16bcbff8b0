"""Factors of attention and of blocks are what a program installs at the patcher, and what scaled weights compute."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from modelpool.pool.inference.extensions.run_extension import check_fits
from modelpool.pool.values.core.errors import UnusableField
from modelpool.pool.values.core.run_options import (
    AttentionScale,
    BlockScale,
    PerturbedAttention,
    RunOptions,
    SkipLayers,
)
from modelpool.pool.weights.options.model_options import ModelOptions
from tests.pool.inference.extensions.extended import extended
from tests.pool.weights.patcher.blocks.tiny import flux, run, sd3, unet_sd1

ATTENTION = AttentionScale(image=(("IN", 0.5), ("MID", 0.0)), text=(("OUT03", 2.0),))


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def test_factors_of_attention_are_those_of_the_weights_after_it() -> None:
    """By the names of blocks in diffusers: IN are the down blocks, and the fourth output block the last of the second
    up block."""
    module, inputs = unet_sd1()
    scaled: Any = copy.deepcopy(module)
    for name, child in scaled.named_modules():
        place = name.split(".")[0]
        factor = {"down_blocks": 0.5, "mid_block": 0.0}.get(place, 1.0) if name.endswith("attn1.to_out.0") else 1.0
        if name.startswith("up_blocks.1.attentions.1.") and name.endswith("attn2.to_out.0"):
            factor = 2.0
        if factor != 1.0:
            child.weight.mul_(factor)
            child.bias.mul_(factor)
    with extended(module, RunOptions(attention_scale=ATTENTION)):
        found = run(module, inputs)
    torch.testing.assert_close(found, run(scaled, inputs))
    assert not torch.equal(found, run(module, inputs))


def test_factors_act_in_their_part_of_the_steps() -> None:
    for (module, inputs), options in (
        (unet_sd1(), RunOptions(attention_scale=replace(ATTENTION, start=0.3, end=0.6))),
        (flux(), RunOptions(block_scale=BlockScale((("D", 0.0),), start=0.3, end=0.6))),
    ):
        plain, changed = run(module, inputs), []
        with extended(module, options, steps=10) as made:
            for step in range(10):
                made.step(step)
                changed.append(not torch.equal(run(module, inputs), plain))
        assert changed == [3 <= step < 6 for step in range(10)]


@pytest.mark.parametrize("build", [flux, sd3])
def test_factors_of_blocks_are_replacements_that_a_program_installs(build: Any) -> None:
    module, inputs = build()

    def halved(args: dict[str, Any], more: Any) -> dict[str, Any]:
        out = more["original_block"](args)
        return {**out, **{k: args[k] + (out[k] - args[k]) * 0.5 for k in ("img", "txt") if out.get(k) is not None}}

    options = RunOptions(block_scale=BlockScale((("D01", 0.5),)))
    by_hand = ModelOptions().with_transformer(lambda t: t.with_block_replace(halved, "double_block", 1))
    with extended(module, options):
        found = run(module, inputs)
    with extended(module, RunOptions(), base=by_hand):
        assert torch.equal(found, run(module, inputs))
    assert not torch.equal(found, run(module, inputs))
    aliased = RunOptions(block_scale=BlockScale((("B01", 0.5),)))
    with extended(module, aliased):
        assert torch.equal(found, run(module, inputs))


def test_a_factor_of_0_skips_a_block_and_others_still_run_inside() -> None:
    module, inputs = flux()
    skips = ModelOptions().with_transformer(
        lambda t: t.with_block_replace(lambda args, _: args, "double_block", 0).with_block_replace(
            lambda args, _: {"img": args["img"]}, "single_block", 1
        )
    )
    with extended(module, RunOptions(), base=skips):
        expected = run(module, inputs)
    with extended(module, RunOptions(block_scale=BlockScale((("D00", 0.0), ("S01", 0.0))))):
        torch.testing.assert_close(run(module, inputs), expected)
    # a program's replacement of the same block, and the blocks that guidance skips
    with extended(module, RunOptions(block_scale=BlockScale((("D", 1.0), ("D00", 0.5), ("S", 0.0)))), base=skips):
        found = run(module, inputs)
    everything = RunOptions(block_scale=BlockScale((("D00", 0.5), ("S", 0.0))), slg=SkipLayers(layers=(1,)))
    with extended(module, everything, base=skips):
        assert torch.equal(run(module, inputs), found)


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (unet_sd1, RunOptions(attention_scale=AttentionScale(image=(("IN00", 0.5),))), r"attention_scale\.image: found "
         r"'IN00', expected a block with attention: IN, IN01, MID, OUT, OUT02, OUT03"),
        (unet_sd1, RunOptions(attention_scale=AttentionScale(text=(("D01", 0.5),))), r"scale\.text: found 'D01'"),
        (sd3, RunOptions(block_scale=BlockScale((("S", 0.5),))), r"block_scale\.blocks: found 'S', expected a block of "
         r"SD3Transformer2DModel: D, D00, D01, D02"),
        (flux, RunOptions(block_scale=BlockScale((("D02", 0.5),))), r"block_scale\.blocks: found 'D02'"),
    ],
)  # fmt: skip
def test_blocks_that_a_model_lacks_are_refused(build: Any, options: RunOptions, message: str) -> None:
    module, _ = build()
    with pytest.raises(UnusableField, match=message):
        check_fits(options, module, "")


def test_attention_without_a_factor_is_unchanged_to_the_bit() -> None:
    module, inputs = unet_sd1()
    with extended(module, RunOptions(attention_scale=AttentionScale(text=(("OUT03", 1.0),)))):
        found = run(module, inputs)
    assert np.array_equal(found.numpy(), run(module, inputs).numpy())
    together = RunOptions(attention_scale=ATTENTION, pag=PerturbedAttention())
    with extended(module, together):
        assert not torch.equal(run(module, inputs), found)
