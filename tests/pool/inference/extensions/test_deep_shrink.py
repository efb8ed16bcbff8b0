"""Deep shrink equals the layers of a UNet, called one by one with smaller features behind one block."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.models.upsampling import Upsample2D
from torch import Tensor, nn
from torch.nn import functional

from modelpool.pool.inference.extensions.deep_shrink import ShrunkFeatures
from modelpool.pool.inference.sampling.partial_run import PartialRun
from modelpool.pool.inference.sampling.schedules import sd1_sigma_table
from modelpool.pool.inference.sampling.step_clock import StepClock
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.core.run_options import DeepShrink, RunOptions
from modelpool.pool.values.core.stage_params import SamplingSchedule
from modelpool.pool.weights.patcher.blocks.diffusers_names import unet_blocks
from tests.pool.inference.extensions.extended import extended, latents
from tests.pool.zoo import build
from tests.pool.zoo.case import Case

TEXT, X = latents(2, 7, 32, seed=1), latents(2, 4, 16, 20, seed=3)
TIME = torch.tensor([500.0, 500.0])


@pytest.fixture(scope="module")
def unet() -> Case:
    return build("unet")


def one_by_one(module: nn.Module, option: DeepShrink) -> Tensor:
    """The prediction by the layers of the original implementation: a list of skip connections, sizes as they come."""
    plain: Any = module
    emb = plain.time_embedding(plain.time_proj(TIME).to(X.dtype))

    def sized(h: Tensor, size: Any, method: str) -> Tensor:
        return h if tuple(h.shape[-2:]) == tuple(size) else functional.interpolate(h, size=tuple(size), mode=method)

    def shrunk(h: Tensor) -> Tensor:
        return sized(h, [round(side / option.factor) for side in h.shape[-2:]], option.down)

    def block(h: Tensor, names: tuple[str, ...], skips: list[Tensor]) -> Tensor:
        for name in names:
            layer: Any = plain.get_submodule(name)
            if "resnets" in name:
                h = layer(h, emb)
            elif "attentions" in name:
                h = layer(h, encoder_hidden_states=TEXT, return_dict=False)[0]
            elif isinstance(layer, Upsample2D):
                h = layer(h, skips[-1].shape[-2:])
            else:
                h = layer(h)
        return h

    h, skips = X, list[Tensor]()
    for each in unet_blocks(module):
        kind, number = each.key
        if kind == "output":
            h = torch.cat([sized(h, skips[-1].shape[-2:], option.up), skips.pop()], dim=1)
        h = block(h, each.layers, skips)
        if kind == "input":
            here = number == option.block
            h = shrunk(h) if here and not option.after_skip else h
            skips.append(h)
            h = shrunk(h) if here and option.after_skip else h
    found: Tensor = plain.conv_out(plain.conv_act(plain.conv_norm_out(h)))
    return found


def predicted(module: Any) -> Tensor:
    found: Tensor = module(X, TIME, TEXT).sample
    return found


def test_the_reference_is_the_unet(unet: Case) -> None:
    with torch.no_grad():
        expected = predicted(unet.module)
        torch.testing.assert_close(one_by_one(unet.module, DeepShrink(1, 1.0)), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "option",
    [
        DeepShrink(block, factor, after, down, up)
        for block, factor, after, down, up in (
            (1, 2.0, 1, "bicubic", "bicubic"),
            (1, 1.5, 0, "area", "nearest-exact"),
            (2, 2.0, 1, "bilinear", "bicubic"),
            (2, 3.0, 0, "bicubic", "bilinear"),
            (3, 1.7, 1, "nearest-exact", "area"),
        )
    ],
    ids=str,
)
def test_features_are_smaller_behind_one_block(unet: Case, option: DeepShrink) -> None:
    plain = predicted(unet.module).detach()
    expected = one_by_one(unet.module, option).detach()
    with extended(unet.module, RunOptions(deep_shrink=option)) as run:
        torch.testing.assert_close(predicted(run.module), expected, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(expected, plain, rtol=1e-2, atol=1e-3)
        run.step(3)  # the last of the first 35% of 10 steps
        torch.testing.assert_close(predicted(run.module), expected, rtol=1e-4, atol=1e-5)
        run.step(4)
        torch.testing.assert_close(predicted(run.module), plain, rtol=0, atol=0)
    torch.testing.assert_close(predicted(unet.module), plain, rtol=0, atol=0)


def test_shares_of_noise_are_of_the_levels_of_training() -> None:
    table, option = sd1_sigma_table(), DeepShrink(shares_of="noise", start=0.2, end=0.5)
    clock = StepClock(SamplingSchedule(10, "euler", "normal"), PartialRun())
    features = ShrunkFeatures(option, clock, table)
    within = [table.sigma_at_percent(share) for share in (0.2, 0.35, 0.5)]
    outside = [table.sigma_at_percent(share) for share in (0.01, 0.19, 0.51, 0.99)]
    assert all(map(features.acts, within))
    assert not any(map(features.acts, outside))


def test_a_block_that_the_model_lacks_is_refused(unet: Case) -> None:
    with (
        pytest.raises(UserError, match=r"options\.deep_shrink\.block: found 30, expected 1 to"),
        extended(unet.module, RunOptions(deep_shrink=DeepShrink(30))),
    ):
        pass
