"""The expected waits of requests that share workers with other kinds.

Proves: the rows of passes are those of a simulation and of what is known at the ends; the wait of one kind in single
runs is that of the known queue; a wait explains the rows that cause it; more of anything never shortens a wait.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf, log
from random import Random

import pytest

from modelpool.scheduler.decisions.queue.mixed_load import LoadOfKind, MixedLoad, mean_open_rows


def test_the_rows_of_passes_that_fill_one_after_the_other() -> None:
    """Against requests at random times that each run for a second in the first pass with a free row."""
    for in_flight, rows in ((0.5, 4), (3.0, 4), (6.0, 8), (20.0, 8)):
        rng, at, passes_seconds, rows_seconds = Random(3), 0.0, 0.0, 0.0
        ends: list[float] = []
        for _ in range(40_000):
            following = at + rng.expovariate(in_flight)
            while ends and ends[0] <= following:
                since, at = ends[0] - at, heappop(ends)
                rows_seconds += since * (len(ends) + 1)
                passes_seconds += since * -(-(len(ends) + 1) // rows)
            rows_seconds += (following - at) * len(ends)
            passes_seconds += (following - at) * -(-len(ends) // rows)
            at = following
            heappush(ends, at + 1.0)
        assert mean_open_rows(in_flight, rows) == pytest.approx(rows_seconds / passes_seconds, rel=0.03)
    assert mean_open_rows(1e-6, 8) == pytest.approx(1.0, rel=1e-3)
    assert mean_open_rows(599.0, 8) == pytest.approx(mean_open_rows(601.0, 8), rel=1e-3)
    assert mean_open_rows(5.0, 1) == 1.0


def single(per_second: float, seconds: float) -> LoadOfKind:
    return LoadOfKind(per_second, 1, seconds, seconds**2, 1.0)


def shared(per_second: float, rows: int, seconds: float) -> LoadOfKind:
    return LoadOfKind(per_second, rows, seconds, seconds**2, mean_open_rows(per_second * seconds, rows))


def test_single_runs_wait_as_in_the_known_queue() -> None:
    """One server at half load. In two parts it is the same queue."""
    expected = 1.0 * log(0.5 / 0.01)
    assert MixedLoad([single(0.5, 1.0)], 1).tail_wait_seconds(0.01) == pytest.approx(expected)
    assert MixedLoad([single(0.2, 1.0), single(0.3, 1.0)], 1).tail_wait_seconds(0.01) == pytest.approx(expected)
    assert MixedLoad([single(0.01, 0.1)], 8).tail_wait_seconds(0.01) == 0.0, "nobody waits"
    assert MixedLoad([single(1.0, 1.0)], 1).tail_wait_seconds(0.01) == inf
    many = [single(0.05, 1.0) for _ in range(12)]
    assert MixedLoad(many, 1).tail_wait_seconds(0.01) == pytest.approx(
        MixedLoad(many[:1] * 12, 1).tail_wait_seconds(0.01)
    )


def test_full_passes_serve_what_half_empty_ones_cannot() -> None:
    """At the rate of three of eight rows, a pass and its free rows take the GPU whole; who waits fills them."""
    load = MixedLoad([shared(0.75, 8, 4.0), single(0.5, 1.0)], 1)
    assert load.least_busy == pytest.approx(0.75 / 8 * 4.0 + 0.5)
    wait = load.tail_wait_seconds(0.01)
    assert 4.0 < wait < inf
    assert MixedLoad([shared(0.75, 8, 4.0), single(0.65, 1.0)], 1).tail_wait_seconds(0.01) == inf


def test_more_work_never_waits_less_and_more_workers_never_longer() -> None:
    rng = Random(11)
    failures: list[tuple[list[LoadOfKind], int, float, float]] = []
    for _ in range(200):
        kinds = [
            single(rng.uniform(0.01, 0.4), rng.uniform(0.1, 3.0))
            if rng.random() < 0.5
            else shared(rng.uniform(0.01, 1.0), rng.choice((2, 4, 8)), rng.uniform(0.5, 10.0))
            for _ in range(rng.randint(1, 5))
        ]
        workers = rng.choice((1, 2, 4, 16))
        wait = MixedLoad(kinds, workers).tail_wait_seconds(0.01)
        with_more = MixedLoad([*kinds, single(0.1, 1.0)], workers).tail_wait_seconds(0.01)
        with_a_worker = MixedLoad(kinds, workers + 1).tail_wait_seconds(0.01)
        if not with_a_worker <= wait * 1.01 + 0.01:
            failures.append((kinds, workers, wait, with_a_worker))
        if wait < inf and not with_more >= wait * 0.75 - 0.01:  # short runs lower the variation
            failures.append((kinds, workers, wait, with_more))
    assert not failures, failures[:2]


def test_many_workers_are_scaled_down() -> None:
    few, many = (MixedLoad([single(0.9 * count, 1.0)], count).tail_wait_seconds(0.01) for count in (64, 6400))
    assert many == pytest.approx(few / 100, rel=0.01)
