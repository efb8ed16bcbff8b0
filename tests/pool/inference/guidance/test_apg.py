"""Guidance that is projected in late steps: equal to that of diffusers, for each image of a batch by itself."""

from __future__ import annotations

import pytest
import torch
from diffusers.guiders import AdaptiveProjectedMixGuidance
from torch import Tensor

from modelpool.pool.inference.conditioning.conditions import Condition
from modelpool.pool.inference.guidance.apg import (
    CFG_STEPS,
    CFG_STEPS_WITH_TEXT,
    AdaptiveProjectedGuidance,
    cfg_steps,
    project,
)
from modelpool.pool.inference.guidance.guiders import Guider, Predictions
from modelpool.pool.inference.sampling.schedules import sigma_table
from modelpool.pool.values.core.sampling_facts import NoiseFacts, NoiseKind, Prediction
from modelpool.pool.weights.options.model_options import ModelOptions
from tests.pool.inference.sampling.one_image import guided

CFG, STEPS = 3.5, 10
FLOW = sigma_table(NoiseFacts(NoiseKind.FLOW))


def predictions(batch: int = 2, scale: float = 1.0) -> list[tuple[Tensor, Tensor, float]]:
    """For the prompt and for the negative prompt, and the noise level, of each step."""
    drawn = torch.Generator().manual_seed(5)
    return [
        (
            torch.randn(batch, 4, 6, 6, generator=drawn) * scale,
            torch.randn(batch, 4, 6, 6, generator=drawn) * scale,
            1.0 - step / STEPS,
        )
        for step in range(STEPS)
    ]


def _of_diffusers(start: int, asked: list[tuple[Tensor, Tensor, float]]) -> list[Tensor]:
    guider = AdaptiveProjectedMixGuidance(CFG, adaptive_projected_guidance_start_step=start)
    led = []
    for step, (cond, uncond, _) in enumerate(asked):
        guider.set_state(step, STEPS, torch.tensor(0))
        guider.prepare_inputs({"text": (torch.zeros(1), torch.zeros(1))})
        led.append(guider.forward(cond, uncond).pred)
    return led


@pytest.mark.parametrize("scale", [0.01, 1.0], ids=["short", "longer than differences may be"])
def test_each_image_is_guided_as_by_diffusers(scale: float) -> None:
    """One plainly for six steps, one for eight."""
    asked, lead = predictions(scale=scale), AdaptiveProjectedGuidance(CFG, (6, 8))
    early, late = _of_diffusers(5, asked), _of_diffusers(7, asked)
    for ours, first, second in zip(
        [lead.combine(Predictions(cond, uncond), sigma) for cond, uncond, sigma in asked], early, late, strict=True
    ):
        torch.testing.assert_close(ours, torch.stack([first[0], second[1]]), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(early[6][1], late[6][1])


def test_what_leads_on_is_at_right_angles_to_the_prompts_own_guess() -> None:
    cond, uncond, _ = predictions()[0]
    across = project(cond, uncond, cond - uncond) - uncond
    assert across.flatten(1).norm(dim=1).min() > 1.0
    torch.testing.assert_close((across * cond).flatten(1).sum(1), torch.zeros(2), atol=1e-3, rtol=0)


def test_asking_again_at_a_level_changes_no_later_one() -> None:
    """Wrappers of a person's own may ask twice."""
    once, twice = AdaptiveProjectedGuidance(CFG, (6, 6)), AdaptiveProjectedGuidance(CFG, (6, 6))
    for cond, uncond, sigma in predictions():
        twice.combine(Predictions(cond * 2, uncond), sigma)
        torch.testing.assert_close(
            twice.combine(Predictions(cond, uncond), sigma),
            once.combine(Predictions(cond, uncond), sigma),
            rtol=0,
            atol=0,
        )


def test_steps_that_a_run_leaves_out_count() -> None:
    (cond, uncond, sigma), *_ = predictions()
    late = AdaptiveProjectedGuidance(CFG, (6, 6), first_step=6)
    torch.testing.assert_close(late.combine(Predictions(cond, uncond), sigma), project(cond, uncond, cond - uncond))


def test_words_to_be_read_in_a_image_keep_it_plain_for_longer() -> None:
    words = torch.zeros(3, 5, 8)
    words[1, 2, 3] = 0.5
    assert cfg_steps({"context_2": words}, 3) == (CFG_STEPS, CFG_STEPS_WITH_TEXT, CFG_STEPS)
    assert cfg_steps({}, 2) == (CFG_STEPS, CFG_STEPS)


def _denoised(lead: Guider, options: ModelOptions | None) -> list[Tensor]:
    def predict(x: Tensor, level_B: Tensor, context_BLD: Tensor) -> Tensor:
        return torch.sin(x * context_BLD.mean(dim=(1, 2))[:, None, None, None] + level_B[:, None, None, None])

    texts = (Condition(torch.full((2, 3, 8), value)) for value in (2.0, 0.5))
    denoise = guided(predict, FLOW, *texts, CFG, options, prediction=Prediction.FLOW, guider=lead)
    return [denoise(x, sigma) for x, _, sigma in predictions()]


def test_functions_of_options_see_the_same_guidance() -> None:
    """They see clean latents; the lead goes by what the model predicts all the same."""
    seen: list[Tensor] = []

    def post(args: dict[str, Tensor]) -> Tensor:
        seen.append(args["denoised"])
        return args["denoised"]

    options = ModelOptions(sampler_post_cfg_function=(post,))
    plain = _denoised(AdaptiveProjectedGuidance(CFG, (6, 6)), None)
    for ours, theirs in zip(plain, _denoised(AdaptiveProjectedGuidance(CFG, (6, 6)), options), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert len(seen) == STEPS
