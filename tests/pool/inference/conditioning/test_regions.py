"""Texts for parts of an image: their guesses are one weighted mean, which a small reference of its own computes cell
by cell; boxes have soft edges where the image goes on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from modelpool.pool.inference.conditioning.conditions import Condition
from modelpool.pool.inference.conditioning.regions import Regions, box_weights, region_weights
from modelpool.pool.inference.sampling.schedules import sd1_sigma_table
from modelpool.pool.values.core.stage_params import Mask, RegionParams
from modelpool.pool.weights.options.model_options import ModelOptions
from tests.pool.inference.sampling.one_image import guided

TABLE = sd1_sigma_table()
CELLS = (12, 16)
CFG = 3.0


def text(value: float, tokens: int = 2) -> Condition:
    return Condition(torch.full((1, tokens, 3), value))


def predict_noise(x_BCHW: Tensor, timestep_B: Tensor, context_BLD: Tensor, **_: Any) -> Tensor:
    """Says of each text something else, in each cell something else."""
    level = context_BLD.mean(dim=(1, 2))[:, None, None, None]
    return torch.sin(x_BCHW * level) + level * torch.linspace(0, 1, x_BCHW.shape[-1])


def reference_box(box: tuple[float, float, float, float]) -> np.ndarray:
    """How much a box counts in each cell, one cell after the other: a cell of the fading edge counts as many parts as
    it is cells away from the first one outside."""
    left, top, width, height = box
    spans = []
    for start, length, cells in ((top, height, CELLS[0]), (left, width, CELLS[1])):
        first = min(round(start * cells), cells - 1)
        last = max(first + 1, round((start + length) * cells))
        spans.append((first, last, min(8, (last - first) // 4), cells))
    found = np.zeros(CELLS)
    for y in range(CELLS[0]):
        for x in range(CELLS[1]):
            weight = 1.0
            for at, (first, last, fade, cells) in zip((y, x), spans, strict=True):
                inside = first <= at < last
                before = (at - first + 1) / fade if fade and first > 0 else 1.0
                after = (last - at) / fade if fade and last < cells else 1.0
                weight *= min(1.0, before) * min(1.0, after) if inside else 0.0
            found[y, x] = weight
    return found


def reference_guess(x: Tensor, sigma: float, conds: list[tuple[Condition, np.ndarray]], uncond: Condition) -> Tensor:
    """Clean latents, averaged by weight in each cell, and then guided."""

    def clean(condition: Condition) -> Tensor:
        scaled = x / (sigma**2 + 1) ** 0.5
        return x - sigma * predict_noise(scaled, torch.tensor([0.0]), condition.context_BLD)

    total, weights = torch.zeros_like(x), torch.zeros(CELLS)
    for condition, weight in conds:
        counted = torch.from_numpy(weight).float()
        total += clean(condition) * counted
        weights += counted
    joined, negative = total / weights, clean(uncond)
    return negative + CFG * (joined - negative)


BOXES = st.tuples(st.floats(0, 0.9), st.floats(0, 0.9), st.floats(0.01, 1), st.floats(0.01, 1)).map(
    lambda b: (b[0], b[1], min(b[2], 1 - b[0]), min(b[3], 1 - b[1]))
)


@given(BOXES)
def test_a_box_counts_as_the_reference_says(box: tuple[float, float, float, float]) -> None:
    found = box_weights(box, CELLS)
    np.testing.assert_allclose(found, reference_box(box), atol=1e-6)
    assert found.max() > 0


def test_a_box_over_all_counts_one_everywhere() -> None:
    assert (box_weights((0, 0, 1, 1), CELLS) == 1).all()


@pytest.mark.parametrize("by_functions", [False, True])
@pytest.mark.parametrize("max_batch", [0, 1])
def test_the_guess_is_that_of_the_reference(by_functions: bool, max_batch: int) -> None:
    """Two texts of one length and one of another; a box, and a mask with half shares; plain, and through the sampler
    functions of a run's options."""
    mask = np.zeros((CELLS[0] * 8, CELLS[1] * 8), np.uint8)
    mask[:40, 20:90] = 255
    works = [RegionParams(1.5, (0.25, 0.0, 0.5, 0.75)), RegionParams(0.5)]
    weights = region_weights(works, [[Mask(mask)]], CELLS)
    shares = mask.reshape(CELLS[0], 8, CELLS[1], 8).mean(axis=(1, 3)) / 255
    conditions = (text(0.7), text(-0.4, tokens=5))
    seen = []
    options = ModelOptions(sampler_post_cfg_function=(lambda args: seen.append(1) or args["denoised"],))
    denoise = guided(
        predict_noise,
        TABLE,
        text(0.3),
        text(-0.1),
        CFG,
        options if by_functions else None,
        max_batch=max_batch,
        regions=Regions(conditions, weights),
    )
    x, sigma = torch.randn((1, 4, *CELLS), generator=torch.Generator().manual_seed(1)), 1.7
    counted = [
        (text(0.3), np.ones(CELLS)),
        (conditions[0], 1.5 * reference_box((0.25, 0.0, 0.5, 0.75))),
        (conditions[1], 0.5 * shares),
    ]
    expected = reference_guess(x, sigma, counted, text(-0.1))
    torch.testing.assert_close(denoise(x, sigma), expected, rtol=1e-4, atol=1e-4)
    assert bool(seen) == by_functions


def test_without_guidance_regions_count_all_the_same() -> None:
    weights = region_weights([RegionParams(2.0, (0, 0, 0.5, 1))], [[]], CELLS)
    regions = Regions((text(0.7),), weights)
    denoise = guided(predict_noise, TABLE, text(0.3), None, 1.0, regions=regions)
    plain = guided(predict_noise, TABLE, text(0.3), None, 1.0)
    x = torch.ones((1, 4, *CELLS))
    assert torch.equal(denoise(x, 1.0)[..., 8:], plain(x, 1.0)[..., 8:])
    assert not torch.allclose(denoise(x, 1.0)[..., :8], plain(x, 1.0)[..., :8])
