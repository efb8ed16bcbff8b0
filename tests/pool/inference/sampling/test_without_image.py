"""Guidance by text and image: the published formula, by plain guidance and through the functions of a run."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from modelpool.pool.inference.conditioning.conditions import Condition
from modelpool.pool.inference.guidance.guiders import ClassifierFreeGuidance, TextAndImageGuidance
from modelpool.pool.inference.sampling.predictions import clean_latent
from modelpool.pool.inference.sampling.schedules import sd1_sigma_table
from modelpool.pool.values.core.sampling_facts import Prediction
from modelpool.pool.weights.options.model_options import Args, ModelOptions
from tests.pool.inference.sampling.one_image import guided

CFG, IMAGE_CFG, SIGMA = 7.0, 1.5, 3.0
X = torch.randn(1, 4, 6, 6, generator=torch.Generator().manual_seed(0))
IMAGE = torch.randn(1, 4, 6, 6, generator=torch.Generator().manual_seed(1))
TABLE = sd1_sigma_table()


def predict(x_BCHW: Tensor, _: Tensor, context_BLD: Tensor, image: Tensor) -> Tensor:
    return x_BCHW * context_BLD.mean((1, 2))[:, None, None, None] + image * 0.3


def condition(value: float, image: Tensor) -> Condition:
    return Condition(torch.full((1, 77, 8), value), model_kwargs={"image": image})


def denoised(options: ModelOptions | None = None, strength: float = IMAGE_CFG, max_batch: int = 0) -> Tensor:
    texts = condition(0.5, IMAGE), condition(-0.25, IMAGE)
    without, guider = {"image": torch.zeros_like(IMAGE)}, TextAndImageGuidance(ClassifierFreeGuidance(CFG), strength)
    guess = guided(predict, TABLE, *texts, CFG, options, max_batch=max_batch, without_image=without, guider=guider)
    return guess(X, SIGMA)


def by_formula(strength: float) -> Tensor:
    """Brooks et al. 2023, equation 3."""
    scaled = X / (1 + SIGMA**2) ** 0.5
    both, image, neither = (
        predict(scaled, X, torch.full((1, 77, 8), value), seen)
        for value, seen in ((0.5, IMAGE), (-0.25, IMAGE), (-0.25, torch.zeros_like(IMAGE)))
    )
    expected = neither + strength * (image - neither) + CFG * (both - image)
    return clean_latent(Prediction.NOISE, X, expected, SIGMA, 1.0)


@pytest.mark.parametrize("max_batch", [0, 1, 2])
@pytest.mark.parametrize("strength", [1.0, 1.5, 4.0])
def test_it_is_the_published_formula_however_many_run_at_once(strength: float, max_batch: int) -> None:
    np.testing.assert_allclose(denoised(None, strength, max_batch), by_formula(strength), rtol=1e-4, atol=1e-4)


def test_functions_of_a_run_see_two_guesses_and_the_image_counts_all_the_same() -> None:
    seen: list[int] = []

    def look(args: Args) -> list[Tensor]:
        seen.append(len(args["conds_out"]))
        found: list[Tensor] = args["conds_out"]
        return found

    options = ModelOptions().with_sampler_pre_cfg_function(look)
    np.testing.assert_allclose(denoised(options), by_formula(IMAGE_CFG), rtol=1e-4, atol=1e-4)
    assert seen == [2]
