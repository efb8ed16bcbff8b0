"""Rotary positions and blocks of transformers that a request scales are those that a program changes at the
patcher."""

from __future__ import annotations

import dataclasses
import inspect
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest

from modelpool.pool.families.definitions import defined_families
from modelpool.pool.families.option_support import families_with
from modelpool.pool.families.transformer_families import TRANSFORMERS
from modelpool.pool.inference.extensions.run_extension import check_fits
from modelpool.pool.values.core.errors import UnusableField
from modelpool.pool.values.core.run_options import RotaryPositions, RunOptions
from modelpool.pool.weights.options.transformer_options import RopeOptions
from tests.pool.families.by_hand import sampled_by_hand
from tests.pool.families.tiny_shown import TinyFamilyModel
from tests.pool.families.tiny_transformers import FAMILIES

ROPE = {"scale_x": 0.5, "shift_x": 1.0, "scale_y": 2.0, "shift_y": -3.0, "shift_t": 4.0}
VIDEO = ("Wan", "WanVACE", "HunyuanVideo", "HunyuanVideo15")
SIZE: dict[str, Any] = {"width": 64, "height": 96, "steps": 2}


def halved(args: dict[str, Any], more: Any) -> dict[str, Any]:
    """A block whose change of image and text is halved."""
    out = more["original_block"](args)
    return {**out, **{name: args[name] + (out[name] - args[name]) * 0.5 for name in ("img", "txt") if name in out}}


@pytest.mark.parametrize("family", ["flux_dev", "flux2_klein", "wan_t2v", "hunyuan_video"])
def test_options_of_a_request_are_those_of_the_patcher(family: str, tmp_path: Path) -> None:
    tiny = TinyFamilyModel(tmp_path, FAMILIES[family])
    try:
        fields = {**SIZE, **({"frames": 5} if tiny.family.sampling.video is not None else {})}
        plain, rope = tiny.made(**fields), RopeOptions(**ROPE)
        for options, change in (
            ({"rope": ROPE}, lambda t: t.with_rope_options(rope)),
            ({"block_scale.blocks": "D00*0.5"}, lambda t: t.with_block_replace(halved, "double_block", 0)),
        ):
            made = tiny.made(options=options, **fields)
            expected = sampled_by_hand(tiny, made, lambda o, change=change: o.with_transformer(change))
            assert np.array_equal(made.latents[0][0].numpy(), expected)
            assert not np.array_equal(plain.latents[0][0].numpy(), expected)
    finally:
        tiny.close()


def test_the_option_has_the_settings_of_the_patcher_and_its_models_take_positions() -> None:
    assert dataclasses.asdict(RotaryPositions()) == dataclasses.asdict(RopeOptions())
    moved = {family.module for family in defined_families() if family.options.moves_positions}
    for name in moved - {f"{video}Transformer3DModel" for video in VIDEO}:
        assert "img_ids" in inspect.signature(getattr(diffusers, name).forward).parameters


def test_a_coordinate_that_a_model_does_not_read_is_refused() -> None:
    """The heads of Bria have no first coordinate."""
    for axes, option, refused in (
        ((0, 8, 8), RotaryPositions(shift_t=4.0), True),
        ((0, 8, 8), RotaryPositions(scale_x=2.0), False),
        ((4, 4, 8), RotaryPositions(shift_t=4.0), False),
    ):
        module = diffusers.FluxTransformer2DModel(
            in_channels=4, num_layers=1, num_single_layers=0, num_attention_heads=2, attention_head_dim=16,
            joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=axes,
        )  # fmt: skip
        expected = pytest.raises(UnusableField, match=r"options\.rope\.shift_t: found 4.0, expected only x and y")
        with expected if refused else nullcontext():
            check_fits(RunOptions(rope=option), module, "flux_dev")


def test_models_that_are_isolated_can_be_called_so() -> None:
    """Not all models of videos with sound can."""
    sounding = {name for name, family in TRANSFORMERS.items() if (v := family.sampling.video) and v.sound}
    modules = {family.name: family.module for family in defined_families() if family.name in sounding}
    takes = {
        name
        for name, module in modules.items()
        if "isolate_modalities" in inspect.signature(getattr(diffusers, module).forward).parameters
    }
    assert {"ltx2", "kandinsky6"} <= sounding
    assert set(families_with("isolation")) == takes == {"ltx2"}
