"""The rule that chooses the size of passes by the load.

Proves: the expected tail is the tail of the queues for which a formula is known, and infinite without enough servers;
few requests run alone and many in passes, whatever came before; near equality the size seldom changes; a burst and its
end are noticed after some arrivals; other work counts, and only kinds that fill larger passes have them beside it; its
memory has a bound.
"""

from __future__ import annotations

from math import exp, inf, log
from random import Random

import pytest

from modelpool.scheduler.decisions.queue.size_by_load import (
    LEAST_ARRIVALS,
    MOST_KINDS,
    WINDOW,
    SizeByLoad,
    SizeCosts,
    arrival_rate,
    tail_seconds,
)

ROWS = 8
#: single runs of one second: a GPU makes one of them in a second, or two in passes of eight
COSTS = SizeCosts(ROWS, 1.0, 4.0)


def sizes_of(rule: SizeByLoad, times: list[float], kind: str = "a", workers: int = 1) -> list[int]:
    return [rule.choose(kind, at, workers, COSTS).size for at in times]


def every(apart: float, count: int, begin: float = 0.0) -> list[float]:
    return [begin + apart * (1 + number) for number in range(count)]


def test_the_tail_is_that_of_known_queues() -> None:
    """One server at half load: as long as it waits at all, the run is followed by an exponential wait."""
    rate, run = 0.5, 1.0
    scale = run / 2 / (1 - rate * run)
    found = tail_seconds(rate, {run: 1}, 1)
    assert 0.5 * exp(-(found - run) / scale) == pytest.approx(0.01, rel=0.02)
    assert found == pytest.approx(run + scale * log(0.5 / 0.01), rel=0.01)
    assert tail_seconds(1e-6, {1.0: 97, 5.0: 3}, 4) == pytest.approx(5.0, rel=0.01), "nobody waits"
    assert tail_seconds(2.0, {1.0: 1}, 1) == inf
    assert tail_seconds(0.9e4, {1.0: 1}, 10_000) < inf, "more servers than are computed with"
    longer = [tail_seconds(rate, {1.0: 1}, 2) for rate in (0.5, 1.0, 1.5, 1.9)]
    assert longer == sorted(longer)


def test_few_requests_run_alone_and_many_in_passes() -> None:
    rule, now = SizeByLoad(), 0.0
    for apart, expected in ((4.0, 1), (0.6, ROWS), (4.0, 1), (0.4, ROWS)):
        sizes = sizes_of(rule, every(apart, WINDOW + LEAST_ARRIVALS, now))
        now += apart * len(sizes)
        assert sizes[-1] == expected, apart
        assert sizes == sorted(sizes, key=lambda size: size == expected), "one change"


def test_a_burst_and_its_end_are_noticed_before_the_window_is_full_of_it() -> None:
    """After an hour of silence, too, which the mean rate would count for 200 arrivals."""
    rule = SizeByLoad()
    sizes_of(rule, every(10.0, WINDOW))
    burst = sizes_of(rule, every(0.4, 60, 10.0 * WINDOW + 3600.0))
    assert burst.index(ROWS) < 25
    after = sizes_of(rule, every(10.0, 60, 10.0 * WINDOW + 3600.0 + 24.0))
    assert after.index(1) < 25
    assert sizes_of(SizeByLoad(), every(0.01, 20))[LEAST_ARRIVALS + 1] == ROWS, "a burst into a pool that knows nothing"


def test_the_rate_of_even_arrivals_is_their_mean() -> None:
    """What looks like a change by chance alone moves it little."""
    rng, at, times, found = Random(5), 0.0, list[float](), []
    for _ in range(3000):
        at += rng.expovariate(2.0)
        times.append(at)
        found.append(arrival_rate(times[-WINDOW:], at))
    assert all(1.4 < rate < 2.9 for rate in found[WINDOW:])
    assert sum(found[WINDOW:]) / len(found[WINDOW:]) == pytest.approx(2.0, rel=0.05)
    assert arrival_rate([1.0, 1.0, 1.0], 1.0) == 0.0


def test_other_work_takes_its_share_of_the_workers() -> None:
    """Requests for which one GPU would do in single passes, beside others that leave it too little time."""
    times = every(3.0, WINDOW)
    assert sizes_of(SizeByLoad(), times)[-1] == 1
    for other_seconds, workers, expected in ((2.6, 1, ROWS), (1.0, 1, 1), (2.6, 4, 1)):
        rule = SizeByLoad()
        for at in times:
            rule.note_other(at, other_seconds)
            last = rule.choose("a", at, workers, COSTS)
        assert last.size == expected, (other_seconds, workers)


def test_of_two_kinds_the_one_has_larger_passes_that_fills_them() -> None:
    """Many images of one model, and few of another that gains little from larger passes. Single passes of both take
    more than the time of one GPU. Before: each kind saw the other take its time, so that both had larger passes, and
    those of the second were nearly empty and took longer than all its single ones."""
    rng, rule = Random(8), SizeByLoad()
    many, few = SizeCosts(8, 1.0, 4.0), SizeCosts(4, 15.0, 46.0)
    arrivals = sorted(
        (rng.uniform(0.0, 2000.0), kind, costs, 0)
        for kind, costs, count in (("many", many, 1400), ("few", few, 60))
        for _ in range(count)
    )
    sizes: dict[str, list[int]] = {"many": [], "few": []}
    for at, kind, costs, _ in arrivals:
        sizes[kind].append(rule.choose(kind, at, 1, costs).size)
    assert sizes["many"].count(8) > 1000
    assert set(sizes["few"]) == {1}


def test_near_equality_the_size_changes_once_a_queue_of_single_passes_is_long() -> None:
    """With slightly more or fewer requests than 16 workers can serve in single passes. Before: such loads changed the
    size from the first hundreds of requests on, since the queue of a load that lasts for ever is endless."""
    for rate, most in ((15.0, 0), (16.3, 13), (18.0, 1)):
        for seed in range(3):
            rule, rng, times = SizeByLoad(), Random(seed), [0.0]
            while len(times) < 4000:
                times.append(times[-1] + rng.expovariate(rate))
            sizes = sizes_of(rule, times, workers=16)
            changed = [place for place in range(1, len(sizes)) if sizes[place] != sizes[place - 1]]
            assert len(changed) <= most, (rate, seed)
            assert sizes[-1] == ROWS or rate < 18, (rate, seed)
            assert all(place > 400 for place in changed[:1]) or rate == 18.0, (rate, seed)


def test_a_long_overload_is_forgotten_soon() -> None:
    """An hour with twice as many requests as single passes can serve would have left a queue of an hour of them."""
    rule = SizeByLoad()
    assert sizes_of(rule, every(0.5, 7200))[-1] == ROWS
    assert sizes_of(rule, every(10.0, 25, 3600.0))[-1] == 1


def test_the_reason_has_both_expectations() -> None:
    rule = SizeByLoad()
    assert "too few requests" in rule.choose("a", 0.0, 1, COSTS).reason
    for at in every(0.8, WINDOW):
        choice = rule.choose("a", at, 1, COSTS)
    assert choice.reason.startswith("by the load: 1.19 requests like it per second")
    assert "should take 57.2 s in passes of one, and 5.39 s in shared ones" in choice.reason


def test_what_is_remembered_has_a_bound() -> None:
    rule = SizeByLoad()
    for number in range(3 * MOST_KINDS):
        rule.choose(number, float(number), 1, COSTS)
    assert len(rule._kinds) == MOST_KINDS
