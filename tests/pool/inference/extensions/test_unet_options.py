"""Options that change a UNet or guide away from its perturbed predictions agree with diffusers, or with their papers'
formulas where diffusers has none."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import PAGIdentitySelfAttnProcessor2_0
from diffusers.pipelines.deprecated.stable_diffusion_sag.pipeline_stable_diffusion_sag import (
    CrossAttnStoreProcessor,
    gaussian_blur_2d,
)
from torch import Tensor, nn

from modelpool.pool.inference.extensions.freeu import scaled_features
from modelpool.pool.inference.extensions.tiled_diffusion import tile_spans, tiled_model
from modelpool.pool.inference.extensions.unet_attention import in_tiles, smallest_tile
from modelpool.pool.inference.sampling.schedules import sd1_sigma_table
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.core.run_options import (
    DeepCache,
    FreeU,
    HyperTile,
    PerturbedAttention,
    RunOptions,
    SelfAttention,
    TiledDiffusion,
)
from tests.pool.inference.extensions.extended import Extended, counted, extended, latents
from tests.pool.inference.sampling.one_image import guided
from tests.pool.zoo import build
from tests.pool.zoo.case import Case

TABLE = sd1_sigma_table()
SIGMA, CFG = 3.0, 4.0
COND, UNCOND = latents(2, 7, 32, seed=1), latents(2, 7, 32, seed=2)
X = latents(2, 4, 8, 8, seed=3) * 4


@pytest.fixture(scope="module")
def unet() -> Case:
    return build("unet")


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def noise(module: nn.Module, x: Tensor, text: Tensor) -> Tensor:
    """The UNet's prediction for a noisy latent at `SIGMA`."""
    plain: Any = module
    timestep = torch.full((len(x),), TABLE.time_input(SIGMA))
    predicted: Tensor = plain(x / math.sqrt(SIGMA**2 + 1), timestep, text).sample
    return predicted


def denoised(run: Extended, x: Tensor = X, cfg: float = CFG, max_batch: int = 0) -> Tensor:
    def predict(x: Tensor, t: Tensor, context: Tensor) -> Tensor:
        plain: Any = run.module
        predicted: Tensor = plain(x, t, context).sample
        return predicted

    options = run.extension.model_options
    uncond = None if cfg == 1 else UNCOND[: len(x)]
    return guided(predict, TABLE, COND[: len(x)], uncond, cfg, options, max_batch=max_batch)(x, SIGMA)


def test_freeu_by_blocks_is_that_of_diffusers(unet: Case) -> None:
    plain: Any = unet.module
    option = FreeU(b1=1.3, b2=1.4, s1=0.9, s2=0.2, version=1, levels="blocks")
    with extended(unet.module, RunOptions(freeu=option)):
        (found,) = unet.run()
    plain.enable_freeu(s1=0.9, s2=0.2, b1=1.3, b2=1.4)
    (expected,) = unet.run()
    plain.disable_freeu()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    (unchanged,) = unet.run()
    assert (found - unchanged).abs().max() > 1e-3, "FreeU had no effect"


def test_freeu_2_scales_half_of_the_channels_by_their_normalized_mean() -> None:
    h = latents(2, 6, 3, 5)
    mean = h.mean(1, keepdim=True)
    for image in range(2):
        low, high = mean[image].min(), mean[image].max()
        expected = h[image, :3] * ((1.5 - 1) * (mean[image] - low) / (high - low) + 1)
        found = scaled_features(h, 1.5, 2)[image]
        torch.testing.assert_close(found[:3], expected)
        assert torch.equal(found[3:], h[image, 3:])


def test_freeu_by_channels_acts_on_levels_with_twice_the_first_width(unet: Case) -> None:
    """This UNet has 32 and 64 channels: the level with 2 x 32 is the second of the option."""
    (plain,) = unet.run()
    with extended(unet.module, RunOptions(freeu=FreeU(b1=9.0, s1=0.1, b2=1.0, s2=1.0))):
        torch.testing.assert_close(unet.run()[0], plain, atol=1e-5, rtol=0)
    with extended(unet.module, RunOptions(freeu=FreeU(b1=1.0, s1=1.0, b2=1.4, s2=0.2))):
        assert (unet.run()[0] - plain).abs().max() > 1e-3


@pytest.mark.parametrize("max_batch", [0, 1])
def test_pag_guides_away_from_the_identity_attention_of_diffusers(unet: Case, max_batch: int) -> None:
    plain: Any = unet.module
    cond, uncond = noise(plain, X, COND), noise(plain, X, UNCOND)
    attention = plain.mid_block.attentions[0].transformer_blocks[0].attn1
    processor = attention.processor
    attention.processor = PAGIdentitySelfAttnProcessor2_0()
    # it takes predictions and perturbed ones in one batch
    perturbed = noise(plain, torch.cat([X, X]), torch.cat([COND, COND]))[2:]
    attention.processor = processor
    expected = X - SIGMA * (uncond + CFG * (cond - uncond) + 3.0 * (cond - perturbed))
    with extended(plain, RunOptions(pag=PerturbedAttention(scale=3.0, end=0.5))) as run:
        torch.testing.assert_close(denoised(run, max_batch=max_batch), expected, atol=1e-5 * SIGMA, rtol=1e-5)
        run.step(5)
        without = X - SIGMA * (uncond + CFG * (cond - uncond))
        torch.testing.assert_close(denoised(run, max_batch=max_batch), without, atol=1e-5 * SIGMA, rtol=1e-5)


