"""How soon components are needed again: by hand, and that its memory is bounded."""

from __future__ import annotations

from math import exp

import pytest

from modelpool.pool.values.specs.spec import ComponentKey
from modelpool.scheduler.decisions.costs import demand_rates
from modelpool.scheduler.decisions.costs.demand_rates import REMEMBERED, DemandRates

A, B = ComponentKey("a"), ComponentKey("b")


def test_the_rate_is_that_of_the_times_without_demand() -> None:
    """Two tasks overlap, so there is no time without demand between them; then 4 s without, then 8 s so far."""
    rates = DemandRates()
    rates.arrived((A,), 0.0)
    rates.arrived((A, B), 1.0)
    rates.ended((A,), 2.0)
    rates.ended((A, B), 6.0)
    rates.arrived((A,), 10.0)
    assert rates.per_second(A, 10.0) == pytest.approx(2 / 4.0), "the current one counts as one that ends now"
    rates.ended((A,), 12.0)
    assert rates.per_second(A, 20.0) == pytest.approx(2 / 12.0)
    assert rates.needed_within(A, 6.0, 20.0) == pytest.approx(1.0 - exp(-1.0))
    assert rates.needed_within(A, 0.0, 20.0) == 0.0


def test_what_nothing_needs_any_more_loses_its_rate() -> None:
    rates = DemandRates()
    for at in range(5):
        rates.arrived((A,), float(at))
        rates.ended((A,), at + 0.5)
    soon, late = rates.needed_within(A, 1.0, 5.0), rates.needed_within(A, 1.0, 500.0)
    assert soon > 0.8
    assert late < 0.02
    assert rates.per_second(B, 5.0) == 0.0, "nothing ever needed it"


def test_only_the_latest_times_count() -> None:
    rates = DemandRates()
    at = 0.0
    for gap_seconds in [100.0] * 20 + [1.0] * REMEMBERED:
        rates.arrived((A,), at)
        rates.ended((A,), at)
        at += gap_seconds
    rates.arrived((A,), at)
    assert rates.per_second(A, at) == pytest.approx((REMEMBERED + 1) / REMEMBERED)


def test_components_without_demand_are_forgotten_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demand_rates, "MOST_COMPONENTS", 2)
    rates = DemandRates()
    keys = [ComponentKey(str(number)) for number in range(4)]
    for at, key in enumerate(keys):
        rates.arrived((key,), float(at))
        rates.ended((key,), float(at))
    assert [rates.per_second(key, 9.0) > 0.0 for key in keys] == [False, False, True, True]
