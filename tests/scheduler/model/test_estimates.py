"""One wrong measurement moves an estimate little; a change that lasts is learnt within five."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelpool.scheduler.model.estimates import MOST_APART, REMEMBERED, Estimate
from tests.each_case import each_case


def after(*measured: float) -> float:
    estimate = Estimate()
    for one in measured:
        estimate.add(one)
    assert estimate.value is not None
    return estimate.value


def test_nothing_is_known_before_the_first_measurement() -> None:
    assert Estimate().value is None
    assert after(3.0) == 3.0


@each_case("factor", [100.0, 0.01])
@each_case("others", range(2, 12))
def test_one_outlier_moves_it_little_wherever_it_comes(factor: float, others: int) -> None:
    for place in range(others + 1):
        measured = [1.0 + 0.01 * (n % 3) for n in range(others)]
        measured.insert(place, factor)
        assert 1.0 <= after(*measured) <= 1.02


def test_a_slow_first_run_is_half_forgotten_at_the_second() -> None:
    assert after(100.0, 1.0) == pytest.approx((1.0 + MOST_APART) / 2)
    assert after(100.0, 1.0, 1.0) == 1.0


@pytest.mark.parametrize("runs_before", [3, 7, 100])
def test_a_change_that_lasts_is_learnt_within_five_runs(runs_before: int) -> None:
    assert after(*[1.0] * runs_before, *[2.0] * 5) == 2.0


@given(st.lists(st.floats(0.001, 1000.0), min_size=1, max_size=40))
def test_it_is_the_median_of_the_last_ones(measured: list[float]) -> None:
    """Of an even number that differ much, less than that, and no less than the smaller of the middle two."""
    last = sorted(measured[-REMEMBERED:])
    found = after(*measured)
    assert found <= statistics.median(last)
    assert found >= statistics.median_low(last)
    assert found == statistics.median(last) or len(last) % 2 == 0