@pytest.mark.parametrize("cfg", [1.0, CFG])
def test_sag_guides_away_from_what_diffusers_blurs(unet: Case, cfg: float) -> None:
    plain: Any = unet.module
    attention = plain.mid_block.attentions[0].transformer_blocks[0].attn1
    processor, store = attention.processor, CrossAttnStoreProcessor()
    text = COND if cfg == 1 else UNCOND
    attention.processor = store
    base, cond = noise(plain, X, text), noise(plain, X, COND)
    base = noise(plain, X, text)
    attention.processor = processor
    clean = X - SIGMA * base
    side = plain.mid_block.attentions[0].transformer_blocks[0].attn1.heads
    scores = store.attention_probs.reshape(2, side, *store.attention_probs.shape[1:])
    mask = (scores.mean(1).sum(1) > 1.0).float().reshape(2, 1, 4, 4).repeat_interleave(2, 2).repeat_interleave(2, 3)
    assert 0 < mask.mean() < 1
    degraded = gaussian_blur_2d(clean, kernel_size=9, sigma=1.0) * mask + clean * (1 - mask)
    predicted = noise(plain, degraded + SIGMA * base, text)
    expected = X - SIGMA * (base + cfg * (cond - base) + 0.75 * (base - predicted))
    with extended(plain, RunOptions(sag=SelfAttention(scale=0.75, blur=1.0))) as run:
        torch.testing.assert_close(denoised(run, cfg=cfg), expected, atol=1e-5 * SIGMA, rtol=1e-5)


def test_attention_in_tiles_is_attention_of_each_tile() -> None:
    q, k, v = (latents(2, 8 * 12, 6, seed=seed) for seed in range(3))
    extra = {"original_shape": (2, 4, 16, 24)}

    def attend(q: Tensor, k: Tensor, v: Tensor, extra: object) -> Tensor:
        return torch.softmax(q @ k.transpose(1, 2), -1) @ v

    found = in_tiles(attend, q, k, v, extra, HyperTile(tile=32, depth=1)).unflatten(1, (8, 12))
    images = [x.unflatten(1, (8, 12)) for x in (q, k, v)]
    for row, column in ((0, 0), (4, 0), (4, 8)):
        parts = [x[:, row : row + 4, column : column + 4].flatten(1, 2) for x in images]
        expected = attend(parts[0], parts[1], parts[2], None).unflatten(1, (4, 4))
        torch.testing.assert_close(found[:, row : row + 4, column : column + 4], expected)
    whole = attend(q, k, v, None).unflatten(1, (8, 12))
    assert torch.equal(in_tiles(attend, q, k, v, extra, HyperTile(tile=32)).unflatten(1, (8, 12)), whole)
    assert [smallest_tile(side, least) for side, least in ((48, 32), (64, 32), (65, 32), (20, 32))] == [48, 32, 65, 20]


def test_hypertile_with_a_tile_of_the_image_changes_nothing_and_a_smaller_one_does(unet: Case) -> None:
    (plain,) = unet.run()
    for tile, is_same in ((64, True), (32, False)):
        with extended(unet.module, RunOptions(hypertile=HyperTile(tile=tile))):
            (found,) = unet.run()
        assert torch.allclose(found, plain, atol=1e-5) == is_same


def test_tiled_diffusion_averages_the_predictions_of_tiles(unet: Case) -> None:
    x = latents(1, 4, 8, 14) * 4
    with extended(unet.module, RunOptions(tiled=TiledDiffusion(tile=64, overlap=32))) as run:
        found = denoised(run, x)
    assert tile_spans(14, 8, 4) == [slice(0, 8), slice(4, 12), slice(6, 14)]
    total, count = torch.zeros_like(x), torch.zeros_like(x)
    for start in (0, 4, 6):
        part = x[..., start : start + 8]
        cond, uncond = (noise(unet.module, part, text[:1]) for text in (COND, UNCOND))
        total[..., start : start + 8] += part - SIGMA * (uncond + CFG * (cond - uncond))
        count[..., start : start + 8] += 1
    torch.testing.assert_close(found, total / count, atol=1e-4, rtol=1e-5)


