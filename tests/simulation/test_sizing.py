"""How many GPUs a goal needs.

Proves: what the search finds does and one less does not, whatever does; where more is always better it is the least;
where more is worse somewhere near, that is said; a sentence names what the time went into.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelpool.pool.values.specs.spec import WorkerId
from modelpool.scheduler.simulator.metrics import Figures, GpuTime, latency
from modelpool.scheduler.simulator.sizing import Goal, bottleneck, first_estimate, least_count


def figures_of(running: float, loading: float, idle: float, last_arrival: float = 0.0) -> Figures:
    """One GPU's; ten jobs that took 1 to 10 seconds."""
    return Figures(
        jobs=10,
        succeeded=10,
        failed=0,
        cancelled=0,
        makespan_seconds=running + loading + idle,
        last_arrival_seconds=last_arrival,
        latency=latency([float(n) for n in range(1, 11)]),
        runs=10,
        runs_failed=0,
        resident_share=0.5,
        adapters_needed=0,
        adapters_loaded=0,
        patch_switches=0,
        uploaded_bytes=0,
        streamed_bytes=0,
        storage_bytes=0,
        ahead_bytes=0,
        gpus=(GpuTime(WorkerId("g"), "H100", 10, running, loading, idle),),
        users=(),
        fairness=1.0,
    )


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 300))
def test_where_more_is_better_it_is_the_least(needed: int, most: int, first: int) -> None:
    calls: list[int] = []

    def does(count: int) -> bool:
        calls.append(count)
        return count >= needed

    found = least_count(does, most, first)
    assert found.count == (needed if needed <= most else None)
    assert found.is_steady
    assert sorted(calls) == list(found.tried), "each count is tried once"
    assert all(1 <= count <= most for count in calls)
    assert len(calls) <= 2 * most.bit_length() + 4


def least_count_by_doubling(does: Callable[[int], bool], most: int, first: int) -> int | None:
    """The search of earlier versions, which doubled the count until it met the goal."""
    low, high = 0, min(first, most)
    while not does(high):
        if high == most:
            return None
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if does(middle) else (middle, high)
    return high


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 300))
def test_the_search_finds_what_doubling_found(needed: int, most: int, first: int) -> None:
    found = least_count(lambda count: count >= needed, most, first)
    assert found.count == least_count_by_doubling(lambda count: count >= needed, most, first)


def test_near_an_estimate_few_counts_are_tried() -> None:
    """Doubling tried 6, 12, 9 and 7 for the second."""
    assert list(least_count(lambda count: count >= 4, 256, 3).tried) == [2, 3, 4, 5]
    assert list(least_count(lambda count: count >= 7, 256, 6).tried) == [5, 6, 7, 8]


@given(st.sets(st.integers(1, 40)), st.integers(1, 40), st.integers(1, 40))
def test_what_is_found_does_and_one_less_does_not(good: set[int], most: int, first: int) -> None:
    found = least_count(lambda count: count in good, most, first)
    if found.count is None:
        assert most not in good
        return
    assert found.count in good
    assert found.count - 1 not in good
    assert found.count == 1 or found.tried[found.count - 1] is False
    assert found.count == most or found.count + 1 in found.tried
    assert found.tried == {count: count in good for count in found.tried}
    assert found.is_steady == all((count in good) == (count >= found.count) for count in found.tried)


def test_more_that_is_worse_is_said() -> None:
    found = least_count(lambda count: count >= 5 and count != 6, most=16)
    assert (found.count, found.is_steady) == (5, False)


def test_goals() -> None:
    found = figures_of(10.0, 5.0, 5.0)
    assert Goal(deadline_seconds=20.0).is_met(found)
    assert not Goal(deadline_seconds=19.9).is_met(found)
    assert Goal(latency_seconds=10.0).is_met(found)
    assert not Goal(20.0, 9.9).is_met(found)
    assert not Goal(20.0).is_met(dataclasses.replace(found, succeeded=9, failed=1))


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (figures_of(40.0, 0.0, 60.0, last_arrival=95.0), "arrivals: "),
        (figures_of(50.0, 40.0, 10.0), "loading: GPUs load weights for 44%"),
        (figures_of(85.0, 5.0, 10.0), "computing: GPUs are busy for 90%"),
        (figures_of(30.0, 5.0, 65.0), "the longest chain: "),
    ],
)
def test_the_bottleneck_is_named(found: Figures, said: str) -> None:
    assert bottleneck(found).startswith(said)


def test_a_first_estimate_is_never_none() -> None:
    assert first_estimate(100.0, Goal(deadline_seconds=10.0), 0.0) == 10
    assert first_estimate(100.0, Goal(latency_seconds=1.0), 50.0) == 2
    assert first_estimate(1.0, Goal(latency_seconds=1.0), 0.0) == 1
