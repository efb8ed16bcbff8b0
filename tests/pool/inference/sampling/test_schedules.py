"""The sigma table is SD1's, conversions invert each other, and every schedule is a falling staircase to 0."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, EDMEulerScheduler, EulerDiscreteScheduler
from hypothesis import given, settings
from hypothesis import strategies as st

from modelpool.pool.inference.sampling.sampler_names import MAX_STEPS, SCHEDULES
from modelpool.pool.inference.sampling.schedules import (
    SigmaTable,
    edm_sigma_table,
    explicit_sigmas,
    make_sigmas,
    sd1_sigma_table,
    sigma_table,
    zero_terminal_table,
)
from modelpool.pool.values.core.errors import UnknownName, UnusableField
from modelpool.pool.values.core.sampling_facts import NoiseFacts, NoiseKind
from tests.each_case import each_case

# diffusers hands torch tensors to numpy in a way that numpy 2 frowns upon
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

TABLE = sd1_sigma_table()
SD1 = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "num_train_timesteps": 1000}


def test_the_table_is_that_of_stable_diffusion_1() -> None:
    """The two ends are quoted all over the field; the rest is diffusers', which computes it in float32."""
    assert (round(TABLE.sigma_min, 4), round(TABLE.sigma_max, 4)) == (0.0292, 14.6146)
    signal = DDIMScheduler(**SD1).alphas_cumprod.double()
    np.testing.assert_allclose(TABLE.sigmas, ((1 - signal) / signal).sqrt(), rtol=2e-5)
    assert all(low < high for low, high in pairwise(TABLE.sigmas))


def test_a_table_to_noise_alone_is_that_of_diffusers() -> None:
    """But for the last entry, which is a number in neither: both put a small one in its place."""
    stretched = zero_terminal_table(TABLE)
    signal = EulerDiscreteScheduler(**SD1, rescale_betas_zero_snr=True).alphas_cumprod.double()
    np.testing.assert_allclose(stretched.sigmas[:-1], ((1 - signal) / signal).sqrt()[:-1], rtol=1e-4)
    assert stretched.sigma_max == pytest.approx(4518.77, abs=0.01)
    assert stretched.sigma_min == pytest.approx(TABLE.sigma_min, rel=1e-6)
    assert all(low < high for low, high in pairwise(stretched.sigmas))


def test_a_range_without_steps_is_that_of_diffusers() -> None:
    """The levels of its two schedules, and what it tells the model of them."""
    table = edm_sigma_table(0.002, 80.0, 0.5)
    for name, schedule in (("karras", "karras"), ("exponential", "exponential"), ("normal", "exponential")):
        oracle = EDMEulerScheduler(sigma_schedule=schedule)
        oracle.set_timesteps(12)
        sigmas = make_sigmas(name, 12, table)
        np.testing.assert_allclose(sigmas, oracle.sigmas, rtol=2e-5)
        assert [table.time_input(float(s)) for s in sigmas[:-1]] == pytest.approx(oracle.timesteps.tolist(), abs=1e-5)


def test_a_model_is_told_the_timestep_where_it_has_a_table() -> None:
    for table in (TABLE, zero_terminal_table(TABLE)):
        assert [table.time_input(sigma) for sigma in table.sigmas] == pytest.approx(range(1000), abs=1e-6)


TABLES = {NoiseFacts(): TABLE, NoiseFacts(NoiseKind.ZERO_TERMINAL): zero_terminal_table(TABLE)}
TABLES[NoiseFacts(NoiseKind.EDM, 0.01, 60.0, 0.25)] = edm_sigma_table(0.01, 60.0, 0.25)


@pytest.mark.parametrize(("noise", "table"), TABLES.items())
def test_each_kind_of_noise_has_its_table(noise: NoiseFacts, table: SigmaTable) -> None:
    assert sigma_table(noise) == table


@settings(deadline=None)
@given(timestep=st.floats(0, 999))
def test_sigma_and_timestep_invert_each_other(timestep: float) -> None:
    assert TABLE.timestep(TABLE.sigma(timestep)) == pytest.approx(timestep, abs=1e-9)


def test_whole_timesteps_are_the_entries_of_the_table() -> None:
    assert [TABLE.sigma(t) for t in range(1000)] == list(TABLE.sigmas)
    assert [TABLE.timestep(sigma) for sigma in TABLE.sigmas] == pytest.approx(range(1000), abs=1e-9)