def test_gaussian_tiles_count_most_in_their_middle() -> None:
    def place(x: Tensor, *_: object) -> Tensor:
        return torch.full_like(x, float(x.flatten()[0]))

    x = torch.zeros(1, 1, 4, 6)
    x[..., 0, 2] = 1.0  # the first cell of the second tile
    out = tiled_model(TiledDiffusion(tile=64 // 2, overlap=16, weights="gaussian"))(place, x, X, X)
    near, far = (math.exp(-((distance / 4) ** 2) / 0.02) for distance in (0.5, 1.5))
    assert out[0, 0, 0].tolist() == pytest.approx([0, 0, far / (far + near), near / (far + near), 1, 1], abs=1e-6)


def deep(unet: Case) -> dict[str, nn.Module]:
    plain: Any = unet.module
    return {"deep": plain.down_blocks[1].resnets[0], "middle": plain.mid_block.resnets[0], "all": plain.conv_in}


@pytest.mark.parametrize("layers", [0, 1])
def test_deepcache_repeats_the_deep_layers_between_computed_steps(layers: int) -> None:
    """With unchanged inputs the repeated features are the right ones; with other inputs, those of the step before."""
    unet = build("unet")
    (plain,) = unet.run()
    calls = counted(deep(unet))
    option = DeepCache(interval=3, layers=layers, start=0.2)
    with extended(unet.module, RunOptions(deepcache=option)) as run:
        computed = []
        for step in range(8):
            run.step(step)
            before = calls["deep"], calls["middle"]
            torch.testing.assert_close(unet.run()[0], plain, atol=1e-6, rtol=0)
            computed.append((calls["deep"], calls["middle"]) != before)
        # steps 0 and 1 are before the start; every third is computed
        assert computed == [True, True, False, True, False, False, True, False]
        assert calls == {"deep": 4, "middle": 4, "all": 8}
        other = {**unet.inputs, "sample": unet.inputs["sample"] + 1}
        changed = unet.module(**other).sample
    exact = unet.module(**other).sample
    assert 1e-4 < (changed - exact).abs().max() < (plain - exact).abs().max()
    torch.testing.assert_close(unet.run()[0], plain, atol=0, rtol=0)


def test_deepcache_keeps_the_features_of_each_text(unet: Case) -> None:
    with extended(unet.module, RunOptions(deepcache=DeepCache(interval=2), pag=PerturbedAttention())) as run:
        for max_batch in (0, 1):
            run.step(0)
            first = denoised(run, max_batch=max_batch)
            run.step(1)
            torch.testing.assert_close(denoised(run, max_batch=max_batch), first, atol=1e-4, rtol=0)
        assert run.extension.deep_layers is not None
        assert len(run.extension.deep_layers.features) == 2 + 3 - 1, "prompt, negative, both, and the perturbed prompt"


@pytest.mark.parametrize("name", ["unet", "unet_sdxl"])
def test_deepcache_runs_with_the_features_of_a_t2i_adapter(name: str) -> None:
    unet = build(name)

    def run() -> Tensor:
        features = [latents(2, 32, 8 if name == "unet" else 4, 8 if name == "unet" else 4), latents(2, 64, 4, 4)]
        found: Tensor = unet.module(**unet.inputs, down_intrablock_additional_residuals=features).sample
        return found

    plain = run()
    with extended(unet.module, RunOptions(deepcache=DeepCache())) as extension:
        for step in range(3):
            extension.step(step)
            torch.testing.assert_close(run(), plain, atol=1e-6, rtol=0)


def test_deepcache_runs_with_the_residuals_of_a_controlnet(unet: Case) -> None:
    sizes = ((32, 8), (32, 8), (32, 4), (64, 4))
    residuals = {
        "down_block_additional_residuals": [latents(2, width, side, side) for width, side in sizes],
        "mid_block_additional_residual": latents(2, 64, 4, 4),
    }
    inputs = {**unet.inputs, **residuals}
    plain = unet.module(**inputs).sample
    with extended(unet.module, RunOptions(deepcache=DeepCache())) as run:
        for step in range(3):
            run.step(step)
            torch.testing.assert_close(unet.module(**inputs).sample, plain, atol=1e-6, rtol=0)


def test_more_layers_than_the_first_level_has_are_refused(unet: Case) -> None:
    with (
        pytest.raises(UserError, match=r"options\.deepcache\.layers: found 4, expected at most 1"),
        extended(unet.module, RunOptions(deepcache=DeepCache(layers=4))),
    ):
        pass


def test_all_options_of_a_unet_run_together(unet: Case) -> None:
    options = RunOptions(
        freeu=FreeU(),
        pag=PerturbedAttention(),
        sag=SelfAttention(),
        hypertile=HyperTile(tile=32),
        deepcache=DeepCache(),
    )
    with extended(unet.module, options) as run:
        both = denoised(run)
        alone = denoised(run, X[:1])
    torch.testing.assert_close(both[:1], alone, atol=1e-3, rtol=1e-4)
    assert torch.isfinite(both).all()


def test_sag_may_begin_in_a_step_whose_middle_block_deepcache_skips(unet: Case) -> None:
    """It reads the attention of the last step that computed the block."""
    options = RunOptions(sag=SelfAttention(start=0.2), deepcache=DeepCache(interval=3))
    found = {}
    for each in (options, RunOptions(deepcache=options.deepcache)):
        with extended(unet.module, each) as run:
            for step in range(3):
                run.step(step)
                found[each.sag is not None, step] = denoised(run)
    torch.testing.assert_close(found[True, 1], found[False, 1], atol=1e-4, rtol=0)
    assert (found[True, 2] - found[False, 2]).abs().max() > 1e-3
