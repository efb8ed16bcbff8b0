"""Samplers solve the probability flow at the order they claim, on a model whose exact solution is known."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from modelpool.pool.sampling.names import SAMPLERS, SCHEDULES
from modelpool.pool.sampling.samplers import FUNCTIONS, Denoise, Noise, OnStep
from modelpool.pool.sampling.schedules import make_sigmas, sd1_sigma_table
from tests.pool.sampling import toy

TABLE = sd1_sigma_table()
DETERMINISTIC = sorted(SAMPLERS.keys() - {"euler_ancestral"})


def run(
    sampler: str,
    x: Tensor,
    sigmas: Tensor,
    denoise: Denoise = toy.denoise,
    noise: Noise = toy.no_noise,
    on_step: OnStep = toy.unheard,
) -> Tensor:
    return FUNCTIONS[sampler](denoise, x, sigmas, noise, on_step)


def error_after(sampler: str, steps: int) -> float:
    """Largest error over starts in the bulk, of `steps` steps even in log(sigma), in float64."""
    start = torch.linspace(-8, 8, 33, dtype=torch.float64)[None, None, None]
    sigmas = torch.logspace(math.log10(5.0), math.log10(0.1), steps + 1, dtype=torch.float64)
    first, last = sigmas[0].item(), sigmas[-1].item()
    return float((run(sampler, start, sigmas) - toy.exact(start, first, last)).abs().max())


@pytest.mark.parametrize(("sampler", "order"), [("euler", 1), ("ddim", 1), ("dpmpp_2m", 2), ("uni_pc", 2)])
def test_the_error_falls_with_the_order_of_the_method(sampler: str, order: int) -> None:
    """Twice the steps, 2**order times less error, once the steps are short enough."""
    coarse, fine = error_after(sampler, 200), error_after(sampler, 400)
    assert coarse / fine > 0.85 * 2**order
    assert fine < {1: 2e-2, 2: 5e-4}[order]


def test_first_order_is_not_better_than_first_order() -> None:
    """So that the property above can tell the orders apart."""
    assert error_after("euler", 200) / error_after("euler", 400) < 2.4


def test_higher_order_pays_at_the_step_counts_people_use() -> None:
    errors = {sampler: error_after(sampler, 20) for sampler in ("euler", "dpmpp_2m", "uni_pc")}
    assert errors["uni_pc"] < errors["dpmpp_2m"] < errors["euler"]


@pytest.mark.parametrize("steps", [15, 20, 30])
def test_with_its_default_schedule_higher_order_pays_too(steps: int) -> None:
    """UniPC with "normal", whose last steps are long in log(sigma), ends several times farther off than Euler."""

    def error(sampler: str, schedule: str) -> float:
        sigmas = make_sigmas(schedule, steps, TABLE)
        first = float(sigmas[0])
        start = torch.linspace(-3.0, 3.0, 61, dtype=torch.float64)[None, None, None] * first
        return float((run(sampler, start, sigmas) - toy.exact(start, first, 1e-4)).square().mean().sqrt())

    errors = {sampler: error(sampler, SAMPLERS[sampler].schedule) for sampler in DETERMINISTIC}
    assert errors["uni_pc"] < errors["dpmpp_2m"] < 0.5 * min(errors["euler"], errors["ddim"])
    assert error("uni_pc", "normal") > 2 * errors["euler"]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 7])
def test_every_pair_works_at_few_steps(sampler: str, schedule: str, steps: int) -> None:
    """It asks the model once a step, at each level, reports each step, keeps dtype and shape, and ends in a guess."""
    sigmas = make_sigmas(schedule, steps, TABLE)
    x_BCHW = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0)) * float(sigmas[0])
    asked: list[float] = []
    predictions: list[Tensor] = []
    reports: list[tuple[int, int]] = []

    def denoise(x: Tensor, sigma: float) -> Tensor:
        asked.append(sigma)
        predictions.append(toy.denoise(x, sigma))
        return predictions[-1]

    result = run(
        sampler, x_BCHW, sigmas, denoise, lambda: torch.zeros_like(x_BCHW), lambda done, of: reports.append((done, of))
    )
    assert asked == sigmas[:-1].tolist()
    assert reports == [(done, steps) for done in range(1, steps + 1)]
    assert (result.dtype, result.shape) == (torch.float32, x_BCHW.shape)
    assert torch.equal(result, predictions[-1]), "the step to noise level 0 lands on the last guess"


@pytest.mark.parametrize("sampler", DETERMINISTIC)
def test_a_constant_guess_is_approached_exactly(sampler: str) -> None:
    """x - guess shrinks as sigma does, whatever the order: the differences that the higher orders add are all 0."""
    guess, start = torch.tensor([[[[0.25, -2.0]]]]), torch.tensor([[[[6.0, -3.0]]]])
    for levels in ([8.0, 4.0, 1.0], [8.0, 3.0, 2.0, 0.5, 0.25]):
        result = run(sampler, start, torch.tensor(levels), lambda x, sigma: guess)
        torch.testing.assert_close(result, guess + (start - guess) * (levels[-1] / levels[0]), rtol=1e-6, atol=1e-6)


def test_ancestral_noise_is_drawn_once_a_step_but_not_to_0() -> None:
    draws = 0

    def noise() -> Tensor:
        nonlocal draws
        draws += 1
        return torch.ones(1, 1, 1, 1)

    zeros = torch.zeros(1, 1, 1, 1)
    result = run("euler_ancestral", zeros, torch.tensor([4.0, 2.0, 1.0]), lambda x, sigma: x * 0, noise)
    assert draws == 2
    # each step keeps (next / sigma)**2 of x and adds noise of variance next**2 - below**2
    step_1 = math.sqrt(2.0**2 - 1.0**2)
    assert result.item() == pytest.approx(step_1 / 4 + math.sqrt(1.0**2 - 0.5**2), rel=1e-6)
    run("euler_ancestral", zeros, torch.tensor([4.0, 2.0, 0.0]), lambda x, sigma: x * 0, noise)
    assert draws == 3


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_image_does_not_depend_on_its_batch(sampler: str) -> None:
    """Three in a batch, bit for bit each alone: nothing in a sampler mixes images."""
    sigmas = make_sigmas(SAMPLERS[sampler].schedule, 6, TABLE)
    generator = torch.Generator().manual_seed(3)
    x_BCHW = torch.randn(3, 4, 8, 8, generator=generator) * float(sigmas[0])
    noises_SBCHW = torch.randn(6, 3, 4, 8, 8, generator=generator)

    def linear(x: Tensor, sigma: float) -> Tensor:
        return x * (0.5 / (0.5 + sigma**2))

    together = run(sampler, x_BCHW, sigmas, linear, iter(noises_SBCHW).__next__)
    for i in range(3):
        alone = run(sampler, x_BCHW[i : i + 1], sigmas, linear, iter(noises_SBCHW[:, i : i + 1]).__next__)
        assert torch.equal(alone[0], together[i])
