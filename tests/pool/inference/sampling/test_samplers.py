"""Samplers solve the probability flow at the order they claim, on a model with a known exact solution."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch
from torch import Tensor

from modelpool.pool.inference.sampling.noise_path import EXPLODING, NoisePath
from modelpool.pool.inference.sampling.partial_run import SamplerMemory
from modelpool.pool.inference.sampling.restart import restart_steps
from modelpool.pool.inference.sampling.sampler_names import (
    OWN_STEPS,
    READS_CHURN,
    READS_ETA,
    SAMPLERS,
    SCHEDULES,
    draws_noise,
)
from modelpool.pool.inference.sampling.sampler_step import SamplerSettings, Step
from modelpool.pool.inference.sampling.samplers import FUNCTIONS, Denoise, Noise, OnStep
from modelpool.pool.inference.sampling.schedules import flow_table, make_sigmas, sd1_sigma_table
from modelpool.pool.values.core.errors import UnusableField
from modelpool.pool.values.core.stage_params import (
    ADAPTIVE_SAMPLER,
    GuidanceParams,
    ModelRef,
    OutputShape,
    SampleParams,
    SamplingSchedule,
    batch_key,
)
from tests.pool.inference.sampling import toy

TABLE = sd1_sigma_table()
ADAPTIVE = SampleParams(
    ModelRef("toy", "toy", "00"),
    (),
    OutputShape(64, 64),
    SamplingSchedule(5, ADAPTIVE_SAMPLER, "normal"),
    GuidanceParams(4.0),
    11,
)
#: samplers that draw no noise unless eta says so
DETERMINISTIC = (
    *("euler", "heun", "heunpp2", "dpm_2", "lms", "ipndm", "dpmpp_2m", "res_multistep"),
    *("gradient_estimation", "ddim", "uni_pc", "uni_pc_bh2", "uni_pc_2"),
    *("euler_cfg_pp", "dpmpp_2m_cfg_pp", "gradient_estimation_cfg_pp", "res_multistep_cfg_pp"),
)
#: samplers that evaluate the model more than once per step, or at other levels than those of the schedule
SEVERAL_CALLS = OWN_STEPS | {
    *("heun", "heunpp2", "dpm_2", "dpm_2_ancestral", "dpmpp_2s_ancestral", "dpmpp_2s_ancestral_cfg_pp"),
    *("dpmpp_sde", "seeds_2", "seeds_3", "sa_solver_pece"),
}
#: order of each method on the probability flow, without noise
ORDERS = {
    **dict.fromkeys(("euler", "ddim", "euler_ancestral", "euler_cfg_pp", "euler_ancestral_cfg_pp", "tcd"), 1),
    **dict.fromkeys(("gradient_estimation", "gradient_estimation_cfg_pp", "heunpp2"), 1),
    **dict.fromkeys(("heun", "dpm_2", "dpm_2_ancestral", "dpmpp_2s_ancestral", "dpmpp_sde", "seeds_2"), 2),
    **dict.fromkeys(("dpmpp_2m", "dpmpp_2m_cfg_pp", "dpmpp_2m_sde", "dpmpp_2m_sde_heun", "dpmpp_3m_sde"), 2),
    **dict.fromkeys(("res_multistep", "res_multistep_ancestral", "res_multistep_cfg_pp", "uni_pc"), 2),
    **dict.fromkeys(("res_multistep_ancestral_cfg_pp", "lms", "ipndm", "ipndm_v", "deis"), 2),
    **dict.fromkeys(("uni_pc_bh2", "uni_pc_2"), 2),
    **dict.fromkeys(("seeds_3", "sa_solver", "sa_solver_pece"), 3),
}


def run(
    sampler: str,
    x: Tensor,
    sigmas: Tensor,
    denoise: Denoise = toy.denoise,
    noise: Noise = toy.no_noise,
    on_step: OnStep = toy.unheard,
    eta: float | None = None,
) -> Tensor:
    model = denoise if isinstance(denoise, toy.Recorded) else toy.Recorded(denoise)
    settings = SamplerSettings(eta=eta, table=TABLE, unconditional=model.last)
    return FUNCTIONS[sampler](model, x, sigmas, noise, on_step, settings=settings)


def error_after(sampler: str, steps: int) -> float:
    """Largest error over starts in the bulk, of `steps` steps even in log(sigma), in float64."""
    start = torch.linspace(-8, 8, 33, dtype=torch.float64)[None, None, None]
    sigmas = torch.logspace(math.log10(5.0), math.log10(0.1), steps + 1, dtype=torch.float64)
    found = run(sampler, start, sigmas, noise=lambda: torch.zeros_like(start), eta=0.0)
    return float((found - _exact_end()).abs().max())


@functools.cache
def _exact_end() -> Tensor:
    return toy.exact(torch.linspace(-8, 8, 33, dtype=torch.float64)[None, None, None], 5.0, 0.1)


def test_the_error_falls_with_the_order_of_the_method() -> None:
    """Twice the steps, 2**order times less error, once the steps are short enough."""
    failures = []
    for sampler, order in ORDERS.items():
        coarse, fine = error_after(sampler, 100), error_after(sampler, 200)
        if coarse / fine <= 0.85 * 2**order or fine >= {1: 2e-2, 2: 5e-4, 3: 1e-5}[order]:
            failures.append((sampler, order, coarse, fine))
    assert not failures
    placed = OWN_STEPS  # "restart" has a test of its own, the others place their steps by their error or by order 3
    stochastic = {"lcm", "ddpm", "er_sde", "dpmpp_2s_ancestral_cfg_pp"}
    assert SAMPLERS.keys() == ORDERS.keys() | placed | stochastic


def test_the_error_of_restart_falls_with_the_square_of_the_step() -> None:
    """Without noise, each restart continues the latent at the higher level: the exact end is the end of the passes one
    after the other."""
    start = torch.linspace(-8, 8, 33, dtype=torch.float64)[None, None, None]
    errors = []
    for steps in (80, 160):
        levels = [*make_sigmas("karras", steps, TABLE).tolist()]
        passes = [list(restart_steps(levels, EXPLODING)[0])]
        for begin, end in restart_steps(levels, EXPLODING)[1:]:
            if begin == passes[-1][1]:
                passes[-1][1] = end
            else:
                passes.append([begin, end])
        assert len(passes) == 3
        last = restart_steps(levels, EXPLODING)[-1][0]
        passes[-1][1] = last
        expected = start
        for begin, end in passes:
            expected = toy.exact(expected, begin, end)
        sigmas = torch.tensor(levels, dtype=torch.float64)
        found = run("restart", start, sigmas, noise=lambda: torch.zeros_like(start))
        errors.append(float((found - toy.denoise(expected, last)).abs().max()))
    assert errors[0] / errors[1] > 0.85 * 2**2
    assert errors[1] < 1e-2


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

    errors = {name: error(name, SAMPLERS[name].schedule) for name in ("euler", "ddim", "dpmpp_2m", "uni_pc")}
    assert errors["uni_pc"] < errors["dpmpp_2m"] < 0.5 * min(errors["euler"], errors["ddim"])
    assert error("uni_pc", "normal") > 2 * errors["euler"]


def test_every_pair_works_at_few_steps() -> None:
    """It reports each step, keeps dtype and shape, and ends in a prediction. Samplers with one evaluation per step make
    it at each level."""
    failures = []
    for sampler, schedule, steps in itertools.product(SAMPLERS, SCHEDULES, (1, 2, 3, 4, 7)):
        if schedule == "ays_svd":
            continue
        sigmas = make_sigmas(schedule, steps, TABLE)
        x_BCHW = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0)) * float(sigmas[0])
        model, reports = toy.Recorded(), list[tuple[int, int]]()
        noise = functools.partial(torch.zeros_like, x_BCHW)
        result = run(sampler, x_BCHW, sigmas, model, noise, lambda *step, reports=reports: reports.append(step))  # type: ignore[misc]
        is_right = (result.dtype, result.shape) == (torch.float32, x_BCHW.shape)
        is_right = is_right and reports[-1] == (steps, steps) and reports == sorted(set(reports))
        if sampler not in SEVERAL_CALLS:
            is_right = is_right and model.levels == sigmas[:-1].tolist()
        if sampler not in OWN_STEPS:
            is_right = is_right and [done for done, _ in reports] == list(range(1, steps + 1))
        if sampler not in ("dpm_fast", "dpm_adaptive"):  # these end at the lowest level
            is_right = is_right and torch.allclose(result, model.last(), rtol=1e-5, atol=1e-6)
        if not is_right:
            failures.append((sampler, schedule, steps))
    assert not failures


def test_published_levels_are_refused_for_other_models() -> None:
    with pytest.raises(UnusableField, match=r"schedule: found 'ays_svd, which starts at noise level 700'.*up to 14\.6"):
        make_sigmas("ays_svd", 10, TABLE)
    with pytest.raises(UnusableField, match="up to 1:"):
        make_sigmas("ays_sd1", 10, flow_table(3.0))


def test_a_constant_guess_is_approached_exactly() -> None:
    """x - guess shrinks as sigma does, whatever the order: the differences that the higher orders add are all 0."""
    guess, start = torch.tensor([[[[0.25, -2.0]]]]), torch.tensor([[[[6.0, -3.0]]]])
    for sampler in DETERMINISTIC:
        for levels in ([8.0, 4.0, 1.0], [8.0, 3.0, 2.0, 0.5, 0.25]):
            result = run(sampler, start, torch.tensor(levels), lambda x, sigma: guess)
            expected = guess + (start - guess) * (levels[-1] / levels[0])
            torch.testing.assert_close(
                result, expected, rtol=1e-6, atol=2e-6, msg=lambda text, s=sampler: f"{s} {text}"
            )  # type: ignore[misc]


def test_the_noise_fields_that_a_sampler_reads() -> None:
    """The sets in `names`, from which warnings follow, are what the functions do."""
    sigmas = make_sigmas("karras", 20, TABLE)
    start = torch.linspace(-1.0, 1.0, 4)[None, None, None] * float(sigmas[0])

    def result(sampler: str, **fields: float) -> Tensor:
        draw = functools.partial(torch.randn, start.shape, generator=torch.Generator().manual_seed(1))
        model = toy.Recorded()
        settings = SamplerSettings(table=TABLE, unconditional=model.last, **fields)  # type: ignore[arg-type]
        return FUNCTIONS[sampler](model, start, sigmas, draw, toy.unheard, settings=settings)

    for sampler in FUNCTIONS:
        usual = result(sampler)
        assert (sampler in READS_ETA) == (not torch.equal(result(sampler, eta=0.4), result(sampler, eta=0.7))), sampler
        assert (sampler in READS_CHURN) == (not torch.equal(usual, result(sampler, s_churn=2.0))), sampler
        for fields in ({}, {"eta": 0.0}, {"eta": 0.5}, {"s_churn": 2.0}):
            changes = not torch.equal(result(sampler, **fields), result(sampler, **fields, s_noise=0.5))
            drawn = draws_noise(sampler, fields.get("eta"), fields.get("s_churn", 0.0))
            assert drawn == changes, (sampler, fields)


def test_eta_of_ddim_draws_noise_and_keeps_the_distribution_of_images() -> None:
    """Without eta it is Euler's method, bit for bit. With eta, the clean latents have the same mean and deviation, for
    levels of both kinds: the path of a flow has less of the image where there is more noise."""
    start = torch.randn(1, 1, 1, 20_000, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    levels = torch.logspace(math.log10(20.0), -2, 201, dtype=torch.float64)
    levels = torch.cat((levels, levels.new_zeros(1)))
    found = {}
    for eta in (0.0, 1.0):
        draw = functools.partial(
            torch.randn, start.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64
        )
        noise = draw if eta else toy.no_noise
        found[eta] = run("ddim", start * 20.0, levels, noise=noise, eta=eta)
        shares = levels / (1.0 + levels)

        def of_flow(x: Tensor, share: float) -> Tensor:
            return toy.denoise(x / (1.0 - share), share / (1.0 - share))

        model, settings = toy.Recorded(of_flow), SamplerSettings(eta=eta, path=NoisePath(is_flow=True))
        noise = draw if eta else toy.no_noise
        draw.keywords["generator"].manual_seed(6)
        flow = FUNCTIONS["ddim"](model, start * shares[0], shares, noise, toy.unheard, settings=settings)
        torch.testing.assert_close(flow, found[eta], rtol=1e-6, atol=1e-6)
    assert torch.equal(found[0.0], run("euler", start * 20.0, levels))
    assert (found[1.0] - found[0.0]).abs().mean() > 0.3
    mean = sum(mean * share for mean, share in toy.MIXTURE)
    variance = toy.DEVIATION**2 + sum(share * (each - mean) ** 2 for each, share in toy.MIXTURE)
    assert float(found[1.0].mean()) == pytest.approx(mean, abs=0.03)
    assert float(found[1.0].std()) == pytest.approx(math.sqrt(variance), abs=0.02)


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


def test_an_image_does_not_depend_on_its_batch() -> None:
    """Three in a batch, bit for bit each alone: nothing in a sampler mixes images. DPM adaptive is never batched."""
    generator = torch.Generator().manual_seed(3)
    noises_SBCHW = torch.randn(24, 3, 4, 8, 8, generator=generator)

    def linear(x: Tensor, sigma: float) -> Tensor:
        return x * (0.5 / (0.5 + sigma**2))

    for sampler in SAMPLERS.keys() - {ADAPTIVE_SAMPLER}:
        sigmas = make_sigmas(SAMPLERS[sampler].schedule, 6, TABLE)
        x_BCHW = torch.randn(3, 4, 8, 8, generator=generator) * float(sigmas[0])
        together = run(sampler, x_BCHW, sigmas, linear, iter(noises_SBCHW).__next__)
        for i in range(3):
            alone = run(sampler, x_BCHW[i : i + 1], sigmas, linear, iter(noises_SBCHW[:, i : i + 1]).__next__)
            assert torch.equal(alone[0], together[i]), sampler
    assert batch_key(ADAPTIVE) == ""


def test_noise_between_two_levels_is_a_brownian_motion() -> None:
    """An interval that contains an earlier one of the same step shares its noise: the covariance of both is the share
    of the shorter one."""
    numbers = torch.Generator().manual_seed(1)
    noise = functools.partial(torch.randn, 200_000, generator=numbers)
    step = Step(toy.denoise, noise, SamplerSettings(), SamplerMemory(), (), 1, 8.0, 4.0)
    half, whole, after = step.increment(8.0, 7.0), step.increment(8.0, 4.0), step.increment(4.0, 2.0)
    assert [float(each.std()) for each in (half, whole, after)] == pytest.approx([1.0] * 3, rel=0.01)
    assert float((half * whole).mean()) == pytest.approx(math.sqrt(1 / 4), abs=0.01)
    assert float((whole * after).mean()) == pytest.approx(0.0, abs=0.01)


def test_restart_goes_up_and_has_as_many_steps_as_the_run() -> None:
    for steps in (1, 19, 20, 35, 36, 60):
        levels = make_sigmas("karras", steps, TABLE).tolist()
        found = restart_steps(levels, EXPLODING)
        rises = [begin / end for (_, end), (begin, _) in itertools.pairwise(found) if begin > end]
        assert len(found) == steps
        assert len(rises) == (0 if steps < 20 else 1 if steps < 36 else 2)
        assert all(begin > end for begin, end in found)
        assert found[-1][1] == 0.0