@settings(deadline=None)
@given(sigma=st.floats(0.03, 14.6))
def test_timestep_is_that_of_k_diffusion(sigma: float) -> None:
    """diffusers carries k-diffusion's interpolation, `_sigma_to_t`."""
    expected = EulerDiscreteScheduler(**SD1)._sigma_to_t(np.array(sigma), np.log(np.array(TABLE.sigmas)))
    assert TABLE.timestep(sigma) == pytest.approx(float(expected), abs=1e-6)


def test_outside_the_table_both_ways_stop_at_its_ends() -> None:
    assert (TABLE.timestep(0.0), TABLE.timestep(100.0)) == (0.0, 999.0)
    assert (TABLE.sigma(-3.0), TABLE.sigma(2000.0)) == (TABLE.sigma_min, TABLE.sigma_max)


#: schedules for the levels of SD1
WITHIN = sorted(SCHEDULES.keys() - {"ays_svd"})


@settings(deadline=None)
@given(name=st.sampled_from(WITHIN), steps=st.integers(1, MAX_STEPS))
def test_every_schedule_falls_strictly_from_within_the_table_to_0(name: str, steps: int) -> None:
    sigmas = make_sigmas(name, steps, TABLE)
    assert (sigmas.dtype, sigmas.shape) == (torch.float32, (steps + 1,))
    assert bool((sigmas[:-1] > sigmas[1:]).all())
    assert sigmas[-1] == 0
    assert TABLE.sigma_min * 0.999 <= sigmas[-2] <= sigmas[0] <= TABLE.sigma_max


@each_case("name", WITHIN)
@each_case("steps", [1, MAX_STEPS])
def test_every_schedule_works_at_both_ends_of_the_range_of_steps(name: str, steps: int) -> None:
    levels = make_sigmas(name, steps, TABLE).tolist()
    assert len(levels) == steps + 1
    assert all(high > low for high, low in pairwise(levels))


@each_case("name", sorted({*WITHIN} - {"ddim_uniform"}))
@each_case("steps", [1, 2, 20])
def test_all_but_ddim_uniform_begin_at_the_top_of_the_table(name: str, steps: int) -> None:
    assert float(make_sigmas(name, steps, TABLE)[0]) == TABLE.sigma_max


@pytest.mark.parametrize(
    ("name", "steps", "timesteps"),
    [
        ("normal", 4, [999, 666, 333, 0]),
        ("normal", 1, [999]),
        ("sgm_uniform", 3, [999, 666, 333]),
        ("simple", 3, [999, 666, 333]),
        ("simple", 5, [999, 799, 599, 399, 199]),
        ("simple", 7, [999, 857, 714, 571, 428, 285, 142]),
        ("ddim_uniform", 4, [751, 501, 251, 1]),
        ("ddim_uniform", 3, [667, 334, 1]),
        ("ddim_uniform", 7, [853, 711, 569, 427, 285, 143, 1]),
    ],
)
def test_schedules_that_pick_from_the_table(name: str, steps: int, timesteps: list[int]) -> None:
    expected = [*(TABLE.sigmas[t] for t in timesteps), 0.0]
    assert make_sigmas(name, steps, TABLE).tolist() == pytest.approx(expected, rel=1e-6)


def test_karras_is_even_in_the_seventh_root_and_exponential_in_the_logarithm() -> None:
    for name, straight in (("karras", lambda s: s ** (1 / 7)), ("exponential", math.log)):
        levels = [straight(s) for s in make_sigmas(name, 12, TABLE)[:-1].tolist()]
        assert [a - b for a, b in pairwise(levels)] == pytest.approx([(levels[0] - levels[-1]) / 11] * 11, abs=1e-5)
        assert levels[-1] == pytest.approx(straight(TABLE.sigma_min), abs=1e-5)


