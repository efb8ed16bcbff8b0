"""Guidance by directions: equal to diffusers' guiders and to the published formulas, in every prediction type."""

from __future__ import annotations

import pytest
import torch
from diffusers.guiders.adaptive_projected_guidance import MomentumBuffer
from diffusers.guiders.adaptive_projected_guidance import normalized_guidance as projected_by_diffusers
from diffusers.guiders.tangential_classifier_free_guidance import normalized_guidance as damped_by_diffusers
from torch import Tensor

from modelpool.pool.inference.extensions.epsilon_scaling import epsilon_scaling
from modelpool.pool.inference.guidance.direction_guiders import (
    DirectionalGuidance,
    PerpendicularGuidance,
    TangentialGuidance,
)
from modelpool.pool.inference.guidance.guiders import (
    ClassifierFreeGuidance,
    DeviationRescaledGuidance,
    Guider,
    NormedGuidance,
    Predictions,
)
from modelpool.pool.inference.sampling.partial_run import GuidanceMemory
from modelpool.pool.inference.sampling.predictions import clean_latent, prediction_of
from modelpool.pool.values.core.run_options import EpsilonScaling, ProjectedGuidance
from modelpool.pool.values.core.sampling_facts import Prediction

CFG = 4.0
DRAWN = torch.Generator().manual_seed(3)


def drawn(count: int = 3, shape: tuple[int, ...] = (2, 4, 6, 6)) -> list[Tensor]:
    return [torch.randn(shape, generator=DRAWN) for _ in range(count)]


def _guiders(prediction: Prediction) -> dict[str, Guider]:
    plain, kind = ClassifierFreeGuidance(CFG), (prediction, 0.5)
    option = ProjectedGuidance(0.3, 5.0, -0.5)
    return {
        "apg": DirectionalGuidance(CFG, option, *kind, GuidanceMemory()),
        "tcfg": TangentialGuidance(plain, 1.0, *kind),
        "perp_neg": PerpendicularGuidance(CFG, 1.5),
        "rescaled perp_neg": DeviationRescaledGuidance(PerpendicularGuidance(CFG, 1.5), 0.7, *kind),
        "normed perp_neg": NormedGuidance(PerpendicularGuidance(CFG, 1.5), 0.9, *kind),
        "rescaled apg": DeviationRescaledGuidance(
            DirectionalGuidance(CFG, option, *kind, GuidanceMemory()), 0.7, *kind
        ),
    }


@pytest.mark.parametrize("shape", [(2, 4, 6, 6), (1, 4, 3, 6, 6)], ids=["images", "a video"])
def test_projected_guidance_is_that_of_diffusers(shape: tuple[int, ...]) -> None:
    guider = DirectionalGuidance(CFG, ProjectedGuidance(0.3, 5.0, -0.5), Prediction.CLEAN, 1.0, GuidanceMemory())
    buffer = MomentumBuffer(-0.5)
    for sigma in (3.0, 2.0, 1.0):
        cond, uncond, x = drawn(shape=shape)
        theirs = projected_by_diffusers(cond, uncond, CFG - 1, buffer, 0.3, 5.0, use_original_formulation=True)
        torch.testing.assert_close(guider.combine_at(x, Predictions(cond, uncond), sigma), theirs)


@pytest.mark.parametrize("prediction", [Prediction.NOISE, Prediction.FLOW])
def test_damped_guidance_is_that_of_diffusers(prediction: Prediction) -> None:
    cond, uncond, x = drawn()
    guider = TangentialGuidance(ClassifierFreeGuidance(CFG), 1.0, prediction, 1.0)
    ours = guider.combine_at(x, Predictions(cond, uncond), 0.7)
    torch.testing.assert_close(ours, damped_by_diffusers(cond, uncond, CFG), rtol=1e-4, atol=1e-4)


def test_only_the_perpendicular_part_of_the_negative_prompt_acts() -> None:
    cond, uncond, base = drawn()
    guider = PerpendicularGuidance(CFG, 2.0)
    for place in range(2):
        to, away = (each[place] - base[place] for each in (cond, uncond))
        across = away - (away * to).sum() / (to * to).sum() * to
        expected = base[place] + CFG * (to - 2.0 * across)
        torch.testing.assert_close(guider.combine(Predictions(cond, uncond, base), 1.0)[place], expected)
    parallel = Predictions(cond, base + (cond - base) * 0.4, base)
    torch.testing.assert_close(guider.combine(parallel, 1.0), base + CFG * (cond - base), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("prediction", list(Prediction))
def test_guided_predictions_and_guided_clean_latents_are_the_same(prediction: Prediction) -> None:
    """A run has the one or the other, as its options say."""
    sigma, (cond, uncond, base, x) = 0.8, drawn(4)
    one, other = _guiders(prediction), _guiders(prediction)
    for name, guider in one.items():
        predicted = guider.combine_at(x, Predictions(cond, uncond, base), sigma)
        clean = (clean_latent(prediction, x, each, sigma, 0.5) for each in (cond, uncond, base))
        guided = prediction_of(prediction, x, other[name].combine_clean(x, Predictions(*clean), sigma), sigma, 0.5)
        torch.testing.assert_close(
            predicted, guided, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_settings_without_effect_leave_plain_guidance() -> None:
    cond, uncond, x = drawn()
    both = Predictions(cond, uncond)
    plain = ClassifierFreeGuidance(CFG).combine(both, 0.5)
    projected = DirectionalGuidance(CFG, ProjectedGuidance(1.0, 0.0, 0.0), Prediction.NOISE, 1.0, GuidanceMemory())
    damped = TangentialGuidance(ClassifierFreeGuidance(CFG), 0.0, Prediction.NOISE, 1.0)
    for guider in (projected, damped):
        torch.testing.assert_close(guider.combine_at(x, both, 0.5), plain, rtol=1e-4, atol=1e-4)


def test_asking_again_at_a_level_changes_no_later_one() -> None:
    """Samplers and functions of options may call twice at one level."""
    option, kind = ProjectedGuidance(0.0, 5.0, -0.5), (Prediction.NOISE, 1.0)
    once, twice = (DirectionalGuidance(CFG, option, *kind, GuidanceMemory()) for _ in range(2))
    for sigma in (3.0, 2.0, 1.0):
        cond, uncond, x = drawn()
        twice.combine_at(x, Predictions(cond * 2, uncond), sigma)
        expected = once.combine_at(x, Predictions(cond, uncond), sigma)
        torch.testing.assert_close(twice.combine_at(x, Predictions(cond, uncond), sigma), expected, rtol=0, atol=0)


def test_epsilon_scaling_divides_the_noise() -> None:
    x, noise, _ = drawn()
    found = epsilon_scaling(EpsilonScaling(1.25))({"input": x, "denoised": x - 2.0 * noise})
    torch.testing.assert_close(found, x - 2.0 * noise / 1.25)


def test_a_guidance_in_another_one_still_reads_the_empty_text() -> None:
    """It was not predicted for, so that the run ended with an internal error."""
    for name, guider in _guiders(next(iter(Prediction))).items():
        assert guider.reads_base == ("perp_neg" in name), name
