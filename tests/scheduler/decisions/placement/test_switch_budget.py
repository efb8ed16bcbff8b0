"""The account of loads for who waited long: what fills it, what empties it, and how patient it makes."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelpool.scheduler.decisions.placement.switch_budget import SwitchBudget
from tests.scheduler.world import DRAW, PAINT, Shell, alone, sample


def account_at(seconds: float, workers: int = 2, idle: int = 0, share: float = 0.25) -> SwitchBudget:
    """An account after so long, with so many workers up and idle all the time."""
    account = SwitchBudget(share)
    account.pass_time(seconds, workers, idle)
    return account


def test_a_share_of_all_time_fills_it_and_all_time_that_is_idle() -> None:
    assert account_at(4.0).seconds == 2.0
    assert account_at(4.0, idle=1).seconds == 6.0


def test_time_is_counted_once() -> None:
    account = account_at(4.0)
    account.pass_time(4.0, 2, 0)
    account.pass_time(8.0, 2, 0)
    assert account.seconds == 4.0


def test_a_calm_hour_fills_it_with_ten_seconds_of_every_worker() -> None:
    assert account_at(3600.0, workers=3, idle=3).seconds == 30.0


def test_without_a_share_nothing_fills_it_and_nobody_is_served_so() -> None:
    account = account_at(3600.0, idle=2, share=0.0)
    assert (account.seconds, account.wait_factor) == (0.0, inf)


def test_loads_empty_it_and_the_last_may_overdraw_it() -> None:
    account = account_at(4.0)
    account.spend(1.5)
    assert account.allowed_seconds(4.0) == 0.5
    account.spend(1.5)
    assert account.allowed_seconds(4.0) == -1.0


@pytest.mark.parametrize(("spent", "expected"), [(0.0, 1.0), (10.0, 2.5), (20.0, 4.0), (25.0, 4.0)])
def test_the_fuller_it_is_the_shorter_is_the_wait_before_a_load(spent: float, expected: float) -> None:
    """Full, a load is served when its task waited for as long as it takes; empty or overdrawn, for that over the
    share."""
    account = account_at(3600.0)
    account.spend(spent)
    assert account.wait_factor == pytest.approx(expected)


def test_where_nobody_had_waited_long_it_is_looked_again_a_moment_later() -> None:
    account = account_at(4.0)
    account.nothing_due(4.0)
    assert account.allowed_seconds(4.1) == 0.0
    assert account.allowed_seconds(5.0) == account.seconds > 0.0


@given(st.lists(st.tuples(st.floats(0.0, 100.0), st.integers(0, 8), st.floats(0.0, 50.0)), max_size=30))
def test_loads_take_no_more_than_the_share_and_idle_time(steps) -> None:
    """Whatever happens, when only the allowance is spent, but for the last load."""
    share, at, earned, spent, largest = 0.1, 0.0, 0.0, 0.0, 0.0
    account = SwitchBudget(share)
    for seconds, idle, load_seconds in steps:
        at += seconds
        account.pass_time(at, 8, idle)
        earned += seconds * (8 * share + idle)
        if account.allowed_seconds(at) > 0.0:
            account.spend(load_seconds)
            spent, largest = spent + load_seconds, max(largest, load_seconds)
    assert spent <= earned + largest + 1e-6


def test_the_core_looks_for_who_waited_long_once_in_a_while() -> None:
    """1. A worker has one model and runs it. 2. Tasks for both models wait, none of them for long. 3. The run ends,
    the resident one starts, and the core does not look again for a moment."""
    shell = Shell()
    shell.workers(a=18)
    shell.submit(alone("first", sample(model=PAINT, seed=1)))
    shell.submit(alone("other", sample(model=DRAW)))
    shell.submit(alone("second", sample(model=PAINT, seed=2)))
    shell.finish("a")
    assert shell.on("a") == sample(model=PAINT, seed=2).task_id
    switch_budget = shell.state.starts.switch_budget
    assert switch_budget.seconds > 0.0
    assert switch_budget.allowed_seconds(shell.at) == 0.0


def test_the_core_pays_for_a_load_that_serves_who_waited() -> None:
    """The load of the other model takes 10 B over 4 B/s, and the resident one would have taken none."""
    shell = Shell()
    shell.workers(a=18)
    shell.submit(alone("first", sample(model=PAINT, seed=1)))
    shell.submit(alone("other", sample(model=DRAW)))
    shell.submit(alone("second", sample(model=PAINT, seed=2)))
    shell.at += 200.0
    switch_budget = shell.state.starts.switch_budget
    shell.finish("a")
    assert shell.on("a") == sample(model=DRAW).task_id
    assert switch_budget.seconds == pytest.approx(10.0 - 2.5), "it was full"
