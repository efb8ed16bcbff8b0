"""Soft masks that grow over the steps, and guidance that keeps the length of the positive prediction."""

from __future__ import annotations

import torch

from modelpool.pool.inference.extensions.differential_mask import mask_of_level
from modelpool.pool.inference.guidance.guiders import (
    ClassifierFreeGuidance,
    FrequencyGuidance,
    NormedGuidance,
    Predictions,
)
from modelpool.pool.inference.sampling.schedules import sd1_sigma_table
from modelpool.pool.values.core.run_options import DifferentialMask
from modelpool.pool.values.core.sampling_facts import Prediction


def test_a_soft_mask_is_regenerated_from_white_to_black() -> None:
    table = sd1_sigma_table()
    sigmas = torch.tensor([table.sigma(step) for step in (999.0, 740.0, 490.0, 240.0, 0.0)])
    mask = torch.linspace(0, 1, 5).view(1, 1, 1, 5)
    whole, half = (mask_of_level(DifferentialMask(strength), table) for strength in (1.0, 0.5))
    shares = [float(whole(level[None], mask, {"sigmas": sigmas}).sum()) for level in sigmas[:4]]
    assert shares == [1.0, 2.0, 3.0, 4.0], "each quarter of the steps adds a quarter of the levels"
    first = half(sigmas[:1], mask, {"sigmas": sigmas})
    assert torch.allclose(first, mask / 2 + (mask >= 1).float() / 2)


def test_normed_guidance_is_never_longer_than_the_positive_prediction() -> None:
    torch.manual_seed(3)
    x, cond, uncond = torch.randn(3, 2, 4, 5, 5)
    sigma = 2.0
    guider = NormedGuidance(ClassifierFreeGuidance(6.0), 1.0, Prediction.NOISE, 0.5)
    clean = [x - sigma * noise for noise in (cond, uncond)]
    guided = clean[1] + (clean[0] - clean[1]) * 6.0
    lengths = [torch.linalg.vector_norm(each, dim=1, keepdim=True) for each in (clean[0], guided)]
    wanted = guided * (lengths[0] / lengths[1]).clamp(max=1.0)
    found = guider.combine_clean(x, Predictions(*clean), sigma)
    assert torch.allclose(found, wanted, atol=1e-5)
    by_noise = x - sigma * guider.combine_at(x, Predictions(cond, uncond), sigma)
    assert torch.allclose(by_noise, wanted, atol=1e-4)
    assert torch.allclose(NormedGuidance(ClassifierFreeGuidance(1.0), 1.0, Prediction.NOISE, 0.5).combine_clean(
        x, Predictions(*clean), sigma), clean[0], atol=1e-5)  # fmt: skip


def test_frequencies_of_guidance_have_their_factors() -> None:
    """As a square around frequency 0 of the shifted transform, from -cutoff up to cutoff - 1 in both directions."""
    for high, wide, cutoff in ((8, 10, 2), (7, 9, 3), (6, 6, 50)):
        torch.manual_seed(high)
        cond, uncond = torch.randn(2, 2, 4, high, wide)
        factors = torch.full((high, wide), 2.5)
        rows, columns = (slice(max(0, side // 2 - cutoff), side // 2 + cutoff) for side in (high, wide))
        factors[rows, columns] = 0.5
        spectrum = torch.fft.fftshift(torch.fft.fftn(cond - uncond, dim=(-2, -1)), dim=(-2, -1)) * factors
        scaled = torch.fft.ifftn(torch.fft.ifftshift(spectrum, dim=(-2, -1)), dim=(-2, -1)).real
        guider = FrequencyGuidance(ClassifierFreeGuidance(4.0), 0.5, 2.5, cutoff)
        expected = uncond + 4.0 * scaled
        assert torch.allclose(guider.combine(Predictions(cond, uncond), 1.0), expected, atol=1e-5)
        x = torch.randn(2, 4, high, wide)
        clean = Predictions(x - 2.0 * cond, x - 2.0 * uncond)
        assert torch.allclose(guider.combine_clean(x, clean, 2.0), x - 2.0 * expected, atol=1e-4)
        plain = FrequencyGuidance(ClassifierFreeGuidance(4.0), 1.0, 1.0, cutoff)
        assert torch.allclose(plain.combine(Predictions(cond, uncond), 1.0), uncond + 4.0 * (cond - uncond), atol=1e-5)
