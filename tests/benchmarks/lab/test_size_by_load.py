"""The rule that chooses the size of passes by the load.

Proves: the expected tail is that of the queues for which a formula is known, and infinite without enough servers; few
requests run alone and many in passes, whatever came before; near equality the size does not change.
"""

from __future__ import annotations

from math import exp, inf, log

import pytest

from benchmarks.lab.size_by_load import LEAST_ARRIVALS, WINDOW, SizeByLoad, tail_seconds

ROWS, GAIN = 8, 2.0


def seconds(steps: int, rows: int) -> float:
    return steps * (rows / GAIN if rows > 1 else 1.0)


def test_the_tail_is_that_of_known_queues() -> None:
    """One server at half load: as long as it waits at all, the run is followed by an exponential wait."""
    rate, run = 0.5, 1.0
    scale = run / 2 / (1 - rate * run)
    found = tail_seconds(rate, {run: 1}, 1)
    assert 0.5 * exp(-(found - run) / scale) == pytest.approx(0.01, rel=0.02)
    assert found == pytest.approx(run + scale * log(0.5 / 0.01), rel=0.01)
    assert tail_seconds(1e-6, {1.0: 97, 5.0: 3}, 4) == pytest.approx(5.0, rel=0.01), "nobody waits"
    assert tail_seconds(2.0, {1.0: 1}, 1) == inf
    longer = [tail_seconds(rate, {1.0: 1}, 2) for rate in (0.5, 1.0, 1.5, 1.9)]
    assert longer == sorted(longer)


def test_few_requests_run_alone_and_many_in_passes() -> None:
    """Single runs of one second: one GPU makes one of them in a second, or two in passes of eight."""
    rule, now = SizeByLoad(ROWS, 1, seconds), 0.0
    for apart, expected in ((4.0, 1), (0.6, ROWS), (4.0, 1), (0.4, ROWS)):
        sizes = []
        for _ in range(WINDOW + LEAST_ARRIVALS):
            now += apart
            sizes.append(rule.size_for(now, 1))
        assert sizes[-1] == expected, apart
        assert sizes == sorted(sizes, key=lambda size: size == expected), "one change"
