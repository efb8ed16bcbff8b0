"""Policies side by side. Proves: the best is found the right way round, and not where all are as good."""

from __future__ import annotations

from dataclasses import replace

from modelpool.scheduler.simulator.comparison import MEASURES, Spread, best, ratio, spread, spreads
from tests.simulation.test_sizing import figures_of

MEASURE = {measure.name: measure for measure in MEASURES}


def test_the_best_is_the_most_or_the_least() -> None:
    quick, slow = figures_of(10.0, 1.0, 0.0), figures_of(20.0, 9.0, 0.0)
    by_policy = {"ours": [quick], "slow": [slow], "slower": [replace(slow, makespan_seconds=50.0)]}
    for name in ("makespan", "jobs/min", "loading"):
        assert best(MEASURE[name], spreads(MEASURE[name], by_policy)) == {"ours"}


def test_all_as_good_as_each_other_have_no_best() -> None:
    one = figures_of(10.0, 1.0, 0.0)
    assert best(MEASURE["p99"], spreads(MEASURE["p99"], {"a": [one], "b": [one]})) == frozenset()


def test_two_may_share_the_lead() -> None:
    found = {"a": Spread(100.0, 90.0, 110.0), "b": Spread(100.05, 99.0, 102.0), "c": Spread(120.0, 1.0, 200.0)}
    assert best(MEASURE["p99"], found) == {"a", "b"}


def test_seeds_are_told_by_median_and_ends() -> None:
    assert spread([5.0, 1.0, 3.0]) == Spread(3.0, 1.0, 5.0)
    assert ratio(6.0, 3.0) == 2.0
    assert ratio(6.0, 0.0) is None