@each_case("steps", [2, 10, 20, 28, 50])
@each_case("name", ["karras", "exponential", "normal", "ddim_uniform", "simple"])
def test_schedules_are_those_of_diffusers(name: str, steps: int) -> None:
    """Where it has them: its linear spacing interpolates sigma and not its logarithm, its trailing one rounds,
    and one step begins at the bottom of the table."""
    options: dict[str, dict[str, Any]] = {
        "karras": {"use_karras_sigmas": True},
        "exponential": {"use_exponential_sigmas": True},
        "normal": {"timestep_spacing": "linspace"},
        "ddim_uniform": {"timestep_spacing": "leading", "steps_offset": 1},
        "simple": {"timestep_spacing": "trailing"},
    }
    oracle = EulerDiscreteScheduler(**SD1, **options[name])
    oracle.set_timesteps(steps)
    tolerance = {"normal": 1e-4, "simple": 1e-2 if 1000 % steps else 2e-5}.get(name, 2e-5)
    np.testing.assert_allclose(make_sigmas(name, steps, TABLE), oracle.sigmas, rtol=tolerance)


def test_a_wrong_name_or_number_of_steps_is_refused() -> None:
    with pytest.raises(UnknownName, match="unknown schedule 'karas'; did you mean 'karras'"):
        make_sigmas("karas", 20, TABLE)
    for steps in (-1, 0, MAX_STEPS + 1):
        with pytest.raises(UnusableField, match=f"steps: found {steps}, expected 1 to {MAX_STEPS}"):
            make_sigmas("normal", steps, TABLE)


def test_gits_has_its_published_levels_and_passes_through_them_for_other_numbers_of_steps() -> None:
    ten = make_sigmas("gits", 10, TABLE).tolist()
    assert ten == pytest.approx(
        [14.61464, 5.855201, 2.84485, 1.6705, 1.088953, 0.748071, 0.501184, 0.321048, 0.198949, 0.0982453, 0.0],
        rel=1e-6,
    )
    forty = make_sigmas("gits", 40, TABLE).tolist()
    np.testing.assert_allclose(forty[:-1:2], make_sigmas("gits", 20, TABLE).tolist()[:-1], rtol=1e-5)


def test_listed_levels_are_those_of_the_run_unless_they_exceed_the_models() -> None:
    assert explicit_sigmas((14.0, 2.0, 0.5), TABLE).tolist() == [14.0, 2.0, 0.5, 0.0]
    with pytest.raises(UnusableField, match=r"sigmas: found '20', expected noise levels of the model, up to 14\.6"):
        explicit_sigmas((20.0, 1.0), TABLE)


def test_the_beta_schedule_is_at_the_quantiles_of_its_distribution_for_every_alpha_and_beta() -> None:
    """With alpha or beta 1, quantiles are powers; otherwise the share below each one is checked by integration."""
    steps, last = 12, len(TABLE.sigmas) - 1
    shares = [1.0 - step / steps for step in range(steps)]
    for shape in (0.1, 0.6, 1.0, 2.5, 10.0):
        # places that would be equal move by one each
        error = 0.6 if 0.6 <= shape <= 2.5 else steps
        for given_shape, quantiles in (
            ({"alpha": shape, "beta": 1.0}, [share ** (1.0 / shape) for share in shares]),
            ({"alpha": 1.0, "beta": shape}, [1.0 - (1.0 - share) ** (1.0 / shape) for share in shares]),
        ):
            places = [TABLE.timestep(level) for level in make_sigmas("beta", steps, TABLE, given_shape).tolist()[:-1]]
            wanted = [max(quantile * last, steps - 1 - step) for step, quantile in enumerate(quantiles)]
            assert places == pytest.approx(wanted, abs=error), given_shape
    integral = np.cumsum((np.arange(100_000) + 0.5) ** 1.5 * (100_000 - np.arange(100_000) - 0.5) ** 2.0)
    places = [
        TABLE.timestep(level) for level in make_sigmas("beta", steps, TABLE, {"alpha": 2.5, "beta": 3.0}).tolist()
    ]
    quantiles = [np.searchsorted(integral, share * integral[-1]) / 100_000 * last for share in shares[1:]]
    assert places[1:-1] == pytest.approx(quantiles, abs=0.6)


def test_the_beta_schedule_falls_strictly_for_every_alpha_and_beta() -> None:
    for alpha in (0.1, 0.6, 10.0):
        for beta in (0.1, 0.6, 10.0):
            for steps in (1, 2, 20, MAX_STEPS):
                levels = make_sigmas("beta", steps, TABLE, {"alpha": alpha, "beta": beta}).tolist()
                assert all(high > low for high, low in pairwise(levels)), (alpha, beta, steps)
